//! The key of a descriptor's logs: `edge|tenant_id=42`, the part that stands between braces in Redis,
//! `{edge|tenant_id=42}60s:ratelimit`, where it is the hash tag, so that all windows of one descriptor share a slot.
//!
//! Two properties matter. It is *injective*: different descriptors never share a key, so every byte that has a
//! meaning here is escaped inside keys and values. And it is *bounded*: what is longer than [`MAX_LEN`] ends in a
//! hash of the whole. Both are part of the stored data: a change here forgets every log.

use sha2::{Digest, Sha256};

/// Longest key in bytes.
pub const MAX_LEN: usize = 200;

/// Separates the domain from the entries, and one entry from the next.
const BETWEEN: u8 = b'|';
/// Separates an entry's key from its value.
const IS: u8 = b'=';
/// Stands before the hash of a key that was cut. Escaped elsewhere, so no whole key looks like a cut one.
const CUT: u8 = b'~';
/// The first 128 bits of SHA-256 as hexadecimal digits: fixed, unseeded, the same on every instance.
const HASH_BYTES: usize = 16;

/// Bytes that stand for themselves. The others are the separators, the braces of Redis's hash tag, the escape
/// itself, control bytes, and space (keys are read in terminals).
const PLAIN: [bool; 256] = {
    let mut plain = [false; 256];
    let mut byte = 0x21;
    while byte < 0x7f {
        plain[byte] = !matches!(byte as u8, BETWEEN | IS | CUT | b'{' | b'}' | b'%');
        byte += 1;
    }
    plain
};

/// Where a key is written: whatever collects bytes.
pub trait Buffer: AsRef<[u8]> {
    /// Appends.
    fn extend(&mut self, bytes: &[u8]);
    /// Drops everything after the first `len` bytes.
    fn truncate(&mut self, len: usize);
}

/// Appends the key of a descriptor to `out`: the domain, then key and value of each entry.
pub fn write<'a>(
    out: &mut impl Buffer,
    domain: &[u8],
    entries: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
) {
    let start = out.as_ref().len();
    escape(out, domain);
    for (key, value) in entries {
        out.extend(&[BETWEEN]);
        escape(out, key);
        out.extend(&[IS]);
        escape(out, value);
    }
    if out.as_ref().len() - start > MAX_LEN {
        cut(out, start);
    }
}

/// Percent-encodes what is not plain. Well-formed UTF-8 beyond ASCII stays readable.
fn escape(out: &mut impl Buffer, text: &[u8]) {
    if text.iter().all(|byte| PLAIN[usize::from(*byte)]) {
        return out.extend(text);
    }
    for chunk in text.utf8_chunks() {
        for character in chunk.valid().chars() {
            let mut bytes = [0; 4];
            let bytes = character.encode_utf8(&mut bytes).as_bytes();
            if (bytes.len() == 1 && PLAIN[usize::from(bytes[0])])
                || (bytes.len() > 1 && !character.is_control())
            {
                out.extend(bytes);
            } else {
                bytes.iter().for_each(|byte| percent(out, *byte));
            }
        }
        chunk.invalid().iter().for_each(|byte| percent(out, *byte));
    }
}

fn percent(out: &mut impl Buffer, byte: u8) {
    out.extend(&[b'%', hex(byte >> 4), hex(byte & 15)]);
}

fn hex(nibble: u8) -> u8 {
    b"0123456789abcdef"[usize::from(nibble & 15)]
}

/// Replaces the end of the key that begins at `start`. The whole of it is hashed, so keys that share a beginning
/// stay apart.
fn cut(out: &mut impl Buffer, start: usize) {
    let whole = &out.as_ref()[start..];
    let hash = Sha256::digest(whole);
    let room = MAX_LEN - 1 - 2 * HASH_BYTES;
    // Not within a character, so that the key stays readable as text.
    let kept = (0..=room)
        .rev()
        .find(|at| whole[*at] & 0xc0 != 0x80)
        .unwrap_or(0);
    out.truncate(start + kept);
    out.extend(&[CUT]);
    for byte in &hash[..HASH_BYTES] {
        out.extend(&[hex(byte >> 4), hex(*byte)]);
    }
}

impl Buffer for Vec<u8> {
    fn extend(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }

    fn truncate(&mut self, len: usize) {
        Vec::truncate(self, len);
    }
}

