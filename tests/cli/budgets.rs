//! Budgets and dry runs of the stages that ask a model.

use super::cache::{Bench, CHAT, calls, errors, judge};

#[test]
fn budgets_leave_the_rest_null() {
    let none = None::<&str>;
    let left = Some("budget");
    for (flags, made, expected) in [
        // Three votes belong together: four calls are enough for one turn.
        (&["--max-requests", "4"][..], 3, [none, left, none, none, left]),
        (&["--votes", "1", "--max-requests", "2"], 2, [none, none, none, none, left]),
        // 15 tokens a call: the second one goes over.
        (&["--votes", "1", "--max-tokens-total", "20"], 2, [none, none, none, none, left]),
        (
            &["--votes", "1", "--max-cost", "2", "--price-in", "100000", "--price-out", "200000"],
            1,
            [none, left, none, none, left],
        ),
        (&["--max-requests", "0"], 0, [left, left, none, none, left]),
    ] {
        let (bench, fake) = (Bench::new(), judge());
        let flags: Vec<_> = flags.iter().copied().chain(["--at-once", "1"]).collect();
        let ran = bench.run("judge", &fake, &flags, 3);
        assert_eq!((calls(&fake), errors(&ran)), (made, expected.to_vec()), "{flags:?}");
        for turn in ran.turns.iter().filter(|turn| turn.judge_error.is_some()) {
            assert_eq!((&turn.score, &turn.votes, &turn.judge_text), (&None, &None, &None));
        }
        let row = format!("left out: budget {}", expected.iter().flatten().count());
        assert!(ran.talk.contains(&row), "{}", ran.talk);
        if flags.contains(&"--max-cost") {
            assert!(ran.talk.contains("cost 2.000000"), "{}", ran.talk);
            assert_eq!(ran.usage.unwrap().cost, Some(2.0));
        }
    }
}

#[test]
fn after_a_budget_the_run_goes_on() {
    let (bench, fake) = (Bench::new(), judge());
    bench.run("judge", &fake, &["--at-once", "1", "--max-requests", "3"], 3);
    let part = bench.path("part.parquet");
    std::fs::rename(bench.path("out.parquet"), &part).unwrap();
    // What is kept costs nothing, so a budget of nothing is enough for it.
    let kept = bench.run("judge", &fake, &["--at-once", "1", "--max-requests", "0"], 3);
    assert_eq!(errors(&kept)[0], None);
    assert_eq!(calls(&fake), 3);
    let whole = bench.run_on(&part, ("judge", &fake), &["--fill"], 0);
    assert_eq!(calls(&fake), 9);
    assert_eq!(errors(&whole), [None; 5]);

    let ran = bench.run("hint", &fake, &["--at-once", "1", "--max-requests", "3"], 3);
    let left: Vec<_> = ran.turns.iter().map(|turn| turn.hint_error.as_deref()).collect();
    assert_eq!(left, [None, Some("budget"), None, Some("budget"), Some("budget")]);
    assert_eq!(ran.turns[1].hint_votes, None);
}

#[test]
fn a_dry_run_asks_nobody() {
    let (bench, fake) = (Bench::new(), judge());
    let prices = ["--price-in", "1", "--price-out", "2", "--max-tokens", "100", "--dry-run"];
    let ran = bench.run("judge", &fake, &prices, 0);
    assert_eq!(fake.paths(), Vec::<String>::new());
    assert!(!bench.path("out.parquet").exists() && !bench.answers().exists());
    let expected = "turns 5 to ask about 3 calls 9 cache hits 0 prompt tokens (guessed: 4 \
                    characters make one) ";
    let rest = ran.data.strip_prefix(expected).unwrap_or_else(|| panic!("{}", ran.data));
    let (tokens, rest) = rest.split_once(' ').unwrap();
    let tokens: f64 = tokens.parse().unwrap();
    let cost = (tokens + 2.0 * 900.0) / 1e6;
    assert_eq!(rest, format!("answer tokens, at most 900 cost, at most {cost:.6}"));

    // The guess is of what is really sent.
    bench.run("judge", &fake, &["--at-once", "1", "--max-requests", "3"], 3);
    let sent = |body: &serde_json::Value| {
        let messages = body["messages"].as_array().unwrap();
        messages.iter().map(|m| m["content"].as_str().unwrap().chars().count()).sum::<usize>()
    };
    let asked = fake.seen();
    let asked = asked.iter().find(|seen| seen.path == CHAT).unwrap();
    let guessed = 3.0 * (sent(&asked.body) as f64 / 4.0).ceil();
    assert!((tokens / guessed - 3.0).abs() < 0.3, "{tokens} and {guessed}");

    // What is kept by now will not be asked.
    let before = fake.paths().len();
    let ran = bench.run("judge", &fake, &["--dry-run"], 0);
    assert!(ran.data.contains("to ask about 3 calls 6 cache hits 3"), "{}", ran.data);
    let ran = bench.run("hint", &fake, &["--dry-run", "--only-negative"], 0);
    assert!(ran.data.contains("turns 5 to ask about 0 calls 0"), "{}", ran.data);
    assert_eq!(fake.paths().len(), before);
}

/// Prices belong to a server, so they stand in the settings.
#[test]
fn prices_come_from_the_settings() {
    let (bench, fake) = (Bench::new(), judge());
    let config = bench.path("oclaw.toml");
    std::fs::write(&config, "[judge]\nprice-in = 100000\nprice-out = 200000\nvotes = 1\n").unwrap();
    let flags = ["--config", config.to_str().unwrap(), "--at-once", "1", "--max-cost", "3"];
    let ran = bench.run("judge", &fake, &flags, 3);
    // A call costs 2: the second one goes over.
    assert_eq!((calls(&fake), errors(&ran)[4]), (2, Some("budget")));
    assert!(ran.talk.contains("cost 4.000000 left out: budget 1"), "{}", ran.talk);
    let usage = ran.usage.unwrap();
    assert_eq!((usage.calls, usage.prompt_tokens, usage.completion_tokens), (2, 20, 10));
    assert_eq!(usage.cost, Some(4.0));
    let shown = bench.run("judge", &fake, &[&flags[..], &["--show-settings"]].concat(), 0).data;
    let line = format!("price-in = 100000 # {}:2", config.display());
    assert!(shown.contains(&line), "{shown}");
    // Another command has no prices there.
    let talk = bench.run("hint", &fake, &flags, 2).talk;
    assert!(talk.contains("--price-in"), "{talk}");
}
