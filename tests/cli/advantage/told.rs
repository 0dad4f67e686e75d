//! Rewards of several sources, and feedback that came after its row.

use std::fs;
use std::path::{Path, PathBuf};

use oclaw::table::Format;
use oclaw::trajectory::words::{RewardSource, SampleKind};
use oclaw::trajectory::{Turn, Writer};
use serde_json::{Value, json};

use super::super::judge::read;
use super::{table, words};
use crate::forge::{captured, write};
use crate::harness::oclaw;

const JUDGED: [Writer; 2] = [Writer::Serve, Writer::Judge];

fn judged(session: &str, number: u32, score: Option<f32>) -> Turn {
    let votes = score.map(|score| vec![Some(score as i8); 3]);
    Turn { score, votes, ..captured(session, number) }
}

/// A session that went well in the end, and one that goes on.
fn sessions() -> Vec<Turn> {
    let end = Turn { session_end: true, reward_explicit: Some(1.0), ..judged("s", 3, None) };
    let on = Turn { reward_explicit: Some(-1.0), ..judged("t", 2, Some(1.0)) };
    vec![judged("s", 1, Some(-1.0)), judged("s", 2, None), end, judged("t", 1, Some(1.0)), on]
}

fn noted(words: &[&str], input: &Path) -> Vec<Turn> {
    let output = input.with_file_name("noted.parquet");
    let mut command = oclaw();
    command.args(["advantage", "--estimator=grpo", "--at-least-one=off"]).args(words);
    command.arg("-o").args([&output, &input.to_owned()]).assert().success();
    oclaw().arg("lint").arg(&output).assert().success();
    read(&output)
}

fn rewards(turns: &[Turn]) -> Vec<Option<f32>> {
    turns.iter().map(|turn| turn.reward).collect()
}

fn told(path: &Path, lines: &[Value]) -> PathBuf {
    let lines: Vec<String> = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(path, lines.concat()).unwrap();
    path.to_owned()
}

#[test]
fn a_sessions_outcome_counts_for_each_of_its_turns() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), &JUDGED, &sessions());
    let turns = noted(&["--shape", "explicit=0.5,judged=0.25,outcome=0.25"], &input);
    // -0.25 + 0.25, 0.25, 0.5 + 0.25; no end, no outcome: 0.25, -0.5 + 0.25.
    let wanted = [0.0, 0.25, 0.75, 0.25, -0.25].map(Some);
    assert_eq!(rewards(&turns), wanted);
    let sources: Vec<_> = turns.iter().map(|turn| turn.reward_source.unwrap()).collect();
    assert_eq!(sources[1], RewardSource::Outcome);
    assert!([0, 2, 3, 4].iter().all(|row| sources[*row] == RewardSource::Mixed), "{sources:?}");
    assert_eq!(turns[0].sample_kind, Some(SampleKind::None));
    assert_eq!(turns[1].rl_advantages, Some(vec![0.25; 3]));
    // Without the judge the outcome is all there is, wherever it is kept.
    let words = ["--shape=outcome=1", "--outcome-column=session_confidence"];
    let turns = noted(&words, &input);
    assert_eq!(rewards(&turns), [Some(1.0), Some(1.0), Some(1.0), None, None]);
}

#[test]
fn weights_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), &JUDGED, &sessions());
    for (given, complaint) in [
        (vec!["--shape", "judged=0.8,outcome=0.3"], "the weights add up to 1.1, and may to 1"),
        (vec!["--shape", "judged=0.5,judged=0.5"], "`judged` has two weights"),
        (vec!["--shape", "judged"], "wanted weights above 0 and up to 1"),
        (vec!["--shape", "votes=1"], "wanted `explicit`, `judged`, `outcome`, each `=WEIGHT`"),
        (vec!["--outcome-column", "score"], "the outcome has no weight"),
        (vec!["--shape=outcome=1", "--outcome-column=mood"], "there is no column `mood`"),
        (vec!["--shape=outcome=1", "--outcome-column=branch"], "column `branch` holds no numbers"),
        (vec!["--fill", "--feedback=late"], "`--fill` would leave late feedback out of rows"),
    ] {
        let run = oclaw().arg("advantage").args(given).arg(&input).assert().code(2);
        let talk = words(run.get_output());
        assert!(talk.contains(complaint), "{talk}");
    }
}

fn last_word(line: &str) -> String {
    line.split_whitespace().last().unwrap_or_default().to_owned()
}

