//! `oclaw forget`: a run folder made by the real stages, and every byte of it
//! searched afterwards.

mod journals;
mod places;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oclaw::journal::{Entry, Feedback, Journal, Options, Roll, Sync};
use oclaw::privacy::{Pending, Whose};
use oclaw::table::{Format, Provenance, Source, read_turns, row_json, write_shard};
use oclaw::trajectory::{Turn, Writer};
use serde_json::{Value, json};

use crate::forge::{STAGES, captured, finished, write};
use crate::harness::oclaw;
#[cfg(feature = "torch")]
use crate::harness::{fixture, fixture_models as models};

const SECRET: &str = "the hidden garden behind the mill";

fn forget(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = oclaw().current_dir(folder).arg("forget").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(files(&entry.path()));
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    found.sort();
    found
}

/// Everything that a file says, its tables unpacked: bytes, metadata, rows as JSON.
fn said(path: &Path) -> Vec<u8> {
    let mut bytes = std::fs::read(path).unwrap();
    if let Ok(mut source) = Source::open(&[path.to_owned()]) {
        bytes.extend(format!("{:?}", source.schema().metadata()).into_bytes());
        while let Some(batch) = source.next_batch().unwrap() {
            for row in 0..batch.num_rows() {
                bytes.extend(Value::from(row_json::row(&batch, row)).to_string().into_bytes());
            }
        }
    }
    bytes
}

/// Files that hold a text, as it is or as JSON writes it.
fn holders(folder: &Path, needle: &str) -> Vec<PathBuf> {
    let quoted = Value::from(needle).to_string();
    let needles = [needle.as_bytes(), &quoted.as_bytes()[1..quoted.len() - 1]];
    let holds = |path: &PathBuf| {
        let said = said(path);
        needles.iter().any(|needle| said.windows(needle.len()).any(|window| window == *needle))
    };
    files(folder).into_iter().filter(holds).collect()
}

fn rows(path: &Path) -> BTreeMap<String, Turn> {
    let turns = read_turns(&[path.to_owned()]).unwrap();
    turns.into_iter().map(|turn| (turn.turn_id.clone(), turn)).collect()
}

fn telling(session: &str, number: u32) -> Turn {
    let messages = json!([{"role": "user", "content": format!("Where is {SECRET}?")}]);
    let response = json!({"role": "assistant", "content": format!("{SECRET} is here.")});
    Turn {
        messages: messages.to_string(),
        response: response.to_string(),
        prompt_ids: Some(vec![91, 92, 93, 94, 95]),
        client: Some("bob".to_owned()),
        ..finished(session, number)
    }
}

fn entry(turn: &Turn) -> Entry {
    serde_json::from_value(json!({
        "session_id": turn.session_id, "turn": turn.turn, "turn_id": turn.turn_id,
        "parent_turn_id": turn.parent_turn_id, "branch": "main", "request_id": turn.request_id,
        "choice": 0, "client": turn.client, "session_source": "header", "session_confidence": 1.0,
        "created_at": turn.created_at.0, "finished_at": turn.finished_at.0, "model": "m",
        "weight_version": null, "weight_version_end": null, "weight_version_source": "none",
        "sampling": {"temperature": null, "top_p": null, "top_k": null, "min_p": null, "seed": null,
            "max_tokens": null, "log_prob_kind": "raw"},
        "messages": turn.messages, "tools": null, "response": turn.response,
        "finish_reason": "stop", "matched_stop": null, "ends_with_stop_token": null,
        "status": "complete", "usage_completion_tokens": null, "prompt_ids": turn.prompt_ids,
        "response_ids": turn.response_ids, "rollout_log_probs": turn.rollout_log_probs,
        "token_source": "engine", "untrainable_reason": null, "next_state": null,
        "next_state_kind": "none", "session_end": false, "reward_explicit": null,
        "feedback_text": null,
        "lineage": {"stated": true, "key": "0f", "system": "00", "address": "10.1.2.3"},
    }))
    .unwrap()
}

fn journal(spool: &Path) -> Journal {
    let options = Options {
        spool: spool.to_owned(),
        sync: Sync::Every(Duration::from_millis(50)),
        roll: Roll { rows: 1000, bytes: 1 << 30, age: Duration::from_secs(3600) },
        retention: i64::MAX,
        remembered: 65_536,
        compact: 1 << 30,
        provenance: Provenance::default(),
    };
    Journal::open(options).unwrap().0
}

