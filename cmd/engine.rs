//! `oclaw engine`.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::common::Context;
use crate::embedded::DeviceName;
use crate::report::Exit;
use crate::units;

/// Serve a model over HTTP, speaking SGLang's dialect.
///
/// Chat completions (streamed or not), `/v1/completions`, `/generate` (sample and
/// score), `/tokenize`, health, `/metrics`, weights, adapters (LoRA), pause. Ids and log-probs are those that were
/// sampled: log-probs are taken after the temperature and before any truncation;
/// greedy answers (temperature 0) have those of temperature 1.
///
/// A member of a request that would change the answer and that the engine lacks
/// (`response_format`, `logit_bias`, penalties, grammars) is refused by name, unless
/// its value changes nothing. Unknown members are ignored, as SGLang does.
/// `--capabilities` lists what becomes of each.
///
/// What a model thinks between `<think>` and `</think>` is `reasoning_content`, apart
/// from the answer, if its vocabulary has these marks; `separate_reasoning: false` in a
/// request leaves it in the text. Tool calls are read in the forms of Qwen and Hermes
/// (`<tool_call>`) and of Llama (a JSON object that begins the answer).
///
/// `/load_lora_adapter` puts an adapter beside the model; a request chooses one by
/// `lora_path`, or by `model: "NAME"` or `"MODEL:NAME"`. Several may be in use at once,
/// and an answer keeps its adapter to its end.
///
/// Keys and values of all running answers take no more than `--kv-memory`: an answer
/// that could never fit is refused with the numbers, one that does not fit now waits, and
/// the newest of the running ones waits again if they outgrow it. Requests that come
/// while `--max-running` and `--max-waiting` answers are asked for get a 503 with
/// `Retry-After`.
///
/// A prompt is computed in pieces of `--prefill-chunk` tokens, each between two tokens of
/// the answers that are running (in larger ones while none is), and so is what is only
/// scored.
///
/// Keys and values of prompts and answers are kept within `--prefix-cache`, besides
/// `--kv-memory`: a later request that begins alike, such as the next turn of a session or
/// another vote on a prompt, is computed from where it differs, in whole blocks of 64
/// tokens. What was not used for longest goes first; new weights, an adapter that is
/// unloaded (for what it made) and `/flush_cache` drop it. Answers to one prompt that are
/// asked for together share it in any case. An answer tells how many tokens of its prompt
/// it found as `cached_tokens` in `meta_info` and in `usage.prompt_tokens_details`,
/// `/metrics` the sum. Scores never use it: they are the trainer's numbers to the bit.
///
/// On a processor with a matrix unit for bf16 (AMX) tokens are generated with it from
/// matrices in bf16. With `--dtype f32` those that the checkpoint has in bf16 stay as they
/// are, the same numbers in half the memory, and prompts go through the unit as well: the
/// activations are split into three parts that make up each f32 number.
///
/// What others on the network can reach needs a key, from `--key-file` or
/// `OCLAW_ENGINE_KEY`. SIGTERM or SIGINT ends it after the running answers.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Folder of the model
    #[arg(long, value_name = "DIR", required_unless_present = "capabilities")]
    model: Option<PathBuf>,
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:30001")]
    listen: SocketAddr,
    /// Type of the products: auto, f32 or bf16
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = ["auto", "f32", "bf16"])]
    dtype: String,
    /// Where the weights live and all is computed: cpu, or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: DeviceName,
    /// File with the key that requests must carry
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Answers that are generated together
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    max_running: u32,
    /// Answers that may wait for their turn, besides
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    max_waiting: u32,
    /// Memory for keys and values of the running answers [default: 2GiB, or one whole context if that is more]
    #[arg(long, value_name = "SIZE", value_parser = units::bytes)]
    kv_memory: Option<usize>,
    /// Tokens of a prompt that are computed between two tokens of the running answers
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prefill_chunk: u32,
    /// Memory for keys and values that later requests may begin with; 0 keeps none
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = units::bytes)]
    prefix_cache: usize,
    /// Version of the weights at the start [default: 0]
    #[arg(long, value_name = "VERSION")]
    weight_version: Option<String>,
    /// Folder of policies: begin with the newest, at its number as version, if there is one;
    /// `--model` is the model to begin with else, and gives the name
    #[arg(long, value_name = "DIR", conflicts_with = "weight_version")]
    policies: Option<PathBuf>,
    /// Print what becomes of each field of a request, and stop
    #[arg(long)]
    capabilities: bool,
    /// Print that as JSON
    #[arg(long, requires = "capabilities")]
    json: bool,
}

