//! One step: the next token of every running stream, and a piece of what prompts lack.
//!
//! The two are passes of their own. A stream's numbers are so the same in any company, and
//! a long prompt takes no more than a piece's time between two of its tokens.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::model::sampler::top_log_probs;
use crate::model::{Cache, Error};
use crate::serving::adapters::AdapterId;
use crate::serving::compute::{End, Event, Token};
use crate::serving::failure::Failure;

use super::{Scheduler, Sequence};

/// Tokens of prompts that are fed at once while no stream waits for its next one.
const FED_ALONE: usize = 1024;
/// Fewer tokens are sooner computed than waited for.
const LEAST_SHARED: usize = 16;

impl Scheduler {
    /// Gives every running sequence its next token, if its prompt has been fed.
    pub(super) fn step(&mut self) {
        self.share();
        let streams = self.feed_streams();
        self.pass();
        let piece = self.limits.prefill_chunk;
        self.feed_prompts(if streams { piece } else { piece.max(FED_ALONE) });
        self.pass();
    }

    /// Gives what has been computed to sequences that begin alike. One that could have
    /// more of it soon waits.
    fn share(&mut self) {
        for place in 0..self.running.len() {
            let (earlier, rest) = self.running.split_at_mut(place);
            let Some(sequence) = rest.first_mut().filter(|sequence| sequence.missing() > 1) else {
                continue;
            };
            let before = sequence.cache.len();
            if before == 0 || sequence.waits {
                let adapter = sequence.job.adapter;
                self.prefixes.fill(adapter, &sequence.ids, &mut sequence.cache);
            }
            sequence.waits = false;
            if let Some((other, shared)) = likest(earlier, sequence) {
                if other.cache.len() < shared {
                    sequence.waits = shared >= sequence.cache.len() + LEAST_SHARED;
                } else {
                    let copy = || sequence.cache.catch_up(&other.cache, shared);
                    // Without memory for a copy it is computed like any other, or fails there.
                    let _ = catch_unwind(AssertUnwindSafe(copy));
                }
            }
            if sequence.generated() == 0 {
                sequence.cached += sequence.cache.len() - before;
            }
        }
    }

    /// Feeds all that lack one token; returns whether there are any.
    fn feed_streams(&mut self) -> bool {
        for sequence in &mut self.running {
            sequence.fed = usize::from(sequence.missing() == 1);
        }
        self.running.iter().any(|sequence| sequence.fed > 0)
    }

    /// Feeds so many tokens to those that lack more than one, first come, first served.
    fn feed_prompts(&mut self, tokens: usize) {
        let mut left = tokens;
        for sequence in &mut self.running {
            let missing = sequence.missing();
            sequence.fed = if missing > 1 && !sequence.waits { missing.min(left) } else { 0 };
            left -= sequence.fed;
        }
    }

    /// Computes what is fed: one pass for each adapter in use, and one for the model alone.
    fn pass(&mut self) {
        let fed = self.running.iter().filter(|sequence| sequence.fed > 0);
        let worn: BTreeSet<_> = fed.map(|sequence| sequence.job.adapter).collect();
        worn.into_iter().for_each(|adapter| self.pass_with(adapter));
    }

