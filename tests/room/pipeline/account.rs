//! What has become of every turn, read off the folders.

mod cloud;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arrow::array::{ArrayRef, RecordBatch, StringArray, UInt64Array};
use oclaw::pipeline::{Account, Accountant, PolicyStatus, Queue, Run, Status};
use oclaw::table::Format;
use oclaw::trajectory::words::SampleKind;
use oclaw::trajectory::{Turn, Writer};
use parquet::arrow::ArrowWriter;

use crate::forge::{STAGES, finished, write};

/// Writes a shard with turns of a session; the stages up to a folder wrote it.
fn shard(run: &Path, folder: &str, name: &str, turns: std::ops::Range<u32>) {
    let writers: &[Writer] = match folder {
        "turns" => &STAGES[..1],
        "judged" => &STAGES[..2],
        "hinted" => &STAGES[..3],
        "taught" => &STAGES[..4],
        _ => &STAGES,
    };
    let turns: Vec<_> = turns.map(|number| finished(name, number)).collect();
    shard_of(run, folder, name, (writers, &turns));
}

fn shard_of(run: &Path, folder: &str, name: &str, (writers, turns): (&[Writer], &[Turn])) {
    fs::create_dir_all(run.join(folder)).unwrap();
    let path = run.join(folder).join(format!("{name}.parquet"));
    write(&path, Format::Parquet, writers, turns);
}

/// Makes the second of three turns one that has nothing to learn from.
fn one_silent(session: &str) -> Vec<Turn> {
    let mut turns: Vec<_> = (1..4).map(|number| finished(session, number)).collect();
    turns[1].sample_kind = Some(SampleKind::None);
    turns[1].sample_reason = Some("no_signal".to_owned());
    // A reason beside a signal is no silence.
    turns[2].sample_reason = Some("later_turn_teaches".to_owned());
    turns
}

/// Writes a policy with a ledger: turn, and why it was refused.
fn policy(run: &Path, step: u64, entries: &[(&str, Option<&str>)]) {
    let folder = run.join(format!("policy/step-{step:06}/oclaw"));
    fs::create_dir_all(&folder).unwrap();
    let outcome = |reason: Option<&str>| if reason.is_some() { "refused" } else { "consumed" };
    let ids: StringArray = entries.iter().map(|(id, _)| Some(*id)).collect();
    let outcomes: StringArray = entries.iter().map(|(_, reason)| Some(outcome(*reason))).collect();
    let reasons: StringArray = entries.iter().map(|(_, reason)| *reason).collect();
    let steps: UInt64Array = entries.iter().map(|_| Some(step)).collect();
    let columns: [(&str, ArrayRef); 4] = [
        ("turn_id", Arc::new(ids)),
        ("step", Arc::new(steps)),
        ("outcome", Arc::new(outcomes)),
        ("reason", Arc::new(reasons)),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let file = File::create(folder.join("ledger.parquet")).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let latest = run.join("policy/latest");
    let _ = fs::remove_file(&latest);
    std::os::unix::fs::symlink(format!("step-{step:06}"), latest).unwrap();
}

fn counts(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
    pairs.iter().map(|(word, count)| ((*word).to_owned(), *count)).collect()
}

#[test]
fn every_turn_is_somewhere() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path();
    let mut accountant = Accountant::new(&Run::new(run), &[]);
    assert_eq!(accountant.take().unwrap().0, Account::default());
    // As far as its shard: a waits for the judge, b for the teacher, c was trained.
    shard(run, "turns", "a", 1..3);
    for folder in ["turns", "judged", "hinted"] {
        shard(run, folder, "b", 1..4);
    }
    for folder in ["turns", "judged", "hinted", "taught", "ready"] {
        shard(run, folder, "c", 1..6);
    }
    let (account, queues) = accountant.take().unwrap();
    assert_eq!(account.pending, counts(&[("judge", 2), ("teacher-lp", 3), ("train", 5)]));
    let queue = |queues: &[Queue], stage: &str| {
        let queue = queues.iter().find(|queue| queue.stage == stage).unwrap();
        (queue.shards, queue.rows, queue.failed)
    };
    assert_eq!(queue(&queues, "teacher-lp"), (1, 3, 0));
    assert_eq!(queues[0].rows_per_minute, 0.8, "judged: 8 rows in ten minutes");
    // What a loop has done that began a minute ago, it did in that minute.
    let began = SystemTime::now() - Duration::from_secs(60);
    let mut young = Accountant::new(&Run::new(run), &[]).since(Some(began));
    let rate = young.take().unwrap().1[0].rows_per_minute;
    assert!((4.0..=8.0).contains(&rate), "{rate}");

    policy(run, 1, &[("c-turn-1", None), ("c-turn-2", Some("stale")), ("gone", None)]);
    fs::write(run.join("taught/failed.jsonl"), "{\"shard\": \"b.parquet\", \"error\": \"x\"}\n")
        .unwrap();
    let (account, queues) = accountant.take().unwrap();
    assert_eq!(account.captured, 10);
    assert_eq!(account.trained, 1, "a turn that nobody captured is none of ours");
    assert_eq!(account.refused, counts(&[("failed_in_teacher-lp", 3), ("stale", 1)]));
    assert_eq!(account.pending, counts(&[("judge", 2), ("train", 3)]));
    assert_eq!((account.lost, account.unreadable), (0, 0));
    assert_eq!(queue(&queues, "teacher-lp"), (0, 0, 1));
    assert_eq!(
        account.words(),
        "captured 10 = trained 1 + refused 4 (failed_in_teacher-lp 3, stale 1) + pending 5 (judge 2, train 3)"
    );

    policy(run, 2, &[("c-turn-1", None), ("c-turn-2", None), ("c-turn-3", None)]);
    assert_eq!(accountant.take().unwrap().0.trained, 3);
}

