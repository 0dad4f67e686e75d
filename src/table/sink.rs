//! Tables out. A path is written aside, made durable, checked and renamed: a
//! reader never sees half a table under its final name.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, IsTerminal, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::{RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use parquet::arrow::ArrowWriter;
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use tempfile::TempPath;

use super::aside::{aside_of, folder_of, start};
use super::provenance::USAGE;
use super::size::{BATCH_BYTES, pieces, weight};
use super::{Error, Format, Provenance, Target, Usage, layout, parquet_file, stream};

/// How the name of a shard begins that is not finished.
pub(super) const SHARD_ASIDE: &str = ".tmp-shard-";

/// Temporary files of all sinks that are not finished.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Removes what unfinished sinks have written so far. For a signal's sake, just
/// before the process ends.
pub fn discard_unfinished() {
    for path in UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        // It may have been renamed or removed in this very moment.
        let _ = fs::remove_file(path);
    }
}

/// A table being written. Dropped before [`Sink::finish`], it leaves nothing.
pub struct Sink {
    name: String,
    schema: SchemaRef,
    encoder: Encoder,
    aside: Option<Aside>,
    /// Raw bytes in the open row group.
    open_bytes: usize,
    rows: u64,
}

type Output = BufWriter<Box<dyn Write + Send>>;

enum Encoder {
    Parquet(Box<ArrowWriter<Output>>),
    Ipc(Box<StreamWriter<Output>>),
}

impl Sink {
    /// Starts a table. Without a format a path and a redirected standard output
    /// get Parquet, a pipe an Arrow stream; a terminal is refused.
    pub fn create(
        target: &Target,
        format: Option<Format>,
        schema: SchemaRef,
        provenance: &Provenance,
    ) -> Result<Self, Error> {
        let (name, output, aside, usual) = match target {
            Target::Shard(path) => return Self::create_shard(path, schema, provenance),
            Target::Stdout => {
                let (file, usual) = stdout()?;
                ("standard output".to_owned(), file, None, usual)
            }
            Target::Path(path) => {
                let name = path.display().to_string();
                let (file, aside, usual) = open(path, Existing::Replaced)
                    .map_err(|source| Error::Write { name: name.clone(), source })?;
                (name, file, aside, usual)
            }
        };
        Self::start(name, (output, aside), format.unwrap_or(usual), (schema, provenance))
    }

    /// Starts a new shard under a name that nothing may have yet.
    pub(super) fn create_shard(
        path: &Path,
        schema: SchemaRef,
        provenance: &Provenance,
    ) -> Result<Self, Error> {
        let name = path.display().to_string();
        let (output, aside, _) = open(path, Existing::Refused)
            .map_err(|source| Error::Write { name: name.clone(), source })?;
        Self::start(name, (output, aside), Format::Parquet, (schema, provenance))
    }

    fn start(
        name: String,
        (output, aside): (File, Option<Aside>),
        format: Format,
        (schema, provenance): (SchemaRef, &Provenance),
    ) -> Result<Self, Error> {
        let mut metadata = schema.metadata().clone();
        // The writer adds its own copy of the Arrow schema.
        metadata.remove("ARROW:schema");
        provenance.write(&mut metadata);
        let schema = Arc::new(Schema::new_with_metadata(schema.fields().clone(), metadata));
        let output: Output = BufWriter::with_capacity(1 << 18, Box::new(output));
        let encoder = match format {
            Format::Parquet => {
                let properties = layout::properties(&schema);
                let writer = ArrowWriter::try_new(output, schema.clone(), Some(properties))
                    .map_err(|error| parquet_failure(&name, error))?;
                Encoder::Parquet(Box::new(writer))
            }
            Format::Ipc => {
                let writer = StreamWriter::try_new(output, &schema)
                    .map_err(|error| arrow_failure(&name, error))?;
                Encoder::Ipc(Box::new(writer))
            }
        };
        Ok(Self { name, schema, encoder, aside, open_bytes: 0, rows: 0 })
    }

