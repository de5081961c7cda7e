//! What the tests start and stop: the built binary, a real Envoy, an upstream. Everything listens on free loopback
//! ports and goes away with the value that stands for it, also when a test panics.

#![allow(dead_code, reason = "each test takes what it needs")]

pub mod envoy;
pub mod http;
pub mod process;
pub mod rls;
pub mod slidegate;
pub mod upstream;

use std::{
    net::TcpListener,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

/// Below the range from which Linux takes the ports of outgoing connections: of those, a client could get one between
/// our look and the start of the server.
const PORTS: std::ops::Range<u32> = 12_000..32_000;

/// A port that nobody listens on, and that no other call of this process gets.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let len = PORTS.end - PORTS.start;
    // By a prime, so that test processes of neighbouring ids start far apart.
    let start = std::process::id().wrapping_mul(7_919) % len;
    (0..len)
        .map(|_| (PORTS.start + (start + NEXT.fetch_add(1, Relaxed)) % len) as u16)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("a free port")
}

/// Waits until `done`; panics with `what` if that takes too long even for a crowded machine.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "{what} did not happen"
        );
        thread::sleep(Duration::from_millis(20));
    }
}
