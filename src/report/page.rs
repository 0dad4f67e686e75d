//! The page.

use std::collections::BTreeMap;

use super::chart::{Axes, Bar, bars, line};
use super::journey::adapted;
use super::series::CURVES;
use super::text::{cut, escape, number};
use super::{Pair, Report, Session};
use crate::health::{Amount, Answer, Verdict};

/// Pairs of answers that the page shows; the CSV has all.
const PAIRS: usize = 20;
/// Characters of a session's name beside a bar.
const NAME: usize = 60;

const STYLE: &str = include_str!("page.css");

pub(super) fn html(report: &Report) -> String {
    let title = escape(&report.title);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<header>\n<h1>{title}</h1>\n{}</header>\n<main>\n",
        summary(report)
    );
    page.push_str(&health(report));
    page.push_str(&rewards(report));
    page.push_str(&training(report));
    page.push_str(&answers(report));
    page.push_str(&figures(report));
    page.push_str(&stages(report));
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

fn summary(report: &Report) -> String {
    let survey = &report.survey;
    let mut facts = vec![
        counted(survey.turns, "turn"),
        counted(survey.sessions(), "session"),
        counted(survey.versions.len() as u64, "policy version"),
        counted(report.steps.len() as u64, "training step"),
    ];
    if let Some((first, last)) = &report.period {
        facts.push(format!("{first} to {last}"));
    }
    format!("<p>{}</p>\n", escape(&facts.join(" · ")))
}

fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn section(heading: &str, body: &str) -> String {
    format!("<section>\n<h2>{heading}</h2>\n{body}</section>\n")
}

fn missing(why: &str) -> String {
    format!("<p class=\"missing\">{}</p>\n", escape(why))
}

fn figure(caption: &str, chart: &str, note: &str) -> String {
    let note = match note {
        "" => String::new(),
        note => format!("<p>{}</p>\n", escape(note)),
    };
    format!("<figure>\n<figcaption>{}</figcaption>\n{chart}{note}</figure>\n", escape(caption))
}

fn health(report: &Report) -> String {
    let card = |answer: &Answer| {
        let verdict = answer.verdict.as_str();
        format!(
            "<article class=\"{verdict}\">\n<h3>{}</h3>\n<p><strong>{verdict}</strong></p>\n<p>{}</p>\n</article>\n",
            escape(answer.question.words()),
            escape(&answer.words())
        )
    };
    let answers = report.health();
    let cards: String = answers.iter().map(card).collect();
    let mut rows = String::new();
    for answer in &answers {
        for judged in &answer.figures {
            let bound = judged.bound;
            let verdict = judged.verdict.as_str();
            rows.push_str(&row(&[
                escape(answer.question.as_str()),
                long(&format!(
                    "{}<br/><small>{}</small>",
                    escape(bound.name),
                    escape(bound.meaning)
                )),
                number(judged.value),
                match judged.verdict {
                    Verdict::Unknown => "unknown".to_owned(),
                    _ => format!("<span class=\"{verdict}\">{verdict}</span>"),
                },
                limits(bound.side.as_str(), bound.watch, bound.ill),
                long(&escape(bound.source)),
            ]));
        }
    }
    let header = ["question", "figure", "value", "verdict", "bounds", "source of the bounds"];
    let all = format!(
        "<details>\n<summary>Every figure and its bounds</summary>\n{}</details>\n",
        table(&header, &rows)
    );
    section("Health", &format!("<div class=\"cards\">\n{cards}</div>\n{all}"))
}

fn limits(side: &str, watch: f64, ill: f64) -> String {
    let ill = match ill.is_finite() {
        true => format!(", ill {side} {ill}"),
        false => String::new(),
    };
    format!("watch {side} {watch}{ill}")
}

fn row(cells: &[String]) -> String {
    let cells: String = cells.iter().map(|cell| format!("<td>{cell}</td>")).collect();
    format!("<tr>{cells}</tr>\n")
}

/// Makes a cell that may break within a word: it keeps a width of its own, so that
/// a narrow page scrolls its table instead of breaking words into letters.
fn long(cell: &str) -> String {
    match cell {
        "" => String::new(),
        cell => format!("<div class=\"long\">{cell}</div>"),
    }
}

