//! HTTP/2 connections, from accept to the last goodbye: how many, how old they grow, how they end. What the calls
//! on them mean is the service's.
//!
//! The loop is our own, on hyper, since what a long-lived Envoy needs of it can't be had from tonic's server: an age
//! with jitter, so that the connections of a fleet do not all move at once; a grace after it that begins with a
//! GOAWAY; an end that a silent client can't hold up.
//!
//! # Storms of resets
//!
//! When this service is slower than Envoy's timeout (20 ms by default), Envoy resets streams by the thousand, many
//! before we have accepted them. h2 takes that for an attack and by default tears the connection down after 20
//! unaccepted ones, or after 1,024 stream errors in a connection's life, with every call on it: overload would turn
//! into an outage. The second bound is lifted: a stream that ended in an error takes no memory. The first is raised
//! above what one reading of the socket can bring, since hyper then accepts (and drops) all of them before it waits
//! for more. Calls under way are bounded by `max_concurrent_streams` as ever.

use std::{
    any::Any,
    convert::Infallible,
    fmt,
    future::{Future, poll_fn},
    io,
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
    task::{JoinError, JoinSet},
    time::{sleep, timeout},
};
use tower_service::Service;

use crate::edge::{
    authority::{AuthorityFilter, MAX_FRAME},
    listener::Listener,
};
use crate::metrics::Page;

/// What connections may do. Each field says what it bounds.
#[derive(Clone, Debug)]
pub struct Config {
    /// Open connections. Above it none is accepted until one ends: clients wait in the kernel's queue. At least 1.
    pub max_connections: usize,
    /// The age at which a client is told to open another connection (GOAWAY), each ±10 % at random. Behind one
    /// address for many instances this is what spreads clients over them. `None`: never.
    pub max_connection_age: Option<Duration>,
    /// How long calls under way may take after that before the connection is cut. `None`: for ever.
    pub max_connection_age_grace: Option<Duration>,
    /// How long a new connection may take to say that it speaks HTTP/2.
    pub handshake_timeout: Duration,
    /// How often a connection is asked whether its client still lives. `None`: never.
    pub keepalive_interval: Option<Duration>,
    /// How long the client may take to answer that.
    pub keepalive_timeout: Duration,
    /// Calls under way on one connection. Envoy opens another connection beyond it.
    pub max_concurrent_streams: u32,
    /// Bytes of one request body the client may send ahead of us.
    pub stream_window: u32,
    /// Bytes of all request bodies of a connection the client may send ahead of us: the memory they can take before
    /// they are read. h2's patience with small pieces of bodies grows with it.
    pub connection_window: u32,
    /// Bytes of one request's headers, decoded, 32 for each field on top. A request over it is refused.
    pub max_header_list: u32,
}

/// What has happened on connections.
#[derive(Debug, Default)]
pub struct ConnectionStats {
    /// Open now.
    pub open: AtomicU64,
    /// Accepted.
    pub accepted: AtomicU64,
    /// Times the bound on connections was reached.
    pub at_bound: AtomicU64,
    /// Failures to accept: out of files or memory, mostly.
    pub accept_errors: AtomicU64,
    /// Closed before they said that they speak HTTP/2, because it took too long.
    pub handshake_timeouts: AtomicU64,
    /// Told to go for their age.
    pub aged: AtomicU64,
    /// Cut with calls under way, when the grace after that was over.
    pub cut: AtomicU64,
    /// Header blocks in which a refused authority was replaced; clients send one per authority and connection.
    pub authority_rewritten: Arc<AtomicU64>,
    /// Calls, or connections, that ended in a panic: a defect of ours.
    pub panics: AtomicU64,
}

/// The signal to stop. Clones give and see the same signal.
#[derive(Clone, Debug)]
pub struct Drain(Arc<watch::Sender<bool>>);

/// How long a new connection may stay silent while draining. Not zero: a client whose connection we have just
/// accepted is about to send its first call.
const DRAINING_HANDSHAKE: Duration = Duration::from_millis(500);

/// Reset streams that h2 may hold before they are accepted. Above what one reading of the socket brings: a receive
/// buffer of 6 MiB (Linux's largest by default) holds 20,000 calls of 300 bytes.
const PENDING_RESETS: usize = 65_536;