/// A run: a spool with shards, a journal with open turns and late feedback, two
/// stage folders, a single file.
async fn run_folder(run: &Path) {
    let turns = run.join("turns");
    std::fs::create_dir_all(&turns).unwrap();
    let mixed = [captured("open", 1), telling("gone", 1), telling("gone", 2), captured("stays", 1)];
    write_shard(&turns, &[Writer::Serve], &mixed, &Provenance::default()).unwrap();
    write_shard(&turns, &[Writer::Serve], &[telling("gone", 3)], &Provenance::default()).unwrap();
    let journal = journal(&turns);
    assert!(journal.turn(entry(&telling("gone", 4))).await);
    assert!(journal.turn(entry(&captured("stays", 2))).await);
    for (turn_id, session) in [("gone-turn-1", None), ("x", Some("gone")), ("stays-turn-1", None)] {
        let feedback = Feedback {
            turn_id: Some(turn_id.to_owned()),
            session_id: session.map(str::to_owned),
            turn: None,
            reward: Some(1.0),
            text: Some(format!("about {turn_id}")),
            at: 1,
        };
        journal.feedback(feedback).await.unwrap();
    }
    drop(journal);
    for stage in ["judged", "ready"] {
        let folder = run.join(stage);
        std::fs::create_dir(&folder).unwrap();
        let rows = [finished("stays", 1), telling("gone", 1), telling("gone", 2)];
        write(&folder.join("a.parquet"), Format::Parquet, &STAGES, &rows);
        write(&folder.join("b.parquet"), Format::Parquet, &STAGES, &[telling("gone", 3)]);
    }
    let rows = [telling("gone", 1), finished("stays", 1)];
    write(&run.join("piped.arrow"), Format::Ipc, &STAGES, &rows);
    std::fs::write(run.join("ready/.tmp-left"), format!("half of {SECRET}")).unwrap();
    std::fs::write(run.join("notes.txt"), "nothing of it").unwrap();
}

#[tokio::test]
async fn a_session_is_gone_from_every_file() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    run_folder(&run).await;
    let before = rows(&run.join("ready/a.parquet"));
    assert!(holders(&run, SECRET).len() >= 8, "{:?}", holders(&run, SECRET));
    let untouched: Vec<_> = files(&run).iter().map(|path| std::fs::read(path).unwrap()).collect();

    let (code, dry, talk) =
        forget(folder.path(), &["--session", "gone", "--in", "run", "--dry-run"]);
    assert_eq!(code, Some(0), "{talk}");
    let same: Vec<_> = files(&run).iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(untouched == same, "a dry run changes nothing");
    assert!(dry.contains("run/ready/a.parquet: 2 rows\n"), "{dry}");
    assert!(!dry.contains(SECRET));

    let (code, told, talk) = forget(folder.path(), &["--session", "gone", "--in", "run"]);
    assert_eq!(code, Some(0), "{told}{talk}");
    assert!(told.contains("run/ready/b.parquet: 1 rows, and the file with them\n"), "{told}");
    assert_eq!(told.lines().count(), dry.lines().count());
    for needle in [SECRET, "gone", "91,92,93,94,95", "10.1.2.3"] {
        let found = holders(&run, needle);
        // The other session's client has the same address.
        let expected = if needle == "10.1.2.3" { 1 } else { 0 };
        assert_eq!(found.len(), expected, "{needle}: {found:?}");
    }
    assert!(!run.join("ready/b.parquet").exists());
    assert_eq!(Pending::read(&run, &Whose::Session("gone".to_owned())).unwrap(), None);

    let after = rows(&run.join("ready/a.parquet"));
    let stays = "stays-turn-1".to_owned();
    assert_eq!(after.keys().collect::<Vec<_>>(), [&stays]);
    assert_eq!(after[&stays], before[&stays]);
    assert_eq!(rows(&run.join("turns")).len(), 2);
    assert_eq!(rows(&run.join("piped.arrow"))[&stays], finished("stays", 1));
    assert_eq!(&std::fs::read(run.join("piped.arrow")).unwrap()[..4], [0xff; 4]);
    let feedback = files(&run.join("turns/feedback"));
    assert_eq!(feedback.len(), 1);
    assert!(std::fs::read_to_string(&feedback[0]).unwrap().contains("about stays-turn-1"));

    // The spool still is one: the other open turn is taken up again.
    let journal = journal(&run.join("turns"));
    assert_eq!(journal.finish(true).await.unwrap(), 0);
    drop(journal);
    let turns = rows(&run.join("turns"));
    assert_eq!(turns.keys().collect::<Vec<_>>(), ["open-turn-1", "stays-turn-1", "stays-turn-2"]);
}

