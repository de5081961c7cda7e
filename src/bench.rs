//! The load generator: `slidegate bench` asks any rate-limit service as fast as it answers, or at a set rate, and
//! tells how long the answers took. It speaks HTTP/2 directly and sends messages that were encoded before, so that it
//! takes as little as it can of a machine it shares with the server.

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, IsTerminal, Write},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use bytes::{BufMut, Bytes, BytesMut};
use h2::client::SendRequest;
use hdrhistogram::Histogram;
use http::{HeaderMap, Method, Request, Version};
use parking_lot::Mutex;
use prost::Message;
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    task::JoinSet,
};

use crate::wire::{Entry, RateLimitDescriptor, RateLimitRequest};

/// What to ask, whom, and how hard.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The service: host:port, http://host:port, or unix:/path
    #[arg(default_value = "127.0.0.1:8081")]
    pub address: String,
    /// The domain of every request
    #[arg(long, default_value = "edge")]
    pub domain: String,
    /// Entries of a descriptor, as key=value,key=value; once more for each further descriptor of a request. In a value
    /// `{key}` stands for the number of the key (see --keys); without any, the last value has it at its end
    #[arg(
        long = "descriptor",
        value_name = "ENTRIES",
        default_value = "generic_key=bench"
    )]
    pub descriptors: Vec<String>,
    /// Distinct values to ask for, each as often as any other
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub keys: u64,
    /// Hits of a request
    #[arg(long, default_value_t = 1)]
    pub hits: u32,
    /// Connections
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub connections: u64,
    /// Requests under way on each connection
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    pub in_flight: u64,
    /// How long to ask
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    pub duration: Duration,
    /// Stop after so many requests, if that is earlier
    #[arg(long)]
    pub requests: Option<u64>,
    /// How long to ask before counting
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    pub warm_up: Duration,
    /// Requests per second, at most. Answers are then timed from when a request was due, so that a stall of the
    /// service shows in full
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub rate: Option<u64>,
    /// Print one JSON document, for programs
    #[arg(long)]
    pub json: bool,
}

/// What came of it. Times are in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Answers that were counted.
    pub answers: u64,
    /// In seconds.
    pub elapsed: f64,
    /// Answers per second.
    pub per_second: f64,
    /// Half of the answers were faster.
    pub p50: u64,
    /// 90 % were.
    pub p90: u64,
    /// 99 % were.
    pub p99: u64,
    /// 99.9 % were.
    pub p999: u64,
    /// None was slower.
    pub max: u64,
    /// Answers by overall code.
    pub codes: BTreeMap<&'static str, u64>,
    /// Calls that failed, by gRPC status.
    pub grpc_errors: BTreeMap<u32, u64>,
    /// Calls that got no answer at all.
    pub transport_errors: u64,
}

/// Longest time that is told apart, in microseconds.
const LONGEST: u64 = 60_000_000;
/// Messages that are encoded beforehand, at most; with more keys each is encoded when it is sent.
const ENCODED: u64 = 1_000_000;
const PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// By value of the enum.
const CODES: [&str; 3] = ["UNKNOWN", "OK", "OVER_LIMIT"];
const PROGRESS: Duration = Duration::from_millis(500);

/// Runs and prints. Fails if no call succeeded.
pub async fn run(options: Options, out: &mut dyn Write) -> Result<()> {
    let json = options.json;
    let address = options.address.clone();
    let report = load(options).await?;
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(out, "{report}")?;
    }
    if report.answers == 0 {
        bail!("no call of {address} succeeded");
    }
    Ok(())
}

