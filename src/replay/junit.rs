//! Findings as JUnit XML, for the display of a build.

use std::fmt::Write;
use std::time::Duration;

use super::Finding;

/// Cases under one name.
#[derive(Debug, Clone, Default)]
pub struct Suite {
    /// Its name.
    pub name: String,
    /// What was looked at.
    pub cases: Vec<Case>,
}

/// One thing that was looked at.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name in the suite.
    pub name: String,
    /// What it came to.
    pub finding: Finding,
    /// How long it took.
    pub took: Duration,
    /// What else there is to say of it, a line each.
    pub notes: Vec<String>,
}

/// Writes suites.
pub fn junit(title: &str, suites: &[Suite]) -> String {
    let mut text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_owned();
    let all = || suites.iter().flat_map(|suite| &suite.cases);
    // Writing to a `String` does not fail.
    let _ = writeln!(text, "<testsuites name=\"{}\" {}>", escaped(title), attributes(all));
    for suite in suites {
        let counts = attributes(|| suite.cases.iter());
        let _ = writeln!(text, "  <testsuite name=\"{}\" {counts}>", escaped(&suite.name));
        for case in &suite.cases {
            write_case(&mut text, &suite.name, case);
        }
        text.push_str("  </testsuite>\n");
    }
    text.push_str("</testsuites>\n");
    text
}

fn attributes<'a, Cases: Iterator<Item = &'a Case>>(cases: impl Fn() -> Cases) -> String {
    let count = |word: &str| cases().filter(|case| case.finding.word() == word).count();
    let took: Duration = cases().map(|case| case.took).sum();
    format!(
        "tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.3}\"",
        cases().count(),
        count("differs"),
        count("failed"),
        count("not compared"),
        took.as_secs_f64(),
    )
}

fn write_case(text: &mut String, class: &str, case: &Case) {
    let (class, name) = (escaped(class), escaped(&case.name));
    let took = case.took.as_secs_f64();
    let what = escaped(case.finding.what());
    let mut inside = match &case.finding {
        Finding::Same => String::new(),
        Finding::Differs(_) => format!("<failure type=\"differs\" message=\"{what}\"/>"),
        Finding::Failed(_) => format!("<error type=\"failed\" message=\"{what}\"/>"),
        Finding::NotCompared(_) => format!("<skipped message=\"{what}\"/>"),
    };
    if !case.notes.is_empty() {
        let notes = escaped(&case.notes.join("\n"));
        let _ = write!(inside, "<system-out>{notes}</system-out>");
    }
    let head = format!("    <testcase classname=\"{class}\" name=\"{name}\" time=\"{took:.3}\"");
    let _ = match inside.is_empty() {
        true => writeln!(text, "{head}/>"),
        false => writeln!(text, "{head}>{inside}</testcase>"),
    };
}

/// Returns a text as an attribute of XML 1.0 may hold it. What it may not hold in
/// any way, even escaped, becomes the sign for an unknown character.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\t' | '\n' | '\r' => {
                let _ = write!(safe, "&#{};", u32::from(character));
            }
            '\u{0}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => safe.push('\u{fffd}'),
            other => safe.push(other),
        }
    }
    safe
}
