//! The settings in force: validated, with real types, grouped by who uses them. `table` is the list of all settings
//! with everything that is said about them; `values` says what may be typed. What was typed comes in as [`Flags`]
//! (the command line) and [`Environment`]; nothing here touches the process, the network or the disk.
//!
//! A flag wins over the environment variable, and that over the default. Names, defaults and notation are those of
//! envoyproxy/ratelimit, where it has the setting.

mod table;
mod values;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    time::Duration,
};

use http::HeaderName;
use tracing::Level;

pub use table::Row;
use table::Setting;
use values::{Backend, Reason};

/// All settings of the service.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Where to listen.
    pub listeners: Listeners,
    /// The life of a gRPC connection.
    pub grpc: Grpc,
    /// What one request may hold.
    pub bounds: Bounds,
    /// Where rules are read from, and what is made of them.
    pub rules: Rules,
    /// How requests are decided.
    pub limiting: Limiting,
    /// The response headers; `None` when they are not sent.
    pub headers: Option<Headers>,
    /// The log in memory.
    pub memory: Memory,
    /// The numbers on `/metrics`.
    pub metrics: Metrics,
    /// The end.
    pub drain: Drain,
    /// What is logged about the service itself.
    pub log: Log,
    /// Threads of the runtime; `None` is one per core.
    pub worker_threads: Option<usize>,
    /// Variables of envoyproxy/ratelimit that are set and switch something on, and have no effect here.
    pub without_effect: Vec<&'static str>,
}

/// Where to listen. No two of them share an address, unless the port is 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listeners {
    /// `/json` and `/healthcheck`.
    pub http: Address,
    /// `/metrics`, `/rlconfig` and the like.
    pub debug: Address,
    /// The rate-limit service.
    pub grpc: GrpcListener,
    /// The metrics once more, on a port of their own.
    pub prometheus: Option<Prometheus>,
    /// Most connections at a time on each listener; `None` is no bound.
    pub max_connections: Option<usize>,
}

/// The address of the rate-limit service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrpcListener {
    /// TCP.
    Tcp(Address),
    /// A Unix socket.
    Unix(PathBuf),
}

/// A host and a port, not resolved yet. Shown as `0.0.0.0:8080`, `[::]:8080`, `localhost:8080` or `:8080`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The host.
    pub host: Host,
    /// The port; 0 is any free one.
    pub port: u16,
}

/// What to listen on, before names are resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// Every address of the machine, IPv6 and IPv4 where there is both.
    All,
    /// This one.
    Ip(IpAddr),
    /// The addresses of this name; or an IPv6 literal with a scope, which the resolver reads as well.
    Name(Box<str>),
}

/// A listener for the metrics alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prometheus {
    /// Where.
    pub address: Address,
    /// On which path, with a slash in front.
    pub path: Box<str>,
}

/// The life of a gRPC connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grpc {
    /// After this time, give or take 10 %, a connection is asked to end; `None` is never.
    pub max_connection_age: Option<Duration>,
    /// So long after that it is closed; `None` is never.
    pub max_connection_age_grace: Option<Duration>,
    /// A quiet connection is pinged this often; `None` is never.
    pub keepalive_interval: Option<Duration>,
    /// An unanswered ping closes the connection after this time; never 0.
    pub keepalive_timeout: Duration,
}

/// What one request may hold. Beyond it the call fails, so these lie far above what Envoy can send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of the message.
    pub message_bytes: usize,
    /// Descriptors of the request.
    pub descriptors: usize,
    /// Entries of a descriptor.
    pub entries: usize,
}

/// Where rules are read from, and what is made of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The files.
    pub source: RulesSource,
    /// Several files may add to one domain.
    pub merge_domains: bool,
    /// Serve before the rules were read for the first time.
    pub start_without: bool,
    /// Healthy only while at least one domain has rules.
    pub healthy_with_a_domain_only: bool,
}

/// The files that hold rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RulesSource {
    /// These files, and the files below these directories; not empty.
    Paths(Vec<PathBuf>),
    /// The directory layout of envoyproxy/ratelimit.
    Runtime(RuntimeLayout),
}

/// The directory layout of envoyproxy/ratelimit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeLayout {
    /// The root.
    pub root: PathBuf,
    /// Below the root; relative, may be empty.
    pub subdirectory: PathBuf,
    /// Below that; relative. The rules are in here.
    pub app_directory: PathBuf,
    /// The root is swapped as a whole; otherwise the innermost directory is watched.
    pub watch_root: bool,
    /// Names that start with a dot are left out.
    pub ignore_dotfiles: bool,
}

/// How requests are decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Limiting {
    /// A denied request takes nothing of any limit.
    pub all_or_nothing: bool,
    /// Answer OK whatever the verdict.
    pub shadow_mode: bool,
    /// Every rule is a quota.
    pub quota_mode: bool,
    /// Share of the limit above which a hit is near it; from 0 to 1.
    pub near_limit_ratio: f32,
    /// Answer with dynamic metadata.
    pub dynamic_metadata: bool,
    /// In front of every key; no braces.
    pub key_prefix: Box<str>,
    /// Bytes for remembered denials; 0 is none. Of no use to the log in memory.
    pub denials_max_bytes: u64,
}

