//! Stand-in for the load generator, so that the command line can be built.

use std::io::Write;

/// What can be asked.
#[derive(Debug, clap::Args)]
pub struct Options {}

/// Measures nothing.
pub async fn run(_: Options, _: &mut dyn Write) -> anyhow::Result<()> {
    anyhow::bail!("the load generator is not part of this build")
}
