//! `oclaw explain`: one turn's story, plain, coloured and as JSON.

use std::path::Path;

use oclaw::table::Format;
use oclaw::trajectory::Turn;
use oclaw::trajectory::turn::Micros;
use oclaw::trajectory::words::SampleKind;
use serde_json::Value;

use crate::forge::{STAGES, captured, finished, write};
use crate::harness::{fixture, oclaw};

/// A turn with all three log-probs, whose advantages are weak, strong and middling.
fn whole() -> Turn {
    Turn {
        rollout_log_probs: Some(vec![Some(-0.5), Some(-1.25), Some(-2.0)]),
        advantages: Some(vec![0.25, -1.5, 0.75]),
        ..finished("kitchen", 1)
    }
}

/// The other rows of the batch: 3 tokens trained, and 3 that are not.
fn others() -> [Turn; 2] {
    let silent = Turn {
        sample_kind: Some(SampleKind::None),
        sample_reason: Some("judged_neutral, no_hint".to_owned()),
        promoted: Some(false),
        ..captured("kitchen", 3)
    };
    [Turn { advantages: Some(vec![0.5, 0.5, 1.5]), ..finished("kitchen", 2) }, silent]
}

fn table(folder: &Path, turn: Turn) {
    let [second, third] = others();
    write(&folder.join("t.parquet"), Format::Parquet, &STAGES, &[turn, second, third]);
}

fn explain(folder: &Path, arguments: &[&str]) -> String {
    let mut command = oclaw();
    command.current_dir(folder).env_remove("NO_COLOR");
    let run = command.args(["explain", "t.parquet", "--turn"]).args(arguments).assert().success();
    assert!(run.get_output().stderr.is_empty());
    String::from_utf8(run.get_output().stdout.clone()).unwrap()
}

fn model() -> String {
    fixture("models/tiny-qwen3").display().to_string()
}

#[test]
fn the_story_in_plain_text() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path(), whole());
    insta::assert_snapshot!(explain(folder.path(), &["kitchen-turn-1", "--model", &model()]));
}

#[test]
fn the_story_in_colour() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path(), whole());
    let arguments = ["kitchen-turn-1", "--model", &model(), "--color", "always", "--width", "72"];
    let page = explain(folder.path(), &arguments);
    insta::assert_snapshot!(page.replace('\u{1b}', "ESC"));
}

#[test]
fn a_turn_that_nobody_noted() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES[..1], &[captured("raw", 1)]);
    insta::assert_snapshot!(explain(folder.path(), &["raw"]));
}

#[test]
fn the_share_in_the_loss_is_exact() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path(), whole());
    let told: Value =
        serde_json::from_str(&explain(folder.path(), &["kitchen-turn-1", "--json"])).unwrap();
    let share = &told["share"];
    assert_eq!((share["batch_turns"].as_u64(), share["batch_tokens"].as_u64()), (Some(2), Some(6)));
    assert_eq!((share["tokens"].as_u64(), share["token_share"].as_f64()), (Some(3), Some(0.5)));
    // |A|: 0.25 + 1.5 + 0.75 here, 0.5 + 0.5 + 1.5 there.
    assert_eq!(share["advantage_share"].as_f64(), Some(0.5));
    // -(0.25 - 1.5 + 0.75) / 6.
    assert!((share["loss"].as_f64().unwrap() - 0.5 / 6.0).abs() < 1e-12);
    let tokens = told["tokens"].as_array().unwrap();
    assert_eq!(tokens[1]["loss"].as_f64(), Some(1.5 / 6.0));
    assert_eq!(tokens[1]["server"].as_f64(), Some(-1.25));
    assert_eq!(tokens[1]["teacher"].to_string(), "-0.2");
    assert!(tokens[1]["text"].is_null(), "no tokenizer was named");
    assert_eq!(told["hints"][0]["chosen"], true);
    assert_eq!(told["hints"][1]["error"], "timeout");
    let silent: Value =
        serde_json::from_str(&explain(folder.path(), &["kitchen-turn-3", "--json"])).unwrap();
    assert_eq!(silent["share"]["tokens"], 0);
    assert!(silent["share"]["loss"].is_null());
}

#[test]
fn a_loss_is_reduced_as_train_reduces_it() {
    let folder = tempfile::tempdir().unwrap();
    // One token of the other turn is trained, three of this one.
    let [second, _] = others();
    let second = Turn { loss_mask: Some(vec![0, 0, 1]), ..second };
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &[whole(), second]);
    for (flags, reduction, weights, formula) in [
        (&[][..], "sample", [1.0 / 6.0, 1.0 / 2.0], "sample: -A / (tokens of this turn × turns)"),
        (
            &["--reduction", "token"],
            "token",
            [1.0 / 4.0, 1.0 / 4.0],
            "token: -A / (tokens of all turns)",
        ),
    ] {
        let told = |turn: &str| -> Value {
            let arguments = [&[turn, "--json"][..], flags].concat();
            serde_json::from_str(&explain(folder.path(), &arguments)).unwrap()
        };
        let [first, second] = ["kitchen-turn-1", "kitchen-turn-2"].map(told);
        let near = |value: &Value, expected: f64| {
            assert!((value.as_f64().unwrap() - expected).abs() < 1e-12, "{value}, not {expected}");
        };
        // Here A is 0.25, -1.5 and 0.75; there 1.5.
        let (here, there) = (0.5 * weights[0], -1.5 * weights[1]);
        near(&first["share"]["loss"], here);
        near(&first["tokens"][1]["loss"], 1.5 * weights[0]);
        near(&second["share"]["loss"], there);
        near(&second["tokens"][0]["loss"], 0.0);
        let sizes = [2.5 * weights[0], 1.5 * weights[1]];
        near(&first["share"]["advantage_share"], sizes[0] / (sizes[0] + sizes[1]));
        for told in [&first, &second] {
            near(&told["share"]["batch_loss"], here + there);
            assert_eq!(told["share"]["reduction"], reduction);
        }
        let page = explain(folder.path(), &[&["kitchen-turn-1"][..], flags].concat());
        assert!(page.contains(formula), "{page}");
    }
}

