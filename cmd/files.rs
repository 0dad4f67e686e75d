//! The files of a stage: the same arguments in every one of them.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use oclaw::stage::{Existing, Output, Plan};
use oclaw::table::{Format, Source, StageLine, Target, aside_of};
use oclaw::trajectory::Writer;
use sha2::{Digest, Sha256};
use tempfile::TempPath;

use crate::common::Context;
use crate::follow::{FollowArgs, Route};
use crate::report::Failure;
use crate::stores::{self, Here};

/// What a command reads.
#[derive(clap::Args, Debug)]
pub(crate) struct Inputs {
    /// Tables: files, spool folders, patterns, s3://…; `-` or nothing is standard input
    #[arg(value_name = "IN")]
    pub(crate) inputs: Vec<PathBuf>,
}

impl Inputs {
    /// Opens the tables.
    pub(crate) fn open(&self, context: &Context) -> anyhow::Result<Source> {
        Here::bring(&self.inputs, context)?.open(context)
    }
}

/// What a stage reads and writes.
#[derive(clap::Args, Debug)]
pub(crate) struct Files {
    #[command(flatten)]
    pub(crate) inputs: Inputs,
    /// File to write, whole or not at all [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Format of the output [default: Parquet for files, Arrow IPC for pipes]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<StageFormat>,
    /// Compute this stage's columns again where they are there already
    #[arg(long)]
    pub(crate) replace: bool,
    /// Compute only the rows that have no note yet, or whose note failed
    #[arg(long, conflicts_with = "replace")]
    pub(crate) fill: bool,
    #[command(flatten)]
    pub(crate) following: FollowArgs,
}

/// A format, as it is typed.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FormatName {
    /// Parquet
    Parquet,
    /// Arrow IPC stream
    Ipc,
}

/// A format of a stage's output, as it is typed.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StageFormat {
    /// Parquet
    Parquet,
    /// Arrow IPC stream
    Ipc,
    /// Comma-separated values, of what is no table of turns
    #[value(hide = true)]
    Csv,
    /// JSON, of what is no table of turns
    #[value(hide = true)]
    Json,
}

impl Files {
    /// Opens the tables, once it is known that the result has somewhere to go:
    /// before anybody is asked, a model is loaded or a bar is drawn.
    pub(crate) fn open(&self, context: &Context) -> anyhow::Result<Source> {
        if let Some(StageFormat::Csv | StageFormat::Json) = self.format {
            return Err(Failure::usage("a table of turns is Parquet or Arrow IPC")
                .hint("`oclaw view` and `oclaw export` print turns")
                .into());
        }
        if let Some(output) = &self.output {
            let what = "it takes shards of `--follow`";
            stores::refuse(output, what, "write a file, and copy it when it is whole")?;
        }
        self.target().check()?;
        self.inputs.open(context)
    }

    /// Opens the tables of a run that writes none.
    pub(crate) fn open_to_look(&self, context: &Context) -> anyhow::Result<Source> {
        self.check_dry_run()?;
        self.inputs.open(context)
    }

    fn target(&self) -> Target {
        match &self.output {
            Some(path) if path.as_os_str() != "-" => Target::Path(path.clone()),
            _ => Target::Stdout,
        }
    }

    /// Returns where the table goes.
    pub(crate) fn output(&self) -> Output {
        let target = self.target();
        let format = self.format.and_then(|format| match format {
            StageFormat::Parquet => Some(Format::Parquet),
            StageFormat::Ipc => Some(Format::Ipc),
            StageFormat::Csv | StageFormat::Json => None,
        });
        Output { target, format }
    }

