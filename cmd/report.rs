//! How a run ends: the kind of an error, its message, its hint, the exit code.
//! The only file that prints errors.

use std::io::{self, Write};

use oclaw::cache;
use oclaw::engine;
use oclaw::gguf;
use oclaw::journal;
use oclaw::judge;
#[cfg(feature = "torch")]
use oclaw::model;
use oclaw::pipeline;
use oclaw::privacy;
use oclaw::proxy;
#[cfg(feature = "torch")]
use oclaw::serving;
use oclaw::simulate;
use oclaw::stage;
use oclaw::store;
use oclaw::sync;
use oclaw::table;
use oclaw::template;
#[cfg(feature = "torch")]
use oclaw::train;

use crate::common::Printing as _;
use crate::visible::{visible, visible_lines};

/// How a subcommand that did not fail ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done,
    /// Finished, but not "all well": an annotation was tried and failed, a
    /// budget ended it, `lint` has findings, `replay` differs, `gate` rejects.
    Partial,
}

/// What went wrong, as far as a script has to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Wrong usage or settings: exit code 2.
    Usage,
    /// Bad input, or the disk: exit code 1.
    Failed,
    /// The engine is not there or not able, after retries: exit code 4.
    Engine,
    /// The reader of our output went away, which is its right: exit code 0.
    BrokenPipe,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::BrokenPipe => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Engine => 4,
        }
    }
}

/// An error that a subcommand states itself.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    kind: Kind,
    message: String,
    hint: Option<String>,
}

impl Failure {
    /// Wrong usage or settings.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { kind: Kind::Usage, message: message.into(), hint: None }
    }

    /// Bad input, or the disk.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self { kind: Kind::Failed, message: message.into(), hint: None }
    }

    /// The engine is not there.
    pub(crate) fn engine(message: impl Into<String>) -> Self {
        Self { kind: Kind::Engine, message: message.into(), hint: None }
    }

    /// Adds what the reader can do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Finds the kind and the hint of an error by the library error in its chain.
fn classify(error: &anyhow::Error) -> (Kind, Option<String>) {
    for cause in error.chain() {
        if let Some(failure) = cause.downcast_ref::<Failure>() {
            return (failure.kind, failure.hint.clone());
        }
        if let Some(error) = cause.downcast_ref::<engine::Error>() {
            return of_engine(error);
        }
        if let Some(error) = cause.downcast_ref::<proxy::Error>() {
            return of_proxy(error);
        }
        #[cfg(feature = "torch")]
        if let Some(error) = cause.downcast_ref::<serving::Error>() {
            return of_serving(error);
        }
        #[cfg(feature = "torch")]
        if let Some(error) = cause.downcast_ref::<train::Error>() {
            return of_train(error);
        }
        if let Some(error) = cause.downcast_ref::<cache::Error>() {
            return of_cache(error);
        }
        if let Some(error) = cause.downcast_ref::<sync::Error>() {
            return of_sync(error);
        }
        if let Some(error) = cause.downcast_ref::<io::Error>()
            && error.kind() == io::ErrorKind::BrokenPipe
        {
            return (Kind::BrokenPipe, None);
        }
        if let Some(error) = cause.downcast_ref::<judge::Error>() {
            return of_judge(error);
        }
        if let Some(error) = cause.downcast_ref::<template::Error>() {
            return of_template(error);
        }
        if let Some(error) = cause.downcast_ref::<simulate::Error>() {
            return of_simulate(error);
        }
        if let Some(error) = cause.downcast_ref::<stage::Error>() {
            return of_stage(error);
        }
        if let Some(error) = cause.downcast_ref::<store::Error>() {
            return of_store(error);
        }
        if let Some(error) = cause.downcast_ref::<table::Error>() {
            return of_table(error);
        }
        if let Some(error) = cause.downcast_ref::<privacy::Error>() {
            return of_privacy(error);
        }
        if let Some(error) = cause.downcast_ref::<pipeline::Error>() {
            return of_pipeline(error);
        }
        if let Some(error) = cause.downcast_ref::<gguf::Error>() {
            return of_gguf(error);
        }
        #[cfg(feature = "torch")]
        if let Some(error) = cause.downcast_ref::<model::Error>() {
            return of_model(error);
        }
    }
    (Kind::Failed, None)
}

