//! `oclaw view`.

use std::path::PathBuf;

use oclaw::table::Format;
use oclaw::trajectory::{Turn, Writer};

use crate::forge::{STAGES, captured, finished, write};
use crate::harness::oclaw;

struct Viewed {
    folder: tempfile::TempDir,
}

impl Viewed {
    fn new(writers: &[Writer], turns: &[Turn]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join("t.parquet"), Format::Parquet, writers, turns);
        Self { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("t.parquet")
    }

    fn run(&self, arguments: &[&str]) -> String {
        let output = oclaw().arg("view").arg(self.path()).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty());
        String::from_utf8(output.stdout).unwrap()
    }
}

#[test]
fn a_line_per_turn() {
    let viewed = Viewed::new(&STAGES, &[finished("abc", 1), finished("abc", 2)]);
    let expected = "\
session  turn  status    next  score  reward  sample  tokens  asked           answered
abc         1  complete  user     -1      -1  opd+rl       3  What is 2 + 2?  It is 5.
abc         2  complete  user     -1      -1  opd+rl       3  What is 2 + 2?  It is 5.
";
    let shown = viewed.run(&[]);
    let lines: Vec<_> = shown.lines().map(str::trim).collect();
    assert_eq!(lines, expected.lines().collect::<Vec<_>>());
    assert_eq!(viewed.run(&["-n", "1"]).lines().count(), 2);
}

#[test]
fn text_forges_no_line_and_is_cut_visibly() {
    let mut turn = captured("s\n\u{1b}[31mfake", 1);
    turn.response = serde_json::json!({
        "role": "assistant",
        "content": format!("one\ntwo\u{202e}three\r{}", "long ".repeat(100)),
    })
    .to_string();
    let viewed = Viewed::new(&[Writer::Serve], &[turn]);
    let shown = viewed.run(&[]);
    assert_eq!(shown.lines().count(), 2, "{shown}");
    assert!(shown.contains("s\\n\\u{1b}[31m"), "{shown}");
    assert!(shown.contains("one\\ntwo\\u{202e}"), "{shown}");
    assert!(shown.trim_end().ends_with('…'), "{shown}");
    assert!(!shown.contains('\u{1b}') && !shown.contains('\r'));
}

#[test]
fn json_has_every_column_and_keeps_nulls() {
    let viewed = Viewed::new(&STAGES, &[finished("a", 1), finished("a", 2)]);
    let text = viewed.run(&["--json"]);
    let rows: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    let names: Vec<_> = rows[0].as_object().unwrap().keys().map(String::as_str).collect();
    let columns: Vec<_> = oclaw::trajectory::columns().iter().map(|column| column.name).collect();
    assert_eq!(names, columns);
    assert_eq!(rows[0]["tools"], serde_json::Value::Null);
    assert_eq!(rows[1]["turn"], 2);
    assert_eq!(rows[1]["teacher_log_probs"].to_string(), "[[-0.1,-0.2,-0.3],null]");
    assert_eq!(viewed.run(&["--json", "-n", "0"]), "");
}

#[test]
fn csv_has_lists_as_json() {
    let viewed = Viewed::new(&STAGES, &[finished("a,b", 1)]);
    let text =
        viewed.run(&["--csv", "--columns", "session_id,response_ids,tools,rollout_log_probs"]);
    let expected = "session_id,response_ids,tools,rollout_log_probs\n\
        \"a,b\",\"[5,6,2]\",,\"[-0.5,-1.25,null]\"\n";
    assert_eq!(text, expected);
    let all = viewed.run(&["--csv"]);
    let mut reader = csv::Reader::from_reader(all.as_bytes());
    assert_eq!(reader.headers().unwrap().len(), oclaw::trajectory::columns().len());
    assert_eq!(reader.records().count(), 1);
}

#[test]
fn columns_are_chosen_by_name() {
    let viewed = Viewed::new(&[Writer::Serve], &[captured("a", 1)]);
    let text = viewed.run(&["--columns", "turn,tools,prompt_ids"]);
    let words: Vec<_> = text.split_whitespace().collect();
    assert_eq!(words, ["turn", "tools", "prompt_ids", "1", "-", "[1,2,3,4]"]);
    let refused =
        oclaw().arg("view").arg(viewed.path()).args(["--columns", "mood"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(
        stderr.starts_with("oclaw view: there is no column `mood`\nhint: there are session_id, "),
        "{stderr}"
    );
}

#[test]
fn the_schema_needs_no_input() {
    let output = oclaw().args(["view", "--schema"]).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        text.lines().next().unwrap().split_whitespace().collect::<Vec<_>>(),
        ["column", "type", "null", "writer", "meaning"]
    );
    for column in oclaw::trajectory::columns() {
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(column.name));
        let line = line.unwrap_or_else(|| panic!("no line for {}", column.name));
        assert!(line.contains(column.writer.command()), "{line}");
    }
    let viewed = Viewed::new(&[Writer::Serve], &[]);
    assert!(!viewed.run(&["--schema"]).contains("judge_error"));
}

#[test]
fn errors_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str| {
        let output = oclaw().current_dir(folder.path()).args(["view", name]).output().unwrap();
        assert!(output.stdout.is_empty());
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let none = "oclaw view: cannot read `none.parquet`: No such file or directory (os error 2)\n";
    assert_eq!(run("none.parquet"), (Some(1), none.to_owned()));
    std::fs::write(folder.path().join("x"), "hello").unwrap();
    let foreign = "oclaw view: `x` is no table: it starts with `hello`, wanted Parquet or an Arrow IPC stream\n";
    assert_eq!(run("x"), (Some(1), foreign.to_owned()));
    std::fs::write(folder.path().join("y"), "").unwrap();
    assert_eq!(run("y"), (Some(1), "oclaw view: `y` is empty: zero bytes\n".to_owned()));
}

#[test]
fn a_full_disk_is_told() {
    let viewed = Viewed::new(&STAGES, &[finished("abc", 1)]);
    // A stage says where its table came from: there is provenance to be written.
    let judged = viewed.folder.path().join("judged.parquet");
    oclaw()
        .args(["judge", "--rules", "--replace", "-o"])
        .args([&judged, &viewed.path()])
        .assert()
        .success();
    for format in ["--json", "--csv", "--columns=turn", "--provenance", "--schema", "--count=9"] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_oclaw"));
        let output = command.arg("view").arg(&judged).arg(format).stdout(full).output();
        let output = output.unwrap();
        let talk = String::from_utf8(output.stderr).unwrap();
        let wanted = "oclaw view: cannot write to standard output: No space left on device";
        assert_eq!(output.status.code(), Some(1), "{format}: {talk}");
        assert!(talk.starts_with(wanted), "{format}: {talk}");
    }
}

#[test]
fn a_spool_of_open_turns_says_how_they_become_rows() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join(".journal")).unwrap();
    for stage in [&["view"][..], &["judge", "--rules", "-o", "out.parquet"]] {
        let output = oclaw().current_dir(folder.path()).args(stage).arg(".").output().unwrap();
        let talk = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{talk}");
        let wanted = "`.`: no table found, only the journal of turns that are still open\nhint: ";
        assert!(talk.contains(wanted), "{talk}");
        assert!(talk.contains("`--session-idle`") && talk.contains("`--flush-open`"), "{talk}");
    }
    std::fs::remove_dir(folder.path().join(".journal")).unwrap();
    let output = oclaw().current_dir(folder.path()).args(["view", "."]).output().unwrap();
    let talk = String::from_utf8(output.stderr).unwrap();
    assert_eq!(talk, "oclaw view: `.`: no table found (no `*.parquet` in the folder)\n");
}
