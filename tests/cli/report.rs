//! `oclaw report`: the page and its series.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use oclaw::table::Format;
use oclaw::trajectory::Turn;
use oclaw::trajectory::turn::Micros;

use crate::forge::{STAGES, captured, finished, write};
use crate::harness::{fixture, oclaw};

/// Checks that every tag is closed in order, that attributes are quoted, and that
/// text has no markup of its own. Returns the names of the elements.
#[track_caller]
fn well_formed(page: &str) -> Vec<String> {
    let body = page.strip_prefix("<!doctype html>\n").unwrap();
    let (mut open, mut names) = (Vec::<String>::new(), Vec::new());
    let mut rest = body;
    while let Some(at) = rest.find('<') {
        check_text(&rest[..at]);
        let end = at + rest[at..].find('>').unwrap();
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "closed out of order");
            continue;
        }
        let lone = tag.ends_with('/');
        let tag = tag.trim_end_matches('/');
        let (name, attributes) = tag.split_once(' ').unwrap_or((tag, ""));
        assert!(name.chars().all(|letter| letter.is_ascii_alphanumeric()), "<{name}>");
        check_attributes(attributes);
        names.push(name.to_owned());
        match name {
            "style" => {
                let (style, after) = rest.split_once("</style>").unwrap();
                assert!(!style.contains(['<', '>', '&']));
                rest = after;
            }
            _ if lone => {}
            _ => open.push(name.to_owned()),
        }
    }
    assert!(open.is_empty(), "never closed: {open:?}");
    assert_eq!(rest, "\n");
    names
}

#[track_caller]
fn check_text(text: &str) {
    assert!(!text.contains('>'), "{text}");
    for entity in text.split('&').skip(1) {
        let known = ["amp;", "lt;", "gt;", "quot;", "#39;"];
        assert!(known.iter().any(|known| entity.starts_with(known)), "&{entity}");
    }
}

#[track_caller]
fn check_attributes(mut text: &str) {
    while !text.trim().is_empty() {
        let (name, rest) = text.split_once("=\"").unwrap();
        let name = name.trim();
        assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'), "{name}");
        // Nothing of the page acts, and nothing comes from elsewhere.
        assert!(!name.starts_with("on") && !["src", "href", "style"].contains(&name), "{name}");
        let (value, after) = rest.split_once('"').unwrap();
        check_text(value);
        text = after;
    }
}

fn sh(folder: &Path, script: &str) {
    let mut command = std::process::Command::new("bash");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("OCLAW_") {
            command.env_remove(name);
        }
    }
    let output = command
        .current_dir(folder)
        .env("oclaw", env!("CARGO_BIN_EXE_oclaw"))
        .args(["-e", "-o", "pipefail", "-c", script])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

const METRICS: &str = r#"{"step":1,"turns":9,"tokens":300,"loss":0.61,"reference_kl":null,"approximate_kl":0.0,"clip_fraction":0.0,"log_prob_gap":0.004,"gradient_norm":1.9,"entropy":5.1,"reward":-0.2,"advantage_std":0.9}
{"step":2,"turns":9,"tokens":280,"loss":0.42,"reference_kl":null,"approximate_kl":0.001,"clip_fraction":0.02,"log_prob_gap":0.006,"gradient_norm":1.4,"entropy":4.8,"reward":0.1,"advantage_std":0.8}
{"step":3,"turns":9,"tokens":290,"loss":0.35,"reference_kl":null,"approximate_kl":0.002,"clip_fraction":0.03,"log_prob_gap":null,"gradient_norm":1.2,"entropy":4.7,"reward":0.4,"advantage_std":0.8}
"#;

