//! Connections as their clients see them: accepted, aged, drained, cut, flooded, refused.

// Helpers are tests' own, and a panic in them is the report.
#![allow(clippy::unwrap_used)]

use std::{
    convert::Infallible,
    future::Future,
    io::Write,
    net::{Ipv4Addr, SocketAddr},
    os::unix::net::UnixListener,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use http::{Request, Response};
use slidegate::edge::{
    connection::{Config, ConnectionStats, Drain, serve},
    listener::{Address, Listener},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    sync::watch,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tower_service::Service;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

// --- the service

/// Answers `/now` at once, `/wait` when its gate is opened, and panics on `/panic` and `/panic-at-once`.
#[derive(Clone)]
struct Calls {
    gate: watch::Receiver<bool>,
    under_way: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

/// Counts a call for as long as its future lives.
struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Service<Request<hyper::body::Incoming>> for Calls {
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<hyper::body::Incoming>) -> Self::Future {
        let path = request.uri().path().to_owned();
        assert_ne!(path, "/panic-at-once");
        let now = self.under_way.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        let under_way = UnderWay(self.under_way.clone());
        let mut gate = self.gate.clone();
        Box::pin(async move {
            let _under_way = under_way;
            tokio::task::yield_now().await;
            assert_ne!(path, "/panic");
            if path == "/wait" {
                gate.wait_for(|open| *open).await.unwrap();
            }
            Ok(Response::new(tonic::body::Body::empty()))
        })
    }
}

// --- the server

struct Server {
    address: Address,
    gate: watch::Sender<bool>,
    under_way: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    stats: Arc<ConnectionStats>,
    drain: Drain,
    task: JoinHandle<()>,
}

impl Server {
    async fn start(config: Config) -> Self {
        Self::on(&Address::Tcp((Ipv4Addr::LOCALHOST, 0).into()), config).await
    }

    async fn on(address: &Address, config: Config) -> Self {
        let listener = Listener::bind(address).await.unwrap();
        let address = listener.local_addr().clone();
        let (gate, open) = watch::channel(false);
        let calls = Calls {
            gate: open,
            under_way: Arc::default(),
            most: Arc::default(),
        };
        let (under_way, most) = (calls.under_way.clone(), calls.most.clone());
        let stats = Arc::new(ConnectionStats::default());
        let drain = Drain::new();
        let task = tokio::spawn(serve(listener, calls, config, stats.clone(), drain.clone()));
        Self {
            address,
            gate,
            under_way,
            most,
            stats,
            drain,
            task,
        }
    }

    fn tcp(&self) -> SocketAddr {
        match self.address {
            Address::Tcp(address) => address,
            Address::Unix(_) => panic!("a Unix socket"),
        }
    }

    async fn connect(&self) -> Client {
        Client::over(TcpStream::connect(self.tcp()).await.unwrap()).await
    }

    async fn raw(&self) -> Raw {
        let mut raw = Raw(TcpStream::connect(self.tcp()).await.unwrap());
        raw.send(GREETING).await;
        raw
    }

    fn open(&self) -> u64 {
        self.stats.open.load(Ordering::SeqCst)
    }

    async fn has_under_way(&self, calls: usize) {
        eventually("calls under way", || {
            self.under_way.load(Ordering::SeqCst) == calls
        })
        .await;
    }

    async fn ends(self) {
        timeout(PATIENCE, self.task)
            .await
            .expect("serve returns")
            .unwrap();
    }
}

// --- clients

/// A well-behaved client.
struct Client {
    send: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

impl Client {
    async fn over<IO: AsyncRead + AsyncWrite + Unpin + Send + 'static>(io: IO) -> Self {
        let (send, connection) = h2::client::handshake(io).await.unwrap();
        Self {
            send,
            connection: tokio::spawn(connection),
        }
    }

    async fn start(&mut self, path: &str) -> Result<ResponseFuture, h2::Error> {
        let mut send = self.send.clone().ready().await?;
        let request = Request::post(format!("http://test{path}"))
            .body(())
            .unwrap();
        Ok(send.send_request(request, true)?.0)
    }

    async fn call(&mut self, path: &str) -> Result<Response<h2::RecvStream>, h2::Error> {
        self.start(path).await?.await
    }

    async fn ends(self) -> Result<(), h2::Error> {
        drop(self.send);
        timeout(PATIENCE, self.connection)
            .await
            .expect("the connection ends")
            .unwrap()
    }
}

/// A client that writes its frames by hand.
struct Raw(TcpStream);

/// The connection preface and empty SETTINGS.
const GREETING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;

impl Raw {
    async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    /// A whole request.
    fn request(stream: u32, path: &str, authority: &str) -> Vec<u8> {
        let mut block = vec![0x83, 0x86, 0x04, path.len() as u8];
        block.extend_from_slice(path.as_bytes());
        block.extend_from_slice(&[0x41, authority.len() as u8]);
        block.extend_from_slice(authority.as_bytes());
        let mut frame = vec![0, 0, block.len() as u8, HEADERS, 0x5];
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(&block);
        frame
    }

    fn reset(stream: u32) -> Vec<u8> {
        let mut frame = vec![0, 0, 4, RST_STREAM, 0];
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(&[0, 0, 0, 2]);
        frame
    }

    /// The next frame of one of these kinds: kind and stream.
    async fn receive(&mut self, kinds: &[u8]) -> (u8, u32) {
        let receive = async {
            loop {
                let mut head = [0; 9];
                self.0.read_exact(&mut head).await.unwrap();
                let len = u32::from_be_bytes([0, head[0], head[1], head[2]]);
                let mut body = vec![0; len as usize];
                self.0.read_exact(&mut body).await.unwrap();
                if kinds.contains(&head[3]) {
                    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                    return (head[3], stream);
                }
            }
        };
        timeout(PATIENCE, receive).await.expect("a frame")
    }
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "waited in vain for {what}");
        sleep(Duration::from_millis(2)).await;
    }
}