#[tokio::test]
async fn a_served_spool_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    run_folder(&run).await;
    let serving = journal(&run.join("turns"));
    let (code, told, talk) = forget(folder.path(), &["--session", "gone", "--in", "run"]);
    assert_eq!((code, told.as_str()), (Some(2), ""));
    let expected = "oclaw forget: `run/turns` is being served\n\
        hint: stop `oclaw serve` first, then start it again\n";
    assert_eq!(talk, expected);
    drop(serving);
    assert!(holders(&run, SECRET).len() >= 8);
}

#[tokio::test]
async fn what_was_interrupted_is_completed() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    run_folder(&run).await;
    // As if killed after the spool's shards were done: copies name the turns by
    // other means only.
    let pending = Pending {
        whose: Whose::Client("bob".to_owned()),
        turn_ids: (1..=3).map(|number| format!("gone-turn-{number}")).collect(),
        places: (1..=3).map(|number| ("gone".to_owned(), number)).collect(),
    };
    pending.write(&run).unwrap();
    let anonymous = Turn { client: None, ..telling("gone", 2) };
    write(
        &run.join("ready/a.parquet"),
        Format::Parquet,
        &STAGES,
        &[anonymous, finished("stays", 1)],
    );
    let (code, told, talk) = forget(folder.path(), &["--client", "bob", "--in", "run"]);
    assert_eq!(code, Some(0), "{told}{talk}");
    assert_eq!(holders(&run, SECRET), Vec::<PathBuf>::new());
    assert_eq!(rows(&run.join("ready")).len(), 1);
    assert_eq!(Pending::read(&run, &pending.whose).unwrap(), None);
    let (code, told, _) = forget(folder.path(), &["--client", "bob", "--in", "run"]);
    assert_eq!((code, told.as_str()), (Some(0), ""));
}

#[test]
fn one_turn_leaves_its_words_in_later_requests() {
    let folder = tempfile::tempdir().unwrap();
    let mut later = captured("gone", 2);
    let answer = format!("{SECRET} is here.");
    later.messages =
        json!([{"role": "assistant", "content": answer}, {"role": "user", "content": "Ah."}])
            .to_string();
    let turns = [telling("gone", 1), later, captured("other", 1)];
    write(&folder.path().join("t.parquet"), Format::Parquet, &[Writer::Serve], &turns);
    let (code, told, _) = forget(folder.path(), &["--turn", "gone-turn-1", "--in", "t.parquet"]);
    assert_eq!(code, Some(3));
    let expected = "t.parquet: 1 rows\nturn gone-turn-2: left: its request repeats an answer\n";
    assert_eq!(told, expected);
    assert_eq!(rows(&folder.path().join("t.parquet")).len(), 2);
}

#[test]
fn words_in_other_files_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    std::fs::create_dir(&run).unwrap();
    write(&run.join("t.parquet"), Format::Parquet, &[Writer::Serve], &[telling("gone", 1)]);
    std::fs::write(run.join("log.txt"), format!("asked: Where is {SECRET}?")).unwrap();
    let (code, told, _) = forget(folder.path(), &["--session", "gone", "--in", "run"]);
    assert_eq!(code, Some(3));
    assert!(told.ends_with("run/log.txt: left: words of the turns\n"), "{told}");
}

#[test]
fn usage_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in [
        &["--in", "run"][..],
        &["--session", "a"],
        &["--session", "a", "--turn", "b", "--in", "run"],
        &["--session", "a", "--in", "run", "--clear-cache"],
    ] {
        assert_eq!(forget(folder.path(), arguments).0, Some(2), "{arguments:?}");
    }
    let (code, _, talk) = forget(folder.path(), &["--session", "a", "--in", "absent"]);
    assert_eq!(code, Some(1));
    assert!(talk.starts_with("oclaw forget: cannot read `absent`"), "{talk}");
}

