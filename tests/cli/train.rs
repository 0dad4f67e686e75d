//! `oclaw train` as it is called, on a tiny model.

#[cfg(feature = "torch")]
mod estimators;

use std::path::{Path, PathBuf};

use oclaw::advantage::{self, Estimator, Method};
use oclaw::table::Format;
use oclaw::trajectory::Turn;
#[cfg(feature = "torch")]
use oclaw::trajectory::Writer;

#[cfg(feature = "torch")]
use crate::forge::captured;
use crate::forge::{STAGES, finished, write};
use crate::harness::{fixture_models as models, oclaw};

fn noted(turns: Vec<Turn>) -> Vec<Turn> {
    let method = Method::new(Estimator::Combine);
    turns.into_iter().map(|turn| advantage::note(turn, false, &method)).collect()
}

fn table(folder: &Path, turns: Vec<Turn>) -> PathBuf {
    write(&folder.join("batch.parquet"), Format::Parquet, &STAGES, &noted(turns))
}

fn train(folder: &Path) -> assert_cmd::Command {
    train_at(folder, "1e-3")
}

fn train_at(folder: &Path, learning_rate: &str) -> assert_cmd::Command {
    let mut command = oclaw();
    command.args(["train", "--lr", learning_rate, "--model"]).arg(models().join("tiny-qwen3"));
    command.arg("--out").arg(folder.join("policy"));
    command
}

fn words(output: &std::process::Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(feature = "torch")]
#[test]
fn a_batch_makes_a_policy() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), vec![finished("s", 1), captured("t", 1), finished("u", 1)]);
    let metrics = folder.path().join("metrics.jsonl");
    let run = train(folder.path()).arg("--metrics").args([&metrics, &input]).assert().success();
    let talk = words(run.get_output());
    for row in [
        "starting from the model as step 0",
        "step 1 turns 2 tokens trained 6",
        "not trained: 1 turns: not_judged, no_hint",
        "Is exploration collapsing? healthy entropy ",
        "Is it drifting off policy? ill log_prob_gap",
    ] {
        assert!(talk.contains(row), "{row}: {talk}");
    }
    assert!(run.get_output().stdout.is_empty());
    let policy = folder.path().join("policy/latest");
    for file in ["config.json", "model.safetensors", "oclaw/train.json", "oclaw/ledger.parquet"] {
        assert!(policy.join(file).exists(), "{file}");
    }
    let text = std::fs::read_to_string(&metrics).unwrap();
    let metrics: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(metrics["step"], 1);
    assert_eq!(metrics["reward"], -1.0);
    assert!(metrics["gradient_norm"].as_f64().unwrap() > 0.0);
    assert!(metrics["reference_kl"].is_null(), "not computed is not 0");
    // Again: every turn is in the ledger.
    let run = train(folder.path()).arg(&input).assert().success();
    let talk = words(run.get_output());
    assert!(talk.contains("resuming at step 1"), "{talk}");
    assert!(talk.contains("not trained: 2 turns: already_trained"), "{talk}");
    assert!(talk.contains("no step was made: 2 turns: already_trained;"), "{talk}");
    assert!(!folder.path().join("policy/step-000002").exists());
}

#[cfg(feature = "torch")]
#[test]
fn batches_are_steps_and_the_rest_waits() {
    let folder = tempfile::tempdir().unwrap();
    let turns = (1..=5).map(|number| finished("s", number)).collect();
    let input = table(folder.path(), turns);
    let run = train(folder.path()).args(["--batch-turns", "2"]).arg(&input).assert().success();
    let talk = words(run.get_output());
    assert!(talk.contains("1/2 turns wait for a full batch"), "{talk}");
    let latest = std::fs::read_link(folder.path().join("policy/latest")).unwrap();
    assert_eq!(latest, Path::new("step-000002"));
}