/// Asks as the options say, and reports.
pub async fn load(options: Options) -> Result<Report> {
    let work = Arc::new(Work::new(options)?);
    let mut connections = Vec::new();
    for _ in 0..work.options.connections {
        let connection = connect(&work.options.address)
            .await
            .with_context(|| format!("can't connect to {}", work.options.address))?;
        connections.push(connection);
    }
    let start = Instant::now() + work.options.warm_up;
    let slots = work.options.connections * work.options.in_flight;
    let mut tasks = JoinSet::new();
    let mut slot = 0;
    for connection in connections {
        let counts = Arc::new(Mutex::new(Counts::new()?));
        work.counts.lock().push(Arc::clone(&counts));
        for _ in 0..work.options.in_flight {
            let pace = work.options.rate.map(|rate| Pace::new(rate, slot, slots));
            tasks.spawn(ask(
                connection.clone(),
                Arc::clone(&work),
                Arc::clone(&counts),
                start,
                pace,
            ));
            slot += 1;
        }
    }
    let progress = tokio::spawn(progress(Arc::clone(&work), start));
    let end = start + work.options.duration;
    let all = async { while tasks.join_next().await.is_some() {} };
    tokio::select! {
        () = tokio::time::sleep_until(end.into()) => work.done.store(true, Relaxed),
        () = all => {}
    }
    let elapsed = start.elapsed();
    progress.abort();
    if io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
    work.report(elapsed)
}

/// What all tasks share.
struct Work {
    options: Options,
    messages: Messages,
    request: Request<()>,
    done: AtomicBool,
    asked: AtomicU64,
    counts: Mutex<Vec<Arc<Mutex<Counts>>>>,
}

struct Messages {
    encoded: Vec<Bytes>,
    template: Template,
}

/// A request with holes for the key.
struct Template {
    domain: Bytes,
    hits: u32,
    descriptors: Vec<Vec<(String, String)>>,
    varies: bool,
}

/// What one connection saw.
struct Counts {
    times: Histogram<u64>,
    codes: [u64; 3],
    grpc_errors: BTreeMap<u32, u64>,
    transport_errors: u64,
}

/// When the next request of a slot is due.
struct Pace {
    interval: Duration,
    next: Duration,
}

/// The end of one call.
enum Answer {
    Code(usize),
    Failed(u32),
}

// === impl Work ===

impl Work {
    fn new(options: Options) -> Result<Self> {
        let template = Template::new(&options)?;
        let authority = options
            .address
            .trim_start_matches("http://")
            .trim_end_matches('/');
        let authority = if authority.starts_with("unix:") {
            "localhost"
        } else {
            authority
        };
        let request = Request::builder()
            .version(Version::HTTP_2)
            .method(Method::POST)
            .uri(format!("http://{authority}{PATH}"))
            .header("te", "trailers")
            .header("content-type", "application/grpc")
            .body(())
            .with_context(|| format!("{} is no address", options.address))?;
        let keys = if options.keys <= ENCODED {
            options.keys
        } else {
            0
        };
        let encoded = (0..keys).map(|key| template.encode(key)).collect();
        Ok(Self {
            messages: Messages { encoded, template },
            request,
            options,
            done: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            counts: Mutex::default(),
        })
    }

    /// Whether there is another request to send.
    fn next(&self) -> bool {
        let asked = self.asked.fetch_add(1, Relaxed);
        !self.done.load(Relaxed) && self.options.requests.is_none_or(|most| asked < most)
    }

    fn report(&self, elapsed: Duration) -> Result<Report> {
        let mut all = Counts::new()?;
        for counts in self.counts.lock().iter() {
            all.add(&counts.lock())?;
        }
        let answers = all.times.len();
        let elapsed = elapsed.as_secs_f64();
        let at = |quantile| all.times.value_at_quantile(quantile);
        Ok(Report {
            answers,
            elapsed,
            per_second: answers as f64 / elapsed,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: all.times.max(),
            codes: CODES
                .into_iter()
                .zip(all.codes)
                .filter(|(_, count)| *count > 0)
                .collect(),
            grpc_errors: all.grpc_errors,
            transport_errors: all.transport_errors,
        })
    }
}

