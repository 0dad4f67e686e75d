//! `oclaw teacher-lp --topk` within a budget: a turn that is begun is finished.

use oclaw::table::Format;
use oclaw::trajectory::{Turn, Writer};
use serde_json::json;

use crate::cli::judge::read;
use crate::forge::{captured, write};
use crate::harness::{fixture_models as models, oclaw};

/// Three turns of two hints: three requests each, the student's first.
#[test]
fn turns_are_finished_one_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let hinted = |number: u32| Turn {
        messages: json!([{"role": "user", "content": "Name a colour."}]).to_string(),
        prompt_ids: None,
        response_ids: Some(vec![82, 101, 100, 1017]),
        hints: Some(vec!["Say blue.".to_owned(), format!("Word {number}.")]),
        ..captured("s", number)
    };
    let stages = [Writer::Serve, Writer::Judge, Writer::Hint];
    let input = folder.path().join("hinted.parquet");
    write(&input, Format::Parquet, &stages, &[1, 2, 3].map(hinted));
    let output = folder.path().join("taught.parquet");
    let model = models().join("tiny-qwen3");
    let run = |flags: &[&str]| {
        let run = oclaw()
            .args(["teacher-lp", "--topk", "2", "--no-cache", "--model"])
            .arg(&model)
            .args(flags)
            .arg("-o")
            .args([&output, &input])
            .assert()
            .code(3);
        let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        let scored = |turn: &Turn| turn.teacher_log_probs.iter().flatten().flatten().count();
        let turns = read(&output);
        for turn in &turns {
            let left = turn.teacher_error.iter().flatten().flatten();
            assert!(left.into_iter().all(|error| error == "budget"), "{:?}", turn.teacher_error);
        }
        let counts: Vec<_> = turns.iter().map(scored).collect();
        (counts, talk.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    for (most, expected, calls) in [
        ("2", [1, 0, 0], 2),
        ("3", [2, 0, 0], 3),
        // One call is left, which could only be a student's.
        ("4", [2, 0, 0], 3),
        ("5", [2, 1, 0], 5),
        ("8", [2, 2, 1], 8),
    ] {
        let (counts, talk) = run(&["--max-requests", most]);
        assert_eq!(counts, expected, "{most}: {talk}");
        assert!(talk.contains(&format!("calls {calls} cache hits 0")), "{talk}");
    }
    // Tokens are known when a call is done: the turn under way is.
    let (counts, talk) = run(&["--at-once", "1", "--max-tokens-total", "1"]);
    assert_eq!(counts, [2, 0, 0], "{talk}");
}
