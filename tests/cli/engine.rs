//! `oclaw engine`: starting, refusing to start, ending.

#[cfg(not(feature = "torch"))]
#[test]
fn a_build_without_torch_says_so() {
    let assert = crate::harness::oclaw().args(["engine", "--model", "m"]).assert().code(2);
    let stderr = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("`oclaw engine` needs the `torch` feature"), "{stderr}");
}

#[cfg(feature = "torch")]
mod with_torch {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::process::{Child, ChildStderr, Command, Stdio};

    use serde_json::json;

    use crate::harness::{PATIENCE, fixture_models as models, oclaw};

    fn refused(args: &[&str], code: i32) -> String {
        let model = models().join("tiny-qwen3");
        let mut command = oclaw();
        command.args(["engine", "--model", model.to_str().unwrap()]).args(args);
        let assert = command.assert().code(code);
        String::from_utf8(assert.get_output().stderr.clone()).unwrap()
    }

    #[test]
    fn what_cannot_be_served_is_said_in_a_line() {
        let busy = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = busy.local_addr().unwrap().to_string();
        let stderr = refused(&["--listen", &address], 1);
        assert!(
            stderr.starts_with(&format!("oclaw engine: cannot listen on `{address}`")),
            "{stderr}"
        );
        let stderr = refused(&["--listen", "0.0.0.0:0"], 2);
        assert!(stderr.starts_with("oclaw engine: no key protects `0.0.0.0:0`"), "{stderr}");
        assert!(stderr.contains("hint: give a key by `--key-file`"), "{stderr}");
        assert!(refused(&["--dtype", "int4"], 2).contains("int4"));
        assert!(refused(&["--device", "gpu"], 2).contains("wanted cpu or cuda:N"));
        assert!(refused(&["--prefill-chunk", "0"], 2).contains("0 is not in 1..=1000000"));
        assert!(refused(&["--prefix-cache", "1 sack"], 2).contains("no unit `sack`"));
        let listen = ["--listen", "127.0.0.1:0"];
        let absent = refused(&[&listen[..], &["--device", "cuda:99"]].concat(), 2);
        assert!(absent.starts_with("oclaw engine: device Cuda(99) is not available"), "{absent}");
        let gone = oclaw().args(["engine", "--model", "gone"]).assert().code(1);
        let stderr = String::from_utf8(gone.get_output().stderr.clone()).unwrap();
        assert_eq!(stderr, "oclaw engine: no model folder `gone`\n");
    }

    #[test]
    fn capabilities_are_printed_without_a_model() {
        let print = |flags: &[&str]| {
            let assert = oclaw().args(["engine", "--capabilities"]).args(flags).assert().success();
            String::from_utf8(assert.get_output().stdout.clone()).unwrap()
        };
        let all: serde_json::Value = serde_json::from_str(&print(&["--json"])).unwrap();
        let find = |route: &str, field: &str| {
            let mut all = all.as_array().unwrap().iter();
            let found = all.find(|one| one["route"] == route && one["field"] == field);
            found.unwrap().clone()
        };
        let prompt = find("/v1/completions", "prompt");
        assert_eq!((&prompt["standing"], &prompt["note"]), (&"honoured".into(), &"".into()));
        let echo = find("/v1/completions", "echo");
        assert_eq!(echo["standing"], "neutral_only");
        assert!(echo["note"].as_str().unwrap().contains("`logprob_start_len`"), "{echo}");
        let table = print(&[]);
        assert_eq!(table.lines().next().unwrap().split_whitespace().next(), Some("route"));
        let words = ["/v1/completions", "echo", "neutral", "value", "only"];
        let has = |line: &str| line.split_whitespace().take(5).eq(words);
        assert!(table.lines().any(has), "{table}");
        oclaw().arg("engine").assert().code(2);
    }

    /// A running engine; killed if the test fails.
    struct Engine {
        child: Child,
        stderr: BufReader<ChildStderr>,
        address: String,
    }

    impl Engine {
        /// Starts it; it has nothing to say but that it is ready.
        fn start() -> Self {
            let (engine, said) = Self::start_saying(&models().join("tiny-qwen3"));
            assert_eq!(said, "");
            engine
        }

        /// Starts it on a folder; returns what it said before it was ready, too.
        fn start_saying(model: &std::path::Path) -> (Self, String) {
            Self::start_with(model, &[])
        }

        /// The same, with further flags.
        fn start_with(model: &std::path::Path, flags: &[&str]) -> (Self, String) {
            Self::start_in(&[], model, flags)
        }

