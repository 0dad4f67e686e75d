//! Judging by rules.

use oclaw::judge::{Exchange, Rules};

use super::{gave, said};

#[test]
fn built_in_rules_on_what_people_say() {
    let rules = Rules::built_in().unwrap();
    let score = |next: &str| {
        let verdict = rules.judge(&said(next));
        (verdict.votes[0].unwrap(), verdict.texts[0].clone().unwrap())
    };
    for next in [
        "No, it is 4.",
        "no",
        "Wrong.",
        "That's not right",
        "That is incorrect, try again please",
        "This doesn't work",
        "shorter please",
        "Please make it shorter.",
        "You forgot the second part",
        "I asked for two lines",
        "what is 2 + 2 in the end",
        "Too long. One sentence.",
        "It is still broken",
        "Can you answer again?",
        "Not helpful.",
        "Why did you delete it?",
        "Thanks, but that is wrong",
        "No, shorter please. Please LIST the files",
        "Not quite what I wanted",
    ] {
        assert_eq!(score(next).0, -1, "{next}: {}", score(next).1);
    }
    for next in [
        "Thanks!",
        "That is right, thanks",
        "Great, now explain why",
        "Perfect.",
        "yes exactly",
        "Thank you, that helps",
        "No problem, thanks",
        "good job",
        "It works now",
        "Thanks, great",
        "ok, next question: what is a verb?",
    ] {
        assert_eq!(score(next).0, 1, "{next}: {}", score(next).1);
    }
    for next in [
        "What is the capital of France?",
        "BOTH: list files and read MISSING.txt",
        "Tell me about Rome",
    ] {
        assert_eq!(score(next).0, 0, "{next}: {}", score(next).1);
    }
}

#[test]
fn built_in_rules_on_what_tools_give() {
    let rules = Rules::built_in().unwrap();
    let score = |results: &[&str]| rules.judge(&gave(results)).votes[0].unwrap();
    for bad in [
        "{\n \"status\": \"error\", \"tool\": \"read\", \"error\": \"File not found\"}",
        "{\"is_error\": true, \"content\": \"x\"}",
        "{\"success\": false}",
        "{\"exit_code\": 2, \"output\": \"\"}",
        "some output\nexit code: 1",
        "Process exited with code 127",
        "Traceback (most recent call last):\n  File \"x.py\"",
        "bash: foo: command not found",
    ] {
        assert_eq!(score(&[bad]), -1, "{bad}");
        assert_eq!(score(&["fine", bad]), -1, "{bad}");
    }
    for good in [
        "a.txt\nb.txt",
        "{\"error\": null, \"temp\": 21}",
        "{\"exit_code\": 0}",
        "exit code: 0",
        "{\"errors\": []}",
        "18 °C",
    ] {
        assert_eq!(score(&[good]), 1, "{good}");
    }
}

#[test]
fn rules_of_a_file() {
    let text = r#"
        [[rule]]
        name = "cut"
        finish_reason = "length"
        score = -1
        [[rule]]
        name = "long"
        min_answer_chars = 9
        score = -1
        [[rule]]
        name = "json"
        answer_is_json = true
        score = 1
        [[rule]]
        name = "no number"
        answer_lacks = '\d'
        role = "user"
        score = -1
        [[rule]]
        name = "five"
        answer = "5"
        max_answer_chars = 8
        score = 1
    "#;
    let rules = Rules::parse(text, "mine").unwrap();
    let by = |exchange: Exchange| rules.judge(&exchange).texts[0].clone().unwrap();
    let answer = |answer: &str| Exchange { answer: answer.to_owned(), ..said("x") };
    assert_eq!(by(said("x")), "rule `five`");
    assert_eq!(by(answer("ten chars!")), "rule `long`");
    assert_eq!(by(answer("[1]")), "rule `json`");
    assert_eq!(by(answer("five")), "rule `no number`");
    assert_eq!(by(answer("6")), "rule `json`");
    assert_eq!(by(answer("a 6")), "no rule matches");
    assert_eq!(
        by(Exchange { finish_reason: Some("length".to_owned()), ..said("x") }),
        "rule `cut`"
    );
}

#[test]
fn rules_about_what_came_next() {
    let text = r#"
        [[rule]]
        name = "two"
        exit_code = 2
        score = -1
        [[rule]]
        name = "shell"
        tool = "^bash$"
        next_lacks = "warning"
        score = 1
        [[rule]]
        name = "short"
        role = "user"
        max_next_chars = 3
        score = 0
        [[rule]]
        name = "about rome"
        request = "(?i)rome"
        min_next_chars = 10
        score = -1
    "#;
    let rules = Rules::parse(text, "mine").unwrap();
    let by = |exchange: Exchange| rules.judge(&exchange).texts[0].clone().unwrap();
    let tool = |name: &str, result: &str| {
        let mut exchange = gave(&[result]);
        exchange.next[0].tool = Some(name.to_owned());
        exchange
    };
    assert_eq!(by(tool("bash", "exit code: 2")), "rule `two`");
    assert_eq!(by(tool("bash", "exit code: 1")), "rule `shell`");
    assert_eq!(by(tool("bash", "a warning")), "no rule matches");
    assert_eq!(by(tool("bash_old", "fine")), "no rule matches");
    assert_eq!(by(said("ok!")), "rule `short`");
    let about = |request: &str| Exchange { request: request.to_owned(), ..said("Tell me more.") };
    assert_eq!(by(about("About Rome")), "rule `about rome`");
    assert_eq!(by(about("About Paris")), "no rule matches");
}

#[test]
fn broken_rules_are_named() {
    for (text, words) in [
        ("", "mine: no `[[rule]]` in it"),
        (
            "[[rule]]\nname = \"a\"\nscore = 2",
            "mine line 1, rule `a`: score is 2, wanted -1, 0 or 1",
        ),
        (
            "[[rule]]\nname = \"a\"\nscore = 1\nnext = \"(\"",
            "mine line 1, rule `a`: `next`: regex parse error",
        ),
        ("[[rule]]\nname = \"a\"\nscor = 1", "mine: TOML parse error at line 3"),
        (
            "[[rule]]\nname=\"a\"\nscore=1\n\n[[rule]]\nname=\"b\"\nscore=1\nrole=\"user\"\nexit_code=2",
            "mine line 5, rule `b`: it asks a user for what only tools have",
        ),
        (
            "[[rule]]\nname=\"b\"\nscore=1\nrole=\"tool\"\nrepeats_request=true",
            "mine line 1, rule `b`: it asks tools for what only a user does",
        ),
        (
            "[[rule]]\nname=\"b\"\nscore=1\nmin_next_chars=3\nmax_next_chars=2",
            "mine line 1, rule `b`: `min_next_chars` is above `max_next_chars`",
        ),
    ] {
        let error = Rules::parse(text, "mine").unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
}
