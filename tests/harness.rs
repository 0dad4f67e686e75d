//! What the tests share: the program under test in a folder of its own, the
//! fixtures, the golden folders.

pub(crate) mod gguf;
pub(crate) mod fake_engine;
pub(crate) mod fake_s3;
pub(crate) mod fake_upstream;
pub(crate) mod serve;
pub(crate) mod memory;
#[cfg(feature = "torch")]
pub(crate) mod parrot;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a test waits for what has to come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something holds, which has to come soon.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// Returns the checkout's folder.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Writes a program, by a process that ends before anybody calls it. What this one has
/// open for writing a process that another test starts just now has open, too, and the
/// system runs no such file ("Text file busy").
pub(crate) fn program(path: &Path, text: &str) {
    let write = r#"printf %s "$1" > "$0" && chmod 755 "$0""#;
    let ended = std::process::Command::new("sh").args(["-c", write]).arg(path).arg(text).status();
    assert!(ended.unwrap().success(), "{}", path.display());
}

/// Returns a file or folder under `fixtures/`.
pub(crate) fn fixture(path: &str) -> PathBuf {
    root().join("fixtures").join(path)
}

/// Returns the folder of golden numbers: `OCLAW_GOLDEN`, else the fixtures.
pub(crate) fn golden() -> PathBuf {
    folder_from("OCLAW_GOLDEN", "golden")
}

/// Returns the folder of models: `OCLAW_MODELS`, else the fixtures.
pub(crate) fn models() -> PathBuf {
    folder_from("OCLAW_MODELS", "models")
}

/// Returns the folder of the tiny models that our own tests stand on: always the
/// fixtures, for their ids and shapes are part of those tests.
pub(crate) fn fixture_models() -> PathBuf {
    fixture("models")
}

/// The sets that a folder of golden numbers can have.
const SETS: [&str; 5] = ["api", "hybrid", "loss", "model", "train"];

/// Says what cannot be compared with other golden numbers. In our own fixtures
/// nothing may be amiss, or cases would be lost in silence.
#[track_caller]
pub(crate) fn skip(what: &str) {
    skip_unless(golden_is_own(), what);
}

/// The same of what a folder of models does not have.
#[track_caller]
pub(crate) fn skip_model(what: &str) {
    skip_unless(golden_is_own() && is_own(&models(), "models"), what);
}

/// Whether the golden numbers are our own fixtures, which are known to be whole.
pub(crate) fn golden_is_own() -> bool {
    is_own(&golden(), "golden")
}

fn is_own(folder: &Path, name: &str) -> bool {
    let real = |folder: &Path| folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    real(folder) == real(&fixture(name))
}

#[track_caller]
#[expect(clippy::print_stdout, reason = "what is skipped is said")]
fn skip_unless(own: bool, what: &str) {
    assert!(!own, "the fixtures lack nothing, yet this would be skipped: {what}");
    println!("skipped: {what}");
}

/// Returns a list of golden cases; one that is absent or empty is skipped.
#[track_caller]
pub(crate) fn list<'a>(of: &'a serde_json::Value, key: &str) -> &'a [serde_json::Value] {
    let list = of[key].as_array().map_or(&[][..], Vec::as_slice);
    if list.is_empty() {
        skip(&format!("no `{key}` in a golden file"));
    }
    list
}

/// Returns the path of a golden file, `SET/NAME`. One that the folder does not
/// have is skipped; a folder with no set at all is a mistake.
#[track_caller]
pub(crate) fn golden_file(name: &str) -> Option<PathBuf> {
    let folder = golden();
    assert!(
        SETS.iter().any(|set| folder.join(set).is_dir()),
        "`{}` (OCLAW_GOLDEN) holds no golden set: none of {}",
        folder.display(),
        SETS.join(", ")
    );
    let path = folder.join(name);
    let set = name.split('/').next().unwrap_or(name);
    match (path.exists(), folder.join(set).is_dir()) {
        (true, _) => return Some(path),
        (false, true) => skip(&format!("no golden {name}")),
        (false, false) => skip(&format!("no golden {set}")),
    }
    None
}

/// Reads a golden JSON file, if it is there.
#[track_caller]
pub(crate) fn golden_json(name: &str) -> Option<serde_json::Value> {
    let path = golden_file(name)?;
    let text = std::fs::read(&path).unwrap();
    Some(
        serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display())),
    )
}

fn folder_from(variable: &str, default: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder),
        _ => fixture(default),
    }
}

/// Stages that keep answers.
const KEEPERS: [&str; 3] =
    ["OCLAW_JUDGE_NO_CACHE", "OCLAW_HINT_NO_CACHE", "OCLAW_TEACHER_LP_NO_CACHE"];

/// Returns the `oclaw` program, with none of the caller's `OCLAW_*` settings, and
/// with no answers of other runs.
pub(crate) fn oclaw() -> assert_cmd::Command {
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_oclaw"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("OCLAW_") {
            command.env_remove(name);
        }
    }
    for name in KEEPERS {
        command.env(name, "true");
    }
    command
}

/// Returns the `oclaw` program with a user's cache folder of the test's own.
pub(crate) fn oclaw_keeping(caches: &Path) -> assert_cmd::Command {
    let mut command = oclaw();
    for name in KEEPERS {
        command.env_remove(name);
    }
    command.env("XDG_CACHE_HOME", caches);
    command
}

/// Whether a model's weights are there. What is skipped for want of them is said.
#[cfg(feature = "torch")]
#[expect(clippy::print_stdout, reason = "what is skipped is said")]
pub(crate) fn has_weights(folder: &Path) -> bool {
    let files = ["model.safetensors", "model.safetensors.index.json"];
    let there = files.iter().any(|file| folder.join(file).exists());
    if !there {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        println!("{name}: skipped: no weights");
    }
    there
}

/// Returns every model that golden numbers were recorded of: its name and the
/// record. The folder also holds records of GGUF files, which name no model.
pub(crate) fn recorded_models() -> Vec<(String, serde_json::Value)> {
    let Some(folder) = golden_file("model") else { return Vec::new() };
    let entries = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "json"));
    files.sort();
    let record = |file: PathBuf| {
        let recorded: serde_json::Value =
            serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        Some((recorded["model"].as_str()?.to_owned(), recorded))
    };
    let models = models();
    assert!(models.is_dir(), "`{}` (OCLAW_MODELS) is no folder", models.display());
    let found: Vec<_> = files.into_iter().filter_map(record).collect();
    if found.is_empty() {
        skip("no golden model");
    }
    found
}
