//! The decision over all descriptors of a request: which limit each one meets, one question to the store for all
//! of them, all or nothing, shadow and quota modes, and the numbers of the answer. It speaks the words of the
//! domain only: bytes on a wire are the edge's, logs are the store's.

use std::{
    borrow::Cow,
    hash::BuildHasher,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use smallvec::SmallVec;

use crate::{
    descriptor::{Descriptor, Entry, Hits, Override, Request},
    key,
    limit::Limit,
    metrics::{Judged, Metrics, RuleCounters, RuleName},
    rules::{Charge, Domain, Level, Rule, RuleSet, StatName, StatPart},
    store::{AnsweredBy, Ask, Check, Store, StoreError, Taken, Verdict},
};

/// Decides requests by rules and a store.
#[derive(Debug)]
pub struct Limiter<S> {
    store: S,
    config: Config,
    metrics: Arc<Metrics>,
    overrides_looked_at: LookedAt,
}

/// What an operator may choose about decisions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Hits above this share of a limit are counted as near it.
    pub near_limit_ratio: f32,
    /// Answer OK whatever the verdict; statuses keep theirs.
    pub shadow: bool,
    /// Treat every descriptor as one of a quota rule.
    pub quota: bool,
    /// A denied request consumes nothing of any limit.
    pub all_or_nothing: bool,
}

/// The answer to a request.
#[derive(Debug)]
pub struct Decision<'r> {
    /// Whether the request is over a limit.
    pub over_limit: bool,
    /// One per descriptor, in the request's order.
    pub statuses: SmallVec<[Status<'r>; 2]>,
}

/// The answer to one descriptor.
#[derive(Debug)]
pub struct Status<'r> {
    /// Whether it is over its limit; never for a shadowed rule.
    pub over_limit: bool,
    /// The limit that the numbers belong to; `None` where none applies.
    pub limit: Option<NamedLimit<'r>>,
    /// Hits that would still fit. `u32::MAX` under an unlimited rule, 0 where no rule applies.
    pub remaining: u32,
    /// With a limit: see [`Verdict::reset`].
    pub reset: Duration,
    /// Whether it is judged as part of a quota.
    pub quota: bool,
    /// The rule that was met, unless the limit came with the request.
    pub rule: Option<&'r Rule>,
    /// Where its hits were counted.
    pub counters: Option<Arc<RuleCounters>>,
}

/// A limit with what its file calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedLimit<'r> {
    /// The limit.
    pub limit: Limit,
    /// Empty where it has none.
    pub name: &'r str,
}

/// Why a request gets no decision. The texts are the reference's: clients may look for them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No domain.
    #[error("rate limit domain must not be empty")]
    NoDomain,
    /// Nothing to judge.
    #[error("rate limit descriptor list must not be empty")]
    NoDescriptors,
    /// No rules were loaded yet.
    #[error("no rate limit configuration loaded")]
    NoRules,
    /// The store has no verdict.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What a descriptor meets.
enum Met<'r> {
    Nothing,
    Unlimited(&'r Rule),
    Limited(Target<'r>),
}

/// Limits that a descriptor is judged by.
struct Target<'r> {
    /// `None` for a limit of the request's own.
    rule: Option<&'r Rule>,
    limits: Cow<'r, [Limit]>,
}

/// A question to the store before the keys stand still, and whose it is.
struct Question {
    descriptor: usize,
    key: Range<usize>,
    ask: Ask,
}

/// Which kinds of overridden descriptors have been looked at: a fixed table of hashes over domain and entry keys.
/// Of two kinds that share a place the later one stays, and the other's next look brings it back.
#[derive(Debug)]
struct LookedAt {
    hasher: foldhash::fast::RandomState,
    places: Box<[AtomicU64]>,
}

/// Kinds of overridden descriptors are few: they are written in routes. 8 KiB.
const LOOKED_AT_PLACES: usize = 1_024;

// === impl Limiter ===

