//! What may be typed as the value of a setting, and what it means: one function per kind of value, from text to a
//! real type. Which setting takes which kind is in `table`.
//!
//! Every function takes the text as it was given, without trimming, and fails with a [`Reason`]: the rest of a
//! sentence that starts with the setting and its value, so it says what is allowed or what to do instead.

use std::{borrow::Cow, net::IpAddr, path::PathBuf, str::FromStr, time::Duration};

use http::HeaderName;
use tracing::Level;

use super::{Host, LogFormat};

/// Why a value was refused, and what is allowed.
pub type Reason = Cow<'static, str>;

/// Where `BACKEND_TYPE` says that the logs are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Not said: Redis when `REDIS_URL` is set, else the memory of this process.
    Auto,
    /// The memory of this process.
    Memory,
    /// Redis.
    Redis,
}

/// `1 t T TRUE true True` and `0 f F FALSE false False`.
pub fn boolean(text: &str) -> Result<bool, Reason> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err("expected true or false (or 1, t, 0, f)".into()),
    }
}

/// A whole number from `MIN` to `MAX`: decimal, or with a prefix of `0x`, `0o`, `0b`; a leading 0 means octal.
pub fn count<const MIN: u64, const MAX: u64>(text: &str) -> Result<u64, Reason> {
    whole(text)
        .filter(|number| (MIN..=MAX).contains(number))
        .ok_or_else(|| format!("expected a whole number from {MIN} to {MAX}").into())
}

/// A TCP port.
pub fn port(text: &str) -> Result<u16, Reason> {
    // A Service named `grpc` makes GRPC_PORT=tcp://10.0.0.1:8081 in every pod beside it.
    if text.contains("://") {
        return Err(
            "expected a port, not a URL; Kubernetes sets such variables for a Service of that name, \
             unless the pod has enableServiceLinks: false"
                .into(),
        );
    }
    whole(text)
        .and_then(|number| u16::try_from(number).ok())
        .ok_or_else(|| {
            "expected a port: a whole number from 0 to 65535, where 0 takes a free port".into()
        })
}

/// A share from 0 to 1.
pub fn ratio(text: &str) -> Result<f32, Reason> {
    text.parse()
        .ok()
        .filter(|ratio| (0.0..=1.0).contains(ratio))
        .ok_or_else(|| "expected a number from 0 to 1, such as 0.8".into())
}

/// Go's notation: numbers with units, one after the other (`1h30m`, `1.5h`, `150us`); `0` needs no unit.
pub fn duration(text: &str) -> Result<Duration, Reason> {
    // As many nanoseconds as Go's own type holds: 292 years.
    const MOST: u128 = i64::MAX as u128;
    let expected = || {
        Reason::from("expected a duration such as 10s, 1h30m, 150us or 0 (units ns us ms s m h)")
    };
    let unsigned = match text.strip_prefix('-') {
        Some("0") => "0",
        Some(_) => return Err("expected a duration that is not negative, such as 10s".into()),
        None => text.strip_prefix('+').unwrap_or(text),
    };
    if unsigned == "0" {
        return Ok(Duration::ZERO);
    }
    if unsigned.is_empty() {
        return Err(expected());
    }
    let mut rest = unsigned;
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let number = take_while(&mut rest, |c| c.is_ascii_digit() || c == '.');
        let unit = match take_while(&mut rest, |c| !c.is_ascii_digit() && c != '.') {
            "ns" => 1,
            // The micro sign and the Greek letter look the same and are both in use.
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return Err(expected()),
        };
        nanos = scaled(number, unit)
            .and_then(|part| nanos.checked_add(part))
            .ok_or_else(expected)?;
    }
    if nanos > MOST {
        return Err("expected a duration of at most 292 years".into());
    }
    Ok(Duration::new(
        (nanos / 1_000_000_000) as u64,
        (nanos % 1_000_000_000) as u32,
    ))
}

/// A [`duration`] that is longer than 0.
pub fn some_time(text: &str) -> Result<Duration, Reason> {
    match duration(text)? {
        Duration::ZERO => Err("expected a duration longer than 0, such as 10s".into()),
        time => Ok(time),
    }
}

/// A [`duration`] where 0 means never.
pub fn time_or_never(text: &str) -> Result<Option<Duration>, Reason> {
    Ok(Some(duration(text)?).filter(|time| !time.is_zero()))
}

