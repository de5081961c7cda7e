//! The HTTP ports: `/json`, `/healthcheck` and `/metrics` for clients and probes; `/rlconfig`, `/stats` and
//! `/metrics` for operators on the debug port; `/metrics` alone where a port of its own is asked for.

use std::{
    fmt::Write,
    sync::Arc,
    time::{Duration, Instant},
};

/// The pages of one port.
pub use axum::Router;
use axum::{
    body::{Body, to_bytes},
    extract::{Request, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::any,
};

use super::{answer::Answerer, health::Health, json::Translator};
use crate::{
    metrics::Metrics,
    rules::{Rule, reload::Rules},
    store::Store,
    wire::rate_limit_response::Code,
};

/// How long a client may take to send a body.
const BODY: Duration = Duration::from_secs(10);
const TEXT: &str = "text/plain; charset=utf-8";
/// What Prometheus asks for.
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The debug port's pages with what they show.
const DEBUG_PAGES: [(&str, &str); 3] = [
    ("/metrics", "every number, for Prometheus"),
    (
        "/rlconfig",
        "the rules in force, and what is wrong with newer ones",
    ),
    ("/stats", "hits by rule, in the reference's statsd names"),
];

/// What `/json` needs.
struct Json<S> {
    answerer: Arc<Answerer<S>>,
    translator: Translator,
    max_body: usize,
}

/// The port for clients and probes. A body is at most `max_body` bytes long.
pub fn client_port<S: Store>(
    answerer: Arc<Answerer<S>>,
    health: Health,
    translator: Translator,
    max_body: usize,
) -> Router {
    let metrics = Arc::clone(answerer.limiter().metrics());
    let json = Arc::new(Json {
        answerer,
        translator,
        max_body,
    });
    Router::new()
        .route("/json", any(decide::<S>).with_state(json))
        .route("/healthcheck", any(healthcheck).with_state(health))
        .merge(metrics_port(metrics, "/metrics"))
}

/// The port for operators.
pub fn debug_port(rules: Rules, metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/rlconfig", any(rlconfig).with_state(rules))
        .route("/stats", any(stats).with_state(Arc::clone(&metrics)))
        .merge(metrics_port(metrics, "/metrics"))
        .fallback(index)
}

/// A port for Prometheus alone.
pub fn metrics_port(metrics: Arc<Metrics>, path: &str) -> Router {
    Router::new().route(path, any(page).with_state(metrics))
}

/// 200 when OK, 429 when over a limit; everything that is wrong with a request is a 400 without a word to the
/// client, as in the reference. The reason is on record.
async fn decide<S: Store>(State(json): State<Arc<Json<S>>>, request: Request) -> Response {
    match json.decide(request).await {
        Ok(response) => response,
        Err(reason) => {
            tracing::info!(%reason, "refused a request to /json");
            (
                StatusCode::BAD_REQUEST,
                [(CONTENT_TYPE, TEXT)],
                "Bad Request\n",
            )
                .into_response()
        }
    }
}

impl<S: Store> Json<S> {
    async fn decide(&self, request: Request) -> Result<Response, String> {
        let arrived = Instant::now();
        let body = tokio::time::timeout(BODY, to_bytes(request.into_body(), self.max_body))
            .await
            .map_err(|_| format!("body: not there within {BODY:?}"))?
            .map_err(|error| format!("body: {error}"))?;
        let message = self
            .translator
            .request(&body)
            .map_err(|error| error.to_string())?;
        let answer = self
            .answerer
            .answer(&message, arrived)
            .await
            .map_err(|failure| failure.to_string())?;
        let status = match answer.overall_code() {
            Code::Ok => StatusCode::OK,
            Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
            Code::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Ok(match self.translator.response(&answer) {
            Ok(text) => (status, [(CONTENT_TYPE, "application/json")], text).into_response(),
            Err(error) => {
                tracing::error!(%error, "an answer has no JSON form");
                let text = "Internal Server Error\n";
                (
                    StatusCode::INTERNAL_SERVER_ERROR,
                    [(CONTENT_TYPE, TEXT)],
                    text,
                )
                    .into_response()
            }
        })
    }
}

async fn healthcheck(State(health): State<Health>) -> Response {
    if health.is_healthy() {
        "OK".into_response()
    } else {
        (StatusCode::INTERNAL_SERVER_ERROR, Body::empty()).into_response()
    }
}

async fn page(State(metrics): State<Arc<Metrics>>) -> Response {
    ([(CONTENT_TYPE, METRICS)], metrics.render()).into_response()
}

/// One line per rule with a limit, as the reference writes it (a line per limit where a rule has several), sorted.
/// If a newer load failed, what was wrong with it follows as comments.
async fn rlconfig(State(rules): State<Rules>) -> Response {
    let mut lines = Vec::new();
    if let Some(set) = rules.current().as_deref() {
        for rule in set.domains().flat_map(|domain| domain.rules()) {
            rule_lines(rule, &mut lines);
        }
    }
    lines.sort();
    let mut text = lines.concat();
    if let Some(error) = rules.status().error {
        text.push_str("# The last load failed; the rules above stay in force.\n");
        for line in error.lines() {
            // Writing to a String does not fail.
            let _ = writeln!(text, "# {line}");
        }
    }
    ([(CONTENT_TYPE, TEXT)], text).into_response()
}

fn rule_lines(rule: &Rule, lines: &mut Vec<String>) {
    let flags = format!("shadow_mode: {}, quota_mode: {}", rule.shadow, rule.quota);
    let path = &rule.path;
    if rule.is_unlimited() {
        lines.push(format!(
            "{path}: unit=UNKNOWN requests_per_unit=0, {flags}\n"
        ));
    }
    for limit in &rule.limits {
        let (unit, requests) = (limit.window.unit().name(), limit.requests);
        let multiplier = match limit.window.multiplier() {
            1 => String::new(),
            several => format!(" unit_multiplier={several}"),
        };
        lines.push(format!(
            "{path}: unit={unit}{multiplier} requests_per_unit={requests}, {flags}\n"
        ));
    }
}

async fn stats(State(metrics): State<Arc<Metrics>>) -> Response {
    ([(CONTENT_TYPE, TEXT)], metrics.statistics()).into_response()
}

async fn index() -> Response {
    let text: String = DEBUG_PAGES
        .iter()
        .map(|(path, what)| format!("{path}: {what}\n"))
        .collect();
    ([(CONTENT_TYPE, TEXT)], text).into_response()
}