/// The server has hung up, one way or the other.
async fn hung_up(io: &mut (impl AsyncRead + Unpin)) {
    let mut rest = Vec::new();
    // A reset connection is an error here, and as good an end.
    let _ = timeout(PATIENCE, io.read_to_end(&mut rest))
        .await
        .expect("the server hangs up");
}

fn quiet() -> Config {
    Config {
        max_connection_age: None,
        max_connection_age_grace: None,
        keepalive_interval: None,
        handshake_timeout: PATIENCE * 10,
        ..Config::default()
    }
}

fn count(number: &AtomicU64) -> u64 {
    number.load(Ordering::SeqCst)
}

// --- ages

#[tokio::test]
async fn an_old_connection_ends_when_its_calls_are_answered() {
    let server = Server::start(Config {
        max_connection_age: Some(Duration::from_millis(50)),
        ..quiet()
    })
    .await;
    let mut client = server.connect().await;
    let answer = client.start("/wait").await.unwrap();
    server.has_under_way(1).await;
    eventually("old age", || count(&server.stats.aged) == 1).await;
    // The client learns of it, and starts nothing more here.
    let end = Instant::now() + PATIENCE;
    while client.call("/now").await.is_ok() {
        assert!(Instant::now() < end, "no GOAWAY");
    }
    assert_eq!(server.under_way.load(Ordering::SeqCst), 1);
    server.gate.send_replace(true);
    assert_eq!(answer.await.unwrap().status(), 200);
    client.ends().await.unwrap();
    eventually("the end", || server.open() == 0).await;
    assert_eq!(count(&server.stats.cut), 0);

    let mut next = server.connect().await;
    assert_eq!(next.call("/now").await.unwrap().status(), 200);
    assert_eq!(count(&server.stats.accepted), 2);
}