    /// Returns the number of rows written.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Writes rows. They must have the sink's columns, in its order.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<(), Error> {
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let batch = RecordBatch::try_new_with_options(
            self.schema.clone(),
            batch.columns().to_vec(),
            &options,
        )
        .map_err(|error| arrow_failure(&self.name, error))?;
        for piece in pieces(&batch, BATCH_BYTES) {
            let bytes = weight(&piece, 0, piece.num_rows());
            match &mut self.encoder {
                Encoder::Parquet(writer) => {
                    // A row group is closed before it would outweigh the bound.
                    if self.open_bytes > 0 && self.open_bytes + bytes > BATCH_BYTES {
                        writer.flush().map_err(|error| parquet_failure(&self.name, error))?;
                        self.open_bytes = 0;
                    }
                    writer.write(&piece).map_err(|error| parquet_failure(&self.name, error))?;
                    self.open_bytes += bytes;
                }
                // The next stage need not wait for a buffer to fill.
                Encoder::Ipc(writer) => writer
                    .write(&piece)
                    .and_then(|()| writer.flush())
                    .map_err(|error| arrow_failure(&self.name, error))?,
            }
            self.rows += piece.num_rows() as u64;
        }
        Ok(())
    }

    /// Notes what the last line of the provenance came to use. A stream has no
    /// place for it.
    pub fn note_usage(&mut self, usage: &Usage) {
        if let Encoder::Parquet(writer) = &mut self.encoder {
            let text = serde_json::to_string(usage).ok();
            writer.append_key_value_metadata(KeyValue::new(USAGE.to_owned(), text));
        }
    }

    /// Ends the table, makes it durable and gives it its final name.
    pub fn finish(self) -> Result<(), Error> {
        let name = self.name;
        let (format, output) = match self.encoder {
            Encoder::Parquet(writer) => (
                Format::Parquet,
                writer.into_inner().map_err(|error| parquet_failure(&name, error))?,
            ),
            Encoder::Ipc(writer) => {
                (Format::Ipc, writer.into_inner().map_err(|error| arrow_failure(&name, error))?)
            }
        };
        let write = |source| Error::Write { name: name.clone(), source };
        output.into_inner().map_err(|error| write(error.into_error()))?.flush().map_err(write)?;
        match self.aside {
            Some(aside) => aside.publish(&name, format),
            None => Ok(()),
        }
    }
}

/// Refuses a target that cannot take a table, and touches nothing.
pub(super) fn check(target: &Target) -> Result<(), Error> {
    match target {
        Target::Stdout if io::stdout().is_terminal() => Err(Error::StdoutTerminal),
        Target::Stdout => Ok(()),
        Target::Path(path) | Target::Shard(path) => {
            let problem = match path.is_dir() {
                true => Some(io::ErrorKind::IsADirectory.into()),
                // The system says what is wrong with a folder that is none.
                false => fs::metadata(folder_of(path).join(".")).err(),
            };
            let name = path.display().to_string();
            problem.map_or(Ok(()), |source| Err(Error::Write { name, source }))
        }
    }
}

/// Takes the name of a temporary file out of an error: nobody asked for that file.
fn without_name(error: io::Error) -> io::Error {
    match error.to_string().rsplit_once(" at path ") {
        Some((reason, _)) => io::Error::new(error.kind(), reason),
        None => error,
    }
}

/// Duplicates standard output and tells the format that suits it.
fn stdout() -> Result<(File, Format), Error> {
    let stdout = io::stdout();
    if stdout.is_terminal() {
        return Err(Error::StdoutTerminal);
    }
    let write = |source| Error::Write { name: "standard output".to_owned(), source };
    let file = File::from(stdout.as_fd().try_clone_to_owned().map_err(write)?);
    let regular = file.metadata().map_err(write)?.is_file();
    Ok((file, if regular { Format::Parquet } else { Format::Ipc }))
}

