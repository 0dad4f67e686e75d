//! A long work in pieces, on every processor.

use std::num::NonZero;
use std::sync::mpsc::sync_channel;
use std::thread;

/// Does some work piece by piece, several at once, and hands the results over in the
/// order of the pieces. Per thread no more than two results wait.
pub(super) fn in_order<T: Send, E: Send>(
    count: usize,
    work: impl Fn(usize) -> Result<T, E> + Sync,
    mut take: impl FnMut(T) -> Result<(), E>,
) -> Result<(), E> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(count);
    let work = &work;
    thread::scope(|scope| {
        let mut lanes = Vec::new();
        for lane in 0..threads {
            let (sender, receiver) = sync_channel(1);
            scope.spawn(move || {
                for piece in (lane..count).step_by(threads) {
                    // Nobody takes any more once one piece has failed.
                    if sender.send(work(piece)).is_err() {
                        break;
                    }
                }
            });
            lanes.push(receiver);
        }
        for piece in 0..count {
            // A thread that panics takes this one with it, at the end of the scope.
            let Ok(done) = lanes[piece % threads].recv() else { break };
            take(done?)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::in_order;

    #[test]
    fn results_come_in_the_order_of_the_pieces() {
        let mut taken = Vec::new();
        let done = in_order(
            100,
            |piece| Ok::<_, String>(piece * piece),
            |square| {
                taken.push(square);
                Ok(())
            },
        );
        assert_eq!(done, Ok(()));
        assert_eq!(taken, (0..100).map(|piece| piece * piece).collect::<Vec<_>>());
        let mut taken = 0;
        let work = |piece| if piece == 7 { Err("seven") } else { Ok(piece) };
        let done = in_order(1000, work, |_| {
            taken += 1;
            Ok(())
        });
        assert_eq!((done, taken), (Err("seven"), 7));
        assert_eq!(in_order(0, Ok::<_, String>, |_| Err("nothing was there".to_owned())), Ok(()));
    }
}