impl<const N: usize> Buffer for smallvec::SmallVec<[u8; N]> {
    fn extend(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }

    fn truncate(&mut self, len: usize) {
        smallvec::SmallVec::truncate(self, len);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

    fn key(domain: &[u8], pairs: &Pairs) -> Vec<u8> {
        let mut out = Vec::new();
        write(
            &mut out,
            domain,
            pairs.iter().map(|(k, v)| (k.as_slice(), v.as_slice())),
        );
        out
    }

    fn text(domain: &str, pairs: &[(&str, &str)]) -> String {
        let pairs = pairs
            .iter()
            .map(|(k, v)| (k.as_bytes().to_vec(), v.as_bytes().to_vec()))
            .collect();
        String::from_utf8(key(domain.as_bytes(), &pairs)).unwrap()
    }

    /// Stored data: these spellings must not change from one version to the next.
    #[test]
    fn golden_spellings() {
        assert_eq!(text("edge", &[("tenant_id", "42")]), "edge|tenant_id=42");
        assert_eq!(text("edge", &[("a", ""), ("b", "c")]), "edge|a=|b=c");
        assert_eq!(
            text("d", &[("path", "/x?y=1|{z}~%")]),
            "d|path=/x?y%3d1%7c%7bz%7d%7e%25"
        );
        assert_eq!(text("d", &[("k", "Zürich\n x")]), "d|k=Zürich%0a%20x");
        assert_eq!(
            key(b"d", &vec![(b"k".to_vec(), b"a\xff\xfeb".to_vec())]),
            b"d|k=a%ff%feb"
        );
        let long = text("d", &[("k", &"x".repeat(300))]);
        assert_eq!(
            long,
            format!("d|k={}~4ce73ebae2cdf31d7b6ee824a91352f5", "x".repeat(163))
        );
        assert_eq!(long.len(), MAX_LEN);
    }

    #[test]
    fn what_the_reference_mixes_up_stays_apart() {
        assert_ne!(text("a", &[("b", "c_d")]), text("a_b", &[("c", "d")]));
        assert_ne!(text("d", &[("a_b", "c")]), text("d", &[("a", "b_c")]));
        assert_ne!(
            text("d", &[("a", "x|b=y")]),
            text("d", &[("a", "x"), ("b", "y")])
        );
    }

    #[test]
    fn a_cut_key_stays_text_and_cannot_be_written_by_hand() {
        for length in 190..300 {
            let cut = text("d", &[("k", &"ü".repeat(length))]);
            assert!(cut.len() <= MAX_LEN);
            let forged = text("d", &[("k", cut.strip_prefix("d|k=").unwrap())]);
            assert_ne!(cut, forged);
        }
    }

    fn pairs() -> impl Strategy<Value = (Vec<u8>, Pairs)> {
        // A small alphabet of troublesome bytes, so that collisions would be found.
        let bytes =
            || prop::collection::vec(prop::sample::select(&b"a_|={}%~3d\xff\xc3\xbc\n"[..]), 0..4);
        (bytes(), prop::collection::vec((bytes(), bytes()), 0..3))
    }

    proptest! {
        #[test]
        fn different_descriptors_have_different_keys(all in prop::collection::vec(pairs(), 64)) {
            let mut seen: HashMap<Vec<u8>, (Vec<u8>, Pairs)> = HashMap::new();
            for (domain, pairs) in all {
                let key = key(&domain, &pairs);
                let braces = key.iter().filter(|byte| matches!(byte, b'{' | b'}')).count();
                prop_assert_eq!(braces, 0);
                prop_assert!(std::str::from_utf8(&key).is_ok());
                if let Some(other) = seen.insert(key, (domain.clone(), pairs.clone())) {
                    prop_assert_eq!(other, (domain, pairs));
                }
            }
        }

        #[test]
        fn long_descriptors_are_bounded_and_differ(value in prop::collection::vec(any::<u8>(), 201..400), at in 0usize..200) {
            let mut other = value.clone();
            other[at] ^= 1;
            let (one, two) = (
                key(b"d", &vec![(b"k".to_vec(), value)]),
                key(b"d", &vec![(b"k".to_vec(), other)]),
            );
            prop_assert!(one.len() <= MAX_LEN && two.len() <= MAX_LEN);
            prop_assert_ne!(one, two);
        }
    }
}