/// One slot: a request after the other.
async fn ask(
    mut connection: SendRequest<Bytes>,
    work: Arc<Work>,
    counts: Arc<Mutex<Counts>>,
    start: Instant,
    mut pace: Option<Pace>,
) {
    let began = Instant::now();
    while work.next() {
        let mut sent = Instant::now();
        if let Some(pace) = &mut pace {
            let due = began + pace.next();
            tokio::time::sleep_until(due.into()).await;
            sent = due;
        }
        let message = work.messages.pick(work.options.keys);
        let answer = call(&mut connection, &work.request, message).await;
        if Instant::now() < start && work.options.requests.is_none() {
            continue;
        }
        let took = sent.elapsed();
        let mut counts = counts.lock();
        match answer {
            Ok(answer) => counts.answer(answer, took),
            Err(_) => {
                counts.transport_errors += 1;
                // The connection is gone, and so is this slot's share of the load.
                return;
            }
        }
    }
}

async fn call(
    connection: &mut SendRequest<Bytes>,
    request: &Request<()>,
    message: Bytes,
) -> Result<Answer, h2::Error> {
    let mut ready = connection.clone().ready().await?;
    let (response, mut body) = ready.send_request(request.clone(), false)?;
    body.send_data(message, true)?;
    let (head, mut body) = response.await?.into_parts();
    let mut code = None;
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        // overall_code is the first field, after the five bytes of gRPC's own.
        code = code.or(match data.get(5..7) {
            Some([8, code]) => Some(usize::from(*code)),
            _ => Some(0),
        });
    }
    let trailers = body.trailers().await?;
    let status = trailers
        .as_ref()
        .and_then(grpc_status)
        .or_else(|| grpc_status(&head.headers));
    Ok(match status {
        Some(0) => Answer::Code(code.unwrap_or(0).min(CODES.len() - 1)),
        Some(status) => Answer::Failed(status),
        // 2 is UNKNOWN: there was no status at all.
        None => Answer::Failed(2),
    })
}

fn grpc_status(headers: &HeaderMap) -> Option<u32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

async fn connect(address: &str) -> Result<SendRequest<Bytes>> {
    if let Some(path) = address.strip_prefix("unix:") {
        return handshake(UnixStream::connect(PathBuf::from(path)).await?).await;
    }
    let address = address.trim_start_matches("http://").trim_end_matches('/');
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    handshake(stream).await
}

async fn handshake<IO>(stream: IO) -> Result<SendRequest<Bytes>>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (connection, driver) = h2::client::Builder::new()
        .initial_window_size(1 << 24)
        .initial_connection_window_size(1 << 24)
        .handshake(stream)
        .await?;
    tokio::spawn(async move {
        // Its calls tell of its end.
        let _ = driver.await;
    });
    Ok(connection)
}

async fn progress(work: Arc<Work>, start: Instant) {
    if !io::stderr().is_terminal() {
        return;
    }
    let mut before = 0;
    loop {
        tokio::time::sleep(PROGRESS).await;
        let asked = work.asked.load(Relaxed);
        let rate = (asked - before) as f64 / PROGRESS.as_secs_f64();
        before = asked;
        let now = Instant::now();
        let phase = if now < start {
            "warming up".to_owned()
        } else {
            format!("{:.0?}", now - start)
        };
        eprint!("\r\x1b[K{phase}: {rate:.0} requests/s");
    }
}

// === impl Messages ===

impl Messages {
    fn pick(&self, keys: u64) -> Bytes {
        let key = if keys > 1 { fastrand::u64(..keys) } else { 0 };
        match self.encoded.get(key as usize) {
            Some(message) => message.clone(),
            None => self.template.encode(key),
        }
    }
}

// === impl Template ===

impl Template {
    fn new(options: &Options) -> Result<Self> {
        let mut descriptors = Vec::new();
        for text in &options.descriptors {
            let entries = text.split(',').map(|pair| {
                let (key, value) = pair
                    .split_once('=')
                    .with_context(|| format!("{pair} is no entry: write key=value"))?;
                Ok((key.to_owned(), value.to_owned()))
            });
            descriptors.push(entries.collect::<Result<Vec<_>>>()?);
        }
        let varies = options.keys > 1;
        let mut values = descriptors.iter_mut().flatten().map(|(_, value)| value);
        if varies
            && !values.any(|value| value.contains("{key}"))
            && let Some((_, value)) = descriptors
                .last_mut()
                .and_then(|entries| entries.last_mut())
        {
            value.push_str("{key}");
        }
        Ok(Self {
            domain: options.domain.clone().into(),
            hits: options.hits,
            descriptors,
            varies,
        })
    }