/// h2 lets unread small pieces of bodies (under 256 bytes, and not the last of their stream) take half of this window,
/// 256 bytes each, and tears the connection down beyond that. Envoy sends a body in one last piece; others, tonic's
/// client among them, do not, and each of the resets above may leave such a piece behind.
const CONNECTION_WINDOW: u32 = 2 * 256 * PENDING_RESETS as u32;

/// How long to wait after a failure to accept, doubling: the reason (no file descriptor) rarely goes by itself.
const ACCEPT_PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Serves `service` on every connection to `listener` until `drain` says stop. Then nothing more is accepted, every
/// client is told to go, calls under way are answered, and this returns when the last connection has ended.
/// Dropping the future cuts what is left: put a deadline around it.
///
/// A call whose client has gone is dropped at its await point. A call that panics is answered with UNKNOWN.
pub async fn serve<S, F>(
    listener: Listener,
    service: S,
    config: Config,
    stats: Arc<ConnectionStats>,
    drain: Drain,
) where
    S: Service<
            Request<Incoming>,
            Response = Response<tonic::body::Body>,
            Error = Infallible,
            Future = F,
        > + Clone
        + Send
        + 'static,
    F: Future<Output = Result<Response<tonic::body::Body>, Infallible>> + Send + 'static,
{
    let connections = Connections {
        http: Arc::new(config.http()),
        config: Arc::new(config),
        service,
        stats,
        drain: drain.clone(),
    };
    let mut tasks = JoinSet::new();
    let mut stopped = pin!(drain.stopped());
    let mut pause = ACCEPT_PAUSE.0;
    let mut full = false;
    loop {
        let was_full = full;
        full = tasks.len() >= connections.config.max_connections.max(1);
        if full && !was_full {
            connections.stats.at_bound.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                listener = %listener.local_addr(),
                connections = tasks.len(),
                "as many connections as allowed are open; accepting the next when one closes",
            );
        }
        tokio::select! {
            biased;
            () = &mut stopped => break,
            Some(ended) = tasks.join_next() => connections.ended(ended),
            accepted = listener.accept(), if !full => match accepted {
                Ok((io, peer)) => {
                    pause = ACCEPT_PAUSE.0;
                    tasks.spawn(connections.clone().run(io, peer));
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    connections.stats.accept_errors.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(listener = %listener.local_addr(), %error, "cannot accept");
                    tokio::select! {
                        () = &mut stopped => break,
                        () = sleep(pause) => {}
                    }
                    pause = (pause * 2).min(ACCEPT_PAUSE.1);
                }
            },
        }
    }
    // To a client, what waits in the kernel's queue is connected: it is told to go like the others.
    while tasks.len() < connections.config.max_connections {
        match listener.accept_queued() {
            Ok((io, peer)) => drop(tasks.spawn(connections.clone().run(io, peer))),
            Err(error) if is_of_one_connection(&error) => {}
            Err(_) => break,
        }
    }
    drop(listener);
    while let Some(ended) = tasks.join_next().await {
        connections.ended(ended);
    }
}

/// What every connection's task needs.
#[derive(Clone)]
struct Connections<S> {
    http: Arc<http2::Builder<TokioExecutor>>,
    config: Arc<Config>,
    service: S,
    stats: Arc<ConnectionStats>,
    drain: Drain,
}

/// Counts a connection for as long as it is open, however it ends.
struct Open(Arc<ConnectionStats>);

// === impl Config ===

impl Default for Config {
    /// The ages are the reference server's. The windows are far above Envoy's calls, which have less than 1 KiB; the
    /// header bound is above the 60 KiB that Envoy accepts of its own client, of which it may hand on any part.
    fn default() -> Self {
        Self {
            max_connections: 16_384,
            max_connection_age: Some(Duration::from_secs(24 * 3600)),
            max_connection_age_grace: Some(Duration::from_secs(3600)),
            handshake_timeout: Duration::from_secs(10),
            keepalive_interval: Some(Duration::from_secs(30)),
            keepalive_timeout: Duration::from_secs(10),
            max_concurrent_streams: 1024,
            stream_window: 64 * 1024,
            connection_window: CONNECTION_WINDOW,
            max_header_list: 64 * 1024,
        }
    }
}