#[cfg(feature = "torch")]
#[test]
fn reasons_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let turns = vec![
        captured("a", 1),
        Turn { weight_version: Some("9".to_owned()), ..finished("b", 1) },
        Turn { weight_version: None, ..finished("c", 1) },
    ];
    let input = table(folder.path(), turns);
    let run = train(folder.path()).arg(&input).assert().success();
    let talk = words(run.get_output());
    for reason in ["not_judged, no_hint", "version_from_the_future", "version_missing"] {
        assert!(talk.contains(&format!("not trained: 1 turns: {reason}")), "{reason}: {talk}");
    }
    let told = "no step was made: 1 turn: not_judged, no_hint; 1 turn: version_from_the_future; 1 turn: version_missing";
    assert!(talk.contains(told), "{talk}");
    let versions = (1..=2).map(|n| Turn { weight_version: None, ..finished("v", n) }).collect();
    let missing = table(folder.path(), versions);
    let talk = words(train(folder.path()).arg(&missing).assert().success().get_output());
    let told = "no step was made: 2 turns: version_missing hint: `--version-alias none=0`";
    assert!(talk.contains(told), "{talk}");
    let mut aliased = train(folder.path());
    aliased.args(["--version-alias", "none=0", "--version-alias", "9=0"]);
    let run = aliased.arg(&input).assert().success();
    assert!(words(run.get_output()).contains("step 1 turns 2"));
}

#[cfg(feature = "torch")]
#[test]
fn broken_rows_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let foreign = Turn { prompt_ids: Some(vec![1, 4096]), ..finished("s", 2) };
    let input = table(folder.path(), vec![finished("s", 1), foreign.clone()]);
    let run = train(folder.path()).arg(&input).assert().code(3);
    let fault = "turn s-turn-2: token id 4096 is not among the model's 1024";
    assert!(words(run.get_output()).contains(fault));
    let input = table(folder.path(), vec![foreign]);
    let run = train(folder.path()).arg(&input).assert().code(1);
    assert!(words(run.get_output()).contains("every row is broken"));
    let mut impossible = finished("s", 2);
    if let Some(log_probs) = &mut impossible.rollout_log_probs {
        log_probs[0] = Some(5.0);
    }
    let input = table(folder.path(), vec![finished("s", 1), impossible]);
    let run = train(folder.path()).arg(&input).assert().code(3);
    let fault = "turn s-turn-2: rollout_log_probs is 5 at token 0, above 0";
    assert!(words(run.get_output()).contains(fault), "{}", words(run.get_output()));
    let poison = Turn { teacher_temperature: Some(0.0), ..finished("p", 1) };
    let sound = Turn { turn_id: "sound".to_owned(), ..finished("s", 1) };
    let input = table(folder.path(), vec![poison, sound]);
    let run = train(folder.path()).arg(&input).assert().code(3);
    let talk = words(run.get_output());
    assert!(talk.contains("turn p-turn-1: teacher_temperature is 0.0"), "{talk}");
    assert!(talk.contains("turns 1 tokens trained 3"), "{talk}");
}

#[cfg(feature = "torch")]
#[test]
fn a_step_that_is_not_finite_is_told_and_is_no_success() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), vec![finished("s", 1)]);
    let run = train(folder.path()).args(["--entropy-coef", "1e308"]).arg(&input).assert().code(3);
    let talk = words(run.get_output());
    for told in [
        "warning: step 1: its loss or gradient is not finite: no policy was made",
        "no step was made: 1 turn: not_finite_step hint: the loss or its gradient overflowed",
    ] {
        assert!(talk.contains(told), "{told}: {talk}");
    }
    assert!(!talk.contains("hardly differ"), "{talk}");
    assert!(!folder.path().join("policy").exists());
}

/// One turn of two whose loss overflows, in an update of its own.
#[cfg(feature = "torch")]
#[test]
fn a_part_that_is_not_finite_is_told_and_is_no_success() {
    let folder = tempfile::tempdir().unwrap();
    let mut turns = noted(vec![finished("s", 1), finished("s", 2)]);
    turns[0].rl_advantages = Some(vec![1000.0; 3]);
    turns[1].rl_advantages = Some(vec![1e-30; 3]);
    let input = write(&folder.path().join("in.parquet"), Format::Parquet, &STAGES, &turns);
    let mut command = train(folder.path());
    command.args(["--estimator", "grpo", "--mini-batches", "2"]);
    command.args(["--importance-low", "1e38", "--importance-high", "1e38"]);
    let run = command.arg(&input).assert().code(3);
    let talk = words(run.get_output());
    for told in [
        "warning: step 1: 1 updates were not finite and were skipped",
        "not trained: 1 turns: not_finite_step",
        "step 1 turns 1 tokens trained 3",
    ] {
        assert!(talk.contains(told), "{told}: {talk}");
    }
    let run = train(folder.path()).args(["--estimator", "grpo"]).arg(&input).assert();
    let talk = words(run.get_output());
    assert!(talk.contains("step 2 turns 1 tokens trained 3"), "{talk}");
}

