//! Which tables the words on a command line name.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::Error;
use super::parquet_file::ParquetFile;

/// What is named as a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// What stands on a command line: a file, a folder, a pattern, or `-`.
    Named(PathBuf),
    /// A copy of what is somewhere else, and is called by its name there.
    Copy {
        /// The copy.
        path: PathBuf,
        /// Its name.
        name: String,
    },
}

/// One place to read a table from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    Path(PathBuf),
    Copy(PathBuf, String),
    Stdin,
}

/// Expands folders and patterns that the shell left alone. Nothing named, or
/// `-`, is standard input.
pub(super) fn resolve(inputs: &[Input]) -> Result<Vec<Place>, Error> {
    if inputs.is_empty() {
        return Ok(vec![Place::Stdin]);
    }
    let mut found = Vec::new();
    for input in inputs {
        let input = match input {
            Input::Named(path) => path,
            Input::Copy { path, name } => {
                found.push(Place::Copy(path.clone(), name.clone()));
                continue;
            }
        };
        if input.as_os_str() == "-" {
            if found.contains(&Place::Stdin) {
                return Err(Error::StdinTwice);
            }
            found.push(Place::Stdin);
        } else if is_pattern(input) && fs::symlink_metadata(input).is_err() {
            let matches = expand(input);
            if matches.is_empty() {
                let name = input.display().to_string();
                return Err(Error::NothingThere { name, wanted: "no file matches" });
            }
            for path in matches {
                push(&path, &mut found)?;
            }
        } else {
            push(input, &mut found)?;
        }
    }
    Ok(found)
}

fn push(path: &Path, found: &mut Vec<Place>) -> Result<(), Error> {
    match path.is_dir() {
        true => found.extend(shards(path)?.into_iter().map(Place::Path)),
        false => found.push(Place::Path(path.to_owned())),
    }
    Ok(())
}

/// Lists the finished shards of a spool folder, oldest first. What starts with
/// a dot is unfinished or bookkeeping.
fn shards(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let name = || folder.display().to_string();
    let read = |source| Error::Read { name: name(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        let shard = path.extension().is_some_and(|ending| ending == "parquet") && path.is_file();
        if shard && !hidden {
            let shard_name = path.display().to_string();
            let file = File::open(&path)
                .map_err(|source| Error::Read { name: shard_name.clone(), source })?;
            let first = ParquetFile::open(&shard_name, Arc::new(file))?.first_created_at()?;
            found.push((first, path));
        }
    }
    if found.is_empty() && folder.join(".journal").is_dir() {
        return Err(Error::StillOpen { name: name() });
    }
    if found.is_empty() {
        return Err(Error::NothingThere { name: name(), wanted: "no `*.parquet` in the folder" });
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

fn is_pattern(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().iter().any(|byte| b"*?[".contains(byte))
}

/// Returns what a pattern matches, sorted by name. `*`, `?` and `[a-z]` match
/// within one name; a leading dot must be written out.
fn expand(pattern: &Path) -> Vec<PathBuf> {
    let mut bases = vec![PathBuf::new()];
    for component in pattern.components() {
        let Component::Normal(part) = component else {
            bases.iter_mut().for_each(|base| base.push(component));
            continue;
        };
        if !is_pattern(Path::new(part)) {
            bases.iter_mut().for_each(|base| base.push(part));
            continue;
        }
        bases = bases.iter().flat_map(|base| matches_in(base, part)).collect();
    }
    bases.retain(|path| path.exists());
    bases
}

fn matches_in(base: &Path, part: &OsStr) -> Vec<PathBuf> {
    let folder = if base.as_os_str().is_empty() { Path::new(".") } else { base };
    let pattern: Vec<char> = part.to_string_lossy().chars().collect();
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let text: Vec<char> = name.to_string_lossy().chars().collect();
        let hidden = text.first() == Some(&'.') && pattern.first() != Some(&'.');
        if !hidden && fits(&pattern, &text) {
            found.push(base.join(name));
        }
    }
    found.sort();
    found
}

/// Matches a name against a pattern.
fn fits(pattern: &[char], text: &[char]) -> bool {
    let Some((first, rest)) = pattern.split_first() else {
        return text.is_empty();
    };
    match (first, text.split_first()) {
        // A run of stars is one star; else the search would be exponential.
        ('*', _) if rest.first() == Some(&'*') => fits(rest, text),
        ('*', _) => (0..=text.len()).any(|skipped| fits(rest, &text[skipped..])),
        ('?', Some((_, text))) => fits(rest, text),
        ('[', Some((letter, text))) => match rest.iter().position(|letter| *letter == ']') {
            Some(end) if end > 0 => one_of(&rest[..end], *letter) && fits(&rest[end + 1..], text),
            _ => *letter == '[' && fits(rest, text),
        },
        (letter, Some((found, text))) => letter == found && fits(rest, text),
        (_, None) => false,
    }
}

fn one_of(set: &[char], letter: char) -> bool {
    let (inverted, set) = match set.split_first() {
        Some(('!' | '^', rest)) => (true, rest),
        _ => (false, set),
    };
    let mut found = false;
    let mut index = 0;
    while index < set.len() {
        if set.get(index + 1) == Some(&'-') && index + 2 < set.len() {
            found |= (set[index]..=set[index + 2]).contains(&letter);
            index += 3;
        } else {
            found |= set[index] == letter;
            index += 1;
        }
    }
    found != inverted
}

#[cfg(test)]
mod tests {
    use super::fits;

    fn matches(pattern: &str, text: &str) -> bool {
        let letters = |text: &str| text.chars().collect::<Vec<_>>();
        fits(&letters(pattern), &letters(text))
    }

    #[test]
    fn patterns() {
        for (pattern, text, expected) in [
            ("*.parquet", "a.parquet", true),
            ("*.parquet", "a.parquet.tmp", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[ab", "[ab", true),
            ("**b", "aab", true),
            ("", "", true),
            ("é*", "éa", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }
}
