//! A byte filter between the socket and h2 that makes any `:authority` acceptable to the `http` crate.
//!
//! Envoy's default `:authority` is the name of the cluster, and names such as Istio's
//! `outbound|8081||ratelimit.default.svc.cluster.local` hold bytes that `http::uri::Authority` refuses. h2 then
//! resets the stream, which Envoy, failing open, takes for "no limit". h2 has no switch for it. Nothing in this
//! service reads the authority, so the filter writes an acceptable one in its place before h2 sees it.
//!
//! # What is changed
//!
//! Only a header block (HEADERS with its CONTINUATION frames) that holds, as a literal, an `:authority` that
//! `http::uri::Authority` refuses or a `host` that `http::HeaderValue` refuses (h2 parses `host` no further).
//! Every refused byte becomes `_`; if the value is still refused as a whole (several colons, an unmatched bracket,
//! nothing after an `@`, a `%` in the host), every `:`, `@`, `[`, `]` and `%` becomes `_` too, and what is left is
//! always accepted. The block is framed anew, without its padding and in frames of at most 16,384 bytes.
//! Everything else passes byte for byte, whatever it is: malformed input is for h2 to judge.
//!
//! # Why no HPACK table is needed
//!
//! A field is sent as a literal before it can be referred to by index, on a connection as a whole. The filter
//! follows the connection from its first byte, so it sees every literal, and an indexed field can be skipped: in
//! h2's table it stands as the filter left it. The value keeps its *decoded* length, and a table entry's size is
//! computed from decoded lengths only, so h2's table evicts exactly when the client's does and every later index
//! means the same on both sides. The *encoded* length changes (the new value is written plain), which concerns the
//! frame's length alone.
//!
//! # Limits, on purpose
//!
//! - A literal may name its field by an index into the *dynamic* table, and `:authority` could be named so after
//!   it was sent once. `:authority` is static entry 1 and `host` static entry 38, and the encoders one meets take
//!   the static index when there is one (nghttp2, the one of Envoy and Chromium, Go, Netty, h2) or spell the name
//!   out (gRPC's C core): the filter knows both forms. Following the dynamic table would cost a Huffman decoding of
//!   every literal to know its size, on every request. Such a block passes untouched.
//! - No acceptable authority is as short as an empty one. An empty one is left out where it does not enter the
//!   table; where it does, it passes untouched. (Envoy can't send one, and RFC 9110 has no place for it.)
//! - Blocks over a bound pass untouched, so that memory is bounded; h2 refuses them for their size.

use std::{
    borrow::Cow,
    io, mem,
    ops::Range,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use httlib_huffman::DecoderSpeed;
use http::{HeaderValue, uri::Authority};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// The largest frame payload that may be sent to h2: SETTINGS_MAX_FRAME_SIZE as the server leaves it.
pub const MAX_FRAME: u32 = 16_384;

/// A byte stream whose read half carries only authorities that h2 accepts. The write half is the inner one's.
#[derive(Debug)]
pub struct AuthorityFilter<IO> {
    io: IO,
    follower: Follower,
}

/// Follows the client's bytes. No I/O: bytes in, bytes out.
#[derive(Debug)]
struct Follower {
    phase: Phase,
    /// Bytes still to come that pass whatever they are: the rest of frames that are not looked into.
    skip: usize,
    /// Bytes taken and not yet let go: the start of a frame's head, or of a header block. Empty while `skip` is not 0.
    held: Vec<u8>,
    /// How much of the block that begins `held` is whole frames that have been seen.
    walked: usize,
    /// Bytes let go that nobody has read yet.
    ready: BytesMut,
    /// The largest block, frame heads included, that is gathered to be looked into.
    max_block: usize,
    /// Blocks in which a value was replaced.
    rewritten: Arc<AtomicU64>,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// The first bytes of the connection preface have been seen.
    Preface {
        seen: usize,
    },
    Frames,
    /// Not HTTP/2, or at an end: everything passes.
    Opaque,
}

/// What to do with the bytes at a boundary between blocks.
enum Step {
    /// This many bytes pass untouched; some of them may still be to come.
    Pass(usize),
    /// More bytes are needed to tell.
    Wait,
    /// These frames take the place of the first `len` bytes.
    Replace { len: usize, frames: Vec<u8> },
}

/// The head of an HTTP/2 frame.
#[derive(Clone, Copy)]
struct Head {
    len: usize,
    kind: u8,
    flags: u8,
    /// With its reserved bit, as it came.
    stream: [u8; 4],
}

/// Reads the representations of a header block. Every method is `None` on malformed input.
struct Reader<'a> {
    block: &'a [u8],
    at: usize,
}

/// A string literal as it stands in the block.
#[derive(Clone, Copy)]
struct Text<'a> {
    huffman: bool,
    coded: &'a [u8],
}

/// The fields whose value matters here.
#[derive(Clone, Copy)]
enum Name {
    Authority,
    Host,
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const HEAD: usize = 9;
const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const PRIORITY_LEN: usize = 5;

/// `:authority` and `host` in HPACK's Huffman code, in which a string has exactly one spelling.
const AUTHORITY_HUFFMAN: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];
const HOST_HUFFMAN: &[u8] = &[0x9c, 0xe8, 0x4f];

/// Buffers above this are given back to the allocator when they run empty.
const KEPT_BUFFER: usize = 16_384;

// === impl AuthorityFilter ===

impl<IO> AuthorityFilter<IO> {
    /// Filters what is read from `io`, the server's end of a connection that has not been read from.
    /// `max_header_list` is h2's bound on the decoded header list, in bytes; blocks of up to four times that are
    /// looked into (the Huffman code's longest symbols are 30 bits). `rewritten` counts the blocks in which a value
    /// was replaced: for a client that indexes, one per authority and connection.
    pub fn new(io: IO, max_header_list: u32, rewritten: Arc<AtomicU64>) -> Self {
        Self {
            io,
            follower: Follower::new(
                (max_header_list as usize)
                    .saturating_mul(4)
                    .max(HEAD + MAX_FRAME as usize),
                rewritten,
            ),
        }
    }
}

