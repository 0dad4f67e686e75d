//! Several servers behind a stage that follows.

use oclaw::table::{Provenance, write_shard};

use super::{Run, SERVE, judge, turns_of};

#[test]
fn one_of_two_may_go_and_both_are_waited_for() {
    let run = Run::new();
    let [first, second] = [judge(), judge()];
    let (one, other) = (first.url(), second.url());
    let flags = ["--engine", &one, "--engine", &other, "--votes", "1", "--retries", "0"];
    let shard = |second: i64, turns: u32| {
        let turns = turns_of("s", second, turns);
        write_shard(&run.at("turns"), SERVE, &turns, &Provenance::default()).unwrap();
    };
    shard(100, 2);
    let mut judging = run.start("judge", ("turns", "judged"), &flags);
    judging.hears("2 rows, 2 noted, 0 failed");
    drop(first);
    shard(200, 4);
    let told = judging.hears("left out until it is there again");
    assert!(told.contains(&one), "{told}");
    judging.hears("4 rows, 4 noted, 0 failed");
    drop(second);
    // The last of the five has been asked about nowhere yet.
    shard(300, 5);
    judging.hears("waiting for it");
    let (code, words) = judging.stop();
    assert_eq!(code, Some(0), "{words}");
    let gone = |line: &&str| line.contains(&one) && line.contains("left out");
    assert_eq!(words.lines().filter(gone).count(), 1, "{words}");
    assert!(words.contains("judged 6"), "{words}");
    assert_eq!(run.names("judged").len(), 2);
}