fn table(header: &[&str], rows: &str) -> String {
    let header: String = header.iter().map(|name| format!("<th>{name}</th>")).collect();
    format!(
        "<div class=\"wide\">\n<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )
}

fn rewards(report: &Report) -> String {
    let sessions = report.journey.sessions();
    if sessions.iter().all(|session| session.mean.is_none()) {
        return section("Rewards", &missing("No turn has a reward: `oclaw judge` has not run."));
    }
    let mut charts = String::new();
    charts.push_str(&first_replies(&sessions));
    charts.push_str(&session_means(&sessions));
    charts.push_str(&shard_means(report));
    charts.push_str(&scores(report));
    section("Rewards", &format!("<div class=\"charts\">\n{charts}</div>\n"))
}

fn first_replies(sessions: &[Session]) -> String {
    let bar = |(place, session): (usize, &Session)| Bar {
        label: (place + 1).to_string(),
        tip: format!("session {}: {}", cut(&session.id, NAME), number(session.first)),
        value: session.first,
        worth: session.first.unwrap_or_default(),
    };
    let drawn: Vec<Bar> = sessions.iter().enumerate().map(bar).collect();
    let found = adapted(sessions);
    let axes = Axes {
        title: "Reward of the first reply of each session",
        flat: "session, in the order in which they began",
        least: Some((-1.0, 1.0)),
    };
    let note = match found {
        Some(0) => "The first three sessions in a row began with a right reply.".to_owned(),
        Some(place) => format!(
            "Adapted after {}: from session {} on three in a row began with a right reply.",
            counted(place as u64, "session"),
            place + 1
        ),
        None => "No three sessions in a row began with a right reply yet.".to_owned(),
    };
    let run = found.map(|place| (place, 3, "three in a row"));
    figure("Sessions to adapt: reward of the first reply", &bars(&axes, &drawn, run), &note)
}

fn session_means(sessions: &[Session]) -> String {
    let points: Vec<_> =
        (1..).zip(sessions).map(|(place, session)| (place, session.mean)).collect();
    let axes = Axes {
        title: "Mean reward of each session",
        flat: "session, in the order in which they began",
        least: Some((-1.0, 1.0)),
    };
    figure("Mean reward per session", &line(&axes, &points), "")
}

fn shard_means(report: &Report) -> String {
    let shards = report.journey.shards();
    if shards.len() < 2 {
        return String::new();
    }
    let points: Vec<_> = (1..).zip(&shards).map(|(place, (_, mean, _))| (place, *mean)).collect();
    let axes = Axes { title: "Mean reward of each shard", flat: "shard", least: Some((-1.0, 1.0)) };
    figure("Mean reward per shard", &line(&axes, &points), "")
}

fn scores(report: &Report) -> String {
    let scores = &report.survey.scores;
    if scores.is_empty() {
        return String::new();
    }
    // The three scores a judge can give are there even if nobody got them.
    let mut counts: BTreeMap<&str, u64> = ["-1", "0", "1"].map(|score| (score, 0)).into();
    counts.extend(scores.iter().map(|(score, turns)| (score.as_str(), *turns)));
    let bar = |(score, turns): (&str, u64)| Bar {
        label: score.to_owned(),
        tip: format!("score {score}: {}", counted(turns, "turn")),
        value: Some(turns as f64),
        worth: score.parse().unwrap_or_default(),
    };
    let mut drawn: Vec<Bar> = counts.into_iter().map(bar).collect();
    drawn.sort_by(|a, b| a.worth.total_cmp(&b.worth));
    let axes = Axes { title: "Turns per score", flat: "score", least: Some((0.0, 1.0)) };
    let judged: u64 = scores.values().sum();
    let without = report.survey.turns - judged.min(report.survey.turns);
    let note = format!("{} without a score.", counted(without, "turn"));
    figure("Scores: turns of each", &bars(&axes, &drawn, None), &note)
}

fn training(report: &Report) -> String {
    let mut charts = String::new();
    for (_, name, read) in CURVES {
        let points: Vec<_> = report.steps.iter().map(|step| (step.step, read(step))).collect();
        if points.iter().any(|(_, value)| value.is_some()) {
            let axes = Axes { title: name, flat: "step", least: None };
            charts.push_str(&figure(name, &line(&axes, &points), ""));
        }
    }
    match charts.is_empty() {
        true => section("Training", &missing("No metrics of training are known.")),
        false => section("Training", &format!("<div class=\"charts\">\n{charts}</div>\n")),
    }
}

fn answers(report: &Report) -> String {
    let pairs = report.journey.pairs();
    if pairs.is_empty() {
        let why = "No prompt was answered by two policies.";
        return section("Answers before and after", &missing(why));
    }
    let mut body = String::new();
    if pairs.len() > PAIRS {
        body.push_str(&missing(&format!("{PAIRS} of {} prompts; the CSV has all.", pairs.len())));
    }
    for Pair { prompt, before, after } in pairs.into_iter().take(PAIRS) {
        let side = |name: &str, spoken: &super::Spoken| {
            format!(
                "<div>\n<h4>{name}: policy {}, reward {}</h4>\n<pre>{}</pre>\n</div>\n",
                spoken.version,
                number(spoken.reward),
                escape(&spoken.answer)
            )
        };
        body.push_str(&format!(
            "<article class=\"pair\">\n<pre class=\"prompt\">{}</pre>\n<div class=\"sides\">\n{}{}</div>\n</article>\n",
            escape(prompt),
            side("before", before),
            side("after", after)
        ));
    }
    section("Answers before and after", &body)
}

fn figures(report: &Report) -> String {
    let mut rows = String::new();
    for figure in report.survey.figures() {
        let value = match figure.amount {
            Amount::Count(count) => count.to_string(),
            Amount::Number(value) => number(value),
        };
        rows.push_str(&row(&[escape(figure.group), long(&escape(&figure.name)), value]));
    }
    let all = table(&["about", "figure", "value"], &rows);
    let body =
        format!("<details>\n<summary>Every figure of the turns</summary>\n{all}</details>\n");
    section("Figures", &body)
}

fn stages(report: &Report) -> String {
    if report.stages.is_empty() {
        return section("Stages", &missing("The tables do not say where they came from."));
    }
    let mut rows = String::new();
    for stage in &report.stages {
        rows.push_str(&row(&[
            escape(&stage.command),
            escape(&stage.version),
            long(&format!("<code>{}</code>", escape(&stage.arguments))),
            stage.seed.map_or("-".to_owned(), |seed| seed.to_string()),
            long(&stage.inputs.iter().map(|input| escape(input)).collect::<Vec<_>>().join("<br/>")),
            escape(&stage.usage),
        ]));
    }
    let header = ["stage", "version", "command line", "seed", "read", "asked"];
    section("Stages", &table(&header, &rows))
}
