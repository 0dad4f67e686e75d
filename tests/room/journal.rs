//! The write-ahead log: what survives, what is set aside, what becomes a shard.

use std::path::{Path, PathBuf};
use std::time::Duration;

use oclaw::journal::{
    Entry, Error, Feedback, Journal, Lineage, Options, Origin, Recovered, Roll, Settings, Sync,
};
use oclaw::table::{Provenance, read_turns};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::{
    LogProbKind, NextStateKind, SessionSource, Status, TokenSource, WeightVersionSource,
};

fn entry(session: &str, turn: u32) -> Entry {
    Entry {
        session_id: session.to_owned(),
        turn,
        turn_id: format!("{session}-{turn}"),
        parent_turn_id: None,
        branch: "main".to_owned(),
        request_id: format!("{session}-{turn}"),
        choice: 0,
        client: None,
        session_source: SessionSource::Header,
        session_confidence: 1.0,
        created_at: i64::MAX / 2,
        finished_at: i64::MAX / 2 + i64::from(turn),
        model: "m".to_owned(),
        weight_version: Some("7".to_owned()),
        weight_version_end: Some("7".to_owned()),
        weight_version_source: WeightVersionSource::Answer,
        sampling: Settings {
            temperature: Some(0.1),
            top_p: None,
            top_k: None,
            min_p: None,
            seed: Some(-1),
            max_tokens: None,
            log_prob_kind: LogProbKind::Tempered,
        },
        messages: r#"[{"role":"user","content":"你好"}]"#.to_owned(),
        tools: None,
        response: r#"{"role":"assistant","content":"x"}"#.to_owned(),
        finish_reason: Some("stop".to_owned()),
        matched_stop: None,
        ends_with_stop_token: None,
        status: Status::Complete,
        usage_completion_tokens: Some(2),
        prompt_ids: Some(vec![1, 2]),
        response_ids: Some(vec![3, 4]),
        rollout_log_probs: Some(vec![Some(-0.123_456_79), None]),
        token_source: TokenSource::Engine,
        untrainable_reason: None,
        next_state: None,
        next_state_kind: NextStateKind::None,
        session_end: false,
        reward_explicit: None,
        feedback_text: None,
        origin: Origin::default(),
        lineage: Lineage { key: Some("0f".to_owned()), ..Lineage::default() },
    }
}

fn options(spool: &Path) -> Options {
    Options {
        spool: spool.to_owned(),
        sync: Sync::Every(Duration::from_millis(50)),
        roll: Roll { rows: 1000, bytes: 1 << 30, age: Duration::from_secs(3600) },
        retention: i64::MAX,
        remembered: 65_536,
        compact: 1 << 30,
        provenance: Provenance::default(),
    }
}

fn open(spool: &Path) -> (Journal, Recovered) {
    Journal::open(options(spool)).unwrap()
}

fn shards(spool: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(spool).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|ending| ending == "parquet")).collect()
}

fn rows(spool: &Path) -> Vec<Turn> {
    if shards(spool).is_empty() { Vec::new() } else { read_turns(&[spool.to_owned()]).unwrap() }
}

fn log(spool: &Path) -> PathBuf {
    let entries = std::fs::read_dir(spool.join(".journal")).unwrap();
    let mut logs = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "log"));
    let found = logs.next().unwrap();
    assert_eq!(logs.next(), None);
    found
}

fn next() -> String {
    r#"[{"role":"user","content":"no"}]"#.to_owned()
}

#[tokio::test]
async fn an_extended_turn_becomes_a_row_and_an_open_one_waits() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, _) = open(folder.path());
    assert!(journal.turn(entry("s", 1)).await);
    assert!(journal.turn(entry("s", 2)).await);
    journal.extend("s-1".to_owned(), next(), NextStateKind::User);
    assert_eq!(journal.finish(false).await.unwrap(), 1);
    let written = rows(folder.path());
    assert_eq!(written.len(), 1);
    let row = &written[0];
    assert_eq!((row.turn_id.as_str(), row.next_state.clone()), ("s-1", Some(next())));
    assert_eq!(row.rollout_log_probs, entry("s", 1).rollout_log_probs);
    assert_eq!(row.sampling.temperature, Some(0.1));
    // The next run takes the open turn up, and remembers the written one.
    drop(journal);
    let (journal, recovered) = open(folder.path());
    assert_eq!(recovered.open, [entry("s", 2)]);
    assert_eq!(recovered.known, [entry("s", 1).remembered()]);
    journal.close("s-2".to_owned(), true);
    assert_eq!(journal.finish(false).await.unwrap(), 0);
    let written = rows(folder.path());
    assert_eq!(written.len(), 2);
    let last = written.iter().find(|row| row.turn_id == "s-2").unwrap();
    assert_eq!((last.session_end, last.next_state_kind), (true, NextStateKind::None));
    let (_, recovered) = {
        drop(journal);
        open(folder.path())
    };
    assert!(recovered.open.is_empty());
}

