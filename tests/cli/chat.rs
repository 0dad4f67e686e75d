//! `oclaw chat`: lines in, answers out.

use serde_json::{Value, json};

use crate::harness::fake_upstream::{
    FakeUpstream, Speaks, Step, done, event, json as answer, stream_head,
};
use crate::harness::oclaw;

/// A server whose answers tell how many messages it was sent; "fail" fails, "cut" breaks
/// off, "long" is cut short by its limit.
fn server() -> FakeUpstream {
    FakeUpstream::start(Speaks::Generic, |seen| {
        let body: Value = serde_json::from_slice(&seen.body).unwrap();
        let messages = body["messages"].as_array().unwrap();
        let last = messages.last().unwrap()["content"].as_str().unwrap();
        let delta = |delta: Value| event(&json!({"choices": [{"index": 0, "delta": delta}]}));
        let end = |reason: &str| {
            event(&json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}))
        };
        let reason = if last == "long" { "length" } else { "stop" };
        match last {
            "fail" => answer(400, r#"{"error":{"message":"too long"}}"#),
            "cut" => vec![stream_head(), delta(json!({"content": "half"})), Step::End],
            _ => vec![
                stream_head(),
                delta(json!({"role": "assistant", "content": ""})),
                delta(json!({"reasoning_content": "hm"})),
                delta(json!({"content": format!("{} ", messages.len())})),
                delta(json!({"content": "é\n!"})),
                end(reason),
                done(),
            ],
        }
    })
}

struct Said {
    stdout: String,
    stderr: String,
    code: Option<i32>,
}

fn chat(url: &str, flags: &[&str], input: &str) -> Said {
    let mut command = oclaw();
    command.args(["chat", "--engine", url]).args(flags).write_stdin(input);
    let output = command.output().unwrap();
    Said {
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        code: output.status.code(),
    }
}

#[test]
fn each_line_is_a_turn_of_one_conversation() {
    let fake = server();
    let flags = ["--system", "Be brief.", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4"];
    let input = "one\n\n  two \n/reset\nthree\n/system\n//four\n/quit\nfive\n";
    let said = chat(&fake.url(), &[&flags[..], &["--max-tokens", "7"]].concat(), input);
    assert_eq!((said.code, said.stderr.as_str()), (Some(0), "hm\nhm\nhm\nhm\n"));
    assert_eq!(said.stdout, "2 é\n!\n4 é\n!\n2 é\n!\n3 é\n!\n");
    let bodies: Vec<Value> =
        fake.chats().iter().map(|seen| serde_json::from_slice(&seen.body).unwrap()).collect();
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let brief = message("system", "Be brief.");
    let user = |text: &str| message("user", text);
    assert_eq!(bodies[0]["messages"], json!([brief, user("one")]));
    let answered = message("assistant", "2 é\n!");
    assert_eq!(bodies[1]["messages"], json!([brief, user("one"), answered, user("two")]));
    assert_eq!(bodies[2]["messages"], json!([brief, user("three")]));
    assert_eq!(bodies[3]["messages"], json!([user("three"), answered, user("/four")]));
    assert_eq!(bodies.len(), 4);
    let settings = json!({"model": "m1", "stream": true, "temperature": 0.5, "top_p": 0.9,
        "top_k": 4, "max_tokens": 7, "seed": 0});
    for (name, value) in settings.as_object().unwrap() {
        assert_eq!(&bodies[0][name], value, "{name}");
    }
    assert_eq!(bodies[3]["seed"], 3);
    // What is not set is the server's.
    let before = fake.chats().len();
    chat(&fake.url(), &["-q"], "hi\n");
    let body: Value = serde_json::from_slice(&fake.chats()[before].body).unwrap();
    let names: Vec<_> = body.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["messages", "seed", "stream", "model"]);
}

#[test]
fn what_goes_wrong_is_said() {
    let fake = server();
    let url = fake.url();
    let quiet = chat(&url, &["-q"], "long\n");
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("1 é\n!\n", ""));
    let long = chat(&url, &[], "long\n/help\n");
    assert!(long.stderr.contains("the answer is cut off: it has as many tokens as it may"));
    assert!(long.stderr.contains("no command `/help`: there are /system TEXT, /reset, /quit"));
    assert_eq!(long.code, Some(0));
    let failed = chat(&url, &[], "one\nfail\ntwo\n");
    assert!(failed.stderr.contains("too long"), "{}", failed.stderr);
    assert_eq!(failed.stdout, "1 é\n!\n");
    assert!(matches!(failed.code, Some(1..)), "{:?}", failed.code);
    let cut = chat(&url, &[], "cut\n");
    assert!(cut.stderr.contains("the stream ended before the answer did"), "{}", cut.stderr);
    assert!(matches!(cut.code, Some(1..)), "{:?}", cut.code);
    for flags in [&["--top-p", "0"][..], &["--temperature", "-1"], &["--model", "m"]] {
        assert_eq!(chat(&url, flags, "").code, Some(2), "{flags:?}");
    }
    // What is only of one way to a model does not go with the other.
    for flags in [["--dtype", "f32"], ["--device", "cpu"]] {
        let refused = chat(&url, &flags, "hi\n");
        assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""), "{flags:?}");
        assert!(refused.stderr.contains(flags[0]), "{}", refused.stderr);
    }
    for flag in ["--engine-model", "--engine-key-file"] {
        let assert = oclaw().args(["chat", "--model", "m", flag, "x"]).assert().code(2);
        let stderr = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert!(stderr.contains("cannot be used with") && stderr.contains(flag), "{stderr}");
    }
    oclaw().arg("chat").assert().code(2);
}

#[cfg(feature = "torch")]
#[test]
fn a_model_of_this_machine_answers_by_itself() {
    use crate::harness::parrot::{SPEECH, THOUGHT, parrot};
    let folder = tempfile::tempdir().unwrap();
    parrot(folder.path(), &[&THOUGHT[..], &SPEECH].concat());
    let mut command = oclaw();
    command.arg("chat").arg("--model").arg(folder.path()).args(["--temperature", "0"]);
    let assert = command.write_stdin("(\n/reset\n)\n").assert().success();
    assert.stdout("The name is set\nThe name is set\n").stderr("Hm.\nHm.\n");
}
