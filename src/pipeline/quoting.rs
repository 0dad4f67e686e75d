//! Words for a shell, and names for a scheduler.

use sha2::{Digest, Sha256};

use super::Job;

/// Returns the command of a job for a POSIX shell: its folder, then its program in
/// the shell's place.
pub(super) fn command(job: &Job) -> String {
    let folder = job.folder.display().to_string();
    let words: Vec<_> = job.argv.iter().map(|word| word_of(word)).collect();
    format!("cd {} && exec {}", word_of(&folder), words.join(" "))
}

/// Returns a word that a shell reads as it is.
pub(super) fn word_of(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,+@%".contains(&byte);
    match !text.is_empty() && text.bytes().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Returns a short name for a loop.
pub(super) fn scope(text: &str) -> String {
    Sha256::digest(text).iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_a_word_as_it_is() {
        let words =
            ["a", "", "it's", "a b", "$HOME `id`", "\"x\\", "--flag=a,b", "é\n#!", "*", "~"];
        for word in words {
            let said = std::process::Command::new("sh")
                .arg("-c")
                .arg(format!("printf %s {}", word_of(word)))
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(said.stdout).unwrap(), word);
        }
    }
}