impl<S: Store> Limiter<S> {
    /// A limiter in front of `store`.
    pub fn new(store: S, config: Config, metrics: Arc<Metrics>) -> Self {
        Self {
            store,
            config,
            metrics,
            overrides_looked_at: LookedAt::new(),
        }
    }

    /// The numbers it counts in.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Decides one request by `rules`, `None` while none were loaded. `arrived` is when it came in.
    pub async fn decide<'r>(
        &self,
        rules: Option<&'r RuleSet>,
        request: &Request<'_>,
        arrived: Instant,
    ) -> Result<Decision<'r>, Refusal> {
        let decision = self.decide_uncounted(rules, request, arrived).await;
        match &decision {
            Ok(_) => {}
            Err(Refusal::Store(_)) => self.metrics.store_errors.add(1),
            Err(_) => self.metrics.service_errors.add(1),
        }
        decision
    }

    async fn decide_uncounted<'r>(
        &self,
        rules: Option<&'r RuleSet>,
        request: &Request<'_>,
        arrived: Instant,
    ) -> Result<Decision<'r>, Refusal> {
        if request.domain.is_empty() {
            return Err(Refusal::NoDomain);
        }
        if request.descriptors.is_empty() {
            return Err(Refusal::NoDescriptors);
        }
        let rules = rules.ok_or(Refusal::NoRules)?;
        let Some(domain) = rules.domain(request.domain) else {
            let descriptors = request.descriptors.len();
            self.metrics
                .rules
                .domain_not_found(request.domain, descriptors as u64);
            return Ok(self.decision(vec_of(descriptors, || self.no_limit())));
        };

        let mut met: SmallVec<[Met<'r>; 2]> = request
            .descriptors
            .iter()
            .map(|descriptor| Met::find(domain, descriptor))
            .collect();
        drop_replaced(&mut met);

        let mut keys = SmallVec::<[u8; 256]>::new();
        let questions = self.questions(domain, request, &met, &mut keys);
        let checks: SmallVec<[Check<'_>; 2]> = questions
            .iter()
            .filter_map(|question| {
                let Met::Limited(target) = &met[question.descriptor] else {
                    return None;
                };
                Some(Check {
                    key: &keys[question.key.clone()],
                    limits: &target.limits,
                    ask: question.ask,
                    decisive: self.config.all_or_nothing
                        && !self.is_quota(target.rule)
                        && !target.rule.is_some_and(|rule| rule.shadow),
                })
            })
            .collect();
        let verdicts = if checks.is_empty() {
            SmallVec::new()
        } else {
            self.store.judge(arrived, &checks).await
        };
        let verdicts = verdicts
            .into_iter()
            .collect::<Result<SmallVec<[Verdict; 2]>, _>>()?;

        let mut statuses: SmallVec<[Status<'r>; 2]> = met
            .iter()
            .map(|met| match met {
                Met::Unlimited(rule) => unlimited(rule),
                Met::Nothing | Met::Limited(_) => self.no_limit(),
            })
            .collect();
        for ((question, check), verdict) in questions.iter().zip(&checks).zip(&verdicts) {
            let descriptor = &request.descriptors[question.descriptor];
            if let Met::Limited(target) = &met[question.descriptor] {
                statuses[question.descriptor] =
                    self.status(domain, descriptor, target, check.ask, verdict);
            }
        }
        let mut decision = self.decision(statuses);
        if decision.over_limit && self.config.all_or_nothing {
            self.give_back(&mut decision, &questions, &checks, &verdicts);
        }
        if decision.over_limit && self.config.shadow {
            self.metrics.global_shadow_mode.add(1);
            decision.over_limit = false;
        }
        Ok(decision)
    }

    /// One question per limited descriptor; their keys are written one behind the other into `keys`.
    fn questions(
        &self,
        domain: &Domain,
        request: &Request<'_>,
        met: &[Met<'_>],
        keys: &mut SmallVec<[u8; 256]>,
    ) -> SmallVec<[Question; 2]> {
        let mut questions = SmallVec::new();
        for (at, (descriptor, met)) in request.descriptors.iter().zip(met).enumerate() {
            let Met::Limited(target) = met else { continue };
            let start = keys.len();
            let entries = descriptor.entries.iter().enumerate().map(|(level, entry)| {
                let shared = target.rule.and_then(|rule| rule.shared_value(level));
                (entry.key, shared.map_or(entry.value, str::as_bytes))
            });
            key::write(keys, domain.name.as_bytes(), entries);
            questions.push(Question {
                descriptor: at,
                key: start..keys.len(),
                ask: self.ask(domain, request.hits, descriptor, target.rule),
            });
        }
        questions
    }

    /// What the descriptor's hits mean.
    fn ask(
        &self,
        domain: &Domain,
        request_hits: Hits,
        descriptor: &Descriptor<'_>,
        rule: Option<&Rule>,
    ) -> Ask {
        let hits = descriptor.hits.unwrap_or(request_hits);
        if descriptor.refund && hits.0 > 0 {
            return Ask::Refund(hits);
        }
        if descriptor.hits.is_none() {
            return Ask::Take(hits);
        }
        if hits.0 == 0 {
            match rule {
                Some(rule) if rule.looked_at.load(Relaxed) => {}
                Some(rule) => rule.looked_at.store(true, Relaxed),
                None => self.overrides_looked_at.insert(domain, descriptor),
            }
            return Ask::Look;
        }
        let is_charge = match rule.map_or(Charge::Auto, |rule| rule.charge) {
            Charge::Always => true,
            Charge::Never => false,
            Charge::Auto => rule.map_or_else(
                || self.overrides_looked_at.contains(domain, descriptor),
                |rule| rule.looked_at.load(Relaxed),
            ),
        };
        if is_charge {
            Ask::Charge(hits)
        } else {
            Ask::Take(hits)
        }
    }

    /// The status of a judged descriptor. Its hits are counted here.
    fn status<'r>(
        &self,
        domain: &Domain,
        descriptor: &Descriptor<'_>,
        target: &Target<'r>,
        ask: Ask,
        verdict: &Verdict,
    ) -> Status<'r> {
        let limit = target.limits[verdict.tightest];
        let shadow = target.rule.is_some_and(|rule| rule.shadow);
        let hits = match ask {
            Ask::Take(hits) | Ask::Charge(hits) => u64::from(hits.0),
            Ask::Look | Ask::Refund(_) => 0,
        };
        let over = match ask {
            // Logged whole; the part beyond the limit counts as over it all the same.
            Ask::Charge(_) => verdict.before + hits > u64::from(limit.requests),
            _ => !verdict.admitted,
        };
        let counters = self.counters(domain, descriptor, target.rule);
        counters.record(Judged {
            hits,
            before: verdict.before,
            limit: limit.requests,
            near: (limit.requests as f32 * self.config.near_limit_ratio) as u32,
            over,
            shadow,
            from_memory: verdict.by == AnsweredBy::DenialCache,
        });
        Status {
            over_limit: !verdict.admitted && !shadow,
            limit: Some(NamedLimit {
                limit,
                name: target.name(&limit),
            }),
            remaining: if verdict.admitted {
                left(limit, verdict.after)
            } else {
                0
            },
            reset: verdict.reset,
            quota: self.is_quota(target.rule),
            rule: target.rule,
            counters: Some(counters),
        }
    }

    /// Whether the statuses make the request over its limits: one that is not part of a quota, or all that are.
    fn decision<'r>(&self, statuses: SmallVec<[Status<'r>; 2]>) -> Decision<'r> {
        let (mut denied, mut quotas, mut quotas_denied) = (false, 0, 0);
        for status in &statuses {
            if status.quota {
                quotas += 1;
                quotas_denied += usize::from(status.over_limit);
            } else {
                denied |= status.over_limit;
            }
        }
        Decision {
            over_limit: denied || (quotas > 0 && quotas == quotas_denied),
            statuses,
        }
    }

    /// Returns what the request took, and shows it as returned.
    fn give_back(
        &self,
        decision: &mut Decision<'_>,
        questions: &[Question],
        checks: &[Check<'_>],
        verdicts: &[Verdict],
    ) {
        let mut taken = SmallVec::<[Taken<'_>; 2]>::new();
        for ((question, check), verdict) in questions.iter().zip(checks).zip(verdicts) {
            let (Ask::Take(hits), Some(at)) = (check.ask, verdict.taken_at) else {
                continue;
            };
            // Of the hits before these, some may be this request's own: a descriptor can stand in it twice.
            let own: u64 = taken
                .iter()
                .filter(|earlier| earlier.key == check.key)
                .map(|earlier| u64::from(earlier.hits.0))
                .sum();
            let status = &mut decision.statuses[question.descriptor];
            if let Some(NamedLimit { limit, .. }) = status.limit {
                status.remaining = left(limit, verdict.before.saturating_sub(own));
            }
            taken.push(Taken {
                key: check.key,
                limits: check.limits,
                hits,
                at,
            });
        }
        if !taken.is_empty() {
            self.store.give_back(&taken);
        }
    }

    /// The counters of what a descriptor meets.
    fn counters(
        &self,
        domain: &Domain,
        descriptor: &Descriptor<'_>,
        rule: Option<&Rule>,
    ) -> Arc<RuleCounters> {
        let rules = &self.metrics.rules;
        let Some(rule) = rule else {
            let levels = names(descriptor.entries.iter().map(key_and_value_if_any));
            return rules.of_request(named(domain, &levels), named(domain, &["_override"]));
        };
        let fixed = || names(rule.levels.iter().map(Level::to_string));
        match &rule.stat {
            StatName::Fixed { counters, .. } => {
                Arc::clone(counters.get_or_init(|| rules.of_rule(named(domain, &fixed()))))
            }
            StatName::PerRequest(parts) => {
                let levels =
                    names(
                        parts
                            .iter()
                            .zip(&descriptor.entries)
                            .map(|(part, entry)| match part {
                                StatPart::Text(text) => text.to_string(),
                                StatPart::KeyAndValue => {
                                    format!("{}_{}", text(entry.key), text(entry.value))
                                }
                                StatPart::KeyAndValueIfAny => key_and_value_if_any(entry),
                            }),
                    );
                rules.of_request(named(domain, &levels), named(domain, &fixed()))
            }
        }
    }

    fn is_quota(&self, rule: Option<&Rule>) -> bool {
        self.config.quota || rule.is_some_and(|rule| rule.quota)
    }

    fn no_limit<'r>(&self) -> Status<'r> {
        Status {
            quota: self.config.quota,
            ..Status::OK
        }
    }
}

// === impl Decision ===

impl<'r> Decision<'r> {
    /// The status that a client should see: the last ordinary one that is over its limit, else the one with the
    /// fewest hits remaining (of equals the first). `None` where no limit applies. (The reference's choice.)
    pub fn headline(&self) -> Option<(&Status<'r>, NamedLimit<'r>)> {
        let limited = || {
            self.statuses
                .iter()
                .filter_map(|status| Some((status, status.limit?)))
        };
        limited()
            .rev()
            .find(|(status, _)| status.over_limit && !status.quota)
            .or_else(|| limited().min_by_key(|(status, _)| status.remaining))
    }
}

// === impl Status ===

impl Status<'_> {
    /// No limit applies.
    const OK: Self = Self {
        over_limit: false,
        limit: None,
        remaining: 0,
        reset: Duration::ZERO,
        quota: false,
        rule: None,
        counters: None,
    };
}

