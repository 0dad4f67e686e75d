//! Budgets: the flags, and the meter that says when a stage must stop asking.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex, PoisonError};

use comfy_table::Table;
use oclaw::table::Usage;

/// What a stage may spend. What is found in the cache costs nothing.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct Budget {
    /// Most calls; the rest of the file stays without, with the error `budget`
    #[arg(long, value_name = "N")]
    max_requests: Option<u64>,
    /// Most tokens, prompts and answers together; calls under way then are let end
    #[arg(long, value_name = "N")]
    max_tokens_total: Option<u64>,
    /// Highest cost, in the currency of the prices
    #[arg(long, value_name = "COST", value_parser = amount, requires_all = ["price_in", "price_out"])]
    max_cost: Option<f64>,
    /// Price of a million prompt tokens
    #[arg(long, value_name = "PRICE", value_parser = amount, requires = "price_out")]
    price_in: Option<f64>,
    /// Price of a million answer tokens
    #[arg(long, value_name = "PRICE", value_parser = amount, requires = "price_in")]
    price_out: Option<f64>,
    /// Print how much would be asked, ask nobody and write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

fn amount(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("wanted a number from 0 on".to_owned()),
    }
}

impl Budget {
    /// Returns what tokens cost, if the prices are known.
    pub(crate) fn cost(&self, prompt_tokens: u64, completion_tokens: u64) -> Option<f64> {
        let million = |tokens: u64, price: f64| tokens as f64 * price / 1e6;
        Some(million(prompt_tokens, self.price_in?) + million(completion_tokens, self.price_out?))
    }
}

/// Guesses a text's tokens, where nobody counts them: four characters make one.
pub(crate) fn guess(characters: usize) -> u64 {
    characters.div_ceil(4) as u64
}

/// The error of a row that the budget left without.
pub(crate) const BUDGET: &str = "budget";

/// The budget is spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spent;

/// Counts what is asked and stops it in time.
#[derive(Debug)]
pub(crate) struct Meter {
    budget: Budget,
    /// Of the file at hand.
    usage: Arc<Mutex<Usage>>,
    /// Of the files before.
    before: RefCell<Usage>,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Calls that were granted.
    granted: u64,
    /// Tokens so far, guessed where nobody counted.
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Once refused, always refused: the rows that lack their note are the last
    /// ones, not the dear ones.
    ended: bool,
    refused: u64,
}

/// Tokens of one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tokens {
    /// As the server counted them.
    pub(crate) counted: Option<(u64, u64)>,
    /// As we guess them.
    pub(crate) guessed: (u64, u64),
}

impl Tokens {
    /// Returns counted ones.
    pub(crate) fn known(prompt: u64, answer: u64) -> Self {
        Self { counted: Some((prompt, answer)), guessed: (prompt, answer) }
    }
}

impl Meter {
    pub(crate) fn new(budget: &Budget) -> Self {
        let usage = Usage { cost: budget.cost(0, 0), ..Usage::default() };
        let usage = Arc::new(Mutex::new(usage));
        let before = RefCell::default();
        Self { budget: budget.clone(), usage, before, state: RefCell::default() }
    }

    /// Returns the running count, for the file to carry.
    pub(crate) fn usage(&self) -> Arc<Mutex<Usage>> {
        self.usage.clone()
    }

    /// Begins the count of another file. What may be spent is for all of them.
    pub(crate) fn next_file(&self) {
        let fresh = Usage { cost: self.budget.cost(0, 0), ..Usage::default() };
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        add(&mut self.before.borrow_mut(), &std::mem::replace(&mut usage, fresh));
    }

    /// Returns whether so many calls would be refused.
    pub(crate) fn is_spent(&self, calls: u64) -> bool {
        let state = self.state.borrow();
        state.ended || self.is_over(&state, calls)
    }

    fn is_over(&self, state: &State, calls: u64) -> bool {
        let cost = self.budget.cost(state.prompt_tokens, state.completion_tokens);
        let tokens = state.prompt_tokens.saturating_add(state.completion_tokens);
        let Budget { max_requests, max_tokens_total, max_cost, .. } = &self.budget;
        max_requests.is_some_and(|most| state.granted.saturating_add(calls) > most)
            || max_tokens_total.is_some_and(|most| tokens >= most)
            || max_cost.zip(cost).is_some_and(|(most, cost)| cost >= most)
    }

    /// Grants calls that belong together, all or none of them.
    pub(crate) fn grant(&self, calls: u64) -> Result<(), Spent> {
        let mut state = self.state.borrow_mut();
        state.ended = state.ended || self.is_over(&state, calls);
        if state.ended {
            state.refused += 1;
            return Err(Spent);
        }
        state.granted += calls;
        Ok(())
    }

