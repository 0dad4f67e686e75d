//! People made up to talk to an agent: rules, words, questions, measures.

use std::collections::BTreeSet;

use oclaw::hint;
use oclaw::judge::{Exchange, Quoting, Rules};
use oclaw::simulate::{Persona, Questions, Reply, has_room, sessions_to_adapt};
use oclaw::trajectory::Turn;
use oclaw::trajectory::words::NextStateKind;
use serde_json::json;

use crate::forge::captured;
use crate::harness::fixture;

fn persona(rule: &str) -> Result<Persona, String> {
    let text = format!(
        "name = \"p\"\nwish = \"w\"\n{rule}\n[says]\nbroken = [\"no\", \"bad\"]\nholds = [\"yes\"]\n"
    );
    Persona::parse(&text, "here").map_err(|error| error.to_string())
}

fn obeys(rule: &str, text: &str) -> bool {
    let reply =
        Reply { text: text.to_owned(), tokens: Some(12), finish_reason: Some("stop".to_owned()) };
    persona(&format!("[rule]\n{rule}")).unwrap().rule.holds(&reply).unwrap()
}

#[test]
fn each_condition_tells_replies_apart() {
    for (rule, good, bad) in [
        ("regex = '^a'", "ab", "ba"),
        ("words = { min = 2, max = 2 }", "a  b\n", "a b c"),
        ("words = { min = 1 }", "a", " "),
        ("chars = { max = 3 }", " äöü ", "abcd"),
        ("lines = { max = 2 }", "a\n\nb\n", "a\nb\nc"),
        ("sentences = { max = 1 }", "It is 3.5 metres, \"well\".", "One. Two."),
        ("sentences = { min = 2 }", "What? (Yes!) ", "..."),
        ("sentences = { min = 2 }", "a\nb", "a"),
        ("form = 'bold'", "a **b** c", "2 * 3 ** 2"),
        ("form = 'numbered-list'", "Well:\n 1. a", "It is 1.5"),
        ("form = 'bullets'", "- a", "a - b"),
        ("form = 'boxed'", "\\boxed{3}", "boxed 3"),
        ("form = 'emoji'", "well 😊", "well © :-)"),
        ("form = 'lower-case'", "all of it", "Not all"),
        ("form = 'lower-case'", "ä1", "12"),
        ("form = 'upper-case'", "ALL OF IT", "NOt"),
        ("form = 'json'", " {\"a\": 1}\n", "{a}"),
        ("not = { regex = 'a' }", "b", "a"),
        ("any = [{ regex = 'a' }, { regex = 'b' }]", "b", "c"),
        ("all = [{ regex = 'a' }, { regex = 'b' }]", "ba", "b"),
        ("regex = 'a'\nwords = { max = 1 }", "a", "a a"),
    ] {
        assert!(obeys(rule, good), "{rule}: {good:?}");
        assert!(!obeys(rule, bad), "{rule}: {bad:?}");
    }
    assert!(obeys("tokens = { min = 12 }", "") && !obeys("tokens = { max = 11 }", ""));
    assert!(obeys("finished = true", "") && !obeys("finished = false", ""));
}

#[test]
fn what_the_server_does_not_tell_is_no_broken_rule() {
    let silent = Reply { text: "a".to_owned(), ..Reply::default() };
    for (rule, what) in [
        ("tokens = { max = 5 }", "number of tokens"),
        ("not = { tokens = { max = 5 } }", "number of tokens"),
        ("any = [{ regex = 'a' }, { finished = true }]", "finish reason"),
    ] {
        let rule = persona(&format!("[rule]\n{rule}")).unwrap().rule;
        let error = rule.holds(&silent).unwrap_err().to_string();
        let expected =
            format!("the rule needs the {what} of an answer, which the server does not tell");
        assert_eq!(error, expected);
    }
}

