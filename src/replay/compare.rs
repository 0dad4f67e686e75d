//! Telling a new answer from the recorded one.

use crate::judge::{Exchange, Quoting, Rules};
use crate::trajectory::Turn;

use super::{Answer, Finding};

/// Compares word for word: text, calls, the way it ended if that was recorded, and,
/// if both sides have them, the ids.
pub fn exact(recorded: &Answer, replayed: &Answer) -> Finding {
    let mut found = Vec::new();
    if let (Some(left), Some(right)) = (&recorded.prompt_ids, &replayed.prompt_ids)
        && let Some(place) = first_difference(left, right)
    {
        found.push(format!("the prompt differs from its token {place} on"));
    }
    if let (Some(left), Some(right)) = (&recorded.ids, &replayed.ids)
        && let Some(place) = first_difference(left, right)
    {
        let at = |ids: &[i32]| ids.get(place).map_or("the end".to_owned(), |id| format!("id {id}"));
        found.push(format!("token {place} is {} instead of {}", at(right), at(left)));
    }
    if recorded.text != replayed.text {
        let place = recorded
            .text
            .chars()
            .zip(replayed.text.chars())
            .take_while(|(left, right)| left == right)
            .count();
        found.push(format!("the text differs from its character {place} on"));
    }
    if recorded.calls != replayed.calls {
        found.push(calls(recorded, replayed));
    }
    if recorded.finish_reason.is_some() && recorded.finish_reason != replayed.finish_reason {
        let word = |answer: &Answer| answer.finish_reason.clone().unwrap_or("nothing".to_owned());
        found.push(format!("ended by {} instead of {}", word(replayed), word(recorded)));
    }
    match found.is_empty() {
        true => Finding::Same,
        false => Finding::Differs(found.join("; ")),
    }
}

fn calls(recorded: &Answer, replayed: &Answer) -> String {
    let names = |answer: &Answer| -> Vec<String> {
        answer.calls.iter().map(|call| call.name.clone()).collect()
    };
    let (left, right) = (names(recorded), names(replayed));
    let shown = |names: &[String]| match names.is_empty() {
        true => "nothing".to_owned(),
        false => names.join(", "),
    };
    match left == right {
        true => format!("calls {} with other arguments", shown(&right)),
        false => format!("calls {} instead of {}", shown(&right), shown(&left)),
    }
}

/// Returns the first place at which two lists differ; a list that ends there
/// differs too.
pub fn first_difference<T: PartialEq>(left: &[T], right: &[T]) -> Option<usize> {
    let common = left.iter().zip(right).take_while(|(left, right)| left == right).count();
    (common < left.len().max(right.len())).then_some(common)
}

/// Compares by rules: the new answer is scored where the recorded one stood, with
/// the recorded next state, and must not score lower.
pub fn by_rules(rules: &Rules, turn: &Turn, replayed: &Answer) -> Finding {
    let new = replayed.instead(turn);
    let read = |turn: &Turn| Exchange::so_far(turn, Quoting::default());
    let (recorded, replayed) = match (read(turn), read(&new)) {
        (Ok(recorded), Ok(replayed)) => (recorded, replayed),
        (Err(error), _) | (_, Err(error)) => return Finding::NotCompared(error.to_string()),
    };
    let (before, after) = (rules.decide(&recorded), rules.decide(&replayed));
    match after.score < before.score {
        true => {
            let rule = |rule: Option<&str>| match rule {
                Some(rule) => format!("rule `{rule}`"),
                None => "no rule".to_owned(),
            };
            let (was, is) = (rule(before.rule), rule(after.rule));
            Finding::Differs(format!(
                "{} by {is} instead of {} by {was}",
                after.score, before.score
            ))
        }
        false => Finding::Same,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::trajectory::words::Status;

    fn answer(text: &str, ids: &[i32]) -> Answer {
        Answer {
            ids: Some(ids.to_vec()),
            finish_reason: Some("stop".to_owned()),
            ..Answer::of_message(json!({"role": "assistant", "content": text})).unwrap()
        }
    }

    fn differs(left: &Answer, right: &Answer) -> String {
        match exact(left, right) {
            Finding::Differs(what) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_differing_token_is_told() {
        let recorded = answer("ab", &[1, 2, 3]);
        assert_eq!(exact(&recorded, &recorded.clone()), Finding::Same);
        assert_eq!(
            differs(&recorded, &answer("ab", &[1, 9, 3])),
            "token 1 is id 9 instead of id 2"
        );
        assert_eq!(
            differs(&recorded, &answer("a", &[1, 2])),
            "token 2 is the end instead of id 3; the text differs from its character 1 on"
        );
        let unknown = Answer { ids: None, ..answer("ab", &[]) };
        assert_eq!(exact(&recorded, &unknown), Finding::Same);
    }

    #[test]
    fn an_end_that_was_not_recorded_is_not_compared() {
        let turn = |reason: Option<&str>| Turn {
            response: "{\"role\":\"assistant\",\"content\":\"ab\"}".to_owned(),
            finish_reason: reason.map(str::to_owned),
            status: Status::Complete,
            ..Turn::default()
        };
        let recorded = |reason| Answer::recorded(&turn(reason)).unwrap();
        let new = answer("ab", &[1, 2]);
        assert_eq!(exact(&recorded(Some("imported")), &new), Finding::Same);
        assert_eq!(exact(&recorded(None), &new), Finding::Same);
        assert_eq!(differs(&recorded(Some("length")), &new), "ended by stop instead of length");
    }

    #[test]
    fn calls_are_compared_as_what_they_do() {
        let call = |id: &str, arguments: &str| {
            let function = json!({"name": "add", "arguments": arguments});
            let calls = json!([{"id": id, "type": "function", "function": function}]);
            Answer::of_message(json!({"role": "assistant", "content": null, "tool_calls": calls}))
                .unwrap()
        };
        let recorded = call("call_1", "{\"a\": 1, \"b\": 2}");
        assert_eq!(exact(&recorded, &call("other", "{\"b\":2,\"a\":1}")), Finding::Same);
        let other = call("call_1", "{\"a\": 1, \"b\": 3}");
        assert_eq!(differs(&recorded, &other), "calls add with other arguments");
        let text = Answer { finish_reason: None, ..answer("", &[]) };
        assert_eq!(differs(&recorded, &text), "calls nothing instead of add");
    }
}