#[test]
fn the_page_of_recorded_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    for stage in ["turns", "ready"] {
        fs::create_dir_all(run.join(stage)).unwrap();
    }
    fs::copy(fixture("sessions/tiny.parquet"), run.join("turns/tiny.parquet")).unwrap();
    fs::write(run.join("metrics.jsonl"), METRICS).unwrap();
    sh(
        folder.path(),
        r#""$oclaw" judge --rules run/turns | "$oclaw" hint --from-feedback |
           "$oclaw" advantage --estimator grpo -o run/ready/tiny.parquet
           "$oclaw" report run -o report.html --csv series -q"#,
    );
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    let names = well_formed(&page);
    assert!(
        !names.iter().any(|name| ["script", "link", "img", "a", "iframe"].contains(&name.as_str()))
    );
    assert!(names.iter().filter(|name| *name == "svg").count() >= 10);
    for part in ["http://", "https://", "url(", "@import"] {
        assert!(!page.contains(part), "{part}");
    }
    let version = format!("<td>{}</td>", env!("CARGO_PKG_VERSION"));
    insta::assert_snapshot!(page.replace(&version, "<td>VERSION</td>"));
    let steps = fs::read_to_string(folder.path().join("series/steps.csv")).unwrap();
    assert!(steps.starts_with("step,loss,reference_kl,approximate_kl,clip_fraction,log_prob_gap,"));
    assert!(steps.contains("\n3,0.35,,0.002,0.03,,1.2,4.7,0.4,0.8\n"), "{steps}");
    let mut files: Vec<_> = fs::read_dir(folder.path().join("series"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let expected =
        ["answers", "figures", "health", "scores", "sessions", "shards", "stages", "steps"];
    assert_eq!(files, expected.map(|name| format!("{name}.csv")));
    // The same tables make the same page.
    sh(folder.path(), r#""$oclaw" report run > again.html"#);
    assert_eq!(page, fs::read_to_string(folder.path().join("again.html")).unwrap());
}

#[test]
fn chats_never_become_markup() {
    const HOSTILE: &str =
        "</pre><script>alert(1)</script>\u{0}\u{1b}[31m\"'&amp;<img src=x onerror=alert(1)>";
    let folder = tempfile::tempdir().unwrap();
    let said = |role: &str| serde_json::json!({"role": role, "content": HOSTILE});
    let turn = |session: &str, version: &str| Turn {
        session_id: format!("{session}{HOSTILE}"),
        messages: serde_json::json!([said("user")]).to_string(),
        response: said("assistant").to_string(),
        weight_version: Some(version.to_owned()),
        untrainable_reason: Some(HOSTILE.to_owned()),
        sample_reason: Some(HOSTILE.to_owned()),
        ..finished(session, 1)
    };
    let name = "<b>&.parquet";
    let turns = [turn("a", "0"), turn("b", "1"), turn("c", HOSTILE)];
    write(&folder.path().join(name), Format::Parquet, &STAGES, &turns);
    let run = oclaw()
        .current_dir(folder.path())
        .args(["report", name, "--csv", "series", "-o", "-"])
        .assert()
        .success();
    let page = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    let names = well_formed(&page);
    assert!(!names.iter().any(|name| name == "script" || name == "img" || name == "b"));
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;\\u{0}\\u{1b}[31m"), "{page}");
    assert!(page.contains("before: policy 0") && page.contains("after: policy 1"), "{page}");
    assert!(!page.contains(['\u{0}', '\u{1b}']));
    let answers = fs::read(folder.path().join("series/answers.csv")).unwrap();
    let mut reader = csv::Reader::from_reader(answers.as_slice());
    let row = reader.records().next().unwrap().unwrap();
    assert_eq!(&row[2], HOSTILE, "a file of data keeps the data");
}

#[test]
fn what_is_not_known_is_said() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("raw.parquet"), Format::Parquet, &STAGES[..1], &[captured("s", 1)]);
    let run = oclaw().current_dir(folder.path()).args(["report", "raw.parquet"]).assert().success();
    let page = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    let names = well_formed(&page);
    assert!(!names.iter().any(|name| name == "svg"));
    for part in [
        "No turn has a reward: `oclaw judge` has not run.",
        "No metrics of training are known.",
        "No prompt was answered by two policies.",
        "The tables do not say where they came from.",
        "1 turn · 1 session · 1 policy version · 0 training steps · 2025-11-29 13:34 UTC to",
    ] {
        assert!(page.contains(part), "{part}\n{page}");
    }
}

/// Returns the page of some turns.
fn page_of(turns: &[Turn]) -> String {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, turns);
    let run = oclaw().current_dir(folder.path()).args(["report", "t.parquet"]).assert().success();
    let page = String::from_utf8(run.get_output().stdout.clone()).unwrap();
    well_formed(&page);
    assert!(!page.contains("NaN") && !page.contains(">inf"), "{page}");
    page
}