#[test]
fn late_feedback_gets_into_its_row() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let input = table(folder.path(), &JUDGED, &sessions());
    fs::create_dir(at("feedback")).unwrap();
    // Later words win, in whichever file; a text leaves the number as it is.
    told(
        &at("feedback/2.jsonl"),
        &[
            json!({"turn_id": "s-turn-1", "reward": 0.5, "at": 10}),
            json!({"turn_id": "t-turn-2", "text": "never mind", "at": 30}),
        ],
    );
    told(
        &at("feedback/1.jsonl"),
        &[
            json!({"turn_id": "s-turn-1", "reward": 1.0, "text": "good", "at": 20}),
            json!({"turn_id": null, "session_id": "s", "turn": 2, "reward": -1.0, "at": 5}),
            json!({"session_id": "t", "reward": 0.25, "at": 1_764_423_297_000_000_i64}),
            json!({"turn_id": "gone", "reward": 1.0, "at": 40}),
        ],
    );
    let torn = fs::read_to_string(at("feedback/1.jsonl")).unwrap() + r#"{"turn_id": "s-tu"#;
    fs::write(at("feedback/1.jsonl"), torn).unwrap();
    let feedback = at("feedback").display().to_string();
    let turns = noted(&["--feedback", &feedback], &input);
    assert_eq!(rewards(&turns), [1.0, -1.0, 1.0, 0.25, -1.0].map(Some));
    let stated: Vec<_> = turns.iter().map(|turn| turn.reward_explicit).collect();
    assert_eq!(stated, [1.0, -1.0, 1.0, 0.25, -1.0].map(Some));
    let texts: Vec<_> = turns.iter().map(|turn| turn.feedback_text.as_deref()).collect();
    assert_eq!(texts, [Some("good"), None, None, None, Some("never mind")]);
    assert!(turns.iter().all(|turn| turn.reward_source == Some(RewardSource::Explicit)));
    // What is about no row is counted, whether it names a turn or a session.
    told(&at("feedback/3.jsonl"), &[json!({"session_id": "nobody", "reward": 1.0, "at": 50})]);
    let mut command = oclaw();
    command.args(["advantage", "--estimator=grpo", "--feedback", &feedback, "-o", "out"]);
    command.arg(&input);
    let output = command.current_dir(folder.path()).assert().success().get_output().clone();
    let said = String::from_utf8(output.stderr).unwrap();
    let counted = |name: &str| said.lines().find(|line| line.contains(name)).map(last_word);
    assert_eq!(counted("with late feedback").as_deref(), Some("4"), "{said}");
    assert_eq!(counted("feedback for no row here").as_deref(), Some("2"), "{said}");
    // Through a pipe it is the same, and the outcome may come late as well.
    let stream = write(&at("in.ipc"), Format::Ipc, &JUDGED, &sessions());
    assert_eq!(noted(&["--feedback", &feedback], &stream), turns);
    let outcome = told(&at("end.jsonl"), &[json!({"turn_id": "s-turn-3", "reward": -1, "at": 1})]);
    let outcome = outcome.display().to_string();
    let turns = noted(&["--feedback", &outcome, "--shape=judged=0.5,outcome=0.5"], &input);
    assert_eq!(rewards(&turns), [-1.0, -0.5, -0.5, 0.5, 0.5].map(Some));
}

#[test]
fn feedback_is_held_against_all_shards() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("turns")).unwrap();
    let shard = |name: &str, turns: &[Turn]| write(&at(name), Format::Parquet, &JUDGED, turns);
    shard("turns/a.parquet", &[judged("s", 1, Some(1.0))]);
    shard("turns/b.parquet", &[judged("t", 1, Some(1.0)), judged("t", 2, None)]);
    let feedback = told(
        &at("late.jsonl"),
        &[
            json!({"turn_id": "s-turn-1", "reward": 0.0, "at": 1}),
            json!({"session_id": "t", "turn": 2, "reward": -1.0, "at": 2}),
            json!({"turn_id": "gone", "reward": 1.0, "at": 3}),
            json!({"session_id": "nobody", "reward": 1.0, "at": 4}),
            json!({"session_id": "t", "turn": 3, "reward": 1.0, "at": 5}),
        ],
    );
    let mut command = oclaw();
    command.args(["advantage", "--estimator=grpo", "--once", "--poll=1ms", "--follow"]);
    command.arg(at("turns")).arg("--feedback").arg(&feedback).arg("-o").arg(at("ready"));
    let output = command.assert().success().get_output().clone();
    let said = String::from_utf8(output.stderr).unwrap();
    let counted = |name: &str| said.lines().find(|line| line.contains(name)).map(last_word);
    assert_eq!(counted("with late feedback").as_deref(), Some("2"), "{said}");
    assert_eq!(counted("feedback for no row here").as_deref(), Some("3"), "{said}");
    // A stated 0 is a word, and takes the place of the judge's 1.
    let neutral = &read(&at("ready/a.parquet"))[0];
    assert_eq!(neutral.reward_explicit, Some(0.0));
    assert_eq!((neutral.reward, neutral.sample_kind), (Some(0.0), Some(SampleKind::None)));
    assert_eq!(rewards(&read(&at("ready/b.parquet"))), [1.0, -1.0].map(Some));
}

#[test]
fn feedback_that_is_none_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), &JUDGED, &sessions());
    let broken = folder.path().join("broken.jsonl");
    fs::write(&broken, "{\"turn_id\": \"s-turn-1\", \"at\": 1}\nnonsense\n").unwrap();
    for (path, complaint) in [(broken, "line 2"), (folder.path().join("none"), "No such file")] {
        let mut command = oclaw();
        command.args(["advantage", "--estimator=grpo", "--feedback"]).args([&path, &input]);
        let run = command.assert().code(1);
        let talk = words(run.get_output());
        assert!(talk.contains(&path.display().to_string()) && talk.contains(complaint), "{talk}");
    }
}

#[test]
fn estimators_are_compared_on_shaped_rewards() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), &JUDGED, &sessions());
    let mut command = oclaw();
    command.args(["advantage", "--compare=grpo,gae", "--format=json", "--gamma=0"]);
    command.args(["--shape=outcome=1"]).arg(&input);
    let run = command.assert().success();
    let told: Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
    // The three turns of the session that ended.
    assert_eq!((&told["grpo"]["rows"], &told["grpo"]["mean"]), (&json!(3), &json!(1.0)));
}
