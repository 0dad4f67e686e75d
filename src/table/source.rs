//! Tables in: any mixture of files, folders, patterns and standard input, read
//! as one.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Cursor, IsTerminal, Read, Seek};
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{FieldRef, Schema, SchemaRef};
use arrow::ipc::writer::StreamWriter;

use super::inputs::{self, Input as Named, Place};
use super::parquet_file::{ParquetFile, Part, Rows};
use super::size::{BATCH_BYTES, pieces};
use super::sniff::{head, sniff};
use super::stream::Stream;
use super::{Error, Format, Provenance, Splice, StageLine, merge, splice};
use crate::trajectory::{Turn, Writer, columns, turn};

const STDIN: &str = "standard input";

/// Tables being read, one after the other, as one schema.
pub struct Source {
    inputs: Vec<Input>,
    schema: SchemaRef,
    provenance: Provenance,
    /// Index of the input that is being read.
    at: usize,
    reader: Option<Reader>,
    pending: VecDeque<RecordBatch>,
    /// Rows of the current input that were handed out.
    handed_out: u64,
    /// Name of the input and number of the first row of the last batch.
    place: (String, u64),
    /// The last stage that wrote columns of that input.
    written_by: Option<Writer>,
    /// Most bytes of a batch.
    limit: usize,
    /// The columns that are read, if not all.
    only: Option<SchemaRef>,
}

struct Input {
    name: String,
    bytes: Bytes,
    rows: Option<u64>,
    written_by: Option<Writer>,
    /// The stages that it went through.
    stages: Vec<StageLine>,
}

/// How an input's bytes are reached.
enum Bytes {
    /// Opened again each time: a folder may have more shards than a process may
    /// have open files.
    Path(PathBuf),
    /// Held open: it has no name, or none any more.
    Held(Arc<File>),
    /// A pipe, which can be read only once.
    Live(Option<Box<Stream>>),
}

enum Reader {
    Parquet(Rows),
    Stream(Box<Stream>),
}

impl Reader {
    fn next(&mut self) -> Result<Option<RecordBatch>, Error> {
        match self {
            Self::Parquet(rows) => rows.next(),
            Self::Stream(stream) => stream.next(),
        }
    }
}

impl Source {
    /// Opens tables: files, folders of shards, patterns, `-` for standard input,
    /// which is also what an empty list means. Errors unless each is a
    /// trajectory table that this build knows, with columns that go together.
    pub fn open(inputs: &[PathBuf]) -> Result<Self, Error> {
        let inputs: Vec<_> = inputs.iter().cloned().map(Named::Named).collect();
        Self::open_inputs(&inputs)
    }

    /// Opens tables likewise, some of which may be copies of others.
    pub fn open_inputs(inputs: &[Named]) -> Result<Self, Error> {
        let mut opened = Vec::new();
        let mut schemas = Vec::new();
        let mut provenance: Option<Provenance> = None;
        for place in inputs::resolve(inputs)? {
            let (mut input, schema) = match place {
                Place::Path(path) => open_path(&path, path.display().to_string())?,
                Place::Copy(path, name) => open_path(&path, name)?,
                Place::Stdin => open_stdin()?,
            };
            let told = Provenance::read(&input.name, schema.metadata())?;
            input.stages.clone_from(&told.lines);
            match &mut provenance {
                None => provenance = Some(told),
                Some(known) => known.merge(told),
            }
            let there = columns().iter().filter(|column| schema.index_of(column.name).is_ok());
            input.written_by = there.map(|column| column.writer).max();
            schemas.push((input.name.clone(), schema));
            opened.push(input);
        }
        Ok(Self {
            inputs: opened,
            schema: merge::schemas(&schemas)?,
            provenance: provenance.unwrap_or_default(),
            at: 0,
            reader: None,
            pending: VecDeque::new(),
            handed_out: 0,
            place: Default::default(),
            written_by: None,
            limit: BATCH_BYTES,
            only: None,
        })
    }

    /// Reads in smaller batches, for who holds several. To be called before the first.
    pub fn in_batches_of(&mut self, bytes: usize) {
        self.limit = bytes.min(BATCH_BYTES);
    }

    /// Reads only these columns, as far as they are there, and `turn_id`, which every
    /// table has, until [`Source::rewind`]. To be called before the first batch.
    pub fn only(&mut self, columns: &[&str]) {
        let wanted = |field: &&FieldRef| {
            columns.contains(&field.name().as_str()) || field.name() == "turn_id"
        };
        let fields: Vec<FieldRef> = self.schema.fields().iter().filter(wanted).cloned().collect();
        let metadata = self.schema.metadata().clone();
        self.only = Some(Arc::new(Schema::new_with_metadata(fields, metadata)));
    }

    /// Returns the schema that every batch has.
    pub fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    /// Returns what the inputs say about themselves, put together.
    pub fn provenance(&self) -> &Provenance {
        &self.provenance
    }

    /// Returns each input's name and the stages that it went through, oldest first.
    pub fn stages(&self) -> impl Iterator<Item = (&str, &[StageLine])> {
        self.inputs.iter().map(|input| (input.name.as_str(), &input.stages[..]))
    }

