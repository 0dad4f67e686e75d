//! `oclaw convert`: a model file from elsewhere becomes a Hugging Face folder.

use std::path::PathBuf;

use oclaw::gguf;

use crate::common::Context;
use crate::report::Exit;

/// Make a Hugging Face folder of a GGUF file
///
/// Reads the weights (F32, F16, BF16, Q8_0, Q4_1, Q4_0) of a Llama-family model
/// and writes model.safetensors, the model's settings and its tokenizer, all
/// from the one file. The folder is written aside and renamed.
///
/// Quantised weights are rounded to bf16 unless `--dtype f32` is given.
///
///     oclaw convert SmolLM2-135M-Instruct.Q4_1.gguf -o models/SmolLM2-135M-Instruct
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// The GGUF file
    #[arg(value_name = "MODEL.gguf")]
    input: PathBuf,
    /// Folder to write
    #[arg(short, long, value_name = "FOLDER")]
    output: PathBuf,
    /// Type of the weights written
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    dtype: Dtype,
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
    let dtype = match args.dtype {
        Dtype::Bf16 => gguf::Dtype::Bf16,
        Dtype::F32 => gguf::Dtype::F32,
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
