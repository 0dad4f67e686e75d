//! Server-sent events, decoded by bytes.
//!
//! A network chunk may end anywhere, inside a character too, so only whole
//! lines are decoded. Every block keeps its bytes exactly as they came: whoever
//! relays a stream can pass, edit or drop one block without touching the rest.

use std::ops::Range;

/// A block larger than this is let through undecoded.
pub const DEFAULT_LIMIT: usize = 64 << 20;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// One block of a stream: an event, or a comment between events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Value of the `event` field.
    pub name: Option<String>,
    /// The `data` lines joined by newlines. `None` if the block has none
    /// (comments, keep-alives): by the rules of SSE no event happened.
    pub data: Option<Vec<u8>>,
    /// Where the block stood in the stream.
    pub range: Range<u64>,
    /// The block's bytes as they came, with the blank line that ended it.
    pub raw: Vec<u8>,
    /// Whether the block outgrew the limit and was not decoded.
    pub oversized: bool,
    pieces: Vec<Piece>,
}

/// A run of `data` bytes: where it begins in `data` and in `raw`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    data: usize,
    raw: usize,
}

impl Event {
    /// Returns the block's bytes without the given ranges of its `data`. A
    /// range that spans a line break takes the break with it.
    pub fn without(&self, spans: &[Range<usize>]) -> Vec<u8> {
        let edits: Vec<_> = spans.iter().map(|span| (span.clone(), String::new())).collect();
        self.edited(&edits)
    }

    /// Returns the block's bytes with ranges of its `data` replaced. The edits are
    /// in order and do not overlap.
    pub fn edited(&self, edits: &[(Range<usize>, String)]) -> Vec<u8> {
        let mut kept = Vec::with_capacity(self.raw.len());
        let mut from = 0;
        for (span, text) in edits.iter().filter(|(span, _)| !span.is_empty()) {
            let start = self.place(span.start);
            kept.extend_from_slice(&self.raw[from..start.max(from)]);
            kept.extend_from_slice(text.as_bytes());
            from = self.place(span.end - 1) + 1;
        }
        kept.extend_from_slice(&self.raw[from..]);
        kept
    }

    /// Finds the byte of `raw` that holds a byte of `data`.
    fn place(&self, offset: usize) -> usize {
        let after = self.pieces.partition_point(|piece| piece.data <= offset);
        match after.checked_sub(1).and_then(|before| self.pieces.get(before)) {
            Some(piece) => (piece.raw + (offset - piece.data)).min(self.raw.len()),
            None => 0,
        }
    }
}

/// Splits a byte stream into blocks, whatever its chunks and line ends.
#[derive(Debug)]
pub struct Decoder {
    limit: usize,
    /// Stream offset of `block`'s first byte.
    offset: u64,
    block: Vec<u8>,
    /// Where the current line begins in `block`.
    line: usize,
    /// The current line has bytes that already left with an oversized block.
    carried: bool,
    /// The last byte was a carriage return, so a line feed belongs to it.
    after_return: bool,
    /// The stream's line ends are pairs, as far as has been seen.
    paired: bool,
    /// A carriage return that waits for its line feed.
    held: bool,
    oversized: bool,
    /// The current block has a field, so a comment does not end it.
    started: bool,
    name: Option<String>,
    data: Option<Vec<u8>>,
    pieces: Vec<Piece>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::with_limit(DEFAULT_LIMIT)
    }
}

impl Decoder {
    /// Makes a decoder that holds at most about `limit` bytes.
    pub fn with_limit(limit: usize) -> Self {
        Self {
            limit,
            offset: 0,
            block: Vec::new(),
            line: 0,
            carried: false,
            after_return: false,
            paired: false,
            held: false,
            oversized: false,
            started: false,
            name: None,
            data: None,
            pieces: Vec::new(),
        }
    }

    /// Holds no more than about `limit` bytes from now on.
    pub fn lower_limit(&mut self, limit: usize) {
        self.limit = self.limit.min(limit);
    }