impl Config {
    fn http(&self) -> http2::Builder<TokioExecutor> {
        let mut http = http2::Builder::new(TokioExecutor::new());
        http.timer(TokioTimer::new())
            .max_concurrent_streams(self.max_concurrent_streams)
            .initial_stream_window_size(self.stream_window)
            .initial_connection_window_size(self.connection_window)
            .max_frame_size(MAX_FRAME)
            .max_header_list_size(self.max_header_list)
            .keep_alive_interval(self.keepalive_interval)
            .keep_alive_timeout(self.keepalive_timeout)
            .max_pending_accept_reset_streams(PENDING_RESETS)
            .max_local_error_reset_streams(None)
            .auto_date_header(false);
        http
    }

    /// This connection's own age.
    fn age(&self) -> Option<Duration> {
        // A factor that overflows stands for an age nobody lives to see.
        self.max_connection_age.map(|age| {
            Duration::try_from_secs_f64(age.as_secs_f64() * (0.9 + 0.2 * fastrand::f64()))
                .unwrap_or(age)
        })
    }
}

// === impl Drain ===

// === impl ConnectionStats ===

impl ConnectionStats {
    /// Puts the numbers on the metrics page.
    pub fn export(&self, page: &mut Page<'_>) -> fmt::Result {
        let open = self.open.load(Ordering::Relaxed);
        page.gauge(
            "slidegate_connections_open",
            "gRPC connections open now.",
            open as f64,
        )?;
        for (name, help, count) in [
            ("accepted", "gRPC connections accepted.", &self.accepted),
            (
                "at_bound",
                "Times that MAX_CONNECTIONS was reached.",
                &self.at_bound,
            ),
            (
                "accept_errors",
                "Failures to accept a gRPC connection.",
                &self.accept_errors,
            ),
            (
                "handshake_timeouts",
                "Connections closed before they spoke HTTP/2.",
                &self.handshake_timeouts,
            ),
            ("aged", "Connections told to go for their age.", &self.aged),
            ("cut", "Connections cut with calls under way.", &self.cut),
            (
                "authority_rewritten",
                "Header blocks whose :authority had to be mended.",
                &*self.authority_rewritten,
            ),
            (
                "panics",
                "Calls or connections that ended in a panic: a defect.",
                &self.panics,
            ),
        ] {
            let name = format!("slidegate_connections_{name}");
            page.counter(&name, help, count.load(Ordering::Relaxed))?;
        }
        Ok(())
    }
}

impl Drain {
    /// A signal not yet given.
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Gives the signal, for good.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    /// Whether it was given.
    pub fn is_stopped(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits for it. Returns at once if it was given.
    pub async fn stopped(&self) {
        // The sender lives in `self`, so that this can't fail.
        let _ = self.0.subscribe().wait_for(|stopped| *stopped).await;
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self::new()
    }
}

// === impl Connections ===

impl<S, F> Connections<S>
where
    S: Service<
            Request<Incoming>,
            Response = Response<tonic::body::Body>,
            Error = Infallible,
            Future = F,
        > + Clone
        + Send
        + 'static,
    F: Future<Output = Result<Response<tonic::body::Body>, Infallible>> + Send + 'static,
{
    /// One connection's life. `io` is what lies below HTTP/2: a socket, or one day TLS on it.
    async fn run<IO>(self, io: IO, peer: Option<SocketAddr>)
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let _open = Open::new(&self.stats);
        let mut io = AuthorityFilter::new(
            io,
            self.config.max_header_list,
            self.stats.authority_rewritten.clone(),
        );
        // hyper would wait for the preface without a bound, and a graceful end waits for hyper.
        let greeted = tokio::select! {
            biased;
            greeted = timeout(self.config.handshake_timeout, io.preface()) => greeted,
            () = async {
                self.drain.stopped().await;
                sleep(DRAINING_HANDSHAKE).await;
            } => Ok(Err(io::ErrorKind::TimedOut.into())),
        };
        match greeted {
            Ok(Ok(())) => {}
            // A port probe, or a client that thought better of it.
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return,
            Ok(Err(error)) if error.kind() != io::ErrorKind::TimedOut => {
                tracing::debug!(?peer, %error, "a connection failed before its first byte");
                return;
            }
            Ok(Err(_)) | Err(_) => {
                self.stats
                    .handshake_timeouts
                    .fetch_add(1, Ordering::Relaxed);
                tracing::debug!(?peer, "a client did not say that it speaks HTTP/2");
                return;
            }
        }

        let (service, stats) = (self.service, self.stats.clone());
        let calls = service_fn(move |request| call(service.clone(), request, stats.clone()));
        let mut connection = pin!(self.http.serve_connection(TokioIo::new(io), calls));
        let grace = tokio::select! {
            ended = connection.as_mut() => return log_end(peer, ended),
            () = sleep_or_never(self.config.age()) => {
                self.stats.aged.fetch_add(1, Ordering::Relaxed);
                self.config.max_connection_age_grace
            }
            // Whoever called `stop` has a deadline for all of it.
            () = self.drain.stopped() => None,
        };
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            ended = connection.as_mut() => log_end(peer, ended),
            () = sleep_or_never(grace) => {
                self.stats.cut.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(?peer, "cut a connection whose calls did not end in time");
            }
        }
    }

    fn ended(&self, task: Result<(), JoinError>) {
        if let Err(error) = task
            && let Ok(panic) = error.try_into_panic()
        {
            note_panic(&self.stats, "a connection", &*panic);
        }
    }
}