/// A number of bytes from `MIN` to `MAX`, plain or with a unit: `1048576`, `512MiB`, `1.5 GB`.
///
/// A bare `M` is refused: it is a million bytes to some and 1,048,576 to others.
pub fn size<const MIN: u64, const MAX: u64>(text: &str) -> Result<u64, Reason> {
    let bytes = whole(text).or_else(|| {
        let mut rest = text;
        let number = take_while(&mut rest, |c| c.is_ascii_digit() || c == '.');
        let unit = match rest.trim_start_matches(' ').to_ascii_lowercase().as_str() {
            "b" => 1,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            "ki" | "kib" => 1 << 10,
            "mi" | "mib" => 1 << 20,
            "gi" | "gib" => 1 << 30,
            "ti" | "tib" => 1 << 40,
            _ => return None,
        };
        u64::try_from(scaled(number, unit)?).ok()
    });
    bytes
        .filter(|bytes| (MIN..=MAX).contains(bytes))
        .ok_or_else(|| {
            let most = match MAX {
                u64::MAX => String::new(),
                _ => format!(" to {MAX}"),
            };
            format!(
                "expected a number of bytes such as 1048576, 512MiB, 1GiB or 500MB, from {MIN}{most}"
            )
            .into()
        })
}

/// An IPv4 or IPv6 literal (in brackets or not), a name, or nothing for every address of the machine.
pub fn host(text: &str) -> Result<Host, Reason> {
    if text.is_empty() {
        return Ok(Host::All);
    }
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'))
        .unwrap_or(text);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(Host::Ip(address));
    }
    // A scope, as in fe80::1%eth0: for the resolver to read, which knows the interfaces.
    let scoped = bare.split_once('%').is_some_and(|(address, scope)| {
        address.parse::<std::net::Ipv6Addr>().is_ok() && !scope.is_empty()
    });
    // A last label of digits alone can only be meant as an IPv4 address, and it is none.
    let is_name = text.len() <= 253
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && !text
            .trim_end_matches('.')
            .rsplit('.')
            .next()
            .is_some_and(|label| label.is_empty() || label.bytes().all(|b| b.is_ascii_digit()));
    if scoped || is_name {
        return Ok(Host::Name(bare.into()));
    }
    Err(
        "expected an IPv4 or IPv6 address or a host name, without a port (0.0.0.0, ::, localhost)"
            .into(),
    )
}

/// `host:port`, where the host may be left out (`:9090`) and an IPv6 literal stands in brackets.
pub fn address(text: &str) -> Result<super::Address, Reason> {
    let split = text
        .rsplit_once(':')
        .filter(|(host, _)| !host.contains(':') || (host.starts_with('[') && host.ends_with(']')));
    split
        .and_then(|(name, number)| {
            Some(super::Address {
                host: host(name).ok()?,
                port: port(number).ok()?,
            })
        })
        .ok_or_else(|| {
            "expected host:port or :port, such as :9090, 127.0.0.1:9090 or [::1]:9090".into()
        })
}

/// A path of HTTP, `/metrics`.
pub fn http_path(text: &str) -> Result<Box<str>, Reason> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/-._~".contains(&b);
    if text.starts_with('/') && text.bytes().all(plain) {
        return Ok(text.into());
    }
    Err(
        "expected a path such as /metrics: a slash, then letters, digits and any of / - . _ ~"
            .into(),
    )
}

/// The path of a Unix socket; nothing for none.
pub fn socket_path(text: &str) -> Result<Option<PathBuf>, Reason> {
    // sun_path of sockaddr_un has 108 bytes, the closing zero included.
    const MOST_BYTES: usize = 107;
    match text.len() {
        0 => Ok(None),
        1..=MOST_BYTES => Ok(Some(text.into())),
        _ => Err("expected the path of a Unix socket, of at most 107 bytes".into()),
    }
}

/// Any path.
pub fn path(text: &str) -> Result<PathBuf, Reason> {
    Ok(text.into())
}

/// A path below another one, so a leading slash says nothing.
pub fn path_below(text: &str) -> Result<PathBuf, Reason> {
    Ok(text.trim_start_matches('/').into())
}

/// Paths with commas between; nothing for none.
pub fn paths(text: &str) -> Result<Vec<PathBuf>, Reason> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    text.split(',')
        .map(|path| match path {
            "" => Err("expected paths with one comma between two".into()),
            path => Ok(path.into()),
        })
        .collect()
}