/// Serves until a signal.
#[cfg(feature = "torch")]
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    use oclaw::serving::Options;

    let Some(model) = args.model.filter(|_| !args.capabilities) else {
        return print_capabilities(args.json);
    };
    let policy = match &args.policies {
        Some(policies) => newest(policies, args.weight_version.is_some(), context)?,
        None => None,
    };
    let options = Options {
        model,
        listen: args.listen,
        dtype: args.dtype.parse().ok(),
        device: args.device.into(),
        key: crate::embedded::key(&context.command, args.key_file.as_deref())?,
        max_running: args.max_running as usize,
        max_waiting: args.max_waiting as usize,
        kv_memory: args.kv_memory,
        prefill_chunk: args.prefill_chunk as usize,
        prefix_cache: args.prefix_cache,
        seed: context.seed,
        weight_version: args.weight_version.unwrap_or_else(|| "0".to_owned()),
        policy,
    };
    context.block_on(async {
        let running = crate::embedded::start(options).await?;
        // Until now there was nothing to drain: a signal ended the process.
        let mut stop = context.drain_on_signal();
        context.say(format!("serving `{}` at {}", running.name(), running.url()));
        // A sender that is gone means stop as well.
        let _ = stop.wait_for(|stop| *stop).await;
        context.say("ending: running answers may finish, a second signal cuts them off");
        running.shutdown().await;
        Ok(Exit::Done)
    })
}

/// Finds the policy to begin with, if there is one: its folder and its version. One that
/// cannot be served would hold up every start: it is said, and the model is served.
#[cfg(feature = "torch")]
fn newest(
    policies: &std::path::Path,
    versioned: bool,
    context: &Context,
) -> anyhow::Result<Option<(PathBuf, String)>> {
    use oclaw::store::Address;
    use oclaw::sync::Policy;

    use crate::report::Failure;

    // The parser does not see it where both come from the configuration file.
    if versioned {
        let problem = "`--policies` has versions of its own: leave `--weight-version` out";
        return Err(Failure::usage(problem).into());
    }
    if Address::is(policies) {
        let problem = "`--policies` is to be a folder of a file system, not of an object store";
        return Err(Failure::usage(problem).into());
    }
    let latest = policies.join("latest");
    // A link to what is gone is there all the same.
    let found = latest.symlink_metadata();
    if found.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        return Ok(None);
    }
    let found = Policy::resolve(&latest, None).map_err(|error| error.to_string());
    let wrong = match found {
        Ok(Policy { folder, version, adapter: None }) => return Ok(Some((folder, version))),
        Ok(Policy { folder, .. }) => {
            format!("the policy `{}` is an adapter without a model", folder.display())
        }
        Err(error) => error,
    };
    context.say(format!("warning: {wrong}: beginning with `--model` instead"));
    Ok(None)
}

/// Prints the fields of requests.
#[cfg(feature = "torch")]
fn print_capabilities(json: bool) -> anyhow::Result<Exit> {
    use std::io::Write;

    use comfy_table::Table;
    use comfy_table::presets::NOTHING;

    use crate::common::Printing;

    let all = oclaw::serving::capabilities();
    let text = match json {
        true => serde_json::to_string_pretty(&all)?,
        false => {
            let mut table = Table::new();
            table.load_style(NOTHING).set_header(["route", "field", "what becomes of it", "why"]);
            for one in &all {
                table.add_row([one.route, one.field, one.standing.as_str(), one.note]);
            }
            table.trim_fmt()
        }
    };
    writeln!(std::io::stdout(), "{text}").printed()?;
    Ok(Exit::Done)
}

/// Says what this build lacks.
#[cfg(not(feature = "torch"))]
pub(crate) fn run(_: Args, _: &Context) -> anyhow::Result<Exit> {
    Err(crate::common::needs_torch("`oclaw engine`"))
}
