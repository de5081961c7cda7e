//! Every setting, once: its variable, its default, the kind of its value and what it means. Flags, environment
//! variables, `--help`, the list of settings in force and the reference page are all made from these rows.
//!
//! The doc comment of a row is its text. The first paragraph is the one line of `--help`; what follows says what
//! the setting bounds and what happens at the worst.

use std::{path::PathBuf, time::Duration};

use http::HeaderName;
use tracing::Level;

use super::{
    Address, Host, LogFormat,
    values::{
        self, Backend, Reason, address, backend, boolean, config_type, count, duration,
        header_name, host, http_path, key_prefix, level, log_format, no_tls, path, path_below,
        paths, port, ratio, size, socket_path, some_time, time_or_never,
    },
};

/// What is said about a setting.
#[derive(Debug)]
pub struct Row {
    /// The environment variable.
    pub variable: &'static str,
    /// The flag without its dashes: `grpc-port`. The variable in small letters, unless a row says otherwise.
    pub flag: &'static str,
    /// The heading it stands under.
    pub group: &'static str,
    /// A word for its values.
    pub value: &'static str,
    /// What holds when neither flag nor variable is given, in the notation of the variable.
    pub default: &'static str,
    /// Takes true or false, so that the flag alone means true.
    pub is_switch: bool,
    /// The flag may be given several times; the values add up to a list with commas between.
    pub is_list: bool,
    /// May hold a password: never shown.
    pub is_secret: bool,
    /// The lines of its doc comment.
    doc: &'static [&'static str],
}

/// A row together with what its text becomes.
#[derive(Debug)]
pub struct Setting<T> {
    pub row: &'static Row,
    pub parse: fn(&str) -> Result<T, Reason>,
}

// === impl Row ===

impl Row {
    const fn new(
        variable: &'static str,
        flag: &'static str,
        group: &'static str,
        value: &'static str,
        default: &'static str,
        doc: &'static [&'static str],
    ) -> Self {
        Self {
            variable,
            flag,
            group,
            value,
            default,
            is_switch: matches!(value.as_bytes(), b"BOOL"),
            is_list: false,
            is_secret: false,
            doc,
        }
    }

    /// The one line of `--help`, without a full stop.
    pub fn meaning(&self) -> String {
        let lines = self.doc.iter().map(|line| line.trim());
        let first: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
        first.join(" ").trim_end_matches('.').into()
    }

    /// What there is to say beyond the one line, in paragraphs with an empty line between; may be empty.
    pub fn detail(&self) -> String {
        let lines = self.doc.iter().map(|line| line.trim());
        let rest: Vec<_> = lines.skip_while(|line| !line.is_empty()).skip(1).collect();
        rest.join("\n")
    }
}

/// A variable in the spelling of flags, as text that lives for ever, which is what clap takes.
macro_rules! flag {
    ($name:ident) => {{
        const FLAG: [u8; stringify!($name).len()] = {
            let mut bytes = [0; stringify!($name).len()];
            let mut at = 0;
            while at < bytes.len() {
                bytes[at] = match stringify!($name).as_bytes()[at] {
                    b'_' => b'-',
                    byte => byte.to_ascii_lowercase(),
                };
                at += 1;
            }
            bytes
        };
        match std::str::from_utf8(&FLAG) {
            Ok(flag) => flag,
            Err(_) => unreachable!(),
        }
    }};
}

