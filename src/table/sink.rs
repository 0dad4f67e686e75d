//! Tables out. A path is written aside, made durable, checked and renamed: a
//! reader never sees half a table under its final name.

use std::fs::{self, File};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::writer::SerializedFileWriter;

use super::aside::folder_of;
use super::provenance::USAGE;
use super::size::{BATCH_BYTES, pieces, weight};
use super::unfinished::{Aside, Existing, open};
use super::{Encoded, Encoding, Error, Format, Provenance, Splice, Target, Usage, layout};

/// A table being written. Dropped before [`Sink::finish`], it leaves nothing.
pub struct Sink {
    name: String,
    schema: SchemaRef,
    encoder: Encoder,
    aside: Option<Aside>,
    /// Raw bytes in the open row group.
    open_bytes: usize,
    rows: u64,
    /// Whether something was written in part: what is there is no table.
    broken: bool,
}

pub(super) type Output = BufWriter<Box<dyn Write + Send>>;

enum Encoder {
    Parquet(Box<ArrowWriter<Output>>),
    Spliced(Box<SerializedFileWriter<Output>>),
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
        let place = Place::open(target)?;
        let format = format.unwrap_or(place.usual);
        Self::start(place, format, (schema, provenance), ArrowWriterOptions::new())
    }

    /// Starts a table likewise. If it becomes a Parquet file it takes no rows, but row
    /// groups of a [`Splice`], by [`Sink::append`], of which the other thing returned
    /// makes the new columns.
    pub fn create_beside(
        output: (&Target, Option<Format>),
        (schema, splice): (SchemaRef, &Splice),
        provenance: &Provenance,
    ) -> Result<(Self, Option<Encoding>), Error> {
        let place = Place::open(output.0)?;
        let format = output.1.unwrap_or(place.usual);
        let (schema, options) = match format {
            Format::Parquet => (
                splice.shape().arrow.clone(),
                ArrowWriterOptions::new().with_parquet_schema(splice.shape().parquet.clone()),
            ),
            Format::Ipc => (schema, ArrowWriterOptions::new()),
        };
        let mut sink = Self::start(place, format, (schema, provenance), options)?;
        let Encoder::Parquet(writer) = sink.encoder else { return Ok((sink, None)) };
        let failed = |error| parquet_failure(&sink.name, error);
        let (writer, _) = writer.into_serialized_writer().map_err(failed)?;
        let encoding = Encoding::new(&sink.name, splice).map_err(failed)?;
        sink.encoder = Encoder::Spliced(Box::new(writer));
        Ok((sink, Some(encoding)))
    }

    /// Writes a row group: its new columns, and the chunks of all others as they are.
    pub fn append(&mut self, splice: &Splice, group: usize, new: Encoded) -> Result<(), Error> {
        self.begin()?;
        let Encoder::Spliced(writer) = &mut self.encoder else {
            let reason = "it takes rows, and no row groups".to_owned();
            return Err(Error::Encode { name: self.name.clone(), reason });
        };
        splice.append(writer, group, new).map_err(|error| parquet_failure(&self.name, error))?;
        self.rows += splice.rows(group);
        self.broken = false;
        Ok(())
    }

    /// Until what begins is written, there is half of it. Errors if something was left so.
    fn begin(&mut self) -> Result<(), Error> {
        match std::mem::replace(&mut self.broken, true) {
            true => Err(half(&self.name)),
            false => Ok(()),
        }
    }

    /// Starts a new shard under a name that nothing may have yet.
    pub(super) fn create_shard(
        path: &Path,
        schema: SchemaRef,
        provenance: &Provenance,
    ) -> Result<Self, Error> {
        let place = Place::open(&Target::Shard(path.to_owned()))?;
        Self::start(place, Format::Parquet, (schema, provenance), ArrowWriterOptions::new())
    }

    fn start(
        Place { name, file: output, aside, .. }: Place,
        format: Format,
        (schema, provenance): (SchemaRef, &Provenance),
        options: ArrowWriterOptions,
    ) -> Result<Self, Error> {
        let mut metadata = schema.metadata().clone();
        // The writer adds its own copy of the Arrow schema.
        metadata.remove("ARROW:schema");
        provenance.write(&mut metadata);
        let schema = Arc::new(Schema::new_with_metadata(schema.fields().clone(), metadata));
        let output: Output = BufWriter::with_capacity(1 << 18, Box::new(output));
        let encoder = match format {
            Format::Parquet => {
                let options = options.with_properties(layout::properties(&schema));
                let writer = ArrowWriter::try_new_with_options(output, schema.clone(), options)
                    .map_err(|error| parquet_failure(&name, error))?;
                Encoder::Parquet(Box::new(writer))
            }
            Format::Ipc => {
                let writer = StreamWriter::try_new(output, &schema)
                    .map_err(|error| arrow_failure(&name, error))?;
                Encoder::Ipc(Box::new(writer))
            }
        };
        Ok(Self { name, schema, encoder, aside, open_bytes: 0, rows: 0, broken: false })
    }

    /// Returns the number of rows written.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Writes rows, unless it takes row groups. They must have the sink's columns, in its order.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<(), Error> {
        self.begin()?;
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
                Encoder::Spliced(_) => {
                    let reason = "it takes whole row groups".to_owned();
                    return Err(Error::Encode { name: self.name.clone(), reason });
                }
                // The next stage need not wait for a buffer to fill.
                Encoder::Ipc(writer) => writer
                    .write(&piece)
                    .and_then(|()| writer.flush())
                    .map_err(|error| arrow_failure(&self.name, error))?,
            }
            self.rows += piece.num_rows() as u64;
        }
        self.broken = false;
        Ok(())
    }

    /// Notes what the last line of the provenance came to use. A stream has no
    /// place for it.
    pub fn note_usage(&mut self, usage: &Usage) {
        let entry = || KeyValue::new(USAGE.to_owned(), serde_json::to_string(usage).ok());
        match &mut self.encoder {
            Encoder::Parquet(writer) => writer.append_key_value_metadata(entry()),
            Encoder::Spliced(writer) => writer.append_key_value_metadata(entry()),
            Encoder::Ipc(_) => {}
        }
    }

    /// Ends the table, makes it durable and gives it its final name. Errors if a write
    /// failed before: rows are missing.
    pub fn finish(self) -> Result<(), Error> {
        let name = self.name;
        if self.broken {
            return Err(half(&name));
        }
        let (format, output) = match self.encoder {
            Encoder::Parquet(writer) => (
                Format::Parquet,
                writer.into_inner().map_err(|error| parquet_failure(&name, error))?,
            ),
            Encoder::Spliced(writer) => (
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

/// An output that is open and has no format yet.
struct Place {
    name: String,
    file: File,
    aside: Option<Aside>,
    /// The format that suits it.
    usual: Format,
}

impl Place {
    fn open(target: &Target) -> Result<Self, Error> {
        let (path, existing) = match target {
            Target::Stdout => {
                let (file, usual) = stdout()?;
                return Ok(Self { name: "standard output".to_owned(), file, aside: None, usual });
            }
            Target::Path(path) => (path, Existing::Replaced),
            Target::Shard(path) => (path, Existing::Refused),
        };
        let name = path.display().to_string();
        let (file, aside, usual) =
            open(path, existing).map_err(|source| Error::Write { name: name.clone(), source })?;
        // A shard is Parquet wherever it goes.
        let usual = if existing == Existing::Refused { Format::Parquet } else { usual };
        Ok(Self { name, file, aside, usual })
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

fn half(name: &str) -> Error {
    let reason = "a part of it was written by half before".to_owned();
    Error::Encode { name: name.to_owned(), reason }
}

pub(super) fn parquet_failure(name: &str, error: ParquetError) -> Error {
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
