//! A small HTTP client: whatever the status, it is an answer.

use std::time::Duration;

use ureq::{
    Agent,
    http::{HeaderMap, Request},
};

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: String,
}

impl Reply {
    /// A header's text; empty if it is not there.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().expect("text"))
    }
}

/// Asks by GET.
pub fn get(url: &str) -> Reply {
    get_with(url, &[])
}

/// Asks with headers of any bytes.
pub fn get_with(url: &str, headers: &[(&str, &[u8])]) -> Reply {
    try_send("GET", url, headers, "").unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// `None` if nobody answers.
pub fn try_get(url: &str) -> Option<Reply> {
    try_send("GET", url, &[], "").ok()
}

/// Sends a body.
pub fn send(method: &str, url: &str, body: &str) -> Reply {
    try_send(method, url, &[], body).unwrap_or_else(|error| panic!("{url}: {error}"))
}

fn try_send(
    method: &str,
    url: &str,
    headers: &[(&str, &[u8])],
    body: &str,
) -> Result<Reply, ureq::Error> {
    let agent: Agent = Agent::config_builder()
        .http_status_as_error(false)
        .allow_non_standard_methods(true)
        .timeout_global(Some(Duration::from_secs(20)))
        .build()
        .into();
    let mut request = Request::builder().method(method).uri(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut response = if body.is_empty() {
        agent.run(request.body(())?)?
    } else {
        agent.run(request.body(body)?)?
    };
    Ok(Reply {
        status: response.status().as_u16(),
        headers: response.headers().clone(),
        body: response.body_mut().read_to_string()?,
    })
}
