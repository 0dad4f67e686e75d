//! Where members stand inside JSON bytes, so that a document can be edited
//! without writing it anew: number formats, key order, spaces and unknown
//! members stay as their author wrote them.

use std::ops::Range;

/// A member of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The key, with its quotes.
    pub key: Range<usize>,
    /// The value.
    pub value: Range<usize>,
}

impl Member {
    /// Returns whether the key is `name`, written without escapes.
    pub fn is(&self, bytes: &[u8], name: &str) -> bool {
        bytes.get(self.key.start + 1..self.key.end - 1) == Some(name.as_bytes())
    }
}

/// Lists the members of the object that begins at `at` (after spaces). `None`
/// if there is no whole object.
pub fn members(bytes: &[u8], at: usize) -> Option<Vec<Member>> {
    let mut at = expect(bytes, at, b'{')?;
    let mut found = Vec::new();
    if bytes.get(spaces(bytes, at)) == Some(&b'}') {
        return Some(found);
    }
    loop {
        let key = spaces(bytes, at);
        let key = key..string(bytes, key)?;
        let value = spaces(bytes, expect(bytes, key.end, b':')?);
        let value = value..skip(bytes, value)?;
        at = spaces(bytes, value.end);
        found.push(Member { key, value });
        match bytes.get(at)? {
            b',' => at += 1,
            b'}' => return Some(found),
            _ => return None,
        }
    }
}

/// Lists the items of the array that begins at `at` (after spaces).
pub fn items(bytes: &[u8], at: usize) -> Option<Vec<Range<usize>>> {
    let mut at = expect(bytes, at, b'[')?;
    let mut found = Vec::new();
    if bytes.get(spaces(bytes, at)) == Some(&b']') {
        return Some(found);
    }
    loop {
        let start = spaces(bytes, at);
        let end = skip(bytes, start)?;
        found.push(start..end);
        at = spaces(bytes, end);
        match bytes.get(at)? {
            b',' => at += 1,
            b']' => return Some(found),
            _ => return None,
        }
    }
}

/// Returns the value of a member of the object at `at`. The last one counts if
/// the key stands twice, as in every common parser.
pub fn value(bytes: &[u8], at: usize, name: &str) -> Option<Range<usize>> {
    let members = members(bytes, at)?;
    members.into_iter().rev().find(|member| member.is(bytes, name)).map(|member| member.value)
}

/// Returns the ranges to cut so that the doomed members of one object are gone
/// and the object stays well-formed.
pub fn cuts(members: &[Member], doomed: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut cuts = Vec::new();
    let mut kept = false;
    for (number, member) in members.iter().enumerate() {
        if !doomed(number) {
            kept = true;
            continue;
        }
        // A doomed member takes the comma before it; the leading ones have
        // none and take the comma after them.
        cuts.push(match (kept, number.checked_sub(1).and_then(|n| members.get(n))) {
            (true, Some(previous)) => previous.value.end..member.value.end,
            _ => {
                let next = members.get(number + 1).map(|next| next.key.start);
                member.key.start..next.unwrap_or(member.value.end)
            }
        });
    }
    cuts
}

/// Replaces ranges of a document. The edits are in order and do not overlap.
pub fn edit(bytes: &[u8], edits: &[(Range<usize>, String)]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + 128);
    let mut from = 0;
    for (range, text) in edits {
        out.extend_from_slice(&bytes[from..range.start.max(from)]);
        out.extend_from_slice(text.as_bytes());
        from = range.end.max(from);
    }
    out.extend_from_slice(&bytes[from..]);
    out
}

fn spaces(bytes: &[u8], mut at: usize) -> usize {
    while matches!(bytes.get(at), Some(b' ' | b'\t' | b'\r' | b'\n')) {
        at += 1;
    }
    at
}

fn expect(bytes: &[u8], at: usize, wanted: u8) -> Option<usize> {
    let at = spaces(bytes, at);
    (bytes.get(at) == Some(&wanted)).then_some(at + 1)
}

/// Returns the end of the string that begins at `at`.
fn string(bytes: &[u8], at: usize) -> Option<usize> {
    let mut at = expect(bytes, at, b'"')?;
    loop {
        match bytes.get(at)? {
            b'\\' => at += 2,
            b'"' => return Some(at + 1),
            _ => at += 1,
        }
    }
}

/// Returns the end of the value that begins at `at`, without recursion: depth
/// is the sender's choice.
fn skip(bytes: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    loop {
        match bytes.get(at)? {
            b'"' => at = string(bytes, at)?,
            b'{' | b'[' => {
                depth += 1;
                at += 1;
                continue;
            }
            b'}' | b']' => {
                depth = depth.checked_sub(1)?;
                at += 1;
            }
            b',' | b':' | b' ' | b'\t' | b'\r' | b'\n' if depth > 0 => {
                at += 1;
                continue;
            }
            _ => {
                let start = at;
                while !matches!(
                    bytes.get(at),
                    None | Some(b',' | b':' | b']' | b'}' | b' ' | b'\t' | b'\r' | b'\n')
                ) {
                    at += 1;
                }
                (at > start).then_some(())?;
            }
        }
        if depth == 0 {
            return Some(at);
        }
    }
}