/// A batch in which nothing pulls at the weights, beside one that makes a step and alone.
#[cfg(feature = "torch")]
#[test]
fn batches_without_any_advantage_are_told_of_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut turns = noted((1..=3).map(|number| finished("s", number)).collect());
    turns[0].rl_advantages = Some(vec![0.0; 3]);
    turns[2].rl_advantages = Some(vec![0.0; 3]);
    let path = folder.path().join("in.parquet");
    let input = write(&path, Format::Parquet, &STAGES, &turns);
    let grpo = || {
        let mut command = train(folder.path());
        command.args(["--estimator", "grpo", "--batch-turns", "1"]);
        command
    };
    let why = "every advantage is 0: the rewards of a group, or of the batch, are all alike";
    let talk = words(grpo().arg(&input).assert().success().get_output());
    assert!(talk.contains(&format!("warning: 2 batches made no step: {why}")), "{talk}");
    assert_eq!(talk.matches(why).count(), 1, "{talk}");
    let input = write(&path, Format::Parquet, &STAGES, &turns[..1]);
    let talk = words(grpo().arg(&input).assert().success().get_output());
    let told = format!("no step was made: 1 turn: zero_advantage hint: {why}");
    assert!(talk.contains(&told), "{talk}");
    assert_eq!(talk.matches(why).count(), 1, "{talk}");
}

#[cfg(feature = "torch")]
#[test]
fn a_missing_stage_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.parquet");
    let writers = [Writer::Serve, Writer::Judge];
    let input = write(&path, Format::Parquet, &writers, &[captured("s", 1)]);
    let run = train(folder.path()).arg(&input).assert().code(1);
    let wanted = "there is no column `sample_kind`: run `oclaw advantage` first";
    assert!(words(run.get_output()).contains(wanted));
    assert!(!folder.path().join("policy").exists());
}

#[cfg(feature = "torch")]
#[test]
fn the_reference_is_the_start_model() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), vec![finished("s", 1), finished("s", 2)]);
    let metrics = folder.path().join("metrics.jsonl");
    let mut command = train(folder.path());
    command.args(["--kl-coef", "0.1", "--epochs", "2", "--batch-turns", "1"]);
    command.arg("--metrics").args([&metrics, &input]).assert().success();
    let text = std::fs::read_to_string(&metrics).unwrap();
    let kl: Vec<f64> = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|line| line["reference_kl"].as_f64().unwrap())
        .collect();
    assert!(kl[0].abs() < 1e-6 && kl[1] > 1e-6, "{kl:?}");
}

#[test]
fn usage() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), vec![finished("s", 1)]);
    for rate in ["-1", "1e30", "nan"] {
        let run = train_at(folder.path(), rate).arg(&input).assert().code(2);
        let talk = words(run.get_output());
        let wanted = format!("'{rate}' for '--lr <X>': wanted a number from 0 to 1");
        assert!(talk.contains(&wanted), "{talk}");
    }
    for (flag, value) in [
        ("--dual-clip", "0.5"),
        ("--clip-low", "2"),
        ("--version-alias", "default"),
        ("--device", "cuda:0"),
        ("--batch-turns", "0"),
        ("--estimator", "ppo"),
    ] {
        train(folder.path()).args([flag, value]).arg(&input).assert().code(2);
    }
    let run = train(folder.path()).args(["--clip-norm", "-1"]).arg(&input).assert().code(2);
    let talk = words(run.get_output());
    assert!(talk.contains("'-1' for '--clip-norm <X>': wanted a number above 0"), "{talk}");
}

#[cfg(feature = "torch")]
#[test]
fn without_a_model_there_is_no_start() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), vec![finished("s", 1)]);
    let out = folder.path().join("policy");
    let run = oclaw().args(["train", "--out"]).args([&out, &input]).assert().code(2);
    let talk = words(run.get_output());
    assert!(talk.contains("hint: name the start model by `--model`"), "{talk}");
    std::fs::write(folder.path().join("file"), "").unwrap();
    let mut command = oclaw();
    command.args(["train", "--model"]).arg(models().join("tiny-qwen3")).arg("--out");
    let run = command.args([&folder.path().join("file"), &input]).assert().code(1);
    assert!(words(run.get_output()).contains("cannot be written"));
}