    /// The message with gRPC's prefix: not compressed, and its length.
    fn encode(&self, key: u64) -> Bytes {
        let key = key.to_string();
        let value = |value: &str| {
            if self.varies {
                value.replace("{key}", &key)
            } else {
                value.to_owned()
            }
        };
        let entry = |(key, text): &(String, String)| Entry {
            key: key.clone().into(),
            value: value(text).into(),
        };
        let message = RateLimitRequest {
            domain: self.domain.clone(),
            descriptors: self
                .descriptors
                .iter()
                .map(|entries| RateLimitDescriptor {
                    entries: entries.iter().map(entry).collect(),
                    ..RateLimitDescriptor::default()
                })
                .collect(),
            hits_addend: self.hits,
        };
        let length = message.encoded_len();
        let mut bytes = BytesMut::with_capacity(5 + length);
        bytes.put_u8(0);
        bytes.put_u32(length as u32);
        bytes.put_slice(&message.encode_to_vec());
        bytes.freeze()
    }
}

// === impl Counts ===

impl Counts {
    fn new() -> Result<Self> {
        Ok(Self {
            times: Histogram::new_with_bounds(1, LONGEST, 3)?,
            codes: [0; 3],
            grpc_errors: BTreeMap::new(),
            transport_errors: 0,
        })
    }

    fn answer(&mut self, answer: Answer, took: Duration) {
        match answer {
            Answer::Code(code) => {
                self.times
                    .saturating_record((took.as_micros() as u64).max(1));
                self.codes[code] += 1;
            }
            Answer::Failed(status) => *self.grpc_errors.entry(status).or_default() += 1,
        }
    }

    fn add(&mut self, other: &Self) -> Result<()> {
        self.times.add(&other.times)?;
        for (sum, count) in self.codes.iter_mut().zip(other.codes) {
            *sum += count;
        }
        for (status, count) in &other.grpc_errors {
            *self.grpc_errors.entry(*status).or_default() += count;
        }
        self.transport_errors += other.transport_errors;
        Ok(())
    }
}

// === impl Pace ===

impl Pace {
    /// Slots take turns, so that requests come evenly.
    fn new(rate: u64, slot: u64, slots: u64) -> Self {
        let turn = Duration::from_secs_f64(1.0 / rate as f64);
        Self {
            interval: turn.mul_f64(slots as f64),
            next: turn.mul_f64(slot as f64),
        }
    }

    fn next(&mut self) -> Duration {
        let due = self.next;
        self.next += self.interval;
        due
    }
}

// === impl Report ===

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = |micros: u64| format!("{:.3} ms", micros as f64 / 1_000.0);
        writeln!(
            f,
            "answers     {} in {:.1} s, {:.0} per second",
            self.answers, self.elapsed, self.per_second
        )?;
        writeln!(
            f,
            "latency     p50 {}, p90 {}, p99 {}, p99.9 {}, max {}",
            millis(self.p50),
            millis(self.p90),
            millis(self.p99),
            millis(self.p999),
            millis(self.max)
        )?;
        let list = |counts: Vec<String>| {
            if counts.is_empty() {
                "none".to_owned()
            } else {
                counts.join(", ")
            }
        };
        let codes = self
            .codes
            .iter()
            .map(|(code, count)| format!("{code} {count}"));
        writeln!(f, "codes       {}", list(codes.collect()))?;
        let errors = self
            .grpc_errors
            .iter()
            .map(|(status, count)| format!("gRPC status {status}: {count}"));
        let lost =
            (self.transport_errors > 0).then(|| format!("no answer: {}", self.transport_errors));
        writeln!(f, "errors      {}", list(errors.chain(lost).collect()))
    }
}
