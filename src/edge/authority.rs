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