#[cfg(not(feature = "torch"))]
#[test]
fn a_build_without_torch_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let input = table(folder.path(), vec![finished("s", 1)]);
    let run = train(folder.path()).arg(&input).assert().code(2);
    assert!(words(run.get_output()).contains("needs the `torch` feature"));
}

#[cfg(feature = "torch")]
#[test]
fn hybrid_needs_the_top_k_columns() {
    let folder = tempfile::tempdir().unwrap();
    let hybrid = |turn: Turn| {
        let input = table(folder.path(), vec![turn]);
        let mut command = train(folder.path());
        command.args(["--estimator", "hybrid"]).arg(input);
        command
    };
    let token_level = Turn {
        topk: None,
        teacher_topk_ids: None,
        teacher_topk_log_probs: None,
        teacher_at_student: None,
        student_topk_ids: None,
        student_topk_log_probs: None,
        ..finished("s", 1)
    };
    let run = hybrid(token_level).assert().code(1);
    let wanted = "there is no column `teacher_topk_ids`: run `oclaw teacher-lp --topk 4` first";
    assert!(words(run.get_output()).contains(wanted));
    let run = hybrid(finished("s", 1)).assert().success();
    let talk = words(run.get_output());
    assert!(
        talk.contains("distillation loss -1.0") && talk.contains("ids taught 2.0000"),
        "{talk}"
    );
}

/// Two turns, of which one has hints and the other a reward.
#[cfg(feature = "torch")]
fn hinted(folder: &Path) -> PathBuf {
    let asked = |number: u32, score: f32, hints: Option<Vec<String>>| Turn {
        messages: r#"[{"role":"user","content":"Name a colour."}]"#.to_owned(),
        prompt_ids: Some(vec![78, 97, 109, 101]),
        response_ids: Some(vec![82, 101, 100, 1017]),
        rollout_log_probs: Some(vec![Some(-7.0); 4]),
        usage_completion_tokens: Some(4),
        score: Some(score),
        votes: Some(vec![Some(score as i8)]),
        hints,
        ..captured("s", number)
    };
    let hints = vec!["One word.".to_owned(), "Say blue, please.".to_owned()];
    let turns = [asked(1, 0.0, Some(hints)), asked(2, 1.0, None)];
    let stages = [Writer::Serve, Writer::Judge, Writer::Hint];
    write(&folder.join("hinted.parquet"), Format::Parquet, &stages, &turns)
}

/// From hints to a policy: every column that the hybrid loss reads is one that
/// `teacher-lp` really writes.
#[cfg(feature = "torch")]
#[test]
fn hybrid_trains_what_teacher_lp_writes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let hinted = hinted(folder.path());
    let (taught, noted) = (path("taught.parquet"), path("noted.parquet"));
    let mut command = oclaw();
    command.args(["teacher-lp", "--topk", "4", "--model"]).arg(models().join("tiny-qwen3"));
    command.arg("-o").args([&taught, &hinted]).assert().success();
    let mut command = oclaw();
    command.args(["advantage", "--estimator", "hybrid", "-o"]).args([&noted, &taught]);
    command.assert().success();
    oclaw().arg("lint").arg(&noted).assert().success();
    for flags in ["--subset student", "--subset teacher --hint-selection token"] {
        let metrics = path("metrics.jsonl");
        let out = tempfile::tempdir().unwrap();
        let mut command = train(out.path());
        command.args(["--estimator", "hybrid", "--metrics"]).arg(&metrics);
        command.args(flags.split(' ')).arg(&noted).assert().success();
        let text = std::fs::read_to_string(&metrics).unwrap();
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!((&last["turns"], &last["subset_size"]), (&2.into(), &4.0.into()), "{last}");
        assert!(last["distill_gap"].as_f64().unwrap() > 0.0, "{last}");
        assert!(last["distill_loss"].is_number() && last["gradient_norm"].is_number(), "{last}");
    }
}

