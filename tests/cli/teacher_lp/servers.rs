//! `oclaw teacher-lp --engine` with several servers of one model.

use std::net::TcpListener;

use oclaw::serving;
use tokio::runtime::Runtime;

use super::run;
use crate::harness::fixture_models as models;

#[test]
fn servers_share_the_calls_and_a_dead_one_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().join("tiny-qwen3");
    let runtime = Runtime::new().unwrap();
    let start = || runtime.block_on(serving::start(serving::Options::new(&model))).unwrap();
    let (one, other) = (start(), start());
    // Nobody listens there any more.
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (urls, dead) = ([one.url(), other.url()], format!("http://{dead}"));
    let score = |engines: &[&str]| {
        let mut flags = vec!["--no-cache", "--tokenizer", model.to_str().unwrap()];
        flags.extend(engines.iter().flat_map(|url| ["--engine", url]));
        let (words, turns, _) = run(folder.path(), &flags, 3);
        (words, turns[0].teacher_log_probs.clone().unwrap())
    };
    let (_, alone) = score(&[&urls[0]]);
    assert!(alone.iter().all(Option::is_some));

    let (words, shared) = score(&[&urls[0], &urls[1]]);
    assert_eq!(shared, alone);
    for url in &urls {
        let calls = words.split(&format!("calls of {url}")).nth(1);
        let calls = calls.and_then(|rest| rest.split_whitespace().next());
        assert!(calls.is_some_and(|calls| calls != "0,"), "{url}: {words}");
    }

    let (words, without) = score(&[&dead, &urls[1]]);
    assert_eq!(without, alone);
    assert!(words.contains("left out until it is there again"), "{words}");

    runtime.block_on(one.shutdown());
    runtime.block_on(other.shutdown());
}

#[test]
fn servers_that_are_all_away_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let dead = || {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        format!("http://{address}")
    };
    let (engines, model) = (format!("{},{}", dead(), dead()), models().join("tiny-qwen3"));
    let model = model.to_str().unwrap();
    let flags = ["--retries", "0", "--tokenizer", model, "--engine", &engines];
    let (_, turns, _) = run(folder.path(), &flags, 4);
    assert_eq!(turns, []);
}
