//! `oclaw import`: files in, a sound table or nothing out.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use oclaw::table::{Source, read_turns};

use crate::harness::{fixture, fixture_models as models, oclaw};

fn run(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = oclaw().current_dir(folder).arg("import").args(arguments).output().unwrap();
    assert!(output.stdout.is_empty());
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn shared(name: &str) -> String {
    fixture("interchange").join(name).display().to_string()
}

fn lint(folder: &Path, file: &str) -> String {
    let output = oclaw().current_dir(folder).args(["lint", file]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn every_shape_becomes_a_table_that_lint_passes() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3").display().to_string();
    for (name, rows) in [
        ("openai.jsonl", 4),
        ("pairs.jsonl", 5),
        ("record.jsonl", 4),
        ("sharegpt.json", 3),
        ("sharegpt-tools.jsonl", 2),
        ("replaced.jsonl", 1),
    ] {
        for tokenizer in [&[][..], &["--tokenizer", &model]] {
            let file = shared(name);
            let arguments = [&[file.as_str(), "-o", "out.parquet"][..], tokenizer].concat();
            let (code, talk) = run(folder.path(), &arguments);
            assert_eq!(code, Some(0), "{talk}");
            assert_eq!(lint(folder.path(), "out.parquet"), format!("{rows} rows, 0 findings\n"));
        }
    }
}

#[test]
fn several_files_go_into_one_shard_of_a_spool() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("spool")).unwrap();
    let files = [shared("openai.jsonl"), shared("record.jsonl")];
    let (code, talk) = run(folder.path(), &[&files[0], &files[1], "-o", "spool"]);
    assert_eq!(code, Some(0), "{talk}");
    let said: Vec<_> = talk.split_whitespace().collect();
    assert!(said.windows(2).any(|pair| pair == ["rows", "8"]), "{talk}");
    assert_eq!(read_turns(&[folder.path().join("spool")]).unwrap().len(), 8);
    assert_eq!(lint(folder.path(), "spool"), "8 rows, 0 findings\n");
}

#[test]
fn one_bad_line_stops_all_unless_it_may_be_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let bad = shared("malformed.jsonl");
    let (code, talk) = run(folder.path(), &[&bad, "-o", "out.parquet"]);
    assert_eq!(code, Some(1));
    assert!(talk.contains(&format!("{bad}:3: `messages` is empty\n")), "{talk}");
    let end = "oclaw import: 24 malformed lines; nothing was written\nhint: `--skip-bad` leaves them out\n";
    assert!(talk.ends_with(end), "{talk}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

    let (code, talk) = run(folder.path(), &[&bad, "--skip-bad", "-o", "out.parquet"]);
    assert_eq!(code, Some(3), "{talk}");
    assert_eq!(lint(folder.path(), "out.parquet"), "1 rows, 0 findings\n");
}

#[test]
fn a_stated_shape_refuses_others() {
    let folder = tempfile::tempdir().unwrap();
    let (code, talk) =
        run(folder.path(), &["--from", "sharegpt", &shared("openai.jsonl"), "-o", "out.parquet"]);
    assert_eq!(code, Some(1));
    assert!(talk.contains("openai.jsonl:1: `conversations` is no list\n"), "{talk}");
}

#[test]
fn a_folder_gets_no_ipc() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("spool")).unwrap();
    let (code, talk) =
        run(folder.path(), &[&shared("openai.jsonl"), "-o", "spool", "--format", "ipc"]);
    assert_eq!(code, Some(2));
    let expected = "oclaw import: a folder gets a shard, which is Parquet\n\
        hint: leave `--format` out, or name a file by `-o FILE`\n";
    assert_eq!(talk, expected);
    assert_eq!(std::fs::read_dir(folder.path().join("spool")).unwrap().count(), 0);
}

/// What the table says of its making names no password, and any name of a file
/// can be told.
#[test]
fn the_command_line_is_noted_as_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let odd = std::ffi::OsStr::from_bytes(b"caf\xe9.jsonl");
    std::fs::copy(shared("openai.jsonl"), folder.path().join(odd)).unwrap();
    let place = folder.path().join("http:/me:secret@host");
    std::fs::create_dir_all(&place).unwrap();
    let output = oclaw()
        .current_dir(folder.path())
        .args(["import", "-o", "http://me:secret@host/out.parquet"])
        .arg(odd)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let source = Source::open(&[place.join("out.parquet")]).unwrap();
    let argv = &source.provenance().lines[0].argv;
    let expected = ["import", "-o", "http://…@host/out.parquet", "caf\u{fffd}.jsonl"];
    assert_eq!(argv[..], expected);
}

#[test]
fn what_the_tokenizer_could_not_do_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3").display().to_string();
    let picture = concat!(
        r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}, "#,
        r#"{"role": "assistant", "content": "A dog."}]}"#
    );
    std::fs::write(folder.path().join("in.jsonl"), picture).unwrap();
    let (code, talk) =
        run(folder.path(), &["in.jsonl", "--tokenizer", &model, "-o", "out.parquet"]);
    assert_eq!(code, Some(0), "{talk}");
    let talk = talk.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = "rows of which no ids could be made 1 the first of them unsupported content: a part of type";
    assert!(talk.contains(expected), "{talk}");
}
