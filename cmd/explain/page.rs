//! A story as a page of text.

use std::io::{self, Write};

use comfy_table::{Cell, CellAlignment, ColumnConstraint, ContentArrangement, Row, Table, presets};

use super::heat;
use super::story::{Hint, Loss, Said, Share, Story, Token, Vote};
use crate::reduction::ReductionName;
use crate::view::cut;
use crate::visible::visible;

/// How a page looks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    pub(super) colored: bool,
    pub(super) width: u16,
}

/// A heading and its lines, each with a label.
struct Block {
    heading: String,
    lines: Vec<(String, String)>,
}

impl Block {
    fn new(heading: impl Into<String>) -> Self {
        Self { heading: heading.into(), lines: Vec::new() }
    }

    fn line(&mut self, label: impl Into<String>, text: impl Into<String>) {
        self.lines.push((label.into(), text.into()));
    }

    fn known(&mut self, label: &str, text: Option<&String>) {
        text.iter().for_each(|text| self.line(label, text.as_str()));
    }

    fn messages(&mut self, messages: &[Said]) {
        messages.iter().for_each(|Said { role, text }| self.line(role, text));
    }
}

pub(super) fn print(out: &mut impl Write, story: &Story, style: Style) -> io::Result<()> {
    for block in
        [heading(story), asked(story), then(story), judged(story), hints(story), signal(story)]
    {
        write_block(out, &block, style)?;
    }
    if !story.tokens.is_empty() {
        tokens(out, story, style)?;
        heat(out, story, style)?;
    }
    write_block(out, &loss(story), style)
}

/// Escapes what is not to be printed, but keeps the lines of a text: each stands
/// under the label, so that none can look like one.
fn shown(text: &str) -> String {
    text.split('\n').map(|line| visible(line.trim_end_matches('\r'))).collect::<Vec<_>>().join("\n")
}

fn write_block(out: &mut impl Write, block: &Block, style: Style) -> io::Result<()> {
    writeln!(out, "{}", visible(&block.heading))?;
    if block.lines.is_empty() {
        return Ok(());
    }
    let mut table = table(style);
    for (label, text) in &block.lines {
        table.add_row([format!("  {}", cut(&visible(label), 24)), shown(text)]);
    }
    if let Some(column) = table.column_mut(0) {
        column.set_constraint(ColumnConstraint::ContentWidth);
    }
    write_table(out, &table)
}

fn table(style: Style) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(style.width)
        .force_no_tty();
    if style.colored {
        table.enforce_styling();
    }
    table
}

fn write_table(out: &mut impl Write, table: &Table) -> io::Result<()> {
    table.lines().try_for_each(|line| writeln!(out, "{}", line.trim_end()))
}

fn heading(story: &Story) -> Block {
    let mut block = Block::new(format!("turn {}", story.turn_id));
    block.line(
        "session",
        format!("{}, turn {}, branch {}", story.session_id, story.turn, story.branch),
    );
    let version = match (&story.weight_version, &story.weight_version_end) {
        (Some(start), Some(end)) if start != end => format!("policy {start}, {end} at the end"),
        (Some(start), _) => format!("policy {start}"),
        (None, _) => "policy not known".to_owned(),
    };
    block.line("model", format!("{}, {version}", story.model));
    block.line("asked at", story.created_at.as_deref().unwrap_or("not known"));
    let reason =
        story.finish_reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
    block.line("ended", format!("{}{reason}", story.status));
    block
}

fn asked(story: &Story) -> Block {
    let mut block = Block::new("asked and answered");
    let before = story.messages - story.prompt.len();
    if before > 0 {
        block.line("…", format!("{before} messages before"));
    }
    block.messages(&story.prompt);
    block.line("ANSWER", &story.answer);
    block
}

fn then(story: &Story) -> Block {
    let mut block = Block::new(format!("next state: {}", story.next_state_kind));
    block.messages(&story.next_state);
    block
}

fn or_none(value: Option<impl ToString>) -> String {
    value.map_or("none".to_owned(), |value| value.to_string())
}

fn judged(story: &Story) -> Block {
    let mut block = Block::new(match story.votes.is_empty() && story.score.is_none() {
        true => "votes: none".to_owned(),
        false => format!("votes: score {}", or_none(story.score)),
    });
    for (place, Vote { vote, text }) in story.votes.iter().enumerate() {
        let vote = vote.map_or("no vote".to_owned(), |vote| format!("{vote:+}"));
        block.line(format!("{} {vote}", place + 1), text.as_deref().unwrap_or("-"));
    }
    block.known("error", story.judge_error.as_ref());
    block
}

fn hints(story: &Story) -> Block {
    let mut block = Block::new(match story.hints.is_empty() {
        true => "hints: none",
        false => "hints",
    });
    for (place, Hint { text, chosen, scored, error }) in story.hints.iter().enumerate() {
        let mark = if *chosen { " *" } else { "" };
        let fate = match (scored, error) {
            (_, Some(error)) => format!(" (no log-probs: {error})"),
            (Some(false), None) => " (no log-probs)".to_owned(),
            (None, None) => " (no teacher asked)".to_owned(),
            (Some(true), None) => String::new(),
        };
        block.line(format!("{}{mark}", place + 1), format!("{text}{fate}"));
    }
    if let Some(votes) = &story.hint_votes {
        let votes: Vec<_> = votes.iter().map(|vote| or_none(*vote)).collect();
        block.line("verdicts", votes.join(", "));
    }
    block.known("error", story.hint_error.as_ref());
    block
}