        /// The same, with further variables of its environment.
        fn start_in(
            variables: &[(&str, &str)],
            model: &std::path::Path,
            flags: &[&str],
        ) -> (Self, String) {
            let mut command = Command::new(env!("CARGO_BIN_EXE_oclaw"));
            command.envs(variables.iter().copied());
            command.args(["engine", "--listen", "127.0.0.1:0", "--model"]);
            command.arg(model).args(flags).stderr(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let mut stderr = BufReader::new(child.stderr.take().unwrap());
            let mut said = String::new();
            let address = loop {
                let mut line = String::new();
                assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "{said}");
                if let Some((_, address)) = line.trim().rsplit_once("http://") {
                    break address.to_owned();
                }
                said.push_str(&line);
            };
            (Self { child, stderr, address }, said)
        }

        fn get(&self, path: &str) -> String {
            let mut stream = TcpStream::connect(&self.address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            stream.write_all(head.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        }

        fn post(&self, path: &str, body: &str) -> TcpStream {
            let mut stream = TcpStream::connect(&self.address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            stream.write_all((head + body).as_bytes()).unwrap();
            stream
        }
    }

    impl Drop for Engine {
        fn drop(&mut self) {
            let _ = self.child.kill();
        }
    }

    /// A connection that is used again.
    struct Kept(BufReader<TcpStream>);

    impl Kept {
        fn open(engine: &Engine) -> Self {
            let stream = TcpStream::connect(&engine.address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_nodelay(true).unwrap();
            Self(BufReader::new(stream))
        }

        fn line(&mut self) -> String {
            let mut line = String::new();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "the connection has ended");
            line.trim_end().to_owned()
        }

        /// Asks and reads the whole answer: its first line, and its body.
        fn ask(&mut self, path: &str, body: &str) -> (String, String) {
            let length = body.len();
            let head =
                format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
            self.0.get_mut().write_all((head + body).as_bytes()).unwrap();
            let status = self.line();
            let (mut length, mut in_pieces) = (0, false);
            loop {
                let line = self.line().to_lowercase();
                match line.split_once(": ") {
                    None => break,
                    Some(("content-length", value)) => length = value.parse().unwrap(),
                    Some(("transfer-encoding", _)) => in_pieces = true,
                    Some(_) => {}
                }
            }
            let mut answer = Vec::new();
            loop {
                if in_pieces {
                    length = usize::from_str_radix(&self.line(), 16).unwrap();
                }
                let start = answer.len();
                answer.resize(start + length, 0);
                self.0.read_exact(&mut answer[start..]).unwrap();
                if in_pieces {
                    assert_eq!(self.line(), "");
                }
                if !in_pieces || length == 0 {
                    return (status, String::from_utf8(answer).unwrap());
                }
            }
        }
    }

    /// Returns a request, each with names, a handle or a prompt of its own of 2 KiB or so, and
    /// the beginning of its answer.
    fn request(number: usize) -> (&'static str, String, &'static str) {
        let name = format!("{number:0>2048}");
        let (good, refused) = ("HTTP/1.1 200 OK", "HTTP/1.1 400 Bad Request");
        let long: Vec<_> = (0..70).map(|place| (number + place * 131) % 1015).collect();
        let hello = json!([{"role": "user", "content": format!("{number}")}]);
        let sampling = json!({"max_new_tokens": 1, "ignore_eos": true});
        let (path, body, status) = match number % 20 {
            0 => ("/generate", json!({"input_ids": long, "sampling_params": sampling}), good),
            1 => {
                let chat = json!({"model": name, "messages": hello, "max_tokens": 2,
                    "logprobs": true, "top_logprobs": 2});
                ("/v1/chat/completions", chat, good)
            }
            2 => {
                let chat = json!({"rid": name, "messages": hello, "max_tokens": 2, "stream": true});
                ("/v1/chat/completions", chat, good)
            }
            3 => {
                let text =
                    json!({"rid": name, "prompt": "hi", "max_tokens": 1, "n": 2, "stop": name});
                ("/v1/completions", text, good)
            }
            4 => {
                let score = json!({"rid": name, "input_ids": [5, 6], "return_logprob": true,
                    "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}});
                ("/generate", score, good)
            }
            5 => ("/generate", json!({"input_ids": [5], "lora_path": name}), refused),
            _ => {
                let body = json!({"rid": name, "input_ids": [5], "stream": number.is_multiple_of(2),
                    "sampling_params": sampling});
                ("/generate", body, good)
            }
        };
        (path, body.to_string(), status)
    }

    /// A loop that starts it anew has no chat answered by the start model.
    #[test]
    fn it_begins_with_the_newest_policy() {
        let folder = tempfile::tempdir().unwrap();
        let model = models().join("tiny-qwen3");
        let flags = ["--policies", folder.path().to_str().unwrap()];
        let start = |version: &str| {
            let (engine, said) = Engine::start_with(&model, &flags);
            let told = engine.get("/model_info");
            assert!(told.contains(&format!(r#""weight_version":"{version}""#)), "{told}");
            // Whatever it began with, clients ask for it by the name of the model.
            let listed = engine.get("/v1/models");
            assert!(listed.contains(r#""id":"tiny-qwen3""#), "{listed}");
            (told, said)
        };
        // There is none yet.
        assert_eq!(start("0").1, "");
        let policy = folder.path().join("step-000007");
        std::fs::create_dir(&policy).unwrap();
        for entry in std::fs::read_dir(&model).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), policy.join(entry.file_name())).unwrap();
        }
        std::os::unix::fs::symlink("step-000007", folder.path().join("latest")).unwrap();
        let (told, said) = start("7");
        assert!(told.contains("step-000007") && said.is_empty(), "{told}\n{said}");
        // One that cannot be served holds up no chat.
        std::fs::write(policy.join("model.safetensors"), "broken").unwrap();
        let said = start("0").1;
        assert!(said.contains("the newest policy cannot be served"), "{said}");
        std::fs::remove_dir_all(&policy).unwrap();
        let said = start("0").1;
        assert!(said.contains("beginning with `--model` instead"), "{said}");
        let both = refused(&["--policies", "p", "--weight-version", "3"], 2);
        assert!(both.contains("cannot be used with"), "{both}");
        let store = refused(&["--policies", "s3://bucket/policy"], 2);
        assert!(store.contains("not of an object store"), "{store}");
    }

    #[test]
    fn settings_of_the_folder_that_are_not_applied_are_said() {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(models().join("tiny-qwen3")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        for (penalty, warned) in [("1.0", false), ("1.1", true)] {
            let settings = format!(r#"{{"repetition_penalty": {penalty}}}"#);
            std::fs::write(folder.path().join("generation_config.json"), settings).unwrap();
            let (_engine, said) = Engine::start_saying(folder.path());
            assert_eq!(said.contains("wants a repetition penalty"), warned, "{said}");
        }
    }

    /// The limit is 1 KiB for each request after the warm-up, which is less than any of them
    /// would leave behind: its 2 KiB of names, its text stream or its keys and values. The
    /// prefix cache is full by then. One arena, for glibc's allocator else keeps memory for
    /// each thread, and more of it as they happen to take turns.
    #[test]
    fn memory_stays_flat_over_ten_thousand_short_requests() {
        const ALL: usize = 10_000;
        const WARM: usize = 2000;
        const CONNECTIONS: usize = 4;
        let alone = [("MALLOC_ARENA_MAX", "1"), ("OMP_NUM_THREADS", "1")];
        // 31 blocks of 64 tokens, of which each of the longer prompts fills one.
        let flags = ["--prefix-cache", "1MiB"];
        let (engine, said) = Engine::start_in(&alone, &models().join("tiny-qwen3"), &flags);
        assert_eq!(said, "");
        let resident = || {
            let status = format!("/proc/{}/status", engine.child.id());
            let status = std::fs::read_to_string(status).unwrap();
            let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
        };
        let mut kept: Vec<_> = (0..CONNECTIONS).map(|_| Kept::open(&engine)).collect();
        let mut ask = |numbers: std::ops::Range<usize>| {
            std::thread::scope(|scope| {
                for (place, kept) in kept.iter_mut().enumerate() {
                    let numbers = numbers.clone().skip(place).step_by(CONNECTIONS);
                    scope.spawn(move || {
                        for number in numbers {
                            let (path, body, expected) = request(number);
                            let (status, answer) = kept.ask(path, &body);
                            assert_eq!(status, expected, "{number}: {answer}");
                        }
                    });
                }
            });
        };
        ask(0..WARM);
        let before = resident();
        ask(WARM..ALL);
        let grown = resident().saturating_sub(before);
        assert!(grown < ALL - WARM, "{grown} KiB more than {before} KiB");
    }

    #[test]
    fn sigterm_lets_a_running_stream_end() {
        let mut engine = Engine::start();
        let body = r#"{"input_ids":[5,6],"stream":true,"sampling_params":{"max_new_tokens":100,"ignore_eos":true}}"#;
        let mut stream = BufReader::new(engine.post("/generate", body));
        let mut line = String::new();
        while !line.contains("data: ") {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0, "the stream ended early");
        }
        let id = engine.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains(r#""finish_reason":{"type":"length","length":100}"#), "{rest}");
        assert!(rest.contains("data: [DONE]"), "{rest}");
        assert_eq!(engine.child.wait().unwrap().code(), Some(0));
        let mut said = String::new();
        engine.stderr.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("ending: "), "{said}");
        let mut stdout = String::new();
        engine.child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        assert_eq!(stdout, "");
    }
}