/// The trainer can only refuse it, so it waits for no step, and none comes for it alone.
#[test]
fn a_turn_without_a_signal_does_not_wait_for_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path();
    for folder in ["turns", "judged", "hinted", "taught"] {
        shard(run, folder, "a", 1..4);
    }
    shard_of(run, "ready", "a", (&STAGES, &one_silent("a")));
    let mut accountant = Accountant::new(&Run::new(run), &[]);
    let (account, queues) = accountant.take().unwrap();
    assert_eq!(account.refused, counts(&[("no_signal", 1)]));
    assert_eq!(account.pending, counts(&[("train", 2)]));
    assert_eq!((queues[4].rows, account.lost), (2, 0));
    // What the trainer says goes before it.
    policy(run, 1, &[("a-turn-1", None), ("a-turn-2", Some("stale")), ("a-turn-3", None)]);
    let (account, _) = accountant.take().unwrap();
    assert_eq!((account.trained, account.refused), (2, counts(&[("stale", 1)])));
}

#[test]
fn a_stage_that_loses_rows_is_found_out() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path();
    shard(run, "turns", "a", 1..6);
    shard(run, "judged", "a", 1..4);
    fs::write(run.join("turns/broken.parquet"), "PAR1").unwrap();
    let (account, _) = Accountant::new(&Run::new(run), &["hint".to_owned()]).take().unwrap();
    assert_eq!((account.captured, account.lost, account.unreadable), (5, 2, 1));
    assert_eq!(account.pending, counts(&[("teacher-lp", 3)]));
    assert!(account.words().ends_with("(teacher-lp 3) + LOST 2"), "{}", account.words());
    let text = Status { account: Some(account), ..Status::default() }.prometheus();
    assert!(text.contains("\noclaw_loop_turns_lost 2\n"), "{text}");
    assert!(text.contains("# TYPE oclaw_loop_turns_pending gauge\n"), "{text}");
    assert!(text.contains("\noclaw_loop_turns_pending{stage=\"teacher-lp\"} 3\n"), "{text}");
}

/// A shard whose ids are none still has its turns: which of them were trained, nobody
/// can say, and none is counted twice or left out.
#[test]
fn a_shard_whose_ids_cannot_be_read_waits_and_is_told() {
    unreadable(Arc::new(UInt64Array::from(vec![1, 2, 3])));
    // Not even if the ledger knows all that are there.
    unreadable(Arc::new(StringArray::from(vec![Some("a-turn-1"), None, Some("a-turn-1")])));
}

