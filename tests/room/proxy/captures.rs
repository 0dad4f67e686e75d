//! Real requests of OpenClaw, sent through the proxy as they are and in other
//! settings of the same client, come to exactly the right rows.

use oclaw::session::identity::is_envelope;

use super::*;
use crate::harness::fixture;

/// Session, number in it, and what came next of the answer to each request.
const EXPECTED: [(&str, u32, &str); 8] = [
    ("alpha-1", 1, "user: No, shorter please. Please LIST the files"),
    ("alpha-1", 2, "tool: AGENTS.md"),
    ("alpha-1", 3, "user: BOTH: list files and read MISSING.txt"),
    ("beta-2", 1, "user: That is right, thanks"),
    ("alpha-1", 4, "tool: AGENTS.md|tool: File not found"),
    ("alpha-1", 5, "user: Thanks, great"),
    ("alpha-1", 6, ""),
    ("beta-2", 2, ""),
];

fn recorded(setting: &str) -> Vec<Value> {
    let name = format!("captures/openclaw-2026.9.6-{setting}.jsonl");
    let text = std::fs::read_to_string(fixture(&name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn messages(request: &Value) -> Vec<Value> {
    request["body"]["messages"].as_array().unwrap().clone()
}

/// Finds the answer to a request in the history of the next one that holds it,
/// with the ids of its calls as the server had made them.
fn answer_to(number: usize, requests: &[Value]) -> Value {
    let said_so_far = |request: &Value| {
        let counts = |message: &Value| !is_envelope(message) && message["role"] != "system";
        messages(request).into_iter().filter(counts).collect::<Vec<_>>()
    };
    let asked = said_so_far(&requests[number]);
    for later in &requests[number + 1..] {
        let history = said_so_far(later);
        if history.len() > asked.len() && history[..asked.len()] == asked[..] {
            let sent =
                [("calla12", "call_a1_2"), ("calla15", "call_a1_5"), ("callb25", "call_b2_5")];
            let text = history[asked.len()].to_string();
            let text = sent.iter().fold(text, |text, (now, then)| text.replace(now, then));
            return serde_json::from_str(&text).unwrap();
        }
    }
    json!({"role": "assistant", "content": format!("Answer {}: here you are.", number + 1)})
}

/// Writes an answer the way the request wants it.
fn steps(answer: &Value, stream: bool) -> Vec<Step> {
    let finish = if answer["tool_calls"].is_array() { "tool_calls" } else { "stop" };
    if !stream {
        let document =
            json!({"choices": [{"index": 0, "message": answer, "finish_reason": finish}]});
        return json(200, &document.to_string());
    }
    let chunk = |delta: Value, finish: Value| {
        event(&json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))
    };
    let mut steps = vec![stream_head(), chunk(json!({"role": "assistant"}), Value::Null)];
    for name in ["reasoning_content", "content"] {
        for word in answer[name].as_str().unwrap_or_default().split_inclusive(' ') {
            steps.push(chunk(json!({name: word}), Value::Null));
        }
    }
    for (index, call) in answer["tool_calls"].as_array().into_iter().flatten().enumerate() {
        let mut call = call.clone();
        call["index"] = json!(index);
        steps.push(chunk(json!({"tool_calls": [call]}), Value::Null));
    }
    steps.extend([chunk(json!({}), json!(finish)), done(), Step::End]);
    steps
}

/// Sends the requests one after the other, and compares the rows with the pairing.
async fn replayed(name: &str, setting: &str, change: impl Fn(usize, &mut Value)) {
    let mut requests = recorded(setting);
    let named = setting == "affinity";
    // What the server says does not change with how the client keeps it.
    let other_tools = |answer: Value| match name.starts_with("other tools") {
        true => {
            serde_json::from_str(&answer.to_string().replace("\"ls\"", "\"list_dir\"")).unwrap()
        }
        false => answer,
    };
    let answers: Vec<_> =
        (0..requests.len()).map(|number| other_tools(answer_to(number, &requests))).collect();
    requests.iter_mut().enumerate().for_each(|(number, request)| change(number, request));
    let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let script = move |seen: &Seen| {
        let call = calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        steps(&answers[call], seen.text().contains("\"stream\":true"))
    };
    let rig = Rig::start(Speaks::Generic, script, |_| {}).await;
    let mut turn_ids = Vec::new();
    for request in &requests {
        let mut sent = rig.post(request["path"].as_str().unwrap(), &request["body"]);
        for (header, value) in request["headers"].as_object().unwrap() {
            sent = sent.header(header, value.as_str().unwrap());
        }
        let response = sent.send().await.unwrap();
        turn_ids.push(response.headers()["x-oclaw-turn-id"].to_str().unwrap().to_owned());
        response.text().await.unwrap();
    }
    let rows = rig.rows().await;
    assert_eq!(rows.len(), requests.len(), "{name}");
    let row = |number: usize| rows.iter().find(|row| row.turn_id == turn_ids[number]).unwrap();
    let sessions = [("alpha-1", &row(0).session_id), ("beta-2", &row(3).session_id)];
    assert_ne!(sessions[0].1, sessions[1].1, "{name}");
    for (number, (session, turn, next)) in EXPECTED.into_iter().enumerate() {
        let found = row(number);
        let known = sessions.iter().find(|(known, _)| *known == session).unwrap();
        assert_eq!(&found.session_id, known.1, "{name} {number}");
        assert!(!named || found.session_id == session, "{name} {number} {}", found.session_id);
        assert_eq!((found.turn, found.branch.as_str()), (turn, "main"), "{name} {number}");
        let state: Vec<Value> = match &found.next_state {
            Some(state) => serde_json::from_str(state).unwrap(),
            None => Vec::new(),
        };
        let wanted: Vec<_> = next.split('|').filter(|part| !part.is_empty()).collect();
        assert_eq!(state.len(), wanted.len(), "{name} {number}: {state:?}");
        for (message, wanted) in state.iter().zip(wanted) {
            let (role, part) = wanted.split_once(": ").unwrap();
            assert_eq!(message["role"], role, "{name} {number}");
            let text = message["content"].to_string();
            assert!(text.contains(part) && !text.contains("INTERNAL_CONTEXT"), "{name} {text}");
        }
    }
}

/// A setting of the client: what it changes in each request.
type Setting = (&'static str, fn(usize, &mut Value));

fn each_message(request: &mut Value, change: impl Fn(&mut Value)) {
    request["body"]["messages"].as_array_mut().unwrap().iter_mut().for_each(change);
}

fn of_role<'a>(message: &'a mut Value, role: &str) -> Option<&'a mut Value> {
    (message["role"] == role).then_some(message)
}

const SETTINGS: &[Setting] = &[
    ("as it is", |_, _| {}),
    ("no streaming", |_, request| {
        request["body"]["stream"] = json!(false);
        request["body"].as_object_mut().unwrap().shift_remove("stream_options");
    }),
    ("other system prompts", |number, request| {
        request["body"]["messages"][0]["content"] = json!("You help. ".repeat(1 + 900 * number));
    }),
    ("developer role", |_, request| request["body"]["messages"][0]["role"] = json!("developer")),
    ("no system prompt", |_, request| {
        request["body"]["messages"].as_array_mut().unwrap().remove(0);
    }),
    ("plain text only", |_, request| {
        each_message(request, |message| {
            if let Some(text) = message["content"][0]["text"].as_str().map(str::to_owned) {
                message["content"] = json!(text);
            }
        });
    }),
    ("parts only", |_, request| {
        each_message(request, |message| {
            if let Some(text) = message["content"].as_str().map(str::to_owned) {
                message["content"] = json!([{"type": "text", "text": text}]);
            }
        });
    }),
    ("no thoughts in the history", |_, request| {
        each_message(request, |message| {
            message.as_object_mut().unwrap().shift_remove("reasoning_content");
        });
    }),
    ("thoughts under the other name", |_, request| {
        each_message(request, |message| {
            if let Some(thought) =
                message.as_object_mut().unwrap().shift_remove("reasoning_content")
            {
                message["reasoning"] = thought;
            }
        });
    }),
    ("other tools", |_, request| {
        let text = request["body"].to_string().replace("\"ls\"", "\"list_dir\"");
        request["body"] = serde_json::from_str(&text).unwrap();
        request["body"]["tools"].as_array_mut().unwrap().truncate(2);
    }),
    ("the envelope behind the words", |_, request| {
        let messages = request["body"]["messages"].as_array_mut().unwrap();
        let envelope = messages.pop().unwrap()["content"][0].clone();
        let last = messages.last_mut().unwrap();
        if let Some(last) = of_role(last, "user") {
            let words = last["content"].clone();
            last["content"] = json!([{"type": "text", "text": words}, envelope]);
        }
    }),
    ("no envelope", |_, request| {
        request["body"]["messages"].as_array_mut().unwrap().pop();
    }),
    ("arguments written anew", |_, request| {
        each_message(request, |message| {
            for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
                let arguments: Value =
                    serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
                call["function"]["arguments"] = json!(format!(" {arguments:#}"));
            }
        });
    }),
];

#[tokio::test]
async fn every_setting_without_headers_pairs_right() {
    for (name, change) in SETTINGS {
        replayed(name, "default", change).await;
    }
}

#[tokio::test]
async fn every_setting_with_affinity_pairs_right() {
    let marks: [Setting; 4] = [
        ("all marks", |_, _| {}),
        ("cache key only", |_, request| {
            for name in ["session_id", "x-client-request-id", "x-session-affinity"] {
                request["headers"].as_object_mut().unwrap().shift_remove(name);
            }
        }),
        ("headers only", |_, request| {
            request["body"].as_object_mut().unwrap().shift_remove("prompt_cache_key");
        }),
        ("a new generation each time", |number, request| {
            let text = request.to_string().replace("-1:0", &format!("-1:{number}"));
            *request =
                serde_json::from_str(&text.replace("-2:0", &format!("-2:{number}"))).unwrap();
        }),
    ];
    for (name, change) in SETTINGS {
        for (mark, also) in marks.iter().take(if *name == "as it is" { 4 } else { 1 }) {
            let both = |number: usize, request: &mut Value| {
                change(number, request);
                also(number, request);
            };
            replayed(&format!("{name}, {mark}"), "affinity", both).await;
        }
    }
}