/// The names of the response headers; three different ones, in lower case, that may stand in any response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headers {
    /// For the limit.
    pub limit: HeaderName,
    /// For the hits that remain.
    pub remaining: HeaderName,
    /// For the seconds until the reset.
    pub reset: HeaderName,
}

/// The log in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Most bytes for the logs of all keys; at least 1 MiB.
    pub max_bytes: usize,
}

/// The numbers on `/metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metrics {
    /// Most series with values of requests in their names; further ones are counted together.
    pub detailed_max_series: usize,
}

/// The end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// On SIGTERM, from turning unhealthy to taking no more connections.
    pub delay: Duration,
    /// From there, most time for the calls in flight.
    pub timeout: Duration,
}

/// What is logged about the service itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
    /// The least level that is written.
    pub level: Level,
    /// How a line looks.
    pub format: LogFormat,
}

/// How a line of the log looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Where environment variables come from: the process, or a list in a test.
pub trait Environment {
    /// The value of a variable, if it is set; it may be empty, and need not be Unicode.
    fn get(&self, variable: &str) -> Option<OsString>;
}

/// The environment of this process.
#[derive(Clone, Copy, Debug)]
pub struct Process;

/// What was given on the command line, by the variable of the same setting.
#[derive(Clone, Debug, Default)]
pub struct Flags(BTreeMap<&'static str, String>);

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// The environment.
    Variable,
    /// Neither, so the default holds.
    Default,
}

/// A value as it was given, and where.
#[derive(Clone, Debug)]
pub struct Given {
    /// Of which setting.
    pub row: &'static Row,
    /// From where.
    pub origin: Origin,
    /// The text; bytes that are no Unicode are replaced.
    value: String,
    is_unicode: bool,
}

/// Values that can't be used: all of them, related ones together.
#[derive(Debug, thiserror::Error)]
pub struct Invalid {
    problems: Vec<Problem>,
}

/// One thing wrong, with one setting or with several together.
#[derive(Debug)]
struct Problem {
    given: Vec<Given>,
    reason: Reason,
}

/// Reads settings one by one, and keeps every complaint for the end.
struct Reader<'a> {
    flags: &'a Flags,
    environment: &'a dyn Environment,
    problems: Vec<Problem>,
}

// === impl Settings ===

impl Settings {
    /// The settings that flags, environment and defaults add up to. Fails with everything that is wrong, not just
    /// the first.
    pub fn read(flags: &Flags, environment: &dyn Environment) -> Result<Self, Invalid> {
        let mut reader = Reader {
            flags,
            environment,
            problems: Vec::new(),
        };
        let settings = Self {
            rules: Rules::read(&mut reader),
            limiting: Limiting::read(&mut reader),
            headers: Headers::read(&mut reader),
            memory: Memory {
                max_bytes: saturating(reader.get(&table::MEMORY_MAX_BYTES)),
            },
            listeners: Listeners::read(&mut reader),
            grpc: Grpc::read(&mut reader),
            bounds: Bounds {
                message_bytes: saturating(reader.get(&table::MAX_MESSAGE_BYTES)),
                descriptors: saturating(reader.get(&table::MAX_DESCRIPTORS)),
                entries: saturating(reader.get(&table::MAX_ENTRIES)),
            },
            metrics: Metrics {
                detailed_max_series: saturating(reader.get(&table::DETAILED_METRIC_MAX_SERIES)),
            },
            drain: Drain {
                delay: reader.get(&table::DRAIN_DELAY),
                timeout: reader.get(&table::DRAIN_TIMEOUT),
            },
            log: Log {
                level: reader.get(&table::LOG_LEVEL),
                format: reader.get(&table::LOG_FORMAT),
            },
            worker_threads: unless_zero(reader.get(&table::WORKER_THREADS)),
            without_effect: without_effect(environment),
        };
        match reader.problems {
            problems if problems.is_empty() => Ok(settings),
            problems => Err(Invalid { problems }),
        }
    }
}

impl Rules {
    fn read(reader: &mut Reader<'_>) -> Self {
        reader.get(&table::CONFIG_TYPE);
        let paths = reader.get(&table::CONFIG_PATH);
        let layout = RuntimeLayout {
            root: reader.get(&table::RUNTIME_ROOT),
            subdirectory: reader.get(&table::RUNTIME_SUBDIRECTORY),
            app_directory: reader.get(&table::RUNTIME_APPDIRECTORY),
            ignore_dotfiles: reader.get(&table::RUNTIME_IGNOREDOTFILES),
            watch_root: reader.get(&table::RUNTIME_WATCH_ROOT),
        };
        Self {
            source: if paths.is_empty() {
                RulesSource::Runtime(layout)
            } else {
                RulesSource::Paths(paths)
            },
            merge_domains: reader.get(&table::MERGE_DOMAIN_CONFIG),
            start_without: reader.get(&table::FORCE_START_WITHOUT_INITIAL_CONFIG),
            healthy_with_a_domain_only: reader.get(&table::HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED),
        }
    }
}