#[tokio::test]
async fn a_crash_loses_nothing_and_doubles_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..5 {
        let (journal, recovered) = open(folder.path());
        // Each round ends the turn that the one before left open.
        for open in &recovered.open {
            journal.extend(open.turn_id.clone(), next(), NextStateKind::User);
        }
        assert_eq!(recovered.open.len(), usize::from(round > 0));
        assert!(journal.turn(entry("s", round)).await);
        // No `finish`: the process is gone.
        drop(journal);
    }
    let (journal, _) = open(folder.path());
    journal.finish(true).await.unwrap();
    let mut ids: Vec<_> = rows(folder.path()).into_iter().map(|row| row.turn_id).collect();
    ids.sort();
    assert_eq!(ids, ["s-0", "s-1", "s-2", "s-3", "s-4"]);
}

#[tokio::test]
async fn a_shard_written_just_before_the_crash_is_not_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, _) = open(folder.path());
    assert!(journal.turn(entry("s", 1)).await);
    journal.close("s-1".to_owned(), true);
    let before = {
        // The log as it is before it says that the row is written.
        assert!(journal.turn(entry("s", 2)).await);
        std::fs::read(log(folder.path())).unwrap()
    };
    journal.finish(false).await.unwrap();
    drop(journal);
    std::fs::write(log(folder.path()), before).unwrap();
    std::fs::remove_file(folder.path().join(".journal/shards")).unwrap();
    let (journal, recovered) = open(folder.path());
    assert_eq!(recovered.open.len(), 1);
    journal.finish(true).await.unwrap();
    assert_eq!(rows(folder.path()).len(), 2);
}

#[tokio::test]
async fn a_damaged_log_gives_what_is_whole_and_is_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, _) = open(folder.path());
    for turn in 1..=3 {
        assert!(journal.turn(entry("s", turn)).await);
    }
    drop(journal);
    let whole = std::fs::read(log(folder.path())).unwrap();
    let record = whole.len() / 3;
    let mut damages: Vec<(Vec<u8>, usize)> = Vec::new();
    for cut in (1..whole.len()).step_by(97) {
        damages.push((whole[..cut].to_vec(), cut / record));
    }
    for at in (0..whole.len()).step_by(211) {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x55;
        damages.push((flipped, 2));
    }
    damages.push((vec![0; 5000], 0));
    damages.push((b"OCJ1".repeat(3000), 0));
    damages.push((whole.iter().rev().copied().collect(), 0));
    for (bytes, expected) in damages {
        let folder = tempfile::tempdir().unwrap();
        let journals = folder.path().join(".journal");
        std::fs::create_dir_all(&journals).unwrap();
        std::fs::write(journals.join("00000001.log"), &bytes).unwrap();
        let (journal, recovered) = open(folder.path());
        assert_eq!(recovered.open.len(), expected, "{} bytes", bytes.len());
        let damaged = journal.counts().set_aside.load(std::sync::atomic::Ordering::Relaxed);
        let aside = journals.join("aside/00000001.log");
        // Cut exactly between two records, nothing is damaged.
        if damaged > 0 {
            assert_eq!(std::fs::read(aside).unwrap(), bytes);
        } else {
            assert!(bytes.len() % record == 0 && !aside.exists());
        }
        // And it goes on.
        assert!(journal.turn(entry("t", 9)).await);
        journal.finish(true).await.unwrap();
        assert_eq!(rows(folder.path()).len(), expected + 1);
    }
}

#[tokio::test]
async fn one_writer_per_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, _) = open(folder.path());
    let second = Journal::open(options(folder.path()));
    assert!(matches!(second, Err(Error::Locked { .. })));
    drop(journal);
    assert!(Journal::open(options(folder.path())).is_ok());
}

