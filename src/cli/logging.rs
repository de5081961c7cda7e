//! The log of the service itself, on stderr: as text for people, or as one JSON object a line under the names that
//! envoyproxy/ratelimit uses (`@timestamp`, `@message`, `level`), so that whatever reads its log reads ours.

use std::{fmt, io, time::SystemTime};

use serde_json::{Map, Value};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
};
use tracing_subscriber::{
    Layer,
    filter::Targets,
    fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter, format::Writer},
    layer::SubscriberExt,
    registry::LookupSpan,
    util::{SubscriberInitExt, TryInitError},
};

use crate::settings::{Log, LogFormat};

/// One JSON object a line.
struct Json;

/// An object that grows by the fields of an event.
struct Fields(Map<String, Value>);

/// Starts the log of this process; `colour` is for text only. Fails when there is one already.
pub fn start(log: Log, colour: bool) -> Result<(), TryInitError> {
    subscriber(log, colour, io::stderr).try_init()
}

fn subscriber<W>(log: Log, colour: bool, writer: W) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let filter = filter(log.level);
    match log.format {
        LogFormat::Text => Box::new(
            tracing_subscriber::registry().with(lines.with_ansi(colour).with_filter(filter)),
        ),
        LogFormat::Json => Box::new(
            tracing_subscriber::registry().with(
                lines
                    .with_ansi(false)
                    .event_format(Json)
                    .with_filter(filter),
            ),
        ),
    }
}

/// The level is for what we say. The libraries below tell of every frame at `debug`, so of them only warnings are
/// shown, short of `trace`.
fn filter(level: Level) -> Targets {
    let libraries = match level {
        Level::ERROR | Level::TRACE => level,
        _ => Level::WARN,
    };
    Targets::new()
        .with_default(LevelFilter::from_level(libraries))
        .with_target(env!("CARGO_CRATE_NAME"), level)
}

// === impl Json ===

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        let now = humantime::format_rfc3339_millis(SystemTime::now());
        let mut line = Fields(Map::new());
        line.0.insert("@timestamp".into(), now.to_string().into());
        line.0.insert("level".into(), level.into());
        line.0.insert("@message".into(), "".into());
        line.0
            .insert("target".into(), event.metadata().target().into());
        event.record(&mut line);
        writeln!(writer, "{}", Value::Object(line.0))
    }
}

// === impl Fields ===

impl Fields {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        let name = match field.name() {
            "message" => "@message".into(),
            // Taken already, by the line itself.
            name @ ("level" | "target") => format!("fields.{name}"),
            name => name.into(),
        };
        self.0.insert(name, value.into());
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// What is logged by `events`, at `level`.
    fn logged(level: Level, format: LogFormat, events: impl FnOnce()) -> String {
        #[derive(Clone, Default)]
        struct Buffer(Arc<Mutex<Vec<u8>>>);
        impl io::Write for Buffer {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let subscriber = subscriber(Log { level, format }, false, move || writer.clone());
        tracing::subscriber::with_default(subscriber, events);
        let bytes = buffer.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn json_has_the_names_of_the_reference() {
        let line = logged(Level::INFO, LogFormat::Json, || {
            tracing::warn!(
                hits = 3_u64,
                share = 0.5,
                shadow = true,
                level = "high",
                error = %"no\n\"route\"",
                "can't reach {}", "it"
            );
        });
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        let mut line: Map<String, Value> = serde_json::from_str(&line).unwrap();
        let time = line.remove("@timestamp").unwrap();
        humantime::parse_rfc3339(time.as_str().unwrap()).unwrap();
        let want = serde_json::json!({
            "@message": "can't reach it",
            "level": "warning",
            "target": "slidegate::cli::logging::tests",
            "hits": 3,
            "share": 0.5,
            "shadow": true,
            "fields.level": "high",
            "error": "no\n\"route\"",
        });
        assert_eq!(Value::Object(line), want);
    }

    #[test]
    fn levels_are_for_us_and_libraries_only_warn() {
        let events = || {
            tracing::error!("e");
            tracing::warn!("w");
            tracing::info!("i");
            tracing::debug!("d");
            tracing::trace!("t");
            tracing::error!(target: "h2::frame", "library e");
            tracing::warn!(target: "h2::frame", "library w");
            tracing::debug!(target: "h2::frame", "library d");
        };
        for (level, lines) in [
            (Level::ERROR, 2),
            (Level::WARN, 4),
            (Level::INFO, 5),
            (Level::DEBUG, 6),
            (Level::TRACE, 8),
        ] {
            let text = logged(level, LogFormat::Text, events);
            assert_eq!(text.lines().count(), lines, "{level}: {text}");
        }
    }

    #[test]
    fn text_is_plain_without_colour() {
        let line = logged(Level::INFO, LogFormat::Text, || {
            tracing::info!(port = 8080, "listening");
        });
        assert!(
            line.contains(" INFO ") && line.contains("listening port=8080"),
            "{line}"
        );
        assert!(!line.contains('\u{1b}'), "{line}");
    }
}
