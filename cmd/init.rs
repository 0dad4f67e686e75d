//! `oclaw init`: a configuration file to begin with.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use serde_json::json;

use crate::common::Context;
use crate::report::{Exit, Failure};

/// The name that `oclaw check` and `oclaw loop` look for.
pub(crate) const FILE: &str = "oclaw.toml";

const PARTS: [(&str, &str); 3] = [
    ("@LOOP@", include_str!("init/loop.toml")),
    ("@SERVE@", include_str!("init/serve.toml")),
    ("@TRAINING@", include_str!("init/training.toml")),
];
/// What is of the trainer on a machine with devices.
const DEVICES: &str = "\
# Numbers of its devices: kept for it, though this version trains on the processor; default: none
gpus = [6, 7]
# Folder of the start model; default: that of the engine, where the loop knows it
model = @MODEL@
";

/// Write a configuration file to begin with: `oclaw.toml`
///
/// Every setting that a loop is likely to need stands there, with its unit and its
/// default in the line above. Nothing is asked and nothing overwritten: a file that
/// is there stays, with exit code 2.
///
/// `--kind embedded` is one machine without a GPU, `node` one with eight (SGLang on
/// four of them for the answers, on two for the judge; two for the trainer),
/// `gateway` one whose judge is an OpenAI-compatible address.
///
///     oclaw init --model models/SmolLM2-135M-Instruct
///     oclaw check
///     oclaw loop oclaw.toml
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// Folder that gets the file, and later the run
    #[arg(value_name = "DIR", default_value = ".")]
    folder: PathBuf,
    /// What the loop runs on
    #[arg(long, value_enum, value_name = "KIND", default_value_t = Kind::Embedded)]
    kind: Kind,
    /// Folder of the model that is to learn
    #[arg(long, value_name = "DIR", default_value = "models/SmolLM2-135M-Instruct")]
    model: PathBuf,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One machine, no GPU
    Embedded,
    /// Eight GPUs, SGLang
    Node,
    /// One machine, a judge elsewhere
    Gateway,
}

impl Kind {
    fn template(self) -> &'static str {
        match self {
            Self::Embedded => include_str!("init/embedded.toml"),
            Self::Node => include_str!("init/node.toml"),
            Self::Gateway => include_str!("init/gateway.toml"),
        }
    }

    fn trainer(self) -> &'static str {
        match self {
            Self::Node => DEVICES,
            Self::Embedded | Self::Gateway => "",
        }
    }
}

/// Writes the file.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let Args { folder, kind, model } = args;
    let here = folder == Path::new(".");
    let path = if here { PathBuf::from(FILE) } else { folder.join(FILE) };
    let run = if here { PathBuf::from("run") } else { folder.join("run") };
    let text = text(kind, (&path, &run, &model))?;
    fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make the folder `{}`", folder.display()))?;
    write_new(&path, &text)?;
    let name = path.display();
    let missing = match model.join("config.json").is_file() {
        true => String::new(),
        false => format!("\nthere is no model in `{}` yet", model.display()),
    };
    context.say(format!(
        "wrote {name}{missing}\nnext: look it over, then `oclaw check {name}`, then `oclaw loop {name}`"
    ));
    Ok(Exit::Done)
}

/// Makes the text of a kind.
fn text(kind: Kind, (file, run, model): (&Path, &Path, &Path)) -> anyhow::Result<String> {
    let mut text = kind.template().to_owned();
    for (mark, part) in PARTS {
        text = text.replace(&format!("{mark}\n"), part).replace(mark, part);
    }
    text = text.replace("@TRAIN@", kind.trainer());
    text = text.replace("@FILE@", &file.display().to_string());
    for (mark, path) in [("@RUN@", run), ("@MODEL@", model)] {
        let path = path.to_str().ok_or_else(|| {
            Failure::usage(format!("`{}` cannot stand in a TOML file", path.display()))
        })?;
        // A text of JSON is one of TOML.
        text = text.replace(mark, &json!(path).to_string());
    }
    Ok(text)
}

fn write_new(path: &Path, text: &str) -> anyhow::Result<()> {
    let writing = || format!("cannot write `{}`", path.display());
    let mut file = match OpenOptions::new().write(true).create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let problem = format!("`{}` is there already, and stays as it is", path.display());
            return Err(Failure::usage(problem).hint("name another folder, or remove it").into());
        }
        opened => opened.with_context(writing)?,
    };
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    if written.is_err() {
        // A half file would be in the way of the next try.
        let _ = fs::remove_file(path);
    }
    written.with_context(writing)
}
