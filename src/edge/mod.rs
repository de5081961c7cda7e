//! The edge: what Envoy and operators speak to. Bytes off the wire become the words of
//! [`descriptor`](crate::descriptor) here, and nothing below this room knows the wire.
//!
//! [`listener`] opens sockets; [`connection`] serves HTTP/2 on them, from the first byte to the last goodbye;
//! [`authority`] makes every client's `:authority` one that the HTTP library accepts. [`grpc`] is the port that
//! Envoy calls, [`http`] the ports for everybody else, with [`json`], on the connections of [`http1`]; both have their messages answered by
//! [`answer`]. [`health`] says whether this instance should get traffic.

pub mod answer;
pub mod authority;
pub mod connection;
pub mod grpc;
pub mod health;
pub mod http;
pub mod http1;
pub mod json;
pub mod listener;
mod metadata;

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Bad requests can come as fast as good ones: of their log lines one goes out per this time.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(1);

/// Logs a warning about a request, at most one per second for all of them together. The line says how many were
/// kept back since the last one.
fn sampled_warning(text: impl FnOnce() -> String) {
    static LAST: AtomicU64 = AtomicU64::new(0);
    static KEPT_BACK: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let now = now.as_millis() as u64;
    let last = LAST.load(Relaxed);
    let is_due = now.abs_diff(last) >= BETWEEN_WARNINGS.as_millis() as u64;
    if is_due && LAST.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
        let kept_back = KEPT_BACK.swap(0, Relaxed);
        tracing::warn!(kept_back, "refused a request: {}", text());
    } else {
        KEPT_BACK.fetch_add(1, Relaxed);
    }
}
