//! How many answers may be asked for at the same time: a queue without an end would
//! only fill the memory with requests that nobody waits for any more.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::failure::Failure;

/// How many answers are asked for, running or waiting.
#[derive(Debug, Clone, Default)]
struct Count(Arc<Mutex<usize>>);

impl Count {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets requests in while there is room.
#[derive(Debug)]
pub(super) struct Gate {
    inside: Count,
    /// Nobody is let in while so many are inside.
    most: usize,
}

/// The right of one request to be inside. Dropping it makes room.
#[derive(Debug)]
pub(super) struct Ticket {
    answers: usize,
    inside: Count,
}

impl Gate {
    /// Returns the gate of an engine that generates so many answers together and lets
    /// so many more wait.
    pub(super) fn new(max_running: usize, max_waiting: usize) -> Self {
        Self { inside: Count::default(), most: max_running.saturating_add(max_waiting) }
    }

    /// Lets a request in as a whole: a batch that is longer than the queue has its turn,
    /// too, once there is any room.
    pub(super) fn enter(&self, answers: usize) -> Result<Arc<Ticket>, Failure> {
        let most = self.most;
        let mut inside = self.inside.lock();
        if *inside >= most {
            return Err(Failure::busy(format!(
                "{inside} answers are asked for already, and no more are taken while there are \
                 {most} (`--max-running` and `--max-waiting` together): ask again later"
            )));
        }
        *inside += answers;
        Ok(Arc::new(Ticket { answers, inside: self.inside.clone() }))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        *self.inside.lock() -= self.answers;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_leaves_makes_room() {
        let gate = Gate::new(1, 2);
        let first = gate.enter(2).unwrap();
        // A batch is let in whole, though it is longer than what is left.
        let batch = gate.enter(5).unwrap();
        let refused = gate.enter(1).unwrap_err();
        assert_eq!(refused.status, axum::http::StatusCode::SERVICE_UNAVAILABLE);
        assert!(refused.message.starts_with("7 answers are asked for already"), "{refused}");
        assert!(refused.message.contains("while there are 3 "), "{refused}");
        drop(first);
        assert!(gate.enter(1).is_err());
        // All answers of a request leave together.
        let shared = batch.clone();
        drop(batch);
        assert!(gate.enter(1).is_err());
        drop(shared);
        gate.enter(1).unwrap();
    }
}