/// The real stages on the recorded session: kept answers and a trained policy.
#[cfg(feature = "torch")]
#[test]
fn a_real_run_forgets_and_its_policies_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    for stage in ["turns", "judged", "hinted", "taught", "ready"] {
        std::fs::create_dir_all(run.join(stage)).unwrap();
    }
    std::fs::copy(fixture("sessions/tiny.parquet"), run.join("turns/a.parquet")).unwrap();
    let model = models().join("tiny-qwen3").display().to_string();
    let stage = |arguments: &[&str]| {
        let mut command = oclaw();
        command.env_remove("OCLAW_TEACHER_LP_NO_CACHE");
        command.current_dir(folder.path()).args(arguments).assert().success();
    };
    stage(&["judge", "--rules", "run/turns", "-o", "run/judged/a.parquet"]);
    stage(&["hint", "--from-feedback", "run/judged", "-o", "run/hinted/a.parquet"]);
    stage(&[
        "teacher-lp",
        "--cache",
        "kept/answers.sqlite",
        "--model",
        &model,
        "run/hinted",
        "-o",
        "run/taught/a.parquet",
    ]);
    stage(&["advantage", "run/taught", "-o", "run/ready/a.parquet"]);
    stage(&[
        "train",
        "run/ready",
        "--model",
        &model,
        "--estimator",
        "combine",
        "--out",
        "run/policy",
    ]);

    let turns = read_turns(&[run.join("ready/a.parquet")]).unwrap();
    let taught = turns.iter().find(|turn| turn.teacher_log_probs.is_some()).unwrap().clone();
    let session = taught.session_id.clone();
    let before = rows(&run.join("ready/a.parquet"));
    let answers = |folder: &Path| {
        let output = oclaw()
            .current_dir(folder)
            .args(["cache", "--cache", "kept/answers.sqlite"])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find(|line| line.trim_start().starts_with("entries")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u32>().unwrap()
    };
    let kept = answers(folder.path());

    let arguments = ["--session", &session, "--in", "run", "--cache", "kept/answers.sqlite"];
    let (code, told, talk) = forget(folder.path(), &arguments);
    assert_eq!(code, Some(3), "{told}{talk}");
    assert!(told.contains("run/policy/step-000001: trained on "), "{told}");
    assert!(told.contains(" of the turns: retrain from step 0, or delete it\n"), "{told}");
    assert!(answers(folder.path()) < kept, "{told}");

    let numbers = |ids: &Option<Vec<i32>>| {
        let ids: Vec<_> = ids.iter().flatten().map(ToString::to_string).collect();
        ids.join(",")
    };
    let score =
        format!("{}", taught.teacher_log_probs.iter().flatten().flatten().next().unwrap()[0]);
    let mut needles =
        vec![session.clone(), numbers(&taught.prompt_ids), numbers(&taught.response_ids), score];
    for turn in turns.iter().filter(|turn| turn.session_id == session) {
        needles.extend([turn.response.clone(), turn.messages.clone()]);
        needles.extend(turn.next_state.clone());
    }
    // What other sessions say or count, too, stays with them.
    let others: String = turns
        .iter()
        .filter(|turn| turn.session_id != session)
        .map(|turn| {
            format!("{turn:?} {} {}", numbers(&turn.prompt_ids), numbers(&turn.response_ids))
        })
        .collect();
    needles.retain(|needle| {
        let printed = format!("{needle:?}");
        needle.len() > 4 && !others.contains(&printed[1..printed.len() - 1])
    });
    assert!(needles.len() >= 3, "{needles:?}");
    for needle in &needles {
        assert_eq!(holders(&run, needle), Vec::<PathBuf>::new(), "{needle}");
        assert_eq!(holders(&folder.path().join("kept"), needle), Vec::<PathBuf>::new(), "{needle}");
    }
    for stage in ["turns", "judged", "hinted", "taught", "ready"] {
        let after = rows(&run.join(stage).join("a.parquet"));
        let expected = before.values().filter(|turn| turn.session_id != session).count();
        assert_eq!(after.len(), expected, "{stage}");
    }
    for (id, turn) in rows(&run.join("ready/a.parquet")) {
        assert_eq!(turn, before[&id]);
    }
    // Nothing is left to remove, and the ledger cannot be asked without ids.
    assert_eq!(forget(folder.path(), &arguments[..4]).0, Some(0));
    let (code, told, _) = forget(folder.path(), &["--turn", &taught.turn_id, "--in", "run"]);
    assert_eq!(code, Some(3), "{told}");
}
