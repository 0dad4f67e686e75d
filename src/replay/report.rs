//! What a replay came to, for machines: lines of JSON, and JUnit XML.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::junit::{Case, Suite};
use super::{By, Check, Finding, Replayed, junit};

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
    /// What each way of comparing came to.
    pub ways: BTreeMap<By, Way>,
}

/// What one way of comparing came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Way {
    /// Turns that it compared, or would have.
    pub compared: usize,
    /// Turns that it could not compare, by reason.
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
            for check in &replayed.checks {
                let way = tally.ways.entry(check.by).or_default();
                match &check.finding {
                    Finding::NotCompared(why) => {
                        *way.not_compared.entry(general(why)).or_default() += 1;
                    }
                    Finding::Same | Finding::Differs(_) | Finding::Failed(_) => way.compared += 1,
                }
            }
        }
        tally
    }

    /// Returns the ways that compared nothing at all.
    pub fn idle(&self) -> impl Iterator<Item = By> {
        self.ways.iter().filter(|(_, way)| way.compared == 0).map(|(by, _)| *by)
    }

    /// Returns how many turns were compared, or would have been.
    pub fn compared(&self) -> usize {
        self.same + self.differing + self.failed
    }

    /// Returns the count as JSON.
    pub fn json(&self) -> Value {
        let way = |(by, way): (&By, &Way)| {
            let told = json!({"compared": way.compared, "not_compared": way.not_compared});
            (by.to_string(), told)
        };
        json!({
            "sessions": self.sessions,
            "turns": self.turns,
            "same": self.same,
            "differing": self.differing,
            "failed": self.failed,
            "not_compared": self.not_compared,
            "ways": self.ways.iter().map(way).collect::<Map<_, _>>(),
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

/// Writes JUnit XML: a suite per session, a case per turn. A way that compared
/// nothing fails in a suite of its own.
pub fn junit(sessions: &[Vec<Replayed>]) -> String {
    let case = |replayed: &Replayed| Case {
        name: format!("turn {} ({})", replayed.turn, replayed.turn_id),
        finding: replayed.finding.clone(),
        took: replayed.took,
        notes: match &replayed.finding {
            // All of it is in the finding.
            Finding::NotCompared(_) => Vec::new(),
            _ => skipped(&replayed.checks).map(|(by, why)| format!("{by}: {why}")).collect(),
        },
    };
    let suite = |turns: &Vec<Replayed>| Suite {
        name: turns.first().map_or_else(String::new, |turn| turn.session_id.clone()),
        cases: turns.iter().map(case).collect(),
    };
    let mut suites: Vec<Suite> = sessions.iter().map(suite).collect();
    let tally = Tally::of(sessions);
    let idle = tally.idle().map(|by| Case {
        name: format!("by {by}"),
        finding: Finding::Differs("nothing was compared".to_owned()),
        took: Duration::ZERO,
        notes: Vec::new(),
    });
    let idle: Vec<_> = idle.collect();
    if !idle.is_empty() {
        suites.push(Suite { name: "ways to compare".to_owned(), cases: idle });
    }
    junit::junit("oclaw replay", &suites)
}

/// Returns the comparisons that could not be made, and why.
fn skipped(checks: &[Check]) -> impl Iterator<Item = (By, &str)> {
    checks.iter().filter_map(|check| match &check.finding {
        Finding::NotCompared(why) => Some((check.by, why.as_str())),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_way_that_compares_nothing_is_not_hidden_by_another() {
        let judged = |finding| Check { by: By::Judge, finding, figures: Vec::new() };
        let why = |why: &str| Finding::NotCompared(why.to_owned());
        let mut turns = vec![turn("s", 1, Finding::Same), turn("s", 2, Finding::Same)];
        turns[0].checks.push(judged(why("no next state")));
        turns[1].checks.push(judged(why("no next state")));
        let sessions = [turns];
        let tally = Tally::of(&sessions);
        assert_eq!((tally.same, tally.idle().collect::<Vec<_>>()), (2, vec![By::Judge]));
        let told = json!({
            "exact": {"compared": 2, "not_compared": {}},
            "judge": {"compared": 0, "not_compared": {"no next state": 2}},
        });
        assert_eq!(tally.json()["ways"], told);
        let xml = junit(&sessions);
        assert!(
            xml.contains("<testsuites name=\"oclaw replay\" tests=\"3\" failures=\"1\""),
            "{xml}"
        );
        assert!(xml.contains("<system-out>judge: no next state</system-out>"), "{xml}");
        assert!(xml.contains("name=\"by judge\""), "{xml}");
        let [mut turns] = sessions;
        turns[1].checks[1] = judged(Finding::Same);
        assert_eq!(Tally::of(&[turns]).idle().count(), 0);
    }
}