impl Limiting {
    fn read(reader: &mut Reader<'_>) -> Self {
        let redis_url = reader.get(&table::REDIS_URL);
        let chosen_by = match reader.get(&table::BACKEND_TYPE) {
            Backend::Memory => None,
            Backend::Redis => Some(table::BACKEND_TYPE.row),
            // A compose file that passes on a variable nobody set passes on an empty one.
            Backend::Auto => (!redis_url.is_empty()).then_some(table::REDIS_URL.row),
        };
        if let Some(row) = chosen_by {
            reader.refuse(
                &[row],
                "this version keeps its logs in memory and has no Redis yet, and it will not \
                 quietly limit each instance by itself where one limit for all was asked for; \
                 set BACKEND_TYPE=memory if that is what you want",
            );
        }
        Self {
            all_or_nothing: reader.get(&table::STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT),
            shadow_mode: reader.get(&table::SHADOW_MODE),
            quota_mode: reader.get(&table::QUOTA_MODE),
            near_limit_ratio: reader.get(&table::NEAR_LIMIT_RATIO),
            dynamic_metadata: reader.get(&table::RESPONSE_DYNAMIC_METADATA),
            key_prefix: reader.get(&table::CACHE_KEY_PREFIX),
            denials_max_bytes: reader.get(&table::LOCAL_CACHE_SIZE_IN_BYTES),
        }
    }
}

impl Headers {
    /// The names are read and checked even where they are not sent.
    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let enabled = reader.get(&table::LIMIT_RESPONSE_HEADERS_ENABLED);
        let headers = Self {
            limit: reader.get(&table::LIMIT_LIMIT_HEADER),
            remaining: reader.get(&table::LIMIT_REMAINING_HEADER),
            reset: reader.get(&table::LIMIT_RESET_HEADER),
        };
        let named = [
            (table::LIMIT_LIMIT_HEADER.row, &headers.limit),
            (table::LIMIT_REMAINING_HEADER.row, &headers.remaining),
            (table::LIMIT_RESET_HEADER.row, &headers.reset),
        ];
        for (one, other) in pairs(&named) {
            if one.1 == other.1 {
                reader.refuse(
                    &[one.0, other.0],
                    "expected different headers, as each carries a number of its own",
                );
            }
        }
        enabled.then_some(headers)
    }
}

impl Listeners {
    fn read(reader: &mut Reader<'_>) -> Self {
        let http = Address {
            host: reader.get(&table::HOST),
            port: reader.get(&table::PORT),
        };
        let debug = Address {
            host: reader.get(&table::DEBUG_HOST),
            port: reader.get(&table::DEBUG_PORT),
        };
        let grpc = Address {
            host: reader.get(&table::GRPC_HOST),
            port: reader.get(&table::GRPC_PORT),
        };
        let socket = reader.get(&table::GRPC_UDS);
        let use_prometheus = reader.get(&table::USE_PROMETHEUS);
        let prometheus = Prometheus {
            address: reader.get(&table::PROMETHEUS_ADDR),
            path: reader.get(&table::PROMETHEUS_PATH),
        };

        let mut open = vec![(table::PORT.row, &http), (table::DEBUG_PORT.row, &debug)];
        if socket.is_none() {
            open.push((table::GRPC_PORT.row, &grpc));
        }
        if use_prometheus {
            open.push((table::PROMETHEUS_ADDR.row, &prometheus.address));
        }
        for (one, other) in pairs(&open) {
            if one.1.collides(other.1) {
                reader.refuse(
                    &[one.0, other.0],
                    "expected different ports, as each listener needs one of its own",
                );
            }
        }
        Self {
            http,
            debug,
            grpc: match socket {
                Some(path) => GrpcListener::Unix(path),
                None => GrpcListener::Tcp(grpc),
            },
            prometheus: use_prometheus.then_some(prometheus),
            max_connections: unless_zero(reader.get(&table::MAX_CONNECTIONS)),
        }
    }
}

impl Grpc {
    fn read(reader: &mut Reader<'_>) -> Self {
        reader.get(&table::GRPC_SERVER_USE_TLS);
        Self {
            max_connection_age: reader.get(&table::GRPC_MAX_CONNECTION_AGE),
            max_connection_age_grace: reader.get(&table::GRPC_MAX_CONNECTION_AGE_GRACE),
            keepalive_interval: reader.get(&table::GRPC_KEEPALIVE_INTERVAL),
            keepalive_timeout: reader.get(&table::GRPC_KEEPALIVE_TIMEOUT),
        }
    }
}

// === impl Address ===

impl Address {
    /// Whether two listeners can't have both, as far as can be told without resolving names. A listener of all
    /// IPv6 addresses usually takes the IPv4 ones as well.
    fn collides(&self, other: &Self) -> bool {
        let is_all = |host: &Host| match host {
            Host::All => true,
            Host::Ip(address) => {
                *address == Ipv4Addr::UNSPECIFIED || *address == Ipv6Addr::UNSPECIFIED
            }
            Host::Name(_) => false,
        };
        self.port != 0
            && self.port == other.port
            && (self.host == other.host || is_all(&self.host) || is_all(&other.host))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.port;
        match &self.host {
            Host::All => write!(f, ":{port}"),
            Host::Ip(IpAddr::V6(address)) => write!(f, "[{address}]:{port}"),
            Host::Ip(address) => write!(f, "{address}:{port}"),
            Host::Name(name) if name.contains(':') => write!(f, "[{name}]:{port}"),
            Host::Name(name) => write!(f, "{name}:{port}"),
        }
    }
}

// === impl Environment ===