    fn pass_with(&mut self, adapter: Option<AdapterId>) {
        // Who uses an adapter keeps it there.
        let Some(model) = self.shelf.model(adapter, &self.model) else { return };
        let running = &mut self.running;
        let meant = |sequence: &Sequence| sequence.fed > 0 && sequence.job.adapter == adapter;
        let computed = catch_unwind(AssertUnwindSafe(|| {
            let mut batch: Vec<(&[i64], &mut Cache)> = running
                .iter_mut()
                .filter(|sequence| meant(sequence))
                .map(|Sequence { ids, cache, fed, .. }| {
                    // At once, for each growth copies what is there.
                    cache.make_room(ids.len());
                    let start = cache.len();
                    (&ids[start..start + *fed], cache)
                })
                .collect();
            Vec::<f32>::try_from(model.step(&mut batch).f_reshape([-1])?)
        }));
        let Ok(Ok(logits)) = computed else {
            let failure = Failure::internal("the forward pass failed");
            tracing::error!("the forward pass failed; its requests are ended");
            for sequence in self.running.extract_if(.., |sequence| meant(sequence)) {
                sequence.tell(Event::Failed(failure.clone()));
            }
            return;
        };
        let version = self.shelf.version(adapter, &self.version);
        // What an adapter made that was let go of is of use to nobody.
        let kept = adapter.is_none_or(|id| self.shelf.has(id));
        let prefixes = &mut self.prefixes;
        let width = self.model.config.vocab_size as usize;
        let mut rows = logits.chunks_exact(width.max(1));
        self.running.retain_mut(|sequence| {
            if !meant(sequence) {
                return true;
            }
            sequence.fed = 0;
            let Some(logits) = rows.next() else { return false };
            if sequence.missing() > 0 {
                return true;
            }
            let before = sequence.generated();
            let goes_on = goes_on(sequence, logits, &version);
            // Nothing is kept of what no token could be sampled from.
            let sampled = sequence.generated() > before;
            if kept && sampled && (before == 0 || !goes_on) {
                prefixes.keep(adapter, &sequence.ids, &sequence.cache);
            }
            goes_on
        });
    }
}

/// Returns the earlier sequence that has most in common with one, and how much; nothing if
/// that is little, or no more than the one has already. What the other has yet to generate
/// does not count: it comes slower than it is computed.
fn likest<'a>(earlier: &'a [Sequence], sequence: &Sequence) -> Option<(&'a Sequence, usize)> {
    let most = sequence.ids.len() - 1;
    let mut likest = None;
    let mut least = LEAST_SHARED.max(sequence.cache.len() + 1);
    for other in earlier.iter().filter(|other| other.job.adapter == sequence.job.adapter) {
        let there = if other.missing() > 1 { other.ids.len() } else { other.cache.len() };
        let there = there.min(most);
        // Most of those with one beginning are told apart here, without going through it.
        if there < least || other.ids[least - 1] != sequence.ids[least - 1] {
            continue;
        }
        let both = other.ids[..there].iter().zip(&sequence.ids);
        let shared = both.take_while(|(left, right)| left == right).count();
        if shared >= least {
            (likest, least) = (Some((other, shared)), shared + 1);
        }
        if shared == most {
            break;
        }
    }
    likest
}

/// Samples a sequence's next token from its logits; false ends the sequence.
fn goes_on(sequence: &mut Sequence, logits: &[f32], version: &Arc<str>) -> bool {
    let token = match sample(sequence, logits, version) {
        Ok(token) => token,
        Err(error) => {
            sequence.tell(Event::Failed(Failure::internal(error.to_string())));
            return false;
        }
    };
    if sequence.generated() == 0 {
        sequence.tell(Event::Begun(sequence.cached));
    }
    let id = token.id;
    sequence.ids.push(i64::from(id));
    sequence.tell(Event::Token(token));
    let plan = &sequence.job.plan;
    let end = if plan.stop_ids.contains(&id) {
        End::Stop(id)
    } else if sequence.generated() >= plan.max_new {
        End::Length
    } else {
        return true;
    };
    sequence.tell(Event::End(end));
    false
}