/// Any text.
pub fn text(text: &str) -> Result<Box<str>, Reason> {
    Ok(text.into())
}

/// What may stand before every key: a brace would move the hash tag, and one descriptor's logs would no longer
/// live in one slot of a Redis Cluster.
pub fn key_prefix(text: &str) -> Result<Box<str>, Reason> {
    if text.contains(['{', '}']) {
        return Err(
            "expected text without { and }, which mark the part of a key that chooses its shard"
                .into(),
        );
    }
    Ok(text.into())
}

/// The name of a response header, lower-cased.
///
/// Refused are names that HTTP/2 or gRPC give a meaning of their own: Envoy would put the number into a reply
/// that then can't be read.
pub fn header_name(text: &str) -> Result<HeaderName, Reason> {
    const TAKEN: [&str; 21] = [
        // Hop by hop: for one connection, not for the reply; malformed in HTTP/2.
        "connection",
        "keep-alive",
        "proxy-connection",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "http2-settings",
        "proxy-authenticate",
        "proxy-authorization",
        // Who is spoken to; Envoy writes it into :authority.
        "host",
        // How the body is to be read.
        "content-length",
        "content-type",
        "content-encoding",
        "content-range",
        // How the reply is to be read.
        "date",
        "expect",
        "location",
        "grpc-status",
        "grpc-message",
        "grpc-encoding",
    ];
    if text.starts_with(':') {
        return Err(
            "expected a header name; names with a colon in front belong to HTTP/2 itself".into(),
        );
    }
    let name = HeaderName::from_str(text).map_err(|_| {
        Reason::from("expected a header name such as ratelimit-limit: letters, digits and any of !#$%&'*+-.^_`|~")
    })?;
    if TAKEN.contains(&name.as_str()) {
        return Err(
            "this header has a meaning of its own, and a number in it breaks the reply; \
             expected a name that is free, such as ratelimit-limit"
                .into(),
        );
    }
    Ok(name)
}

/// A level by name, in any case. What the field calls `panic` and `fatal` are errors here.
pub fn level(text: &str) -> Result<Level, Reason> {
    match text.to_ascii_lowercase().as_str() {
        "panic" | "fatal" | "error" => Ok(Level::ERROR),
        "warn" | "warning" => Ok(Level::WARN),
        "info" => Ok(Level::INFO),
        "debug" => Ok(Level::DEBUG),
        "trace" => Ok(Level::TRACE),
        _ => Err("expected one of panic, fatal, error, warn, warning, info, debug, trace".into()),
    }
}

/// `text` (or nothing) and `json`, in any case.
pub fn log_format(text: &str) -> Result<LogFormat, Reason> {
    match text.to_ascii_lowercase().as_str() {
        "" | "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err("expected text or json".into()),
    }
}

/// Where rules come from: files, so far.
pub fn config_type(text: &str) -> Result<(), Reason> {
    match text {
        "FILE" => Ok(()),
        "GRPC_XDS_SOTW" => Err(
            "this version has no rules over xDS; use FILE, with the rules in files under \
             CONFIG_PATH (or the RUNTIME_* directories), which are read again when they change"
                .into(),
        ),
        _ => Err("expected FILE, in capitals".into()),
    }
}

/// Where logs are kept. Redis is refused where it would be chosen, since `REDIS_URL` has a say in that.
pub fn backend(text: &str) -> Result<Backend, Reason> {
    match text {
        "" => Ok(Backend::Auto),
        "memory" => Ok(Backend::Memory),
        "redis" => Ok(Backend::Redis),
        "memcache" => Err(
            "Memcached can't keep an exact log of hits, so there is no such backend; \
             use memory, which keeps the logs in this process"
                .into(),
        ),
        _ => Err("expected memory (or nothing), in small letters".into()),
    }
}

/// TLS on the gRPC listener: not there yet, and plain text in its place would be a surprise.
pub fn no_tls(text: &str) -> Result<(), Reason> {
    if boolean(text)? {
        return Err(
            "this version has no TLS on its listeners; let a sidecar or a mesh end TLS in front, \
             and set this to false"
                .into(),
        );
    }
    Ok(())
}

