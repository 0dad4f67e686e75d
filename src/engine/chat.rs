//! One chat completion, without a stream.

use bytes::Bytes;
use reqwest::Method;
use serde::Serialize;
use serde_json::{Map, Value};

use super::error::told;
use super::transport::Answer;
use super::{ApiCall, Dialect, Engine, Error};

/// What to ask.
#[derive(Debug, Clone, Default)]
pub struct ChatRequest {
    /// The conversation.
    pub messages: Vec<Value>,
    /// Tools the model may call.
    pub tools: Option<Vec<Value>>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Longest answer, in tokens.
    pub max_tokens: Option<u32>,
    /// Seed of the sampler.
    pub seed: Option<u64>,
    /// Further members of the body.
    pub extra: Map<String, Value>,
    /// Headers of this request alone, such as a session's.
    pub headers: Vec<(&'static str, String)>,
}

/// What came back. A member that the server left out is `None`, never empty or
/// zero.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatReply {
    /// The answer; empty if there was only reasoning or a tool call.
    pub content: String,
    /// The reasoning, under whichever name the server has for it.
    pub reasoning: Option<String>,
    /// The tool calls as they came.
    pub tool_calls: Option<Value>,
    /// Why the answer ended.
    pub finish_reason: Option<String>,
    /// Length of the prompt.
    pub prompt_tokens: Option<u64>,
    /// Length of the answer.
    pub completion_tokens: Option<u64>,
    /// Version of the weights that answered.
    pub weight_version: Option<String>,
}

impl Engine {
    /// Asks for one answer.
    pub async fn chat(&self, request: &ChatRequest) -> Result<ChatReply, Error> {
        let body = ChatBody {
            model: self.model(),
            messages: &request.messages,
            tools: request.tools.as_deref(),
            temperature: request.temperature,
            max_tokens: request.max_tokens,
            seed: request.seed,
            extra: &request.extra,
        };
        let body = serde_json::to_vec(&body).map_err(|error| Error::Client {
            url: self.url(),
            reason: format!("the request cannot be written: {error}"),
        })?;
        let call = ApiCall {
            method: Method::POST,
            path: "/chat/completions",
            body: Some(body.into()),
            headers: &request.headers,
        };
        read(&self.api_call(call).await?)
    }

    /// Sends a chat request as it is and returns the whole answer as it came.
    pub async fn chat_document(&self, body: &Value) -> Result<Bytes, Error> {
        let body = Bytes::from(body.to_string());
        Ok(self.api(Method::POST, "/chat/completions", Some(body)).await?.body)
    }

    /// Returns what this kind of server cannot do when it is asked to chat, in
    /// words that go on from its name.
    pub fn cannot(&self) -> Option<&'static str> {
        match self.dialect() {
            Dialect::Sglang => None,
            Dialect::Vllm | Dialect::LlamaCpp => Some("tells no version of its weights"),
            Dialect::Generic => Some("tells no version of its weights and may ignore the seed"),
        }
    }
}

/// The body, written without a copy of what it holds.
#[derive(Serialize)]
struct ChatBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    messages: &'a [Value],
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a [Value]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(flatten)]
    extra: &'a Map<String, Value>,
}

fn read(answer: &Answer) -> Result<ChatReply, Error> {
    let value: Value = answer.json()?;
    if value.get("error").is_some_and(|error| !error.is_null()) {
        let message = told(&answer.body).message;
        let tokens = answer.tokens();
        return Err(Error::Refused { url: answer.url.clone(), message, tokens });
    }
    let choices = value.get("choices").and_then(Value::as_array).map(Vec::as_slice);
    let choice = match choices.unwrap_or_default() {
        [] => return Err(answer.malformed("no choices")),
        [only] => only,
        several => match first(several) {
            Some(choice) => choice,
            None => return Err(answer.malformed("none of several choices is the first")),
        },
    };
    let Some(message) = choice.get("message").filter(|message| message.is_object()) else {
        return Err(answer.malformed("no `message` in the first choice"));
    };
    let text = |name: &str| message.get(name).and_then(Value::as_str).map(str::to_owned);
    let reasoning = text("reasoning_content").or_else(|| text("reasoning"));
    let tool_calls = message
        .get("tool_calls")
        .filter(|calls| calls.as_array().is_some_and(|calls| !calls.is_empty()));
    let content = match content(message) {
        Some(content) => content,
        None if reasoning.is_some() || tool_calls.is_some() => String::new(),
        None => return Err(answer.malformed("no content, no reasoning, no tool call")),
    };
    let usage = |name: &str| value.get("usage")?.get(name)?.as_u64();
    let version = value.get("metadata").and_then(|metadata| metadata.get("weight_version"));
    Ok(ChatReply {
        content,
        reasoning,
        tool_calls: tool_calls.cloned(),
        finish_reason: choice.get("finish_reason").and_then(Value::as_str).map(str::to_owned),
        prompt_tokens: usage("prompt_tokens"),
        completion_tokens: usage("completion_tokens"),
        weight_version: version.and_then(Value::as_str).map(str::to_owned),
    })
}