impl<IO: AsyncRead + Unpin> AuthorityFilter<IO> {
    /// Waits until the client has sent the HTTP/2 connection preface, or something that is no preface. Nothing is
    /// lost: the bytes are there for the next read. Cancel-safe.
    ///
    /// # Errors
    ///
    /// Those of the inner stream, and `UnexpectedEof` when it ends before that.
    pub async fn preface(&mut self) -> io::Result<()> {
        let mut chunk = [0; 512];
        while let Phase::Preface { .. } = self.follower.phase {
            let read = self.io.read(&mut chunk).await?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.follower.absorb(&chunk[..read]);
        }
        Ok(())
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for AuthorityFilter<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            if this.follower.deliver(buf) {
                return Poll::Ready(Ok(()));
            }
            // Straight into the reader's buffer: nearly always, all of it may stay there.
            let start = buf.filled().len();
            ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
            let read = &buf.filled()[start..];
            if read.is_empty() {
                this.follower.finish();
                this.follower.deliver(buf);
                return Poll::Ready(Ok(()));
            }
            let passed = this.follower.pass(read);
            if passed < read.len() {
                this.follower.absorb(&read[passed..]);
                buf.set_filled(start + passed);
            }
            if passed > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for AuthorityFilter<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

// === impl Follower ===

impl Follower {
    fn new(max_block: usize, rewritten: Arc<AtomicU64>) -> Self {
        Self {
            phase: Phase::Preface { seen: 0 },
            skip: 0,
            held: Vec::new(),
            walked: 0,
            ready: BytesMut::new(),
            max_block,
            rewritten,
        }
    }

    /// How many of the next bytes may stay where they are. The others are for [`absorb`](Self::absorb). Only while
    /// nothing is ready.
    fn pass(&mut self, input: &[u8]) -> usize {
        debug_assert!(self.ready.is_empty());
        if !self.held.is_empty() {
            return 0;
        }
        let mut at = 0;
        loop {
            let skipped = self.skip.min(input.len() - at);
            self.skip -= skipped;
            at += skipped;
            if at == input.len() {
                return at;
            }
            match self.step(&input[at..]) {
                Step::Pass(len) => self.skip = len,
                // A block to replace is found again, once, when it is absorbed.
                Step::Wait | Step::Replace { .. } => return at,
            }
        }
    }

    /// Takes the next bytes; what can be told of them goes to `ready`, the rest is held.
    fn absorb(&mut self, input: &[u8]) {
        let mut bytes = mem::take(&mut self.held);
        bytes.extend_from_slice(input);
        let mut at = 0;
        loop {
            let skipped = self.skip.min(bytes.len() - at);
            self.skip -= skipped;
            self.ready.extend_from_slice(&bytes[at..at + skipped]);
            at += skipped;
            if at == bytes.len() {
                break;
            }
            match self.step(&bytes[at..]) {
                Step::Pass(len) => self.skip = len,
                Step::Wait => break,
                Step::Replace { len, frames } => {
                    self.rewritten.fetch_add(1, Ordering::Relaxed);
                    self.ready.extend_from_slice(&frames);
                    at += len;
                }
            }
        }
        bytes.drain(..at);
        if !bytes.is_empty() || bytes.capacity() <= KEPT_BUFFER {
            self.held = bytes;
        }
    }

    /// The stream has ended: what is held will never be whole and goes as it is.
    fn finish(&mut self) {
        self.ready.extend_from_slice(&mem::take(&mut self.held));
        self.phase = Phase::Opaque;
    }

    /// Moves ready bytes to the reader; whether there were any.
    fn deliver(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let len = self.ready.len().min(buf.remaining());
        buf.put_slice(&self.ready[..len]);
        self.ready.advance(len);
        if self.ready.is_empty() && self.ready.capacity() > KEPT_BUFFER {
            self.ready = BytesMut::new();
        }
        len > 0
    }

    /// Judges bytes, at least one, that begin between two blocks. Asked again with more after `Wait`.
    fn step(&mut self, bytes: &[u8]) -> Step {
        match self.phase {
            Phase::Opaque => Step::Pass(usize::MAX),
            Phase::Preface { seen } => {
                let len = bytes.len().min(PREFACE.len() - seen);
                if bytes[..len] != PREFACE[seen..seen + len] {
                    self.phase = Phase::Opaque;
                    return Step::Pass(usize::MAX);
                }
                self.phase = match seen + len {
                    whole if whole == PREFACE.len() => Phase::Frames,
                    seen => Phase::Preface { seen },
                };
                Step::Pass(len)
            }
            Phase::Frames => {
                let step = self.step_frames(bytes);
                if !matches!(step, Step::Wait) {
                    self.walked = 0;
                }
                step
            }
        }
    }

    fn step_frames(&mut self, bytes: &[u8]) -> Step {
        let Some(first) = Head::read(bytes, 0) else {
            return Step::Wait;
        };
        // A CONTINUATION without its HEADERS is the rest of a block that was passed.
        if first.kind != HEADERS || first.len > MAX_FRAME as usize {
            return Step::Pass(HEAD + first.len);
        }
        loop {
            let end = self.walked;
            let Some(head) = Head::read(bytes, end) else {
                return Step::Wait;
            };
            let follows = head.kind == CONTINUATION && head.stream == first.stream;
            if end > 0 && !(follows && head.len <= MAX_FRAME as usize) {
                return Step::Pass(end);
            }
            let end = end + HEAD + head.len;
            if end > self.max_block {
                return Step::Pass(end);
            }
            if bytes.len() < end {
                return Step::Wait;
            }
            self.walked = end;
            if head.flags & END_HEADERS != 0 {
                return match replace(&bytes[..end]) {
                    Some(frames) => Step::Replace { len: end, frames },
                    None => Step::Pass(end),
                };
            }
        }
    }
}

// === impl Head ===

impl Head {
    fn read(bytes: &[u8], at: usize) -> Option<Self> {
        match *bytes.get(at..)?.first_chunk::<HEAD>()? {
            [a, b, c, kind, flags, s, t, u, v] => Some(Self {
                len: u32::from_be_bytes([0, a, b, c]) as usize,
                kind,
                flags,
                stream: [s, t, u, v],
            }),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.len as u32).to_be_bytes()[1..]);
        out.extend_from_slice(&[self.kind, self.flags]);
        out.extend_from_slice(&self.stream);
    }
}

// === impl Reader ===

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.block.get(self.at).copied()
    }

    /// An integer whose first byte has `prefix` bits of it; as h2, at most five bytes long.
    fn integer(&mut self, prefix: u32) -> Option<usize> {
        let mask = (1_u8 << prefix) - 1;
        let first = self.peek()? & mask;
        self.at += 1;
        let mut value = first as usize;
        if first < mask {
            return Some(value);
        }
        for shift in [0, 7, 14, 21] {
            let byte = self.peek()?;
            self.at += 1;
            value += ((byte & 0x7f) as usize) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn text(&mut self) -> Option<Text<'a>> {
        let huffman = self.peek()? & 0x80 != 0;
        let len = self.integer(7)?;
        let coded = self.block.get(self.at..)?.get(..len)?;
        self.at += len;
        Some(Text { huffman, coded })
    }
}

// === impl Text ===

