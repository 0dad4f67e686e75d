//! Names from the reference's world, as man/reference-names.md tells of them: the
//! page is what is tested.

use std::collections::BTreeMap;
use std::fs;

use crate::harness::{oclaw, root};

/// What a subcommand cannot do without.
const NEEDED: [(&str, &[&str]); 8] = [
    ("loop", &[]),
    ("sync-weights", &["--follow", "x", "--engine", "http://127.0.0.1:1"]),
    ("serve", &["--spool", "turns"]),
    ("judge", &[]),
    ("hint", &[]),
    ("teacher-lp", &[]),
    ("advantage", &[]),
    ("train", &["--out", "1"]),
];

/// A row of the page: names, and what they are here.
fn rows() -> Vec<(Vec<String>, String)> {
    let page = fs::read_to_string(root().join("man/reference-names.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |"));
    let rows = rows.map(|row| {
        let (names, here) = row.split_once("` | ").unwrap();
        (names.split("`, `").map(str::to_owned).collect(), here.to_owned())
    });
    rows.filter(|(names, _): &(Vec<String>, _)| !names[0].ends_with('…')).collect()
}

/// Returns what stands between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// A value that the flag takes, in their words and in ours.
fn values(key: &str) -> (&'static str, &'static str) {
    match key {
        "estimator" => ("on_policy_distillation", "opd"),
        "kl" => ("k2", "k2"),
        "schedule" => ("constant", "constant"),
        "subset" => ("teacher", "teacher"),
        "dual-clip" => ("2", "2"),
        _ => ("1", "1"),
    }
}

/// An accepted name of a section: its value there, and key and value here.
type Accepted = (String, Option<String>, Option<(String, String)>);

/// The accepted names, by section.
fn accepted() -> BTreeMap<String, Vec<Accepted>> {
    let mut found: BTreeMap<String, Vec<Accepted>> = BTreeMap::new();
    for (names, here) in rows().into_iter().filter(|(_, here)| !here.starts_with("refused")) {
        for word in quoted(&here).into_iter().filter(|word| word.starts_with('[')) {
            let (section, setting) = word[1..].split_once(']').unwrap();
            let (key, set) = match setting.trim().split_once(" = ") {
                Some((key, value)) => (key, Some(value.trim_matches('"'))),
                None => (setting.trim(), None),
            };
            let (theirs, ours) = values(key);
            let given = match (set, here.strip_prefix("only `")) {
                (Some(_), _) => None,
                (None, Some(only)) => only.split('`').next().map(str::to_owned),
                (None, None) if here.starts_with("not needed") => None,
                (None, None) => Some(theirs.to_owned()),
            };
            let becomes = match set {
                Some(value) => Some((key.to_owned(), value.to_owned())),
                None if here.starts_with('`') => Some((key.to_owned(), ours.to_owned())),
                None => None,
            };
            // A row that is not about a key of its own names one in passing.
            if here.starts_with("not needed") && !key.is_empty() {
                continue;
            }
            let known = found.entry(section.to_owned()).or_default();
            known.push((names[0].clone(), given, becomes));
        }
    }
    found
}

fn shown(section: &str, words: &[String], config: Option<&str>) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = oclaw();
    command.arg(section).arg("--show-settings").args(words).current_dir(folder.path());
    let needed = NEEDED.iter().find(|(name, _)| *name == section).unwrap().1;
    if let Some(text) = config {
        fs::write(folder.path().join("oclaw.toml"), text).unwrap();
        command.args(["--config", "oclaw.toml"]);
    }
    // `--out` is among the names themselves.
    if !words.iter().any(|word| word == "--save") && config.is_none_or(|it| !it.contains("save")) {
        command.args(needed);
    }
    let output = command.assert().success().get_output().clone();
    let [out, talk] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (out, talk)
}

fn has(shown: &str, key: &str, value: &str) -> bool {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    shown.lines().map(words).any(|line| line[0] == key && line[2] == value && line[4] != "default")
}

#[test]
fn accepted_names_are_the_settings_that_the_page_says() {
    let accepted = accepted();
    assert!(accepted.values().map(Vec::len).sum::<usize>() > 45, "{accepted:?}");
    for (section, names) in accepted {
        let (mut words, mut text) = (Vec::new(), format!("[{section}]\n"));
        for (name, given, _) in &names {
            words.push(format!("--{name}"));
            words.extend(given.clone());
            match given {
                Some(value) => text.push_str(&format!("{name} = \"{value}\"\n")),
                None => text.push_str(&format!("{name} = true\n")),
            }
        }
        let (by_words, _) = shown(&section, &words, None);
        let (by_file, _) = shown(&section, &[], Some(&text));
        for (name, _, becomes) in &names {
            let Some((key, value)) = becomes else { continue };
            assert!(has(&by_words, key, value), "{section} --{name}: {key} = {value}\n{by_words}");
            assert!(has(&by_file, key, value), "[{section}] {name}: {key} = {value}\n{by_file}");
        }
    }
}

