//! What the tests share: the program under test in a folder of its own, the
//! fixtures, the golden folders.

pub(crate) mod gguf;
pub(crate) mod fake_engine;
pub(crate) mod fake_upstream;

use std::path::{Path, PathBuf};

/// Returns the checkout's folder.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
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
