//! What is counted about calls and rules, under the reference's names and with its arithmetic, and the page that
//! shows every number of the process. What one room alone counts lives in that room and reaches the page through
//! [`Metrics::register`].
//!
//! Label sets are bounded: rules name series, requests do not, unless a rule asks for it (`detailed_metric`,
//! `value_to_metric`, limit overrides); then [`Rules`] keeps at most a set number of names apart and counts what
//! it folded.

use std::{
    collections::BTreeMap,
    fmt::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet, prometheus_text},
    metrics::{MetricType, histogram::Histogram},
    registry::Registry,
};

/// Every number of one process.
pub struct Metrics {
    /// Hits by rule.
    pub rules: Rules,
    /// Calls that failed for their content: no domain, no descriptors, no rules loaded.
    pub service_errors: Counter,
    /// Calls that failed for the store.
    pub store_errors: Counter,
    /// Calls that were over a limit and answered OK by `SHADOW_MODE`.
    pub global_shadow_mode: Counter,
    /// Calls of `ShouldRateLimit`, over gRPC.
    pub calls: Counter,
    /// Calls refused since they were over a bound of the service (descriptors, entries, message size).
    pub over_bound: Counter,
    /// From arrival to answer, in seconds.
    response_time: Histogram,
    sources: Mutex<Vec<Box<Export>>>,
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

/// Puts numbers of another room on the page.
type Export = dyn Fn(&mut Page<'_>) -> fmt::Result + Send + Sync;

/// The metrics page while it is written.
pub struct Page<'a>(DescriptorEncoder<'a>);

/// The counters of all rules by name.
#[derive(Debug)]
pub struct Rules {
    by_name: RwLock<HashMap<Box<str>, Arc<RuleCounters>, foldhash::fast::RandomState>>,
    not_found: RwLock<HashMap<Box<[u8]>, Counter, foldhash::fast::RandomState>>,
    /// Names that hold values of requests, at most [`Rules::max_per_request`].
    per_request: AtomicU64,
    max_per_request: u64,
    folded: Counter,
}

/// What a rule's series are called.
#[derive(Clone, Copy, Debug)]
pub struct RuleName<'a, T = &'a str> {
    /// The domain.
    pub domain: &'a str,
    /// One text per level, `key_value` or `key`.
    pub levels: &'a [T],
}

/// What happened to the hits that met one rule. In hits, not requests.
#[derive(Debug)]
pub struct RuleCounters {
    /// Domain and levels joined by dots, sanitised as the reference does.
    pub name: Box<str>,
    domain: Box<str>,
    levels: Box<[Box<str>]>,
    /// Asked for.
    pub total_hits: Counter,
    /// Beyond the limit.
    pub over_limit: Counter,
    /// Between the near threshold and the limit.
    pub near_limit: Counter,
    /// Of calls within the limit.
    pub within_limit: Counter,
    /// The part of `over_limit` that was answered from memory.
    pub over_limit_with_local_cache: Counter,
    /// Beyond the limit of a rule in shadow mode.
    pub shadow_mode: Counter,
}

/// One judged descriptor, for its rule's counters.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    /// Asked for; 0 for a look.
    pub hits: u64,
    /// Hits in the window before them.
    pub before: u64,
    /// Of the limit whose numbers these are.
    pub limit: u32,
    /// Hits above it, up to the limit, are near it.
    pub near: u32,
    /// Whether they did not fit.
    pub over: bool,
    /// Whether the rule is in shadow mode.
    pub shadow: bool,
    /// Whether memory answered instead of the log.
    pub from_memory: bool,
}

/// Upper bounds of the response-time buckets in seconds: the reference's from 5 ms up, finer ones below, where
/// the answers are.
const RESPONSE_TIME_BUCKETS: [f64; 16] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];

/// Unknown domains that get a series of their own; requests name them, so there must be an end.
const MAX_UNKNOWN_DOMAINS: usize = 1_000;
/// The series of all others.
const OTHER_DOMAINS: &str = "_other";

// === impl Metrics ===

