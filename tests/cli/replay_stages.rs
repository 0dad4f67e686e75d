//! `oclaw replay --stages`: what stages wrote, made again by their own command lines.

use std::path::Path;

use assert_cmd::assert::Assert;
use oclaw::table::{Provenance, Sink, Source, Target, read_turns};
use oclaw::trajectory::{Turn, Writer, turn};
use serde_json::{Value, json};

use super::judge::{says, table};
use crate::harness::fake_engine::{FakeEngine, Reply};
use crate::harness::{fixture, oclaw, oclaw_keeping, until};

fn stage(folder: &Path, arguments: &[&str]) {
    oclaw().current_dir(folder).args(arguments).assert().success();
}

/// A run of three stages over the tiny model's sessions, as files.
fn run(folder: &Path) {
    let turns = fixture("sessions/tiny.parquet").display().to_string();
    stage(folder, &["judge", &turns, "--rules", "-o", "judged.parquet", "--seed", "3"]);
    stage(folder, &["hint", "judged.parquet", "--from-feedback", "-o", "hinted.parquet"]);
    stage(folder, &["advantage", "hinted.parquet", "--estimator", "grpo", "-o", "ready.parquet"]);
}

fn replay(folder: &Path, further: &[&str]) -> Assert {
    let mut command = oclaw();
    command.current_dir(folder).args(["replay", "--stages", "."]).args(further).assert()
}

fn lines(assert: &Assert) -> Vec<Value> {
    let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn verdicts(assert: &Assert) -> Vec<(String, String)> {
    let word = |line: &Value, key: &str| line[key].as_str().unwrap().to_owned();
    lines(assert).iter().map(|line| (word(line, "stage"), word(line, "verdict"))).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(left, right)| ((*left).to_owned(), (*right).to_owned())).collect()
}

/// Writes a table anew with other turns or another origin.
fn rewrite(path: &Path, writers: &[Writer], change: impl FnOnce(&mut Vec<Turn>, &mut Provenance)) {
    let mut provenance = Source::open(&[path.to_owned()]).unwrap().provenance().clone();
    let mut turns = read_turns(&[path.to_owned()]).unwrap();
    change(&mut turns, &mut provenance);
    let batch = turn::batch(writers, &turns).unwrap();
    let target = Target::Path(path.to_owned());
    let mut sink = Sink::create(&target, None, batch.schema(), &provenance).unwrap();
    sink.write(&batch).unwrap();
    sink.finish().unwrap();
}

const JUDGED: [Writer; 2] = [Writer::Serve, Writer::Judge];

#[test]
fn stages_that_have_not_changed_are_the_same() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path());
    let same = [("judge", "same"), ("hint", "same"), ("advantage", "same")];
    let done = replay(folder.path(), &["--output-format", "json"]).success();
    assert_eq!(verdicts(&done), pairs(&same));
    assert_eq!(lines(&done)[0]["rows"], 21);
    // The last table tells the command lines of all: it is enough.
    std::fs::remove_file(folder.path().join("judged.parquet")).unwrap();
    std::fs::remove_file(folder.path().join("hinted.parquet")).unwrap();
    let done = replay(folder.path(), &["--output-format", "json"]).success();
    assert_eq!(verdicts(&done), pairs(&same));
    // Shards in folders of a run are looked at one by one.
    let ready = folder.path().join("ready");
    std::fs::create_dir(&ready).unwrap();
    std::fs::copy(folder.path().join("ready.parquet"), ready.join("a.parquet")).unwrap();
    std::fs::rename(folder.path().join("ready.parquet"), ready.join("b.parquet")).unwrap();
    std::fs::write(ready.join(".tmp-c.parquet"), "unfinished").unwrap();
    let done = replay(folder.path(), &["--output-format", "json"]).success();
    assert_eq!(lines(&done).len(), 6);
}

#[test]
fn the_first_stage_that_changed_is_named() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path());
    rewrite(&folder.path().join("judged.parquet"), &JUDGED, |turns, _| {
        let judged = turns.iter_mut().filter(|turn| turn.score == Some(1.0));
        judged.take(2).for_each(|turn| turn.score = Some(0.0));
    });
    let done = replay(folder.path(), &["--output-format", "json"]).code(3);
    let found = lines(&done);
    assert_eq!((&found[0]["verdict"], &found[0]["changed"]), (&json!("changed"), &json!(2)));
    assert_eq!(found[0]["columns"], json!({"score": 2}));
    assert_eq!(found[2]["verdict"], "same");
    let told = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(
        told.contains("the first stage that changed is judge, in `./judged.parquet`"),
        "{told}"
    );
    let xml = replay(folder.path(), &["--output-format", "junit"]).code(3);
    let xml = String::from_utf8(xml.get_output().stdout.clone()).unwrap();
    let counts =
        "<testsuites name=\"oclaw replay --stages\" tests=\"3\" failures=\"1\" errors=\"0\"";
    assert!(xml.contains(counts), "{xml}");
    let case = "<testcase classname=\"judge\" name=\"./judged.parquet\"";
    assert!(xml.contains(case) && xml.contains("message=\"2 of 21 rows: score in 2\""), "{xml}");
    let table = replay(folder.path(), &[]).code(3);
    let table = String::from_utf8(table.get_output().stdout.clone()).unwrap();
    assert!(table.contains("2 of 21 rows: score in 2"), "{table}");
}

