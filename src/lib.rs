//! Slidegate: an exact sliding-window rate-limit service for Envoy.
//!
//! # Reading order
//!
//! [`descriptor`], [`limit`] and [`key`] are the words; [`rules`] says what limit a descriptor meets; [`store`]
//! keeps the logs; [`limiter`] decides a request from both; [`edge`] speaks to Envoy and to operators; [`server`]
//! puts it all together from [`settings`], which [`cli`] read.
//!
//! # Layers
//!
//! Calls go one way: `main → cli → settings → server → edge → limiter → {rules, store}`. Rules and store do not
//! know each other. [`clock`], [`descriptor`], [`key`], [`limit`] and [`metrics`] are leaves.

pub mod bench;
pub mod cli;
pub mod clock;
pub mod descriptor;
pub mod edge;
pub mod key;
pub mod limit;
pub mod limiter;
pub mod metrics;
pub mod rules;
pub mod server;
pub mod settings;
pub mod store;

/// The protobuf types of the wire, compiled from `proto/` by its `build.rs`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod wire {
    include!(concat!(env!("OUT_DIR"), "/wire.rs"));

    pub use envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse, rate_limit_response, rate_limit_service_server,
        },
    };

    /// The descriptor set of the service, as the public interface has it (text fields are `string`).
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rls.fds.bin"));
}
