//! The architecture, held by tests: who may import whom, and that every
//! subcommand has its twin among the tests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::harness::root;

/// Each room of `src/` and the rooms it may use. This table is the diagram in
/// the README; change both, and say why in the commit.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("trajectory", &[]),
    ("table", &["trajectory"]),
    // What is in a bucket is a folder of shards all the same.
    ("store", &["table"]),
    ("stage", &["trajectory", "table"]),
    ("wire", &[]),
    // Weights as named bytes: what the GGUF converter, which works without torch,
    // and the model share.
    ("tensors", &[]),
    ("gguf", &["tensors"]),
    ("template", &[]),
    // The socket of every server here: who may be silent for how long.
    ("listener", &[]),
    ("session", &["wire"]),
    ("capture", &["wire"]),
    ("journal", &["trajectory", "table"]),
    ("engine", &["wire"]),
    ("judge", &["trajectory", "wire", "template", "engine"]),
    ("hint", &["trajectory", "wire", "template", "engine", "judge"]),
    ("teacher_lp", &["trajectory", "template", "engine"]),
    ("advantage", &["trajectory"]),
    ("health", &["trajectory", "advantage"]),
    ("report", &["trajectory", "health"]),
    ("proxy", &["trajectory", "wire", "listener", "session", "capture", "journal", "engine"]),
    ("loss", &[]),
    ("model", &["tensors"]),
    ("train", &["tensors", "trajectory", "table", "advantage", "loss", "model"]),
    ("serving", &["wire", "template", "listener", "model"]),
    ("sync", &["wire", "engine"]),
    // Reads answers the way `serve` does, so that both sides of a comparison are
    // read alike.
    ("replay", &["trajectory", "wire", "template", "capture", "engine", "judge"]),
    // Talks like anybody else, and shows a hint as the teacher is shown it.
    ("simulate", &["template", "engine"]),
    // Knows keys and JSON, not what either is about.
    ("cache", &[]),
    ("interchange", &["trajectory", "session", "wire", "template"]),
    // The journal and the cache forget by themselves: they know their own files.
    ("privacy", &["trajectory", "table"]),
    // Stages are commands to it, and folders of tables.
    ("pipeline", &["table", "store", "health"]),
];

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn room_of(file: &Path) -> String {
    let inside = file.strip_prefix(root().join("src")).unwrap();
    let first = inside.components().next().unwrap().as_os_str().to_string_lossy().into_owned();
    first.trim_end_matches(".rs").to_owned()
}

/// Returns the faults in one file: each use of a room that its own room may not
/// use, and each grouped import, which this scan could not follow.
fn faults(name: &str, room: &str, text: &str) -> Vec<String> {
    let Some((_, allowed)) = MAY_IMPORT.iter().find(|(known, _)| *known == room) else {
        return vec![format!("{name}: room `{room}` has no line in MAY_IMPORT")];
    };
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        if code.contains("crate::{") {
            found.push(format!("{name}:{}: import one room per line", number + 1));
        }
        for use_of in code.split("crate::").skip(1) {
            let used: String =
                use_of.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let known = MAY_IMPORT.iter().any(|(known, _)| *known == used);
            if known && used != room && !allowed.contains(&used.as_str()) {
                found.push(format!("{name}:{}: `{room}` may not import `{used}`", number + 1));
            }
        }
    }
    found
}

#[test]
fn rooms_import_only_what_the_table_allows() {
    let mut found = Vec::new();
    for file in rust_files(&root().join("src")) {
        let room = room_of(&file);
        if room != "lib" {
            let text = std::fs::read_to_string(&file).unwrap();
            found.extend(faults(&file.display().to_string(), &room, &text));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_scan_sees_a_forbidden_import() {
    let text = "use crate::judge::Rubric;\nuse crate::trajectory::Turn;\nuse crate::{a, b};\n";
    let expected = ["x.rs:1: `table` may not import `judge`", "x.rs:3: import one room per line"];
    assert_eq!(faults("x.rs", "table", text), expected);
    assert_eq!(faults("x.rs", "attic", text), ["x.rs: room `attic` has no line in MAY_IMPORT"]);
}

#[test]
fn every_room_exists_and_has_a_line() {
    let rooms: BTreeSet<_> =
        rust_files(&root().join("src")).iter().map(|file| room_of(file)).collect();
    let table: BTreeSet<_> =
        MAY_IMPORT.iter().map(|(room, _)| (*room).to_owned()).chain(["lib".to_owned()]).collect();
    assert_eq!(rooms, table);
}

#[test]
fn nothing_in_the_library_reads_the_environment() {
    for file in rust_files(&root().join("src")) {
        let text = std::fs::read_to_string(&file).unwrap();
        for word in ["env::var", "env::args", "process::exit"] {
            assert!(!text.contains(word), "{}: `{word}` belongs in cmd/", file.display());
        }
    }
}
