//! What a check found, and how it is printed.

use std::io::{self, Write};

use comfy_table::{ContentArrangement, Table};
use serde::Serialize;

use crate::report::{Exit, Failure, Kind};
use crate::view::print;
use crate::visible::visible;

/// What a check came to.
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Ok,
    /// The loop can run, with less than was asked for.
    Warn,
    /// It cannot.
    Fail,
}

/// What a check found.
#[derive(Serialize, Debug)]
pub(super) struct Finding {
    check: &'static str,
    /// What was checked.
    subject: String,
    pub(super) result: Verdict,
    found: String,
    /// What to do about it.
    pub(super) remedy: Option<String>,
    #[serde(skip)]
    code: Kind,
}

impl Finding {
    fn new(check: &'static str, subject: impl Into<String>, found: impl Into<String>) -> Self {
        let (subject, found) = (subject.into(), found.into());
        Self { check, subject, result: Verdict::Ok, found, remedy: None, code: Kind::Usage }
    }

    /// All is well.
    pub(super) fn ok(
        check: &'static str,
        subject: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self::new(check, subject, found)
    }

    /// Not all is well.
    pub(super) fn warn(
        check: &'static str,
        subject: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self { result: Verdict::Warn, ..Self::new(check, subject, found) }
    }

    /// The settings ask for what cannot be.
    pub(super) fn fail(
        check: &'static str,
        subject: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self { result: Verdict::Fail, ..Self::new(check, subject, found) }
    }

    /// An error of one of the rooms.
    pub(super) fn error(
        check: &'static str,
        subject: impl Into<String>,
        error: impl Into<anyhow::Error>,
    ) -> Self {
        let (found, remedy, code) = crate::report::verdict(&error.into());
        Self { remedy, code, ..Self::fail(check, subject, found) }
    }

    /// Says what to do.
    pub(super) fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    /// Says whose fault it is.
    pub(super) fn because(self, code: Kind) -> Self {
        Self { code, ..self }
    }
}

/// Prints findings as a table.
pub(super) fn table(out: &mut impl Write, findings: &[Finding]) -> io::Result<()> {
    let mut table = Table::new();
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["check", "of", "result", "found", "what to do"]);
    for finding in findings {
        let result = match finding.result {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        };
        let remedy = finding.remedy.as_deref().unwrap_or("");
        let cells = [finding.check, &finding.subject, result, &finding.found, remedy];
        table.add_row(cells.map(visible));
    }
    print(out, table)
}

/// Prints findings as JSON, one object a line.
pub(super) fn json(out: &mut impl Write, findings: &[Finding]) -> io::Result<()> {
    for finding in findings {
        serde_json::to_writer(&mut *out, finding)?;
        writeln!(out)?;
    }
    Ok(())
}

/// Says how the check ends: what is wrong with the settings comes before what is
/// with this machine, and that before an engine that is away.
pub(super) fn end(findings: &[Finding]) -> anyhow::Result<Exit> {
    let failed: Vec<_> = findings.iter().filter(|it| it.result == Verdict::Fail).collect();
    let message = format!("{} of {} checks failed", failed.len(), findings.len());
    let has = |code: Kind| failed.iter().any(|finding| finding.code == code);
    match () {
        () if failed.is_empty() => {
            let warned = findings.iter().any(|it| it.result == Verdict::Warn);
            Ok(if warned { Exit::Partial } else { Exit::Done })
        }
        () if has(Kind::Usage) => Err(Failure::usage(message).into()),
        () if has(Kind::Failed) => Err(Failure::failed(message).into()),
        () => Err(Failure::engine(message).into()),
    }
}
