//! Numbers about the service as a whole and about each rule, in the reference's names, and the page that shows
//! every number of the process. What one room alone counts is declared in that room, beside the code that moves it.

use std::sync::atomic::AtomicU64;

/// What happened to the hits that met one rule (or one name, where a rule's name holds values of the request).
/// In hits, not requests.
#[derive(Debug, Default)]
pub struct RuleCounters {
    /// Asked for.
    pub total_hits: AtomicU64,
}