impl Metrics {
    /// Numbers from zero; at most `max_per_request` names with values of requests are kept apart.
    pub fn new(max_per_request: u64) -> Arc<Self> {
        Arc::new(Self {
            rules: Rules {
                by_name: RwLock::default(),
                not_found: RwLock::default(),
                per_request: AtomicU64::new(0),
                max_per_request,
                folded: Counter::default(),
            },
            service_errors: Counter::default(),
            store_errors: Counter::default(),
            global_shadow_mode: Counter::default(),
            calls: Counter::default(),
            over_bound: Counter::default(),
            response_time: Histogram::new(RESPONSE_TIME_BUCKETS),
            sources: Mutex::default(),
        })
    }

    /// Counts one call and how long its answer took.
    pub fn call(&self, took: Duration) {
        self.calls.add(1);
        self.response_time.observe(took.as_secs_f64());
    }

    /// Adds another room's numbers to the page.
    pub fn register(&self, export: impl Fn(&mut Page<'_>) -> fmt::Result + Send + Sync + 'static) {
        self.sources.lock().push(Box::new(export));
    }

    /// The page in Prometheus's text format.
    pub fn render(self: &Arc<Self>) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Arc::clone(self)));
        let mut out = String::new();
        // Writing to a String does not fail; a source that refuses leaves the page short, not the scrape broken.
        if prometheus_text::encode(&mut out, &registry).is_err() {
            let _ = writeln!(out, "# a source of metrics failed");
        }
        out
    }

    /// Every rule's counters by the reference's statsd names, one per line, sorted.
    pub fn statistics(&self) -> String {
        let rules = self.rules.by_name.read();
        let mut lines: Vec<_> = rules
            .values()
            .flat_map(|rule| {
                rule.statistics().map(|(what, counter)| {
                    let (name, count) = (&rule.name, counter.get());
                    format!("ratelimit.service.rate_limit.{name}.{what}: {count}\n")
                })
            })
            .collect();
        lines.sort();
        lines.concat()
    }

    fn export_service(&self, page: &mut Page<'_>) -> fmt::Result {
        let method = [("grpc_method", "ShouldRateLimit")];
        page.reference(
            "ratelimit_service_total_requests",
            "Calls by method.",
            [(method, self.calls.get())],
        )?;
        let encoder = page.0.encode_descriptor(
            "ratelimit_service_response_time_seconds",
            "From arrival to answer.",
            None,
            MetricType::Histogram,
        )?;
        self.response_time
            .encode({ encoder }.encode_family(&method)?)?;
        page.reference(
            "ratelimit_service_should_rate_limit_error",
            "Calls that failed.",
            [
                ([("err_type", "service_error")], self.service_errors.get()),
                ([("err_type", "redis_error")], self.store_errors.get()),
            ],
        )?;
        page.reference_one(
            "ratelimit_service_global_shadow_mode",
            "Calls over a limit that SHADOW_MODE answered OK.",
            self.global_shadow_mode.get(),
        )?;
        page.counter(
            "slidegate_calls_over_bound",
            "Calls refused for too many descriptors or entries, or too large a message.",
            self.over_bound.get(),
        )?;
        page.counter(
            "slidegate_metric_names_folded",
            "Hits of rules counted under a shared name, since there were too many names with request values.",
            self.rules.folded.get(),
        )
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        self.rules.export(&mut page)?;
        self.export_service(&mut page)?;
        for source in self.sources.lock().iter() {
            source(&mut page)?;
        }
        Ok(())
    }
}

// === impl Counter ===

impl Counter {
    /// Counts `n` more.
    pub fn add(&self, n: u64) {
        // An untouched cache line is cheaper than adding nothing to it.
        if n > 0 {
            self.0.fetch_add(n, Relaxed);
        }
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

// === impl Page ===

impl Page<'_> {
    /// A number that only grows; `_total` is appended to its name.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut metric = self
            .0
            .encode_descriptor(name, help, None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, _, u64>(&value, None)
    }

    /// A number that goes up and down.
    pub fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let mut metric = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        metric.encode_gauge(&value)
    }

    /// One counter under a name of the reference, without labels.
    pub fn reference_one(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let no_labels: [(&str, &str); 0] = [];
        self.reference(name, help, [(no_labels, value)])
    }

    /// Counters under a name of the reference, which has no `_total`. Prometheus takes them untyped, and
    /// `rate()` works on them all the same.
    pub fn reference<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut metric = self
            .0
            .encode_descriptor(name, help, None, MetricType::Unknown)?;
        for (labels, value) in values {
            metric.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }
}

// === impl Rules ===

