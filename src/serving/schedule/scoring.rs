//! Scores, a piece at a time between the steps: a long sequence holds up no stream.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::model::{Score, Scored, Scoring};
use crate::serving::adapters::AdapterId;
use crate::serving::compute::{ScoreJob, Scores};
use crate::serving::failure::Failure;

use super::Scheduler;

/// Sequences that are scored together.
const SCORED_AT_ONCE: usize = 16;

/// Sequences that are being scored, all by the same adapter or by the model alone.
pub(super) struct Batch {
    pub(super) adapter: Option<AdapterId>,
    jobs: Vec<ScoreJob>,
    scoring: Scoring,
}

impl Batch {
    fn new(adapter: Option<AdapterId>, jobs: Vec<ScoreJob>) -> Self {
        let scoring = begin(&jobs);
        Self { adapter, jobs, scoring }
    }

    /// Returns how many sequences there are whose score is waited for.
    pub(super) fn count(&self) -> usize {
        self.jobs.iter().filter(|job| !job.reply.is_closed()).count()
    }

    /// Begins again: what old weights have computed counts no more.
    pub(super) fn begin_again(&mut self) {
        self.scoring = begin(&self.jobs);
    }
}

fn begin(jobs: &[ScoreJob]) -> Scoring {
    Scoring::new(jobs.iter().map(|job| job.request.clone()).collect())
}

impl Scheduler {
    /// Lets a sequence wait for its score.
    pub(super) fn queue_score(&mut self, job: ScoreJob) {
        if self.shelf.model(job.adapter, &self.model).is_some() {
            self.scores.push_back(job);
            return;
        }
        let failure = Failure::bad("the adapter was unloaded meanwhile");
        let _ = job.reply.send(Err(failure));
    }

    /// Does the next piece of what is to be scored.
    pub(super) fn score(&mut self) {
        let begun = self.scoring.take();
        let Some(mut batch) = begun.or_else(|| self.next_batch()) else { return };
        if batch.count() == 0 {
            return;
        }
        let model = self.shelf.model(batch.adapter, &self.model);
        let tokens = self.limits.prefill_chunk;
        let scoring = &mut batch.scoring;
        let piece = || model.map(|model| model.score_on(scoring, tokens));
        match catch_unwind(AssertUnwindSafe(piece)) {
            Ok(Some(false)) => self.scoring = Some(batch),
            Ok(Some(true)) => self.tell_scores(batch),
            Ok(None) | Err(_) => {
                for job in batch.jobs {
                    let _ = job.reply.send(Err(Failure::internal("scoring failed")));
                }
            }
        }
    }

    /// Ends the scores of a request, or all. Of what is being scored already the others go
    /// on, and the place of one that is ended stays.
    pub(super) fn abort_scores(&mut self, rid: Option<&str>) {
        let meant = |job: &ScoreJob| rid.is_none_or(|rid| &*job.rid == rid);
        let (out, kept) = self.scores.drain(..).partition::<Vec<_>, _>(meant);
        self.scores = kept.into();
        let waiting = out.into_iter().map(|job| job.reply);
        let batch = self.scoring.iter_mut().flat_map(|batch| &mut batch.jobs);
        // The sender left behind has no receiver: nobody waits there.
        let begun = batch
            .filter(|job| meant(job))
            .map(|job| std::mem::replace(&mut job.reply, oneshot::channel().0));
        for reply in waiting.chain(begun) {
            let _ = reply.send(Ok(None));
        }
        if self.scoring.as_ref().is_some_and(|batch| batch.count() == 0) {
            self.scoring = None;
        }
    }

    /// Takes the next sequences that wait, those of one adapter.
    fn next_batch(&mut self) -> Option<Batch> {
        self.scores.retain(|job| !job.reply.is_closed());
        let adapter = self.scores.front()?.adapter;
        let (mut jobs, mut later) = (Vec::new(), VecDeque::new());
        for job in self.scores.drain(..) {
            match job.adapter == adapter && jobs.len() < SCORED_AT_ONCE {
                true => jobs.push(job),
                false => later.push_back(job),
            }
        }
        self.scores = later;
        Some(Batch::new(adapter, jobs))
    }

