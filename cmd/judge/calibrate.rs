//! `judge --calibrate`: the judge's scores beside people's labels.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use futures_util::{StreamExt, stream};
use oclaw::judge::{Agreement, SCORES};
use oclaw::stage::Tally;
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::NextStateKind;
use serde_json::{Value, json};

use super::labels::Labels;
use super::{Args, Judging};
use crate::asking::stage::{Asks as _, By};
use crate::common::{Context, Printing as _};
use crate::files::StageFormat;
use crate::report::{Exit, Failure};

/// Who came next, and all together.
const ROLES: [&str; 3] = ["all", "user", "tool"];

/// What a comparison came to.
#[derive(Debug, Default)]
struct Comparison {
    labels: u64,
    /// Labels that no turn has.
    without_turn: u64,
    /// Turns that have a score and no label.
    unlabelled: u64,
    all: Role,
    user: Role,
    tool: Role,
}

#[derive(Debug, Default)]
struct Role {
    agreement: Agreement,
    /// Turns that have a label and no score.
    unscored: u64,
}

/// Compares scores with labels. Somebody who judges is asked about the labelled
/// turns; else the table's own scores are taken.
pub(super) async fn run(
    (args, file): (&Args, &Path),
    judging: Option<Judging>,
    context: &Context,
) -> anyhow::Result<Exit> {
    let labels = Labels::read(file)?;
    let (mut comparison, turns) = labelled(args, &labels, context)?;
    let turns = match &judging {
        None => turns,
        Some(judging) => judged(args, judging, turns, context).await?,
    };
    for (turn, label) in &turns {
        comparison.add(turn, *label);
    }
    let all = comparison.role("all");
    if all.agreement.compared() == 0 {
        let unscored = all.unscored;
        let problem = format!("no turn has both a score and a label of `{}`", file.display());
        let hint = match unscored {
            0 => "do its labels name turns of this table?",
            _ => {
                "judge the table first, or say by whom: `--engine URL`, `--model DIR` or `--rules`"
            }
        };
        return Err(Failure::failed(problem).hint(hint).into());
    }
    let whole = all.unscored + comparison.without_turn == 0;
    let text = match args.files.format {
        Some(StageFormat::Json) => format!("{}\n", comparison.json()),
        Some(StageFormat::Csv) => comparison.csv()?,
        _ => comparison.table(),
    };
    std::io::stdout().write_all(text.as_bytes()).printed()?;
    Ok(if whole { Exit::Done } else { Exit::Partial })
}

/// Reads the table and keeps the turns that have labels.
fn labelled(
    args: &Args,
    labels: &Labels,
    context: &Context,
) -> anyhow::Result<(Comparison, Vec<(Turn, i8)>)> {
    let mut source = args.files.inputs.open(context)?;
    let mut comparison = Comparison { labels: labels.len() as u64, ..Comparison::default() };
    let mut turns = Vec::new();
    let mut seen = BTreeMap::<u64, String>::new();
    while let Some(batch) = source.next_batch()? {
        for turn in source.read(&batch)? {
            match labels.of(&turn) {
                None => comparison.unlabelled += u64::from(turn.score.is_some()),
                Some((label, line)) => {
                    let (id, number) = (turn.turn_id.clone(), turn.turn);
                    if let Some(other) = seen.insert(line, id) {
                        let problem = format!(
                            "the label on line {line} fits turn {number} of session `{}` twice: `{other}` and `{}`",
                            turn.session_id, turn.turn_id
                        );
                        return Err(Failure::failed(problem).hint("label it by `turn_id`").into());
                    }
                    turns.push((turn, label));
                }
            }
        }
    }
    comparison.without_turn = comparison.labels - seen.len() as u64;
    Ok((comparison, turns))
}

/// Lets the labelled turns be judged now.
async fn judged(
    args: &Args,
    judging: &Judging,
    turns: Vec<(Turn, i8)>,
    context: &Context,
) -> anyhow::Result<Vec<(Turn, i8)>> {
    let asker = match judging.asks() {
        true => Some(args.asking.connect(context, true).await?),
        false => None,
    };
    let by = By::aside(judging, &args.files, context, asker);
    let rows = turns.len() as u64;
    let note = async |(turn, label)| (judging.note(turn, &by).await, label);
    let noted = async {
        let at_once = by.asker.as_ref().map_or(1, |asker| asker.at_once);
        let noted = stream::iter(turns).map(note).buffered(at_once);
        Ok(noted.collect::<Vec<_>>().await)
    };
    let noted = match &by.asker {
        Some(asker) => asker.absent.unless_needed(noted).await,
        None => noted.await,
    };
    let table = by.finish().await;
    let noted = noted?;
    context.conclude(table(&Tally { rows, ..Tally::default() }));
    Ok(noted)
}

