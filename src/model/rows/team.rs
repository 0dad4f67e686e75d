//! Threads that help with one task after another.
//!
//! A token takes some two hundred products of some tens of microseconds each. To wake a
//! thread costs as much as one of them, so a helper looks out for the next task for a
//! while before it sleeps. Who begins a task takes pieces of it like the helpers, and
//! waits at the end only for pieces that are being worked on: a helper that the system
//! does not run holds up nobody.

use std::any::Any;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread;

/// Looks for another task before a helper sleeps.
const LOOKS: u32 = 20_000;
/// Looks before the core is left to others for a moment.
const LOOKS_IN_A_ROW: u32 = 64;

/// Does one piece.
type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// A task as helpers see it.
#[derive(Clone, Copy)]
struct Task {
    work: *const Work<'static>,
    pieces: usize,
    /// Helpers that may still join.
    wanted: usize,
}

#[expect(unsafe_code, reason = "the work is lent to other threads for as long as they work")]
// SAFETY: `run` returns only when no helper has it any more, and `Work` is `Sync`.
unsafe impl Send for Task {}

/// What the threads have in common.
struct Team {
    /// One task at a time.
    turn: Mutex<()>,
    task: Mutex<Option<Task>>,
    begun: Condvar,
    /// Number of the newest task.
    round: AtomicU64,
    /// The next piece that nobody has taken.
    next: AtomicUsize,
    /// Helpers at work.
    busy: AtomicUsize,
    /// What the work of a helper panicked with.
    panicked: Mutex<Option<Box<dyn Any + Send>>>,
    /// Helpers that there are.
    started: AtomicUsize,
    /// Helpers that there may be.
    helpers: usize,
}

/// Does all pieces of a task, on up to so many threads; returns when all are done.
pub(super) fn run(pieces: usize, threads: usize, work: &Work<'_>) {
    let alone = || (0..pieces).for_each(work);
    if threads < 2 || pieces < 2 {
        return alone();
    }
    let team = team();
    // Somebody else's task is on: to wait for it would be slower.
    let _turn = match team.turn.try_lock() {
        Ok(turn) => turn,
        Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
        Err(TryLockError::WouldBlock) => return alone(),
    };
    let wanted = (threads - 1).min(pieces - 1);
    team.start(wanted);
    let end = team.begin(pieces, wanted, work);
    team.take_pieces(pieces, work);
    drop(end);
    // A piece that panicked is not done: whoever asked for it must not go on.
    if let Some(panicked) = team.panicked().take() {
        resume_unwind(panicked);
    }
}

/// Returns what the threads have in common.
fn team() -> &'static Team {
    static TEAM: OnceLock<Team> = OnceLock::new();
    TEAM.get_or_init(|| Team {
        turn: Mutex::new(()),
        task: Mutex::new(None),
        begun: Condvar::new(),
        round: AtomicU64::new(0),
        next: AtomicUsize::new(0),
        busy: AtomicUsize::new(0),
        panicked: Mutex::new(None),
        started: AtomicUsize::new(0),
        helpers: thread::available_parallelism().map_or(0, |cores| cores.get() - 1),
    })
}

/// Ends a task, also if its work panics.
struct End<'a>(&'a Team);

impl Drop for End<'_> {
    fn drop(&mut self) {
        *self.0.task() = None;
        let mut looks = 0;
        while self.0.busy.load(Ordering::Acquire) > 0 {
            wait_a_little(&mut looks);
        }
    }
}

/// Leaves the core to others now and then: the one that is waited for may need it.
fn wait_a_little(looks: &mut u32) {
    *looks = looks.wrapping_add(1);
    match *looks % LOOKS_IN_A_ROW {
        0 => thread::yield_now(),
        _ => spin_loop(),
    }
}

