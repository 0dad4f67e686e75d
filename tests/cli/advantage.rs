//! `oclaw advantage` as it is called.

mod foreign;
mod spliced;
mod told;

use std::path::{Path, PathBuf};

use oclaw::table::{Format, Source};
use oclaw::trajectory::words::SampleKind;
use oclaw::trajectory::{Turn, Writer};

use super::judge::read;
use crate::forge::{STAGES, captured, finished, write};
use crate::harness::oclaw;

const TAUGHT: [Writer; 4] = [Writer::Serve, Writer::Judge, Writer::Hint, Writer::TeacherLp];

fn table(folder: &Path, writers: &[Writer], turns: &[Turn]) -> PathBuf {
    write(&folder.join("in.parquet"), Format::Parquet, writers, turns)
}

fn words(output: &std::process::Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_taught_table_gets_its_signal() {
    let folder = tempfile::tempdir().unwrap();
    let rewarded = Turn { reward_explicit: Some(1.0), ..captured("t", 1) };
    let turns = [finished("s", 1), rewarded, captured("u", 1)];
    let input = table(folder.path(), &TAUGHT, &turns);
    let output = folder.path().join("out.parquet");
    let mut command = oclaw();
    command.args(["advantage", "--estimator", "combine", "-o"]).args([&output, &input]);
    let run = command.assert().success();
    let kinds: Vec<_> = read(&output).iter().map(|turn| turn.sample_kind).collect();
    assert_eq!(kinds, [SampleKind::OpdRl, SampleKind::Rl, SampleKind::None].map(Some));
    let talk = words(run.get_output());
    for row in [
        "turns 3 opd+rl 1 opd 0 rl 1 none 1 promoted 0 refused 0",
        "no signal: not_judged, no_hint 1",
        "trainable tokens 6",
        "rows that need train's log-probs 1",
    ] {
        assert!(talk.contains(row), "{row}: {talk}");
    }
    assert!(run.get_output().stdout.is_empty());
    oclaw().arg("lint").arg(&output).assert().success();
}

/// What nobody chose is `hybrid`, and the table says so for `train`.
#[test]
fn the_default_is_hybrid() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), &TAUGHT, &[finished("s", 1), captured("t", 1)]);
    let noted = |name: &str, flags: &[&str]| {
        let output = folder.path().join(name);
        let mut command = oclaw();
        command.arg("advantage").args(flags).arg("-o").args([&output, &input]);
        let talk = words(command.assert().success().get_output());
        assert!(talk.contains("hybrid mean -1.0000"), "{talk}");
        let source = Source::open(std::slice::from_ref(&output)).unwrap();
        let argv = source.provenance().lines.last().unwrap().argv.clone();
        (read(&output), argv)
    };
    let (turns, argv) = noted("default.parquet", &[]);
    // The reward alone; the hints have a loss of their own in `train`.
    assert_eq!(turns[0].advantages, Some(vec![-1.0; 3]));
    assert!(argv.contains(&"--estimator=hybrid".to_owned()), "{argv:?}");
    assert_eq!(noted("told.parquet", &["--estimator", "hybrid"]).0, turns);
    let output = oclaw().args(["advantage", "--show-settings"]).assert().success();
    let shown = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let line = shown.lines().find(|line| line.starts_with("estimator ")).unwrap();
    assert!(line.ends_with("= hybrid  # default"), "{line}");
}

#[test]
fn a_missing_stage_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for (writers, estimator, column, stage) in [
        (&TAUGHT[..1], "grpo", "score", "judge"),
        (&TAUGHT[..2], "combine", "hints", "hint"),
        (&TAUGHT[..3], "opd", "teacher_log_probs", "teacher-lp"),
    ] {
        let input = table(folder.path(), writers, &[captured("s", 1)]);
        let output = folder.path().join("out.parquet");
        let run = oclaw()
            .args(["advantage", "--estimator", estimator, "-o"])
            .args([&output, &input])
            .assert()
            .code(1);
        let wanted = format!("there is no column `{column}`: run `oclaw {stage}` first");
        let talk = words(run.get_output());
        assert!(talk.contains(&wanted), "{talk}");
        assert!(!output.exists());
    }
    // A stated reward is a reward.
    let stated = Turn { reward_explicit: Some(1.0), ..captured("s", 1) };
    let input = table(folder.path(), &TAUGHT[..1], &[stated]);
    oclaw().args(["advantage", "--estimator", "grpo"]).arg(&input).assert().success();
    // But nothing said by the judge is no 0 in a sum.
    for estimators in ["--estimator=grpo", "--compare=grpo,gae"] {
        let mut command = oclaw();
        command.args(["advantage", estimators, "--shape=judged=0.5,explicit=0.5"]).arg(&input);
        let talk = words(command.assert().code(1).get_output());
        assert!(talk.contains("there is no column `score`: run `oclaw judge` first"), "{talk}");
    }
}

