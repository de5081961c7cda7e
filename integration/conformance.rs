//! The cases of `conformance/cases.yaml`, each a test: rule files, settings and calls go through everything but the
//! sockets, over the log in memory, with a clock that is turned by hand.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Failed, Trial};
use serde::Deserialize;
use serde_yaml::{Mapping, Value};
use slidegate::{
    clock::{Clock, Hand, Millis},
    descriptor::{self, Descriptor, Hits},
    edge::answer::Answerer,
    limit::{Unit, Window},
    metrics::{Metrics, RuleCounters},
    rules::{
        compile::{Options, compile},
        file::SourceFile,
        reload::{Rules, Source},
    },
    server,
    settings::{Environment, Flags, Settings},
    store::{
        Store,
        denials::Denials,
        memory::{self, MemoryLog},
    },
    wire::{
        Entry, RateLimitDescriptor, RateLimitOverride, RateLimitRequest, RateLimitResponse,
        envoy::r#type::v3::RateLimitUnit,
        rate_limit_response::{Code, RateLimit},
    },
};

const CASES: &str = include_str!("conformance/cases.yaml");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cases {
    start_time: u64,
    cases: Vec<Case>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    id: String,
    area: String,
    #[allow(dead_code, reason = "for the reader of the file")]
    description: String,
    start_time: Option<u64>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    config_files: Vec<File>,
    #[serde(default)]
    load: Load,
    #[serde(default)]
    warns: bool,
    #[serde(default)]
    steps: Vec<Step>,
    #[serde(default)]
    stats: BTreeMap<String, u64>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    content: String,
}

