//! `oclaw init`: what it writes is true, and can be run.

#[cfg(feature = "torch")]
mod kinds;
mod one_file;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::harness::{fixture_models, oclaw};

const KINDS: [&str; 3] = ["embedded", "node", "gateway"];

/// Writes a file of a kind for the tiny model; returns its text.
fn written(folder: &Path, kind: &str) -> String {
    oclaw()
        .args(["init", "--kind", kind, "--model"])
        .arg(fixture_models().join("tiny-qwen3"))
        .current_dir(folder)
        .assert()
        .success();
    fs::read_to_string(folder.join("oclaw.toml")).unwrap()
}

/// A setting of a file, also one that is switched off, with the line above it.
struct Setting {
    section: String,
    key: String,
    above: String,
}

fn settings(text: &str) -> Vec<Setting> {
    let (mut section, mut above) = (String::new(), "");
    let mut found = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
        }
        let bare = line.strip_prefix('#').unwrap_or(line);
        if let Some((key, _)) = bare.split_once(" = ").filter(|(key, _)| !key.contains(' ')) {
            let (section, above) = (section.clone(), above.to_owned());
            found.push(Setting { section, key: key.to_owned(), above });
        }
        above = line;
    }
    found
}

#[test]
fn every_setting_has_its_default_in_the_line_above() {
    let folder = tempfile::tempdir().unwrap();
    for kind in KINDS {
        let inside = folder.path().join(kind);
        fs::create_dir(&inside).unwrap();
        let text = written(&inside, kind);
        let settings = settings(&text);
        assert!(settings.len() > 30, "{kind}: {}", settings.len());
        for Setting { section, key, above } in settings {
            let told = above.starts_with("# ") && above.contains("default");
            assert!(told, "{kind} [{section}] {key}: {above}");
        }
        assert!(!text.contains('@'), "{text}");
    }
}

/// Returns the defaults of a subcommand.
fn defaults(section: &str) -> BTreeMap<String, String> {
    let needed: &[&str] = match section {
        "serve" => &["--spool", "x", "--model", "x"],
        "train" => &["--out", "x"],
        "sync-weights" => &["x", "--engine", "http://x"],
        _ => &[],
    };
    let output = oclaw().arg(section).args(needed).arg("--show-settings").assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let lines = text.lines().filter_map(|line| line.split_once(" = "));
    lines
        .map(|(key, rest)| {
            let (value, _) = rest.split_once("  # ").unwrap();
            (key.trim().to_owned(), value.to_owned())
        })
        .collect()
}

#[test]
fn the_defaults_that_stand_there_are_the_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let mut known: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    let mut compared = 0;
    for kind in KINDS {
        let inside = folder.path().join(kind);
        fs::create_dir(&inside).unwrap();
        for Setting { section, key, above } in settings(&written(&inside, kind)) {
            // A number, a time or a word; `none` and sentences are for people.
            let Some((_, told)) = above.rsplit_once("; default: ") else { continue };
            if section.starts_with("engines") || told.contains(' ') || told == "none" {
                continue;
            }
            let defaults = known.entry(section.clone()).or_insert_with(|| defaults(&section));
            let real = defaults.get(&key).unwrap_or_else(|| panic!("[{section}] {key}"));
            if real != "(none)" {
                assert_eq!(told, real, "{kind} [{section}] {key}");
                compared += 1;
            }
        }
    }
    assert!(compared > 40, "{compared}");
}

#[test]
fn a_file_that_is_there_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("oclaw.toml");
    fs::write(&path, "seed = 3\n").unwrap();
    let output = oclaw().arg("init").arg(folder.path()).assert().code(2).get_output().clone();
    let talk = String::from_utf8(output.stderr).unwrap();
    assert!(talk.contains("is there already, and stays as it is"), "{talk}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "seed = 3\n");
}

#[test]
fn it_makes_the_folder_and_says_what_comes_next() {
    let folder = tempfile::tempdir().unwrap();
    let output = oclaw()
        .args(["init", "loops/one"])
        .current_dir(folder.path())
        .assert()
        .success()
        .get_output()
        .clone();
    assert!(output.stdout.is_empty());
    let talk = String::from_utf8(output.stderr).unwrap();
    assert!(talk.contains("`oclaw check loops/one/oclaw.toml`"), "{talk}");
    assert!(talk.contains("there is no model in `models/SmolLM2-135M-Instruct` yet"), "{talk}");
    let text = fs::read_to_string(folder.path().join("loops/one/oclaw.toml")).unwrap();
    assert!(text.contains("run = \"loops/one/run\""), "{text}");
}
