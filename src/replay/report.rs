//! What a replay came to, for machines: lines of JSON, and JUnit XML.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Check, Finding, Replayed};

/// The count of a replay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Sessions with at least one turn.
    pub sessions: usize,
    /// Turns.
    pub turns: usize,
    /// Turns that are as good as recorded.
    pub same: usize,
    /// Turns that are not.
    pub differing: usize,
    /// Turns whose request failed.
    pub failed: usize,
    /// Turns that could not be compared, by reason.
    pub not_compared: BTreeMap<String, usize>,
}

impl Tally {
    /// Counts turns.
    pub fn of(sessions: &[Vec<Replayed>]) -> Self {
        let mut tally = Self { sessions: sessions.len(), ..Self::default() };
        for replayed in sessions.iter().flatten() {
            tally.turns += 1;
            match &replayed.finding {
                Finding::Same => tally.same += 1,
                Finding::Differs(_) => tally.differing += 1,
                Finding::Failed(_) => tally.failed += 1,
                Finding::NotCompared(reason) => {
                    let reason = general(reason);
                    *tally.not_compared.entry(reason).or_default() += 1;
                }
            }
        }
        tally
    }

    /// Returns how many turns were compared, or would have been.
    pub fn compared(&self) -> usize {
        self.same + self.differing + self.failed
    }

    /// Returns the count as JSON.
    pub fn json(&self) -> Value {
        json!({
            "sessions": self.sessions,
            "turns": self.turns,
            "same": self.same,
            "differing": self.differing,
            "failed": self.failed,
            "not_compared": self.not_compared,
        })
    }
}

/// Takes out of a reason what differs from turn to turn, so that it can be counted.
fn general(reason: &str) -> String {
    let mut text = String::new();
    for (number, part) in reason.split('`').enumerate() {
        text.push_str(if number % 2 == 0 { part } else { "…" });
    }
    text
}

/// Returns the line of one turn.
pub fn line(replayed: &Replayed) -> Value {
    let check = |check: &Check| {
        let mut told = Map::new();
        told.insert("verdict".to_owned(), json!(word(&check.finding)));
        if !check.finding.what().is_empty() {
            told.insert("what".to_owned(), json!(check.finding.what()));
        }
        for (name, figure) in &check.figures {
            told.insert((*name).to_owned(), json!(figure));
        }
        (check.by.to_string(), Value::Object(told))
    };
    json!({
        "session_id": replayed.session_id,
        "turn": replayed.turn,
        "turn_id": replayed.turn_id,
        "verdict": word(&replayed.finding),
        "what": replayed.finding.what(),
        "checks": replayed.checks.iter().map(check).collect::<Map<_, _>>(),
        "seconds": rounded(replayed.took),
    })
}

fn word(finding: &Finding) -> String {
    finding.word().replace(' ', "_")
}

fn rounded(took: Duration) -> f64 {
    (took.as_secs_f64() * 1e3).round() / 1e3
}

/// Writes JUnit XML: a suite per session, a case per turn.
pub fn junit(sessions: &[Vec<Replayed>]) -> String {
    let tally = Tally::of(sessions);
    let mut text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_owned();
    let counts = attributes(&tally, sessions.iter().flatten());
    // Writing to a `String` does not fail.
    let _ = writeln!(text, "<testsuites name=\"oclaw replay\" {counts}>");
    for turns in sessions {
        let name = turns.first().map_or("", |turn| turn.session_id.as_str());
        let counts = attributes(&Tally::of(std::slice::from_ref(turns)), turns.iter());
        let _ = writeln!(text, "  <testsuite name=\"{}\" {counts}>", escaped(name));
        for turn in turns {
            case(&mut text, turn);
        }
        text.push_str("  </testsuite>\n");
    }
    text.push_str("</testsuites>\n");
    text
}

fn attributes<'a>(tally: &Tally, turns: impl Iterator<Item = &'a Replayed>) -> String {
    let took: Duration = turns.map(|turn| turn.took).sum();
    format!(
        "tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.3}\"",
        tally.turns,
        tally.differing,
        tally.failed,
        tally.not_compared.values().sum::<usize>(),
        took.as_secs_f64(),
    )
}

