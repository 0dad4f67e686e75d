//! Sessions sent again: in parallel, each one's turns in order.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use serde_json::Value;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use crate::capture::{self, prepare, read_answer};
use crate::engine::{self, Engine};
use crate::judge::Rules;
use crate::trajectory::Turn;
use crate::trajectory::words::LogProbKind;
use crate::wire::openai::ChatRequest;

use super::{Answer, By, Check, Conversation, Finding, Jury, Overrides, Session};
use super::{compare, log_prob, request};

/// Which conversation stands before a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum History {
    /// The recorded one.
    Fixed,
    /// The recorded one with the new answers in it.
    OnPolicy,
}

/// How sessions are sent again.
#[derive(Debug)]
pub struct Options {
    /// Which conversation stands before a question.
    pub history: History,
    /// Settings that replace the recorded ones.
    pub overrides: Overrides,
    /// The recorded pace, so many times as fast; none is without a pause. Turns
    /// without a recorded time are sent without one.
    pub speed: Option<f64>,
    /// Requests under way at once.
    pub at_once: usize,
    /// The comparisons.
    pub by: Vec<By>,
    /// The rules of `By::Rules`.
    pub rules: Option<Rules>,
    /// The judge of `By::Judge`.
    pub jury: Option<Jury>,
    /// Largest shift of a log-prob that is none.
    pub tolerance: f64,
}

/// What one turn came to.
#[derive(Debug, Clone)]
pub struct Replayed {
    /// Its session.
    pub session_id: String,
    /// Its number there.
    pub turn: u32,
    /// Its id.
    pub turn_id: String,
    /// What it came to: failed before differing, differing before same.
    pub finding: Finding,
    /// Each comparison.
    pub checks: Vec<Check>,
    /// The new answer, if one was asked for and came.
    pub answer: Option<Answer>,
    /// How long all of it took.
    pub took: Duration,
}

/// What a replay came to.
#[derive(Debug)]
pub struct Outcome {
    /// The turns, session by session.
    pub sessions: Vec<Vec<Replayed>>,
    /// Why it ended early: the engine was not there any more.
    pub away: Option<engine::Error>,
}

/// Sends sessions again.
#[derive(Debug)]
pub struct Player<'a> {
    engine: &'a Engine,
    options: &'a Options,
    places: Semaphore,
    /// Whether the engine, or the judge, is found to be away.
    gone: watch::Sender<bool>,
    away: std::sync::Mutex<Option<engine::Error>>,
}

impl<'a> Player<'a> {
    /// Returns a player of an engine.
    pub fn new(engine: &'a Engine, options: &'a Options) -> Self {
        Self {
            engine,
            options,
            places: Semaphore::new(options.at_once.max(1)),
            gone: watch::Sender::new(false),
            away: std::sync::Mutex::new(None),
        }
    }

    /// Sends every session, reporting each turn to `watch`. An engine that does
    /// not answer any more ends it: what was not asked by then is not compared.
    pub async fn play(self, sessions: &[Session], watch: &dyn Fn(&Replayed)) -> Outcome {
        let start = Instant::now();
        let began = sessions.iter().filter_map(Session::began).min().unwrap_or_default();
        let each = sessions.iter().map(|session| self.session(session, (start, began), watch));
        let sessions = join_all(each).await;
        let away = self.away.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        Outcome { sessions, away }
    }

    async fn session(
        &self,
        session: &Session,
        (start, began): (Instant, i64),
        watch: &dyn Fn(&Replayed),
    ) -> Vec<Replayed> {
        let mut conversation = Conversation::default();
        let mut found = Vec::new();
        for turn in &session.turns {
            if let (Some(speed), Some(at)) = (self.options.speed, turn.asked_at()) {
                let after = at.saturating_sub(began).max(0) as f64 / 1e6 / speed;
                let due = Duration::try_from_secs_f64(after)
                    .ok()
                    .and_then(|after| start.checked_add(after));
                if let Some(due) = due {
                    self.sleep_until(due).await;
                }
            }
            let replayed = self.turn(session, turn, &mut conversation).await;
            watch(&replayed);
            found.push(replayed);
        }
        found
    }

