//! `oclaw judge --calibrate`.

use std::path::{Path, PathBuf};

use oclaw::table::Format;
use oclaw::trajectory::words::NextStateKind;
use oclaw::trajectory::{Turn, Writer};
use serde_json::{Value, json};

use super::judge::says;
use crate::forge::{captured, write};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::oclaw;

/// Votes, and the score that they make, of one turn after another; the last two
/// after tools.
const JUDGED: [(&[i8], f32); 8] = [
    (&[1, 1, 1], 1.0),
    (&[1, 1, -1], 1.0),
    (&[1, 1, 1], 1.0),
    (&[-1, -1, -1], -1.0),
    (&[-1, -1, -1], -1.0),
    (&[0, 0, 0], 0.0),
    (&[1, 1, 1], 1.0),
    (&[-1, -1, -1], -1.0),
];

fn judged(folder: &Path) -> (PathBuf, Vec<Turn>) {
    let turn = |(number, (votes, score)): (u32, (&[i8], f32))| {
        let (kind, role) = match number {
            7.. => (NextStateKind::Tool, "tool"),
            _ => (NextStateKind::User, "user"),
        };
        Turn {
            next_state: Some(json!([{"role": role, "content": "well"}]).to_string()),
            next_state_kind: kind,
            score: Some(score),
            votes: Some(votes.iter().copied().map(Some).collect()),
            ..captured("s", number)
        }
    };
    let mut turns: Vec<_> = (1..).zip(JUDGED).map(turn).collect();
    turns.push(Turn { next_state_kind: NextStateKind::None, next_state: None, ..captured("s", 9) });
    let path = folder.join("judged.parquet");
    (write(&path, Format::Parquet, &[Writer::Serve, Writer::Judge], &turns), turns)
}

struct Ran {
    data: String,
    talk: String,
}

fn run(labels: &str, flags: &[&str], code: i32) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let (input, turns) = judged(folder.path());
    let file = folder.path().join("labels.csv");
    let mut text = labels.to_owned();
    for (index, turn) in turns.iter().enumerate() {
        text = text.replace(&format!("ID{}", index + 1), &turn.turn_id);
    }
    std::fs::write(&file, text).unwrap();
    let run = oclaw().args(["judge", "--calibrate"]).args([&file, &input]).args(flags).assert();
    let run = run.code(code);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ran { data: text(&run.get_output().stdout), talk: text(&run.get_output().stderr) }
}

/// Seven turns of eight are labelled, each by what is at hand.
const LABELS: &str = "note,turn_id,session_id,turn,label
fine,ID1,,,1
,,s,2,+1
,ID3,,,-1
,ID4,,,-1
,,s,5,0
,,s,6,0
,,s,7,-1
nobody has looked at this one,ID8,,,
";

#[test]
fn the_numbers_are_those_made_by_hand() {
    let told: Value = serde_json::from_str(&run(LABELS, &["--format", "json"], 0).data).unwrap();
    assert_eq!(told["labels"], 7);
    assert_eq!(
        (&told["labels_without_turn"], &told["scores_without_label"]),
        (&json!(0), &json!(1))
    );
    let all = &told["roles"]["all"];
    // Persons: -1 three times, 0 twice, 1 twice; the judge: -1 twice, 0 once, 1
    // four times; alike: 1, 2, 4 and 6. By chance (3*2 + 2*1 + 2*4) / 49.
    let expected = json!({
        "-1": {"-1": 1, "0": 0, "1": 2},
        "0": {"-1": 1, "0": 1, "1": 0},
        "1": {"-1": 0, "0": 0, "1": 2},
    });
    assert_eq!((&all["confusion"], &all["compared"]), (&expected, &json!(7)));
    let near = |value: &Value, expected: f64| {
        assert!((value.as_f64().unwrap() - expected).abs() < 1e-12, "{value} is not {expected}");
    };
    near(&all["accuracy"], 4.0 / 7.0);
    near(&all["kappa"], (4.0 * 7.0 - 16.0) / (49.0 - 16.0));
    // One turn of seven has 2 votes against 1.
    near(&all["vote_entropy"], (3f64.ln() - 2.0 / 3.0 * 2f64.ln()) / 7.0);
    let tool = &told["roles"]["tool"];
    assert_eq!((&tool["compared"], &tool["accuracy"]), (&json!(1), &json!(0.0)));
    near(&tool["kappa"], 0.0);
    assert_eq!(told["roles"]["user"]["compared"], 6);

    let lines = run(LABELS, &["--format", "csv"], 0).data;
    let lines: Vec<_> = lines.lines().collect();
    assert!(
        lines[0].starts_with(
            "role,compared,without_score,accuracy,kappa,vote_entropy,person -1 judge -1"
        )
    );
    assert!(lines[1].starts_with("all,7,0,0.571428571428571"), "{}", lines[1]);
    assert!(lines[1].ends_with(",1,0,2,1,1,0,0,0,2"), "{}", lines[1]);
    assert_eq!(lines.len(), 4);

    let shown = run(LABELS, &[], 0).data;
    let shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    for row in [
        "labels 7, 0 of them without a turn; turns with a score and no label 1",
        "all user tool turns compared 7 6 1",
        "accuracy 0.571 0.667 0.000",
        "Cohen's kappa 0.364",
        "person -1, judge -1 / 0 / +1 1 / 0 / 2 1 / 0 / 1 0 / 0 / 1",
    ] {
        assert!(shown.contains(row), "{row}: {shown}");
    }
}

