//! By which estimator a table is trained: the one that is given, or that it was made with.

use std::path::Path;

use oclaw::table::Format;
use oclaw::trajectory::Writer;

use super::{hinted, train, words};
use crate::forge::{finished, write, write_made};
use crate::harness::{fixture_models as models, oclaw};

#[test]
fn another_estimator_than_the_tables_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let taught = [Writer::Serve, Writer::Judge, Writer::Hint, Writer::TeacherLp];
    let path = folder.path().join("in.parquet");
    let input = write(&path, Format::Parquet, &taught, &[finished("s", 1), finished("s", 2)]);
    let noted = folder.path().join("noted.parquet");
    let mut command = oclaw();
    command.args(["advantage", "--estimator", "grpo", "-o"]).args([&noted, &input]);
    command.assert().success();
    let run = train(folder.path()).args(["--estimator", "rloo"]).arg(&noted).assert().code(2);
    let talk = words(run.get_output());
    let told = "the table's reward part is that of `grpo`, not of `rloo` hint: run `oclaw \
                advantage --replace --estimator rloo`";
    assert!(talk.contains(told), "{talk}");
    let run = train(folder.path()).args(["--estimator", "combine"]).arg(&noted).assert().success();
    let talk = words(run.get_output());
    let told = "the table was made with `grpo`, training is with `combine`: its reward part stays";
    assert!(talk.contains(told), "{talk}");
    // The estimator need not stand on the command line to be recorded.
    let combined = folder.path().join("combined.parquet");
    oclaw().args(["advantage", "-o"]).args([&combined, &input]).assert().success();
    let run = train(folder.path()).arg(&combined).assert().success();
    assert!(!words(run.get_output()).contains("was made with"));
}

/// Returns the estimator that the newest policy's record tells.
fn recorded(folder: &Path) -> String {
    let record = std::fs::read(folder.join("policy/latest/oclaw/train.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    record["settings"]["estimator"].as_str().unwrap().to_owned()
}

/// What each stage does by default is what the next one needs; where it was told to do
/// less, the stage and the flag are named.
#[test]
fn the_defaults_of_the_stages_fit_together() {
    let folder = tempfile::tempdir().unwrap();
    let hinted = hinted(folder.path());
    let noted = |flags: &[&str]| {
        let path = |name: &str| folder.path().join(format!("{name}{}.parquet", flags.len()));
        let (taught, noted) = (path("taught"), path("noted"));
        let mut command = oclaw();
        command.args(["teacher-lp", "--model"]).arg(models().join("tiny-qwen3")).args(flags);
        command.arg("-o").args([&taught, &hinted]).assert().success();
        oclaw().args(["advantage", "-o"]).args([&noted, &taught]).assert().success();
        noted
    };
    let run = train(folder.path()).arg(noted(&["--topk", "0"])).assert().code(1);
    let wanted = "there is no column `teacher_topk_ids`: run `oclaw teacher-lp --topk 4` first \
                  hint: or train by the sampled tokens alone: `--estimator combine`";
    let talk = words(run.get_output());
    assert!(talk.contains(wanted), "{talk}");
    let run = train(folder.path()).arg(noted(&[])).assert().success();
    let talk = words(run.get_output());
    assert!(talk.contains("distillation loss") && talk.contains("ids taught 4.0000"), "{talk}");
    assert!(!talk.contains("the estimator is") && !talk.contains("was made with"), "{talk}");
    assert_eq!(recorded(folder.path()), "hybrid");
}

/// Who is told no estimator trains by the one that made the table.
#[test]
fn a_table_is_trained_as_it_was_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let judged = [Writer::Serve, Writer::Judge];
    let turns = [finished("s", 1), finished("s", 2)];
    let input = write(&path("judged.parquet"), Format::Parquet, &judged, &turns);
    let noted = path("noted.parquet");
    let mut command = oclaw();
    command.args(["advantage", "--estimator", "grpo", "-o"]).args([&noted, &input]);
    command.assert().success();
    let flags = ["--subset", "teacher", "--batch-turns", "1"];
    let run = train(folder.path()).args(flags).arg(&noted).assert().success();
    let talk = words(run.get_output());
    for told in [
        "the estimator is `grpo`, as the table's",
        "note: `--subset` does nothing under `--estimator grpo`",
        "step 2 turns 1 tokens trained 3",
    ] {
        assert!(talk.contains(told), "{told}: {talk}");
    }
    assert_eq!(recorded(folder.path()), "grpo");
    // What is given goes before it, be it the default.
    let run = train(folder.path()).args(["--estimator", "hybrid"]).arg(&noted).assert().code(1);
    let talk = words(run.get_output());
    let lacks = "there is no column `teacher_log_probs`: run `oclaw teacher-lp` first";
    assert!(talk.contains(lacks), "{talk}");
}

/// Of tables that were made by different estimators none decides for the others, and a
/// reward part of another estimator is found in any of them.
#[test]
fn tables_of_different_estimators_need_a_word() {
    let folder = tempfile::tempdir().unwrap();
    let made = |name: &str, estimator: &str, number: u32| {
        write_made(&folder.path().join(name), estimator, &[finished("s", number)])
    };
    let (combine, hybrid) = (made("c.parquet", "combine", 1), made("h.parquet", "hybrid", 2));
    let (grpo, rloo) = (made("g.parquet", "grpo", 3), made("r.parquet", "rloo", 4));
    for (inputs, one, other) in [
        ([&combine, &hybrid], "c.parquet` was made with `combine`", "h.parquet` with `hybrid`"),
        ([&hybrid, &combine], "h.parquet` was made with `hybrid`", "c.parquet` with `combine`"),
        ([&grpo, &rloo], "g.parquet` was made with `grpo`", "r.parquet` with `rloo`"),
    ] {
        let run = train(folder.path()).args(inputs).assert().code(2);
        let talk = words(run.get_output());
        for told in [one, other, "hint: say by `--estimator`"] {
            assert!(talk.contains(told), "{told}: {talk}");
        }
    }
    for inputs in [[&grpo, &rloo], [&rloo, &grpo]] {
        let mut command = train(folder.path());
        let run = command.args(["--estimator", "rloo"]).args(inputs).assert().code(2);
        let talk = words(run.get_output());
        let told = "g.parquet`'s reward part is that of `grpo`, not of `rloo` hint: run";
        assert!(talk.contains(told), "{talk}");
    }
    assert!(!folder.path().join("policy").exists());
    let mut command = train(folder.path());
    command.env("OCLAW_TRAIN_ESTIMATOR", "combine").args([&combine, &hybrid]);
    let talk = words(command.assert().success().get_output());
    let told = "h.parquet` was made with `hybrid`, training is with `combine`";
    assert!(talk.contains(told) && !talk.contains("c.parquet"), "{talk}");
    assert_eq!(recorded(folder.path()), "combine");
    // Those that agree decide as one does.
    let more = [made("more.parquet", "grpo", 5), grpo];
    let talk = words(train(folder.path()).args(&more).assert().success().get_output());
    assert!(talk.contains("the estimator is `grpo`, as the table's"), "{talk}");
    assert!(!talk.contains("was made with"), "{talk}");
    assert_eq!(recorded(folder.path()), "grpo");
}