/// An unsigned number in Go's notation for any base; underscores may stand between digits.
fn whole(text: &str) -> Option<u64> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let lower = text.to_ascii_lowercase();
    let (base, digits) = match lower.as_bytes() {
        [b'0', b'x', ..] => (16, &lower[2..]),
        [b'0', b'o', ..] => (8, &lower[2..]),
        [b'0', b'b', ..] => (2, &lower[2..]),
        [b'0', _, ..] => (8, &lower[1..]),
        _ => (10, &lower[..]),
    };
    // An underscore may follow the prefix, but not stand in front, at the end, or twice.
    let digits = match base {
        10 => digits,
        _ => digits.strip_prefix('_').unwrap_or(digits),
    };
    if digits.starts_with(['_', '+']) || digits.ends_with('_') || digits.contains("__") {
        return None;
    }
    u64::from_str_radix(&digits.replace('_', ""), base).ok()
}

/// A decimal number with or without a fraction, times `unit`, rounded down.
fn scaled(number: &str, unit: u128) -> Option<u128> {
    // More digits of a fraction than these are less than a nanosecond of an hour; leaving them out changes nothing.
    const FRACTION_DIGITS: usize = 18;
    let (before, after) = number.split_once('.').unwrap_or((number, ""));
    if before.is_empty() && after.is_empty() || after.contains('.') {
        return None;
    }
    let digits = |text: &str| match text {
        "" => Some(0),
        text => text.parse::<u128>().ok(),
    };
    let fraction = &after[..after.len().min(FRACTION_DIGITS)];
    let part = digits(fraction)?.checked_mul(unit)? / 10_u128.pow(fraction.len() as u32);
    digits(before)?.checked_mul(unit)?.checked_add(part)
}

