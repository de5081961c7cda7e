//! What Envoy asks about, in the words of the domain: a request of one domain with descriptors, each an ordered
//! list of entries. Everything borrows from the message it came in; keys and values are bytes, since Envoy copies
//! header values as they are.

use smallvec::SmallVec;

use crate::limit::Window;

/// How many hits a descriptor asks for.
///
/// Envoy can name more (its field has 64 bits, its own configuration stops at 10^9); such a number is taken as
/// `u32::MAX`, which no configured limit but the largest can admit either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hits(pub u32);

/// One call of the rate-limit service.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The namespace of the rules.
    pub domain: &'a [u8],
    /// In the order of the message; the answer keeps it.
    pub descriptors: SmallVec<[Descriptor<'a>; 2]>,
    /// Hits of every descriptor that names none of its own; 0 on the wire is already 1 here.
    pub hits: Hits,
    /// The wire's own number, which dynamic metadata repeats.
    pub wire_hits: u32,
}

/// One thing to be limited.
#[derive(Clone, Debug)]
pub struct Descriptor<'a> {
    /// The pairs, matched one level of the rules each.
    pub entries: SmallVec<[Entry<'a>; 4]>,
    /// A limit that takes the place of the configured one.
    pub limit: Option<Override>,
    /// This descriptor's own number of hits. Present and 0 is a look: a verdict, and nothing taken.
    pub hits: Option<Hits>,
    /// The wire's own number, which dynamic metadata repeats.
    pub wire_hits: Option<u64>,
    /// The hits are given back instead of taken.
    pub refund: bool,
}

/// One pair of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry<'a> {
    /// Never empty from Envoy, which validates it.
    pub key: &'a [u8],
    /// May be empty.
    pub value: &'a [u8],
}

/// A limit that came with the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Override {
    /// Hits per window.
    pub requests: u32,
    /// The window.
    pub window: Window,
}

// === impl Hits ===

impl Hits {
    /// A number of the wire, see the type.
    pub fn saturating(wire: u64) -> Self {
        Self(u32::try_from(wire).unwrap_or(u32::MAX))
    }
}