#[tokio::test]
async fn what_comes_before_its_turn_is_not_lost() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, _) = open(folder.path());
    journal.extend("s-1".to_owned(), next(), NextStateKind::User);
    assert!(journal.turn(entry("s", 1)).await);
    assert_eq!(journal.finish(false).await.unwrap(), 0);
    assert_eq!(rows(folder.path())[0].next_state, Some(next()));
}

#[tokio::test]
async fn feedback_goes_to_the_row_or_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, _) = open(folder.path());
    let feedback = |turn: &str| Feedback {
        turn_id: Some(turn.to_owned()),
        session_id: None,
        turn: None,
        reward: Some(-1.0),
        text: Some("too long".to_owned()),
        at: 5,
    };
    assert!(journal.turn(entry("s", 1)).await);
    assert_eq!(journal.feedback(feedback("s-1")).await, Some(true));
    journal.close("s-1".to_owned(), false);
    assert_eq!(journal.feedback(feedback("gone")).await, Some(false));
    journal.finish(false).await.unwrap();
    let row = &rows(folder.path())[0];
    assert_eq!((row.reward_explicit, row.feedback_text.as_deref()), (Some(-1.0), Some("too long")));
    assert_eq!(row.next_state_kind, NextStateKind::Explicit);
    let files: Vec<_> = std::fs::read_dir(folder.path().join("feedback")).unwrap().collect();
    let text = std::fs::read_to_string(files[0].as_ref().unwrap().path()).unwrap();
    assert!(text.contains("\"turn_id\":\"gone\"") && text.ends_with('\n'), "{text}");
}

#[tokio::test]
async fn shards_roll_by_rows_and_the_log_stays_small() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path());
    options.roll.rows = 10;
    options.compact = 20_000;
    let (journal, _) = Journal::open(options).unwrap();
    for turn in 0..100 {
        assert!(journal.turn(entry("s", turn)).await);
        journal.close(format!("s-{turn}"), false);
        // Acknowledged twice: a kill here would leave the same.
        assert!(journal.turn(entry("open", turn)).await);
    }
    let size = std::fs::metadata(log(folder.path())).unwrap().len();
    assert_eq!(journal.finish(false).await.unwrap(), 100);
    let written = rows(folder.path());
    assert_eq!(written.len(), 100);
    assert!(shards(folder.path()).len() > 1);
    assert!(size < 400_000, "{size}");
    drop(journal);
    let (_journal, recovered) = open(folder.path());
    assert_eq!(recovered.open.len(), 100);
    assert_eq!(recovered.known.len(), 100);
}

#[tokio::test]
async fn a_shard_names_the_tokenizers_of_its_own_rows() {
    let made_by = |hash: Option<&str>, turn: u32| {
        let hash = hash.map(str::to_owned);
        let origin = Origin { tokenizer_hash: hash.clone(), chat_template_hash: hash };
        Entry { origin, ..entry("s", turn) }
    };
    let no_ids = Entry { prompt_ids: None, response_ids: None, ..entry("s", 9) };
    for (entries, expected) in [
        (vec![made_by(Some("a"), 1), made_by(Some("a"), 2), no_ids.clone()], Some("a")),
        (vec![made_by(Some("b"), 1), made_by(Some("a"), 2)], Some("a,b")),
        (vec![made_by(Some("a"), 1), made_by(None, 2)], None),
        (vec![no_ids], None),
    ] {
        let folder = tempfile::tempdir().unwrap();
        // The first rows are an earlier run's.
        for entry in entries {
            let (journal, _) = open(folder.path());
            assert!(journal.turn(entry).await);
        }
        let (journal, _) = open(folder.path());
        journal.finish(true).await.unwrap();
        let source = oclaw::table::Source::open(&[folder.path().to_owned()]).unwrap();
        let found = source.provenance();
        assert_eq!(found.tokenizer_hash.as_deref(), expected);
        assert_eq!(found.chat_template_hash.as_deref(), expected);
    }
}

#[tokio::test]
async fn a_folder_that_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let error = Journal::open(options(&file)).unwrap_err();
    assert!(matches!(&error, Error::Folder { path, .. } if *path == file), "{error:?}");
}
