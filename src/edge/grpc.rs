//! The gRPC port: `RateLimitService`, health and reflection behind one service, routed by path. Connections are
//! [`connection`](super::connection)'s, the meaning of messages is [`answer`](super::answer)'s.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use http::{HeaderValue, Request as HttpRequest, Response as HttpResponse};
use hyper::body::Incoming;
use tonic::{Code, Request, Response, Status, body::Body, service::Routes};
use tower_service::Service;

use super::answer::{Answerer, Failure};
use crate::{
    metrics::Metrics,
    store::Store,
    wire::{
        DESCRIPTORS, RateLimitRequest, RateLimitResponse,
        rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
    },
};

/// The service's name as health checks and reflection know it.
pub const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";

/// Where its one call is found.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// How prost's error begins, as it stands in the header.
const UNREADABLE: &[u8] = b"failed%20to%20decode";

/// The whole port: one for every connection, cheap to clone.
#[derive(Debug)]
pub struct Port<S> {
    rate_limit: RateLimitServiceServer<Calls<S>>,
    others: Routes,
    metrics: Arc<Metrics>,
}

/// The rate-limit calls.
#[derive(Debug)]
struct Calls<S>(Arc<Answerer<S>>);

/// The reflection service could not be built from the descriptor set.
#[derive(Debug, thiserror::Error)]
#[error("the descriptor set of the service is broken: {0}")]
pub struct BrokenDescriptors(#[from] tonic_reflection::server::Error);

// === impl Port ===

impl<S: Store> Port<S> {
    /// Serves `answerer` and `health`; messages are at most `max_message` bytes long.
    pub fn new(
        answerer: Arc<Answerer<S>>,
        health: impl Service<
            HttpRequest<Body>,
            Response = HttpResponse<Body>,
            Error = Infallible,
            Future: Send + 'static,
        > + tonic::server::NamedService
        + Clone
        + Send
        + Sync
        + 'static,
        max_message: usize,
    ) -> Result<Self, BrokenDescriptors> {
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        Ok(Self {
            metrics: Arc::clone(answerer.limiter().metrics()),
            rate_limit: RateLimitServiceServer::new(Calls(answerer))
                .max_decoding_message_size(max_message),
            others: Routes::new(health)
                .add_service(reflection().build_v1()?)
                .add_service(reflection().build_v1alpha()?)
                .prepare(),
        })
    }
}

impl<S> Clone for Port<S> {
    fn clone(&self) -> Self {
        Self {
            rate_limit: self.rate_limit.clone(),
            others: self.others.clone(),
            metrics: Arc::clone(&self.metrics),
        }
    }
}

impl<S: Store> Service<HttpRequest<Incoming>> for Port<S> {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Incoming>) -> Self::Future {
        if request.uri().path() != SHOULD_RATE_LIMIT {
            return Box::pin(self.others.call(request.map(Body::new)));
        }
        let call = self.rate_limit.call(request);
        let metrics = Arc::clone(&self.metrics);
        Box::pin(async move {
            let mut response = call.await?;
            soften(&mut response, &metrics);
            Ok(response)
        })
    }
}

/// tonic answers a message that is too long, or none, with its own status. Envoy takes some of those for a broken
/// host (UNAVAILABLE) or for a client's fault; every error of this service is UNKNOWN, as in the reference.
fn soften(response: &mut HttpResponse<Body>, metrics: &Metrics) {
    let status = response.headers().get(Status::GRPC_STATUS);
    let Some(code) = status.map(|status| Code::from_bytes(status.as_bytes())) else {
        return;
    };
    if matches!(
        code,
        Code::Ok | Code::Unknown | Code::Unimplemented | Code::Cancelled
    ) {
        return;
    }
    let message = response.headers().get(Status::GRPC_MESSAGE);
    let is_unreadable = message.is_some_and(|text| text.as_bytes().starts_with(UNREADABLE));
    if code == Code::OutOfRange {
        metrics.over_bound.add(1);
        super::sampled_warning(|| "a message is longer than MAX_MESSAGE_BYTES".to_owned());
    } else if is_unreadable {
        metrics.service_errors.add(1);
        super::sampled_warning(|| "a message is no RateLimitRequest".to_owned());
    } else {
        // The client went away while it sent the message: nobody reads this answer.
        tracing::debug!(%code, "a call ended before its message did");
    }
    response
        .headers_mut()
        .insert(Status::GRPC_STATUS, HeaderValue::from_static("2"));
}

// === impl Calls ===

#[tonic::async_trait]
impl<S: Store> RateLimitService for Calls<S> {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let arrived = Instant::now();
        let answer = self.0.answer(request.get_ref(), arrived).await;
        self.0.limiter().metrics().call(arrived.elapsed());
        answer.map(Response::new).map_err(Status::from)
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        Self::unknown(failure.to_string())
    }
}
