//! A conversation rebuilt with new answers.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::trajectory::Turn;

use super::Answer;

/// What became of the turns of a session so far, for on-policy replays: the
/// person and the tools say what they said, the assistant says the new answers.
#[derive(Debug, Default)]
pub struct Conversation {
    turns: BTreeMap<String, Past>,
}

/// What became of one turn.
#[derive(Debug)]
struct Past {
    parent: Option<String>,
    answers: Result<(Answer, Answer), String>,
}

impl Conversation {
    /// Notes a turn: its recorded and its new answer, or why there is no new one.
    pub fn note(&mut self, turn: &Turn, answers: Result<(Answer, Answer), String>) {
        let past = Past { parent: turn.parent_turn_id.clone(), answers };
        self.turns.insert(turn.turn_id.clone(), past);
    }

    /// Returns the messages of a turn with the new answers in place of the
    /// recorded ones. Errors if they cannot be put there: a turn before it has no
    /// new answer, or called other tools than those whose results follow.
    pub fn rebuild(&self, turn: &Turn, recorded: &[Value]) -> Result<Vec<Value>, String> {
        let mut messages = recorded.to_vec();
        let mut end = messages.len();
        let mut next = turn.parent_turn_id.as_ref();
        // A turn is nobody's own ancestor in a sound file; a broken one must end too.
        for _ in 0..=self.turns.len() {
            let Some((id, past)) = next.and_then(|id| Some((id, self.turns.get(id)?))) else {
                return Ok(messages);
            };
            let (old, new) = past
                .answers
                .as_ref()
                .map_err(|reason| format!("turn `{id}` before it: {reason}"))?;
            if old.calls != new.calls {
                return Err(format!("turn `{id}` before it calls other tools than recorded"));
            }
            let said = |message: &Value| {
                message.get("role").and_then(Value::as_str) == Some("assistant")
                    && Answer::of_message(message.clone()).is_ok_and(|answer| {
                        answer.text.trim() == old.text.trim() && answer.calls == old.calls
                    })
            };
            let Some(place) = messages[..end].iter().rposition(said) else {
                return Err(format!("the answer of turn `{id}` does not stand in its messages"));
            };
            replace(&mut messages[place], new);
            end = place;
            next = past.parent.as_ref();
        }
        Ok(messages)
    }
}

/// Puts the new words into a message. Its calls are the same, under the ids that
/// the results name.
fn replace(message: &mut Value, new: &Answer) {
    let Some(members) = message.as_object_mut() else { return };
    let content = new.message.get("content").cloned().unwrap_or(Value::Null);
    members.insert("content".to_owned(), content);
    for name in ["reasoning_content", "reasoning"] {
        if members.remove(name).is_some()
            && let Some(reasoning) = new.message.get(name)
        {
            members.insert(name.to_owned(), reasoning.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn says(text: &str) -> Answer {
        Answer::of_message(json!({"role": "assistant", "content": text})).unwrap()
    }

    fn turn(id: &str, parent: Option<&str>) -> Turn {
        Turn {
            turn_id: id.to_owned(),
            parent_turn_id: parent.map(str::to_owned),
            ..Turn::default()
        }
    }

    #[test]
    fn new_answers_stand_where_the_recorded_ones_stood() {
        let mut conversation = Conversation::default();
        conversation.note(&turn("1", None), Ok((says("ok"), says("new 1"))));
        conversation.note(&turn("2", Some("1")), Ok((says("ok"), says("new 2"))));
        let messages = [
            json!({"role": "user", "content": "a"}),
            json!({"role": "assistant", "content": "ok "}),
            json!({"role": "user", "content": "ok"}),
            json!({"role": "assistant", "content": "ok", "reasoning_content": "old"}),
            json!({"role": "user", "content": "c"}),
        ];
        let rebuilt = conversation.rebuild(&turn("3", Some("2")), &messages).unwrap();
        let contents: Vec<_> =
            rebuilt.iter().map(|message| message["content"].as_str().unwrap()).collect();
        assert_eq!(contents, ["a", "new 1", "ok", "new 2", "c"]);
        assert_eq!(rebuilt[3].get("reasoning_content"), None);
        // A turn whose parent is not recorded is sent as it was.
        assert_eq!(conversation.rebuild(&turn("9", Some("8")), &messages).unwrap(), messages);
    }

    #[test]
    fn what_cannot_be_rebuilt_is_said() {
        let mut conversation = Conversation::default();
        let call = json!({"function": {"name": "add", "arguments": "{}"}});
        let calls =
            Answer::of_message(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
        conversation.note(&turn("1", None), Ok((calls.unwrap(), says("no call"))));
        conversation.note(&turn("2", None), Err("status 400".to_owned()));
        conversation.note(&turn("3", None), Ok((says("x"), says("y"))));
        let why = |parent: &str| conversation.rebuild(&turn("4", Some(parent)), &[]).unwrap_err();
        assert_eq!(why("1"), "turn `1` before it calls other tools than recorded");
        assert_eq!(why("2"), "turn `2` before it: status 400");
        assert_eq!(why("3"), "the answer of turn `3` does not stand in its messages");
    }
}