#[test]
fn kept_answers_do_while_the_engine_is_away() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path()).display().to_string();
    let fake = FakeEngine::start();
    fake.on("/v1/models", [Reply::json(200, json!({"data": [{"id": "scripted"}]}))]);
    let answer = says("\\boxed{1}", "stop").1;
    fake.on("/v1/chat/completions", [Reply::json(200, answer)]);
    let (url, address) = (fake.url(), fake.address);
    let judge = |output: &str, further: &[&str]| {
        let mut command = oclaw_keeping(folder.path());
        command.current_dir(folder.path()).args(["judge", &input, "--cache", "answers.sqlite"]);
        command.args(["--engine", &url, "--retries", "0", "-o", output]).args(further).assert()
    };
    judge("judged.parquet", &[]).success();
    drop(fake);
    until("its port is closed", || std::net::TcpStream::connect(address).is_err());
    let again = judge("again.parquet", &[]).success();
    let told = String::from_utf8(again.get_output().stderr.clone()).unwrap();
    assert!(told.contains("only answers kept of `scripted`, met there before, are used"), "{told}");
    let mut stages = oclaw_keeping(folder.path());
    stages.current_dir(folder.path()).args(["replay", "--stages", ".", "--output-format", "json"]);
    assert_eq!(verdicts(&stages.assert().success()), pairs(&[("judge", "same")]));
    // One question more, and the engine is missed: nothing is written.
    judge("other.parquet", &["--votes", "4"]).code(4);
    assert!(!folder.path().join("other.parquet").exists());
    judge("other.parquet", &["--no-cache"]).code(4);
}

#[test]
fn what_cannot_be_made_again_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let turns = fixture("sessions/tiny.parquet").display().to_string();
    let path = folder.path().join("judged.parquet");
    stage(folder.path(), &["judge", &turns, "--rules", "-o", "judged.parquet"]);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}");
    let said = |argv: &[&str]| {
        rewrite(&path, &JUDGED, |_, provenance| {
            provenance.lines[0].argv = argv.iter().map(|word| (*word).to_owned()).collect();
        });
        let found = lines(&replay(folder.path(), &["--output-format", "json"]).code(3));
        let word = |key: &str| found[0][key].as_str().unwrap().to_owned();
        (word("verdict"), word("what"))
    };
    let (verdict, what) = said(&["judge", "x", "--engine", &url, "--retries", "0"]);
    assert!(
        verdict == "not_rerun" && what.contains("its engine is away: oclaw judge: cannot reach"),
        "{what}"
    );
    let (verdict, what) = said(&["judge", "x", "--rules=missing.toml"]);
    assert!(
        verdict == "failed" && what.contains("exit code 2: oclaw judge: missing.toml"),
        "{what}"
    );
    std::fs::remove_file(&path).unwrap();
    let none = replay(folder.path(), &[]).code(1);
    let told = String::from_utf8(none.get_output().stderr.clone()).unwrap();
    assert!(told.contains("no stage output with its command line in `.`"), "{told}");
    let both = replay(folder.path(), &["--engine", &url]).code(2);
    let told = String::from_utf8(both.get_output().stderr.clone()).unwrap();
    assert!(told.contains("'--stages <RUN>' cannot be used with '--engine <URL>'"), "{told}");
}

#[cfg(feature = "torch")]
#[test]
fn a_teachers_numbers_are_made_again() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path());
    std::fs::remove_file(folder.path().join("ready.parquet")).unwrap();
    let model = fixture("models/tiny-qwen3").display().to_string();
    let taught = ["teacher-lp", "hinted.parquet", "--model", &model, "-o", "taught.parquet"];
    stage(folder.path(), &[&taught[..], &["--topk", "0"]].concat());
    let same = replay(folder.path(), &["--output-format", "json"]).success();
    let verdicts = verdicts(&same);
    assert_eq!(verdicts, pairs(&[("judge", "same"), ("hint", "same"), ("teacher-lp", "same")]));
    let writers = [Writer::Serve, Writer::Judge, Writer::Hint, Writer::TeacherLp];
    rewrite(&folder.path().join("taught.parquet"), &writers, |turns, _| {
        let numbers = turns.iter_mut().filter_map(|turn| turn.teacher_log_probs.as_mut());
        let first = numbers.flatten().flatten().flatten().next().unwrap();
        *first -= 0.5;
    });
    let changed = lines(&replay(folder.path(), &["--output-format", "json"]).code(3));
    assert_eq!(
        (&changed[1]["verdict"], &changed[2]["verdict"]),
        (&json!("same"), &json!("changed"))
    );
    assert_eq!(changed[2]["columns"], json!({"teacher_log_probs": 1}));
}