fn signal(story: &Story) -> Block {
    let mut block = Block::new(match &story.sample_kind {
        None => "signal: `advantage` has not run".to_owned(),
        Some(kind) => format!("signal: {kind}"),
    });
    let source = story.reward_source.as_ref().map_or(String::new(), |it| format!(" ({it})"));
    block.line("reward", format!("{}{source}", or_none(story.reward)));
    block.line("because", &story.reward_reason);
    block.known("feedback", story.feedback_text.as_ref());
    block.known("reason", story.sample_reason.as_ref());
    block.known("untrainable", story.untrainable_reason.as_ref());
    block.known("error", story.advantage_error.as_ref());
    if story.promoted == Some(true) {
        block.line("promoted", "the first turn of its session without a signal");
    }
    block
}

fn tokens(out: &mut impl Write, story: &Story, style: Style) -> io::Result<()> {
    let number = |value: Option<f32>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
    let mut table = table(style);
    table.set_header(["#", "id", "token", "server", "teacher", "advantage", "", "mask", "loss"]);
    for (place, (token, tint)) in story.tokens.iter().zip(heat::tints(&story.tokens)).enumerate() {
        let Token { id, text, server, teacher, advantage, mask, loss } = token;
        let text = text.as_ref().map_or("-".to_owned(), |text| visible(text).replace(' ', "·"));
        let mut cells: Vec<Cell> = [
            place.to_string(),
            id.to_string(),
            cut(&text, 20),
            number(*server),
            number(*teacher),
            number(*advantage),
        ]
        .map(Cell::new)
        .into();
        if let (Some(tint), true) = (tint, style.colored) {
            cells[2] = tint.on(cells[2].clone());
            cells[5] = tint.on(cells[5].clone());
        }
        cells.push(Cell::new(tint.map(heat::Tint::marks).unwrap_or_default()));
        cells.push(Cell::new(mask.map_or("-".to_owned(), |mask| mask.to_string())));
        cells.push(Cell::new(loss.map_or("-".to_owned(), |loss| format!("{:.5}", zeroed(loss)))));
        let mut row = Row::from(cells);
        row.max_height(1);
        table.add_row(row);
    }
    for index in [0, 1, 3, 4, 5, 7, 8] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    writeln!(out, "tokens")?;
    write_table(out, &table)
}

/// Makes a 0 of -0.
fn zeroed(value: f64) -> f64 {
    value + 0.0
}

fn heat(out: &mut impl Write, story: &Story, style: Style) -> io::Result<()> {
    if heat::tints(&story.tokens).iter().all(Option::is_none) {
        return Ok(());
    }
    writeln!(out, "advantages")?;
    let width = usize::from(style.width).saturating_sub(3);
    let lines = heat::lines(&story.tokens, style.colored, width);
    lines.iter().try_for_each(|line| writeln!(out, "   {}", line.trim_end()))
}

fn loss(story: &Story) -> Block {
    let share = &story.share;
    let mut block = Block::new("what it did to the loss");
    if story.sample_kind.is_none() {
        block.line("nothing yet", "`oclaw advantage` has not run on this table");
        return block;
    }
    let percent = |part: Option<f64>| {
        part.map_or("not known".to_owned(), |part| format!("{:.1} %", part * 100.0))
    };
    block.line(
        "batch",
        format!("{} turns, {} tokens trained in all", share.batch_turns, share.batch_tokens),
    );
    block.line("this turn", format!("{} tokens, {}", share.tokens, percent(share.token_share)));
    if share.tokens > 0 {
        if share.loss_part != Loss::Nothing {
            block.line("share of |A|", percent(share.advantage_share));
        }
        block.line("loss", told_loss(share));
        let (name, divisor, numbers) = match share.reduction {
            ReductionName::Sample => (
                "sample",
                "tokens of this turn × turns",
                format!("{} × {}", share.tokens, share.batch_turns),
            ),
            ReductionName::Token => {
                ("token", "tokens of all turns", share.batch_tokens.to_string())
            }
        };
        block.line(
            "reduction",
            match share.loss_part {
                Loss::Nothing => format!("{name}: KL / ({divisor}) = KL / ({numbers})"),
                Loss::Whole | Loss::PolicyTerm => {
                    format!("{name}: -A / ({divisor}) = -A / ({numbers}), at ratio 1")
                }
            },
        );
        let taught = ["opd", "opd+rl"].map(Some).contains(&story.sample_kind.as_deref());
        if share.loss_part == Loss::PolicyTerm && taught {
            block.line("beside it", "top-k distillation by the hint, which `train` computes");
        }
    }
    block
}

fn told_loss(share: &Share) -> String {
    match (share.loss, share.batch_loss) {
        (Some(loss), Some(all)) => {
            format!("{:.5} of {:.5} in all", zeroed(loss), zeroed(all))
        }
        (Some(loss), None) => format!("{:.5}", zeroed(loss)),
        (None, _) if share.loss_part == Loss::Nothing => {
            "not known: under `topk-kl` it is the KL from the teacher over the first hint's ids, \
             which `train` computes; there are no advantages"
                .to_owned()
        }
        (None, _) => {
            "not known: `train` computes its advantages with log-probs of its own".to_owned()
        }
    }
}