    /// Sets calls of one turn aside, as many as there may be up to `most`. A single
    /// one is not worth it: it would only prepare the others.
    fn set_aside(&self, most: u64) -> Result<u64, Spent> {
        let mut state = self.state.borrow_mut();
        let left = self.budget.max_requests.map(|all| all.saturating_sub(state.granted));
        let calls = left.map_or(most, |left| left.min(most));
        state.ended = state.ended || calls < most.min(2) || self.is_over(&state, calls);
        if state.ended {
            state.refused += 1;
            return Err(Spent);
        }
        state.granted += calls;
        Ok(calls)
    }

    /// Begins a turn whose first call prepares `others`, which are none without it.
    pub(crate) fn share(&self, others: usize) -> Share<'_> {
        Share { meter: self, others: others as u64, left: Cell::default() }
    }

    /// Counts a call that is made.
    pub(crate) fn call(&self) {
        self.change(|usage| usage.calls += 1);
    }

    /// Counts an answer that was found.
    pub(crate) fn hits(&self, count: u64) {
        self.change(|usage| usage.cache_hits += count);
    }

    /// Counts the tokens of a call that was answered.
    pub(crate) fn tokens(&self, tokens: Tokens) {
        let (prompt, completion) = tokens.counted.unwrap_or(tokens.guessed);
        let mut state = self.state.borrow_mut();
        // A server may say any number.
        let grow = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        grow(&mut state.prompt_tokens, prompt);
        grow(&mut state.completion_tokens, completion);
        self.change(|usage| match tokens.counted {
            Some(_) => {
                grow(&mut usage.prompt_tokens, prompt);
                grow(&mut usage.completion_tokens, completion);
            }
            None => usage.uncounted += 1,
        });
        // A cost of tokens that nobody counted is not known.
        self.change(|usage| {
            let counted = usage.uncounted == 0;
            let cost = self.budget.cost(usage.prompt_tokens, usage.completion_tokens);
            usage.cost = cost.filter(|_| counted);
        });
    }

    fn change(&self, change: impl FnOnce(&mut Usage)) {
        change(&mut self.usage.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Adds the count to a closing table.
    pub(crate) fn rows(&self, table: &mut Table) {
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner).clone();
        add(&mut usage, &self.before.borrow());
        let state = self.state.borrow();
        table.add_row(["calls".to_owned(), usage.calls.to_string()]);
        table.add_row(["cache hits".to_owned(), usage.cache_hits.to_string()]);
        table.add_row(["prompt tokens".to_owned(), usage.prompt_tokens.to_string()]);
        table.add_row(["answer tokens".to_owned(), usage.completion_tokens.to_string()]);
        if usage.uncounted > 0 {
            let text = "calls whose tokens nobody counted".to_owned();
            table.add_row([text, usage.uncounted.to_string()]);
        }
        if let Some(cost) = self.budget.cost(state.prompt_tokens, state.completion_tokens) {
            let text = if usage.uncounted == 0 { "cost" } else { "cost, partly guessed" };
            table.add_row([text.to_owned(), format!("{cost:.6}")]);
        }
        if state.refused > 0 {
            table.add_row(["left out: budget".to_owned(), state.refused.to_string()]);
        }
    }
}

/// The calls of one turn. Once the first is granted, so are the others, as far as
/// the budget goes: a turn that was begun is finished before the next one begins.
pub(crate) struct Share<'a> {
    meter: &'a Meter,
    others: u64,
    /// Calls set aside and not made yet.
    left: Cell<u64>,
}

impl Share<'_> {
    /// Grants the first call, and sets those after it aside.
    pub(crate) fn first(&self) -> Result<(), Spent> {
        let calls = self.meter.set_aside(self.others + 1)?;
        self.left.set(calls - 1);
        Ok(())
    }

    /// Grants one of the others. Where the first had been answered before, none is
    /// set aside, and each is granted by itself.
    pub(crate) fn other(&self) -> Result<(), Spent> {
        match self.left.get() {
            0 => self.meter.grant(1),
            left => {
                self.left.set(left - 1);
                Ok(())
            }
        }
    }

    /// Counts what was asked.
    pub(crate) fn meter(&self) -> &Meter {
        self.meter
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.meter.state.borrow_mut().granted -= self.left.get();
    }
}

/// Adds up counts; the cost of a file is its own.
fn add(sum: &mut Usage, usage: &Usage) {
    sum.calls += usage.calls;
    sum.cache_hits += usage.cache_hits;
    sum.prompt_tokens = sum.prompt_tokens.saturating_add(usage.prompt_tokens);
    sum.completion_tokens = sum.completion_tokens.saturating_add(usage.completion_tokens);
    sum.uncounted += usage.uncounted;
}