#[tokio::test]
async fn an_old_connection_is_cut_when_its_grace_is_over() {
    let server = Server::start(Config {
        max_connection_age: Some(Duration::from_millis(50)),
        max_connection_age_grace: Some(Duration::from_millis(50)),
        ..quiet()
    })
    .await;
    let mut client = server.connect().await;
    let answer = client.start("/wait").await.unwrap();
    server.has_under_way(1).await;
    assert!(timeout(PATIENCE, answer).await.unwrap().is_err());
    eventually("the cut", || count(&server.stats.cut) == 1).await;
    server.has_under_way(0).await;
    eventually("the end", || server.open() == 0).await;
}

// --- draining

#[tokio::test]
async fn draining_answers_what_is_under_way_and_takes_nothing_new() {
    let server = Server::start(quiet()).await;
    let mut client = server.connect().await;
    let answers = [
        client.start("/wait").await.unwrap(),
        client.start("/wait").await.unwrap(),
    ];
    server.has_under_way(2).await;
    server.drain.stop();
    let end = Instant::now() + PATIENCE;
    while TcpStream::connect(server.tcp()).await.is_ok() {
        assert!(Instant::now() < end, "the port is still open");
    }
    assert!(!server.task.is_finished());
    server.gate.send_replace(true);
    for answer in answers {
        assert_eq!(answer.await.unwrap().status(), 200);
    }
    client.ends().await.unwrap();
    server.ends().await;
}

#[tokio::test]
async fn idle_connections_end_at_once_when_draining() {
    let server = Server::start(quiet()).await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = server.connect().await;
        client.call("/now").await.unwrap();
        clients.push(client);
    }
    assert_eq!(server.open(), 20);
    server.drain.stop();
    for client in clients {
        client.ends().await.unwrap();
    }
    server.ends().await;
}

#[tokio::test]
async fn a_silent_client_does_not_hold_up_draining() {
    let server = Server::start(quiet()).await;
    let mut silent = TcpStream::connect(server.tcp()).await.unwrap();
    let mut hesitant = TcpStream::connect(server.tcp()).await.unwrap();
    hesitant.write_all(b"PRI * HTTP/2.0\r\n").await.unwrap();
    eventually("connections", || server.open() == 2).await;
    let stats = server.stats.clone();
    server.drain.stop();
    server.ends().await;
    hung_up(&mut silent).await;
    hung_up(&mut hesitant).await;
    assert_eq!(count(&stats.handshake_timeouts), 2);
    assert_eq!(count(&stats.open), 0);
}

#[tokio::test]
async fn a_client_that_was_not_yet_accepted_is_answered_when_draining() {
    let server = Server::start(quiet()).await;
    // Until the next await the server does not run: to this client, it is connected.
    let mut io = std::net::TcpStream::connect(server.tcp()).unwrap();
    io.write_all(GREETING).unwrap();
    io.write_all(&Raw::request(1, "/now", "test")).unwrap();
    server.drain.stop();
    assert_eq!(count(&server.stats.accepted), 0);
    io.set_nonblocking(true).unwrap();
    let mut raw = Raw(TcpStream::from_std(io).unwrap());
    assert_eq!(raw.receive(&[HEADERS]).await, (HEADERS, 1));
    drop(raw);
    server.ends().await;
}

#[tokio::test]
async fn what_is_left_at_the_deadline_is_cut() {
    let server = Server::start(quiet()).await;
    let mut client = server.connect().await;
    let answer = client.start("/wait").await.unwrap();
    server.has_under_way(1).await;
    // It has greeted, and will never acknowledge a goodbye.
    let mut deaf = server.raw().await;
    eventually("connections", || server.open() == 2).await;
    server.drain.stop();
    // As a deadline around it does.
    server.task.abort();
    assert!(timeout(PATIENCE, answer).await.unwrap().is_err());
    hung_up(&mut deaf.0).await;
    server.has_under_way(0).await;
    eventually("the end", || server.open() == 0).await;
}

// --- silence, floods, defects