#[test]
fn a_broken_row_is_named_and_the_others_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let short = Turn { rollout_log_probs: Some(vec![Some(-0.5)]), ..finished("s", 2) };
    let input = table(folder.path(), &TAUGHT, &[finished("s", 1), short, finished("s", 3)]);
    let output = folder.path().join("out.parquet");
    oclaw().arg("advantage").arg("-o").args([&output, &input]).assert().code(3);
    let turns = read(&output);
    let error = "rollout_log_probs has 1 values for 3 response ids";
    assert_eq!(turns[1].advantage_error.as_deref(), Some(error));
    assert_eq!(turns[2].sample_kind, Some(SampleKind::OpdRl));
}

#[test]
fn a_second_run_must_be_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), &STAGES, &[finished("s", 1)]);
    let run = oclaw().arg("advantage").arg(&input).assert().code(2);
    assert!(words(run.get_output()).contains("hint: `--replace`"));
    let output = folder.path().join("out.parquet");
    let mut command = oclaw();
    command.args(["advantage", "--replace", "--estimator", "grpo", "-o"]);
    command.args([&output, &input]).assert().success();
    assert_eq!(read(&output)[0].rl_advantages, Some(vec![-1.0; 3]));
}

#[test]
fn the_rule_can_be_switched_off() {
    let folder = tempfile::tempdir().unwrap();
    let neutral = Turn { score: Some(0.0), ..captured("s", 1) };
    let input = table(folder.path(), &TAUGHT, &[neutral]);
    for (flag, promoted) in [("on", true), ("off", false)] {
        let output = folder.path().join(format!("{flag}.parquet"));
        let mut command = oclaw();
        command.args(["advantage", "--at-least-one", flag, "-o"]);
        command.args([&output, &input]).assert().success();
        assert_eq!(read(&output)[0].promoted, Some(promoted));
    }
}

#[test]
fn rows_are_grouped_by_any_column() {
    let folder = tempfile::tempdir().unwrap();
    let scored = |session: &str, number: u32, score: f32, prompt: Vec<i32>| Turn {
        score: Some(score),
        votes: Some(vec![Some(score as i8)]),
        prompt_ids: Some(prompt),
        ..captured(session, number)
    };
    let turns = [
        scored("s", 1, 1.0, vec![1, 2]),
        scored("t", 1, -1.0, vec![1, 2]),
        scored("s", 2, 1.0, vec![1, 3]),
    ];
    let input = table(folder.path(), &TAUGHT, &turns);
    for (column, wanted) in [
        ("prompt", [2.0, -2.0, 0.0]),
        ("session_id", [0.0, 0.0, 0.0]),
        ("model", [1.0, -2.0, 1.0]),
        ("turn_id", [0.0, 0.0, 0.0]),
    ] {
        let output = folder.path().join(format!("{column}.parquet"));
        let mut command = oclaw();
        command.args(["advantage", "--estimator", "rloo", "--group-by", column, "-o"]);
        command.args([&output, &input]).assert().success();
        let part = |turn: &Turn| turn.rl_advantages.as_ref().unwrap()[0];
        let found: Vec<f32> = read(&output).iter().map(part).collect();
        assert_eq!(found, wanted, "{column}");
        oclaw().arg("lint").arg(&output).assert().success();
    }
}

#[test]
fn what_an_estimator_cannot_use_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), &TAUGHT, &[finished("s", 1)]);
    for (words_given, told) in [
        ("rloo", "`rloo` compares the rewards of a group hint: say which rows are one"),
        ("reinforce++-baseline", "compares the rewards of a group"),
        ("opd --group-by prompt", "`opd` has no `--group-by`"),
        ("gae --group-by prompt", "`gae` has no `--group-by`"),
        ("grpo --gamma 0.9", "`grpo` has no `--gamma`"),
        ("reinforce++ --lambda 0.9", "`reinforce++` has no `--lambda`"),
        ("grpo --value-column score", "`grpo` has no `--value-column`"),
        ("gae --value-column model", "column `model` holds no numbers"),
        ("gae --value-column nowhere", "there is no column `nowhere`"),
        ("grpo --group-by nowhere", "there is no column `nowhere`"),
        ("grpo --group-by prompt --fill", "`--fill` would compare new rows with none of the old"),
        ("gae --fill", "`--fill` would compare"),
    ] {
        let mut command = oclaw();
        command.args(["advantage", "--estimator"]).args(words_given.split(' ')).arg(&input);
        let talk = words(command.assert().code(2).get_output());
        assert!(talk.contains(told), "{words_given}: {talk}");
    }
    let output = folder.path().join("gae.parquet");
    let mut command = oclaw();
    command.args(["advantage", "--estimator", "gae", "--value-column", "score", "-o"]);
    command.args([&output, &input]).assert().success();
    // -1 less the expected -1.
    assert_eq!(read(&output)[0].rl_advantages, Some(vec![0.0; 3]));
}