    /// Returns the way from a followed folder to the one of the results, if a folder
    /// is followed.
    pub(crate) fn route<'a>(&'a self, context: &'a Context) -> anyhow::Result<Option<Route<'a>>> {
        let Some(input) = self.following.folder()? else { return Ok(None) };
        let refuse = |problem: &str, hint: &str| Err(Failure::usage(problem).hint(hint).into());
        if !self.inputs.inputs.is_empty() {
            return refuse(
                "`--follow` reads one folder and nothing beside it",
                "leave the inputs out, or leave `--follow` out",
            );
        }
        if self.replace {
            return refuse(
                "`--follow` does each shard once: there is nothing to `--replace`",
                "follow the folder of the stage before, into a new folder",
            );
        }
        if self.format.is_some_and(|format| format != StageFormat::Parquet) {
            return refuse("`--follow` writes Parquet only", "leave `--format` out");
        }
        match &self.output {
            Some(output) if output.as_os_str() != "-" => {
                Route::open(&self.following, context, input, output).map(Some)
            }
            _ => refuse(
                "`--follow` writes a shard for each shard, not to standard output",
                "name the folder of the results by `-o FOLDER`",
            ),
        }
    }

    /// Errors if a folder is followed while only a forecast is wanted.
    fn check_dry_run(&self) -> Result<(), Failure> {
        match self.following.follow {
            Some(_) => Err(Failure::usage("`--dry-run` follows no folder")
                .hint("name the folder as the input to hear of the shards that are there")),
            None => Ok(()),
        }
    }

    /// Returns the plan of a stage, which its caller may refine.
    pub(crate) fn plan(
        &self,
        context: &Context,
        writer: Writer,
        source: &Source,
    ) -> anyhow::Result<Plan> {
        let existing = match (self.replace, self.fill) {
            (true, _) => Existing::Replace,
            (_, true) => Existing::Fill,
            _ => Existing::Refuse,
        };
        let line = stage_line(context, source)?;
        Ok(Plan { existing, line, ..Plan::new(writer) })
    }
}

/// Returns what a file shall say about this run, unless `--no-provenance`.
pub(crate) fn stage_line(context: &Context, source: &Source) -> anyhow::Result<Option<StageLine>> {
    if !context.provenance {
        return Ok(None);
    }
    let mut inputs = Vec::new();
    for (name, path) in source.places() {
        inputs.push(match path {
            Some(path) => format!("{name} {}", hash(path)?),
            None => name.to_owned(),
        });
    }
    Ok(stage_line_of(context, inputs))
}

/// Returns what a file shall say about a run with some inputs, unless
/// `--no-provenance`.
pub(crate) fn stage_line_of(context: &Context, inputs: Vec<String>) -> Option<StageLine> {
    context.provenance.then(|| StageLine {
        command: context.command.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        argv: std::env::args_os().skip(1).map(|word| told(&word.to_string_lossy())).collect(),
        seed: Some(context.seed),
        inputs,
        usage: None,
    })
}

/// Returns a word of the command line as a file or a table may carry it: of an address
/// neither a password nor what follows a `?`, which may be a signature.
pub(crate) fn told(word: &str) -> String {
    let Some((scheme, rest)) = word.split_once("://") else {
        return word.to_owned();
    };
    let host = rest.find(['/', '?']).unwrap_or(rest.len());
    let rest = match rest[..host].rfind('@') {
        Some(at) => format!("…{}", &rest[at..]),
        None => rest.to_owned(),
    };
    match rest.split_once('?') {
        Some((plain, _)) => format!("{scheme}://{plain}?…"),
        None => format!("{scheme}://{rest}"),
    }
}

/// Returns the SHA-256 of a file's bytes.
pub(crate) fn hash(path: &Path) -> anyhow::Result<String> {
    let reading = || format!("cannot read `{}`", path.display());
    let mut file = File::open(path).with_context(reading)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer).with_context(reading)? {
            0 => break,
            count => digest.update(&buffer[..count]),
        }
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A file other than a table, being written. It gets its name when it is whole;
/// dropped before [`Aside::finish`], it leaves nothing.
pub(crate) struct Aside {
    out: BufWriter<File>,
    /// What it was called for.
    path: PathBuf,
    /// The unfinished file, and the one that it becomes. Nothing for what is no plain
    /// file (a pipe, `/dev/null`): that cannot be replaced and is written to directly.
    place: Option<(TempPath, PathBuf)>,
}