#[tokio::test]
async fn a_silent_connection_is_closed() {
    let server = Server::start(Config {
        handshake_timeout: Duration::from_millis(30),
        ..quiet()
    })
    .await;
    let mut silent = TcpStream::connect(server.tcp()).await.unwrap();
    hung_up(&mut silent).await;
    assert_eq!(count(&server.stats.handshake_timeouts), 1);
    // Saying so in time is enough: the age of the connection does not matter then.
    let mut client = server.connect().await;
    client.call("/now").await.unwrap();
    sleep(Duration::from_millis(60)).await;
    client.call("/now").await.unwrap();
    assert_eq!(count(&server.stats.handshake_timeouts), 1);
}

#[tokio::test]
async fn a_dead_client_is_noticed() {
    let server = Server::start(Config {
        keepalive_interval: Some(Duration::from_millis(20)),
        keepalive_timeout: Duration::from_millis(20),
        ..quiet()
    })
    .await;
    // Never acknowledges a PING.
    let mut raw = server.raw().await;
    hung_up(&mut raw.0).await;
    eventually("the end", || server.open() == 0).await;
}

#[tokio::test]
async fn what_is_not_http2_is_hung_up_on() {
    let server = Server::start(quiet()).await;
    let mut http1 = TcpStream::connect(server.tcp()).await.unwrap();
    http1
        .write_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        .await
        .unwrap();
    hung_up(&mut http1).await;
    let probe = TcpStream::connect(server.tcp()).await.unwrap();
    drop(probe);
    eventually("the end", || {
        count(&server.stats.accepted) == 2 && server.open() == 0
    })
    .await;
    assert_eq!(count(&server.stats.handshake_timeouts), 0);
}

#[tokio::test]
async fn a_storm_of_resets_tears_nothing_down() {
    let server = Server::start(quiet()).await;
    let mut raw = server.raw().await;
    // One that waits through it all.
    raw.send(&Raw::request(1, "/wait", "test")).await;
    server.has_under_way(1).await;
    let mut stream = 3;
    for _ in 0..10 {
        // In one write, so that most are reset before they are accepted.
        let mut storm = Vec::new();
        for _ in 0..2000 {
            storm.extend(Raw::request(stream, "/wait", "test"));
            storm.extend(Raw::reset(stream));
            stream += 2;
        }
        raw.send(&storm).await;
    }
    raw.send(&Raw::request(stream, "/now", "test")).await;
    let answered = raw.receive(&[HEADERS, GOAWAY]).await;
    assert_eq!(answered, (HEADERS, stream));
    server.has_under_way(1).await;
    server.gate.send_replace(true);
    assert_eq!(raw.receive(&[HEADERS, GOAWAY]).await, (HEADERS, 1));
}

#[tokio::test]
async fn a_storm_of_bad_streams_tears_nothing_down() {
    let server = Server::start(quiet()).await;
    let mut raw = server.raw().await;
    // A request without a path is a stream error of ours to answer; by default 1,024 in a connection's life end it.
    for stream in (1..6000).step_by(2) {
        let mut frame = vec![0, 0, 2, HEADERS, 0x5];
        frame.extend_from_slice(&u32::to_be_bytes(stream));
        frame.extend_from_slice(&[0x86, 0x84]);
        raw.send(&frame).await;
        let answer = raw.receive(&[HEADERS, RST_STREAM, GOAWAY]).await;
        assert_eq!(answer, (RST_STREAM, stream));
    }
    raw.send(&Raw::request(6001, "/now", "test")).await;
    let answer = raw.receive(&[HEADERS, RST_STREAM, GOAWAY]).await;
    assert_eq!(answer, (HEADERS, 6001));
}

#[tokio::test]
async fn calls_under_way_are_bounded_per_connection() {
    let server = Server::start(quiet()).await;
    let mut client = server.connect().await;
    // From the first answer on, the client knows the bound.
    client.call("/now").await.unwrap();
    let bound = Config::default().max_concurrent_streams as usize;
    let mut calls = Vec::new();
    for _ in 0..3 * bound {
        let mut client = Client {
            send: client.send.clone(),
            connection: tokio::spawn(async { Ok(()) }),
        };
        calls.push(tokio::spawn(async move {
            client.call("/wait").await.unwrap().status()
        }));
    }
    server.has_under_way(bound).await;
    // Another connection is not concerned.
    server.connect().await.call("/now").await.unwrap();
    server.gate.send_replace(true);
    for call in calls {
        assert_eq!(call.await.unwrap(), 200);
    }
    // The other connection's one call comes on top.
    let most = server.most.load(Ordering::SeqCst);
    assert!((bound..=bound + 1).contains(&most), "{most}");
    client.call("/now").await.unwrap();
}

