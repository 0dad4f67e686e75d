//! The answers to one request while they are generated.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::template::Tokenizer;

use super::answer::Answer;
use super::compute::{Command, Compute, Event, Job, Plan};
use super::failure::Failure;
use super::text::{Part, Stops, TextStream, Tools};

/// What is to be generated.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) rid: Arc<str>,
    pub(super) prompt: Arc<[i64]>,
    pub(super) plan: Plan,
    pub(super) answers: usize,
    pub(super) stops: Stops,
    pub(super) keep_stop: bool,
    pub(super) skip_special: bool,
    pub(super) tools: Tools,
}

/// Answers under way. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) rid: Arc<str>,
    pub(super) prompt: Arc<[i64]>,
    pub(super) answers: Vec<Answer>,
    events: Vec<Option<UnboundedReceiver<Event>>>,
}

impl Generation {
    /// Gives an order to the compute thread.
    pub(super) fn start(
        order: Order,
        compute: &Compute,
        tokenizer: &Tokenizer,
    ) -> Result<Self, Failure> {
        let Order { rid, prompt, plan, answers, stops, keep_stop, skip_special, tools } = order;
        let trimmed = if keep_stop { Vec::new() } else { plan.stop_ids.clone() };
        let mut generation = Self {
            rid: rid.clone(),
            prompt: prompt.clone(),
            answers: Vec::new(),
            events: Vec::new(),
        };
        let mut jobs = Vec::new();
        for index in 0..answers {
            let (sender, receiver) = unbounded_channel();
            let mut plan = plan.clone();
            plan.sampling.seed = plan.sampling.seed.wrapping_add(index as u64);
            let (rid, prompt) = (rid.clone(), prompt.clone());
            jobs.push(Job { rid, prompt, plan, events: sender });
            let decoder = tokenizer.decoder(skip_special);
            let stream = TextStream::new(decoder, stops.clone(), tools.clone());
            generation.answers.push(Answer::new(stream, trimmed.clone()));
            generation.events.push(Some(receiver));
        }
        compute.send(Command::Generate(jobs))?;
        Ok(generation)
    }

    /// Waits for the next token or end of any answer; returns which answer and
    /// the parts that came of it. Nothing once all have ended.
    pub(super) async fn next(&mut self) -> Result<Option<(usize, Vec<Part>)>, Failure> {
        match poll_fn(|context| self.poll(context)).await {
            None => Ok(None),
            Some((index, Some(Event::Token(token)))) => {
                let parts = self.answers[index].push(token);
                if self.answers[index].finish.is_some() {
                    self.events[index] = None;
                }
                Ok(Some((index, parts)))
            }
            Some((index, Some(Event::End(end)))) => {
                self.events[index] = None;
                Ok(Some((index, self.answers[index].end(end))))
            }
            Some((_, Some(Event::Failed(failure)))) => Err(failure),
            Some((_, None)) => Err(Failure::stopped()),
        }
    }

    fn poll(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<(usize, Option<Event>)>> {
        let mut open = false;
        for (index, events) in self.events.iter_mut().enumerate() {
            let Some(events) = events else {
                continue;
            };
            open = true;
            if let Poll::Ready(event) = events.poll_recv(context) {
                return Poll::Ready(Some((index, event)));
            }
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }

    /// Returns the number of tokens of all answers.
    pub(super) fn completion_tokens(&self) -> usize {
        self.answers.iter().map(|answer| answer.tokens.len()).sum()
    }
}