/// Returns the text of an answer. Some gateways write it as a list of parts, of which
/// thinking is one; what is no text is no part of the answer.
fn content(message: &Value) -> Option<String> {
    match message.get("content")? {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => {
            let texts = parts.iter().filter(|part| part["type"] == "text");
            let texts: Vec<_> = texts.filter_map(|part| part["text"].as_str()).collect();
            (!texts.is_empty()).then(|| texts.concat())
        }
        _ => None,
    }
}

/// Returns the choice with index 0, wherever it stands. Its place counts where
/// there is no index.
fn first(choices: &[Value]) -> Option<&Value> {
    let is_first = |(place, choice): &(usize, &Value)| match choice.get("index") {
        None | Some(Value::Null) => *place == 0,
        Some(index) => index.as_u64() == Some(0),
    };
    choices.iter().enumerate().find(is_first).map(|(_, choice)| choice)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reply(body: Value) -> Result<ChatReply, Error> {
        let body = body.to_string().into();
        read(&Answer { url: "http://h/v1/chat/completions".to_owned(), body })
    }

    #[test]
    fn reasoning_has_two_names() {
        for name in ["reasoning_content", "reasoning"] {
            let reply =
                reply(json!({"choices": [{"message": {"content": "a", name: "b"}}]})).unwrap();
            assert_eq!((reply.content.as_str(), reply.reasoning.as_deref()), ("a", Some("b")));
            assert_eq!((reply.finish_reason, reply.completion_tokens), (None, None));
        }
    }

    #[test]
    fn an_answer_in_parts_is_its_text() {
        let thinking = json!({"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]});
        let text = |text: &str| json!({"type": "text", "text": text});
        for (parts, expected) in [
            (json!([text("a")]), "a"),
            (json!([thinking, text("a "), 1, null, text("b")]), "a b"),
            (json!([text("")]), ""),
        ] {
            let reply = reply(json!({"choices": [{"message": {"content": parts}}]})).unwrap();
            assert_eq!(reply.content, expected, "{parts}");
        }
    }

    #[test]
    fn an_answer_of_nothing_is_no_answer() {
        let bodies = [
            json!({}),
            json!({"choices": null}),
            json!({"choices": []}),
            json!({"choices": [{}]}),
            json!({"choices": [{"message": {"content": null}}]}),
            json!({"choices": [{"message": {"role": "assistant", "tool_calls": []}}]}),
            json!({"choices": [{"message": {"content": []}}]}),
            json!({"choices": [{"message": {"content": [{"type": "thinking", "thinking": []}]}}]}),
            json!({"choices": [{"message": {"content": {"type": "text", "text": "a"}}}]}),
            json!([]),
        ];
        for body in bodies {
            assert!(matches!(reply(body.clone()), Err(Error::Malformed { .. })), "{body}");
        }
    }

    #[test]
    fn of_several_choices_the_one_with_index_0_counts() {
        let choice =
            |index: Value, text: &str| json!({"index": index, "message": {"content": text}});
        let table = [
            (json!([choice(json!(1), "b"), choice(json!(0), "a")]), Some("a")),
            (json!([choice(Value::Null, "a"), choice(json!(1), "b")]), Some("a")),
            (json!([{"message": {"content": "a"}}, {"message": {"content": "b"}}]), Some("a")),
            (json!([choice(json!(7), "only")]), Some("only")),
            (json!([choice(json!(2), "c"), choice(json!(1), "b")]), None),
            (json!([choice(json!("0"), "c"), choice(json!(-1), "b")]), None),
        ];
        for (choices, expected) in table {
            let found = reply(json!({"choices": choices})).map(|reply| reply.content);
            assert_eq!(found.as_deref().ok(), expected, "{choices}");
            assert!(matches!(found, Ok(_) | Err(Error::Malformed { .. })), "{choices}");
        }
    }

    #[test]
    fn an_error_inside_a_200_is_an_error() {
        let error = reply(json!({"error": {"message": "no quota"}, "choices": []})).unwrap_err();
        assert!(matches!(error, Error::Refused { .. }));
        assert!(error.to_string().ends_with("refused: no quota"), "{error}");
    }

    #[test]
    fn an_answer_that_is_no_use_was_paid_for_all_the_same() {
        let usage = json!({"prompt_tokens": 9, "completion_tokens": 4});
        for mut body in [
            json!({"choices": []}),
            json!({"choices": [{"message": {"content": null}}]}),
            json!({"error": {"message": "filtered"}}),
        ] {
            assert_eq!(reply(body.clone()).unwrap_err().tokens(), None, "{body}");
            body["usage"] = usage.clone();
            assert_eq!(reply(body.clone()).unwrap_err().tokens(), Some((9, 4)), "{body}");
        }
        // A part of a count is none.
        let body = json!({"usage": {"prompt_tokens": 9}});
        assert_eq!(reply(body).unwrap_err().tokens(), None);
    }

    #[test]
    fn what_the_server_tells_is_kept() {
        let body = json!({
            "choices": [{"message": {"content": ""}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 0},
            "metadata": {"weight_version": "7"},
        });
        let expected = ChatReply {
            content: String::new(),
            reasoning: None,
            tool_calls: None,
            finish_reason: Some("length".to_owned()),
            prompt_tokens: Some(9),
            completion_tokens: Some(0),
            weight_version: Some("7".to_owned()),
        };
        assert_eq!(reply(body).unwrap(), expected);
    }
}
