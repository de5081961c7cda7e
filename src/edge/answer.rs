//! From a message of the wire to its answer: the words of the wire become those of
//! `descriptor`, the limiter decides, and the decision becomes a message again. gRPC and
//! `/json` both go through here; how messages arrive is theirs.

use std::{
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, Instant},
};

use http::HeaderName;

use crate::{
    descriptor::{self, Descriptor, Hits, Override},
    limit::{Unit, Window},
    limiter::{Decision, Limiter, NamedLimit, Refusal, Status},
    rules::reload::Rules,
    store::Store,
    wire::{
        RateLimitDescriptor, RateLimitOverride, RateLimitRequest, RateLimitResponse,
        envoy::{config::core::v3::HeaderValue, r#type::v3::RateLimitUnit},
        rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit},
    },
};

use super::metadata;

/// Answers messages.
#[derive(Debug)]
pub struct Answerer<S> {
    limiter: Limiter<S>,
    rules: Rules,
    config: Config,
}

/// What an operator may choose about answers.
#[derive(Clone, Debug)]
pub struct Config {
    /// Descriptors of one request; a longer list is refused.
    pub max_descriptors: usize,
    /// Entries of one descriptor; a longer list is refused.
    pub max_entries: usize,
    /// Headers that tell the client its limit, if any.
    pub headers: Option<Headers>,
    /// Return what was asked and the metadata of rules that passed.
    pub dynamic_metadata: bool,
}

/// What the response headers are called: lower-case, and allowed in any response.
#[derive(Clone, Debug)]
pub struct Headers {
    /// Hits per window.
    pub limit: HeaderName,
    /// Hits that would still fit.
    pub remaining: HeaderName,
    /// Whole seconds, rounded up.
    pub reset: HeaderName,
}

/// Why a message has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The limiter refused it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// More descriptors than any client sends.
    #[error(
        "the request has {0} descriptors, and this service takes at most {1}: see MAX_DESCRIPTORS"
    )]
    Descriptors(usize, usize),
    /// More entries than any client sends.
    #[error("a descriptor has {0} entries, and this service takes at most {1}: see MAX_ENTRIES")]
    Entries(usize, usize),
}

/// Seconds; 10,000 years (`google/protobuf/duration.proto`).
const LONGEST_RESET: u64 = 315_576_000_000;

// === impl Answerer ===

impl<S: Store> Answerer<S> {
    /// Answers by `limiter` and whatever rules are in force.
    pub fn new(limiter: Limiter<S>, rules: Rules, config: Config) -> Arc<Self> {
        Arc::new(Self {
            limiter,
            rules,
            config,
        })
    }

    /// The limiter it asks.
    pub fn limiter(&self) -> &Limiter<S> {
        &self.limiter
    }

    /// The rules in force.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The answer to one message that arrived at `arrived`.
    pub async fn answer(
        &self,
        message: &RateLimitRequest,
        arrived: Instant,
    ) -> Result<RateLimitResponse, Failure> {
        self.check_bounds(message).inspect_err(|failure| {
            self.limiter.metrics().over_bound.add(1);
            super::sampled_warning(|| failure.to_string());
        })?;
        let request = request(message);
        let rules = self.rules.current();
        let decision = self
            .limiter
            .decide(rules.as_deref(), &request, arrived)
            .await?;
        let mut response = response(&decision);
        if let Some(headers) = &self.config.headers {
            response.response_headers_to_add = headers.of(&decision);
        }
        if self.config.dynamic_metadata {
            response.dynamic_metadata = Some(metadata::of(&request, &decision));
        }
        Ok(response)
    }

    fn check_bounds(&self, message: &RateLimitRequest) -> Result<(), Failure> {
        let Config {
            max_descriptors,
            max_entries,
            ..
        } = self.config;
        let descriptors = message.descriptors.len();
        if descriptors > max_descriptors {
            return Err(Failure::Descriptors(descriptors, max_descriptors));
        }
        let longest = message
            .descriptors
            .iter()
            .map(|one| one.entries.len())
            .max();
        match longest {
            Some(entries) if entries > max_entries => Err(Failure::Entries(entries, max_entries)),
            _ => Ok(()),
        }
    }
}

// === impl Headers ===