impl Aside {
    /// Starts a file beside the one that it becomes.
    pub(crate) fn create(path: &Path) -> anyhow::Result<Self> {
        let writing = || format!("cannot write `{}`", path.display());
        let target = match fs::metadata(path) {
            Ok(there) if there.is_dir() => {
                return Err(io::Error::from(io::ErrorKind::IsADirectory)).with_context(writing);
            }
            Ok(there) if !there.is_file() => {
                let file = File::options().write(true).open(path).with_context(writing)?;
                return Ok(Self { out: BufWriter::new(file), path: path.to_owned(), place: None });
            }
            // A link stays a link: what it points to is replaced.
            Ok(_) => fs::canonicalize(path).with_context(writing)?,
            Err(_) => path.to_owned(),
        };
        let aside = aside_of(&target).with_context(writing)?;
        let (file, temporary) = aside.into_parts();
        let place = Some((temporary, target));
        Ok(Self { out: BufWriter::new(file), path: path.to_owned(), place })
    }

    /// Gives the file its name, and returns once it would survive a crash.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        let Self { out, path, place } = self;
        let writing = || format!("cannot write `{}`", path.display());
        let file =
            out.into_inner().map_err(io::IntoInnerError::into_error).with_context(writing)?;
        let Some((temporary, target)) = place else { return Ok(()) };
        file.sync_all().with_context(writing)?;
        temporary.persist(&target).map_err(|error| error.error).with_context(writing)?;
        File::open(folder_of(&target)).and_then(|folder| folder.sync_all()).with_context(writing)
    }
}

impl Write for Aside {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Writes a file other than a table, whole or not at all.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut aside = Aside::create(path)?;
    aside.write_all(bytes).with_context(|| format!("cannot write `{}`", path.display()))?;
    aside.finish()
}

/// Writes a text to a file, whole or not at all, or to standard output.
pub(crate) fn write_text(path: Option<&Path>, text: &str) -> anyhow::Result<()> {
    match path {
        Some(path) if path.as_os_str() != "-" => write_whole(path, text.as_bytes()),
        _ => Ok(io::stdout().write_all(text.as_bytes())?),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn passwords_stay_out_of_files() {
        for (word, shown) in [
            ("http://me:secret@host:1/v1@x", "http://…@host:1/v1@x"),
            ("--engine=http://host/a@b", "--engine=http://host/a@b"),
            ("https://a/b?X-Amz-Signature=secret", "https://a/b?…"),
            ("https://me:secret@a/b?X-Amz-Signature=secret", "https://…@a/b?…"),
            ("what?", "what?"),
            ("a@b", "a@b"),
        ] {
            assert_eq!(told(word), shown);
        }
    }

    #[test]
    fn a_file_is_there_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.txt");
        let names = || {
            let entries = fs::read_dir(folder.path()).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        };
        let mut aside = Aside::create(&path).unwrap();
        aside.write_all(b"half").unwrap();
        assert!(names().len() == 1 && names()[0].starts_with(".tmp-"), "{:?}", names());
        drop(aside);
        assert_eq!(names(), [""; 0]);
        write_whole(&path, b"whole").unwrap();
        // As open as any other file that this process makes.
        let plain = folder.path().join("plain.txt");
        fs::write(&plain, "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&plain));
        // A link stays one, and what is no plain file is not replaced.
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("out.txt", &link).unwrap();
        write_whole(&link, b"again").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"again");
        write_whole(Path::new("/dev/null"), b"nobody").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        let error = write_whole(folder.path(), b"").unwrap_err().to_string();
        assert_eq!(error, format!("cannot write `{}`", folder.path().display()));
        assert_eq!(names(), ["link", "out.txt", "plain.txt"]);
    }
}