/// A run that comes to no policy takes away what it made: the folder with those
/// above it, the lock file, the file of metrics.
#[cfg(feature = "torch")]
#[test]
fn a_run_without_a_policy_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let model = models().join("tiny-qwen3");
    let copy = |name: &str, change: &dyn Fn(String) -> String| {
        std::fs::create_dir(path(name)).unwrap();
        for entry in std::fs::read_dir(&model).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), path(name).join(entry.file_name())).unwrap();
        }
        let config = std::fs::read_to_string(model.join("config.json")).unwrap();
        std::fs::write(path(name).join("config.json"), change(config)).unwrap();
        path(name)
    };
    let foreign = copy("foreign", &|config| config.replace("Qwen3ForCausalLM", "MambaForCausalLM"));
    let broken = copy("broken", &|config| config);
    std::fs::write(broken.join("model.safetensors"), "no weights").unwrap();
    let good = table(folder.path(), vec![finished("s", 1)]);
    let silent =
        write(&path("silent.parquet"), Format::Parquet, &STAGES, &noted(vec![captured("a", 1)]));
    let cut = path("cut.parquet");
    std::fs::write(&cut, &std::fs::read(&good).unwrap()[..400]).unwrap();
    let foreign_id = Turn { prompt_ids: Some(vec![1, 4096]), ..finished("s", 2) };
    let faulty = write(&path("faulty.parquet"), Format::Parquet, &STAGES, &noted(vec![foreign_id]));
    let no_topk = Turn { teacher_topk_ids: None, student_topk_ids: None, ..finished("s", 1) };
    let no_topk = write(&path("no_topk.parquet"), Format::Parquet, &STAGES, &noted(vec![no_topk]));
    let combine = ["--estimator", "combine"];
    let hybrid = ["--estimator", "hybrid"];
    for (model, flags, input, code) in [
        (&path("none"), combine, &good, 1),
        (&foreign, combine, &good, 1),
        (&broken, combine, &good, 1),
        (&model, combine, &path("none.parquet"), 1),
        (&model, combine, &cut, 1),
        (&model, combine, &faulty, 1),
        (&model, hybrid, &no_topk, 1),
        (&model, ["--lr", "1"], &good, 1),
        (&model, combine, &silent, 0),
    ] {
        let mut command = oclaw();
        command.args(["train", "--model"]).arg(model).arg("--out").arg(path("runs/one/policy"));
        command.arg("--metrics").arg(path("metrics.jsonl")).args(flags).arg(input);
        let run = command.assert().code(code);
        let talk = words(run.get_output());
        assert!(!path("runs").exists(), "{}: {talk}", input.display());
        assert!(!path("metrics.jsonl").exists(), "{}: {talk}", input.display());
    }
    // What was there stays as it was.
    std::fs::create_dir(path("policy")).unwrap();
    train(folder.path()).arg(&silent).assert().success();
    assert_eq!(std::fs::read_dir(path("policy")).unwrap().count(), 0);
    train(folder.path()).arg(&good).assert().success();
    let metrics = path("metrics.jsonl");
    std::fs::write(&metrics, "").unwrap();
    train(folder.path()).arg("--metrics").arg(&metrics).arg(&silent).assert().success();
    assert!(path("policy/latest").exists() && metrics.exists());
}

/// A learning rate that leaves finite weights and a finite loss, and a model that
/// is none any more.
#[cfg(feature = "torch")]
#[test]
fn a_ruined_policy_is_not_published() {
    for (score, lr) in [(1.0, "1"), (-1.0, "1"), (-1.0, "0.1")] {
        let folder = tempfile::tempdir().unwrap();
        let judged = |number| Turn { score: Some(score), hints: None, ..captured("s", number) };
        let input = table(folder.path(), vec![judged(1), judged(2)]);
        train(folder.path()).args(["--batch-turns", "1"]).arg(&input).assert().success();
        let more = write(
            &folder.path().join("more.parquet"),
            Format::Parquet,
            &STAGES,
            &noted(vec![judged(3), judged(4)]),
        );
        let ledger = folder.path().join("policy/latest/oclaw/ledger.parquet");
        let before = std::fs::read(&ledger).unwrap();
        let run = train_at(folder.path(), lr).arg(&more).assert().code(1);
        let talk = words(run.get_output());
        assert!(talk.contains("oclaw train: step 3: the log-probs of the batch's"), "{talk}");
        assert!(talk.contains("nats on average, and at most 5 is sound"), "{talk}");
        assert!(talk.contains("hint: lower `--lr`"), "{talk}");
        let latest = std::fs::read_link(folder.path().join("policy/latest")).unwrap();
        assert_eq!(latest, Path::new("step-000002"));
        assert_eq!(std::fs::read(&ledger).unwrap(), before);
        let mut names: Vec<_> = std::fs::read_dir(folder.path().join("policy"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, [".lock", "latest", "step-000001", "step-000002"]);
        // The same turns are trained at a rate that is sound.
        train(folder.path()).arg(&more).assert().success();
        assert!(folder.path().join("policy/step-000003").exists());
    }
}