impl Headers {
    fn of(&self, decision: &Decision<'_>) -> Vec<HeaderValue> {
        let Some((status, NamedLimit { limit, .. })) = decision.headline() else {
            return Vec::new();
        };
        let remaining = status.remaining;
        [
            (&self.limit, u64::from(limit.requests)),
            (&self.remaining, u64::from(remaining)),
            (&self.reset, whole_seconds(status.reset)),
        ]
        .map(|(name, value)| HeaderValue {
            key: name.as_str().to_owned(),
            value: value.to_string(),
            raw_value: Vec::new(),
        })
        .into()
    }
}

fn request(message: &RateLimitRequest) -> descriptor::Request<'_> {
    descriptor::Request {
        domain: &message.domain,
        descriptors: message.descriptors.iter().map(descriptor).collect(),
        hits: Hits(message.hits_addend.max(1)),
        wire_hits: message.hits_addend,
    }
}

fn descriptor(wire: &RateLimitDescriptor) -> Descriptor<'_> {
    Descriptor {
        entries: wire
            .entries
            .iter()
            .map(|entry| descriptor::Entry {
                key: &entry.key,
                value: &entry.value,
            })
            .collect(),
        limit: wire.limit.as_ref().and_then(override_limit),
        hits: wire.hits_addend.map(Hits::saturating),
        wire_hits: wire.hits_addend,
        refund: wire.is_negative_hits,
    }
}

/// `None` for an override that says nothing (no unit, or a multiplier of 0): the configured rule applies then.
fn override_limit(wire: &RateLimitOverride) -> Option<Override> {
    let unit = match wire.unit() {
        RateLimitUnit::Unknown => return None,
        RateLimitUnit::Second => Unit::Second,
        RateLimitUnit::Minute => Unit::Minute,
        RateLimitUnit::Hour => Unit::Hour,
        RateLimitUnit::Day => Unit::Day,
        RateLimitUnit::Month => Unit::Month,
        RateLimitUnit::Year => Unit::Year,
    };
    let multiplier = NonZeroU32::new(wire.unit_multiplier.unwrap_or(1))?;
    Some(Override {
        requests: wire.requests_per_unit,
        window: Window::new(unit, multiplier),
    })
}

fn response(decision: &Decision<'_>) -> RateLimitResponse {
    RateLimitResponse {
        overall_code: code(decision.over_limit).into(),
        statuses: decision.statuses.iter().map(status).collect(),
        ..RateLimitResponse::default()
    }
}

fn status(status: &Status<'_>) -> DescriptorStatus {
    DescriptorStatus {
        code: code(status.over_limit).into(),
        current_limit: status.limit.map(current_limit),
        limit_remaining: status.remaining,
        duration_until_reset: status.limit.map(|_| prost_types::Duration {
            // Envoy cuts fractions off, and a client that comes back too early is denied again.
            seconds: whole_seconds(status.reset) as i64,
            nanos: 0,
        }),
        quota: None,
    }
}

fn current_limit(NamedLimit { limit, name }: NamedLimit<'_>) -> RateLimit {
    let unit = match limit.window.unit() {
        Unit::Second => rate_limit::Unit::Second,
        Unit::Minute => rate_limit::Unit::Minute,
        Unit::Hour => rate_limit::Unit::Hour,
        Unit::Day => rate_limit::Unit::Day,
        Unit::Week => rate_limit::Unit::Week,
        Unit::Month => rate_limit::Unit::Month,
        Unit::Year => rate_limit::Unit::Year,
    };
    let multiplier = limit.window.multiplier();
    RateLimit {
        requests_per_unit: limit.requests,
        unit: unit.into(),
        name: name.to_owned(),
        unit_multiplier: (multiplier > 1).then_some(multiplier),
    }
}

fn code(over_limit: bool) -> Code {
    if over_limit {
        Code::OverLimit
    } else {
        Code::Ok
    }
}

/// Rounded up, and at least one: the reference never says 0 either. At most what a protobuf duration may hold, since a
/// request's own limit can name a window of billions of years.
fn whole_seconds(duration: Duration) -> u64 {
    let up = u64::from(duration.subsec_nanos() > 0);
    duration
        .as_secs()
        .saturating_add(up)
        .clamp(1, LONGEST_RESET)
}