impl Rules {
    /// The counters of a rule whose name is the same for every request.
    pub fn of_rule(&self, name: RuleName<'_, impl AsRef<str>>) -> Arc<RuleCounters> {
        self.get_or_insert(name)
    }

    /// The counters of a name that holds values of the request; past the bound those of `folded`.
    pub fn of_request(
        &self,
        name: RuleName<'_, impl AsRef<str>>,
        folded: RuleName<'_, impl AsRef<str>>,
    ) -> Arc<RuleCounters> {
        if let Some(known) = self.by_name.read().get(name.stat().as_str()) {
            return Arc::clone(known);
        }
        if self.per_request.fetch_add(1, Relaxed) < self.max_per_request {
            return self.get_or_insert(name);
        }
        self.per_request.fetch_sub(1, Relaxed);
        self.folded.add(1);
        self.get_or_insert(folded)
    }

    /// Counts descriptors of a domain that no file configures.
    pub fn domain_not_found(&self, domain: &[u8], descriptors: u64) {
        if let Some(counter) = self.not_found.read().get(domain) {
            return counter.add(descriptors);
        }
        let mut domains = self.not_found.write();
        let name = if domains.len() < MAX_UNKNOWN_DOMAINS {
            domain
        } else {
            OTHER_DOMAINS.as_bytes()
        };
        domains.entry(name.into()).or_default().add(descriptors);
    }

    /// Every statistic by the reference's name, `<rule>.total_hits` and so on; 0 where nothing was counted.
    pub fn statistic(&self, name: &str) -> u64 {
        let Some((rule, what)) = name.rsplit_once('.') else {
            return 0;
        };
        if what == "domain_not_found" {
            let domains = self.not_found.read();
            return domains.get(rule.as_bytes()).map_or(0, Counter::get);
        }
        let rules = self.by_name.read();
        let Some(counters) = rules.get(rule) else {
            return 0;
        };
        counters
            .statistics()
            .into_iter()
            .find(|(name, _)| *name == what)
            .map_or(0, |(_, counter)| counter.get())
    }

    fn get_or_insert(&self, name: RuleName<'_, impl AsRef<str>>) -> Arc<RuleCounters> {
        let stat = name.stat();
        if let Some(known) = self.by_name.read().get(stat.as_str()) {
            return Arc::clone(known);
        }
        let mut rules = self.by_name.write();
        let counters = rules
            .entry(stat.into_boxed_str())
            .or_insert_with(|| Arc::new(RuleCounters::new(name)));
        Arc::clone(counters)
    }

    /// As the reference's mapping has it: two levels become labels, further ones are summed.
    fn export(&self, page: &mut Page<'_>) -> fmt::Result {
        let mut series = BTreeMap::<[(&str, &str); 3], [u64; 6]>::new();
        let rules: Vec<_> = self.by_name.read().values().map(Arc::clone).collect();
        for rule in &rules {
            let level = |at: usize| rule.levels.get(at).map_or("", |level| level);
            let labels = [
                ("domain", &*rule.domain),
                ("key1", level(0)),
                ("key2", level(1)),
            ];
            let sums = series.entry(labels).or_default();
            for (sum, (_, counter)) in sums.iter_mut().zip(rule.statistics()) {
                *sum += counter.get();
            }
        }
        for (at, (name, help)) in RuleCounters::HELP.into_iter().enumerate() {
            let name = format!("ratelimit_service_rate_limit_{name}");
            let series = series.iter().map(|(labels, sums)| {
                // A rule of one level has no key2 at all in the reference.
                let labels = if labels[2].1.is_empty() {
                    &labels[..2]
                } else {
                    &labels[..]
                };
                (labels, sums[at])
            });
            page.reference(&name, help, series)?;
        }
        let unknown: Vec<_> = self
            .not_found
            .read()
            .iter()
            .map(|(domain, counter)| (String::from_utf8_lossy(domain).into_owned(), counter.get()))
            .collect();
        page.reference(
            "ratelimit_service_rate_limit_domain_not_found",
            "Descriptors of domains without rules.",
            unknown
                .iter()
                .map(|(domain, count)| ([("domain", domain.as_str())], *count)),
        )
    }
}

// === impl RuleName ===