fn sample(sequence: &mut Sequence, logits: &[f32], version: &Arc<str>) -> Result<Token, Error> {
    let sampled = sequence.sampler.sample(logits)?;
    let plan = &sequence.job.plan;
    let temperature = match plan.sampling.temperature {
        0.0 => 1.0,
        temperature => temperature,
    };
    // All log-probs of a row differ by what their logits differ by.
    let own = logits.get(sampled.id as usize).copied().unwrap_or_default();
    let at = |id: i64| {
        let logit = usize::try_from(id).ok().and_then(|id| logits.get(id));
        logit.map(|logit| (id, sampled.log_prob + (logit - own) / temperature))
    };
    let top = match plan.top {
        0 => Vec::new(),
        count => top_log_probs(logits, count, temperature)?,
    };
    Ok(Token {
        id: sampled.id,
        log_prob: sampled.log_prob,
        top,
        chosen: plan.chosen.iter().filter_map(|id| at(*id)).collect(),
        version: version.clone(),
    })
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use crate::serving::compute::{Token, Update};
    use crate::serving::schedule::{Scheduler, trial};

    fn tokens(count: i64, start: i64) -> Vec<i64> {
        (0..count).map(|place| (place * 11 + start) % 1000).collect()
    }

    #[track_caller]
    fn alike(found: &[Token], wanted: &[Token]) {
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            assert_eq!(found.id, wanted.id);
            let apart = (found.log_prob - wanted.log_prob).abs();
            assert!(apart < 1e-5, "{found:?} {wanted:?}");
        }
    }

    #[test]
    fn a_long_prompt_comes_in_pieces_and_no_stream_waits_for_it() {
        let (short, long) = (tokens(3, 1), tokens(100, 2));
        let alone = |prompt: &[i64], count: usize| {
            let mut scheduler = trial::scheduler(trial::LARGE, 8, 0);
            let mut events = trial::queue(&mut scheduler, "alone", prompt, count);
            // Nobody else waits: the prompt is one piece.
            assert_eq!(trial::finish(&mut scheduler), count);
            trial::told(&mut events)
        };
        let mut scheduler = trial::scheduler(trial::LARGE, 8, 0);
        let mut stream = trial::queue(&mut scheduler, "stream", &short, 30);
        scheduler.admit();
        scheduler.step();
        let mut told = trial::told(&mut stream).1;
        assert_eq!(told.len(), 1);
        let mut prompt = trial::queue(&mut scheduler, "prompt", &long, 10);
        for piece in 1..13 {
            scheduler.admit();
            scheduler.step();
            told.extend(trial::told(&mut stream).1);
            assert_eq!((told.len(), trial::told(&mut prompt).1.len()), (1 + piece, 0));
        }
        trial::finish(&mut scheduler);
        told.extend(trial::told(&mut stream).1);
        // To the bit: it was never in one pass with the prompt.
        assert_eq!(told, alone(&short, 30).1);
        let (cached, found) = trial::told(&mut prompt);
        assert_eq!(cached, Some(0));
        alike(&found, &alone(&long, 10).1);
    }

    #[test]
    fn who_begins_alike_waits_for_the_first_and_goes_on_from_there() {
        let prompt = tokens(100, 3);
        let mut scheduler = trial::scheduler(trial::LARGE, 32, 0);
        let other = [&prompt[..50], &[7; 20]].concat();
        let asked = [&prompt, &prompt, &other, &tokens(20, 9)];
        let mut events =
            asked.map(|prompt| trial::queue(&mut scheduler, "vote", prompt, 6)).into_iter();
        trial::finish(&mut scheduler);
        let mut next = || trial::told(&mut events.next().unwrap());
        let (first, second, third, fourth) = (next(), next(), next(), next());
        let cached = [first.0, second.0, third.0, fourth.0];
        assert_eq!(cached, [Some(0), Some(99), Some(50), Some(0)]);
        alike(&second.1, &first.1);
        let mut alone = trial::queue(&mut scheduler, "alone", &other, 6);
        trial::finish(&mut scheduler);
        let alone = trial::told(&mut alone);
        // Nothing is kept of those that have ended.
        assert_eq!(alone.0, Some(0));
        alike(&third.1, &alone.1);
    }

    /// Gives so many steps; returns how many tokens each running sequence has computed.
    fn steps(scheduler: &mut Scheduler, count: usize) -> Vec<usize> {
        for _ in 0..count {
            scheduler.admit();
            scheduler.step();
        }
        scheduler.running.iter().map(|sequence| sequence.cache.len()).collect()
    }

    #[test]
    fn who_waited_for_one_that_is_aborted_computes_it() {
        let prompt = tokens(60, 3);
        // A token at a time, as long as the stream goes on.
        let mut scheduler = trial::scheduler(trial::LARGE, 1, 0);
        let _stream = trial::queue(&mut scheduler, "stream", &tokens(3, 1), 50);
        assert_eq!(steps(&mut scheduler, 1), [3]);
        let [mut first, mut second, mut third] =
            ["first", "second", "third"].map(|rid| trial::queue(&mut scheduler, rid, &prompt, 6));
        assert_eq!(steps(&mut scheduler, 10), [13, 10, 0, 0]);
        scheduler.abort(Some("first"));
        assert_eq!(steps(&mut scheduler, 5), [18, 5, 0]);
        trial::finish(&mut scheduler);
        assert_eq!(trial::told(&mut first), (None, vec![]));
        let (second, third) = (trial::told(&mut second), trial::told(&mut third));
        assert_eq!((second.0, third.0), (Some(0), Some(59)));
        let mut alone = trial::queue(&mut scheduler, "alone", &prompt, 6);
        trial::finish(&mut scheduler);
        let alone = trial::told(&mut alone).1;
        alike(&second.1, &alone);
        alike(&third.1, &alone);
    }

    #[test]
    fn weights_that_come_in_the_middle_of_a_prompt_compute_all_of_it() {
        let folder = tempfile::tempdir().unwrap();
        trial::write_other(folder.path());
        let prompt = tokens(100, 2);
        let mut scheduler = trial::scheduler(trial::LARGE, 8, 1 << 26);
        let mut stream = trial::queue(&mut scheduler, "stream", &tokens(3, 1), 30);
        assert_eq!(steps(&mut scheduler, 1), [3]);
        let [mut first, mut second] =
            ["first", "second"].map(|rid| trial::queue(&mut scheduler, rid, &prompt, 6));
        assert_eq!(steps(&mut scheduler, 4), [7, 32, 0]);
        let (reply, carried) = oneshot::channel();
        let (folder, version) = (folder.path().to_owned(), Some("1".to_owned()));
        scheduler.update(Update { folder, version, abort: false, reply });
        assert_eq!(carried.blocking_recv().unwrap(), Ok(3));
        trial::finish(&mut scheduler);
        let old = |tokens: &[Token]| tokens.iter().filter(|token| &*token.version == "0").count();
        let (first, second) = (trial::told(&mut first), trial::told(&mut second));
        assert_eq!((first.0, second.0), (Some(0), Some(99)));
        assert_eq!((old(&first.1), old(&second.1)), (0, 0));
        let stream = trial::told(&mut stream).1;
        assert_eq!((old(&stream), stream.len()), (5, 30));
        // A run of the new weights that nothing came before has the same numbers.
        scheduler.prefixes.clear();
        let mut alone = trial::queue(&mut scheduler, "alone", &prompt, 6);
        trial::finish(&mut scheduler);
        let (cached, alone) = trial::told(&mut alone);
        assert_eq!(cached, Some(0));
        alike(&first.1, &alone);
        alike(&second.1, &alone);
    }

    #[test]
    fn a_beginning_outlives_its_sequence() {
        let mut scheduler = trial::scheduler(trial::LARGE, 32, 1 << 26);
        let prompt = tokens(130, 4);
        let mut ask = |prompt: &[i64]| {
            let mut events = trial::queue(&mut scheduler, "turn", prompt, 70);
            trial::finish(&mut scheduler);
            trial::told(&mut events)
        };
        let (cached, first) = ask(&prompt);
        assert_eq!(cached, Some(0));
        let (cached, again) = ask(&prompt);
        assert_eq!(cached, Some(128));
        alike(&again, &first);
        // The next turn begins with the answer, whose last token was never fed.
        let answer = first.iter().map(|token| i64::from(token.id));
        let turn: Vec<_> = prompt.iter().copied().chain(answer).chain([1, 2, 3]).collect();
        assert_eq!(ask(&turn).0, Some(192));
        // An answer that was retracted finds its own beginning.
        let mut events = trial::queue(&mut scheduler, "retracted", &prompt, 70);
        for _ in 0..5 {
            scheduler.admit();
            scheduler.step();
        }
        scheduler.retract();
        trial::finish(&mut scheduler);
        let (cached, retracted) = trial::told(&mut events);
        assert_eq!(cached, Some(128));
        alike(&retracted, &first);
    }
}