#[tokio::test]
async fn a_client_that_ignores_the_bound_is_refused_the_rest() {
    let server = Server::start(Config {
        max_concurrent_streams: 10,
        ..quiet()
    })
    .await;
    let mut raw = server.raw().await;
    for number in 0..10 {
        raw.send(&Raw::request(2 * number + 1, "/wait", "test"))
            .await;
    }
    server.has_under_way(10).await;
    raw.send(&Raw::request(21, "/now", "test")).await;
    let answer = raw.receive(&[HEADERS, RST_STREAM, GOAWAY]).await;
    assert_eq!(answer, (RST_STREAM, 21));
    server.gate.send_replace(true);
    for _ in 0..10 {
        assert_eq!(raw.receive(&[HEADERS, RST_STREAM, GOAWAY]).await.0, HEADERS);
    }
}

#[tokio::test]
async fn connections_are_bounded() {
    let server = Server::start(Config {
        max_connections: 2,
        ..quiet()
    })
    .await;
    let mut first = server.connect().await;
    first.call("/now").await.unwrap();
    let mut second = server.connect().await;
    second.call("/now").await.unwrap();
    let mut third = server.connect().await;
    let waiting = third.start("/now").await.unwrap();
    assert_eq!(second.call("/now").await.unwrap().status(), 200);
    assert_eq!(count(&server.stats.accepted), 2);
    assert_eq!(count(&server.stats.at_bound), 1);
    first.ends().await.unwrap();
    let answer = timeout(PATIENCE, waiting).await.unwrap();
    assert_eq!(answer.unwrap().status(), 200);
    assert_eq!(server.open(), 2);
}

#[tokio::test]
async fn a_cancelled_call_is_dropped() {
    let server = Server::start(quiet()).await;
    let mut client = server.connect().await;
    let answer = client.start("/wait").await.unwrap();
    server.has_under_way(1).await;
    drop(answer);
    server.has_under_way(0).await;
    // So are those of a client that goes away.
    let answer = client.start("/wait").await.unwrap();
    server.has_under_way(1).await;
    client.connection.abort();
    server.has_under_way(0).await;
    drop(answer);
    eventually("the end", || server.open() == 0).await;
}

#[tokio::test]
async fn a_call_that_panics_is_answered_and_counted() {
    let server = Server::start(quiet()).await;
    let mut client = server.connect().await;
    let waiting = client.start("/wait").await.unwrap();
    for (number, path) in ["/panic", "/panic-at-once"].into_iter().enumerate() {
        let answer = client.call(path).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["grpc-status"], "2");
        assert_eq!(count(&server.stats.panics), number as u64 + 1);
    }
    server.has_under_way(1).await;
    server.gate.send_replace(true);
    assert_eq!(waiting.await.unwrap().status(), 200);
}

#[tokio::test]
async fn an_authority_that_http_refuses_is_answered() {
    const ISTIO: &str = "outbound|8081||ratelimit.default.svc.cluster.local";
    let server = Server::start(quiet()).await;
    let mut raw = server.raw().await;
    for (stream, authority, rewritten) in
        [(1, "good", 0), (3, ISTIO, 1), (5, "good", 1), (7, ISTIO, 2)]
    {
        raw.send(&Raw::request(stream, "/now", authority)).await;
        let answer = raw.receive(&[HEADERS, RST_STREAM, GOAWAY]).await;
        assert_eq!(answer, (HEADERS, stream), "{authority}");
        assert_eq!(count(&server.stats.authority_rewritten), rewritten);
    }
}