/// Splits off the longest front whose characters all fit.
fn take_while<'a>(rest: &mut &'a str, fits: impl Fn(char) -> bool) -> &'a str {
    let end = rest.find(|c| !fits(c)).unwrap_or(rest.len());
    let (front, back) = rest.split_at(end);
    *rest = back;
    front
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every text of `bad` is refused with a reason that holds `says`.
    #[track_caller]
    fn refuses<T: std::fmt::Debug>(
        parse: impl Fn(&str) -> Result<T, Reason>,
        says: &str,
        bad: &[&str],
    ) {
        for text in bad {
            let reason = parse(text).expect_err(text);
            assert!(reason.contains(says), "{text:?}: {reason}");
        }
    }

    #[test]
    fn booleans_as_go_spells_them() {
        for text in ["1", "t", "T", "TRUE", "true", "True"] {
            assert_eq!(boolean(text), Ok(true), "{text}");
        }
        for text in ["0", "f", "F", "FALSE", "false", "False"] {
            assert_eq!(boolean(text), Ok(false), "{text}");
        }
        let bad = ["", "yes", "on", "tRUE", " true", "2", "-1"];
        refuses(boolean, "true or false", &bad);
    }

    #[test]
    fn whole_numbers_in_every_base_of_go() {
        for (text, number) in [
            ("0", 0),
            ("8080", 8080),
            ("+7", 7),
            ("0x1F90", 8080),
            ("0XfF", 255),
            ("0o17", 15),
            ("017", 15),
            ("0b101", 5),
            ("1_000", 1000),
            ("0x_ff", 255),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(count::<0, { u64::MAX }>(text), Ok(number), "{text}");
        }
        let bad = [
            "",
            " 1",
            "1 ",
            "-1",
            "1.0",
            "1e3",
            "08",
            "0x",
            "0b2",
            "_1",
            "1_",
            "1__0",
            "++1",
            "0x+1",
            "18446744073709551616",
            "ten",
        ];
        refuses(count::<0, { u64::MAX }>, "whole number", &bad);
    }

    #[test]
    fn counts_name_their_range() {
        assert_eq!(count::<1, 5>("5"), Ok(5));
        refuses(count::<1, 5>, "from 1 to 5", &["0", "6"]);
        refuses(port, "enableServiceLinks", &["tcp://10.0.0.1:8081"]);
        assert_eq!(port("0"), Ok(0));
        assert_eq!(port("65535"), Ok(65_535));
        refuses(
            port,
            "from 0 to 65535",
            &["65536", "-1", "http", "", ":8080"],
        );
    }

    #[test]
    fn ratios_lie_between_0_and_1() {
        for (text, number) in [
            ("0", 0.0),
            ("1", 1.0),
            ("0.8", 0.8),
            (".5", 0.5),
            ("8e-1", 0.8),
        ] {
            assert_eq!(ratio(text), Ok(number), "{text}");
        }
        refuses(
            ratio,
            "from 0 to 1",
            &["", "1.01", "-0.1", "80%", "NaN", "inf", "0,8"],
        );
    }

    #[test]
    fn durations_in_gos_notation() {
        for (text, nanos) in [
            ("0", 0),
            ("-0", 0),
            ("0s", 0),
            ("10s", 10_000_000_000),
            ("+10s", 10_000_000_000),
            ("150us", 150_000),
            ("150µs", 150_000),
            ("150μs", 150_000),
            ("7ns", 7),
            ("24h", 86_400_000_000_000),
            ("1h30m", 5_400_000_000_000),
            ("30m1h", 5_400_000_000_000),
            ("1.5h", 5_400_000_000_000),
            (".5s", 500_000_000),
            ("5.s", 5_000_000_000),
            ("1.0000000001s", 1_000_000_000),
            ("0.333333333333333333333333h", 1_199_999_999_999),
            ("2562047h47m16.854775807s", i64::MAX as u64),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
        let bad = [
            "", "10", "s", ".s", "1.2.3s", "10 s", "10S", "1d", "1h30", "ten", "+", "1e3s", " 1s",
        ];
        refuses(duration, "such as 10s", &bad);
        refuses(duration, "not negative", &["-1s", "-"]);
        refuses(
            duration,
            "292 years",
            &["2562047h47m16.854775808s", "99999999999h"],
        );
        refuses(
            duration,
            "such as 10s",
            &["99999999999999999999999999999999999999999h"],
        );
    }

    #[test]
    fn durations_of_0_are_never_or_refused() {
        assert_eq!(time_or_never("0"), Ok(None));
        assert_eq!(time_or_never("1s"), Ok(Some(Duration::from_secs(1))));
        assert_eq!(some_time("1s"), Ok(Duration::from_secs(1)));
        refuses(some_time, "longer than 0", &["0", "0s", "0.1ns"]);
    }

    #[test]
    fn sizes_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("1048576", 1_048_576),
            ("0x100000", 1_048_576),
            ("10B", 10),
            ("512MiB", 512 << 20),
            ("512Mi", 512 << 20),
            ("512mib", 512 << 20),
            ("512 MiB", 512 << 20),
            ("1.5GiB", 1_610_612_736),
            ("2TiB", 2 << 40),
            ("16Ki", 16_384),
            ("3kB", 3_000),
            ("500MB", 500_000_000),
            ("1GB", 1_000_000_000),
            ("1TB", 1_000_000_000_000),
        ] {
            assert_eq!(size::<0, { u64::MAX }>(text), Ok(bytes), "{text}");
        }
        let bad = [
            "",
            "MiB",
            "1M",
            "1G",
            "-1",
            "1.5",
            "1,5GiB",
            "1 GiB free",
            "99999999999TiB",
            "1.2.3KiB",
        ];
        refuses(size::<0, { u64::MAX }>, "512MiB", &bad);
        refuses(size::<10, 20>, "from 10 to 20", &["9", "21", "1KiB"]);
        refuses(size::<10, { u64::MAX }>, "from 10", &["9"]);
    }

    #[test]
    fn hosts_are_literals_names_or_all() {
        let ip = |text: &str| Ok(Host::Ip(text.parse().unwrap()));
        let name = |text: &str| Ok(Host::Name(text.into()));
        assert_eq!(host(""), Ok(Host::All));
        assert_eq!(host("0.0.0.0"), ip("0.0.0.0"));
        assert_eq!(host("::"), ip("::"));
        assert_eq!(host("[::1]"), ip("::1"));
        assert_eq!(host("localhost"), name("localhost"));
        assert_eq!(
            host("a-1.b_c.svc.cluster.local."),
            name("a-1.b_c.svc.cluster.local.")
        );
        assert_eq!(host("fe80::1%eth0"), name("fe80::1%eth0"));
        let long = "a".repeat(254);
        let bad = [
            "localhost:80",
            "1.2.3.4:80",
            "256.0.0.1",
            "1234",
            "a b",
            "http://a",
            ".",
            "[localhost]",
            "fe80::1%",
            "x%eth0",
            &long,
        ];
        refuses(host, "IPv4 or IPv6", &bad);
    }

    #[test]
    fn addresses_in_gos_notation() {
        for (text, shown) in [
            (":9090", ":9090"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("localhost:80", "localhost:80"),
            ("[::]:9090", "[::]:9090"),
            ("[fe80::1%eth0]:1", "[fe80::1%eth0]:1"),
        ] {
            assert_eq!(address(text).unwrap().to_string(), shown);
        }
        let bad = [
            "",
            "9090",
            ":",
            "::9090",
            "::1:9090",
            "localhost",
            ":http",
            ":70000",
            "a b:1",
        ];
        refuses(address, "host:port", &bad);
    }

    #[test]
    fn http_paths_start_with_a_slash() {
        assert_eq!(http_path("/metrics").as_deref(), Ok("/metrics"));
        assert_eq!(http_path("/").as_deref(), Ok("/"));
        refuses(
            http_path,
            "such as /metrics",
            &["", "metrics", "/a?b", "/a b", "/{x}", "/*x", "/ä"],
        );
    }

    #[test]
    fn paths_of_files_sockets_and_lists() {
        assert_eq!(socket_path(""), Ok(None));
        assert_eq!(socket_path("/run/a.sock"), Ok(Some("/run/a.sock".into())));
        assert_eq!(
            socket_path(&"a".repeat(107)),
            Ok(Some("a".repeat(107).into()))
        );
        refuses(socket_path, "107 bytes", &[&"a".repeat(108)]);

        assert_eq!(path_below("/ratelimit"), Ok("ratelimit".into()));
        assert_eq!(path_below(""), Ok("".into()));

        assert_eq!(paths(""), Ok(vec![]));
        assert_eq!(paths("a,/b/c"), Ok(vec!["a".into(), "/b/c".into()]));
        refuses(paths, "one comma", &[",", "a,", "a,,b", ",a"]);
    }

    #[test]
    fn key_prefixes_hold_no_brace() {
        assert_eq!(key_prefix("prod:").as_deref(), Ok("prod:"));
        assert_eq!(key_prefix("").as_deref(), Ok(""));
        refuses(key_prefix, "without { and }", &["{", "a}b", "{x}"]);
    }

    #[test]
    fn header_names_are_lower_cased_and_must_be_free() {
        assert_eq!(
            header_name("RateLimit-Limit").unwrap().as_str(),
            "ratelimit-limit"
        );
        assert_eq!(header_name("x_a.b~1").unwrap().as_str(), "x_a.b~1");
        refuses(
            header_name,
            "such as ratelimit-limit",
            &["", "a b", "a:b", "a\n", "é", "a\u{0}"],
        );
        refuses(header_name, "HTTP/2 itself", &[":status", ":path", ":"]);
        let taken = [
            "Connection",
            "keep-alive",
            "Proxy-Connection",
            "Transfer-Encoding",
            "TE",
            "trailer",
            "upgrade",
            "HTTP2-Settings",
            "Host",
            "Content-Length",
            "content-type",
            "content-encoding",
            "grpc-status",
        ];
        refuses(header_name, "meaning of its own", &taken);
    }

    #[test]
    fn levels_and_formats_in_any_case() {
        for (text, want) in [
            ("panic", Level::ERROR),
            ("FATAL", Level::ERROR),
            ("Error", Level::ERROR),
            ("WARN", Level::WARN),
            ("warning", Level::WARN),
            ("info", Level::INFO),
            ("DEBUG", Level::DEBUG),
            ("tRace", Level::TRACE),
        ] {
            assert_eq!(level(text), Ok(want), "{text}");
        }
        refuses(level, "one of panic", &["", "verbose", "3", "info "]);
        assert_eq!(log_format(""), Ok(LogFormat::Text));
        assert_eq!(log_format("Text"), Ok(LogFormat::Text));
        assert_eq!(log_format("JSON"), Ok(LogFormat::Json));
        refuses(log_format, "text or json", &["logfmt", "json "]);
    }

    #[test]
    fn what_is_not_there_says_what_stands_instead() {
        assert_eq!(config_type("FILE"), Ok(()));
        refuses(config_type, "CONFIG_PATH", &["GRPC_XDS_SOTW"]);
        refuses(config_type, "expected FILE", &["", "file", "XDS"]);
        assert_eq!(backend(""), Ok(Backend::Auto));
        assert_eq!(backend("memory"), Ok(Backend::Memory));
        assert_eq!(backend("redis"), Ok(Backend::Redis));
        refuses(backend, "use memory", &["memcache"]);
        refuses(backend, "expected memory", &["Redis", "sqlite"]);
        assert_eq!(no_tls("false"), Ok(()));
        refuses(no_tls, "no TLS", &["true", "1"]);
        refuses(no_tls, "true or false", &[""]);
    }
}