#[test]
fn a_row_without_advantages_has_no_loss_here() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path(), Turn { advantages: None, ..whole() });
    let page = explain(folder.path(), &["kitchen-turn-1"]);
    assert!(page.contains("not known: `train` computes its advantages"), "{page}");
    let told: Value =
        serde_json::from_str(&explain(folder.path(), &["kitchen-turn-1", "--json"])).unwrap();
    assert!(told["share"]["loss"].is_null() && told["tokens"][0]["loss"].is_null());
    assert!(told["share"]["batch_loss"].is_null());
    assert_eq!(told["share"]["batch_tokens"], 6);
}

#[test]
fn text_forges_nothing_and_fits_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let mut turn = whole();
    turn.messages = serde_json::json!([
        {"role": "user\u{1b}]0;x\u{7}", "content": format!("a\u{1b}[31m\nturn forged\u{202e}{}", "long ".repeat(60))},
    ])
    .to_string();
    turn.judge_text = Some(vec![Some("x\rsignal: none".to_owned()), None, None]);
    table(folder.path(), turn);
    for width in ["40", "60", "100"] {
        let page = explain(folder.path(), &["kitchen-turn-1", "--width", width]);
        assert!(!page.contains(['\u{1b}', '\r', '\u{7}', '\u{202e}']), "{page}");
        assert!(!page.lines().any(|line| line.starts_with("turn forged")), "{page}");
        let widest = page.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= width.parse().unwrap(), "{widest} of {width}\n{page}");
    }
}

#[test]
fn the_tail_of_a_longer_prompt_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let said =
        |number: u32| serde_json::json!({"role": "user", "content": format!("said {number}")});
    let messages = Value::from((1..=5).map(said).collect::<Vec<_>>()).to_string();
    table(folder.path(), Turn { messages, ..whole() });
    for (flags, shown, before) in [
        (&[][..], 3..=5, Some("2 messages before")),
        (&["--tail", "1"], 5..=5, Some("4 messages before")),
        (&["--tail", "5"], 1..=5, None),
        (&["--tail", "9"], 1..=5, None),
    ] {
        let arguments = [&["kitchen-turn-1"][..], flags].concat();
        let page = explain(folder.path(), &arguments);
        let there: Vec<u32> =
            (1..=5).filter(|number| page.contains(&format!("said {number}\n"))).collect();
        assert_eq!(there, shown.clone().collect::<Vec<_>>(), "{page}");
        assert_eq!(page.contains(" messages before"), before.is_some(), "{page}");
        assert!(before.is_none_or(|before| page.contains(before)), "{page}");
        let told = explain(folder.path(), &[&arguments[..], &["--json"]].concat());
        let told: Value = serde_json::from_str(&told).unwrap();
        assert_eq!(
            (told["messages"].as_u64(), told["prompt"].as_array().unwrap().len()),
            (Some(5), shown.count())
        );
    }
}

#[test]
fn an_import_without_times_was_asked_nobody_knows_when() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path(), Turn { created_at: Micros(0), finished_at: Micros(0), ..whole() });
    let page = explain(folder.path(), &["kitchen-turn-1"]);
    let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("asked at not known") && !page.contains("1970"), "{page}");
    let told: Value =
        serde_json::from_str(&explain(folder.path(), &["kitchen-turn-1", "--json"])).unwrap();
    assert!(told["created_at"].is_null());
}

#[test]
fn colours_are_for_terminals() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path(), whole());
    let plain = explain(folder.path(), &["kitchen-turn-1"]);
    assert!(!plain.contains('\u{1b}'));
    assert_eq!(plain, explain(folder.path(), &["kitchen-turn-1", "--color", "never"]));
}

#[test]
fn an_unclear_id_is_refused_with_candidates() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path(), whole());
    for (id, problem, hint) in [
        (
            "kitchen-turn-",
            "several turns' ids begin with `kitchen-turn-`",
            "hint: one of `kitchen-turn-1` (session kitchen, turn 1), ",
        ),
        (
            "garden",
            "no turn's id begins with `garden`",
            "hint: there are `kitchen-turn-1` (session kitchen, turn 1), ",
        ),
    ] {
        let run = oclaw()
            .current_dir(folder.path())
            .args(["explain", "t.parquet", "--turn", id])
            .assert()
            .code(2);
        let words = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        assert!(words.starts_with(&format!("oclaw explain: {problem}\n{hint}")), "{words}");
        assert!(run.get_output().stdout.is_empty());
    }
}

#[test]
fn a_whole_id_beats_those_that_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let named = |id: &str| Turn { turn_id: id.to_owned(), ..finished("s", 1) };
    let turns = [named("ab"), named("abc"), named("a")];
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &turns);
    assert!(explain(folder.path(), &["a"]).starts_with("turn a\n"));
    assert!(explain(folder.path(), &["abc"]).starts_with("turn abc\n"));
}

#[test]
fn a_foreign_tokenizer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path(), Turn { response_ids: Some(vec![5, 6, 9_999_999]), ..whole() });
    let run = oclaw()
        .current_dir(folder.path())
        .args(["explain", "t.parquet", "--turn", "kitchen-turn-1", "--model", &model()])
        .assert()
        .code(2);
    let words = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    assert!(words.contains("has no id 9999999"), "{words}");
}