impl Environment for Process {
    fn get(&self, variable: &str) -> Option<OsString> {
        std::env::var_os(variable)
    }
}

impl<const N: usize> Environment for [(&str, &str); N] {
    fn get(&self, variable: &str) -> Option<OsString> {
        let pair = self.iter().find(|(name, _)| *name == variable);
        pair.map(|(_, value)| value.into())
    }
}

// === impl Flags ===

impl Flags {
    /// Remembers what was given for a setting.
    pub fn set(&mut self, row: &'static Row, value: String) {
        self.0.insert(row.variable, value);
    }
}

// === impl Given ===

impl Given {
    /// What holds for a setting, before it is validated.
    fn of(row: &'static Row, flags: &Flags, environment: &dyn Environment) -> Self {
        let (origin, value) = match (flags.0.get(row.variable), environment.get(row.variable)) {
            (Some(flag), _) => (Origin::Flag, flag.into()),
            (None, Some(value)) => (Origin::Variable, value),
            (None, None) => (Origin::Default, OsString::from(row.default)),
        };
        Self {
            row,
            origin,
            is_unicode: value.to_str().is_some(),
            value: value.to_string_lossy().into_owned(),
        }
    }

    /// The text, in a form that fits a line and gives no secret away.
    pub fn shown(&self) -> String {
        // A value of any use is shorter; a message is read by a person.
        const MOST_CHARS: usize = 200;
        if self.row.is_secret && !self.value.is_empty() {
            return "(not shown)".into();
        }
        let mut shown: String = self.value.chars().take(MOST_CHARS).collect();
        if shown.len() < self.value.len() {
            shown.push('…');
        }
        shown.escape_debug().to_string()
    }
}

/// `PORT="http"`, `--port="http"`, or `PORT="8080" (default)`.
impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (variable, shown) = (self.row.variable, self.shown());
        match self.origin {
            Origin::Flag => write!(f, "--{}=\"{shown}\"", self.row.flag),
            Origin::Variable => write!(f, "{variable}=\"{shown}\""),
            Origin::Default => write!(f, "{variable}=\"{shown}\" (default)"),
        }
    }
}

// === impl Origin ===

/// One word: `flag`, `variable` or `default`.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flag => "flag",
            Self::Variable => "variable",
            Self::Default => "default",
        })
    }
}

// === impl Invalid ===

/// A headline, then one line for each problem.
impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.len() {
            1 => f.write_str("a setting can't be used:")?,
            n => write!(f, "{n} settings can't be used:")?,
        }
        for problem in &self.problems {
            let given: Vec<_> = problem.given.iter().map(Given::to_string).collect();
            write!(f, "\n  {}: {}", given.join(" and "), problem.reason)?;
        }
        Ok(())
    }
}

// === impl Reader ===

impl Reader<'_> {
    /// The value in force. Where it can't be used that is noted, and the default takes its place, so that reading
    /// can go on to the next problem.
    fn get<T>(&mut self, setting: &Setting<T>) -> T {
        let given = Given::of(setting.row, self.flags, self.environment);
        let parsed = if given.is_unicode {
            (setting.parse)(&given.value)
        } else {
            Err("expected text in UTF-8".into())
        };
        parsed.unwrap_or_else(|reason| {
            self.problems.push(Problem {
                given: vec![given],
                reason,
            });
            (setting.parse)(setting.row.default).expect("defaults are valid, which a test checks")
        })
    }

    /// Notes a problem that shows only when settings are seen together.
    fn refuse(&mut self, rows: &[&'static Row], reason: &'static str) {
        let given = rows
            .iter()
            .map(|row| Given::of(row, self.flags, self.environment));
        self.problems.push(Problem {
            given: given.collect(),
            reason: reason.into(),
        });
    }
}

/// Every setting, in the order of the help.
pub fn rows() -> &'static [&'static Row] {
    table::ROWS
}

/// What was given for every setting, in the order of the help.
pub fn given(flags: &Flags, environment: &dyn Environment) -> Vec<Given> {
    rows()
        .iter()
        .map(|row| Given::of(row, flags, environment))
        .collect()
}

/// The variables of the reference that ask for something that is not there. Switching it off asks for nothing.
fn without_effect(environment: &dyn Environment) -> Vec<&'static str> {
    let asks = |variable: &&&'static str| {
        environment.get(variable).is_some_and(|value| {
            !value.is_empty() && value.to_str().map(values::boolean) != Some(Ok(false))
        })
    };
    table::WITHOUT_EFFECT.iter().filter(asks).copied().collect()
}

/// Every two of a list.
fn pairs<T>(list: &[T]) -> impl Iterator<Item = (&T, &T)> {
    list.iter()
        .enumerate()
        .flat_map(|(index, one)| list[index + 1..].iter().map(move |other| (one, other)))
}

