//! `oclaw chat`.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::Context as _;
use oclaw::engine::{Delta, Engine, EngineOptions, Error};
use serde_json::{Map, Value, json};

use crate::common::{Context, Printing};
use crate::embedded::{self, DeviceName, Embedded};
use crate::report::Exit;
use crate::units;
use crate::visible::visible_lines;

/// Chat with a model, line by line.
///
/// Each line of standard input is what the user says; the answer is streamed to
/// standard output, what the model thinks to standard error. It works in a pipe as on
/// a terminal: `echo "What is 2 + 2?" | oclaw chat --model DIR`.
///
/// `/reset` begins a new conversation, `/system TEXT` sets the system message (no TEXT
/// takes it away), `/quit` or the end of input ends it. A line that begins with two
/// slashes is said with one.
///
/// What is not set by a flag is as the server has it. The same seed gives the same
/// answers to the same lines, where the server keeps to seeds.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Folder of a model, run in this process
    #[arg(long, value_name = "DIR", conflicts_with = "engine", required_unless_present = "engine")]
    model: Option<PathBuf>,
    /// Address of a server to ask
    #[arg(long, value_name = "URL")]
    engine: Option<String>,
    /// Name of the model there, if it has several; of an adapter, too
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    engine_model: Option<String>,
    /// File with the server's key
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    engine_key_file: Option<PathBuf>,
    /// Type of the products of `--model`: auto, f32 or bf16
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = ["auto", "f32", "bf16"], conflicts_with = "engine")]
    dtype: String,
    /// Where `--model` is computed: cpu, or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu", conflicts_with = "engine")]
    device: DeviceName,
    /// System message to begin with
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", value_parser = units::temperature)]
    temperature: Option<f64>,
    /// Nucleus of the distribution that may be sampled
    #[arg(long, value_name = "P", value_parser = share)]
    top_p: Option<f64>,
    /// Candidates that may be sampled
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Longest answer, in tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
}

/// Reads a share of the whole.
fn share(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("wanted a number above 0, up to 1".to_owned()),
    }
}

/// Chats until the input ends.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let (engine, inside) = context.block_on(connect(&args, context))?;
    let outcome = converse(&args, context, &engine);
    if let Some(inside) = inside {
        context.block_on(inside.shutdown());
    }
    outcome.map(|()| Exit::Done)
}

async fn connect(args: &Args, context: &Context) -> anyhow::Result<(Engine, Option<Embedded>)> {
    if let Some(folder) = &args.model {
        let how = (args.dtype.as_str(), args.device);
        let inside = Embedded::start_on(context, folder, None, how).await?;
        let engine = Engine::connect(EngineOptions::new(inside.url())).await?;
        return Ok((engine, Some(inside)));
    }
    let mut options = EngineOptions::new(args.engine.clone().unwrap_or_default());
    options.key = embedded::key(&context.command, args.engine_key_file.as_deref())?;
    options.model = args.engine_model.clone();
    Ok((Engine::connect(options).await?, None))
}