    /// Returns the number of rows, unless a pipe is among the inputs.
    pub fn total_rows(&self) -> Option<u64> {
        self.inputs.iter().map(|input| input.rows).sum()
    }

    /// Returns the names of the inputs.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places().map(|(name, _)| name)
    }

    /// Returns the names of the inputs, and the paths of those that have one.
    pub fn places(&self) -> impl Iterator<Item = (&str, Option<&Path>)> {
        self.inputs.iter().map(|input| {
            let path = match &input.bytes {
                Bytes::Path(path) => Some(path.as_path()),
                Bytes::Held(_) | Bytes::Live(_) => None,
            };
            (input.name.as_str(), path)
        })
    }

    /// Returns the input that the last batch came from, and the number of its
    /// first row there, counted from 0.
    pub fn place(&self) -> (&str, u64) {
        (&self.place.0, self.place.1)
    }

    /// Returns the last stage of which the input of the last batch has columns of
    /// its own: those that only other inputs have do not count.
    pub fn written_by(&self) -> Option<Writer> {
        self.written_by
    }

    /// Returns the next rows, never more than a bounded number of bytes unless
    /// one row alone weighs more, or nothing at the end.
    pub fn next_batch(&mut self) -> Result<Option<RecordBatch>, Error> {
        loop {
            if let Some(batch) = self.pending.pop_front() {
                let input = &self.inputs[self.at];
                self.place = (input.name.clone(), self.handed_out);
                self.written_by = input.written_by;
                self.handed_out += batch.num_rows() as u64;
                return Ok(Some(batch));
            }
            let Some(input) = self.inputs.get_mut(self.at) else {
                return Ok(None);
            };
            let reader = match &mut self.reader {
                Some(reader) => reader,
                closed => closed.insert(input.reader(self.limit, self.only.as_deref())?),
            };
            match reader.next()? {
                Some(batch) if batch.num_rows() == 0 => {}
                Some(batch) => {
                    let schema = self.only.as_ref().unwrap_or(&self.schema);
                    let batch = merge::align(&input.name, &batch, schema)?;
                    self.pending.extend(pieces(&batch, self.limit));
                }
                None => {
                    self.reader = None;
                    self.at += 1;
                    self.handed_out = 0;
                }
            }
        }
    }

    /// Returns the next rows as turns.
    pub fn next_turns(&mut self) -> Result<Option<Vec<Turn>>, Error> {
        let batch = self.next_batch()?;
        batch.map(|batch| self.read(&batch)).transpose()
    }

    /// Reads the batch that was returned last.
    pub fn read(&self, batch: &RecordBatch) -> Result<Vec<Turn>, Error> {
        self.read_rows(batch, 0..batch.num_rows())
    }

    /// Reads some rows of it. An error names their input and the row there.
    pub fn read_rows(&self, batch: &RecordBatch, rows: Range<usize>) -> Result<Vec<Turn>, Error> {
        let first = self.place.1 + rows.start as u64;
        turn::read(&batch.slice(rows.start, rows.len())).map_err(|source| Error::Schema {
            name: self.place.0.clone(),
            source: source.from_row(first),
        })
    }

    /// Keeps what comes through a pipe in an unnamed temporary file, so that
    /// [`Source::rewind`] is possible. To be called before the first batch.
    pub fn hold(&mut self) -> Result<(), Error> {
        for input in &mut self.inputs {
            if let Bytes::Live(stream) = &mut input.bytes
                && let Some(stream) = stream.take()
            {
                let (file, rows) = spool_stream(&input.name, *stream)?;
                input.bytes = Bytes::Held(Arc::new(file));
                input.rows = Some(rows);
            }
        }
        Ok(())
    }

    /// Returns the inputs' row groups, if a table with the columns of this schema can
    /// take their chunks over as they are, all columns but its `own`, and if the columns
    /// `read` of a group are not too heavy. See [`Splice`].
    pub fn splice(
        &self,
        read: &[&str],
        (schema, own): (&SchemaRef, &[&str]),
    ) -> Result<Option<Splice>, Error> {
        if self.inputs.len() > splice::MOST_FILES {
            return Ok(None);
        }
        let mut files = Vec::new();
        for input in &self.inputs {
            let file = match &input.bytes {
                Bytes::Path(path) => File::open(path)
                    .map(Arc::new)
                    .map_err(|source| Error::Read { name: input.name.clone(), source })?,
                Bytes::Held(file) => file.clone(),
                Bytes::Live(_) => return Ok(None),
            };
            match sniff(&input.name, &head(&input.name, &file)?)? {
                Format::Parquet => files.push((input.name.clone(), file)),
                Format::Ipc => return Ok(None),
            }
        }
        Splice::plan(files, read, (schema, own))
    }

    /// Starts again at the first row, with all columns. Errors on a pipe that was not held.
    pub fn rewind(&mut self) -> Result<(), Error> {
        (self.at, self.handed_out, self.reader, self.only) = (0, 0, None, None);
        self.pending.clear();
        match self.inputs.iter().any(|input| matches!(input.bytes, Bytes::Live(None))) {
            true => Err(Error::StdinTwice),
            false => Ok(()),
        }
    }
}