fn of_gguf(error: &gguf::Error) -> (Kind, Option<String>) {
    use gguf::Error;
    match error {
        Error::Exists { .. } => (Kind::Usage, Some("replace it by `--replace`".to_owned())),
        Error::Read { .. }
        | Error::Write { .. }
        | Error::Tensors(_)
        | Error::Malformed { .. }
        | Error::MissingKey { .. }
        | Error::Unsupported { .. }
        | Error::MissingTensor { .. }
        | Error::WrongShape { .. } => (Kind::Failed, None),
    }
}

#[cfg(feature = "torch")]
fn of_model(error: &model::Error) -> (Kind, Option<String>) {
    use model::Error;
    let hint = |text: &str| Some(text.to_owned());
    match error {
        Error::NoDevice { .. } => {
            (Kind::Usage, hint("this build of libtorch may be for the CPU only"))
        }
        Error::Sampling { .. } => (Kind::Usage, None),
        Error::NoWeights { .. } => (Kind::Failed, hint("a model is a Hugging Face folder")),
        Error::TokenOutOfRange { .. } => {
            (Kind::Failed, hint("were these ids made with this model's tokenizer?"))
        }
        Error::Read { .. }
        | Error::Write { .. }
        | Error::Config { .. }
        | Error::Unsupported { .. }
        | Error::Tensors(_)
        | Error::MissingTensor { .. }
        | Error::ExtraTensor { .. }
        | Error::WrongShape { .. }
        | Error::WrongType { .. }
        | Error::UntiedHead { .. }
        | Error::BrokenWeight { .. }
        | Error::NotFinite { .. }
        | Error::Torch(_) => (Kind::Failed, None),
    }
}

fn of_engine(error: &engine::Error) -> (Kind, Option<String>) {
    use engine::Error;
    let hint = |text: &str| Some(text.to_owned());
    match error {
        Error::Address { .. } => (Kind::Usage, hint("give it as `http://HOST:PORT`")),
        Error::Unauthorized { .. } => {
            (Kind::Usage, hint("give the key by `--engine-key-file` or the environment"))
        }
        Error::SeveralModels { .. } => (Kind::Usage, hint("choose one by `--engine-model`")),
        Error::NoModel { .. } => (Kind::Usage, hint("name it by `--engine-model`")),
        Error::Unlike { .. } => (
            Kind::Usage,
            hint(
                "servers that share the calls must serve one model: choose it by `--engine-model`",
            ),
        ),
        Error::WebPage { .. } => (Kind::Usage, hint("the address may lack `/v1` or a prefix")),
        Error::Foreign { .. } => (
            Kind::Usage,
            hint("is the address right? one that is not to be probed is `openai+http://…`"),
        ),
        Error::Client { .. } | Error::Unsupported { .. } => (Kind::Usage, None),
        Error::Unreachable { .. } => (Kind::Engine, hint("is the engine running there?")),
        Error::Failing { .. }
        | Error::Timeout { .. }
        | Error::Refused { .. }
        | Error::Malformed { .. }
        | Error::NotListed { .. } => (Kind::Engine, None),
        Error::Status { .. } if error.is_transient() => (Kind::Engine, None),
        Error::Status { .. } => (Kind::Failed, None),
    }
}

fn of_simulate(error: &simulate::Error) -> (Kind, Option<String>) {
    use simulate::Error;
    match error {
        Error::Persona { .. } | Error::Questions { .. } => (Kind::Usage, None),
        Error::Untold { .. } => (Kind::Failed, None),
        Error::Wordless { .. } => (Kind::Engine, None),
        Error::Engine(error) => of_engine(error),
        Error::Template(error) => of_template(error),
    }
}

fn of_proxy(error: &proxy::Error) -> (Kind, Option<String>) {
    use journal::Error as Journal;
    use proxy::Error;
    let hint = |text: &str| Some(text.to_owned());
    match error {
        Error::Bind { .. } => (Kind::Failed, hint("choose another address by `--listen`")),
        Error::Open { .. } => (Kind::Usage, hint("give the clients' keys by `--key-file`")),
        Error::Client { .. } => (Kind::Usage, None),
        Error::NoEngine => (Kind::Usage, hint("give `--engine URL` or `--model DIR`")),
        Error::Journal(Journal::Locked { .. }) => {
            (Kind::Failed, hint("one `oclaw serve` per spool folder; choose another by `--spool`"))
        }
        Error::Journal(Journal::Lost { .. }) => {
            (Kind::Failed, hint("make room on the disk before the next start"))
        }
        Error::Journal(
            Journal::Folder { .. } | Journal::Shard { .. } | Journal::Stopped { .. },
        ) => (Kind::Failed, None),
    }
}