#[test]
fn praise_alone_of_one_policy() {
    let praised = |session: &str| Turn {
        score: Some(1.0),
        reward: Some(1.0),
        votes: Some(vec![Some(1)]),
        judge_text: Some(vec![Some("\\boxed{1}".to_owned())]),
        ..finished(session, 1)
    };
    let page = page_of(&["a", "b", "c"].map(praised));
    for part in [
        "3 turns · 3 sessions · 1 policy version · 0 training steps",
        "The first three sessions in a row began with a right reply.",
        "<title>score 1: 3 turns</title>",
        "<title>score -1: 0 turns</title>",
        "No prompt was answered by two policies.",
    ] {
        assert!(page.contains(part), "{part}\n{page}");
    }
}

#[test]
fn an_import_without_times_has_no_part_in_the_period() {
    let undated = Turn { created_at: Micros(0), finished_at: Micros(0), ..finished("a", 1) };
    let page = page_of(&[undated.clone(), finished("b", 1)]);
    assert!(page.contains("2025-11-29 13:34 UTC to 2025-11-29 13:34 UTC"), "{page}");
    let page = page_of(&[undated]);
    assert!(!page.contains("1970") && !page.contains(" UTC"), "{page}");
}

#[test]
fn a_table_without_rows() {
    let page = page_of(&[]);
    assert!(page.contains("<p>0 turns · 0 sessions · 0 policy versions · 0 training steps</p>"));
    assert!(page.contains("No turn has a reward"), "{page}");
}

#[test]
fn words_break_only_where_a_cell_is_made_for_it() {
    let style = include_str!("../../src/report/page.css");
    // A word that may break anywhere counts as one letter wide in a table.
    let breaking: Vec<_> = style
        .split('}')
        .filter_map(|rule| {
            let (selector, rest) = rule.split_once('{')?;
            let (_, how) = rest.split_once("overflow-wrap:")?;
            Some((selector.trim(), how.split(';').next()?.trim()))
        })
        .collect();
    assert_eq!(breaking, [("body", "break-word"), (".long", "anywhere"), ("pre", "anywhere")]);
    assert!(!style.contains("word-break") && !style.contains("break-all"));
    let page = page_of(&[finished("a", 1)]);
    assert_eq!(page.matches("<table>").count(), page.matches("<div class=\"wide\">").count());
}

#[test]
fn a_page_that_cannot_be_written_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &[finished("s", 1)]);
    fs::create_dir(folder.path().join("full")).unwrap();
    let names = || {
        let entries = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        entries.map(|name| name.into_string().unwrap()).collect::<BTreeSet<_>>()
    };
    let fails = |further: &[&str]| {
        for target in ["none/report.html", "full"] {
            let mut command = oclaw();
            command.current_dir(folder.path()).args(["report", "t.parquet", "-o", target]);
            let run = command.args(further).assert().code(1);
            let words = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
            let wanted = format!("oclaw report: cannot write `{target}`");
            assert!(words.contains(&wanted) && !words.contains("page in"), "{words}");
        }
    };
    fails(&[]);
    assert_eq!(names(), ["full", "t.parquet"].map(str::to_owned).into());
    // The series are written before the page, each whole.
    fails(&["--csv", "series"]);
    assert_eq!(names(), ["full", "series", "t.parquet"].map(str::to_owned).into());
    for entry in fs::read_dir(folder.path().join("series")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(name.ends_with(".csv") && !name.starts_with('.'), "{name}");
    }
    assert_eq!(fs::read_dir(folder.path().join("full")).unwrap().count(), 0);
}