// === impl Open ===

impl Open {
    fn new(stats: &Arc<ConnectionStats>) -> Self {
        stats.accepted.fetch_add(1, Ordering::Relaxed);
        stats.open.fetch_add(1, Ordering::Relaxed);
        Self(stats.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One call. A panic ends it with an answer: without one the stream would be reset, which Envoy reads as UNAVAILABLE
/// and counts toward ejecting this host.
async fn call<S>(
    mut service: S,
    request: Request<Incoming>,
    stats: Arc<ConnectionStats>,
) -> Result<Response<tonic::body::Body>, Infallible>
where
    S: Service<Request<Incoming>, Response = Response<tonic::body::Body>, Error = Infallible>,
{
    let mut answer = pin!(async move {
        poll_fn(|cx| service.poll_ready(cx)).await?;
        service.call(request).await
    });
    poll_fn(|cx| {
        // After a panic the future is not polled again, only dropped, so that nothing half-done is seen.
        match catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(cx))) {
            Ok(polled) => polled,
            Err(panic) => {
                note_panic(&stats, "a call", &*panic);
                Poll::Ready(Ok(tonic::Status::unknown("internal error").into_http()))
            }
        }
    })
    .await
}

fn note_panic(stats: &ConnectionStats, what: &str, panic: &(dyn Any + Send)) {
    stats.panics.fetch_add(1, Ordering::Relaxed);
    let message = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    tracing::error!(
        panic = message,
        "{what} panicked; this is a defect, please report it"
    );
}

fn log_end(peer: Option<SocketAddr>, ended: hyper::Result<()>) {
    if let Err(error) = ended {
        let error = &error as &(dyn std::error::Error + 'static);
        tracing::debug!(?peer, error, "a connection ended early");
    }
}

async fn sleep_or_never(time: Option<Duration>) {
    match time {
        Some(time) => sleep(time).await,
        None => std::future::pending().await,
    }
}

/// Errors of `accept` that say nothing about the next one: the client has left the queue already.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_differ_by_a_tenth_each_way() {
        let config = |age| Config {
            max_connection_age: age,
            ..Config::default()
        };
        assert_eq!(config(None).age(), None);
        let hour = config(Some(Duration::from_secs(3600)));
        let ages: Vec<_> = (0..1000).filter_map(|_| hour.age()).collect();
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        assert!(
            ages.iter()
                .all(|age| (minutes(54)..=minutes(66)).contains(age))
        );
        assert!(ages.iter().any(|&age| age < minutes(57)));
        assert!(ages.iter().any(|&age| age > minutes(63)));
        let ever = config(Some(Duration::MAX));
        assert!((0..100).all(|_| ever.age() > Some(Duration::MAX / 2)));
    }

    #[tokio::test]
    async fn a_signal_to_stop_reaches_every_clone_and_stays() {
        let drain = Drain::new();
        let other = drain.clone();
        assert!(!other.is_stopped());
        let waiting = tokio::spawn(async move { other.stopped().await });
        drain.stop();
        waiting.await.unwrap();
        drain.clone().stopped().await;
        assert!(drain.is_stopped());
    }
}
