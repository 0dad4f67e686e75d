//! What the model is told to do: the built-in text, or the user's own, one for
//! people and one for tools.

use std::io::Write;
use std::path::{Path, PathBuf};

use oclaw::judge;
use oclaw::trajectory::words::NextStateKind;

use crate::common::Printing as _;
use crate::report::{Exit, Failure};

/// Whose texts.
#[derive(clap::Args, Debug)]
pub(crate) struct PromptFlags {
    /// File with another instruction to the model
    #[arg(long, value_name = "FILE")]
    prompt: Option<PathBuf>,
    /// The same for turns that tools, not a person, came after [default: that of --prompt]
    #[arg(long, value_name = "FILE")]
    tool_prompt: Option<PathBuf>,
    /// Print the instruction (the built-in one is the example to start from), and stop
    #[arg(long)]
    pub(crate) show_prompt: bool,
}

/// A stage's own text, and the words without which no answer could be read.
pub(crate) struct Needed {
    pub(crate) built_in: &'static str,
    pub(crate) words: &'static [&'static str],
}

/// The texts, by who came next.
#[derive(Debug)]
pub(crate) struct Prompts {
    user: String,
    tool: String,
}

impl PromptFlags {
    /// Reads the texts, which must say how to answer.
    pub(crate) fn read(&self, needed: &Needed) -> anyhow::Result<Prompts> {
        let user = match &self.prompt {
            None => needed.built_in.to_owned(),
            Some(path) => read(path, needed)?,
        };
        let tool = match &self.tool_prompt {
            None => user.clone(),
            Some(path) => read(path, needed)?,
        };
        Ok(Prompts { user, tool })
    }
}

fn read(path: &Path, needed: &Needed) -> anyhow::Result<String> {
    let place = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("cannot read the prompt `{place}`: {error}")))?;
    match needed.words.iter().find(|words| !text.contains(**words)) {
        None => Ok(text),
        Some(lacks) => Err(judge::Error::Prompt { place, lacks }.into()),
    }
}

impl Prompts {
    /// Returns the text for a turn.
    pub(crate) fn of(&self, kind: NextStateKind) -> &str {
        match kind {
            NextStateKind::Tool => &self.tool,
            _ => &self.user,
        }
    }

    /// Prints the texts, the second one only if it is another.
    pub(crate) fn show(&self) -> anyhow::Result<Exit> {
        let mut texts = vec![self.user.as_bytes()];
        if self.tool != self.user {
            texts.push(self.tool.as_bytes());
        }
        for text in texts {
            std::io::stdout().write_all(text).printed()?;
        }
        Ok(Exit::Done)
    }
}