/// Runs the test below in a process of its own, as it takes every file the process may open.
#[test]
fn running_out_of_files_is_survived() {
    let this = std::env::current_exe().unwrap();
    let run = std::process::Command::new("sh")
        .args([
            "-c",
            r#"ulimit -n 64 && exec "$0" --exact out_of_files --ignored"#,
        ])
        .arg(this)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test]
#[ignore = "takes every file of its process; running_out_of_files_is_survived runs it"]
async fn out_of_files() {
    let server = Server::start(quiet()).await;
    let mut early = server.connect().await;
    early.call("/now").await.unwrap();
    let mut files = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        files.push(file);
    }
    // The client's end takes the last one.
    files.pop();
    let io = TcpStream::connect(server.tcp()).await.unwrap();
    eventually("an error", || count(&server.stats.accept_errors) > 0).await;
    // Those who are connected are served.
    early.call("/now").await.unwrap();
    sleep(Duration::from_millis(100)).await;
    let errors = count(&server.stats.accept_errors);
    assert!(errors < 50, "{errors} errors: a loop that spins");
    drop(files);
    let mut late = Client::over(io).await;
    assert_eq!(late.call("/now").await.unwrap().status(), 200);
}

// --- addresses

/// Whether this machine has IPv6 at all.
fn has_ipv6() -> bool {
    std::net::TcpListener::bind("[::1]:0").is_ok()
}

#[tokio::test]
async fn ipv6_and_both_at_once() {
    if has_ipv6() {
        let server = Server::on(&Address::Tcp("[::1]:0".parse().unwrap()), quiet()).await;
        assert!(server.tcp().is_ipv6());
        server.connect().await.call("/now").await.unwrap();
    }
    // Without IPv6, `::` is what is left of it.
    let server = Server::on(&Address::Tcp("[::]:0".parse().unwrap()), quiet()).await;
    assert_eq!(server.tcp().is_ipv6(), has_ipv6());
    let port = server.tcp().port();
    let mut hosts = vec!["127.0.0.1"];
    if has_ipv6() {
        hosts.push("::1");
    }
    for host in hosts {
        let io = TcpStream::connect((host, port)).await.unwrap();
        Client::over(io).await.call("/now").await.unwrap();
    }
}

#[tokio::test]
async fn a_unix_socket_with_a_dead_ones_file_in_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rls.sock");
    let address = Address::Unix(path.clone());

    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "the dead process left its file");
    let server = Server::on(&address, quiet()).await;
    let io = UnixStream::connect(&path).await.unwrap();
    let mut client = Client::over(io).await;
    assert_eq!(client.call("/now").await.unwrap().status(), 200);

    // Ours is alive.
    let error = Listener::bind(&address).await.unwrap_err().to_string();
    assert!(
        error.contains("rls.sock") && error.contains("another process"),
        "{error}"
    );
    assert_eq!(client.call("/now").await.unwrap().status(), 200);

    server.drain.stop();
    client.ends().await.unwrap();
    server.ends().await;
    assert!(!path.exists(), "the file goes with the listener");
}

#[tokio::test]
async fn a_unix_socket_takes_no_others_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rls.sock");
    std::fs::write(&path, "precious").unwrap();
    let address = Address::Unix(path.clone());
    let error = Listener::bind(&address).await.unwrap_err().to_string();
    assert!(
        error.contains("rls.sock") && error.contains("no socket"),
        "{error}"
    );
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");

    // Nor one that came after it.
    std::fs::remove_file(&path).unwrap();
    let listener = Listener::bind(&address).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    let successor = UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
    drop(successor);

    let nowhere = Address::Unix(directory.path().join("no/rls.sock"));
    let error = Listener::bind(&nowhere).await.unwrap_err().to_string();
    assert!(error.contains("no/rls.sock"), "{error}");
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let error = Listener::bind(&Address::Tcp(address)).await.unwrap_err();
    assert_eq!(error.cause.kind(), std::io::ErrorKind::AddrInUse);
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}
