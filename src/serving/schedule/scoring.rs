//! Scores, a piece at a time between the steps: a long sequence holds up no stream.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::model::Scoring;
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

    /// Returns how many sequences there are.
    pub(super) fn count(&self) -> usize {
        self.jobs.len()
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
        if batch.jobs.iter().all(|job| job.reply.is_closed()) {
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
            let _ = job.reply.send(Ok(Scores { scored, version: version.clone() }));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use crate::model::Score;
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
            scheduler.queue_score(ScoreJob { request, adapter: None, reply });
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
            .map(|answer| answer.blocking_recv().unwrap().unwrap().scored)
            .collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_score_by_an_adapter_that_is_gone_is_refused_as_an_answer_is() {
        let mut scheduler = trial::scheduler(trial::LARGE, 16, 0);
        let (reply, answer) = oneshot::channel();
        let request = Score { ids: vec![1, 2, 3], start: 1, ..Default::default() };
        scheduler.queue_score(ScoreJob { request, adapter: Some(1), reply });
        let refused = answer.blocking_recv().unwrap().unwrap_err();
        assert_eq!(refused, Failure::bad("the adapter was unloaded meanwhile"));
    }
}