impl<'a> Text<'a> {
    fn decode(&self) -> Option<Cow<'a, [u8]>> {
        if !self.huffman {
            return Some(Cow::Borrowed(self.coded));
        }
        let mut plain = Vec::new();
        httlib_huffman::decode(self.coded, &mut plain, DecoderSpeed::FourBits).ok()?;
        // A string has one code, so this holds the decoder to it: a string of another length in h2's table than in
        // the client's would put every later index out of step.
        let mut coded = Vec::with_capacity(self.coded.len());
        httlib_huffman::encode(&plain, &mut coded).ok()?;
        (coded == self.coded).then_some(Cow::Owned(plain))
    }

    fn name(&self) -> Option<Name> {
        match (self.huffman, self.coded) {
            (false, b":authority") | (true, AUTHORITY_HUFFMAN) => Some(Name::Authority),
            (false, b"host") | (true, HOST_HUFFMAN) => Some(Name::Host),
            _ => None,
        }
    }
}

// === impl Name ===

impl Name {
    /// Of the static table.
    fn of(index: usize) -> Option<Self> {
        match index {
            1 => Some(Self::Authority),
            38 => Some(Self::Host),
            _ => None,
        }
    }

    fn accepts(self, value: &[u8]) -> bool {
        match self {
            Self::Authority => Authority::try_from(value).is_ok(),
            Self::Host => HeaderValue::from_bytes(value).is_ok(),
        }
    }

    /// An accepted value of the same length in place of a refused one that is not empty.
    fn mend(self, value: &[u8]) -> Vec<u8> {
        let with = |keeps: &dyn Fn(u8) -> bool| {
            let keep = |&byte: &u8| if keeps(byte) { byte } else { b'_' };
            value.iter().map(keep).collect::<Vec<u8>>()
        };
        match self {
            Self::Host => with(&|byte| self.accepts(&[byte])),
            Self::Authority => {
                let structural = |byte| b":@[]%".contains(&byte);
                let plain = |byte| !structural(byte) && self.accepts(&[byte]);
                let mended = with(&|byte| structural(byte) || plain(byte));
                if self.accepts(&mended) {
                    mended
                } else {
                    with(&plain)
                }
            }
        }
    }
}

/// The frames to send in place of those of a whole block, if a value in it has to be replaced.
fn replace(frames: &[u8]) -> Option<Vec<u8>> {
    let first = Head::read(frames, 0)?;
    let (priority, fragment) = payload(first, &frames[HEAD..HEAD + first.len])?;
    let rest = &frames[HEAD + first.len..];
    let block = if rest.is_empty() {
        rewrite(fragment)?
    } else {
        let mut block = fragment.to_vec();
        let mut at = 0;
        while let Some(head) = Head::read(rest, at) {
            block.extend_from_slice(&rest[at + HEAD..at + HEAD + head.len]);
            at += HEAD + head.len;
        }
        rewrite(&block)?
    };
    Some(reframe(first, priority, &block))
}

/// Takes a HEADERS payload apart: the priority fields, if it has them, and the block fragment. `None` if malformed.
fn payload(head: Head, payload: &[u8]) -> Option<(&[u8], &[u8])> {
    let (padding, payload) = match head.flags & PADDED {
        0 => (0, payload),
        _ => {
            let (&padding, rest) = payload.split_first()?;
            (padding as usize, rest)
        }
    };
    let payload = &payload[..payload.len().checked_sub(padding)?];
    match head.flags & PRIORITY {
        0 => Some((&[], payload)),
        _ => payload.split_at_checked(PRIORITY_LEN),
    }
}

/// The block with every refused value replaced; `None` if there is none, or the block is malformed.
fn rewrite(block: &[u8]) -> Option<Vec<u8>> {
    let mut reader = Reader { block, at: 0 };
    let mut out = Vec::new();
    let mut copied = 0;
    let mut splice = |range: Range<usize>, value: &[u8], out: &mut Vec<u8>| {
        out.extend_from_slice(&block[copied..range.start]);
        out.extend_from_slice(value);
        copied = range.end;
    };
    while let Some(byte) = reader.peek() {
        let field = reader.at;
        let (prefix, indexed) = match byte {
            0x80.. => {
                reader.integer(7)?;
                continue;
            }
            0x40.. => (6, true),
            0x20.. => {
                reader.integer(5)?;
                continue;
            }
            _ => (4, false),
        };
        let name = match reader.integer(prefix)? {
            0 => reader.text()?.name(),
            index => Name::of(index),
        };
        let start = reader.at;
        let value = reader.text()?;
        let Some(name) = name else { continue };
        let value = value.decode()?;
        if name.accepts(&value) {
            continue;
        }
        tracing::debug!(value = %value.escape_ascii(), "replacing bytes of a refused authority");
        if !value.is_empty() {
            let mut text = Vec::with_capacity(value.len() + 5);
            write_integer(value.len(), 7, &mut text);
            text.extend_from_slice(&name.mend(&value));
            splice(start..reader.at, &text, &mut out);
        } else if !indexed {
            splice(field..reader.at, &[], &mut out);
        }
    }
    if copied == 0 {
        return None;
    }
    out.extend_from_slice(&block[copied..]);
    Some(out)
}

/// A block as HEADERS and, where it is too long for one frame, CONTINUATION frames.
fn reframe(first: Head, priority: &[u8], block: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(block.len() + PRIORITY_LEN + 2 * HEAD);
    let (fragment, mut rest) = block.split_at(block.len().min(MAX_FRAME as usize - priority.len()));
    let end = |rest: &[u8]| if rest.is_empty() { END_HEADERS } else { 0 };
    Head {
        len: priority.len() + fragment.len(),
        flags: first.flags & !(PADDED | END_HEADERS) | end(rest),
        ..first
    }
    .write(&mut out);
    out.extend_from_slice(priority);
    out.extend_from_slice(fragment);
    while !rest.is_empty() {
        let fragment;
        (fragment, rest) = rest.split_at(rest.len().min(MAX_FRAME as usize));
        Head {
            len: fragment.len(),
            kind: CONTINUATION,
            flags: end(rest),
            stream: first.stream,
        }
        .write(&mut out);
        out.extend_from_slice(fragment);
    }
    out
}

