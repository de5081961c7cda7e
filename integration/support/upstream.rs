//! What Envoy forwards to: answers 200 to everything, and gives `x-tokens` back.

use axum::{Router, extract::Request, http::HeaderMap, response::IntoResponse};
use tokio::runtime::Runtime;

/// A running upstream.
pub struct Upstream {
    pub port: u16,
    _runtime: Runtime,
}

impl Upstream {
    pub fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind(("127.0.0.1", 0)))
            .expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let router = Router::new().fallback(answer);
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self {
            port,
            _runtime: runtime,
        }
    }
}

async fn answer(request: Request) -> impl IntoResponse {
    let tokens = request.headers().get("x-tokens").cloned();
    let headers: HeaderMap = tokens
        .into_iter()
        .map(|tokens| (axum::http::HeaderName::from_static("x-tokens"), tokens))
        .collect();
    (headers, "upstream")
}
