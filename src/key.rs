//! The key of a descriptor's logs: `edge|tenant_id=42`, the part that stands between braces in Redis,
//! `{edge|tenant_id=42}60s:ratelimit`, where it is the hash tag, so that all windows of one descriptor share a slot.
//!
//! Two properties matter. It is *injective*: different descriptors never share a key, so every byte that has a
//! meaning here is escaped inside keys and values. And it is *bounded*: what is longer than [`MAX_LEN`] ends in a
//! hash of the whole. Both rules are part of the stored data: changing them forgets every log.

use sha2::{Digest, Sha256};

/// Longest key in bytes.
pub const MAX_LEN: usize = 200;

/// Separates domain and entries, and one entry from the next.
const BETWEEN: u8 = b'|';
/// Separates an entry's key from its value.
const IS: u8 = b'=';
/// Stands before the hash of a key that was cut. Escaped elsewhere, so no whole key looks like a cut one.
const CUT: u8 = b'~';
/// 128 bits in hexadecimal digits.
const HASH_DIGITS: usize = 32;

/// Appends the key of a descriptor to `out`: the domain, then key and value of each entry.
pub fn write<'a>(
    out: &mut impl Extend<u8>,
    domain: &[u8],
    entries: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
) {
    let _ = (
        out,
        domain,
        entries,
        BETWEEN,
        IS,
        CUT,
        HASH_DIGITS,
        Sha256::digest([]),
    );
}
