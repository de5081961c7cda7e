//! Stand-in for the composition root, so that the command line can be built.

use anyhow::Context;

use crate::settings::{Address, Host, Settings};

/// Opens the HTTP port and closes it again.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    let Address { host, port } = &settings.listeners.http;
    let host = match host {
        Host::All => "::".into(),
        Host::Ip(address) => address.to_string(),
        Host::Name(name) => name.to_string(),
    };
    tokio::net::TcpListener::bind((host, *port))
        .await
        .with_context(|| format!("can't listen on {}", settings.listeners.http))?;
    Ok(())
}