impl Input {
    fn reader(&mut self, limit: usize, only: Option<&Schema>) -> Result<Reader, Error> {
        match &mut self.bytes {
            Bytes::Path(path) => {
                let file = File::open(path)
                    .map_err(|source| Error::Read { name: self.name.clone(), source })?;
                reader(&self.name, Arc::new(file), limit, only)
            }
            Bytes::Held(file) => reader(&self.name, file.clone(), limit, only),
            Bytes::Live(stream) => stream.take().map(Reader::Stream).ok_or(Error::StdinTwice),
        }
    }
}

fn reader(
    name: &str,
    file: Arc<File>,
    limit: usize,
    only: Option<&Schema>,
) -> Result<Reader, Error> {
    match sniff(name, &head(name, &file)?)? {
        Format::Parquet => {
            let parquet = ParquetFile::open(name, file)?;
            Ok(Reader::Parquet(parquet.rows_reader(limit, only)?))
        }
        Format::Ipc => {
            let bytes = Box::new(Part::of(file));
            Ok(Reader::Stream(Box::new(Stream::open(name, bytes)?)))
        }
    }
}

fn open_path(path: &Path, name: String) -> Result<(Input, SchemaRef), Error> {
    let read = |source| Error::Read { name: name.clone(), source };
    let file = File::open(path).map_err(read)?;
    if !file.metadata().map_err(read)?.is_file() {
        return open_live(name, Box::new(file));
    }
    open_file(name, Arc::new(file), |_| Bytes::Path(path.to_owned()))
}

fn open_file(
    name: String,
    file: Arc<File>,
    keep: impl FnOnce(Arc<File>) -> Bytes,
) -> Result<(Input, SchemaRef), Error> {
    let (schema, rows) = match sniff(&name, &head(&name, &file)?)? {
        Format::Parquet => {
            let parquet = ParquetFile::open(&name, file.clone())?;
            (parquet.schema(), Some(parquet.rows()))
        }
        Format::Ipc => (Stream::open(&name, Box::new(Part::of(file.clone())))?.schema(), None),
    };
    Ok((Input { name, bytes: keep(file), rows, written_by: None, stages: Vec::new() }, schema))
}

fn open_stdin() -> Result<(Input, SchemaRef), Error> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Error::StdinTerminal);
    }
    let read = |source| Error::Read { name: STDIN.to_owned(), source };
    // Our own handle: the shared one would read ahead into its buffer.
    let mut file = File::from(stdin.as_fd().try_clone_to_owned().map_err(read)?);
    let whole =
        file.metadata().map_err(read)?.is_file() && file.stream_position().map_err(read)? == 0;
    match whole {
        true => open_file(STDIN.to_owned(), Arc::new(file), Bytes::Held),
        false => open_live(STDIN.to_owned(), Box::new(file)),
    }
}

/// Opens a pipe. Parquet has its index at its end, so it must arrive whole first.
fn open_live(name: String, mut bytes: Box<dyn Read + Send>) -> Result<(Input, SchemaRef), Error> {
    let read = |source| Error::Read { name: name.clone(), source };
    let mut head = Vec::new();
    bytes.by_ref().take(8).read_to_end(&mut head).map_err(read)?;
    let format = sniff(&name, &head)?;
    let mut bytes = Cursor::new(head).chain(bytes);
    match format {
        Format::Parquet => {
            let mut file = tempfile::tempfile().map_err(read)?;
            io::copy(&mut bytes, &mut file).map_err(read)?;
            open_file(name, Arc::new(file), Bytes::Held)
        }
        Format::Ipc => {
            let stream = Stream::open(&name, Box::new(bytes))?;
            let schema = stream.schema();
            let bytes = Bytes::Live(Some(Box::new(stream)));
            Ok((Input { name, bytes, rows: None, written_by: None, stages: Vec::new() }, schema))
        }
    }
}

fn spool_stream(name: &str, mut stream: Stream) -> Result<(File, u64), Error> {
    let spool = |reason: arrow::error::ArrowError| Error::Write {
        name: format!("temporary copy of {name}"),
        source: super::sink::io_error_of_arrow(reason),
    };
    let file = tempfile::tempfile()
        .map_err(|source| Error::Write { name: format!("temporary copy of {name}"), source })?;
    let mut writer = StreamWriter::try_new_buffered(file, &stream.schema()).map_err(spool)?;
    let mut rows = 0;
    while let Some(batch) = stream.next()? {
        rows += batch.num_rows() as u64;
        writer.write(&batch).map_err(spool)?;
    }
    let buffered = writer.into_inner().map_err(spool)?;
    let file = buffered.into_inner().map_err(|error| Error::Write {
        name: format!("temporary copy of {name}"),
        source: error.into_error(),
    })?;
    Ok((file, rows))
}

/// Reads every turn of some tables.
pub fn read_turns(inputs: &[PathBuf]) -> Result<Vec<Turn>, Error> {
    let mut source = Source::open(inputs)?;
    let mut found = Vec::new();
    while let Some(turns) = source.next_turns()? {
        found.extend(turns);
    }
    Ok(found)
}
