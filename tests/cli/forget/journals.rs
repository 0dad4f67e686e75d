//! Turns that only the journal has, what stands beside them, and what an
//! interrupted run has left.

use super::*;

/// A spool with an open turn that no shard has.
async fn open_turn(run: &Path) -> PathBuf {
    let spool = run.join("turns");
    std::fs::create_dir_all(&spool).unwrap();
    let journal = journal(&spool);
    assert!(journal.turn(entry(&telling("gone", 1))).await);
    drop(journal);
    spool
}

#[tokio::test]
async fn what_only_a_journal_tells_is_looked_for_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let spool = open_turn(&run).await;
    std::fs::write(run.join("talk.log"), format!("asked: Where is {SECRET}?\n")).unwrap();
    std::fs::write(run.join("names.log"), "session gone began\n").unwrap();
    std::fs::create_dir(spool.join("feedback")).unwrap();
    let lines = "{\"session_id\":\"gone\",\"turn\":1,\"reward\":1}\n{\"session_id\":\"other\",\"turn\":1}\n";
    std::fs::write(spool.join("feedback/a.jsonl"), lines).unwrap();
    for dry in [&["--dry-run"][..], &[]] {
        let arguments = [&["--client", "bob", "--in", "run"][..], dry].concat();
        let (code, out, talk) = forget(folder.path(), &arguments);
        assert_eq!(code, Some(3), "{out}{talk}");
        assert!(out.contains("run/talk.log: left: words of the turns\n"), "{out}");
        assert!(out.contains("run/names.log: left: ids of the turns or their session\n"), "{out}");
        assert!(out.contains("run/turns/feedback/a.jsonl: 1 records\n"), "{out}");
    }
    assert_eq!(holders(&run, SECRET), [run.join("talk.log")]);
    let kept = std::fs::read_to_string(spool.join("feedback/a.jsonl")).unwrap();
    assert_eq!(kept, "{\"session_id\":\"other\",\"turn\":1}\n");
}

#[tokio::test]
async fn the_turn_before_still_holds_the_request() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let spool = run.join("turns");
    std::fs::create_dir_all(&spool).unwrap();
    let asked = json!({"role": "user", "content": format!("Where is {SECRET}?")});
    let second = telling("gone", 2);
    // One is in a shard with its next state, the other's is in the journal.
    let first = Turn { next_state: Some(json!([asked]).to_string()), ..finished("gone", 1) };
    write(&run.join("t.parquet"), Format::Parquet, &STAGES, &[first, second]);
    let (code, out, _) = forget(folder.path(), &["--turn", "gone-turn-2", "--in", "run"]);
    assert_eq!(code, Some(3), "{out}");
    let told = "turn gone-turn-1: left: what came after it is the turn's request\n";
    assert!(out.contains(told), "{out}");

    let journal = journal(&spool);
    assert!(journal.turn(entry(&captured("open", 1))).await);
    let kind = oclaw::trajectory::words::NextStateKind::User;
    journal.extend("open-turn-1".to_owned(), json!([asked]).to_string(), kind);
    assert!(journal.turn(entry(&telling("open", 2))).await);
    let later = Turn {
        messages: json!([{"role": "assistant", "content": format!("{SECRET} is here.")}])
            .to_string(),
        ..captured("open", 3)
    };
    assert!(journal.turn(entry(&later)).await);
    drop(journal);
    let (code, out, _) = forget(folder.path(), &["--turn", "open-turn-2", "--in", "run"]);
    assert_eq!(code, Some(3), "{out}");
    assert!(
        out.contains("turn open-turn-1: left: what came after it is the turn's request\n"),
        "{out}"
    );
    assert!(out.contains("turn open-turn-3: left: its request repeats an answer\n"), "{out}");
}

#[tokio::test]
async fn leftovers_go_and_strangers_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let spool = open_turn(&run).await;
    for place in [".journal", ".journal/aside", "feedback"] {
        std::fs::create_dir_all(spool.join(place)).unwrap();
        std::fs::write(spool.join(place).join(".tmp-abc"), SECRET).unwrap();
    }
    std::fs::write(spool.join("feedback/note.txt"), format!("Where is {SECRET}?")).unwrap();
    // Lines that nobody can read: one tells whose it is.
    let lines = format!("{{\"text\": \"Where is {SECRET}?\n{{\"reward\": \n");
    std::fs::write(spool.join("feedback/a.jsonl"), lines).unwrap();
    // A folder that is no spool, and a folder that a trainer has left.
    std::fs::create_dir_all(run.join("notes/feedback")).unwrap();
    std::fs::write(run.join("notes/feedback/own.jsonl"), format!("\"Where is {SECRET}?\"\n"))
        .unwrap();
    std::fs::create_dir_all(run.join("policy/.tmp-step-000001-7")).unwrap();
    let stray = run.join("policy/.tmp-step-000001-7/batch.txt");
    std::fs::write(&stray, format!("Where is {SECRET}?")).unwrap();
    let arguments = ["--session", "gone", "--in", "run"];
    let (code, out, _) = forget(folder.path(), &[&arguments[..], &["--dry-run"]].concat());
    assert_eq!(code, Some(3), "{out}");
    for place in [".journal", ".journal/aside", "feedback"] {
        assert!(spool.join(place).join(".tmp-abc").exists());
        let told = format!("run/turns/{place}/.tmp-abc: 1 unfinished file\n");
        assert_eq!(out.matches(&told).count(), 1, "{told}: {out}");
    }
    let (code, out, _) = forget(folder.path(), &arguments);
    assert_eq!(code, Some(3), "{out}");
    for left in [
        "turns/feedback/note.txt",
        "notes/feedback/own.jsonl",
        "policy/.tmp-step-000001-7/batch.txt",
    ] {
        assert!(out.contains(&format!("run/{left}: left: words of the turns\n")), "{left}: {out}");
    }
    assert!(!run.join("notes/.journal").exists() && !run.join("notes/.lock").exists());
    let told = "run/turns/feedback/a.jsonl: left: bytes that nobody can read\n";
    assert!(out.contains(told), "{out}");
    let kept = std::fs::read_to_string(spool.join("feedback/a.jsonl")).unwrap();
    assert_eq!(kept, "{\"reward\": \n");
    let mut left = holders(&run, SECRET);
    left.retain(|path| !path.ends_with("note.txt") && !path.ends_with("own.jsonl"));
    assert_eq!(left, [stray]);
}

#[test]
fn each_aim_has_a_note_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let note = |session: &str| Pending {
        whose: Whose::Session(session.to_owned()),
        turn_ids: [format!("{session}-turn-1")].into(),
        places: [(session.to_owned(), 1)].into(),
    };
    for session in ["a", "b"] {
        note(session).write(folder.path()).unwrap();
    }
    let names: Vec<_> = files(folder.path());
    assert!(
        names.len() == 2
            && names.iter().all(|path| {
                path.file_name().unwrap().to_str().unwrap().starts_with(".forgetting-")
            }),
        "{names:?}"
    );
    for session in ["a", "b"] {
        let whose = Whose::Session(session.to_owned());
        assert_eq!(Pending::read(folder.path(), &whose).unwrap(), Some(note(session)));
    }
    // A run with another aim leaves the note where it is.
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &[finished("b", 1)]);
    let (code, out, _) = forget(folder.path(), &["--session", "b", "--in", "."]);
    assert_eq!(code, Some(0), "{out}");
    let read = |session: &str| Pending::read(folder.path(), &Whose::Session(session.to_owned()));
    assert_eq!((read("a").unwrap().is_some(), read("b").unwrap()), (true, None));
}