#[test]
fn refused_names_are_explained_as_on_the_page() {
    let refused: Vec<_> =
        rows().into_iter().filter(|(_, here)| here.starts_with("refused: ")).collect();
    assert!(refused.len() > 25, "{refused:?}");
    let names = refused.iter().flat_map(|(names, _)| names);
    let words: Vec<String> = names.clone().map(|name| format!("--{name}")).collect();
    let text: Vec<String> = names.map(|name| format!("{name} = 1")).collect();
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("oclaw.toml"), format!("[train]\n{}\n", text.join("\n"))).unwrap();
    let by_words = oclaw().args(["train", "--out", "x"]).args(words).assert().code(2);
    let by_file = oclaw()
        .args(["train", "--config", "oclaw.toml"])
        .current_dir(folder.path())
        .assert()
        .code(2);
    for refused_by in [by_words, by_file] {
        let talk = String::from_utf8(refused_by.get_output().stderr.clone()).unwrap();
        for (names, here) in &refused {
            let why = here.strip_prefix("refused: ").unwrap();
            for name in names {
                let said = talk.lines().any(|line| line.contains(name) && line.contains(why));
                assert!(said, "{name}: {why}\n{talk}");
            }
        }
    }
}

/// Runs `oclaw` with words of which some are refused; returns what it says.
fn refused(words: &[&str]) -> String {
    let output = oclaw().args(words).assert().code(2).get_output().clone();
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_name_at_another_stage_says_where_it_belongs() {
    let talk = refused(&["judge", "--eps-clip", "0.2"]);
    assert!(talk.contains("`[train] clip-low` (`oclaw train --clip-low`)"), "{talk}");
    let talk = refused(&["train", "--out", "x", "--sglang-mem-fraction-static", "0.8"]);
    assert!(talk.contains("`command` of `[engines.NAME]`"), "{talk}");
    let talk = refused(&["train", "--out", "x", "--advantage-estimator", "gspo"]);
    assert!(talk.contains("there is no `gspo`; there are `grpo`"), "{talk}");
    let talk = refused(&["train", "--out", "x", "--adam-beta2", "0.95"]);
    assert!(talk.contains("`0.95` is not to be had: it is 0.98"), "{talk}");
    // What nobody knows is still a misspelt flag.
    let talk = refused(&["train", "--out", "x", "--eps-clap", "0.2"]);
    assert!(talk.contains("unexpected argument '--eps-clap'"), "{talk}");
}

#[test]
fn what_was_taken_for_what_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let text = "[judge]\nprm_m = 5\n[train]\neps_clip_high = 0.3\n";
    fs::write(folder.path().join("oclaw.toml"), text).unwrap();
    let table = crate::harness::fixture("sessions/tiny.parquet");
    let output = oclaw()
        .args(["judge", "--rules", "-o", "judged.parquet", "--config", "oclaw.toml"])
        .arg("--prm-temperature=0.4")
        .arg(table)
        .env("PRM_M", "7")
        .current_dir(folder.path())
        .assert()
        .success()
        .get_output()
        .clone();
    let talk = String::from_utf8(output.stderr).unwrap();
    for line in [
        "note: `--prm-temperature` is `--temperature` here",
        "note: config `oclaw.toml` line 2: `prm_m` is `votes` here",
        "warning: `PRM_M` is not read: the setting is `OCLAW_JUDGE_VOTES`",
    ] {
        assert!(talk.lines().any(|said| said == line), "{line}\n{talk}");
    }
    // Of another stage's settings nothing is said.
    assert!(!talk.contains("clip"), "{talk}");
}

#[test]
fn two_names_of_one_setting_do_not_contradict_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let text = "[train]\nclip-low = 0.1\neps-clip = 0.2\n";
    fs::write(folder.path().join("oclaw.toml"), text).unwrap();
    let output = oclaw()
        .args(["train", "--out", "x", "--config", "oclaw.toml"])
        .current_dir(folder.path())
        .assert()
        .code(2)
        .get_output()
        .clone();
    let talk = String::from_utf8(output.stderr).unwrap();
    let said = "line 3: `eps-clip` is `clip-low` here, which line 2 sets too";
    assert!(talk.contains(said), "{talk}");
}

#[test]
fn of_two_estimators_the_flag_wins_and_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("oclaw.toml"), "[advantage]\nestimator = \"grpo\"\n").unwrap();
    let run = |words: &[&str]| {
        let mut command = oclaw();
        command.args(["advantage", "--config", "oclaw.toml", "-o"]).args(words);
        command.arg(crate::harness::fixture("sessions/tiny.parquet")).current_dir(folder.path());
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let said =
        "note: the estimator is `rloo` (command line), not the `grpo` of `oclaw.toml` line 2";
    let talk = run(&["a.parquet", "--estimator", "rloo", "--group-by", "request_id"]);
    assert!(talk.lines().any(|line| line == said), "{talk}");
    let talk = run(&["b.parquet", "--estimator", "grpo"]);
    assert!(!talk.contains("the estimator is"), "{talk}");
    let talk = run(&["c.parquet"]);
    assert!(!talk.contains("the estimator is"), "{talk}");
}