#[test]
fn a_persona_that_cannot_be_used_is_named() {
    for (rule, problem) in [
        ("[rule]", "`rule` asks for nothing"),
        ("[rule]\nany = []", "`rule.any` asks for nothing"),
        ("[rule.not]", "`rule.not` asks for nothing"),
        ("[rule]\nwords = {}", "`rule.words` has no `min` and no `max`"),
        ("[rule]\nwords = { min = 2, max = 1 }", "`rule.words` has its `min` above its `max`"),
        ("turns = 0\n[rule]\nregex = 'a'", "`turns` is 0, wanted 1 or more"),
    ] {
        assert_eq!(persona(rule).unwrap_err(), format!("here: {problem}"));
    }
    assert!(persona("[rule]\nregex = '('").unwrap_err().starts_with("here: `rule.regex`: "));
    assert!(persona("[rule]\nrejex = 'a'").unwrap_err().contains("unknown field `rejex`"));
    let silent = "name = \"p\"\nwish = \"w\"\nrule = { regex = 'a' }\n[says]\nbroken = []\nholds = [\"y\"]\n";
    let error = Persona::parse(silent, "here").unwrap_err().to_string();
    assert_eq!(error, "here: `says.broken` needs a text, and none may be empty");
}

#[test]
fn a_seed_decides_questions_and_words() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let paths = [
        file("a.jsonl", "{\"question\": \" a \", \"answer\": 1}\n{\"question\": \"b\"}\n"),
        file("b.json", "[{\"question\": \"c\"}, {\"question\": \"d\"}]"),
    ];
    let order = |seed| {
        let questions = Questions::load(&paths, seed).unwrap();
        assert_eq!((questions.count(), questions.of(4)), (4, questions.of(0)));
        (0..4).map(|session| questions.of(session).to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(order(1), order(1));
    let orders: BTreeSet<_> = (0..20).map(order).collect();
    assert!(orders.len() > 5, "{orders:?}");
    for order in orders {
        assert_eq!(BTreeSet::from_iter(order), ["a", "b", "c", "d"].map(str::to_owned).into());
    }
    for (text, problem) in [
        ("{\"q\": 1}", "value 1 has no `question`"),
        ("{\"question\": \"a\"}\n{\"question\": \" \"}", "value 2 has no `question`"),
        ("", "no question in it"),
    ] {
        let error = Questions::load(&[file("bad", text)], 0).unwrap_err().to_string();
        assert!(error.ends_with(&format!("bad`: {problem}")), "{error}");
    }
}

#[test]
fn three_in_a_row_have_adapted() {
    let told = |text: &str| {
        let obeyed: Vec<_> = text.chars().map(|letter| letter == '+').collect();
        sessions_to_adapt(&obeyed)
    };
    for (sessions, expected) in
        [("", None), ("++-++", None), ("+++", Some(1)), ("-++-+++-", Some(5)), ("--+", None)]
    {
        assert_eq!(told(sessions), expected, "{sessions}");
    }
    assert!(has_room(0.3, 0.2) && !has_room(0.31, 0.2) && !has_room(0.0, 0.19));
}

/// What the loop makes of each phrasing: the rules judge it as it is meant, and a
/// complaint is the hint.
#[test]
fn every_persona_is_judged_as_it_means_it() {
    let rules = Rules::built_in().unwrap();
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(fixture("personas")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|ending| ending != "toml") {
            continue;
        }
        let persona = Persona::load(&path).unwrap();
        assert_eq!(path.file_stem().unwrap().to_str(), Some(persona.name.as_str()));
        for obeyed in [true, false] {
            for words in persona.phrasings(obeyed) {
                let mut turn = Turn {
                    messages: json!([{"role": "user", "content": "Why do we yawn?"}]).to_string(),
                    response: json!({"role": "assistant", "content": "It is so."}).to_string(),
                    next_state: Some(json!([{"role": "user", "content": words}]).to_string()),
                    next_state_kind: NextStateKind::User,
                    ..captured("s", 1)
                };
                let exchange = Exchange::of(&turn, Quoting::default()).unwrap();
                let decision = rules.decide(&exchange);
                let wanted = if obeyed { 1 } else { -1 };
                assert_eq!(decision.score, wanted, "{}: {words}: {decision:?}", persona.name);
                turn.score = Some(f32::from(decision.score));
                let hints = (!obeyed).then(|| vec![words.clone()]);
                assert_eq!(hint::from_feedback(&turn, 2000).hints, hints, "{words}");
            }
        }
        names.insert(persona.name);
    }
    assert!(names.is_superset(&["student", "ta", "teacher"].map(str::to_owned).into()));
}