impl<T: AsRef<str>> RuleName<'_, T> {
    fn stat(&self) -> String {
        let mut name = String::with_capacity(64);
        name.push_str(self.domain);
        for level in self.levels {
            name.push('.');
            name.push_str(level.as_ref());
        }
        sanitise(&mut name);
        name
    }
}

/// As the reference writes names: `:` and `|`, which mean something in statsd, become `_`, and so do the dots of
/// anything that looks like an IPv4 address.
fn sanitise(name: &mut String) {
    if name.contains([':', '|']) {
        *name = name.replace([':', '|'], "_");
    }
    let bytes = name.as_bytes();
    let mut dots = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        match address(&bytes[at..]) {
            Some((length, inner)) => {
                dots.extend(inner.map(|dot| at + dot));
                at += length;
            }
            None => at += 1,
        }
    }
    for dot in dots {
        name.replace_range(dot..=dot, "_");
    }
}

/// Four groups of one to three digits between dots at the beginning of `text`: its length and the places of the
/// dots.
fn address(text: &[u8]) -> Option<(usize, [usize; 3])> {
    let digits = |from: usize| {
        text[from..]
            .iter()
            .take(3)
            .take_while(|byte| byte.is_ascii_digit())
            .count()
    };
    let (mut at, mut dots) = (digits(0), [0; 3]);
    if at == 0 {
        return None;
    }
    for dot in &mut dots {
        if text.get(at) != Some(&b'.') {
            return None;
        }
        *dot = at;
        let length = digits(at + 1);
        if length == 0 {
            return None;
        }
        at += 1 + length;
    }
    Some((at, dots))
}

// === impl RuleCounters ===

impl RuleCounters {
    const HELP: [(&str, &str); 6] = [
        ("total_hits", "Hits asked for."),
        ("over_limit", "Hits beyond the limit."),
        (
            "near_limit",
            "Hits between the near threshold and the limit.",
        ),
        ("within_limit", "Hits of calls within the limit."),
        (
            "over_limit_with_local_cache",
            "Hits beyond the limit, answered from memory.",
        ),
        (
            "shadow_mode",
            "Hits beyond the limit of a rule in shadow mode.",
        ),
    ];

    fn new(name: RuleName<'_, impl AsRef<str>>) -> Self {
        Self {
            name: name.stat().into(),
            domain: name.domain.into(),
            levels: name
                .levels
                .iter()
                .map(|level| level.as_ref().into())
                .collect(),
            total_hits: Counter::default(),
            over_limit: Counter::default(),
            near_limit: Counter::default(),
            within_limit: Counter::default(),
            over_limit_with_local_cache: Counter::default(),
            shadow_mode: Counter::default(),
        }
    }

    /// Counts one judged descriptor. Hits that did not fit are split as if they had been counted, since that is
    /// what the names mean to those who look at them.
    pub fn record(&self, judged: Judged) {
        let Judged {
            hits,
            before,
            limit,
            near,
            over,
            shadow,
            from_memory,
        } = judged;
        let (limit, near) = (u64::from(limit), u64::from(near));
        self.total_hits.add(hits);
        if !over {
            self.within_limit.add(hits);
            self.near_limit
                .add((before + hits).saturating_sub(near.max(before)));
            return;
        }
        let beyond = if from_memory || before >= limit {
            hits
        } else {
            self.near_limit.add(limit.saturating_sub(near.max(before)));
            (before + hits).saturating_sub(limit)
        };
        self.over_limit.add(beyond);
        if from_memory {
            self.over_limit_with_local_cache.add(beyond);
        }
        if shadow {
            self.shadow_mode.add(beyond);
        }
    }