    /// Waits for a time, unless nobody is there to ask any more.
    async fn sleep_until(&self, due: Instant) {
        let mut gone = self.gone.subscribe();
        tokio::select! {
            biased;
            _ = gone.wait_for(|gone| *gone) => {}
            () = tokio::time::sleep_until(due) => {}
        }
    }

    async fn turn(
        &self,
        session: &Session,
        turn: &Turn,
        conversation: &mut Conversation,
    ) -> Replayed {
        // The semaphore is never closed.
        let _place = self.places.acquire().await;
        let start = Instant::now();
        let mut replayed = Replayed {
            session_id: turn.session_id.clone(),
            turn: turn.turn,
            turn_id: turn.turn_id.clone(),
            finding: Finding::NotCompared(String::new()),
            checks: Vec::new(),
            answer: None,
            took: Duration::ZERO,
        };
        match self.answers(session, turn, conversation).await {
            Ok(answers) => {
                conversation.note(turn, answers.clone().ok_or_else(|| "not asked".to_owned()));
                for by in &self.options.by {
                    replayed.checks.push(self.check(*by, turn, answers.as_ref()).await);
                }
                replayed.answer = answers.map(|(_, new)| new);
                replayed.finding = overall(&replayed.checks);
            }
            Err(finding) => {
                conversation.note(turn, Err(finding.what().to_owned()));
                replayed.finding = finding;
            }
        }
        replayed.took = start.elapsed();
        replayed
    }

    /// Returns the recorded answer and the new one; nothing if none of the
    /// comparisons wants one.
    async fn answers(
        &self,
        session: &Session,
        turn: &Turn,
        conversation: &Conversation,
    ) -> Result<Option<(Answer, Answer)>, Finding> {
        if *self.gone.borrow() {
            return Err(Finding::NotCompared("the engine was away".to_owned()));
        }
        if session.is_choice(turn) {
            let reason = "one of several choices of one request";
            return Err(Finding::NotCompared(reason.to_owned()));
        }
        if !self.wants_answer(turn) {
            return Ok(None);
        }
        let recorded = Answer::recorded(turn).map_err(Finding::NotCompared)?;
        let messages = match serde_json::from_str(&turn.messages) {
            Ok(Value::Array(messages)) if !messages.is_empty() => messages,
            _ => return Err(Finding::NotCompared("no messages".to_owned())),
        };
        let sent = match self.options.history {
            History::Fixed => None,
            History::OnPolicy => Some(
                conversation
                    .rebuild(turn, &messages)
                    .map_err(|reason| Finding::NotCompared(format!("diverged: {reason}")))?,
            ),
        };
        let other = sent.filter(|sent| *sent != messages);
        let messages = other.as_ref().unwrap_or(&messages);
        let model = self.engine.model();
        let body = request::body(model, turn, messages, &self.options.overrides)
            .map_err(Finding::NotCompared)?;
        let asked_at = now();
        let mut new = self.ask(&body).await.map_err(Finding::Failed)?;
        let kind = LogProbKind::of(dialect(self.engine.dialect()).tempers_log_probs());
        new.facts.times = (asked_at, now());
        new.facts.model = model.unwrap_or_default().to_owned();
        new.facts.sampling = request::sampling(turn, &self.options.overrides, kind);
        new.facts.messages = other.map(|messages| Value::from(messages).to_string());
        Ok(Some((recorded, new)))
    }

    fn wants_answer(&self, turn: &Turn) -> bool {
        let lone = |by: &By| match by {
            By::LogProb => !matches!(log_prob::plan(turn), Ok(log_prob::Plan::OfAnswer)),
            By::Exact | By::Rules | By::Judge => false,
        };
        !self.options.by.iter().all(lone)
    }

    /// Asks for one answer, ids and log-probs included where the dialect has them.
    async fn ask(&self, body: &Value) -> Result<Answer, String> {
        ask(self.engine, body).await.map_err(|error| match error {
            Asked::Engine(error) => self.failed(error),
            Asked::Answer(reason) => reason,
        })
    }

