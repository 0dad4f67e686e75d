//! Sessions, pairs and series of a report, by hand.

use oclaw::health::Step;
use oclaw::report::{Journey, Report};
use oclaw::trajectory::Turn;
use oclaw::trajectory::turn::Micros;

use crate::forge::captured;

fn turn(session: &str, number: u32, at: i64, score: Option<f32>) -> Turn {
    Turn { created_at: Micros(at), score, ..captured(session, number) }
}

fn journey(turns: &[(&str, Turn)]) -> Journey {
    let mut journey = Journey::default();
    turns.iter().for_each(|(shard, turn)| journey.add(shard, turn));
    journey
}

#[test]
fn sessions_stand_in_the_order_in_which_they_began() {
    let journey = journey(&[
        ("x", turn("late", 1, 50, Some(1.0))),
        ("x", turn("early", 2, 20, Some(1.0))),
        ("y", turn("early", 1, 10, Some(-1.0))),
        ("y", turn("late", 2, 60, None)),
        ("y", turn("silent", 1, 70, None)),
    ]);
    let told: Vec<_> = journey
        .sessions()
        .into_iter()
        .map(|session| (session.id, session.mean, session.rewarded, session.first))
        .collect();
    let expected = [
        ("early".to_owned(), Some(0.0), 2, Some(-1.0)),
        ("late".to_owned(), Some(1.0), 1, Some(1.0)),
        ("silent".to_owned(), None, 0, None),
    ];
    assert_eq!(told, expected);
    assert_eq!(journey.shards(), [("x", Some(1.0), 2), ("y", Some(-1.0), 1)]);
}

#[test]
fn the_resolved_reward_beats_the_stated_one_and_the_score() {
    let stated = Turn { reward_explicit: Some(0.5), ..turn("a", 1, 1, Some(-1.0)) };
    let resolved =
        Turn { reward: Some(0.25), ..Turn { session_id: "b".to_owned(), ..stated.clone() } };
    let broken = Turn { score: Some(f32::NAN), ..turn("c", 1, 3, None) };
    let journey = journey(&[("x", stated), ("x", resolved), ("x", broken)]);
    let first: Vec<_> = journey.sessions().into_iter().map(|session| session.first).collect();
    assert_eq!(first, [Some(0.5), Some(0.25), None]);
}

/// Returns the sentence under the chart of first replies.
fn adapted(firsts: &[Option<f32>]) -> String {
    let mut report = Report::default();
    for (place, first) in (0..).zip(firsts) {
        report.journey.add("x", &turn(&format!("s{place}"), 1, place, *first));
    }
    let page = report.html();
    let end = page.split("Sessions to adapt").nth(1).unwrap();
    end.split_once("<p>").unwrap().1.split_once("</p>").unwrap().0.to_owned()
}

#[test]
fn three_right_first_replies_in_a_row() {
    let (right, wrong) = (Some(1.0), Some(-1.0));
    assert_eq!(
        adapted(&[wrong, right, right, wrong, right, right, right]),
        "Adapted after 4 sessions: from session 5 on three in a row began with a right reply."
    );
    assert_eq!(
        adapted(&[right, right, right]),
        "The first three sessions in a row began with a right reply."
    );
    let none = "No three sessions in a row began with a right reply yet.";
    assert_eq!(adapted(&[right, right]), none);
    // What is not known, and a neutral score, are not right.
    assert_eq!(adapted(&[right, right, None, right]), none);
    assert_eq!(adapted(&[right, right, Some(0.0), right]), none);
}

#[test]
fn pairs_are_of_the_first_policy_and_the_last() {
    let said = |session: &str, version: Option<&str>, at: i64, answer: &str| Turn {
        weight_version: version.map(str::to_owned),
        response: serde_json::json!({"role": "assistant", "content": answer}).to_string(),
        ..turn(session, 1, at, Some(1.0))
    };
    let mut alone = said("e", Some("1"), 5, "alone");
    alone.messages = r#"[{"role":"user","content":"Something else"}]"#.to_owned();
    let journey = journey(&[
        ("x", said("b", Some("2"), 2, "middle")),
        ("x", said("a", Some("0"), 1, "first")),
        ("x", said("d", Some("10"), 4, "last")),
        ("x", said("f", Some("10"), 6, "last again")),
        ("x", said("c", None, 3, "of nobody knows whom")),
        ("x", alone),
    ]);
    let pairs = journey.pairs();
    assert_eq!(pairs.len(), 1);
    assert_eq!(pairs[0].prompt, "What is 2 + 2?");
    assert_eq!((pairs[0].before.version, pairs[0].before.answer.as_str()), (0, "first"));
    assert_eq!((pairs[0].after.version, pairs[0].after.answer.as_str()), (10, "last"));
}

#[test]
fn series_have_as_many_cells_as_names() {
    let mut report = Report::default();
    let first = turn("a", 1, 1, Some(1.0));
    let second = Turn { weight_version: Some("3".to_owned()), ..turn("b", 1, 2, None) };
    for turn in [&first, &second] {
        report.journey.add("x", turn);
        report.survey.add(turn);
    }
    report.steps.push(Step { step: 4, loss: Some(0.5), ..Step::default() });
    report.stages.push(Default::default());
    for series in report.series() {
        assert!(!series.rows.is_empty(), "{}", series.name);
        for row in &series.rows {
            assert_eq!(row.len(), series.header.len(), "{}: {row:?}", series.name);
        }
    }
    let sessions = report.series().into_iter().find(|series| series.name == "sessions").unwrap();
    assert_eq!(sessions.rows[0], ["1", "a", "1", "1", "1"]);
    assert_eq!(sessions.rows[1], ["2", "b", "", "0", ""]);
}

#[test]
fn a_gap_in_a_curve_stays_a_gap() {
    let mut report = Report::default();
    for (step, loss) in [(1, Some(1.0)), (2, Some(2.0)), (3, None), (4, Some(1.0)), (5, Some(0.5))]
    {
        report.steps.push(Step { step, loss, ..Step::default() });
    }
    let page = report.html();
    assert_eq!(page.matches("<polyline").count(), 2, "two pieces of one curve");
    assert_eq!(page.matches("<circle").count(), 4);
    assert!(!page.contains("NaN") && !page.contains(">inf"), "{page}");
}
