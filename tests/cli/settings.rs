//! Flag over environment over file over default, for every flag alike.

use std::fs;

use crate::harness::oclaw;

/// Resolves the settings of `sync-weights` and returns the line of `--tries`.
fn tries(
    folder: &tempfile::TempDir,
    config: Option<&str>,
    env: Option<&str>,
    flag: Option<&str>,
) -> String {
    let mut command = oclaw();
    command.args(["sync-weights", "policy", "--engine", "http://127.0.0.1:1", "--show-settings"]);
    if let Some(text) = config {
        let path = folder.path().join("oclaw.toml");
        fs::write(&path, text).unwrap();
        command.arg("--config").arg("oclaw.toml");
    }
    if let Some(value) = env {
        command.env("OCLAW_SYNC_WEIGHTS_TRIES", value);
    }
    if let Some(value) = flag {
        command.args(["--tries", value]);
    }
    let output = command.current_dir(folder.path()).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let line = text.lines().find(|line| line.starts_with("tries ")).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn flag_over_environment_over_file_over_default() {
    let folder = tempfile::tempdir().unwrap();
    let file = Some("# a comment\n[sync-weights]\ntries = 5\n");
    assert_eq!(tries(&folder, None, None, None), "tries = 3 # default");
    assert_eq!(tries(&folder, file, None, None), "tries = 5 # oclaw.toml:3");
    assert_eq!(tries(&folder, file, Some("6"), None), "tries = 6 # OCLAW_SYNC_WEIGHTS_TRIES");
    assert_eq!(tries(&folder, file, Some("6"), Some("7")), "tries = 7 # command line");
    assert_eq!(tries(&folder, Some(""), None, None), "tries = 3 # default");
}

/// Runs with a configuration file that must be refused; returns the message.
fn refused(config: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("oclaw.toml"), config).unwrap();
    let output = oclaw()
        .args([
            "sync-weights",
            "policy",
            "--engine",
            "http://127.0.0.1:1",
            "--config",
            "oclaw.toml",
        ])
        .current_dir(folder.path())
        .assert()
        .code(2);
    assert!(output.get_output().stdout.is_empty());
    String::from_utf8(output.get_output().stderr.clone()).unwrap()
}

#[test]
fn a_misspelt_setting_stops_the_program_with_its_line() {
    let message = refused("[sync-weights]\ntrys = 5\n");
    assert!(
        message.contains("`oclaw.toml` line 2: no setting `trys` in `[sync-weights]`"),
        "{message}"
    );
    assert!(message.contains("`tries`"), "{message}");
}

#[test]
fn a_misspelt_section_stops_the_program_with_its_line() {
    let message = refused("\n[sync_weights]\ntries = 5\n");
    assert!(message.contains("line 3: no section `[sync_weights]`"), "{message}");
    assert!(message.contains("`sync-weights`"), "{message}");
}

#[test]
fn a_key_in_the_wrong_place_a_wrong_type_and_broken_toml_are_refused() {
    let message = refused("tries = 5\n");
    assert!(message.contains("line 1: no setting `tries` at the top"), "{message}");
    let message = refused("[sync-weights]\ntries = \"many\"\n");
    assert!(message.contains("invalid value 'many' for '--tries <N>'"), "{message}");
    let message = refused("[sync-weights]\ntries = { a = 1 }\n");
    assert!(
        message.contains("line 2: `sync-weights.tries` has a type that no flag takes"),
        "{message}"
    );
    let message = refused("[sync-weights\n");
    assert!(message.contains("config `oclaw.toml`"), "{message}");
}

#[test]
fn a_configuration_file_that_was_named_must_exist() {
    let output = oclaw()
        .args(["sync-weights", "p", "--engine", "x", "--config", "none.toml"])
        .assert()
        .code(2);
    let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(message.contains("cannot read config `none.toml`"), "{message}");
}

#[test]
fn shared_flags_stand_at_the_top_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("oclaw.toml"), "seed = 9\n").unwrap();
    let output = oclaw()
        .args(["sync-weights", "p", "--engine", "x", "--show-settings", "--config", "oclaw.toml"])
        .current_dir(folder.path())
        .assert()
        .success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let seed = text.lines().find(|line| line.starts_with("seed")).unwrap();
    assert!(seed.ends_with("= 9  # oclaw.toml:1"), "{text}");
}

#[test]
fn help_and_version_are_data_on_stdout_and_no_arguments_are_wrong_usage() {
    for arguments in [&["--help"][..], &["--version"], &["sync-weights", "--help"]] {
        let output = oclaw().args(arguments).assert().success();
        assert!(!output.get_output().stdout.is_empty());
        assert!(output.get_output().stderr.is_empty());
    }
    oclaw().assert().code(2);
    oclaw().arg("no-such-command").assert().code(2);
}