#[test]
fn what_cannot_be_compared_is_counted_or_refused() {
    // A label of no turn, and one of a turn that nobody judged.
    let labels = "turn_id,label\nID1,1\nnowhere,1\nID9,0\n";
    let told = run(labels, &["--format", "json"], 3).data;
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["labels"], &told["labels_without_turn"]), (&json!(3), &json!(1)));
    let all = &told["roles"]["all"];
    assert_eq!((&all["compared"], &all["without_score"]), (&json!(1), &json!(1)));
    assert_eq!((&all["accuracy"], &all["kappa"]), (&json!(1.0), &Value::Null));
    for (labels, flags, code, expected) in [
        ("turn_id,label\nID1,2\n", &[][..], 1, "labels.csv` line 2: label `2` is not -1, 0 or 1"),
        ("turn_id,label\n\n\nID1,2\n", &[], 1, "labels.csv` line 4: label `2` is not -1, 0 or 1"),
        ("turn_id,label\r\n\r\nID1,2\r\n", &[], 1, "labels.csv` line 3: label `2`"),
        ("turn_id,label\nID1,1\nID1,0\n", &[], 1, "line 3: 0 for a turn that has 1 on line 2"),
        (
            "turn_id,label\r\nID1,1\r\nID1,0\r\n",
            &[],
            1,
            "line 3: 0 for a turn that has 1 on line 2",
        ),
        ("turn_id,label\n,1\n", &[], 1, "line 2: it does not say which turn"),
        ("session_id,turn,label\ns,one,1\n", &[], 1, "line 2: turn `one` is not a number"),
        ("session_id,label\ns,1\n", &[], 1, "line 1: no column `label`, or neither"),
        ("turn_id,label\nID1,\n", &[], 1, "there is no label in"),
        ("turn_id,label\nnowhere,1\n", &[], 1, "hint: do its labels name turns of this table?"),
        ("turn_id,label\nID9,1\n", &[], 1, "hint: judge the table first"),
        ("turn_id,label\nID1,1\n", &["-o", "x"], 2, "cannot be used with"),
        ("turn_id,label\nID1,1\n", &["--fill"], 2, "cannot be used with"),
    ] {
        let talk = run(labels, flags, code).talk;
        assert!(talk.contains(expected), "{expected}: {talk}");
    }
    // The same label twice is one label.
    run("turn_id,session_id,turn,label\nID1,,,1\nID1,,,1\n", &[], 0);
    let folder = tempfile::tempdir().unwrap();
    let (input, _) = judged(folder.path());
    let run =
        oclaw().args(["judge", "--rules", "--replace", "--format", "csv"]).arg(&input).assert();
    let talk = String::from_utf8_lossy(&run.code(2).get_output().stderr).into_owned();
    assert!(talk.contains("a table of turns is Parquet or Arrow IPC"), "{talk}");
}

/// Somebody who judges is asked about the labelled turns only, and the table's
/// own scores play no part.
#[test]
fn labelled_turns_are_judged_now() {
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    fake.on("/v1/chat/completions", [Reply::json(200, says("\\boxed{-1}", "stop").1)]);
    let url = fake.url();
    let labels = "turn_id,label\nID1,1\nID4,-1\n";
    let ran = run(labels, &["--engine", &url, "--votes", "1", "--format", "json"], 0);
    let told: Value = serde_json::from_str(&ran.data).unwrap();
    assert_eq!(told["roles"]["all"]["confusion"]["1"]["-1"], 1);
    assert_eq!(told["roles"]["all"]["accuracy"], 0.5);
    let calls = fake.paths().iter().filter(|path| *path == "/v1/chat/completions").count();
    assert_eq!(calls, 2);
    assert!(ran.talk.split_whitespace().collect::<Vec<_>>().join(" ").contains("calls 2"));
    // Rules: none matches `well`, which is 0; of tools it says that they worked.
    let told = run("turn_id,label\nID1,0\nID8,1\n", &["--rules", "--format", "json"], 0).data;
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["roles"]["all"]["accuracy"], 1.0);
}