impl Team {
    /// Starts the helpers that a task wants and that are not there yet. One task is on
    /// at a time, and so is this.
    fn start(&'static self, wanted: usize) {
        while self.started.load(Ordering::Relaxed) < wanted.min(self.helpers) {
            let name = format!("product-{}", self.started.fetch_add(1, Ordering::Relaxed));
            // Fewer helpers are slower, no worse.
            let _ = thread::Builder::new().name(name).spawn(|| self.help());
        }
    }

    fn panicked(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panicked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn task(&self) -> MutexGuard<'_, Option<Task>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[expect(unsafe_code, reason = "the work is lent to other threads for as long as they work")]
    fn begin(&self, pieces: usize, wanted: usize, work: &Work<'_>) -> End<'_> {
        // SAFETY: only the lifetime changes; `End` waits until nobody has the work.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        let mut task = self.task();
        // What is left of a task whose own thread panicked too.
        *self.panicked() = None;
        self.next.store(0, Ordering::Relaxed);
        *task = Some(Task { work, pieces, wanted });
        self.round.fetch_add(1, Ordering::Release);
        drop(task);
        self.begun.notify_all();
        End(self)
    }

    fn take_pieces(&self, pieces: usize, work: &Work<'_>) {
        loop {
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                return;
            }
            work(piece);
        }
    }

    fn help(&self) {
        let mut seen = 0;
        loop {
            seen = self.wait_for_more_than(seen);
            let Some(task) = self.join() else { continue };
            let _leave = Leave(self);
            #[expect(unsafe_code, reason = "the work is lent by another thread")]
            // SAFETY: `busy` counts this thread, and `End` waits for that to be 0.
            let work = unsafe { &*task.work };
            // The helper lives on, and the task's owner is told.
            if let Err(panicked) =
                catch_unwind(AssertUnwindSafe(|| self.take_pieces(task.pieces, work)))
            {
                *self.panicked() = Some(panicked);
            }
        }
    }

    /// Joins in the task, if one is on that wants more helpers.
    fn join(&self) -> Option<Task> {
        let mut task = self.task();
        let joined = task.as_mut().filter(|task| task.wanted > 0)?;
        joined.wanted -= 1;
        self.busy.fetch_add(1, Ordering::Relaxed);
        Some(*joined)
    }

    fn wait_for_more_than(&self, seen: u64) -> u64 {
        let mut looks = 0;
        while looks < LOOKS {
            let round = self.round.load(Ordering::Acquire);
            if round != seen {
                return round;
            }
            wait_a_little(&mut looks);
        }
        let mut task = self.task();
        loop {
            let round = self.round.load(Ordering::Acquire);
            if round != seen {
                return round;
            }
            task = self.begun.wait(task).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Counts a helper out, also if the work panics.
struct Leave<'a>(&'a Team);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_done_once() {
        for threads in [1, 2, 8] {
            for pieces in [0, 1, 2, 3, 100] {
                let done: Vec<_> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..50 {
                    run(pieces, threads, &|piece| {
                        done[piece].fetch_add(1, Ordering::Relaxed);
                    });
                }
                let counts: Vec<_> = done.iter().map(|it| it.load(Ordering::Relaxed)).collect();
                assert_eq!(counts, vec![50; pieces], "{threads} threads");
            }
        }
    }

    #[test]
    fn a_panic_reaches_whoever_asked_and_the_next_task_is_done() {
        for broken in 0..8 {
            let found = catch_unwind(|| {
                run(8, 8, &|piece| assert!(piece != broken, "piece {piece} broke"));
            });
            let told = found.unwrap_err();
            assert_eq!(*told.downcast::<String>().unwrap(), format!("piece {broken} broke"));
            let done = AtomicUsize::new(0);
            run(8, 8, &|_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 8);
        }
    }

    #[test]
    fn tasks_of_several_threads_do_not_mix() {
        thread::scope(|scope| {
            for offset in 0..4 {
                scope.spawn(move || {
                    for _ in 0..200 {
                        let sum = AtomicUsize::new(0);
                        run(10, 2, &|piece| {
                            sum.fetch_add(piece + offset, Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), 45 + 10 * offset);
                    }
                });
            }
        });
    }
}
