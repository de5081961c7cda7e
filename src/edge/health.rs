//! Whether this instance should get traffic: one answer for `/healthcheck` and for gRPC health checks.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use tonic_health::{
    ServingStatus,
    pb::health_server::{Health as HealthCalls, HealthServer},
    server::HealthReporter,
};

use super::grpc;
use crate::rules::reload::Rules;

/// The name by which the reference's clients ask.
const REFERENCE_SERVICE: &str = "ratelimit";

/// The health of this process; clones share it.
#[derive(Clone, Debug)]
pub struct Health {
    draining: Arc<AtomicBool>,
    rules: Rules,
    needs_domain: bool,
    reporter: HealthReporter,
}

// === impl Health ===

impl Health {
    /// Healthy from the start, unless `needs_domain` is set and no rules are in force. The second part answers
    /// gRPC health checks.
    pub fn new(rules: Rules, needs_domain: bool) -> (Self, HealthServer<impl HealthCalls>) {
        let (reporter, service) = tonic_health::server::health_reporter();
        let health = Self {
            draining: Arc::default(),
            rules,
            needs_domain,
            reporter,
        };
        (health, service)
    }

    /// Whether to send traffic here.
    pub fn is_healthy(&self) -> bool {
        !self.draining.load(SeqCst) && (!self.needs_domain || self.has_domain())
    }

    /// Unhealthy from now on.
    pub async fn drain(&self) {
        self.draining.store(true, SeqCst);
        self.report().await;
    }

    /// Tells the watchers of gRPC health; to be called when the rules changed.
    pub async fn report(&self) {
        let status = if self.is_healthy() {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        for service in ["", REFERENCE_SERVICE, grpc::SERVICE] {
            self.reporter.set_service_status(service, status).await;
        }
    }

    fn has_domain(&self) -> bool {
        let rules = self.rules.current();
        rules
            .as_deref()
            .is_some_and(|rules| rules.domains().next().is_some())
    }
}