#[cfg(feature = "torch")]
fn of_serving(error: &serving::Error) -> (Kind, Option<String>) {
    use serving::Error;
    match error {
        Error::OpenToAll { .. } => {
            (Kind::Usage, Some("give a key by `--key-file`, or listen on 127.0.0.1".to_owned()))
        }
        Error::Listen { .. } => {
            (Kind::Failed, Some("choose another address by `--listen`".to_owned()))
        }
        Error::NoFolder { .. } | Error::Model(_) | Error::Template(_) | Error::Thread(_) => {
            (Kind::Failed, None)
        }
    }
}

#[cfg(feature = "torch")]
fn of_train(error: &train::Error) -> (Kind, Option<String>) {
    use train::Error;
    match error {
        Error::Model(error) => of_model(error),
        Error::NoModel { .. } => hinted(Kind::Usage, "name the start model by `--model`"),
        Error::OtherForm { .. } => {
            hinted(Kind::Usage, "give the `--lora` flags that it began with, or another `--out`")
        }
        Error::OtherBase { .. } => {
            hinted(Kind::Usage, "leave `--model` out to resume, or start in another `--out`")
        }
        Error::Locked { .. } => hinted(Kind::Failed, "wait for it, or train in another `--out`"),
        Error::NotFinite { .. } => hinted(Kind::Failed, "lower `--lr`, or look at the batch"),
        Error::Ruined { .. } => {
            hinted(Kind::Failed, "lower `--lr`; a tenth of it is a good next try")
        }
        Error::Read { .. }
        | Error::Write { .. }
        | Error::Tensors(_)
        | Error::Latest { .. }
        | Error::Record { .. }
        | Error::State { .. }
        | Error::Ledger { .. } => (Kind::Failed, None),
    }
}

fn of_sync(error: &sync::Error) -> (Kind, Option<String>) {
    use sync::Error;
    match error {
        Error::Policy { .. }
        | Error::Lock { .. }
        | Error::Rollback { .. }
        | Error::Publish { .. } => (Kind::Failed, None),
        Error::Oldest { base, .. } => {
            let base = base.as_ref().map_or("BASE".to_owned(), |base| base.display().to_string());
            let hint = format!(
                "`oclaw sync-weights {base} --version 0 --engine URL` gives the servers the model \
                 it began from; `latest` stays, so end `sync-weights --follow` first"
            );
            (Kind::Failed, Some(hint))
        }
        Error::Gate { .. } => {
            hinted(Kind::Usage, "`oclaw gate --candidate POLICY` writes a receipt if it passes")
        }
        Error::Training { .. } => hinted(
            Kind::Failed,
            "end it first: its next policy would come of the one rolled back; \
             to serve an old one at once, name its folder without `--rollback`",
        ),
        Error::Version { .. } => (Kind::Usage, Some("give it by `--version`".to_owned())),
        Error::Locked { .. } => (Kind::Failed, Some("wait longer by `--wait`".to_owned())),
        Error::OtherVersion { .. } => (Kind::Engine, None),
        Error::OtherAdapter { .. } => {
            hinted(Kind::Engine, "replace it by `--force`, or name another `--version`")
        }
        Error::Engine {
            step: sync::Step::Announce,
            source: source @ engine::Error::Unauthorized { .. },
        } => {
            let how = "give the key of `oclaw serve` by `--proxy-key-file` or \
                       `OCLAW_SYNC_WEIGHTS_PROXY_KEY`";
            (of_engine(source).0, Some(how.to_owned()))
        }
        Error::Engine { step: sync::Step::Flush | sync::Step::Continue, source } => {
            // It carries the version: the next push would leave it alone.
            (of_engine(source).0, Some("push it again with `--force`".to_owned()))
        }
        Error::Engine { source, .. } => of_engine(source),
    }
}