/// What to do about a file that has the final name already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Existing {
    Replaced,
    Refused,
}

/// Opens a path for writing. What is no plain file (a pipe, `/dev/null`) cannot
/// be replaced and is written to directly.
fn open(path: &Path, existing: Existing) -> io::Result<(File, Option<Aside>, Format)> {
    let target = match fs::metadata(path) {
        Ok(there) if there.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(there) if !there.is_file() => {
            let file = File::options().write(true).open(path)?;
            return Ok((file, None, Format::Ipc));
        }
        // A link stays a link: what it points to is replaced.
        Ok(_) => fs::canonicalize(path)?,
        Err(_) => path.to_owned(),
    };
    let folder = folder_of(&target);
    let temporary = match existing {
        Existing::Replaced => aside_of(&target),
        // Whoever writes shards here next removes what is left of them.
        Existing::Refused => start(&folder, SHARD_ASIDE),
    };
    let temporary = temporary.map_err(without_name)?;
    let (file, temporary) = temporary.into_parts();
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).insert(temporary.to_path_buf());
    let aside =
        Aside { file: file.try_clone()?, temporary: Some(temporary), target, folder, existing };
    Ok((file, Some(aside), Format::Parquet))
}

/// A file that has not got its final name yet.
struct Aside {
    file: File,
    temporary: Option<TempPath>,
    target: PathBuf,
    folder: PathBuf,
    existing: Existing,
}

impl Aside {
    fn publish(mut self, name: &str, format: Format) -> Result<(), Error> {
        let write = |source| Error::Write { name: name.to_owned(), source };
        self.file.sync_all().map_err(write)?;
        self.check(name, format)?;
        let Some(temporary) = self.temporary.take() else { return Ok(()) };
        let path = temporary.to_path_buf();
        let renamed = match self.existing {
            Existing::Replaced => temporary.persist(&self.target),
            Existing::Refused => temporary.persist_noclobber(&self.target),
        };
        UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).remove(&path);
        renamed.map_err(|error| write(error.error))?;
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(write)
    }

    /// Reads the end mark back: a disk that lost it must not be believed.
    fn check(&mut self, name: &str, format: Format) -> Result<(), Error> {
        let write = |source| Error::Write { name: name.to_owned(), source };
        let length = self.file.seek(SeekFrom::End(0)).map_err(write)?;
        match format {
            Format::Parquet => parquet_file::check_tail(name, &self.file, length),
            Format::Ipc => {
                let mut tail = [0; 8];
                self.file.read_exact_at(&mut tail, length.saturating_sub(8)).map_err(write)?;
                match tail == *stream::END {
                    true => Ok(()),
                    false => {
                        let what = "the end mark just written is not there".to_owned();
                        Err(Error::Cut { name: name.to_owned(), what })
                    }
                }
            }
        }
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
            unfinished.remove(&*temporary);
        }
    }
}

fn parquet_failure(name: &str, error: ParquetError) -> Error {
    let name = name.to_owned();
    match error {
        ParquetError::External(cause) => match cause.downcast::<io::Error>() {
            Ok(source) => Error::Write { name, source: *source },
            Err(cause) => Error::Encode { name, reason: cause.to_string() },
        },
        error => Error::Encode { name, reason: error.to_string() },
    }
}

fn arrow_failure(name: &str, error: ArrowError) -> Error {
    let name = name.to_owned();
    match error {
        ArrowError::IoError(_, source) => Error::Write { name, source },
        error => Error::Encode { name, reason: error.to_string() },
    }
}

/// Returns the operating system's error inside an encoder's.
pub(super) fn io_error_of_arrow(error: ArrowError) -> io::Error {
    match error {
        ArrowError::IoError(_, source) => source,
        error => io::Error::other(error),
    }
}
