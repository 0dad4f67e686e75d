//! Prometheus' text format: what the servers here tell of themselves.

use std::fmt::{Display, Write};

/// Type of the text, for the header of an answer.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4";

/// Writes what a metric is; its samples follow.
pub fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string cannot fail.
    let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

/// Writes a sample with its labels.
pub fn sample(text: &mut String, name: &str, labels: &[(&str, &str)], value: impl Display) {
    text.push_str(name);
    for (place, (label, word)) in labels.iter().enumerate() {
        let before = if place == 0 { '{' } else { ',' };
        let _ = write!(text, "{before}{label}=\"{}\"", escaped(word));
    }
    if !labels.is_empty() {
        text.push('}');
    }
    let _ = writeln!(text, " {value}");
}

/// Escapes what stands between the quotes of a label.
fn escaped(word: &str) -> String {
    word.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_stand_between_quotes() {
        let mut text = String::new();
        sample(&mut text, "plain", &[], 3);
        sample(&mut text, "odd", &[("a", "x\"\\\ny"), ("le", "+Inf")], 0.5);
        assert_eq!(text, "plain 3\nodd{a=\"x\\\"\\\\\\ny\",le=\"+Inf\"} 0.5\n");
    }
}