fn of_pipeline(error: &pipeline::Error) -> (Kind, Option<String>) {
    use pipeline::Error;
    match error {
        Error::Syntax { .. } | Error::Plan { .. } | Error::Wanting { .. } => (Kind::Usage, None),
        Error::Start { .. } | Error::File { .. } => (Kind::Failed, None),
        Error::Scheduler { .. } => (Kind::Engine, None),
        Error::Store(error) => of_store(error),
        Error::Command { .. } => hinted(
            Kind::Engine,
            "start the loop where the scheduler's commands are, or `[scheduler] kind = \"local\"`",
        ),
    }
}

fn of_cache(error: &cache::Error) -> (Kind, Option<String>) {
    use cache::Error;
    match error {
        Error::Damaged { .. } => {
            hinted(Kind::Failed, "remove it, or run a stage with it, which sets it aside")
        }
        Error::Foreign { .. } => {
            hinted(Kind::Usage, "name another file by `--cache`; this one is left as it is")
        }
        Error::Newer { .. } => hinted(Kind::Failed, "use a newer oclaw, or another `--cache`"),
        Error::Unusable { .. } => (Kind::Failed, None),
    }
}

fn of_judge(error: &judge::Error) -> (Kind, Option<String>) {
    use judge::Error;
    match error {
        Error::Rules { .. } => hinted(Kind::Usage, "`oclaw judge --show-rules` prints an example"),
        Error::Prompt { .. } => {
            hinted(Kind::Usage, "`--show-prompt` prints the built-in one, which says how to answer")
        }
        Error::Turn { .. } => (Kind::Failed, None),
    }
}

fn of_template(error: &template::Error) -> (Kind, Option<String>) {
    use template::Error;
    match error {
        Error::NoTemplate { .. } => hinted(Kind::Failed, "is it a chat model's folder?"),
        Error::Read { .. }
        | Error::Malformed { .. }
        | Error::Syntax { .. }
        | Error::Render { .. }
        | Error::ToolArguments { .. }
        | Error::UnsupportedContent { .. }
        | Error::NotAMessage { .. }
        | Error::Reserved { .. }
        | Error::Tokenize { .. }
        | Error::UnknownId { .. } => (Kind::Failed, None),
    }
}

fn of_stage(error: &stage::Error) -> (Kind, Option<String>) {
    match error {
        stage::Error::Table(error) => of_table(error),
        stage::Error::ColumnExists { .. } => hinted(
            Kind::Usage,
            "`--replace` computes its columns again, `--fill` only what is missing",
        ),
        stage::Error::ColumnMissing { .. } | stage::Error::Note { .. } => (Kind::Failed, None),
    }
}

fn of_store(error: &store::Error) -> (Kind, Option<String>) {
    use store::Error;
    match error {
        Error::Address { .. } => hinted(Kind::Usage, "give it as `s3://BUCKET/FOLDER`"),
        Error::Refused { problem, .. } if problem.contains("NoSuchBucket") => {
            hinted(Kind::Usage, "make the bucket, or name one that is there")
        }
        Error::Client { .. } | Error::Refused { .. } => hinted(
            Kind::Usage,
            "keys, region and endpoint come from the environment: AWS_…, GOOGLE_…, AZURE_…",
        ),
        Error::Away { .. } => (Kind::Engine, None),
        Error::NotThere { .. }
        | Error::Exists { .. }
        | Error::Changed { .. }
        | Error::File { .. }
        | Error::Policy { .. } => (Kind::Failed, None),
    }
}

fn of_privacy(error: &privacy::Error) -> (Kind, Option<String>) {
    use privacy::Error;
    match error {
        Error::Table(error) => of_table(error),
        Error::Pattern { .. } | Error::Patterns { .. } => (Kind::Usage, None),
        Error::Column { .. } => hinted(Kind::Failed, "drop the column first"),
        Error::Read { .. } | Error::Write { .. } | Error::Ledger { .. } | Error::Search { .. } => {
            (Kind::Failed, None)
        }
    }
}