    fn tell_scores(&self, batch: Batch) {
        let version = self.shelf.version(batch.adapter, &self.version);
        for (job, scored) in batch.jobs.into_iter().zip(batch.scoring.into_scored()) {
            let told = told(scored, &job.request, &version);
            let _ = job.reply.send(told.map(Some));
        }
    }
}

/// Returns a score, or refuses one in which something is no log-prob: whoever learned from
/// it would learn from a number that the model never gave.
fn told(scored: Scored, request: &Score, version: &Arc<str>) -> Result<Scores, Failure> {
    match without_log_prob(&scored, request) {
        None => Ok(Scores { scored, version: version.clone() }),
        Some(place) => {
            let message = format!(
                "position {place} has no finite log-prob: the weights or what they compute are \
                 not sound"
            );
            tracing::error!("{message}");
            Err(Failure::internal(message))
        }
    }
}

/// Returns the first position of a sequence at which something is no log-prob. Minus
/// infinity is one, that of what cannot be.
fn without_log_prob(scored: &Scored, request: &Score) -> Option<usize> {
    let Scored { log_probs, top_log_probs, chosen_log_probs, .. } = scored;
    let row = |numbers: &[f32]| {
        let odd = numbers.iter().position(|number| number.is_nan() || *number > f32::MAX)?;
        let width = numbers.len() / log_probs.len().max(1);
        Some(odd / width.max(1))
    };
    let rows = [log_probs, top_log_probs, chosen_log_probs].map(|numbers| row(numbers));
    // Nothing stands before the first token.
    rows.into_iter().flatten().min().map(|row| request.start.max(1) + row)
}

#[cfg(test)]
mod tests {
    use crate::model::{LoadOptions, Model};
    use crate::serving::schedule::trial;

    use super::*;