    /// Every counter with its name, in the order of the page.
    pub fn statistics(&self) -> [(&'static str, &Counter); 6] {
        let counters = [
            &self.total_hits,
            &self.over_limit,
            &self.near_limit,
            &self.within_limit,
            &self.over_limit_with_local_cache,
            &self.shadow_mode,
        ];
        std::array::from_fn(|at| (Self::HELP[at].0, counters[at]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name<'a>(domain: &'a str, levels: &'a [&'a str]) -> RuleName<'a> {
        RuleName { domain, levels }
    }

    fn judged(hits: u64, before: u64, limit: u32, near: u32) -> Judged {
        let over = before + hits > u64::from(limit);
        Judged {
            hits,
            before,
            limit,
            near,
            over,
            shadow: false,
            from_memory: false,
        }
    }

    /// The reference's own examples: limit 15, near from 12; limit 20, near from 16; limit 10.
    #[test]
    fn hits_are_split_at_the_near_threshold_and_at_the_limit() {
        for (hits, before, limit, near, expect) in [
            (1, 10, 15, 12, [1, 0, 0, 1]),
            (1, 12, 15, 12, [1, 0, 1, 1]),
            (1, 15, 15, 12, [1, 1, 0, 0]),
            (3, 19, 20, 16, [3, 2, 1, 0]),
            (7, 15, 20, 16, [7, 2, 4, 0]),
            (3, 27, 10, 8, [3, 3, 0, 0]),
            (0, 3, 10, 8, [0, 0, 0, 0]),
        ] {
            let counters = RuleCounters::new(name("d", &["k"]));
            counters.record(judged(hits, before, limit, near));
            let seen = counters.statistics().map(|(_, counter)| counter.get());
            assert_eq!(seen[..4], expect, "{hits} hits at {before} of {limit}");
        }
    }

    #[test]
    fn names_are_sanitised_as_in_the_reference() {
        for (domain, level, expect) in [
            ("a:b.c", "ip_10.2.3.4", "a_b.c.ip_10_2_3_4"),
            ("d", "k|v", "d.k_v"),
            ("d", "v_1.2.3", "d.v_1.2.3"),
            ("d", "10.0.0.1:80", "d.10_0_0_1_80"),
            ("d", "1.2.3.4.5.6.7.8", "d.1_2_3_4.5_6_7_8"),
        ] {
            assert_eq!(name(domain, &[level]).stat(), expect);
        }
    }

    #[test]
    fn names_with_request_values_are_bounded() {
        let metrics = Metrics::new(2);
        for value in 0..5 {
            let level = format!("k_{value}");
            let rules = &metrics.rules;
            let counters = rules.of_request(name("d", &[&level]), name("d", &["k"]));
            counters.record(judged(1, 0, 10, 8));
        }
        assert_eq!(metrics.rules.statistic("d.k_0.total_hits"), 1);
        assert_eq!(metrics.rules.statistic("d.k_1.total_hits"), 1);
        assert_eq!(metrics.rules.statistic("d.k_2.total_hits"), 0);
        assert_eq!(metrics.rules.statistic("d.k.total_hits"), 3);
        assert!(
            metrics
                .render()
                .contains("slidegate_metric_names_folded_total 3\n")
        );
    }

    #[test]
    fn unknown_domains_are_bounded() {
        let metrics = Metrics::new(0);
        for domain in 0..MAX_UNKNOWN_DOMAINS + 7 {
            metrics
                .rules
                .domain_not_found(domain.to_string().as_bytes(), 1);
        }
        assert_eq!(metrics.rules.statistic("0.domain_not_found"), 1);
        assert_eq!(metrics.rules.statistic("_other.domain_not_found"), 7);
    }

    #[test]
    fn the_page_has_the_references_names_and_labels() {
        let metrics = Metrics::new(0);
        metrics
            .rules
            .of_rule(name("d", &["a"]))
            .record(judged(2, 0, 10, 8));
        for deep in ["x", "y"] {
            metrics
                .rules
                .of_rule(name("d", &["a", "b", deep]))
                .record(judged(1, 0, 10, 8));
        }
        metrics.call(Duration::from_micros(300));
        let page = metrics.render();
        for line in [
            "# TYPE ratelimit_service_rate_limit_total_hits untyped",
            r#"ratelimit_service_rate_limit_total_hits{domain="d",key1="a"} 2"#,
            r#"ratelimit_service_rate_limit_total_hits{domain="d",key1="a",key2="b"} 2"#,
            r#"ratelimit_service_rate_limit_within_limit{domain="d",key1="a"} 2"#,
            r#"ratelimit_service_total_requests{grpc_method="ShouldRateLimit"} 1"#,
            r#"ratelimit_service_response_time_seconds_bucket{grpc_method="ShouldRateLimit",le="0.0005"} 1"#,
            r#"ratelimit_service_response_time_seconds_count{grpc_method="ShouldRateLimit"} 1"#,
            r#"ratelimit_service_should_rate_limit_error{err_type="service_error"} 0"#,
        ] {
            assert!(
                page.lines().any(|seen| seen == line),
                "no line {line} in\n{page}"
            );
        }
    }
}
