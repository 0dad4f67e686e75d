//! The looks at the store by which the stages meet: one at a time, each as long as it
//! takes, while the supervisor goes on.

use std::pin::Pin;
use std::time::{Duration, Instant};

use oclaw::pipeline::{self, Accountant};

/// How often a store is looked at: it may cost for each list that it gives.
const LOOK: Duration = Duration::from_secs(10);
/// What is left alone after a look that took long: so many times as long as it took, as
/// long as the next is not too late.
const SHARE: u32 = 4;
const LATEST: Duration = Duration::from_secs(60);
/// A first look that takes so long is told.
const LONG: Duration = Duration::from_secs(10);

type Look = Pin<Box<dyn Future<Output = Result<(), pipeline::Error>>>>;

/// The looks.
pub(super) struct Looks {
    /// The one under way, with when it began.
    under_way: Option<(Look, Instant)>,
    next: Instant,
    /// Whether it was told that the store takes long.
    told: bool,
}

impl Looks {
    pub(super) fn new() -> Self {
        Self { under_way: None, next: Instant::now(), told: false }
    }

    /// Begins a look, if it is time for one.
    pub(super) fn begin(&mut self, accountant: &Accountant) {
        if self.under_way.is_none() && Instant::now() >= self.next {
            let look: Look = Box::pin(accountant.look());
            self.under_way = Some((look, Instant::now()));
        }
    }

    /// Waits for the end of the look under way; for ever if there is none. Whoever does
    /// not wait any more may wait again.
    pub(super) async fn ended(&mut self) -> Result<(), pipeline::Error> {
        let Some((look, begun)) = &mut self.under_way else {
            return std::future::pending().await;
        };
        let looked = look.await;
        let took = begun.elapsed();
        self.under_way = None;
        self.next = Instant::now() + pause(looked.is_ok(), took);
        looked
    }

    /// Says, once, that the store takes long.
    pub(super) fn is_slow(&mut self) -> bool {
        let long = |(_, begun): &(Look, Instant)| begun.elapsed() >= LONG;
        let slow = !self.told && self.under_way.as_ref().is_some_and(long);
        self.told |= slow;
        slow
    }
}

/// Returns how long a store is left alone. One that did not tell has cost little, and may
/// be there again.
fn pause(told: bool, took: Duration) -> Duration {
    match told {
        true => (took * SHARE).clamp(LOOK, LATEST),
        false => LOOK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_left_alone_but_not_for_long() {
        let pause = |told, millis| pause(told, Duration::from_millis(millis)).as_secs();
        assert_eq!([50, 2_500, 5_000, 90_000].map(|it| pause(true, it)), [10, 10, 20, 60]);
        assert_eq!(pause(false, 30_000), 10, "to wait for who is away is no work");
    }

    /// A look that takes for ever holds up nobody, and there is no second one.
    #[test]
    fn a_look_under_way_is_the_only_one() {
        let mut looks = Looks::new();
        let endless: Look = Box::pin(std::future::pending());
        looks.under_way = Some((endless, Instant::now()));
        let folder = tempfile::tempdir().unwrap();
        let accountant = Accountant::new(&pipeline::Run::new(folder.path()), &[]);
        looks.begin(&accountant);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for _ in 0..2 {
            let waiting = std::pin::pin!(looks.ended());
            assert!(waiting.poll(&mut context).is_pending());
        }
        assert!(!looks.is_slow());
        let quick: Look = Box::pin(std::future::ready(Ok(())));
        looks.under_way = Some((quick, Instant::now()));
        let mut ended = Box::pin(looks.ended());
        assert!(ended.as_mut().poll(&mut context).is_ready());
        drop(ended);
        assert!(looks.under_way.is_none() && looks.next > Instant::now());
    }
}
