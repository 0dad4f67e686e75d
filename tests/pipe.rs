//! Whole pipes through a shell: formats chosen by where the output goes, cut
//! streams, readers that leave early.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use oclaw::table::{Format, read_turns};
use oclaw::trajectory::{Turn, Writer};

use crate::forge::{captured, write};

const SERVE: &[Writer] = &[Writer::Serve];

fn sh(folder: &Path, script: &str) -> Output {
    let mut command = Command::new("bash");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("OCLAW_") {
            command.env_remove(name);
        }
    }
    command
        .current_dir(folder)
        .env("oclaw", env!("CARGO_BIN_EXE_oclaw"))
        .stdin(Stdio::null())
        .args(["-o", "pipefail", "-c", script])
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn turns(count: u32) -> Vec<Turn> {
    (1..=count).map(|number| captured("a", number)).collect()
}

fn folder(count: u32) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("a.parquet"), Format::Parquet, SERVE, &turns(count));
    write(&folder.path().join("a.arrow"), Format::Ipc, SERVE, &turns(count));
    folder
}

fn magic(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()[..4].to_vec()
}

#[test]
fn the_output_decides_the_format() {
    let folder = folder(3);
    let at = |name: &str| folder.path().join(name);
    let script = r#"
        "$oclaw" judge --rules a.arrow -o path
        "$oclaw" judge --rules a.arrow > redirected
        "$oclaw" judge --rules a.parquet | cat > piped
        "$oclaw" judge --rules a.parquet --format parquet | cat > piped.parquet
        "$oclaw" judge --rules a.parquet --format ipc -o path.arrow
    "#;
    let output = sh(folder.path(), script);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for name in ["path", "redirected", "piped.parquet"] {
        assert_eq!(magic(&at(name)), b"PAR1", "{name}");
    }
    for name in ["piped", "path.arrow"] {
        assert_eq!(magic(&at(name)), [0xff; 4], "{name}");
    }
    let expected = read_turns(&[at("path")]).unwrap();
    assert_eq!(expected.len(), 3);
    for name in ["redirected", "piped", "piped.parquet", "path.arrow"] {
        assert_eq!(read_turns(&[at(name)]).unwrap(), expected, "{name}");
    }
}

#[test]
fn standard_input_may_be_a_file_a_pipe_or_a_name() {
    let folder = folder(3);
    let script = r#"
        for input in a.parquet a.arrow; do
            "$oclaw" view --json < $input | wc -l
            cat $input | "$oclaw" view --json | wc -l
            cat $input | "$oclaw" view --json - $input | wc -l
            "$oclaw" view --json <(cat $input) | wc -l
            cat $input | "$oclaw" judge --rules -q | "$oclaw" view --json --columns score,votes | wc -l
        done
    "#;
    let output = sh(folder.path(), script);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let counts: Vec<_> = text(&output.stdout).split_whitespace().map(str::to_owned).collect();
    assert_eq!(counts, ["3", "3", "6", "3", "3", "3", "3", "6", "3", "3"]);
}

#[test]
fn a_reader_may_leave_early() {
    let folder = folder(5000);
    for script in [
        r#""$oclaw" view a.parquet | head -1"#,
        r#""$oclaw" view --json a.parquet | head -1"#,
        r#""$oclaw" view --csv a.parquet | head -1"#,
        r#""$oclaw" judge --rules -q a.parquet | head -c 100 > /dev/null"#,
    ] {
        let output = sh(folder.path(), script);
        assert_eq!(output.status.code(), Some(0), "{script}: {}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "", "{script}");
    }
}

#[test]
fn a_cut_stream_fails_and_leaves_no_output() {
    let folder = folder(3);
    let script = r#"head -c -8 a.arrow | "$oclaw" judge --rules -o out.parquet"#;
    let output = sh(folder.path(), script);
    assert_eq!(output.status.code(), Some(1));
    let expected = "oclaw judge: `standard input` is cut short: the stream has no end mark; its \
        writer died or was stopped\nhint: the stage that wrote it did not finish: look at its message\n";
    assert_eq!(text(&output.stderr), expected);
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(names.len(), 2, "only the inputs");
}

#[test]
fn a_failed_stage_fails_the_next() {
    let folder = folder(3);
    let script = r#""$oclaw" judge --rules none.parquet | "$oclaw" view"#;
    let output = sh(folder.path(), script);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("oclaw judge: cannot read `none.parquet`"), "{stderr}");
    assert!(stderr.contains("oclaw view: `standard input` is empty: zero bytes"), "{stderr}");
}

