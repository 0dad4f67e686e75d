//! `oclaw convert`: a model file from elsewhere becomes a Hugging Face folder.

use std::path::PathBuf;

use oclaw::gguf;

use crate::common::Context;
use crate::report::Exit;

/// Make a Hugging Face folder of a GGUF file, or of an adapter
///
/// Reads the weights (F32, F16, BF16, Q8_0, Q4_1, Q4_0) of a Llama-family model
/// and writes model.safetensors, the model's settings and its tokenizer, all
/// from the one file. The folder is written aside and renamed.
///
/// Quantised weights are rounded to bf16 unless `--dtype f32` is given.
///
/// With `--merge` the input is a folder of a LoRA adapter as the `peft` library
/// writes it (`adapter/` in a policy of `oclaw train --lora-rank`): its part is added
/// to the model that it names, or to `--base`. The sums are f32, and written so
/// unless `--dtype bf16` is given: bf16 rounds much of what an adapter learned away.
///
///     oclaw convert SmolLM2-135M-Instruct.Q4_1.gguf -o models/SmolLM2-135M-Instruct
///     oclaw convert --merge policy/latest/adapter -o models/mine
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// The GGUF file, or with --merge the adapter's folder
    #[arg(value_name = "MODEL.gguf")]
    input: PathBuf,
    /// Folder to write
    #[arg(short, long, value_name = "FOLDER")]
    output: PathBuf,
    /// Type of the weights written [default: bf16; f32 with --merge]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Dtype>,
    /// Add an adapter to its model
    #[arg(long)]
    merge: bool,
    /// Folder of the model that the adapter is for [default: the one it names]
    #[arg(long, value_name = "DIR", requires = "merge")]
    base: Option<PathBuf>,
    /// Replace the folder if it exists
    #[arg(long)]
    replace: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Dtype {
    Bf16,
    F32,
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    if args.merge {
        return merge(&args, context);
    }
    let dtype = match args.dtype {
        Some(Dtype::Bf16) | None => gguf::Dtype::Bf16,
        Some(Dtype::F32) => gguf::Dtype::F32,
    };
    let options = gguf::Options { dtype, replace: args.replace };
    let converted = gguf::convert(&args.input, &args.output, &options)?;
    context.say(format_args!(
        "{}: {} tensors, {:.1} million weights",
        args.output.display(),
        converted.tensors,
        converted.weights as f64 / 1e6
    ));
    Ok(Exit::Done)
}

/// Adds an adapter to its model.
#[cfg(feature = "torch")]
fn merge(args: &Args, context: &Context) -> anyhow::Result<Exit> {
    use oclaw::model;

    let out = &args.output;
    if out.symlink_metadata().is_ok() && !args.replace {
        return Err(gguf::Error::Exists { folder: out.clone() }.into());
    }
    let (named, lora) = model::adapter::settings(&args.input)?;
    let base = args.base.as_ref().unwrap_or(&named);
    let dtype = match args.dtype {
        Some(Dtype::Bf16) => model::Dtype::Bf16,
        Some(Dtype::F32) | None => model::Dtype::F32,
    };
    let failed = |source| model::Error::Write { path: out.clone(), source };
    gguf::whole_folder(out, failed, |aside| {
        model::adapter::merge(&args.input, base, aside, Some(dtype))
    })?;
    context.say(format_args!("{}: `{}` with {lora}, {dtype}", out.display(), base.display()));
    Ok(Exit::Done)
}

/// Says what this build lacks.
#[cfg(not(feature = "torch"))]
fn merge(_: &Args, _: &Context) -> anyhow::Result<Exit> {
    Err(crate::common::needs_torch("`oclaw convert --merge`"))
}