fn case(text: &mut String, replayed: &Replayed) {
    let (class, id) = (escaped(&replayed.session_id), escaped(&replayed.turn_id));
    let head = format!(
        "    <testcase classname=\"{class}\" name=\"turn {} ({id})\" time=\"{:.3}\"",
        replayed.turn,
        replayed.took.as_secs_f64()
    );
    let what = escaped(replayed.finding.what());
    let inside = match &replayed.finding {
        Finding::Same => None,
        Finding::Differs(_) => Some(format!("<failure type=\"differs\" message=\"{what}\"/>")),
        Finding::Failed(_) => Some(format!("<error type=\"failed\" message=\"{what}\"/>")),
        Finding::NotCompared(_) => Some(format!("<skipped message=\"{what}\"/>")),
    };
    let _ = match inside {
        None => writeln!(text, "{head}/>"),
        Some(inside) => writeln!(text, "{head}>{inside}</testcase>"),
    };
}

/// Returns a text as an attribute of XML 1.0 may hold it. What it may not hold in
/// any way, even escaped, becomes the sign for an unknown character.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\t' | '\n' | '\r' => {
                let _ = write!(safe, "&#{};", u32::from(character));
            }
            '\u{0}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => safe.push('\u{fffd}'),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::By;

    fn turn(session: &str, number: u32, finding: Finding) -> Replayed {
        Replayed {
            session_id: session.to_owned(),
            turn: number,
            turn_id: format!("t{number}"),
            checks: vec![Check { by: By::Exact, finding: finding.clone(), figures: Vec::new() }],
            finding,
            answer: None,
            took: Duration::from_millis(1500),
        }
    }

    #[test]
    fn junit_holds_any_text() {
        let sessions = [vec![
            turn("<a & \"b\">", 1, Finding::Same),
            turn("<a & \"b\">", 2, Finding::Differs("x\n\u{1}<y>".to_owned())),
            turn("<a & \"b\">", 3, Finding::NotCompared("why".to_owned())),
            turn("<a & \"b\">", 4, Finding::Failed("503".to_owned())),
        ]];
        let expected = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>
<testsuites name=\"oclaw replay\" tests=\"4\" failures=\"1\" errors=\"1\" skipped=\"1\" time=\"6.000\">
  <testsuite name=\"&lt;a &amp; &quot;b&quot;&gt;\" tests=\"4\" failures=\"1\" errors=\"1\" skipped=\"1\" time=\"6.000\">
    <testcase classname=\"&lt;a &amp; &quot;b&quot;&gt;\" name=\"turn 1 (t1)\" time=\"1.500\"/>
    <testcase classname=\"&lt;a &amp; &quot;b&quot;&gt;\" name=\"turn 2 (t2)\" time=\"1.500\"><failure type=\"differs\" message=\"x&#10;\u{fffd}&lt;y&gt;\"/></testcase>
    <testcase classname=\"&lt;a &amp; &quot;b&quot;&gt;\" name=\"turn 3 (t3)\" time=\"1.500\"><skipped message=\"why\"/></testcase>
    <testcase classname=\"&lt;a &amp; &quot;b&quot;&gt;\" name=\"turn 4 (t4)\" time=\"1.500\"><error type=\"failed\" message=\"503\"/></testcase>
  </testsuite>
</testsuites>
";
        assert_eq!(junit(&sessions), expected);
    }

    #[test]
    fn reasons_are_counted_without_their_ids() {
        let sessions = [vec![
            turn("s", 1, Finding::NotCompared("turn `a` before it: x".to_owned())),
            turn("s", 2, Finding::NotCompared("turn `b` before it: x".to_owned())),
        ]];
        let tally = Tally::of(&sessions);
        assert_eq!(tally.not_compared, BTreeMap::from([("turn … before it: x".to_owned(), 2)]));
        assert_eq!((tally.turns, tally.compared()), (2, 0));
    }
}