    /// Takes the next bytes and returns the blocks they complete.
    pub fn push(&mut self, bytes: &[u8]) -> impl Iterator<Item = Event> + use<> {
        let mut events = Vec::new();
        let joined;
        let mut rest = bytes;
        if self.held && !bytes.is_empty() {
            self.held = false;
            joined = [b"\r", bytes].concat();
            rest = &joined;
        }
        while let Some(&first) = rest.first() {
            if std::mem::take(&mut self.after_return) && first == b'\n' {
                self.paired = true;
                self.block.push(first);
                rest = &rest[1..];
                // Its block has left already; it must not leave with another.
                match self.block.len() {
                    1 => events.push(self.take()),
                    length => self.line = length,
                }
                continue;
            }
            let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.block.extend_from_slice(rest);
                break;
            };
            let returned = rest[end] == b'\r';
            let both = returned && rest.get(end + 1) == Some(&b'\n');
            self.paired |= both;
            // Whether a line feed follows is not known yet at a chunk's end.
            // Where none has been seen, waiting would delay a finished event.
            if returned && self.paired && end + 1 == rest.len() {
                self.block.extend_from_slice(&rest[..end]);
                self.held = true;
                break;
            }
            self.after_return = returned && !both;
            let line_end = self.block.len() + end;
            let taken = end + 1 + usize::from(both);
            self.block.extend_from_slice(&rest[..taken]);
            rest = &rest[taken..];
            events.extend(self.end_line(line_end));
        }
        let flush = self.oversized && !self.block.is_empty();
        if flush || self.block.len() > self.limit {
            self.oversized = true;
            self.carried |= self.line < self.block.len();
            events.push(self.take());
        }
        events.into_iter()
    }

    /// Ends the stream and returns what came after the last blank line. Servers
    /// do forget the blank line; the event counts all the same.
    pub fn finish(mut self) -> Option<Event> {
        if self.held {
            let end = self.block.len();
            self.block.push(b'\r');
            if let Some(event) = self.end_line(end) {
                return Some(event);
            }
        } else if self.line < self.block.len() {
            let end = self.block.len();
            self.field(end);
        }
        (!self.block.is_empty()).then(|| self.take())
    }

    fn end_line(&mut self, end: usize) -> Option<Event> {
        let blank = self.line_start() == end && !self.carried;
        let comment = self.block.get(self.line_start()) == Some(&b':');
        self.carried = false;
        if blank {
            let event = self.take();
            self.oversized = false;
            return Some(event);
        }
        // A keep-alive must not wait for the next event.
        if comment && !self.started && !self.oversized {
            return Some(self.take());
        }
        if !self.oversized {
            self.field(end);
        }
        self.line = self.block.len();
        None
    }

    /// Returns where the line's text begins: a byte-order mark may open the
    /// stream.
    fn line_start(&self) -> usize {
        let marked = self.offset == 0 && self.line == 0 && self.block.starts_with(BYTE_ORDER_MARK);
        if marked { BYTE_ORDER_MARK.len() } else { self.line }
    }

    fn field(&mut self, end: usize) {
        let start = self.line_start();
        let line = &self.block[start..end];
        if line.first() == Some(&b':') {
            return;
        }
        self.started = true;
        let colon = line.iter().position(|byte| *byte == b':');
        let name = &line[..colon.unwrap_or(line.len())];
        let mut value = colon.map_or(line.len(), |colon| colon + 1);
        if line.get(value) == Some(&b' ') {
            value += 1;
        }
        match name {
            b"event" => self.name = Some(String::from_utf8_lossy(&line[value..]).into_owned()),
            b"data" => {
                let data = match &mut self.data {
                    Some(data) => {
                        data.push(b'\n');
                        data
                    }
                    None => self.data.insert(Vec::new()),
                };
                self.pieces.push(Piece { data: data.len(), raw: start + value });
                data.extend_from_slice(&line[value..]);
            }
            _ => {}
        }
    }

    fn take(&mut self) -> Event {
        let raw = std::mem::take(&mut self.block);
        let start = self.offset;
        self.offset += raw.len() as u64;
        self.line = 0;
        self.started = false;
        let data = self.data.take();
        Event {
            name: self.name.take(),
            data: if self.oversized { None } else { data },
            range: start..self.offset,
            raw,
            oversized: self.oversized,
            pieces: std::mem::take(&mut self.pieces),
        }
    }
}
