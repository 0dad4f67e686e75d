//! Every series of a report as a table of texts.

use super::Report;
use crate::health::{Amount, Step};

/// A named table. An empty cell is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Series {
    /// Name, fit for a file.
    pub name: &'static str,
    /// Names of its columns.
    pub header: Vec<&'static str>,
    /// Its rows.
    pub rows: Vec<Vec<String>>,
}

/// A figure of the steps and how it is read.
pub(super) type Curve = (&'static str, &'static str, fn(&Step) -> Option<f64>);

/// The curves of training: key, name, value.
pub(super) const CURVES: [Curve; 9] = [
    ("loss", "Loss", |step| step.loss),
    ("reference_kl", "KL to the start model", |step| step.reference_kl),
    ("approximate_kl", "Approximate KL (lo - lc)", |step| step.approximate_kl),
    ("clip_fraction", "Share of clipped tokens", |step| step.clip_fraction),
    ("log_prob_gap", "|trainer - server| log-prob", |step| step.log_prob_gap),
    ("gradient_norm", "Gradient norm", |step| step.gradient_norm),
    ("entropy", "Entropy", |step| step.entropy),
    ("reward", "Reward of the batch", |step| step.reward),
    ("advantage_std", "Std of the advantages", |step| step.advantage_std),
];

fn exact(value: Option<f64>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

pub(super) fn all(report: &Report) -> Vec<Series> {
    vec![
        sessions(report),
        shards(report),
        scores(report),
        steps(report),
        health(report),
        figures(report),
        answers(report),
        stages(report),
    ]
}

fn sessions(report: &Report) -> Series {
    let row = |(place, session): (usize, &super::Session)| {
        vec![
            (place + 1).to_string(),
            session.id.clone(),
            exact(session.mean),
            session.rewarded.to_string(),
            exact(session.first),
        ]
    };
    Series {
        name: "sessions",
        header: vec!["index", "session", "mean_reward", "rewarded_turns", "first_reward"],
        rows: report.journey.sessions().iter().enumerate().map(row).collect(),
    }
}

fn shards(report: &Report) -> Series {
    let shards = report.journey.shards().into_iter().enumerate();
    Series {
        name: "shards",
        header: vec!["index", "shard", "mean_reward", "rewarded_turns"],
        rows: shards
            .map(|(place, (name, mean, count))| {
                vec![(place + 1).to_string(), name.to_owned(), exact(mean), count.to_string()]
            })
            .collect(),
    }
}

fn scores(report: &Report) -> Series {
    let row = |(score, count): (&String, &u64)| vec![score.clone(), count.to_string()];
    Series {
        name: "scores",
        header: vec!["score", "turns"],
        rows: report.survey.scores.iter().map(row).collect(),
    }
}

fn steps(report: &Report) -> Series {
    let row = |step: &Step| {
        let values = CURVES.iter().map(|(_, _, read)| exact(read(step)));
        std::iter::once(step.step.to_string()).chain(values).collect()
    };
    Series {
        name: "steps",
        header: std::iter::once("step").chain(CURVES.iter().map(|(key, ..)| *key)).collect(),
        rows: report.steps.iter().map(row).collect(),
    }
}

fn health(report: &Report) -> Series {
    let mut rows = Vec::new();
    for answer in report.health() {
        for judged in &answer.figures {
            let bound = judged.bound;
            rows.push(vec![
                answer.question.as_str().to_owned(),
                answer.verdict.to_string(),
                bound.name.to_owned(),
                exact(judged.value),
                judged.verdict.to_string(),
                bound.side.as_str().to_owned(),
                bound.watch.to_string(),
                bound.ill.to_string(),
            ]);
        }
    }
    Series {
        name: "health",
        header: vec![
            "question",
            "verdict",
            "figure",
            "value",
            "figure_verdict",
            "side",
            "watch",
            "ill",
        ],
        rows,
    }
}

fn figures(report: &Report) -> Series {
    let figures = report.survey.figures().into_iter();
    Series {
        name: "figures",
        header: vec!["group", "name", "value"],
        rows: figures
            .map(|figure| {
                let value = match figure.amount {
                    Amount::Count(count) => count.to_string(),
                    Amount::Number(value) => exact(value),
                };
                vec![figure.group.to_owned(), figure.name, value]
            })
            .collect(),
    }
}

fn answers(report: &Report) -> Series {
    let row = |pair: &super::Pair| {
        vec![
            pair.prompt.clone(),
            pair.before.version.to_string(),
            pair.before.answer.clone(),
            exact(pair.before.reward),
            pair.after.version.to_string(),
            pair.after.answer.clone(),
            exact(pair.after.reward),
        ]
    };
    Series {
        name: "answers",
        header: vec![
            "prompt",
            "before_version",
            "before_answer",
            "before_reward",
            "after_version",
            "after_answer",
            "after_reward",
        ],
        rows: report.journey.pairs().into_iter().map(row).collect(),
    }
}

fn stages(report: &Report) -> Series {
    let row = |stage: &super::StageRow| {
        vec![
            stage.command.clone(),
            stage.version.clone(),
            stage.arguments.clone(),
            stage.seed.map(|seed| seed.to_string()).unwrap_or_default(),
            stage.inputs.join("; "),
            stage.usage.clone(),
        ]
    };
    Series {
        name: "stages",
        header: vec!["command", "version", "arguments", "seed", "inputs", "usage"],
        rows: report.stages.iter().map(row).collect(),
    }
}