fn unlimited(rule: &Rule) -> Status<'_> {
    Status {
        remaining: u32::MAX,
        rule: Some(rule),
        ..Status::OK
    }
}

// === impl Met ===

impl<'r> Met<'r> {
    /// A limit of the request's own comes first, whatever the rules say; then the tree decides.
    fn find(domain: &'r Domain, descriptor: &Descriptor<'_>) -> Self {
        if let Some(Override { requests, window }) = descriptor.limit {
            let limit = Limit {
                requests,
                window,
                exact: false,
            };
            return Self::Limited(Target {
                rule: None,
                limits: Cow::Owned(vec![limit]),
            });
        }
        match domain.rule(&descriptor.entries) {
            None => Self::Nothing,
            Some(rule) if rule.is_unlimited() => Self::Unlimited(rule),
            Some(rule) => Self::Limited(Target {
                rule: Some(rule),
                limits: Cow::Borrowed(&rule.limits),
            }),
        }
    }

    fn rule(&self) -> Option<&'r Rule> {
        match self {
            Self::Unlimited(rule) => Some(rule),
            Self::Limited(target) => target.rule,
            Self::Nothing => None,
        }
    }
}

/// Drops every limit that a rule met by the same request replaces by name, its own rule replaced or not. A
/// descriptor whose last limit goes has no limit at all.
fn drop_replaced(met: &mut [Met<'_>]) {
    let replaced: SmallVec<[&str; 2]> = met
        .iter()
        .filter_map(Met::rule)
        .flat_map(|rule| rule.replaces.iter().map(|name| &**name))
        .collect();
    if replaced.is_empty() {
        return;
    }
    for met in met {
        let Met::Limited(target) = met else { continue };
        let is_replaced = |limit: &Limit| {
            let name = target.name(limit);
            !name.is_empty() && replaced.contains(&name)
        };
        if !target.limits.iter().any(is_replaced) {
            continue;
        }
        let stay = target.limits.iter().filter(|limit| !is_replaced(limit));
        let stay: Vec<Limit> = stay.copied().collect();
        if stay.is_empty() {
            *met = Met::Nothing;
        } else {
            target.limits = Cow::Owned(stay);
        }
    }
}

// === impl Target ===

impl<'r> Target<'r> {
    /// What the rule calls one of its limits. No two of a rule share a window, so that finds it; a limit of the
    /// request's own has no name.
    fn name(&self, limit: &Limit) -> &'r str {
        let name = self.rule.and_then(|rule| {
            let at = rule
                .limits
                .iter()
                .position(|own| own.window == limit.window)?;
            rule.names.get(at)
        });
        name.map_or("", |name| name)
    }
}