macro_rules! table {
    ($($group:literal {
        $(
            $(#[doc = $doc:literal])+
            $name:ident: $type:ty = $default:literal, $parse:expr, $value:literal
            $(, $extra:ident = $setting:expr)*;
        )+
    })+) => {
        $($(
            $(#[doc = $doc])+
            pub const $name: Setting<$type> = Setting {
                row: &Row {
                    $($extra: $setting,)*
                    ..Row::new(stringify!($name), flag!($name), $group, $value, $default, &[$($doc),+])
                },
                parse: $parse,
            };
        )+)+

        /// All rows, in the order of the help.
        pub const ROWS: &[&Row] = &[$($($name.row),+),+];
    };
}

table! {
    "Rules" {
        /// Rule files, or directories of them, in place of the RUNTIME_* directories.
        ///
        /// With commas between, or the flag several times. A directory stands for every file below it. When it
        /// is set, the RUNTIME_* settings say nothing. The files are watched, and read again when they change.
        CONFIG_PATH: Vec<PathBuf> = "", paths, "PATH", flag = "config", is_list = true;

        /// Where rules come from; FILE is what there is.
        CONFIG_TYPE: () = "FILE", config_type, "TYPE";

        /// Root of the rule directories.
        RUNTIME_ROOT: PathBuf = "/srv/runtime_data/current", path, "DIR";

        /// Directory below the root that holds the rule directory.
        RUNTIME_SUBDIRECTORY: PathBuf = "", path_below, "DIR";

        /// Directory of the rules, below the other two.
        RUNTIME_APPDIRECTORY: PathBuf = "config", path_below, "DIR";

        /// Leave out files and directories whose names start with a dot.
        ///
        /// Names that start with two dots, as in a mounted ConfigMap, are left out in any case.
        RUNTIME_IGNOREDOTFILES: bool = "false", boolean, "BOOL";

        /// Watch for a swap of RUNTIME_ROOT itself; with false, watch the directory of the rules.
        ///
        /// With true, every file below root/subdirectory whose path, with dots for slashes, starts with the
        /// appdirectory and a dot holds rules. With false, every file below root/subdirectory/appdirectory does;
        /// a mounted ConfigMap needs this one.
        RUNTIME_WATCH_ROOT: bool = "true", boolean, "BOOL";

        /// Let several files add to one domain.
        MERGE_DOMAIN_CONFIG: bool = "false", boolean, "BOOL";

        /// Open the ports before the rules were read for the first time.
        FORCE_START_WITHOUT_INITIAL_CONFIG: bool = "false", boolean, "BOOL";

        /// Be healthy only while at least one domain has rules.
        HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED: bool = "false", boolean, "BOOL";
    }

    "Limiting" {
        /// Where hits are logged: memory, which is also chosen while REDIS_URL is not set.
        ///
        /// In memory, each process limits by itself: two behind one address admit twice as much.
        BACKEND_TYPE: Backend = "", backend, "TYPE";

        /// Redis for the logs; not in this version, so leave it out or set BACKEND_TYPE=memory.
        REDIS_URL: Box<str> = "", values::text, "URL", is_secret = true;

        /// A request that is denied takes nothing from any limit.
        ///
        /// The opposite of envoyproxy/ratelimit's default: only an explicit false lets a denied request use up
        /// the limits of its other descriptors.
        STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT: bool = "true", boolean, "BOOL";

        /// Count and report everything, deny nothing.
        SHADOW_MODE: bool = "false", boolean, "BOOL";

        /// Treat every rule as a quota: deny only when all of a request's rules are over.
        QUOTA_MODE: bool = "false", boolean, "BOOL";

        /// Share of a limit above which hits count as near the limit in the metrics.
        NEAR_LIMIT_RATIO: f32 = "0.8", ratio, "RATIO";

        /// Return the request and its rules' metadata to Envoy as dynamic metadata.
        RESPONSE_DYNAMIC_METADATA: bool = "false", boolean, "BOOL";

        /// Text in front of every key; no braces.
        CACHE_KEY_PREFIX: Box<str> = "", key_prefix, "TEXT";

        /// Memory for remembering denials in front of Redis; the log in memory needs none.
        LOCAL_CACHE_SIZE_IN_BYTES: u64 = "0", size::<0, { u64::MAX }>, "BYTES";
    }

    "Response headers" {
        /// Send limit, remaining and reset as response headers.
        LIMIT_RESPONSE_HEADERS_ENABLED: bool = "false", boolean, "BOOL";

        /// Header with the limit.
        LIMIT_LIMIT_HEADER: HeaderName = "RateLimit-Limit", header_name, "NAME";

        /// Header with the hits that remain.
        LIMIT_REMAINING_HEADER: HeaderName = "RateLimit-Remaining", header_name, "NAME";

        /// Header with the seconds until the reset.
        LIMIT_RESET_HEADER: HeaderName = "RateLimit-Reset", header_name, "NAME";
    }

    "Log in memory" {
        /// Most memory for the logs of hits.
        ///
        /// Beyond it, the keys that were used least recently are dropped, idle ones first: a client whose log is
        /// dropped starts anew, so too small a bound admits too much, which the metrics show. The process needs
        /// some tens of MiB beside it.
        MEMORY_MAX_BYTES: u64 = "1GiB", size::<{ 1 << 20 }, { u64::MAX }>, "BYTES";
    }

    "Listeners" {
        /// Address of the HTTP listener (/json, /healthcheck); a name, IPv4 or IPv6.
        HOST: Host = "0.0.0.0", host, "HOST";

        /// Port of the HTTP listener; 0 takes a free one, as for every port.
        PORT: u16 = "8080", port, "PORT";

        /// Address of the debug listener (/metrics, /rlconfig).
        DEBUG_HOST: Host = "0.0.0.0", host, "HOST";

        /// Port of the debug listener.
        DEBUG_PORT: u16 = "6070", port, "PORT";

        /// Address of the gRPC listener.
        GRPC_HOST: Host = "0.0.0.0", host, "HOST";

        /// Port of the gRPC listener.
        GRPC_PORT: u16 = "8081", port, "PORT";

        /// Unix socket for gRPC, in place of host and port.
        GRPC_UDS: Option<PathBuf> = "", socket_path, "PATH";

        /// Serve the metrics on a listener of their own as well.
        USE_PROMETHEUS: bool = "false", boolean, "BOOL";

        /// Address of that listener.
        PROMETHEUS_ADDR: Address = ":9090", address, "HOST:PORT";

        /// Path of the metrics on that listener.
        PROMETHEUS_PATH: Box<str> = "/metrics", http_path, "PATH";

        /// Most connections at a time on each listener; 0 is no bound.
        ///
        /// Bounds file descriptors and memory against a flood of connections. At the bound, new connections wait
        /// in the kernel's queue until others end. One Envoy opens a connection per worker thread.
        MAX_CONNECTIONS: u64 = "20000", count::<0, 1_000_000>, "NUMBER";
    }

    "gRPC connections" {
        /// TLS on the gRPC listener; not in this version, so true stops the start.
        GRPC_SERVER_USE_TLS: () = "false", no_tls, "BOOL";

        /// Ask a connection to end after this time (give or take 10 %); 0 is never.
        ///
        /// Envoy then connects anew, which spreads long-lived connections over new instances.
        GRPC_MAX_CONNECTION_AGE: Option<Duration> = "24h", time_or_never, "DURATION";

        /// Close it for good this long after asking; 0 is never.
        GRPC_MAX_CONNECTION_AGE_GRACE: Option<Duration> = "1h", time_or_never, "DURATION";

        /// Ping a quiet connection this often; 0 is never.
        GRPC_KEEPALIVE_INTERVAL: Option<Duration> = "30s", time_or_never, "DURATION";

        /// Close a connection whose ping is not answered in this time.
        ///
        /// A peer that vanished without a word holds its connection for interval and timeout together.
        GRPC_KEEPALIVE_TIMEOUT: Duration = "10s", some_time, "DURATION";
    }

    "Bounds on requests" {
        /// Largest request message; beyond it the call fails with status UNKNOWN, as for the next two.
        ///
        /// Bounds the memory of a call. Envoy passes a request whose call fails (unless it is told not to), so
        /// the bounds lie far above what it sends.
        MAX_MESSAGE_BYTES: u64 = "4MiB", size::<{ 1 << 10 }, { 1 << 30 }>, "BYTES";

        /// Most descriptors in a request.
        ///
        /// Bounds the work of a call: each descriptor is a walk through the rules and a look into a log.
        MAX_DESCRIPTORS: u64 = "1000", count::<1, 1_000_000>, "NUMBER";

        /// Most entries in a descriptor.
        MAX_ENTRIES: u64 = "1000", count::<1, 1_000_000>, "NUMBER";
    }

    "Metrics" {
        /// Most series whose names hold values of requests (detailed_metric); 0 keeps none apart.
        ///
        /// Bounds memory and the size of the metrics page, as clients choose the values. Beyond it, further
        /// values are counted together.
        DETAILED_METRIC_MAX_SERIES: u64 = "10000", count::<0, 10_000_000>, "NUMBER";
    }

    "Shutting down" {
        /// On SIGTERM, serve on for this long after turning unhealthy; SIGINT does not wait.
        ///
        /// The time that load balancers need to notice. Together with DRAIN_TIMEOUT it should be less than what
        /// the supervisor allows (Kubernetes: terminationGracePeriodSeconds, 30 s).
        DRAIN_DELAY: Duration = "5s", duration, "DURATION";

        /// Then wait at most this long for calls in flight.
        DRAIN_TIMEOUT: Duration = "20s", duration, "DURATION";
    }

    "Process" {
        /// Least level that is logged: panic, fatal, error, warn, info, debug or trace.
        LOG_LEVEL: Level = "WARN", level, "LEVEL";

        /// Form of the log on stderr: text or json.
        LOG_FORMAT: LogFormat = "text", log_format, "FORMAT";

        /// Threads that serve; 0 is one per core.
        WORKER_THREADS: u64 = "0", count::<0, 1024>, "NUMBER";
    }
}

/// Variables of envoyproxy/ratelimit that this version reads nothing from. Setting one is no error; the start
/// says so, as whoever set it may count on it.
pub const WITHOUT_EFFECT: &[&str] = &[
    "GRPC_SERVER_TLS_CERT",
    "GRPC_SERVER_TLS_KEY",
    "GRPC_CLIENT_TLS_CACERT",
    "GRPC_CLIENT_TLS_SAN",
    "USE_STATSD",
    "USE_DOG_STATSD",
    "USE_DOG_STATSD_MOGRIFIERS",
    "STATSD_HOST",
    "STATSD_PORT",
    "STATSD_PROTOCOL",
    "EXTRA_TAGS",
    "DISABLE_STATS",
    "STATS_FLUSH_INTERVAL",
    "PROMETHEUS_MAPPER_YAML",
    "PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS",
    "EXPIRATION_JITTER_MAX_SECONDS",
    "REDIS_PERSECOND",
    "MEMCACHE_HOST_PORT",
    "MEMCACHE_SRV",
    "TRACING_ENABLED",
];