/// Two rows: one rewarded and taught, `lt - lo` = 0.5, -0.5, 0; one only punished.
fn to_compare(folder: &Path) -> PathBuf {
    let taught = Turn {
        score: Some(1.0),
        rollout_log_probs: Some(vec![Some(-1.0), Some(-2.0), Some(-0.5)]),
        teacher_log_probs: Some(vec![Some(vec![-0.5, -2.5, -0.5]), None]),
        ..finished("s", 1)
    };
    let punished = Turn {
        rollout_log_probs: Some(vec![Some(-1.0), Some(-2.0), Some(-0.5)]),
        score: Some(-1.0),
        votes: Some(vec![Some(-1)]),
        ..captured("t", 1)
    };
    table(folder, &TAUGHT, &[taught, punished])
}

#[test]
fn estimators_are_laid_side_by_side() {
    let folder = tempfile::tempdir().unwrap();
    let input = to_compare(folder.path());
    let compare = |words: &str| {
        let run = oclaw().arg("advantage").arg(&input).args(words.split(' ')).assert().success();
        String::from_utf8(run.get_output().stdout.clone()).unwrap()
    };
    let told: serde_json::Value =
        serde_json::from_str(&compare("--compare grpo,opd,combine --format json")).unwrap();
    // By hand: grpo is 1 1 1 and -1 -1 -1; opd 0.5 -0.5 0; combine 1.5 0.5 1 and -1 -1 -1.
    for (estimator, rows, tokens, effective, mean, size) in [
        ("grpo", 2, 6, 6, 0.0, 1.0),
        ("opd", 1, 3, 2, 0.0, 1.0 / 3.0),
        ("combine", 2, 6, 6, 0.0, 1.0),
    ] {
        let side = &told[estimator];
        assert_eq!(side["rows"], rows, "{estimator}");
        assert_eq!(side["tokens"], tokens, "{estimator}");
        assert_eq!(side["effective_tokens"], effective, "{estimator}");
        assert!((side["mean"].as_f64().unwrap() - mean).abs() < 1e-6, "{estimator}: {side}");
        assert!((side["mean_size"].as_f64().unwrap() - size).abs() < 1e-6, "{estimator}: {side}");
    }
    assert_eq!(told["grpo"]["clip_share"], serde_json::Value::Null);
    assert_eq!(told["opd"]["clip_share"], 0.0);
    let both = |one: &str, other: &str| told[one]["agreement"][other].clone();
    assert_eq!(both("grpo", "opd"), serde_json::json!({"tokens": 2, "same_sign": 0.5}));
    assert_eq!(both("opd", "combine"), serde_json::json!({"tokens": 2, "same_sign": 0.5}));
    assert_eq!(both("combine", "grpo"), serde_json::json!({"tokens": 6, "same_sign": 1.0}));

    let clipped = compare("--compare opd,combine --distill-clip 0.25 --format csv");
    let head = "estimator,rows,tokens,effective_tokens,mean,std,mean_size,min,max,clip_share,\
        same_sign_as_opd,same_sign_as_combine";
    let lines: Vec<&str> = clipped.lines().collect();
    assert_eq!(lines[0], head);
    // 0.25 -0.25 0: two of three are cut.
    assert!(
        lines[1].starts_with("opd,1,3,2,0,")
            && lines[1].contains(",-0.25,0.25,0.6666666666666666,,")
    );
    let text = compare("--compare grpo,hybrid");
    assert!(text.contains("same sign as hybrid") && text.contains("reward part"), "{text}");
}

#[test]
fn a_comparison_refuses_what_it_cannot_use() {
    let folder = tempfile::tempdir().unwrap();
    let input = to_compare(folder.path());
    for (words, wanted) in [
        ("--compare grpo", "two estimators or more"),
        ("--compare grpo,grpo", "two estimators or more"),
        ("--compare grpo,opd --gamma 0.9", "none of `grpo`, `opd` has `--gamma`"),
        ("--compare grpo,rloo", "`rloo` compares the rewards of a group"),
        ("--compare grpo,opd --fill", "`--compare` has no `--fill`"),
        ("--compare grpo,opd --format ipc", "`--compare` writes no table of turns"),
        ("--compare grpo,opd --estimator opd", "cannot be used with"),
    ] {
        let run = oclaw().arg("advantage").arg(&input).args(words.split(' ')).assert().code(2);
        let talk = self::words(run.get_output());
        assert!(talk.contains(wanted), "{words}: {talk}");
    }
    let untaught = table(folder.path(), &TAUGHT[..2], &[finished("s", 1)]);
    let run =
        oclaw().arg("advantage").arg(untaught).args(["--compare", "grpo,opd"]).assert().code(1);
    let talk = words(run.get_output());
    assert!(talk.contains("there is no column `hints`: run `oclaw hint` first"), "{talk}");
}
