//! Variables that look like settings and are none: a misspelt one must not be
//! ignored in silence.

use std::collections::BTreeSet;

use clap::Command;

/// Variables of our scripts and tests, and the mark of a loop's processes.
const OTHERS: [&str; 10] = [
    "OCLAW_BIN",
    "OCLAW_CACHE",
    "OCLAW_GOLDEN",
    "OCLAW_JOB",
    "OCLAW_MODELS",
    "OCLAW_SMOLLM2_GGUF",
    "OCLAW_TABLE",
    "OCLAW_TEST_PYTHON",
    "OCLAW_WAIT",
    "OCLAW_WITH_TEACHER",
];

/// Keys that belong to no subcommand of the same name.
const KEYS: [&str; 3] =
    ["OCLAW_GATE_JUDGE_KEY", "OCLAW_REPLAY_JUDGE_KEY", "OCLAW_SYNC_WEIGHTS_PROXY_KEY"];

/// Most letters that a misspelt name is off by.
const FAR: usize = 3;

/// Returns a line for each `OCLAW_…` variable that nobody reads.
pub(super) fn unknown(command: &Command) -> Vec<String> {
    let known = known(command);
    let mut found: Vec<String> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with("OCLAW_") && !known.contains(name))
        .collect();
    found.sort();
    found.iter().map(|name| warning(name, &known)).collect()
}

fn warning(name: &str, known: &BTreeSet<String>) -> String {
    let near = known.iter().map(|known| (distance(name, known), known)).min();
    match near.filter(|(distance, _)| *distance <= FAR) {
        Some((_, near)) => format!("`{name}` is no setting and is ignored: is it `{near}`?"),
        None => format!("`{name}` is no setting and is ignored"),
    }
}

/// Lists the variables of all flags and keys.
fn known(command: &Command) -> BTreeSet<String> {
    let mut known: BTreeSet<String> = OTHERS.into_iter().chain(KEYS).map(str::to_owned).collect();
    for command in std::iter::once(command).chain(command.get_subcommands()) {
        let names = command.get_arguments().filter_map(clap::Arg::get_env);
        known.extend(names.map(|name| name.to_string_lossy().into_owned()));
        known.insert(format!("OCLAW_{}_KEY", command.get_name().replace('-', "_").to_uppercase()));
    }
    known
}

/// Counts the letters to change, add or leave out between two words; two that
/// changed places count once.
fn distance(left: &str, right: &str) -> usize {
    let (left, right): (Vec<char>, Vec<char>) = (left.chars().collect(), right.chars().collect());
    let mut rows = vec![(0..=right.len()).collect::<Vec<usize>>()];
    for (i, a) in left.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, b) in right.iter().enumerate() {
            let mut least =
                (rows[i][j] + usize::from(a != b)).min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *a == right[j - 1] && left[i - 1] == *b {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[left.len()][right.len()]
}

#[cfg(test)]
mod tests {
    use super::distance;

    #[test]
    fn letters_are_counted() {
        for (left, right, expected) in
            [("judge", "judge", 0), ("jugde", "judge", 1), ("jdge", "judge", 1), ("", "ab", 2)]
        {
            assert_eq!(distance(left, right), expected, "{left} {right}");
        }
    }
}