fn unreadable(ids: ArrayRef) {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path();
    for folder in ["turns", "judged", "hinted", "taught"] {
        shard(run, folder, "a", 1..4);
    }
    fs::create_dir_all(run.join("ready")).unwrap();
    let batch = RecordBatch::try_from_iter([("turn_id", ids)]).unwrap();
    let path = run.join("ready/a.parquet");
    let file = File::create(&path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    policy(run, 1, &[("a-turn-1", None)]);
    let mut accountant = Accountant::new(&Run::new(run), &[]);
    let (account, queues) = accountant.take().unwrap();
    assert_eq!((account.captured, account.trained, account.unreadable), (3, 0, 1));
    assert_eq!(account.pending, counts(&[("train", 3)]));
    assert_eq!((account.lost, account.refused.len()), (0, 0));
    let train = queues.iter().find(|queue| queue.stage == "train").unwrap();
    assert_eq!((train.shards, train.rows), (1, 3));
    // Written anew, it is read anew.
    fs::remove_file(path).unwrap();
    shard(run, "ready", "a", 1..4);
    let (account, _) = accountant.take().unwrap();
    assert_eq!((account.captured, account.trained, account.unreadable), (3, 1, 0));
    assert_eq!(account.pending, counts(&[("train", 2)]));
}

/// One that a stage gave up, and that was done once the stage was mended.
#[test]
fn a_shard_that_was_done_later_is_not_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path();
    shard(run, "turns", "a", 1..3);
    fs::create_dir(run.join("judged")).unwrap();
    fs::write(run.join("judged/failed.jsonl"), "{\"shard\": \"a.parquet\"}\n").unwrap();
    let mut accountant = Accountant::new(&Run::new(run), &[]);
    let (account, queues) = accountant.take().unwrap();
    assert_eq!((account.refused, queues[0].failed), (counts(&[("failed_in_judge", 2)]), 1));
    shard(run, "judged", "a", 1..3);
    let (account, queues) = accountant.take().unwrap();
    assert_eq!((account.pending, queues[0].failed), (counts(&[("hint", 2)]), 0));
    assert!(account.refused.is_empty());
}

/// Nothing is not none: what nobody knows has no figure.
#[test]
fn turns_that_nobody_knows_have_no_figure() {
    let untold = Status { untold: Some("away".to_owned()), ..Status::default() };
    let (json, text) = (serde_json::to_value(&untold).unwrap(), untold.prometheus());
    assert_eq!((&json["account"], &json["untold"]), (&serde_json::Value::Null, &"away".into()));
    assert!(!text.contains("oclaw_loop_turns_"), "{text}");
    let told = Status { at: 100, told_at: Some(65), ..Status::default() };
    let text = told.prometheus();
    assert!(text.contains("\noclaw_loop_store_age_seconds 35\n"), "{text}");
    let folder = tempfile::tempdir().unwrap();
    let served = [("http://a", Some("3")), ("http://b", None), ("http://c", Some("mine"))];
    let served = served.map(|(url, version)| (url.to_owned(), version.map(str::to_owned)));
    let policy = PolicyStatus::untold(&Run::new(folder.path()), BTreeMap::from(served));
    assert_eq!((policy.published, policy.staleness), (None, None));
    let idle = Queue { stage: "judge".to_owned(), ..Queue::default() };
    let late = Queue { stage: "hint".to_owned(), oldest: Some(7), ..Queue::default() };
    let text = Status { policy, stages: vec![idle, late], ..Status::default() }.prometheus();
    let figures = |name: &str| {
        let name = format!("oclaw_loop_{name}");
        text.lines().filter_map(|line| line.strip_prefix(&name)).collect::<Vec<_>>()
    };
    assert_eq!(figures("policy_served"), ["{engine=\"http://a\"} 3"]);
    assert_eq!(figures("queue_oldest_seconds"), ["{stage=\"hint\"} 7"]);
    assert_eq!(figures("policy_staleness"), [""; 0]);
}

#[test]
fn what_is_not_known_is_said() {
    let unknown = Account { open_unknown: Some("it does not answer".into()), ..Account::default() };
    let words = "captured 0 = trained 0 + refused 0 + pending 0; nobody knows how many more are \
                 open: it does not answer";
    assert_eq!(unknown.words(), words);
    let known = Account { open: Some(0), ..Account::default() };
    assert!(known.words().ends_with("pending 0; 0 more are open"), "{}", known.words());
}