// === impl LookedAt ===

impl LookedAt {
    fn new() -> Self {
        Self {
            hasher: foldhash::fast::RandomState::default(),
            places: (0..LOOKED_AT_PLACES).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn insert(&self, domain: &Domain, descriptor: &Descriptor<'_>) {
        let hash = self.hash(domain, descriptor);
        self.place(hash).store(hash, Relaxed);
    }

    fn contains(&self, domain: &Domain, descriptor: &Descriptor<'_>) -> bool {
        let hash = self.hash(domain, descriptor);
        self.place(hash).load(Relaxed) == hash
    }

    fn place(&self, hash: u64) -> &AtomicU64 {
        &self.places[hash as usize % LOOKED_AT_PLACES]
    }

    fn hash(&self, domain: &Domain, descriptor: &Descriptor<'_>) -> u64 {
        let keys: SmallVec<[&[u8]; 8]> = descriptor.entries.iter().map(|entry| entry.key).collect();
        // 0 marks an empty place.
        self.hasher
            .hash_one((domain.name.as_bytes(), keys.as_slice()))
            .max(1)
    }
}

fn left(limit: Limit, used: u64) -> u32 {
    u64::from(limit.requests).saturating_sub(used) as u32
}

fn vec_of<'r>(len: usize, status: impl Fn() -> Status<'r>) -> SmallVec<[Status<'r>; 2]> {
    (0..len).map(|_| status()).collect()
}

fn named<'a, T: AsRef<str>>(domain: &'a Domain, levels: &'a [T]) -> RuleName<'a, T> {
    RuleName {
        domain: &domain.name,
        levels,
    }
}

fn names(levels: impl Iterator<Item = String>) -> SmallVec<[String; 4]> {
    levels.collect()
}

fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

fn key_and_value_if_any(entry: &Entry<'_>) -> String {
    if entry.value.is_empty() {
        text(entry.key).into_owned()
    } else {
        format!("{}_{}", text(entry.key), text(entry.value))
    }
}