/// What a line of input asks for.
#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Say(&'a str),
    System(&'a str),
    Reset,
    Quit,
    Unknown(&'a str),
    Nothing,
}

impl<'a> Line<'a> {
    fn read(line: &'a str) -> Self {
        let line = line.trim();
        let Some(command) = line.strip_prefix('/') else {
            return if line.is_empty() { Self::Nothing } else { Self::Say(line) };
        };
        let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match word {
            _ if command.starts_with('/') => Self::Say(command),
            "system" => Self::System(rest.trim()),
            "reset" => Self::Reset,
            "quit" => Self::Quit,
            word => Self::Unknown(word),
        }
    }
}

/// A conversation.
struct Talk {
    system: Option<String>,
    messages: Vec<Value>,
    /// Counts answers, so that the same question is not always answered alike.
    answers: u64,
}

impl Talk {
    fn body(&self, args: &Args, context: &Context) -> Value {
        let message = |system: &String| json!({"role": "system", "content": system});
        let system = self.system.as_ref().map(message);
        let messages: Vec<_> = system.into_iter().chain(self.messages.iter().cloned()).collect();
        let mut body = Map::new();
        body.insert("messages".to_owned(), Value::Array(messages));
        body.insert("seed".to_owned(), json!(context.seed.wrapping_add(self.answers)));
        for (name, value) in [
            ("temperature", args.temperature.map(Value::from)),
            ("top_p", args.top_p.map(Value::from)),
            ("top_k", args.top_k.map(Value::from)),
            ("max_tokens", args.max_tokens.map(Value::from)),
        ] {
            body.extend(value.map(|value| (name.to_owned(), value)));
        }
        Value::Object(body)
    }
}

fn converse(args: &Args, context: &Context, engine: &Engine) -> anyhow::Result<()> {
    let by_hand = std::io::stdin().is_terminal();
    let mut talk = Talk { system: args.system.clone(), messages: Vec::new(), answers: 0 };
    let name = engine.model().unwrap_or_default();
    if by_hand {
        context.say(format!("`{name}`: /system TEXT, /reset, /quit"));
    }
    prompt(by_hand);
    for line in std::io::stdin().lines() {
        match Line::read(&line.context("cannot read standard input")?) {
            Line::Nothing => {}
            Line::Quit => return Ok(()),
            Line::Reset => talk.messages.clear(),
            Line::System(text) => talk.system = (!text.is_empty()).then(|| text.to_owned()),
            Line::Unknown(word) => {
                context.say(format!("no command `/{word}`: there are /system TEXT, /reset, /quit"));
            }
            Line::Say(text) => {
                talk.messages.push(json!({"role": "user", "content": text}));
                match context.block_on(answer(&talk.body(args, context), engine, context)) {
                    Ok(answer) => {
                        talk.messages.push(json!({"role": "assistant", "content": answer}));
                        talk.answers += 1;
                    }
                    // Somebody who sits there may say something else.
                    Err(error) if by_hand && error.is::<Error>() => {
                        talk.messages.pop();
                        context.say(format!("{error:#}"));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        prompt(by_hand);
    }
    Ok(())
}

/// Shows where to type.
fn prompt(by_hand: bool) {
    if by_hand {
        let _ = std::io::stderr().write_all(b"> ");
    }
}

/// Streams one answer to standard output; returns it.
async fn answer(body: &Value, engine: &Engine, context: &Context) -> anyhow::Result<String> {
    let mut stream = engine.chat_stream(body.clone()).await?;
    let shown = |text: &str, terminal: bool| match terminal {
        // A terminal would obey what a model writes.
        true => text.split('\t').map(visible_lines).collect::<Vec<_>>().join("\t"),
        false => text.to_owned(),
    };
    let terminal = (std::io::stdout().is_terminal(), std::io::stderr().is_terminal());
    let (mut said, mut thinking, mut end) = (String::new(), false, None);
    let mut stdout = std::io::stdout();
    while let Some(delta) = stream.next().await? {
        match delta {
            Delta::Text(text) => {
                if std::mem::take(&mut thinking) {
                    think(context, "\n");
                }
                stdout.write_all(shown(&text, terminal.0).as_bytes()).printed()?;
                stdout.flush().printed()?;
                said.push_str(&text);
            }
            Delta::Thought(text) => {
                thinking = true;
                think(context, &shown(&text, terminal.1));
            }
            Delta::End(reason) => end = Some(reason),
        }
    }
    if thinking {
        think(context, "\n");
    }
    writeln!(stdout).printed()?;
    match end.as_deref() {
        None | Some("stop") => {}
        Some("length") => context.say("the answer is cut off: it has as many tokens as it may"),
        Some(reason) => context.say(format!("the answer ended by `{reason}`")),
    }
    Ok(said)
}

/// Writes a piece of a thought, which is talk.
fn think(context: &Context, text: &str) {
    if !context.quiet {
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_said_or_does_something() {
        for (line, expected) in [
            ("hi there ", Line::Say("hi there")),
            ("//reset is a command", Line::Say("/reset is a command")),
            ("/system  Be brief. ", Line::System("Be brief.")),
            ("/system", Line::System("")),
            ("/reset", Line::Reset),
            ("/quit", Line::Quit),
            ("/etc/passwd is a file", Line::Unknown("etc/passwd")),
            (" ", Line::Nothing),
        ] {
            assert_eq!(Line::read(line), expected, "{line}");
        }
    }
}
