//! The answers to one request while they are generated.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::template::Tokenizer;

use super::adapters::AdapterId;
use super::admission::Ticket;
use super::answer::{Answer, Finish};
use super::compute::{Command, Compute, End, Event, Job, Plan};
use super::failure::Failure;
use super::metrics::{Clock, Metrics};
use super::text::{Part, Stops, TextStream, Think, Tools};

/// Which answer something came of, and what.
pub(super) type News = (usize, Vec<Part>);

/// What is to be generated.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) rid: Arc<str>,
    pub(super) prompt: Arc<[i64]>,
    pub(super) adapter: Option<AdapterId>,
    pub(super) plan: Plan,
    pub(super) answers: usize,
    pub(super) stops: Stops,
    pub(super) keep_stop: bool,
    pub(super) skip_special: bool,
    /// Splits thoughts from the text, if they are to be told apart.
    pub(super) think: Option<Think>,
    pub(super) tools: Tools,
    /// What its request was let in by; nothing if it was not asked.
    pub(super) ticket: Option<Arc<Ticket>>,
}

/// Answers under way. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) rid: Arc<str>,
    pub(super) prompt: Arc<[i64]>,
    pub(super) answers: Vec<Answer>,
    events: Vec<Option<UnboundedReceiver<Event>>>,
    clocks: Vec<Clock>,
    metrics: Arc<Metrics>,
    /// Makes room for others when it is dropped.
    _ticket: Option<Arc<Ticket>>,
}

impl Generation {
    /// Gives an order to the compute thread.
    pub(super) fn start(
        order: Order,
        compute: &Compute,
        tokenizer: &Tokenizer,
    ) -> Result<Self, Failure> {
        let Order { rid, prompt, adapter, plan, answers, stops, think, tools, ticket, .. } = order;
        let (keep_stop, skip_special) = (order.keep_stop, order.skip_special);
        let trimmed = if keep_stop { Vec::new() } else { plan.stop_ids.clone() };
        let mut generation = Self {
            rid: rid.clone(),
            prompt: prompt.clone(),
            answers: Vec::new(),
            events: Vec::new(),
            clocks: Vec::new(),
            metrics: compute.metrics.clone(),
            _ticket: ticket,
        };
        compute.metrics.prompt(prompt.len());
        let mut jobs = Vec::new();
        for index in 0..answers {
            let (sender, receiver) = unbounded_channel();
            let mut plan = plan.clone();
            plan.sampling.seed = plan.sampling.seed.wrapping_add(index as u64);
            let (rid, prompt) = (rid.clone(), prompt.clone());
            jobs.push(Job { rid, prompt, adapter, plan, events: sender });
            let decoder = tokenizer.decoder(skip_special);
            let stream = TextStream::new(decoder, stops.clone(), think.clone(), tools.clone());
            generation.answers.push(Answer::new(stream, trimmed.clone()));
            generation.events.push(Some(receiver));
            generation.clocks.push(Clock::start(&compute.metrics));
        }
        compute.send(Command::Generate(jobs))?;
        Ok(generation)
    }

    /// Waits for the next token or end of any answer; returns which answer and
    /// the parts that came of it. Nothing once all have ended.
    pub(super) async fn next(&mut self) -> Result<Option<News>, Failure> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// The same for whoever waits for several.
    pub(super) fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<News>, Failure>> {
        loop {
            let (index, event) = match self.poll(context) {
                Poll::Ready(Some((index, Some(event)))) => (index, event),
                Poll::Ready(Some((_, None))) => return Poll::Ready(Err(Failure::stopped())),
                Poll::Ready(None) => return Poll::Ready(Ok(None)),
                Poll::Pending => return Poll::Pending,
            };
            match self.take(index, event) {
                Ok(Some(parts)) => return Poll::Ready(Ok(Some((index, parts)))),
                Ok(None) => {}
                Err(failure) => return Poll::Ready(Err(failure)),
            }
        }
    }

    /// Returns the parts that came of an event; nothing if it is no news.
    fn take(&mut self, index: usize, event: Event) -> Result<Option<Vec<Part>>, Failure> {
        match event {
            Event::Begun(cached) => {
                self.answers[index].cached = cached;
                // Once for all answers, as the prompt is counted.
                if index == 0 {
                    self.metrics.cached(cached);
                }
                Ok(None)
            }
            Event::Token(token) => {
                self.clocks[index].token();
                let parts = self.answers[index].push(token);
                if self.answers[index].finish.is_some() {
                    self.clocks[index].end();
                    self.events[index] = None;
                }
                Ok(Some(parts))
            }
            Event::End(end) => {
                self.events[index] = None;
                if end != End::Abort {
                    self.clocks[index].end();
                }
                Ok(Some(self.answers[index].end(end)))
            }
            Event::Failed(failure) => Err(failure),
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Option<Event>)>> {
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

    /// Waits for all answers; returns their texts.
    pub(super) async fn texts(&mut self) -> Result<Vec<String>, Failure> {
        let mut texts = vec![String::new(); self.answers.len()];
        while let Some((index, parts)) = self.next().await? {
            append(&mut texts[index], parts);
        }
        Ok(texts)
    }

    /// Says of the answers that have ended, however they did, that they were aborted: their
    /// request was before all that it wants was there.
    pub(super) fn cut_off(&mut self) {
        for finish in self.answers.iter_mut().filter_map(|answer| answer.finish.as_mut()) {
            *finish = Finish::Abort;
        }
    }

    /// Returns the number of tokens of all answers that were thought, marks included.
    pub(super) fn thought_tokens(&self) -> usize {
        self.answers.iter().map(|answer| answer.thought).sum()
    }

    /// Returns the number of tokens of all answers.
    pub(super) fn completion_tokens(&self) -> usize {
        self.answers.iter().map(|answer| answer.tokens.len()).sum()
    }
}

/// Appends what is text to a text.
pub(super) fn append(text: &mut String, parts: Vec<Part>) {
    for part in parts {
        if let Part::Text(more) = part {
            text.push_str(&more);
        }
    }
}