/// What stderr says of a run, and its exit code.
fn said(command: &mut assert_cmd::Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_negative_number_is_a_wrong_value_and_no_unknown_flag() {
    for (words, wanted) in [
        (&["train", "--out", "o", "--lr", "-1"][..], "'-1' for '--lr <X>': wanted a number from 0"),
        (&["train", "--out", "o", "--lr", "-1e-5"], "'-1e-5' for '--lr <X>'"),
        (&["train", "--out", "o", "--keep", "-1"], "'-1' for '--keep <N>'"),
        (&["train", "--out", "o", "--seed", "-3"], "'-3' for '--seed <N>'"),
        (&["judge", "--rules", "--votes", "-2"], "'-2' for '--votes <N>'"),
        (&["hint", "--from-feedback", "--timeout", "-1"], "'-1' for '--timeout <SECONDS>'"),
        (&["teacher-lp", "--topk", "-4"], "'-4' for '--topk <K>'"),
        (&["advantage", "--gamma", "-0.5"], "'-0.5' for '--gamma <"),
        (&["view", "-n", "-5"], "'-5' for '--count <N>'"),
        (&["serve", "--spool", "s", "--shard-rows", "-1"], "'-1' for '--shard-rows <N>'"),
        (&["serve", "--spool", "s", "--drain", "-1"], "'-1' for '--drain <TIME>'"),
        (&["sync-weights", "p", "--engine", "e", "--tries", "-1"], "'-1' for '--tries <N>'"),
        (&["cache", "--prune-older-than", "-1d"], "'-1d' for '--prune-older-than <TIME>'"),
        (&["train", "--out", "o", "--lr", "-inf"], "'-inf' for '--lr <X>'"),
        (&["train", "--out", "o", "--decay-all", "-1"], "unexpected value '-1' for '--decay-all'"),
    ] {
        let (code, talk) = said(oclaw().args(words));
        assert_eq!(code, Some(2), "{words:?}: {talk}");
        assert!(talk.contains(wanted), "{words:?}: {talk}");
    }
}

#[test]
fn a_misspelt_variable_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let lint = |name: &str| {
        let mut command = oclaw();
        command.current_dir(folder.path()).args(["lint", "none.parquet"]).env(name, "5");
        said(&mut command).1
    };
    for (name, near) in [
        ("OCLAW_JUGDE_VOTES", "OCLAW_JUDGE_VOTES"),
        ("OCLAW_TRAIN_LRR", "OCLAW_TRAIN_LR"),
        ("OCLAW_SEEED", "OCLAW_SEED"),
        ("OCLAW_TEACHER_LP_KEYS", "OCLAW_TEACHER_LP_KEY"),
    ] {
        let talk = lint(name);
        let wanted = format!("warning: `{name}` is no setting and is ignored: is it `{near}`?\n");
        assert_eq!(talk.matches(&wanted).count(), 1, "{talk}");
    }
    assert!(
        lint("OCLAW_ENTIRELY_ELSE")
            .contains("`OCLAW_ENTIRELY_ELSE` is no setting and is ignored\n")
    );
    for known in [
        "OCLAW_JUDGE_VOTES",
        "OCLAW_CACHE",
        "OCLAW_GOLDEN",
        "OCLAW_MODELS",
        "OCLAW_BIN",
        "OCLAW_SMOLLM2_GGUF",
        "OCLAW_HINT_KEY",
        "OCLAW_SYNC_WEIGHTS_PROXY_KEY",
        "OCLAW_REPLAY_JUDGE_KEY",
        "OCLAW_GATE_JUDGE_KEY",
        "OCLAW_TEST_PYTHON",
        "OTHER_JUGDE_VOTES",
    ] {
        assert!(!lint(known).contains("is no setting"), "{known}");
    }
    let mut quiet = oclaw();
    quiet.args(["view", "--schema", "-q"]).env("OCLAW_SEEED", "1");
    assert_eq!(said(&mut quiet), (Some(0), String::new()));
}

#[test]
fn a_full_disk_under_standard_output_is_told() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    for words in [
        &["--help"][..],
        &["--version"],
        &["train", "--help"],
        &["view", "--schema"],
        &["judge", "--show-rules"],
        &["cache", "--cache", "none.sqlite"],
        &["cache", "--show-settings"],
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_oclaw"));
        let output = command.args(words).stdout(full()).output().unwrap();
        let talk = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {talk}");
        let wanted = ": cannot write to standard output: No space left on device (os error 28)\n";
        assert!(talk.ends_with(wanted), "{words:?}: {talk}");
    }
}

/// What only `oclaw loop` reads stands in the file of every stage.
#[test]
fn sections_of_the_loop_are_accepted_and_checked() {
    let folder = tempfile::tempdir().unwrap();
    let file = "[engines.policy]\nmodel = \"m\"\n[scheduler]\nkind = \"local\"\n\
                [sync-weights]\ngpus = [1]\nenv = { A = \"b\" }\ntries = 5\n";
    assert_eq!(tries(&folder, Some(file), None, None), "tries = 5 # oclaw.toml:8");
    let message = refused("[engines.policy]\nmodl = \"m\"\n");
    assert!(message.contains("`oclaw.toml` line 2: no setting `modl` in `[engines.policy]`"));
    let message = refused("[view]\ngpus = [1]\n");
    assert!(message.contains("line 2: no setting `gpus` in `[view]`"), "{message}");
}

#[test]
fn what_cannot_stand_beside_a_flag_gives_way_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let text = "[judge]\nmodel = \"m\"\n[serve]\nmodel = \"m\"\nspool = \"s\"\n";
    fs::write(folder.path().join("oclaw.toml"), text).unwrap();
    let table = crate::harness::fixture("sessions/tiny.parquet");
    let engine = ["--engine", "http://127.0.0.1:1", "--retries", "0"];
    let output = oclaw()
        .args(["judge", "--config", "oclaw.toml", "-o", "judged.parquet"])
        .args(engine)
        .arg(table)
        .current_dir(folder.path())
        .assert()
        .code(4)
        .get_output()
        .clone();
    let talk = String::from_utf8(output.stderr).unwrap();
    let said = "note: `--engine` takes the place of `model` in `oclaw.toml` line 2";
    assert!(talk.lines().any(|line| line == said), "{talk}");
    // The file alone is enough to say who answers.
    let output = oclaw()
        .args(["serve", "--config", "oclaw.toml", "--show-settings"])
        .current_dir(folder.path())
        .assert()
        .success();
    let shown = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let model = shown.lines().find(|line| line.starts_with("model ")).unwrap();
    assert!(model.ends_with("= m  # oclaw.toml:4"), "{model}");
}