fn of_table(error: &table::Error) -> (Kind, Option<String>) {
    use table::Error;
    match error {
        Error::Write { source, .. } if source.kind() == io::ErrorKind::BrokenPipe => {
            (Kind::BrokenPipe, None)
        }
        Error::StdinTerminal => hinted(Kind::Usage, "name a file or folder, or pipe a table in"),
        Error::StdoutTerminal => hinted(
            Kind::Usage,
            "write to a file with `-o FILE`, pipe on, or look at it with `| oclaw view`",
        ),
        Error::StdinTwice => (Kind::Usage, None),
        Error::InUse { .. } => {
            hinted(Kind::Failed, "one writer per folder: is another one running?")
        }
        Error::NewerSchema { .. } => hinted(Kind::Failed, "read it with a newer oclaw"),
        Error::Codec { .. } => {
            hinted(Kind::Failed, "write it with zstd, lz4, snappy or no compression")
        }
        Error::Cut { .. } => {
            hinted(Kind::Failed, "the stage that wrote it did not finish: look at its message")
        }
        Error::StillOpen { .. } => hinted(
            Kind::Failed,
            "`oclaw serve` writes a turn when the next request or `--session-idle` closes it; \
             `--flush-open` writes all of them at its end",
        ),
        Error::Read { .. }
        | Error::NothingThere { .. }
        | Error::Empty { .. }
        | Error::Foreign { .. }
        | Error::Damaged { .. }
        | Error::OddSchema { .. }
        | Error::Schema { .. }
        | Error::Clash { .. }
        | Error::Write { .. }
        | Error::Encode { .. } => (Kind::Failed, None),
    }
}

fn hinted(kind: Kind, hint: &str) -> (Kind, Option<String>) {
    (kind, Some(hint.to_owned()))
}

/// Returns whether an error says that a server is away, or too busy, just now.
pub(crate) fn is_away(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(engine::Error::is_transient)
        || is_store_away(error)
}

/// Returns whether an error says that an object store is away just now.
pub(crate) fn is_store_away(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(store::Error::is_transient)
}

/// Returns whether an object store will not do it, however long one waits.
pub(crate) fn is_store_refusal(error: &anyhow::Error) -> bool {
    let refusal = |error: &store::Error| !error.is_transient();
    error.chain().filter_map(|cause| cause.downcast_ref()).any(refusal)
}

/// Returns whether only the user can put an error right.
pub(crate) fn is_usage(error: &anyhow::Error) -> bool {
    classify(error).0 == Kind::Usage
}

/// Returns the messages of an error and its causes, each once: some errors tell
/// their cause in their own message.
pub(crate) fn told(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = match cause.downcast_ref::<judge::Error>() {
            // It shows the line of a file of rules.
            Some(judge::Error::Rules { .. }) => visible_lines(&cause.to_string()),
            _ => visible(&cause.to_string()),
        };
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// Returns what an error says, what can be done about it, and its kind.
pub(crate) fn verdict(error: &anyhow::Error) -> (String, Option<String>, Kind) {
    let (kind, hint) = classify(error);
    (told(error), hint, kind)
}

/// Prints an error and returns its exit code.
pub(crate) fn error(command: &str, error: &anyhow::Error) -> u8 {
    let (kind, hint) = classify(error);
    if kind != Kind::BrokenPipe {
        let name = format!("oclaw {command}");
        let mut text = format!("{}: {}\n", name.trim_end(), told(error));
        if let Some(hint) = hint {
            text.push_str(&format!("hint: {}\n", visible(&hint)));
        }
        // Nobody is left to tell if stderr is closed.
        let _ = io::stderr().write_all(text.as_bytes());
    }
    kind.code()
}

/// Prints a command-line error, or the help that was asked for.
pub(crate) fn usage(problem: &clap::Error) -> u8 {
    let printed = problem.print().and_then(|()| io::stdout().flush());
    match (problem.use_stderr(), printed.printed()) {
        (true, _) => Kind::Usage.code(),
        (false, Ok(())) => 0,
        (false, Err(failure)) => error("", &failure),
    }
}

impl Exit {
    /// Returns the exit code.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Partial => 3,
        }
    }
}

/// Ends the process with an exit code.
///
/// Other threads may be computing (a scorer whose reader went away, an engine
/// on the second signal). libtorch's own clean-up at exit would take the ground
/// from under them and end in a crash instead of this code, so it does not run:
/// files are finished or discarded by now, and nothing else needs it.
pub(crate) fn leave(code: u8) -> ! {
    let _ = io::stdout().flush();
    let _ = io::stderr().flush();
    #[expect(unsafe_code, reason = "std has no exit without the clean-up of C++ libraries")]
    // SAFETY: `_exit` only ends the process.
    unsafe {
        libc::_exit(i32::from(code))
    }
}