    /// Notes a failed call. One that may work later has been tried often enough:
    /// the engine is away.
    fn failed(&self, error: engine::Error) -> String {
        let told = error.to_string();
        if error.is_transient() {
            self.gone.send_replace(true);
            let mut away = self.away.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            away.get_or_insert(error);
        }
        told
    }

    async fn check(&self, by: By, turn: &Turn, answers: Option<&(Answer, Answer)>) -> Check {
        let skipped = || Check::new(by, Finding::NotCompared("no answer was asked for".to_owned()));
        match (by, answers) {
            (By::LogProb, _) => {
                let new = answers.map(|(_, new)| new);
                match log_prob::compare(self.engine, turn, new, self.options.tolerance).await {
                    Ok(check) => check,
                    Err(error) => Check::new(by, Finding::Failed(self.failed(error))),
                }
            }
            (By::Exact, Some((recorded, new))) => Check::new(by, compare::exact(recorded, new)),
            (By::Rules, Some((_, new))) => match &self.options.rules {
                Some(rules) => Check::new(by, compare::by_rules(rules, turn, new)),
                None => skipped(),
            },
            (By::Judge, Some((recorded, new))) => match &self.options.jury {
                Some(jury) => match jury.compare(turn, recorded, new).await {
                    Ok(check) => check,
                    Err(error) => Check::new(by, Finding::Failed(self.failed(error))),
                },
                None => skipped(),
            },
            (By::Exact | By::Rules | By::Judge, None) => skipped(),
        }
    }
}

/// Returns microseconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Why there is no answer.
pub(super) enum Asked {
    Engine(engine::Error),
    Answer(String),
}

/// Sends a chat request the way `serve` would send it on, and reads the answer
/// the way `serve` would.
pub(super) async fn ask(engine: &Engine, body: &Value) -> Result<Answer, Asked> {
    let bytes = body.to_string().into_bytes();
    let unreadable = || Asked::Answer("the request cannot be read".to_owned());
    let request = ChatRequest::read(&bytes).ok_or_else(unreadable)?;
    let prepared = prepare(&bytes, &request, dialect(engine.dialect()));
    let body = serde_json::from_slice(&prepared.body).map_err(|_| unreadable())?;
    let document = engine.chat_document(&body).await.map_err(Asked::Engine)?;
    let answer = read_answer(&document, &prepared);
    if let Some(reason) = answer.skipped {
        return Err(Asked::Answer(format!("no answer in it: {reason}")));
    }
    let several = answer.captured.len() > 1;
    let captured = answer.captured.into_iter().find(|choice| !several || choice.choice == 0);
    let captured = captured.ok_or_else(|| Asked::Answer("no choice in it".to_owned()))?;
    Answer::replayed(captured).map_err(Asked::Answer)
}

fn dialect(dialect: engine::Dialect) -> capture::Dialect {
    match dialect {
        engine::Dialect::Sglang => capture::Dialect::Sglang,
        engine::Dialect::Vllm => capture::Dialect::Vllm,
        engine::Dialect::LlamaCpp => capture::Dialect::LlamaCpp,
        engine::Dialect::Generic => capture::Dialect::Generic,
    }
}

/// Puts the comparisons of a turn together.
fn overall(checks: &[Check]) -> Finding {
    let told = |word: &str| -> Option<String> {
        let those: Vec<_> = checks
            .iter()
            .filter(|check| check.finding.word() == word)
            .map(|check| format!("{}: {}", check.by, check.finding.what()))
            .collect();
        (!those.is_empty()).then(|| those.join("; "))
    };
    if let Some(what) = told("failed") {
        return Finding::Failed(what);
    }
    if let Some(what) = told("differs") {
        return Finding::Differs(what);
    }
    match checks.iter().any(|check| check.finding == Finding::Same) {
        true => Finding::Same,
        false => Finding::NotCompared(told("not compared").unwrap_or_default()),
    }
}
