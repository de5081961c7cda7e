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
    thread,
    time::{Duration, Instant},
};

/// A port that nobody listens on.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
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
