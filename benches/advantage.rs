//! What `scripts/bench.sh advantage` needs beside `oclaw` itself:
//!
//! ```text
//! advantage forge TABLE ROWS   a table that waits for `oclaw advantage`
//! ```
//!
//! Sessions of ten turns, 160 response tokens a turn on average. Every stage before
//! has run: a turn is judged 1, 0 or -1, and two in three have a hint and what the
//! teacher makes of it.

use std::error::Error;
use std::path::PathBuf;

use oclaw::table::{Format, Provenance, Sink, Target};
use oclaw::trajectory::turn::{self, Micros};
use oclaw::trajectory::words::{
    LogProbKind, NextStateKind, SessionSource, Status, TokenSource, WeightVersionSource,
};
use oclaw::trajectory::{Sampling, Turn, Writer};
use serde_json::{Value, json};

const TURNS_PER_SESSION: usize = 10;
const BATCH: usize = 1000;
const STAGES: [Writer; 4] = [Writer::Serve, Writer::Judge, Writer::Hint, Writer::TeacherLp];

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench` adds a flag of its own.
    let words: Vec<_> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["forge", table, rows] => forge(table.into(), rows.parse()?),
        // What `cargo bench` without words comes to.
        [] => Ok(()),
        _ => Err("words: forge TABLE ROWS".into()),
    }
}

fn forge(table: PathBuf, rows: usize) -> Result<(), Box<dyn Error>> {
    let mut chance = Chance(1);
    let mut session = Session::default();
    let schema = turn::batch(&STAGES, &[])?.schema();
    let target = Target::Path(table);
    let mut sink = Sink::create(&target, Some(Format::Parquet), schema, &Provenance::default())?;
    for start in (0..rows).step_by(BATCH) {
        let mut turns = Vec::new();
        for row in start..rows.min(start + BATCH) {
            if row % TURNS_PER_SESSION == 0 {
                session = Session { number: row, ..Session::default() };
            }
            turns.push(session.turn(&mut chance));
        }
        sink.write(&turn::batch(&STAGES, &turns)?)?;
    }
    Ok(sink.finish()?)
}

/// Made-up numbers, the same ones every time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }

    /// A token's log-prob: most are near 0.
    fn log_prob(&mut self) -> f32 {
        let share = (self.below(1 << 24) + 1) as f32 / (1 << 24) as f32;
        share.ln() * 0.5
    }

    fn ids(&mut self, count: usize) -> Vec<i32> {
        (0..count).map(|_| self.id()).collect()
    }

    /// Small ids are frequent, as in a real vocabulary.
    fn id(&mut self) -> i32 {
        let share = self.below(1 << 20) as f64 / f64::from(1 << 20);
        (share.powi(3) * 49_000.0) as i32
    }

    fn text(&mut self, words: usize) -> String {
        const LIST: [&str; 12] = [
            "the", "file", "returns", "a", "list", "of", "errors", "when", "it", "reads", "every",
            "line",
        ];
        (0..words).map(|_| LIST[self.below(12) as usize]).collect::<Vec<_>>().join(" ")
    }
}

/// One session as it grows.
#[derive(Default)]
struct Session {
    number: usize,
    turns: u32,
    messages: Vec<Value>,
    ids: Vec<i32>,
}

impl Session {
    fn turn(&mut self, chance: &mut Chance) -> Turn {
        self.turns += 1;
        let number = self.turns;
        self.messages.push(json!({"role": "user", "content": chance.text(30)}));
        self.ids.extend(chance.ids(40));
        let tokens = 80 + chance.below(161) as usize;
        let response_ids = chance.ids(tokens);
        let answer = json!({"role": "assistant", "content": chance.text(tokens * 3 / 4)});
        let next = json!([{"role": "user", "content": chance.text(20)}]);
        let id = |number: u32| format!("session-{}-turn-{number}", self.number);
        let at = 1_764_423_296_000_000 + (self.number as i64 + i64::from(number)) * 1_000_000;
        let turn = Turn {
            session_id: format!("session-{}", self.number),
            turn: number,
            turn_id: id(number),
            parent_turn_id: (number > 1).then(|| id(number - 1)),
            branch: "main".to_owned(),
            request_id: format!("{}-request", id(number)),
            session_source: SessionSource::Header,
            session_confidence: 1.0,
            created_at: Micros(at),
            finished_at: Micros(at + 500_000),
            model: "forged".to_owned(),
            weight_version: Some("0".to_owned()),
            weight_version_end: Some("0".to_owned()),
            weight_version_source: WeightVersionSource::Answer,
            sampling: Sampling {
                temperature: Some(0.7),
                log_prob_kind: LogProbKind::Raw,
                ..Sampling::default()
            },
            messages: Value::from(self.messages.clone()).to_string(),
            response: answer.to_string(),
            finish_reason: Some("stop".to_owned()),
            ends_with_stop_token: Some(true),
            status: Status::Complete,
            usage_completion_tokens: Some(tokens as u32),
            prompt_ids: Some(self.ids.clone()),
            rollout_log_probs: Some((0..tokens).map(|_| Some(chance.log_prob())).collect()),
            token_source: TokenSource::Engine,
            next_state: Some(next.to_string()),
            next_state_kind: NextStateKind::User,
            ..noted(tokens, chance)
        };
        self.messages.push(answer);
        self.ids.extend(&response_ids);
        Turn { response_ids: Some(response_ids), ..turn }
    }
}

/// What the stages before made of a turn.
fn noted(tokens: usize, chance: &mut Chance) -> Turn {
    let score = chance.below(3) as f32 - 1.0;
    let hinted = chance.below(3) > 0;
    let log_probs = |chance: &mut Chance| (0..tokens).map(|_| chance.log_prob()).collect();
    Turn {
        score: Some(score),
        votes: Some(vec![Some(score as i8); 3]),
        hints: Some(if hinted { vec![chance.text(12)] } else { Vec::new() }),
        hint_votes: Some(vec![Some(i8::from(hinted)); 3]),
        teacher: hinted.then(|| "forged".to_owned()),
        teacher_temperature: hinted.then_some(1.0),
        teacher_log_probs: hinted.then(|| vec![Some(log_probs(chance))]),
        ..Turn::default()
    }
}