#[test]
fn a_terminal_gets_no_table_and_gives_none() {
    let folder = folder(1);
    // `script` runs a command with a terminal as its input and output.
    let run = |command: &str| {
        let script = format!(r#"script -qec '{command}' /dev/null < /dev/null"#);
        let output = sh(folder.path(), &script);
        (output.status.code(), text(&output.stdout))
    };
    let (code, said) = run(r#""$oclaw" judge --rules a.parquet"#);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("oclaw judge: standard output is a terminal"), "{said}");
    assert!(said.contains("hint: write to a file with `-o FILE`"), "{said}");
    // Before anybody is asked, and before a bar is drawn.
    let (code, said) = run(r#""$oclaw" judge --engine http://127.0.0.1:1 a.parquet"#);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.starts_with("oclaw judge: standard output is a terminal"), "{said}");
    let (code, said) = run(r#""$oclaw" view"#);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("oclaw view: standard input is a terminal"), "{said}");
    let (code, said) = run(r#""$oclaw" view a.parquet"#);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn a_target_that_cannot_be_is_named_and_no_temporary_file() {
    let folder = folder(1);
    std::fs::create_dir(folder.path().join("locked")).unwrap();
    for (target, reason) in [
        ("none/out.parquet", "No such file or directory (os error 2)"),
        ("a.arrow/out.parquet", "Not a directory (os error 20)"),
        ("locked", "is a directory"),
        ("/proc/out.parquet", "(os error "),
    ] {
        let script = format!(r#""$oclaw" judge --rules a.parquet -o {target}"#);
        let output = sh(folder.path(), &script);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(&format!("oclaw judge: cannot write `{target}`: ")), "{stderr}");
        assert!(stderr.contains(reason) && !stderr.contains(".tmp-"), "{stderr}");
    }
}

/// What `explain` tells of each turn adds up to the loss that `train` had: the two
/// differ only by log-probs computed anew.
#[cfg(feature = "torch")]
#[track_caller]
fn the_shares_of_the_turns_are_the_loss(folder: &Path, loss: f64) {
    let turns = read_turns(&[folder.join("batch.parquet")]).unwrap();
    let (mut sum, mut trained) = (0.0, 0);
    for turn in &turns {
        let run = crate::harness::oclaw()
            .current_dir(folder)
            .args(["explain", "batch.parquet", "--json", "--turn", &turn.turn_id])
            .assert()
            .success();
        let told: serde_json::Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
        let share = &told["share"];
        assert!((share["batch_loss"].as_f64().unwrap() - loss).abs() < 1e-3, "{share}, {loss}");
        if let Some(part) = share["loss"].as_f64() {
            sum += part;
            trained += 1;
        }
    }
    assert_eq!(trained, 15);
    assert!((sum - loss).abs() < 1e-3, "{sum}, not {loss}");
}

/// Returns the commands of the README's first look, one text, and the words after
/// them that tell what a reader can check.
#[cfg(feature = "torch")]
fn first_look() -> (String, String) {
    let readme = std::fs::read_to_string(crate::harness::root().join("README.md")).unwrap();
    let (_, part) = readme.split_once("## A first look without a download").unwrap();
    let (_, part) = part.split_once("```sh\n").unwrap();
    let (commands, rest) = part.split_once("```").unwrap();
    let (promises, _) = rest.split_once("\n## ").unwrap();
    (commands.to_owned(), promises.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The lines of the README's first look as they stand there, and the numbers it
/// promises. They were recorded from a run in f32; another processor may move the
/// last digits.
#[cfg(feature = "torch")]
#[test]
fn the_readme_holds_on_the_recorded_session() {
    let folder = tempfile::tempdir().unwrap();
    let (commands, promises) = first_look();
    for figure in [
        "`lint` prints `21 rows, 0 findings`",
        "judge 15 turns, 8 as +1 and 7 as -1",
        "6 get the user's own correction as their hint",
        "the 552 trainable tokens has mean -2.3876 and std 5.3882",
        "the step has loss 2.1166 and gradient norm 24.1486",
        "by less than 0.0001 on average",
    ] {
        assert!(promises.contains(figure), "not `{figure}`: {promises}");
    }
    assert_eq!(commands.matches("oclaw view ").count(), 2, "{commands}");
    // In a folder of the test's own, with no answers of other runs, and with the
    // numbers of the step where they can be read.
    std::os::unix::fs::symlink(crate::harness::fixture(""), folder.path().join("fixtures"))
        .unwrap();
    let changed = [
        ("/tmp/", ""),
        ("oclaw teacher-lp", "oclaw teacher-lp --no-cache"),
        ("oclaw train", "oclaw train --metrics metrics.jsonl"),
    ];
    let mut script = format!("set -e\noclaw() {{ \"$oclaw\" \"$@\"; }}\n{commands}");
    for (written, run) in changed {
        assert!(script.contains(written), "{written}: {script}");
        script = script.replace(written, run);
    }
    let output = sh(folder.path(), &script);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told = text(&output.stdout);
    assert!(text(&output.stderr).contains("21 rows, 0 findings"), "{}", text(&output.stderr));
    // What `view` shows: five rows of all columns, five of those asked for.
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let tables: Vec<_> =
        told.lines().map(words).filter(|words| words.iter().any(|word| word == "turn")).collect();
    assert_eq!(tables.len(), 2, "{told}");
    assert!(
        ["session", "status", "asked", "answered"]
            .iter()
            .all(|head| tables[0].contains(&(*head).to_owned()))
    );
    assert_eq!(tables[1], ["session_id", "turn", "score", "sample_kind", "reward"], "{told}");
    assert_eq!(told.lines().count(), 2 * 6, "{told}");

    let turns = read_turns(&[folder.path().join("batch.parquet")]).unwrap();
    let scored = |score: f32| turns.iter().filter(|turn| turn.score == Some(score)).count();
    assert_eq!((turns.len(), scored(1.0), scored(-1.0)), (21, 8, 7));
    assert_eq!(turns.iter().filter(|turn| turn.hints.is_some()).count(), 6);

    let metrics = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    let metrics: serde_json::Value = serde_json::from_str(metrics.trim()).unwrap();
    assert_eq!((&metrics["turns"], &metrics["tokens"]), (&15.into(), &552.into()));
    let near = |name: &str, expected: f64, tolerance: f64| {
        let found = metrics[name].as_f64().unwrap();
        assert!((found - expected).abs() <= tolerance, "{name}: {found}, not {expected}");
    };
    near("loss", 2.1166, 1e-3);
    near("gradient_norm", 24.1486, 1e-2);
    near("advantage_mean", -2.3876, 1e-3);
    near("advantage_std", 5.3882, 1e-3);
    near("log_prob_gap", 0.0, 1e-4);
    the_shares_of_the_turns_are_the_loss(folder.path(), metrics["loss"].as_f64().unwrap());
}