/// An HPACK integer in a first byte whose other bits are 0.
fn write_integer(value: usize, prefix: u32, out: &mut Vec<u8>) {
    let max = (1_usize << prefix) - 1;
    if value < max {
        out.push(value as u8);
        return;
    }
    out.push(max as u8);
    let mut rest = value - max;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

#[cfg(test)]
mod tests {
    use std::{
        collections::{BTreeMap, VecDeque},
        task::Waker,
    };

    use proptest::{collection::vec, prelude::*};
    use tokio::io::{AsyncWriteExt, DuplexStream};

    use super::*;

    const ISTIO: &str = "outbound|8081||ratelimit.default.svc.cluster.local";
    const MENDED: &str = "outbound_8081__ratelimit.default.svc.cluster.local";

    const WITH_INDEXING: u8 = 0x40;
    const WITHOUT_INDEXING: u8 = 0x00;
    const NEVER_INDEXED: u8 = 0x10;
    const FORMS: [u8; 3] = [WITH_INDEXING, WITHOUT_INDEXING, NEVER_INDEXED];

    const DATA: u8 = 0;
    const RST_STREAM: u8 = 3;
    const SETTINGS: u8 = 4;
    const GOAWAY: u8 = 7;
    const END_STREAM: u8 = 1;

    /// `:method POST`, `:scheme http`, `:path /`, of the static table.
    const REQUEST: [u8; 3] = [0x83, 0x86, 0x84];

    // --- making bytes

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        Head {
            len: payload.len(),
            kind,
            flags,
            stream: stream.to_be_bytes(),
        }
        .write(&mut out);
        out.extend_from_slice(payload);
        out
    }

    fn integer(first: u8, prefix: u32, value: usize) -> Vec<u8> {
        let mut out = Vec::new();
        write_integer(value, prefix, &mut out);
        out[0] |= first;
        out
    }

    fn text(huffman: bool, value: &[u8]) -> Vec<u8> {
        let mut coded = value.to_vec();
        if huffman {
            coded.clear();
            httlib_huffman::encode(value, &mut coded).unwrap();
        }
        let mut out = integer(u8::from(huffman) << 7, 7, coded.len());
        out.extend(coded);
        out
    }

    fn literal(form: u8, index: usize, huffman: bool, value: &[u8]) -> Vec<u8> {
        let prefix = if form == WITH_INDEXING { 6 } else { 4 };
        let mut out = integer(form, prefix, index);
        out.extend(text(huffman, value));
        out
    }

    fn named(form: u8, name: (bool, &[u8]), value: (bool, &[u8])) -> Vec<u8> {
        let mut out = vec![form];
        out.extend(text(name.0, name.1));
        out.extend(text(value.0, value.1));
        out
    }

    fn block(fields: &[&[u8]]) -> Vec<u8> {
        [&REQUEST, fields.concat().as_slice()].concat()
    }

    fn headers(stream: u32, block: &[u8]) -> Vec<u8> {
        frame(HEADERS, END_HEADERS | END_STREAM, stream, block)
    }

    // --- running bytes through the filter

    /// A socket that gives its chunks one by one.
    struct Chunks(VecDeque<Vec<u8>>);

    impl AsyncRead for Chunks {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if let Some(mut chunk) = self.0.pop_front() {
                let rest = chunk.split_off(chunk.len().min(buf.remaining()));
                buf.put_slice(&chunk);
                if !rest.is_empty() {
                    self.0.push_front(rest);
                }
            }
            Poll::Ready(Ok(()))
        }
    }

    /// What comes out of the filter for `input` in chunks of these sizes, over and over, read into a buffer of
    /// `room` bytes; and how many blocks were rewritten.
    fn filter(input: &[u8], sizes: &[usize], room: usize) -> (Vec<u8>, u64) {
        let mut chunks = VecDeque::new();
        let mut rest = input;
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let chunk;
            (chunk, rest) = rest.split_at((*size).min(rest.len()));
            chunks.push_back(chunk.to_vec());
        }
        let rewritten = Arc::new(AtomicU64::new(0));
        let mut filter = AuthorityFilter::new(Chunks(chunks), 16_384, rewritten.clone());
        let mut out = Vec::new();
        let mut memory = vec![0; room + 1];
        loop {
            let mut buf = ReadBuf::new(&mut memory);
            // What a buffer already holds is not the filter's.
            buf.put_slice(&[0xaa]);
            let mut cx = Context::from_waker(Waker::noop());
            let Poll::Ready(read) = Pin::new(&mut filter).poll_read(&mut cx, &mut buf) else {
                panic!("the socket is always ready");
            };
            read.unwrap();
            assert_eq!(buf.filled()[0], 0xaa);
            if buf.filled().len() == 1 {
                return (out, rewritten.load(Ordering::Relaxed));
            }
            out.extend_from_slice(&buf.filled()[1..]);
        }
    }

    fn connection(frames: &[Vec<u8>]) -> Vec<u8> {
        let settings = frame(SETTINGS, 0, 0, &[]);
        [PREFACE, &settings, &frames.concat()].concat()
    }

    /// The output for `frames` in one read, having seen that no other chunking gives another.
    fn filtered(frames: &[Vec<u8>]) -> (Vec<u8>, u64) {
        let input = connection(frames);
        let whole = filter(&input, &[usize::MAX], 100_000);
        if input.len() < 20_000 {
            assert_eq!(filter(&input, &[1], 100_000), whole, "byte by byte");
            assert_eq!(
                filter(&input, &[usize::MAX], 1),
                whole,
                "into a byte of room"
            );
        }
        if input.len() < 1_000 {
            for cut in 1..input.len() {
                assert_eq!(
                    filter(&input, &[cut, usize::MAX], 100_000),
                    whole,
                    "cut at {cut}"
                );
            }
        }
        whole
    }

    #[track_caller]
    fn assert_untouched(frames: &[Vec<u8>]) {
        let (out, rewritten) = filtered(frames);
        assert_eq!(out, connection(frames));
        assert_eq!(rewritten, 0);
    }

    #[track_caller]
    fn assert_becomes(frames: &[Vec<u8>], becomes: &[Vec<u8>]) {
        let (out, rewritten) = filtered(frames);
        let expected = connection(becomes);
        assert_eq!(out, expected, "\n{out:x?}\n{expected:x?}");
        assert_eq!(rewritten, 1);
    }

    // --- which values

    #[test]
    fn refused_values_become_accepted_ones_of_the_same_length() {
        for (value, becomes) in [
            (ISTIO, MENDED),
            ("ratelimit/default/8081", "ratelimit_default_8081"),
            ("a b", "a_b"),
            ("a?b#c", "a_b_c"),
            ("/", "_"),
            ("@", "_"),
            ("a@", "a_"),
            ("a@b@", "a_b_"),
            ("a:b:c", "a_b_c"),
            ("a:8081:1", "a_8081_1"),
            ("[::1", "___1"),
            ("::1", "__1"),
            ("]a[", "_a_"),
            ("a%2fb", "a_2fb"),
            ("[::1]|x:1", "[::1]_x:1"),
            ("u%20:p@h|x", "u%20:p@h_x"),
            ("h\u{e9}", "h__"),
            ("\0\x7f", "__"),
        ] {
            assert!(!Name::Authority.accepts(value.as_bytes()), "{value}");
            let mended = Name::Authority.mend(value.as_bytes());
            assert_eq!(mended, becomes.as_bytes(), "{value}");
            assert!(Name::Authority.accepts(&mended), "{value}");
        }
        for value in [
            "a",
            "a_b",
            "a:99999",
            "a:",
            "a:x",
            "[::1]:80",
            "u:p%40@h:1",
            ":",
            "~!$&'()*+,;=",
        ] {
            assert!(Name::Authority.accepts(value.as_bytes()), "{value}");
        }
        assert!(Name::Host.accepts(b"a|b/c@"));
        assert!(!Name::Host.accepts(b"a\x01b"));
        assert_eq!(Name::Host.mend(b"a\x01|\x7f\xff"), b"a_|_\xff");
    }

    #[test]
    fn the_huffman_spellings_of_the_names_are_right() {
        for (name, coded) in [(":authority", AUTHORITY_HUFFMAN), ("host", HOST_HUFFMAN)] {
            assert_eq!(&text(true, name.as_bytes())[1..], coded);
        }
    }

    // --- which fields

    #[test]
    fn every_form_of_the_field_is_seen() {
        for form in FORMS {
            for huffman in [false, true] {
                let value = (huffman, ISTIO.as_bytes());
                let plain = (false, MENDED.as_bytes());
                assert_becomes(
                    &[headers(1, &block(&[&literal(form, 1, huffman, value.1)]))],
                    &[headers(1, &block(&[&literal(form, 1, false, plain.1)]))],
                );
                for name in [(false, &b":authority"[..]), (true, &b":authority"[..])] {
                    assert_becomes(
                        &[headers(1, &block(&[&named(form, name, value)]))],
                        &[headers(1, &block(&[&named(form, name, plain)]))],
                    );
                }
                for name in [(false, &b"host"[..]), (true, &b"host"[..])] {
                    assert_becomes(
                        &[headers(
                            1,
                            &block(&[&named(form, name, (huffman, b"a\x02"))]),
                        )],
                        &[headers(1, &block(&[&named(form, name, (false, b"a_"))]))],
                    );
                }
                assert_becomes(
                    &[headers(1, &block(&[&literal(form, 38, huffman, b"\x02")]))],
                    &[headers(1, &block(&[&literal(form, 38, false, b"_")]))],
                );
            }
        }
    }

    #[test]
    fn other_fields_pass_as_they_are() {
        for form in FORMS {
            for huffman in [false, true] {
                let refused = (huffman, ISTIO.as_bytes());
                assert_untouched(&[headers(
                    1,
                    &block(&[
                        &literal(form, 1, huffman, b"ratelimit.default:8081"),
                        &literal(form, 38, huffman, ISTIO.as_bytes()),
                        &literal(form, 4, huffman, b"/a|b"),
                        &literal(form, 62, huffman, ISTIO.as_bytes()),
                        &literal(form, 5000, huffman, ISTIO.as_bytes()),
                        &named(form, (huffman, b"x-authority"), refused),
                        &named(form, (huffman, b":Authority"), refused),
                        &[0xbe, 0x81, 0xff, 0x00],
                    ]),
                )]);
            }
        }
    }

    #[test]
    fn fields_beside_a_replaced_one_stay() {
        let before = [
            integer(0x20, 5, 2000),
            named(WITH_INDEXING, (true, b"x-long"), (true, &[b'x'; 300])),
        ]
        .concat();
        let after = [
            vec![0xbe],
            named(NEVER_INDEXED, (false, b"x"), (false, b"\x00\xff|")),
        ]
        .concat();
        let with = |value: &[u8], huffman| {
            [
                before.clone(),
                literal(WITH_INDEXING, 1, huffman, value),
                after.clone(),
            ]
            .concat()
        };
        assert_becomes(
            &[headers(1, &with(ISTIO.as_bytes(), true))],
            &[headers(1, &with(MENDED.as_bytes(), false))],
        );
    }

    #[test]
    fn an_empty_authority_is_left_out_unless_it_enters_the_table() {
        for huffman in [false, true] {
            for form in [WITHOUT_INDEXING, NEVER_INDEXED] {
                assert_becomes(
                    &[headers(
                        1,
                        &block(&[&literal(form, 1, huffman, b""), &[0xbe]]),
                    )],
                    &[headers(1, &block(&[&[0xbe]]))],
                );
            }
            assert_untouched(&[headers(
                1,
                &block(&[&literal(WITH_INDEXING, 1, huffman, b"")]),
            )]);
        }
    }

    // --- frames

    #[test]
    fn padding_and_priority_are_understood() {
        let (bad, good) = (
            block(&[&literal(WITH_INDEXING, 1, true, ISTIO.as_bytes())]),
            block(&[&literal(WITH_INDEXING, 1, false, MENDED.as_bytes())]),
        );
        let priority = [0x80, 0, 0, 3, 7];
        // Padding that would be a refused authority, were it read.
        let padding = literal(WITHOUT_INDEXING, 1, false, b"|");
        let len = [padding.len() as u8];
        for (flags, payload) in [
            (PADDED, [&len[..], &bad, &padding].concat()),
            (PADDED, [&[0][..], &bad].concat()),
        ] {
            assert_becomes(
                &[frame(HEADERS, flags | END_HEADERS, 5, &payload)],
                &[frame(HEADERS, END_HEADERS, 5, &good)],
            );
        }
        for (flags, payload) in [
            (PRIORITY, [&priority[..], &bad].concat()),
            (
                PRIORITY | PADDED,
                [&len[..], &priority, &bad, &padding].concat(),
            ),
        ] {
            assert_becomes(
                &[frame(
                    HEADERS,
                    flags | END_HEADERS | END_STREAM,
                    5,
                    &payload,
                )],
                &[frame(
                    HEADERS,
                    PRIORITY | END_HEADERS | END_STREAM,
                    5,
                    &[&priority[..], &good].concat(),
                )],
            );
        }
    }

    #[test]
    fn a_block_may_be_cut_anywhere_into_continuations() {
        let bad = block(&[
            &literal(WITH_INDEXING, 1, true, ISTIO.as_bytes()),
            &named(WITH_INDEXING, (false, b"x"), (false, &[b'v'; 200])),
        ]);
        let good = block(&[
            &literal(WITH_INDEXING, 1, false, MENDED.as_bytes()),
            &named(WITH_INDEXING, (false, b"x"), (false, &[b'v'; 200])),
        ]);
        for cut in 0..=bad.len() {
            let (first, second) = bad.split_at(cut);
            let (second, third) = second.split_at(second.len() / 2);
            assert_becomes(
                &[
                    frame(HEADERS, END_STREAM, 1, first),
                    frame(CONTINUATION, 0, 1, second),
                    frame(CONTINUATION, END_HEADERS, 1, third),
                    frame(DATA, 0, 1, b"after"),
                ],
                &[headers(1, &good), frame(DATA, 0, 1, b"after")],
            );
        }
    }

    #[test]
    fn a_frame_that_grows_too_long_is_split() {
        let value = ["a".repeat(20_000).as_bytes(), b"|"].concat();
        let becomes = ["a".repeat(20_000).as_bytes(), b"_"].concat();
        let bad = block(&[&literal(WITH_INDEXING, 1, true, &value)]);
        assert!(bad.len() < MAX_FRAME as usize);
        let good = block(&[&literal(WITH_INDEXING, 1, false, &becomes)]);
        let (first, second) = good.split_at(MAX_FRAME as usize);
        assert_becomes(
            &[headers(1, &bad)],
            &[
                frame(HEADERS, END_STREAM, 1, first),
                frame(CONTINUATION, END_HEADERS, 1, second),
            ],
        );
    }

    #[test]
    fn other_frames_pass_unread() {
        // Their payloads are HEADERS frames to refuse, were they read.
        let inner = headers(1, &block(&[&literal(WITH_INDEXING, 1, false, b"|")]));
        for kind in (0..=255).filter(|&kind| kind != HEADERS) {
            assert_untouched(&[
                frame(kind, 0xff, 1, &inner),
                frame(kind, 0, 0, &[]),
                headers(3, &REQUEST),
            ]);
        }
        assert_untouched(&[frame(DATA, 0, 1, &inner.repeat(2000))]);
    }

    #[test]
    fn malformed_input_passes_as_it_is() {
        let bad = literal(WITH_INDEXING, 1, false, b"|");
        for broken in [
            // Cut within a field, an integer, a string; an integer without end; a string too long.
            &b"\x41"[..],
            b"\xff",
            b"\xff\x80\x80\x80\x80\x00",
            b"\x41\x7f\xff\xff\xff\xff\xff\xff",
            b"\x41\x05abc",
            b"\x00\x05abc",
            b"\x40\x01a",
            // Huffman: padded by 8 bits, with zeros, with the end of string in it.
            b"\x41\x82\x1f\xff",
            b"\x41\x81\x18",
            b"\x41\x84\xff\xff\xff\xff",
        ] {
            assert_untouched(&[headers(1, &block(&[&bad, broken])), headers(3, &REQUEST)]);
        }
        let whole = block(&[&bad]);
        // Padding longer than the payload; no room for the padding's length or the priority.
        for (flags, payload) in [
            (PADDED, &[&[0xff], &whole[..]].concat()[..]),
            (PADDED, &[]),
            (PRIORITY, &[1, 2, 3, 4]),
            (PADDED | PRIORITY, &[3, 1, 2, 3, 4, 5, 6]),
        ] {
            assert_untouched(&[frame(HEADERS, flags | END_HEADERS, 1, payload)]);
        }
        // A block that another frame, or another stream's, breaks off.
        for kind in [DATA, HEADERS] {
            assert_untouched(&[
                frame(HEADERS, 0, 1, &whole),
                frame(kind, END_HEADERS, 1, &REQUEST),
                frame(CONTINUATION, END_HEADERS, 1, &whole),
            ]);
        }
        assert_untouched(&[
            frame(HEADERS, 0, 1, &whole),
            frame(CONTINUATION, END_HEADERS, 3, &REQUEST),
        ]);
        // Frames longer than allowed.
        let long = [&whole[..], &[0x84; MAX_FRAME as usize]].concat();
        assert_untouched(&[headers(1, &long), headers(3, &REQUEST)]);
        assert_untouched(&[
            frame(HEADERS, 0, 1, &whole),
            frame(CONTINUATION, END_HEADERS, 1, &long),
        ]);
        // An end within a block.
        assert_untouched(&[frame(HEADERS, 0, 1, &whole)]);
        let cut = headers(1, &whole);
        assert_untouched(&[cut[..cut.len() - 1].to_vec()]);
    }

    #[test]
    fn a_block_over_the_bound_passes_and_the_next_is_seen() {
        let bad = literal(WITH_INDEXING, 1, false, b"|");
        let good = literal(WITH_INDEXING, 1, false, b"_");
        let part = [0x84; MAX_FRAME as usize];
        let mut long = vec![frame(HEADERS, 0, 1, &block(&[&bad]))];
        long.extend(vec![frame(CONTINUATION, 0, 1, &part); 5]);
        long.push(frame(CONTINUATION, END_HEADERS, 1, &bad));
        let mut becomes = long.clone();
        long.push(headers(3, &block(&[&bad])));
        becomes.push(headers(3, &block(&[&good])));
        assert_becomes(&long, &becomes);
    }

    #[test]
    fn what_is_not_http2_passes() {
        let bad = headers(1, &block(&[&literal(WITH_INDEXING, 1, false, b"|")]));
        let mut wrong = PREFACE.to_vec();
        wrong[23] = b'!';
        for start in [&b"GET / HTTP/1.1\r\n"[..], b"", &PREFACE[1..], &wrong] {
            let input = [start, &bad].concat();
            assert_eq!(filter(&input, &[usize::MAX], 1000), (input.clone(), 0));
            assert_eq!(filter(&input, &[1], 1000), (input.clone(), 0));
        }
    }

    // --- properties

    fn value() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            3 => "[a-z.|/:@%\\[\\]_-]{0,12}".prop_map(String::into_bytes),
            2 => vec(any::<u8>(), 0..40),
            1 => vec(any::<u8>(), 120..400),
        ]
    }

    /// One field: its bytes.
    fn field() -> impl Strategy<Value = Vec<u8>> {
        let form = prop::sample::select(&FORMS[..]);
        let literals = (
            form,
            prop_oneof![
                4 => Just(1_usize),
                1 => Just(38),
                2 => Just(0),
                3 => 2..300_usize
            ],
            prop::sample::select(vec![&b":authority"[..], b"host", b"x"]),
            any::<(bool, bool)>(),
            value(),
        )
            .prop_map(|(form, index, name, huffman, value)| match index {
                0 => named(form, (huffman.0, name), (huffman.1, &value)),
                index => literal(form, index, huffman.1, &value),
            });
        prop_oneof![
            6 => literals,
            2 => (1..400_usize).prop_map(|index| integer(0x80, 7, index)),
            1 => (0..5000_usize).prop_map(|size| integer(0x20, 5, size)),
        ]
    }

    /// Frames of one block, and its fields.
    fn header_frames() -> impl Strategy<Value = (Vec<u8>, Vec<Vec<u8>>)> {
        let cuts = vec(any::<prop::sample::Index>(), 0..4);
        let shape = (any::<bool>(), prop::option::of(vec(any::<u8>(), 0..20)));
        (vec(field(), 0..6), cuts, shape, 1..50_u32).prop_map(
            |(fields, cuts, (priority, padding), stream)| {
                let block = fields.concat();
                let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(block.len() + 1)).collect();
                cuts.sort_unstable();
                cuts.push(block.len());
                let mut start = 0;
                let mut out = Vec::new();
                for (number, &cut) in cuts.iter().enumerate() {
                    let fragment = &block[start..cut];
                    let end = if number + 1 == cuts.len() {
                        END_HEADERS
                    } else {
                        0
                    };
                    start = cut;
                    if number > 0 {
                        out.extend(frame(CONTINUATION, end, stream, fragment));
                        continue;
                    }
                    let mut payload = Vec::new();
                    let mut flags = end;
                    if let Some(padding) = &padding {
                        flags |= PADDED;
                        payload.push(padding.len() as u8);
                    }
                    if priority {
                        flags |= PRIORITY;
                        payload.extend([0, 0, 0, 0, 9]);
                    }
                    payload.extend_from_slice(fragment);
                    payload.extend(padding.iter().flatten());
                    out.extend(frame(HEADERS, flags, stream, &payload));
                }
                (out, fields)
            },
        )
    }

    /// All fields of all blocks of a filtered connection, one by one.
    fn fields_of(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut block = Vec::new();
        let mut fields = Vec::new();
        bytes = &bytes[PREFACE.len()..];
        while let Some(head) = Head::read(bytes, 0) {
            let body = &bytes[HEAD..HEAD + head.len];
            bytes = &bytes[HEAD + head.len..];
            match head.kind {
                HEADERS => block.extend_from_slice(payload(head, body).unwrap().1),
                CONTINUATION => block.extend_from_slice(body),
                _ => continue,
            }
            assert!(head.len <= MAX_FRAME as usize);
            if head.flags & END_HEADERS == 0 {
                continue;
            }
            let mut reader = Reader {
                block: &block,
                at: 0,
            };
            while let Some(byte) = reader.peek() {
                let start = reader.at;
                match byte {
                    0x80.. => drop(reader.integer(7).unwrap()),
                    0x20..0x40 => drop(reader.integer(5).unwrap()),
                    _ => {
                        let prefix = if byte >= 0x40 { 6 } else { 4 };
                        if reader.integer(prefix).unwrap() == 0 {
                            reader.text().unwrap();
                        }
                        reader.text().unwrap();
                    }
                }
                fields.push(block[start..reader.at].to_vec());
            }
            block.clear();
        }
        assert!(block.is_empty());
        fields
    }

    /// A field's head up to its value, its name if it matters, and its decoded value, for a literal.
    fn take_apart(field: &[u8]) -> Option<(&[u8], Option<Name>, Vec<u8>)> {
        let mut reader = Reader {
            block: field,
            at: 0,
        };
        let prefix = match field[0] {
            0x80.. | 0x20..0x40 => return None,
            0x40.. => 6,
            _ => 4,
        };
        let name = match reader.integer(prefix).unwrap() {
            0 => reader.text().unwrap().name(),
            index => Name::of(index),
        };
        let head = &field[..reader.at];
        Some((
            head,
            name,
            reader.text().unwrap().decode().unwrap().into_owned(),
        ))
    }

    proptest! {
        #[test]
        fn any_bytes_pass_through_alike_in_any_chunks(
            bytes in vec(any::<u8>(), 0..300),
            sizes in vec(1..40_usize, 1..5),
            room in 1..50_usize,
        ) {
            let input = connection(&[bytes]);
            let whole = filter(&input, &[usize::MAX], 100_000);
            prop_assert_eq!(filter(&input, &sizes, room), whole.clone());
            if whole.1 == 0 {
                prop_assert_eq!(whole.0, input);
            }
        }

        #[test]
        fn any_block_comes_out_as_it_was_but_for_what_is_refused(
            frames in vec(header_frames(), 1..6),
            sizes in vec(1..200_usize, 1..5),
            room in 1..300_usize,
        ) {
            let (bytes, fields): (Vec<_>, Vec<_>) = frames.into_iter().unzip();
            let input = connection(&bytes);
            let (out, rewritten) = filter(&input, &[usize::MAX], 100_000);
            prop_assert_eq!(filter(&input, &sizes, room), (out.clone(), rewritten));

            let mut came = fields_of(&out).into_iter();
            let mut any_refused = 0;
            for field in fields.iter().flatten() {
                let refused = take_apart(field).filter(
                    |(_, name, value)| name.is_some_and(|name| !name.accepts(value)),
                );
                let Some((head, Some(name), value)) = refused else {
                    prop_assert_eq!(&came.next().unwrap(), field);
                    continue;
                };
                if value.is_empty() && field[0] & WITH_INDEXING == 0 {
                    any_refused += 1;
                    continue;
                }
                let came = came.next().unwrap();
                let (came_head, _, came_value) = take_apart(&came).unwrap();
                prop_assert_eq!(came_head, head);
                prop_assert_eq!(came_value.len(), value.len());
                if !value.is_empty() {
                    any_refused += 1;
                    prop_assert!(name.accepts(&came_value));
                }
            }
            prop_assert_eq!(came.next(), None);
            prop_assert_eq!(any_refused == 0, rewritten == 0);
            if rewritten == 0 {
                prop_assert_eq!(out, input);
            }
        }

        #[test]
        fn any_value_becomes_an_accepted_one(value in value()) {
            for name in [Name::Authority, Name::Host] {
                if !name.accepts(&value) && !value.is_empty() {
                    let mended = name.mend(&value);
                    prop_assert!(name.accepts(&mended), "{:?}", mended);
                    prop_assert_eq!(mended.len(), value.len());
                }
            }
        }

        #[test]
        fn huffman_decoding_survives_anything(coded in vec(any::<u8>(), 0..60)) {
            let text = Text { huffman: true, coded: &coded };
            if let Some(plain) = text.decode() {
                prop_assert_eq!(&super::tests::text(true, &plain)[1..], &coded[..]);
            }
        }
    }

    // --- before a real h2

    /// What a request was seen with.
    type Seen = (String, Vec<(String, Vec<u8>)>);

    /// Serves the other end of a connection through `filter`, or without; answers every request, and tells by stream
    /// what it saw.
    fn serve_h2(io: DuplexStream, filtered: bool) -> tokio::task::JoinHandle<BTreeMap<u32, Seen>> {
        async fn serve<IO: AsyncRead + AsyncWrite + Unpin>(io: IO) -> BTreeMap<u32, Seen> {
            let mut seen = BTreeMap::new();
            let mut builder = h2::server::Builder::new();
            builder.max_header_list_size(65_536);
            let mut connection = builder.handshake::<_, bytes::Bytes>(io).await.unwrap();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let authority = request.uri().authority().map(|a| a.to_string());
                let fields = request
                    .headers()
                    .iter()
                    .map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
                seen.insert(
                    respond.stream_id().into(),
                    (authority.unwrap_or_default(), fields.collect()),
                );
                respond
                    .send_response(http::Response::new(()), true)
                    .unwrap();
            }
            seen
        }
        tokio::spawn(async move {
            match filtered {
                true => serve(AuthorityFilter::new(io, 65_536, Arc::default())).await,
                false => serve(io).await,
            }
        })
    }

    /// Sends requests, block by block on streams 1, 3, ..., and hands back by stream the frame that answered, and what
    /// the server saw.
    async fn exchange(
        blocks: Vec<Vec<u8>>,
        filtered: bool,
    ) -> (BTreeMap<u32, u8>, BTreeMap<u32, Seen>) {
        let (client, server) = tokio::io::duplex(1 << 20);
        let server = serve_h2(server, filtered);
        let count = blocks.len();
        let (mut read, mut write) = tokio::io::split(client);
        let sender = tokio::spawn(async move {
            write.write_all(&connection(&[])).await.unwrap();
            for (number, block) in blocks.iter().enumerate() {
                let stream = 2 * number as u32 + 1;
                write.write_all(&headers(stream, block)).await.unwrap();
            }
            write
        });
        let mut answers = BTreeMap::new();
        let reading = async {
            while answers.len() < count {
                let mut head = [0; HEAD];
                if read.read_exact(&mut head).await.is_err() {
                    break;
                }
                let head = Head::read(&head, 0).unwrap();
                let mut body = vec![0; head.len];
                read.read_exact(&mut body).await.unwrap();
                match head.kind {
                    HEADERS | RST_STREAM => {
                        answers.insert(u32::from_be_bytes(head.stream), head.kind);
                    }
                    GOAWAY => panic!("gone away: {}", body.escape_ascii()),
                    _ => {}
                }
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(30), reading)
            .await
            .expect("answers in time");
        drop((sender.await.unwrap(), read));
        (answers, server.await.unwrap())
    }

    async fn answered(blocks: Vec<Vec<u8>>) -> Vec<Seen> {
        let count = blocks.len();
        let (answers, seen) = exchange(blocks, true).await;
        assert_eq!(answers.len(), count, "{answers:?}");
        assert!(answers.values().all(|&kind| kind == HEADERS), "{answers:?}");
        seen.into_values().collect()
    }

    #[tokio::test]
    async fn h2_refuses_without_the_filter() {
        let bad = block(&[&literal(WITH_INDEXING, 1, true, ISTIO.as_bytes())]);
        let (answers, seen) = exchange(vec![bad], false).await;
        assert_eq!(answers, BTreeMap::from([(1, RST_STREAM)]));
        assert_eq!(seen, BTreeMap::new());
    }

    #[tokio::test]
    async fn h2_answers_every_authority_in_every_form() {
        let long = ["a".repeat(20_000).as_bytes(), b"|"].concat();
        let values = [
            ISTIO.as_bytes(),
            b"ratelimit/default/8081",
            b"a@",
            b"::1",
            b"[",
            b"a:b:c",
            b"%",
            b"\xff\x00",
            b"good.example:80",
            &long,
        ];
        let mut blocks = Vec::new();
        let mut lengths = Vec::new();
        for value in values {
            for form in FORMS {
                for (in_name, in_value) in
                    [(false, false), (false, true), (true, false), (true, true)]
                {
                    if value.len() > MAX_FRAME as usize && !in_value {
                        continue;
                    }
                    let name = (in_name, &b":authority"[..]);
                    blocks.push(block(&[&literal(form, 1, in_value, value)]));
                    blocks.push(block(&[&named(form, name, (in_value, value))]));
                    lengths.extend([value.len(); 2]);
                }
            }
        }
        for form in [WITHOUT_INDEXING, NEVER_INDEXED] {
            blocks.push(block(&[&literal(form, 1, false, b"")]));
            lengths.push(0);
        }
        let seen = answered(blocks).await;
        let saw: Vec<_> = seen.iter().map(|(authority, _)| authority.len()).collect();
        assert_eq!(saw, lengths);
    }

    #[tokio::test]
    async fn a_good_authority_a_refused_one_and_both_again_by_index() {
        let seen = answered(vec![
            block(&[&literal(WITH_INDEXING, 1, true, b"good")]),
            block(&[&literal(WITH_INDEXING, 1, true, ISTIO.as_bytes())]),
            block(&[&[0xbe]]),
            block(&[&[0xbf]]),
            block(&[&[0xbe]]),
        ])
        .await;
        let saw: Vec<_> = seen
            .iter()
            .map(|(authority, _)| authority.as_str())
            .collect();
        assert_eq!(saw, ["good", MENDED, MENDED, "good", MENDED]);
    }

    /// A client's encoder with a dynamic table: newest first.
    #[derive(Default)]
    struct Encoder(VecDeque<(&'static str, Vec<u8>)>);

    impl Encoder {
        fn field(&mut self, name: &'static str, value: &[u8], huffman: bool) -> Vec<u8> {
            if let Some(at) = self
                .0
                .iter()
                .position(|entry| *entry == (name, value.to_vec()))
            {
                return integer(0x80, 7, 62 + at);
            }
            self.0.push_front((name, value.to_vec()));
            let size = |entries: &VecDeque<(&str, Vec<u8>)>| -> usize {
                entries
                    .iter()
                    .map(|(name, value)| name.len() + value.len() + 32)
                    .sum()
            };
            while size(&self.0) > 4096 {
                self.0.pop_back();
            }
            match name {
                ":authority" => literal(WITH_INDEXING, 1, huffman, value),
                name => named(WITH_INDEXING, (huffman, name.as_bytes()), (huffman, value)),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// With entries that come, are used by index and are evicted, h2's table must be the client's.
        #[test]
        fn both_tables_stay_in_step(
            requests in vec((0..9_u8, 0..12_u8, any::<bool>()), 1..120),
        ) {
            let mut encoder = Encoder::default();
            let mut expected = Vec::new();
            let mut blocks = Vec::new();
            for (authority, filler, huffman) in requests {
                let authority = match authority {
                    0 => ISTIO.to_owned(),
                    1 => "good.example".to_owned(),
                    n => format!("{}/{n}", "name|".repeat(30 * n as usize)),
                };
                let filler = "f".repeat(150 * filler as usize);
                blocks.push(block(&[
                    &encoder.field(":authority", authority.as_bytes(), huffman),
                    &encoder.field("x-filler", filler.as_bytes(), huffman),
                ]));
                expected.push((
                    authority.replace(['|', '/'], "_"),
                    vec![("x-filler".to_owned(), filler.into_bytes())],
                ));
            }
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            prop_assert_eq!(runtime.block_on(answered(blocks)), expected);
        }
    }
}