    #[test]
    fn a_long_sequence_is_scored_in_pieces_to_the_same_bits() {
        let mut scheduler = trial::scheduler(trial::LARGE, 16, 0);
        let ids: Vec<i64> = (0..700).map(|place| place * 13 % 1000).collect();
        let short = Score { ids: ids[..9].to_vec(), start: 3, top_k: 2, ..Default::default() };
        let long = Score { ids, start: 1, ..Default::default() };
        let wanted = scheduler.model.score(&[long.clone(), short.clone()]);
        let mut answers = Vec::new();
        for request in [long, short] {
            let (reply, answer) = oneshot::channel();
            scheduler.queue_score(ScoreJob { rid: "a".into(), request, adapter: None, reply });
            answers.push(answer);
        }
        let mut pieces = 0;
        loop {
            scheduler.score();
            pieces += 1;
            scheduler.publish();
            let waiting = scheduler.board.read().waiting;
            if scheduler.scoring.is_none() {
                assert_eq!(waiting, 0);
                break;
            }
            assert_eq!(waiting, 2, "who is being scored waits for the next piece");
            // In the middle everything begins again.
            if pieces == 2 {
                scheduler.scoring.iter_mut().for_each(Batch::begin_again);
            }
        }
        // Two layers twice, and two of the head for the long one.
        assert!(pieces >= 4, "{pieces}");
        let found: Vec<_> = answers
            .into_iter()
            .map(|answer| answer.blocking_recv().unwrap().unwrap().unwrap().scored)
            .collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_score_by_an_adapter_that_is_gone_is_refused_as_an_answer_is() {
        let mut scheduler = trial::scheduler(trial::LARGE, 16, 0);
        let (reply, answer) = oneshot::channel();
        let request = Score { ids: vec![1, 2, 3], start: 1, ..Default::default() };
        scheduler.queue_score(ScoreJob { rid: "a".into(), request, adapter: Some(1), reply });
        let refused = answer.blocking_recv().unwrap().unwrap_err();
        assert_eq!(refused, Failure::bad("the adapter was unloaded meanwhile"));
    }

    type Told = Result<Option<Scores>, Failure>;

    /// Asks for the score of so many tokens for a request.
    fn ask(scheduler: &mut Scheduler, rid: &str, length: i64) -> oneshot::Receiver<Told> {
        let (reply, answer) = oneshot::channel();
        let ids = (0..length).map(|place| place * 13 % 1000).collect();
        let request = Score { ids, start: 1, ..Default::default() };
        scheduler.queue_score(ScoreJob { rid: rid.into(), request, adapter: None, reply });
        answer
    }

    fn finish(scheduler: &mut Scheduler) {
        while scheduler.has_work() {
            scheduler.score();
        }
    }

    #[test]
    fn what_is_aborted_hears_so_at_once_and_the_others_are_scored() {
        let mut scheduler = trial::scheduler(trial::LARGE, 16, 0);
        let mut wanted = ask(&mut scheduler, "b", 300);
        finish(&mut scheduler);
        let wanted = wanted.try_recv().unwrap().unwrap().unwrap().scored;
        // In the queue, and after some pieces.
        for pieces in [0, 1, 2] {
            let mut other = ask(&mut scheduler, "b", 300);
            let mut meant = [ask(&mut scheduler, "a", 300), ask(&mut scheduler, "a", 5)];
            (0..pieces).for_each(|_| scheduler.score());
            assert_eq!(scheduler.scoring.is_some(), pieces > 0);
            let mut later = ask(&mut scheduler, "a", 7);
            scheduler.abort(Some("a"));
            for answer in meant.iter_mut().chain([&mut later]) {
                assert!(answer.try_recv().unwrap().unwrap().is_none(), "{pieces}");
            }
            scheduler.publish();
            assert_eq!(scheduler.board.read().waiting, 1, "{pieces}");
            // Who begins again does so with all places.
            scheduler.scoring.iter_mut().for_each(Batch::begin_again);
            finish(&mut scheduler);
            let scored = other.try_recv().unwrap().unwrap().unwrap().scored;
            assert_eq!(scored.log_probs.len(), wanted.log_probs.len());
            for (one, alone) in scored.log_probs.iter().zip(&wanted.log_probs) {
                assert!((one - alone).abs() < 1e-4, "{pieces}: {one} {alone}");
            }
        }
        // With nobody left nothing is computed.
        let mut last = ask(&mut scheduler, "c", 300);
        scheduler.score();
        scheduler.abort(None);
        assert!(last.try_recv().unwrap().unwrap().is_none());
        assert!(!scheduler.has_work());
    }

    #[test]
    fn a_score_that_is_no_number_is_told_as_none() {
        let request = Score { ids: vec![5; 6], start: 2, ..Default::default() };
        let good = Scored {
            log_probs: vec![-1.0, f32::NEG_INFINITY, -2.0, -3.0],
            top_log_probs: vec![-0.5; 8],
            chosen_log_probs: vec![-4.0; 4],
            ..Scored::default()
        };
        let version: Arc<str> = "0".into();
        let place_of = |scored: &Scored| match told(scored.clone(), &request, &version) {
            Ok(scores) => Err(scores.scored),
            Err(failure) => {
                assert_eq!(failure.status.as_u16(), 500);
                Ok(failure.message)
            }
        };
        assert_eq!(place_of(&good), Err(good.clone()));
        for none in [f32::NAN, f32::INFINITY] {
            let (mut own, mut top, mut chosen) = (good.clone(), good.clone(), good.clone());
            own.log_probs[3] = none;
            top.top_log_probs[3] = none;
            chosen.chosen_log_probs[2] = none;
            for (scored, place) in [(own, 5), (top, 3), (chosen, 4)] {
                let message = place_of(&scored).unwrap();
                let expected = format!("position {place} has no finite log-prob");
                assert!(message.starts_with(&expected), "{message}");
            }
        }
    }

    #[test]
    fn weights_that_overflow_give_no_score() {
        let folder = tempfile::tempdir().unwrap();
        // Finite, as loading wants them; their products are not.
        trial::write_changed(folder.path(), |value| value * 1e19);
        let mut scheduler = trial::scheduler(trial::LARGE, 16, 0);
        scheduler.model = Model::load(folder.path(), &LoadOptions::default()).unwrap();
        let mut answer = ask(&mut scheduler, "a", 9);
        finish(&mut scheduler);
        let failure = answer.try_recv().unwrap().unwrap_err();
        assert_eq!(failure.status.as_u16(), 500);
        assert!(failure.message.starts_with("position 1 has no finite"), "{failure}");
    }
}