/// A bound as this machine counts.
fn saturating(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// A bound that 0 lifts.
fn unless_zero(number: u64) -> Option<usize> {
    Some(saturating(number)).filter(|number| *number != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<const N: usize>(environment: [(&str, &str); N]) -> Settings {
        Settings::read(&Flags::default(), &environment).unwrap()
    }

    fn errors<const N: usize>(environment: [(&str, &str); N]) -> String {
        let read = Settings::read(&Flags::default(), &environment);
        read.expect_err("these settings are invalid").to_string()
    }

    fn flags(given: &[(&str, &str)]) -> Flags {
        let mut flags = Flags::default();
        for (variable, value) in given {
            let row = rows().iter().find(|row| row.variable == *variable);
            flags.set(row.unwrap(), (*value).into());
        }
        flags
    }

    fn tcp(host: &str, port: u16) -> Address {
        let host = Host::Ip(host.parse().unwrap());
        Address { host, port }
    }

    const MIB: usize = 1 << 20;
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_defaults() {
        let want = Settings {
            listeners: Listeners {
                http: tcp("0.0.0.0", 8080),
                debug: tcp("0.0.0.0", 6070),
                grpc: GrpcListener::Tcp(tcp("0.0.0.0", 8081)),
                prometheus: None,
                max_connections: Some(20_000),
            },
            grpc: Grpc {
                max_connection_age: Some(24 * 3600 * SECOND),
                max_connection_age_grace: Some(3600 * SECOND),
                keepalive_interval: Some(30 * SECOND),
                keepalive_timeout: 10 * SECOND,
            },
            bounds: Bounds {
                message_bytes: 4 * MIB,
                descriptors: 1000,
                entries: 1000,
            },
            rules: Rules {
                source: RulesSource::Runtime(RuntimeLayout {
                    root: "/srv/runtime_data/current".into(),
                    subdirectory: "".into(),
                    app_directory: "config".into(),
                    watch_root: true,
                    ignore_dotfiles: false,
                }),
                merge_domains: false,
                start_without: false,
                healthy_with_a_domain_only: false,
            },
            limiting: Limiting {
                all_or_nothing: true,
                shadow_mode: false,
                quota_mode: false,
                near_limit_ratio: 0.8,
                dynamic_metadata: false,
                key_prefix: "".into(),
                denials_max_bytes: 0,
            },
            headers: None,
            memory: Memory {
                max_bytes: 1024 * MIB,
            },
            metrics: Metrics {
                detailed_max_series: 10_000,
            },
            drain: Drain {
                delay: 5 * SECOND,
                timeout: 20 * SECOND,
            },
            log: Log {
                level: Level::WARN,
                format: LogFormat::Text,
            },
            worker_threads: None,
            without_effect: vec![],
        };
        assert_eq!(read([]), want);
    }

    /// Names and defaults as envoyproxy/ratelimit documents them; ours differ where it says so.
    #[test]
    fn defaults_in_the_notation_of_the_reference() {
        for (variable, default) in [
            ("HOST", "0.0.0.0"),
            ("PORT", "8080"),
            ("DEBUG_HOST", "0.0.0.0"),
            ("DEBUG_PORT", "6070"),
            ("GRPC_HOST", "0.0.0.0"),
            ("GRPC_PORT", "8081"),
            ("GRPC_UDS", ""),
            ("GRPC_MAX_CONNECTION_AGE", "24h"),
            ("GRPC_MAX_CONNECTION_AGE_GRACE", "1h"),
            ("GRPC_SERVER_USE_TLS", "false"),
            ("LOG_LEVEL", "WARN"),
            ("LOG_FORMAT", "text"),
            ("CONFIG_TYPE", "FILE"),
            ("FORCE_START_WITHOUT_INITIAL_CONFIG", "false"),
            ("RUNTIME_ROOT", "/srv/runtime_data/current"),
            ("RUNTIME_SUBDIRECTORY", ""),
            ("RUNTIME_APPDIRECTORY", "config"),
            ("RUNTIME_IGNOREDOTFILES", "false"),
            ("RUNTIME_WATCH_ROOT", "true"),
            ("MERGE_DOMAIN_CONFIG", "false"),
            ("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "false"),
            ("USE_PROMETHEUS", "false"),
            ("PROMETHEUS_ADDR", ":9090"),
            ("PROMETHEUS_PATH", "/metrics"),
            ("LOCAL_CACHE_SIZE_IN_BYTES", "0"),
            ("NEAR_LIMIT_RATIO", "0.8"),
            ("CACHE_KEY_PREFIX", ""),
            ("SHADOW_MODE", "false"),
            ("QUOTA_MODE", "false"),
            ("RESPONSE_DYNAMIC_METADATA", "false"),
            ("LIMIT_RESPONSE_HEADERS_ENABLED", "false"),
            ("LIMIT_LIMIT_HEADER", "RateLimit-Limit"),
            ("LIMIT_REMAINING_HEADER", "RateLimit-Remaining"),
            ("LIMIT_RESET_HEADER", "RateLimit-Reset"),
            // The reference: redis, a socket of nutcracker, and false.
            ("BACKEND_TYPE", ""),
            ("REDIS_URL", ""),
            ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true"),
        ] {
            let row = rows().iter().find(|row| row.variable == variable);
            assert_eq!(row.map(|row| row.default), Some(default), "{variable}");
        }
    }

    #[test]
    fn every_row_is_whole_and_read() {
        /// Notes which variables are asked for.
        struct Asked(std::cell::RefCell<Vec<String>>);
        impl Environment for Asked {
            fn get(&self, variable: &str) -> Option<OsString> {
                self.0.borrow_mut().push(variable.into());
                None
            }
        }
        let asked = Asked(Vec::new().into());
        Settings::read(&Flags::default(), &asked).unwrap();
        let asked = asked.0.into_inner();
        for row in rows() {
            let times = asked.iter().filter(|name| *name == row.variable).count();
            assert_eq!(times, 1, "{} is read once", row.variable);
            // 10 columns of indentation and some for the default leave this much of a line.
            let meaning = row.meaning();
            assert!((10..=100).contains(&meaning.chars().count()), "{meaning}");
            assert!(!meaning.ends_with('.') && !row.group.is_empty() && !row.value.is_empty());
            assert!(!row.detail().starts_with('\n'), "{}", row.variable);
        }
        let mut names: Vec<_> = rows().iter().map(|row| row.flag).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), rows().len(), "no flag twice");
        for variable in table::WITHOUT_EFFECT {
            assert!(
                rows().iter().all(|row| row.variable != *variable),
                "{variable}"
            );
        }
    }

    #[test]
    fn a_flag_wins_over_the_variable_and_that_over_the_default() {
        let environment = [("PORT", "1"), ("DEBUG_PORT", "2")];
        let flags = flags(&[("PORT", "3")]);
        let settings = Settings::read(&flags, &environment).unwrap();
        assert_eq!(settings.listeners.http.port, 3);
        assert_eq!(settings.listeners.debug.port, 2);
        assert_eq!(
            settings.listeners.grpc,
            GrpcListener::Tcp(tcp("0.0.0.0", 8081))
        );

        let shown: Vec<_> = given(&flags, &environment)
            .into_iter()
            .filter(|given| given.row.variable.ends_with("PORT"))
            .map(|given| format!("{} {}", given.shown(), given.origin))
            .collect();
        assert_eq!(shown, ["3 flag", "2 variable", "8081 default"]);
    }

    #[test]
    fn a_good_flag_hides_a_bad_variable() {
        let settings = Settings::read(&flags(&[("PORT", "0")]), &[("PORT", "http")]).unwrap();
        assert_eq!(settings.listeners.http.port, 0);
    }

    #[test]
    fn every_value_reaches_its_field() {
        let settings = read([
            ("HOST", "::"),
            ("PORT", "1"),
            ("DEBUG_HOST", "localhost"),
            ("DEBUG_PORT", "2"),
            ("GRPC_UDS", "/run/g.sock"),
            ("USE_PROMETHEUS", "1"),
            ("PROMETHEUS_ADDR", ":3"),
            ("PROMETHEUS_PATH", "/m"),
            ("MAX_CONNECTIONS", "0"),
            ("GRPC_MAX_CONNECTION_AGE", "0"),
            ("GRPC_MAX_CONNECTION_AGE_GRACE", "2m"),
            ("GRPC_KEEPALIVE_INTERVAL", "3s"),
            ("GRPC_KEEPALIVE_TIMEOUT", "4s"),
            ("MAX_MESSAGE_BYTES", "1MiB"),
            ("MAX_DESCRIPTORS", "5"),
            ("MAX_ENTRIES", "6"),
            ("MERGE_DOMAIN_CONFIG", "t"),
            ("FORCE_START_WITHOUT_INITIAL_CONFIG", "T"),
            ("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "True"),
            ("CONFIG_PATH", "a.yaml,rules"),
            ("BACKEND_TYPE", "memory"),
            ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "false"),
            ("SHADOW_MODE", "true"),
            ("QUOTA_MODE", "true"),
            ("NEAR_LIMIT_RATIO", "0.5"),
            ("RESPONSE_DYNAMIC_METADATA", "true"),
            ("CACHE_KEY_PREFIX", "p:"),
            ("LOCAL_CACHE_SIZE_IN_BYTES", "7"),
            ("LIMIT_RESPONSE_HEADERS_ENABLED", "true"),
            ("LIMIT_LIMIT_HEADER", "X-Lim"),
            ("LIMIT_REMAINING_HEADER", "X-Rem"),
            ("LIMIT_RESET_HEADER", "X-Rst"),
            ("MEMORY_MAX_BYTES", "2MiB"),
            ("DETAILED_METRIC_MAX_SERIES", "0"),
            ("DRAIN_DELAY", "0"),
            ("DRAIN_TIMEOUT", "8s"),
            ("LOG_LEVEL", "debug"),
            ("LOG_FORMAT", "json"),
            ("WORKER_THREADS", "9"),
        ]);
        let want = Settings {
            listeners: Listeners {
                http: tcp("::", 1),
                debug: Address {
                    host: Host::Name("localhost".into()),
                    port: 2,
                },
                grpc: GrpcListener::Unix("/run/g.sock".into()),
                prometheus: Some(Prometheus {
                    address: Address {
                        host: Host::All,
                        port: 3,
                    },
                    path: "/m".into(),
                }),
                max_connections: None,
            },
            grpc: Grpc {
                max_connection_age: None,
                max_connection_age_grace: Some(120 * SECOND),
                keepalive_interval: Some(3 * SECOND),
                keepalive_timeout: 4 * SECOND,
            },
            bounds: Bounds {
                message_bytes: MIB,
                descriptors: 5,
                entries: 6,
            },
            rules: Rules {
                source: RulesSource::Paths(vec!["a.yaml".into(), "rules".into()]),
                merge_domains: true,
                start_without: true,
                healthy_with_a_domain_only: true,
            },
            limiting: Limiting {
                all_or_nothing: false,
                shadow_mode: true,
                quota_mode: true,
                near_limit_ratio: 0.5,
                dynamic_metadata: true,
                key_prefix: "p:".into(),
                denials_max_bytes: 7,
            },
            headers: Some(Headers {
                limit: HeaderName::from_static("x-lim"),
                remaining: HeaderName::from_static("x-rem"),
                reset: HeaderName::from_static("x-rst"),
            }),
            memory: Memory { max_bytes: 2 * MIB },
            metrics: Metrics {
                detailed_max_series: 0,
            },
            drain: Drain {
                delay: Duration::ZERO,
                timeout: 8 * SECOND,
            },
            log: Log {
                level: Level::DEBUG,
                format: LogFormat::Json,
            },
            worker_threads: Some(9),
            without_effect: vec![],
        };
        assert_eq!(settings, want);
    }

    #[test]
    fn the_runtime_layout() {
        let settings = read([
            ("CONFIG_PATH", ""),
            ("RUNTIME_ROOT", "/data"),
            ("RUNTIME_SUBDIRECTORY", "/ratelimit"),
            ("RUNTIME_APPDIRECTORY", "rules"),
            ("RUNTIME_IGNOREDOTFILES", "true"),
            ("RUNTIME_WATCH_ROOT", "false"),
        ]);
        let layout = RuntimeLayout {
            root: "/data".into(),
            subdirectory: "ratelimit".into(),
            app_directory: "rules".into(),
            watch_root: false,
            ignore_dotfiles: true,
        };
        assert_eq!(settings.rules.source, RulesSource::Runtime(layout));
    }

    /// One bad value for every setting that can have one, all refused in one go, each with its name and value.
    #[test]
    fn all_bad_values_are_named_at_once() {
        let bad = [
            ("CONFIG_PATH", "a,,b"),
            ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
            ("RUNTIME_IGNOREDOTFILES", "maybe"),
            ("RUNTIME_WATCH_ROOT", ""),
            ("MERGE_DOMAIN_CONFIG", "yes"),
            ("FORCE_START_WITHOUT_INITIAL_CONFIG", "on"),
            ("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "2"),
            ("BACKEND_TYPE", "memcache"),
            ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "no"),
            ("SHADOW_MODE", "x"),
            ("QUOTA_MODE", "y"),
            ("NEAR_LIMIT_RATIO", "1.5"),
            ("RESPONSE_DYNAMIC_METADATA", "z"),
            ("CACHE_KEY_PREFIX", "a{b"),
            ("LOCAL_CACHE_SIZE_IN_BYTES", "-1"),
            ("LIMIT_RESPONSE_HEADERS_ENABLED", "w"),
            ("LIMIT_LIMIT_HEADER", "host"),
            ("LIMIT_REMAINING_HEADER", ":path"),
            ("LIMIT_RESET_HEADER", "a b"),
            ("MEMORY_MAX_BYTES", "1000"),
            ("HOST", "a:1"),
            ("PORT", "http"),
            ("DEBUG_HOST", "b:1"),
            ("DEBUG_PORT", "65536"),
            ("GRPC_HOST", "c:1"),
            ("GRPC_PORT", "-5"),
            ("USE_PROMETHEUS", "v"),
            ("PROMETHEUS_ADDR", "9090"),
            ("PROMETHEUS_PATH", "metrics"),
            ("MAX_CONNECTIONS", "many"),
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_MAX_CONNECTION_AGE", "24"),
            ("GRPC_MAX_CONNECTION_AGE_GRACE", "1d"),
            ("GRPC_KEEPALIVE_INTERVAL", "-1s"),
            ("GRPC_KEEPALIVE_TIMEOUT", "0"),
            ("MAX_MESSAGE_BYTES", "10"),
            ("MAX_DESCRIPTORS", "0"),
            ("MAX_ENTRIES", "none"),
            ("DETAILED_METRIC_MAX_SERIES", "1.5"),
            ("DRAIN_DELAY", ""),
            ("DRAIN_TIMEOUT", "soon"),
            ("LOG_LEVEL", "loud"),
            ("LOG_FORMAT", "xml"),
            ("WORKER_THREADS", "1025"),
        ];
        let errors = errors(bad);
        for (variable, value) in bad {
            let line = format!("\n  {variable}=\"{value}\": ");
            assert_eq!(errors.matches(&line).count(), 1, "{line} in {errors}");
        }
        assert_eq!(errors.lines().count(), 1 + bad.len(), "{errors}");
        assert!(errors.starts_with("44 settings can't be used:"), "{errors}");
    }

    #[test]
    fn a_bad_flag_is_named_as_a_flag() {
        let invalid = Settings::read(&flags(&[("NEAR_LIMIT_RATIO", "2")]), &[]).unwrap_err();
        assert_eq!(
            invalid.to_string(),
            "a setting can't be used:\n  --near-limit-ratio=\"2\": expected a number from 0 to 1, such as 0.8"
        );
    }

    #[test]
    fn what_is_shown_of_a_value_fits_a_line() {
        let long = format!("\n\u{1b}{}", "x".repeat(1000));
        let errors = errors([("PORT", &long)]);
        assert_eq!(errors.lines().count(), 2, "{errors}");
        assert!(errors.contains("PORT=\"\\n\\u{1b}xxx"), "{errors}");
        assert!(
            errors.contains("x…\": expected") && errors.len() < 400,
            "{errors}"
        );
    }

    #[cfg(unix)]
    #[test]
    fn text_that_is_no_unicode_is_refused() {
        use std::os::unix::ffi::OsStringExt;
        struct Bytes;
        impl Environment for Bytes {
            fn get(&self, variable: &str) -> Option<OsString> {
                (variable == "RUNTIME_ROOT").then(|| OsString::from_vec(b"/a\xff".into()))
            }
        }
        let errors = Settings::read(&Flags::default(), &Bytes)
            .unwrap_err()
            .to_string();
        assert!(
            errors.contains("RUNTIME_ROOT=\"/a\u{fffd}\": expected text in UTF-8"),
            "{errors}"
        );
    }

    #[test]
    fn unknown_variables_are_no_error() {
        assert_eq!(read([("PROT", "x"), ("RATELIMIT_PORT", "y")]), read([]));
    }

    #[test]
    fn what_the_reference_would_do_and_we_do_not_is_noted() {
        let settings = read([
            ("USE_STATSD", "false"),
            ("REDIS_PERSECOND", "0"),
            ("EXTRA_TAGS", ""),
            ("TRACING_ENABLED", "true"),
            ("STATSD_HOST", "statsd"),
        ]);
        assert_eq!(settings.without_effect, ["STATSD_HOST", "TRACING_ENABLED"]);
    }

    #[test]
    fn redis_is_refused_wherever_it_would_be_chosen() {
        let url = "redis://user:hunter2@host:6379";
        for (backend, redis_url, allowed, named) in [
            ("", "", true, ""),
            ("memory", "", true, ""),
            ("memory", url, true, ""),
            ("redis", "", false, "BACKEND_TYPE=\"redis\": "),
            ("redis", url, false, "BACKEND_TYPE=\"redis\": "),
            ("", url, false, "REDIS_URL=\"(not shown)\": "),
        ] {
            let environment = [("BACKEND_TYPE", backend), ("REDIS_URL", redis_url)];
            match Settings::read(&Flags::default(), &environment) {
                Ok(_) => assert!(allowed, "{environment:?}"),
                Err(invalid) => {
                    let errors = invalid.to_string();
                    assert!(!allowed && errors.contains(named), "{errors}");
                    assert!(errors.contains("set BACKEND_TYPE=memory"), "{errors}");
                    assert!(!errors.contains("hunter2"), "{errors}");
                }
            }
        }
        let errors = errors([("REDIS_URL", url)]);
        assert_eq!(errors.lines().count(), 2, "{errors}");
        let listed = given(&Flags::default(), &[("REDIS_URL", url)]);
        let listed: Vec<_> = listed.iter().map(Given::shown).collect();
        assert!(listed.contains(&"(not shown)".into()));
        assert!(!listed.concat().contains("hunter2"));
    }

    #[test]
    fn header_names_must_differ_whatever_their_case() {
        let errors = errors([("LIMIT_LIMIT_HEADER", "x-a"), ("LIMIT_RESET_HEADER", "X-A")]);
        let names = "LIMIT_LIMIT_HEADER=\"x-a\" and LIMIT_RESET_HEADER=\"X-A\": expected different";
        assert!(errors.contains(names), "{errors}");
        let errors = super::tests::errors([("LIMIT_LIMIT_HEADER", "ratelimit-reset")]);
        assert!(
            errors.contains("LIMIT_RESET_HEADER=\"RateLimit-Reset\" (default)"),
            "{errors}"
        );
    }

    #[test]
    fn listeners_need_ports_of_their_own() {
        let clash = errors([("PORT", "8081")]);
        assert!(
            clash.contains("PORT=\"8081\" and GRPC_PORT=\"8081\" (default): "),
            "{clash}"
        );
        let clash = errors([("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", ":6070")]);
        assert!(
            clash.contains("DEBUG_PORT=\"6070\" (default) and PROMETHEUS_ADDR="),
            "{clash}"
        );
        errors([("PORT", "8081"), ("HOST", "127.0.0.1")]);
        errors([("PORT", "8081"), ("HOST", "::")]);

        read([("PORT", "0"), ("GRPC_PORT", "0"), ("DEBUG_PORT", "0")]);
        read([("PORT", "8081"), ("GRPC_UDS", "/run/g.sock")]);
        read([("PROMETHEUS_ADDR", ":6070")]);
        read([
            ("PORT", "8081"),
            ("HOST", "127.0.0.1"),
            ("GRPC_HOST", "127.0.0.2"),
        ]);
    }

    #[test]
    fn addresses_are_shown_as_they_are_typed() {
        let shown = |host, port| Address { host, port }.to_string();
        assert_eq!(shown(Host::All, 1), ":1");
        assert_eq!(shown(Host::Ip("::1".parse().unwrap()), 2), "[::1]:2");
        assert_eq!(shown(Host::Ip("1.2.3.4".parse().unwrap()), 3), "1.2.3.4:3");
        assert_eq!(shown(Host::Name("a.b".into()), 4), "a.b:4");
        assert_eq!(shown(Host::Name("fe80::1%lo".into()), 5), "[fe80::1%lo]:5");
    }
}
