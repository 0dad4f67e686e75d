//! The manual in man/ and the completion scripts.

use std::collections::BTreeSet;
use std::path::Path;

use crate::harness::{oclaw, root};

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".1")).collect()
}

#[test]
fn the_pages_in_the_repository_are_those_the_program_writes() {
    let folder = tempfile::tempdir().unwrap();
    oclaw().args(["man", "--folder"]).arg(folder.path()).assert().success();
    let kept = root().join("man");
    assert_eq!(names(&kept), names(folder.path()), "make them anew: oclaw man --folder man");
    for name in names(&kept) {
        let [ours, made] = [&kept, folder.path()]
            .map(|folder: &Path| std::fs::read_to_string(folder.join(&name)).unwrap());
        assert!(ours == made, "man/{name} is stale: oclaw man --folder man");
    }
}

#[test]
fn a_page_teaches_usage_options_settings_and_exit_codes() {
    let output = oclaw().args(["man", "judge"]).assert().success().get_output().stdout.clone();
    let page = String::from_utf8(output).unwrap();
    assert!(page.contains(".TH OCLAW-JUDGE 1"), "{page}");
    for heading in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "SETTINGS", "\"EXIT STATUS\""] {
        assert!(page.contains(&format!(".SH {heading}\n")), "no {heading} in {page}");
    }
    assert!(page.contains("OCLAW_JUDGE_"), "{page}");
    let talk = oclaw().args(["man", "jugde"]).assert().code(2).get_output().stderr.clone();
    assert!(String::from_utf8(talk).unwrap().contains("there is no command `jugde`"));
}

#[test]
fn completions_know_every_command() {
    let pages = names(&root().join("man"));
    let named = |page: &String| Some(page.strip_prefix("oclaw-")?.strip_suffix(".1")?.to_owned());
    let commands: Vec<String> = pages.iter().filter_map(named).collect();
    assert_eq!(commands.len(), pages.len() - 1, "all but oclaw.1");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = oclaw().args(["completions", shell]).assert().success().get_output().clone();
        let script = String::from_utf8(output.stdout).unwrap();
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '-';
        let words: BTreeSet<&str> = script.split(|letter| !is_part(letter)).collect();
        for command in &commands {
            assert!(words.contains(command.as_str()), "{command} is not in the {shell} script");
        }
    }
}