impl Comparison {
    fn add(&mut self, turn: &Turn, label: i8) {
        let role = match turn.next_state_kind {
            NextStateKind::Tool => &mut self.tool,
            _ => &mut self.user,
        };
        let score = SCORES.into_iter().find(|score| turn.score == Some(f32::from(*score)));
        for role in [&mut self.all, role] {
            match score {
                None => role.unscored += 1,
                Some(score) => {
                    let votes = turn.votes.as_deref().unwrap_or_default();
                    role.agreement.add(label, score, votes);
                }
            }
        }
    }

    fn role(&self, name: &str) -> &Role {
        match name {
            "user" => &self.user,
            "tool" => &self.tool,
            _ => &self.all,
        }
    }

    fn json(&self) -> Value {
        let role = |name: &&str| {
            let Role { agreement, unscored } = self.role(name);
            let row = |person: i8| -> Value {
                let cell = |judge: i8| (judge.to_string(), json!(agreement.count(person, judge)));
                Value::Object(SCORES.into_iter().map(cell).collect())
            };
            let confusion = SCORES.into_iter().map(|person| (person.to_string(), row(person)));
            let told = json!({
                "compared": agreement.compared(),
                "without_score": unscored,
                "accuracy": agreement.accuracy(),
                "kappa": agreement.kappa(),
                "vote_entropy": agreement.vote_entropy(),
                "confusion": Value::Object(confusion.collect()),
            });
            ((*name).to_owned(), told)
        };
        json!({
            "labels": self.labels,
            "labels_without_turn": self.without_turn,
            "scores_without_label": self.unlabelled,
            "roles": Value::Object(ROLES.iter().map(role).collect()),
        })
    }

    fn csv(&self) -> anyhow::Result<String> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        let pairs = || SCORES.into_iter().flat_map(|person| SCORES.map(|judge| (person, judge)));
        let head = ["role", "compared", "without_score", "accuracy", "kappa", "vote_entropy"];
        let names = pairs().map(|(person, judge)| format!("person {person} judge {judge}"));
        writer.write_record(head.into_iter().map(str::to_owned).chain(names))?;
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
        for name in ROLES {
            let Role { agreement, unscored } = self.role(name);
            let fields = [
                name.to_owned(),
                agreement.compared().to_string(),
                unscored.to_string(),
                number(agreement.accuracy()),
                number(agreement.kappa()),
                number(agreement.vote_entropy()),
            ];
            let counts = pairs().map(|(person, judge)| agreement.count(person, judge).to_string());
            writer.write_record(fields.into_iter().chain(counts))?;
        }
        Ok(String::from_utf8(writer.into_inner()?)?)
    }

    /// Writes it for people.
    fn table(&self) -> String {
        let number =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
        let mut table = Table::new();
        table.load_style(NOTHING);
        table.add_row(std::iter::once("").chain(ROLES));
        let mut row = |name: &str, tell: &dyn Fn(&Role) -> String| {
            let told = ROLES.iter().map(|role| tell(self.role(role)));
            table.add_row(std::iter::once(name.to_owned()).chain(told));
        };
        row("turns compared", &|role| role.agreement.compared().to_string());
        row("  with a label, without a score", &|role| role.unscored.to_string());
        row("accuracy", &|role| number(role.agreement.accuracy()));
        row("Cohen's kappa", &|role| number(role.agreement.kappa()));
        row("entropy of the votes, nats", &|role| number(role.agreement.vote_entropy()));
        for person in SCORES {
            let name = format!("person {person:+}, judge -1 / 0 / +1");
            row(&name, &|role| {
                let counts = SCORES.map(|judge| role.agreement.count(person, judge).to_string());
                counts.join(" / ")
            });
        }
        let body = table.to_string();
        let head = format!(
            "labels {}, {} of them without a turn; turns with a score and no label {}\n",
            self.labels, self.without_turn, self.unlabelled
        );
        format!("{head}{body}\n")
    }
}