#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Load {
    result: Option<String>,
    error_contains: Option<String>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    advance_seconds: Option<u64>,
    reload: Option<Vec<File>>,
    request: Request,
    expect: Option<Expect>,
    expect_each: Option<Vec<Expect>>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    domain: String,
    #[serde(default)]
    hits_addend: u32,
    descriptors: Vec<RequestDescriptor>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestDescriptor {
    #[serde(default)]
    entries: Vec<(String, String)>,
    hits_addend: Option<u64>,
    #[serde(default)]
    is_negative_hits: bool,
    limit: Option<LimitOverride>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitOverride {
    requests_per_unit: u32,
    unit: String,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expect {
    overall_code: Option<String>,
    statuses: Option<Vec<ExpectStatus>>,
    headers: Option<Vec<(String, String)>>,
    dynamic_metadata: Option<Value>,
    error: Option<String>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpectStatus {
    code: String,
    limit: Option<String>,
    limit_name: Option<String>,
    remaining: Option<u32>,
    reset_seconds: Option<i64>,
    stat_key: Option<String>,
}

struct Env(BTreeMap<String, String>);

impl Environment for Env {
    fn get(&self, variable: &str) -> Option<OsString> {
        self.0.get(variable).map(OsString::from)
    }
}

fn main() {
    let arguments = Arguments::from_args();
    let cases: Cases = serde_yaml::from_str(CASES).expect("cases.yaml");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime");
    let runtime = Arc::new(runtime);
    let trials = cases.cases.into_iter().map(|case| {
        let (start, runtime) = (
            case.start_time.unwrap_or(cases.start_time),
            Arc::clone(&runtime),
        );
        let name = format!("{}::{}", case.area, case.id);
        Trial::test(name, move || runtime.block_on(run(case, start)))
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

async fn run(case: Case, start: u64) -> Result<(), Failed> {
    let settings = Settings::read(&Flags::default(), &Env(case.env.clone()))
        .map_err(|error| error.to_string())?;
    let (clock, hand) = Clock::manual(Millis(start * 1_000));
    let log = MemoryLog::new(
        memory::Config::new(settings.memory.max_bytes),
        clock.clone(),
    );
    match settings.limiting.denials_max_bytes {
        0 => Bench::new(log, settings, hand).run(&case).await,
        bytes => {
            Bench::new(Denials::new(log, bytes as usize, clock), settings, hand)
                .run(&case)
                .await
        }
    }
}

struct Bench<S> {
    answerer: Arc<Answerer<S>>,
    settings: Settings,
    hand: Hand,
}

impl<S: Store> Bench<S> {
    fn new(store: S, settings: Settings, hand: Hand) -> Self {
        let metrics = Metrics::new(1_000);
        let options = Options {
            merge_domains: settings.rules.merge_domains,
        };
        let rules = Rules::new(Source::Paths(Vec::new()), options);
        let answerer = server::answerer(store, &settings, rules, metrics);
        Self {
            answerer,
            settings,
            hand,
        }
    }

    async fn run(&self, case: &Case) -> Result<(), Failed> {
        self.load(&case.config_files, &case.load, case.warns)?;
        for (number, step) in case.steps.iter().enumerate() {
            self.hand
                .advance(Duration::from_secs(step.advance_seconds.unwrap_or(0)));
            if let Some(files) = &step.reload {
                self.load(files, &Load::default(), false)?;
            }
            let expects = step.expect.iter().chain(step.expect_each.iter().flatten());
            for (call, expect) in expects.enumerate() {
                self.call(&step.request, expect)
                    .await
                    .map_err(|error| format!("step {number}, call {call}: {error}"))?;
            }
        }
        for (name, expect) in &case.stats {
            equal(name, self.statistic(name)?, *expect)?;
        }
        Ok(())
    }

    fn load(&self, files: &[File], expect: &Load, warns: bool) -> Result<(), String> {
        let files: Vec<_> = files
            .iter()
            .map(|file| SourceFile {
                name: file.name.clone(),
                text: file.content.clone(),
            })
            .collect();
        self.answerer.rules().replace(&files);
        let options = Options {
            merge_domains: self.settings.rules.merge_domains,
        };
        let compiled = compile(&files, options, None);
        match (expect.result.as_deref().unwrap_or("ok"), compiled) {
            ("ok", Ok(compiled)) if warns && compiled.warnings.is_empty() => {
                Err("no warning".to_owned())
            }
            ("ok", Ok(_)) => Ok(()),
            ("error", Err(problems)) => {
                let wanted = expect.error_contains.as_deref().unwrap_or_default();
                let texts: Vec<_> = problems
                    .0
                    .iter()
                    .map(|problem| problem.reference_text())
                    .collect();
                let is_there = texts.iter().any(|text| text.contains(wanted));
                is_there
                    .then_some(())
                    .ok_or_else(|| format!("no error with {wanted:?} in {texts:?}"))
            }
            (wanted, found) => Err(format!("load: {found:?} instead of {wanted}")),
        }
    }

    async fn call(&self, request: &Request, expect: &Expect) -> Result<(), String> {
        let message = message(request);
        let answer = self.answerer.answer(&message, Instant::now()).await;
        if let Some(error) = &expect.error {
            let found = answer.map_or_else(
                |failure| failure.to_string(),
                |answer| format!("{answer:?}"),
            );
            return equal("error", found.as_str(), error.as_str());
        }
        let answer = answer.map_err(|failure| failure.to_string())?;
        if let Some(code) = &expect.overall_code {
            equal(
                "overall_code",
                answer.overall_code().as_str_name(),
                code.as_str(),
            )?;
        }
        if let Some(statuses) = &expect.statuses {
            compare_statuses(&answer, statuses)?;
            if statuses.iter().any(|status| status.stat_key.is_some()) {
                let names = self.stat_keys(&message).await?;
                for (at, (found, status)) in names.iter().zip(statuses).enumerate() {
                    let expect = status.stat_key.as_ref().unwrap_or(found);
                    equal(&format!("stat_key of status {at}"), found, expect)?;
                }
            }
        }
        if let Some(headers) = &expect.headers {
            let found: Vec<_> = answer
                .response_headers_to_add
                .iter()
                .map(|header| (header.key.clone(), header.value.clone()))
                .collect();
            equal("headers", &found, headers)?;
        }
        if let Some(expect) = &expect.dynamic_metadata {
            let found = answer
                .dynamic_metadata
                .as_ref()
                .map_or(Value::from("absent"), yaml_of);
            equal("dynamic_metadata", sorted(found), sorted(expect.clone()))?;
        }
        Ok(())
    }

    /// What the counters of each descriptor are called. A look tells: it takes nothing and counts no hits. That the
    /// rules were looked at is undone, since it would make charges of later hits.
    async fn stat_keys(&self, message: &RateLimitRequest) -> Result<Vec<String>, String> {
        let descriptors = message.descriptors.iter().map(|descriptor| Descriptor {
            entries: descriptor
                .entries
                .iter()
                .map(|entry| descriptor::Entry {
                    key: &entry.key,
                    value: &entry.value,
                })
                .collect(),
            limit: descriptor.limit.as_ref().map(|limit| descriptor::Override {
                requests: limit.requests_per_unit,
                window: Window::of(Unit::from_word(limit.unit().as_str_name()).expect("a unit")),
            }),
            hits: Some(Hits(0)),
            wire_hits: None,
            refund: false,
        });
        let request = descriptor::Request {
            domain: &message.domain,
            descriptors: descriptors.collect(),
            hits: Hits(1),
            wire_hits: 0,
        };
        let rules = self.answerer.rules().current();
        let all = rules
            .iter()
            .flat_map(|rules| rules.domains())
            .flat_map(|domain| domain.rules());
        let before: Vec<_> = all
            .map(|rule| (&rule.looked_at, rule.looked_at.load(Relaxed)))
            .collect();
        let decision = self
            .answerer
            .limiter()
            .decide(rules.as_deref(), &request, Instant::now())
            .await;
        for (looked_at, before) in before {
            looked_at.store(before, Relaxed);
        }
        let decision = decision.map_err(|refusal| refusal.to_string())?;
        let name = |counters: &Option<Arc<RuleCounters>>| {
            counters
                .as_ref()
                .map_or("none".to_owned(), |counters| counters.name.to_string())
        };
        Ok(decision
            .statuses
            .iter()
            .map(|status| name(&status.counters))
            .collect())
    }

    fn statistic(&self, name: &str) -> Result<u64, String> {
        let metrics = self.answerer.limiter().metrics();
        let status = self.answerer.rules().status();
        let name = name
            .strip_prefix("ratelimit.service.")
            .ok_or("a statistic of another service")?;
        Ok(match name {
            "global_shadow_mode" => metrics.global_shadow_mode.get(),
            "config_load_success" => status.loads_ok,
            "config_load_error" => status.loads_failed,
            "call.should_rate_limit.service_error" => metrics.service_errors.get(),
            _ => {
                let rule = name
                    .strip_prefix("rate_limit.")
                    .ok_or_else(|| format!("no statistic {name}"))?;
                metrics.rules.statistic(rule)
            }
        })
    }
}

fn message(request: &Request) -> RateLimitRequest {
    let descriptor = |descriptor: &RequestDescriptor| RateLimitDescriptor {
        entries: descriptor
            .entries
            .iter()
            .map(|(key, value)| Entry {
                key: key.clone().into(),
                value: value.clone().into(),
            })
            .collect(),
        limit: descriptor.limit.as_ref().map(|limit| RateLimitOverride {
            requests_per_unit: limit.requests_per_unit,
            unit: RateLimitUnit::from_str_name(&limit.unit)
                .expect("a unit")
                .into(),
            unit_multiplier: None,
        }),
        hits_addend: descriptor.hits_addend,
        is_negative_hits: descriptor.is_negative_hits,
    };
    RateLimitRequest {
        domain: request.domain.clone().into(),
        descriptors: request.descriptors.iter().map(descriptor).collect(),
        hits_addend: request.hits_addend,
    }
}

fn compare_statuses(answer: &RateLimitResponse, expect: &[ExpectStatus]) -> Result<(), String> {
    equal("number of statuses", answer.statuses.len(), expect.len())?;
    for (at, (found, expect)) in answer.statuses.iter().zip(expect).enumerate() {
        let what = |what: &str| format!("{what} of status {at}");
        let code = Code::from_str_name(&expect.code).ok_or("no such code")?;
        equal(&what("code"), found.code(), code)?;
        let limit = found.current_limit.as_ref();
        if let Some(expect) = &expect.limit {
            equal(
                &what("limit"),
                limit.map_or("none".to_owned(), limit_text).as_str(),
                expect.as_str(),
            )?;
        }
        if let Some(expect) = &expect.limit_name {
            equal(
                &what("limit_name"),
                limit.map_or("", |limit| &limit.name),
                expect.as_str(),
            )?;
        }
        if let Some(expect) = expect.remaining {
            equal(&what("remaining"), found.limit_remaining, expect)?;
        }
        if let Some(expect) = expect.reset_seconds {
            let reset = found
                .duration_until_reset
                .map(|reset| (reset.seconds, reset.nanos));
            equal(&what("reset"), reset, Some((expect, 0)))?;
        }
        equal(
            &what("reset where there is a limit"),
            found.duration_until_reset.is_some(),
            limit.is_some(),
        )?;
    }
    Ok(())
}

fn limit_text(limit: &RateLimit) -> String {
    let times = limit
        .unit_multiplier
        .map_or(String::new(), |times| format!("{times}x"));
    format!(
        "{}/{times}{}",
        limit.requests_per_unit,
        limit.unit().as_str_name()
    )
}

fn yaml_of(fields: &prost_types::Struct) -> Value {
    fn yaml(value: &prost_types::Value) -> Value {
        use prost_types::value::Kind;
        match &value.kind {
            Some(Kind::NumberValue(number)) => (*number).into(),
            Some(Kind::StringValue(text)) => text.as_str().into(),
            Some(Kind::BoolValue(truth)) => (*truth).into(),
            Some(Kind::StructValue(fields)) => yaml_of(fields),
            Some(Kind::ListValue(list)) => list.values.iter().map(yaml).collect::<Vec<_>>().into(),
            Some(Kind::NullValue(_)) | None => Value::Null,
        }
    }
    let fields = fields
        .fields
        .iter()
        .map(|(key, field)| (Value::from(key.as_str()), yaml(field)));
    Value::Mapping(fields.collect())
}

/// Numbers as doubles, mappings by key.
fn sorted(value: Value) -> Value {
    match value {
        Value::Number(number) => number.as_f64().expect("a number").into(),
        Value::Sequence(items) => items.into_iter().map(sorted).collect::<Vec<_>>().into(),
        Value::Mapping(fields) => {
            let fields: BTreeMap<_, _> = fields
                .into_iter()
                .map(|(key, value)| (key.as_str().expect("a text").to_owned(), sorted(value)))
                .collect();
            Value::Mapping(
                fields
                    .into_iter()
                    .map(|(key, value)| (key.into(), value))
                    .collect::<Mapping>(),
            )
        }
        other => other,
    }
}

fn equal<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expect: T) -> Result<(), String> {
    if found == expect {
        return Ok(());
    }
    Err(format!("{what} is {found:?} instead of {expect:?}"))
}
