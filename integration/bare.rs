//! The limit of the stack: a tonic service that decodes each request and answers one message that was built before, of
//! the size of Slidegate's. `make bench` measures Slidegate beside it. Same build profile, allocator and number of
//! worker threads (`WORKER_THREADS`).

use tikv_jemallocator::Jemalloc;
use tonic::{Request, Response, Status, transport::Server};

use slidegate::wire::{
    RateLimitRequest, RateLimitResponse,
    rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit},
    rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
};

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

struct Bare(RateLimitResponse);

#[tonic::async_trait]
impl RateLimitService for Bare {
    async fn should_rate_limit(
        &self,
        _: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        Ok(Response::new(self.0.clone()))
    }
}

#[allow(clippy::disallowed_methods, reason = "an example's own setting")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port: u16 = std::env::args().nth(1).ok_or("usage: bare PORT")?.parse()?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if let Ok(threads) = std::env::var("WORKER_THREADS") {
        runtime.worker_threads(threads.parse()?);
    }
    let status = DescriptorStatus {
        code: Code::Ok.into(),
        current_limit: Some(RateLimit {
            requests_per_unit: 4_000_000_000,
            unit: Unit::Hour.into(),
            ..RateLimit::default()
        }),
        limit_remaining: 3_999_999_999,
        duration_until_reset: Some(prost_types::Duration {
            seconds: 3_600,
            nanos: 0,
        }),
        quota: None,
    };
    let answer = RateLimitResponse {
        overall_code: Code::Ok.into(),
        statuses: vec![status],
        ..RateLimitResponse::default()
    };
    runtime.enable_all().build()?.block_on(
        Server::builder()
            .add_service(RateLimitServiceServer::new(Bare(answer)))
            .serve(([127, 0, 0, 1], port).into()),
    )?;
    Ok(())
}
