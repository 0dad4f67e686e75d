//! Parquet files in. The decoder is not trusted with a broken file: every range
//! it asks for is checked against the file's length before memory is reserved,
//! and a panic inside it becomes an error that names the file.

use std::any::Any;
use std::cell::Cell;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Once};

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{Schema, SchemaRef, TimestampMicrosecondType};
use bytes::Bytes;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::statistics::Statistics;
use parquet::schema::types::SchemaDescriptor;

use super::Error;
use super::size::BATCH_ROWS;

/// The first and the last four bytes of a Parquet file.
pub(super) const MAGIC: &[u8] = b"PAR1";

/// A Parquet file whose footer has been read.
pub(super) struct ParquetFile {
    name: String,
    builder: ParquetRecordBatchReaderBuilder<Checked>,
}

impl ParquetFile {
    /// Reads the footer.
    pub(super) fn open(name: &str, file: Arc<File>) -> Result<Self, Error> {
        let read = |source| Error::Read { name: name.to_owned(), source };
        let length = file.metadata().map_err(read)?.len();
        check_tail(name, &file, length)?;
        let checked = Checked { file, length };
        let builder = guarded(name, || {
            ParquetRecordBatchReaderBuilder::try_new(checked).map_err(|error| damaged(name, &error))
        })?;
        check_counts(name, builder.metadata())?;
        Ok(Self { name: name.to_owned(), builder })
    }

    /// Returns the schema with its metadata, which the batches' own schema lacks.
    pub(super) fn schema(&self) -> SchemaRef {
        self.builder.schema().clone()
    }

    /// Returns the number of rows.
    pub(super) fn rows(&self) -> u64 {
        u64::try_from(self.builder.metadata().file_metadata().num_rows()).unwrap_or_default()
    }

    /// Returns the bytes and what the footer says of them, for who reads one row group
    /// at a time.
    pub(super) fn into_parts(
        name: &str,
        file: Arc<File>,
    ) -> Result<(Checked, ArrowReaderMetadata), Error> {
        let opened = Self::open(name, file.clone())?;
        let length =
            file.metadata().map_err(|source| Error::Read { name: name.to_owned(), source })?.len();
        let metadata = opened.builder.metadata().clone();
        let metadata = guarded(name, || {
            ArrowReaderMetadata::try_new(metadata, ArrowReaderOptions::new())
                .map_err(|error| damaged(name, &error))
        })?;
        Ok((Checked { file, length }, metadata))
    }

    /// Starts to read the rows, in batches that should not outweigh the bound: all
    /// columns, or those that a schema names.
    pub(super) fn rows_reader(self, limit: usize, only: Option<&Schema>) -> Result<Rows, Error> {
        let heaviest = self.builder.metadata().row_groups().iter().map(|group| {
            group.total_byte_size().max(0) as usize / (group.num_rows().max(1) as usize)
        });
        let heaviest = heaviest.max().unwrap_or_default().max(1);
        let size = (limit / heaviest).clamp(1, BATCH_ROWS);
        let (name, builder) = (self.name, self.builder);
        let read = match only {
            Some(only) => named(builder.parquet_schema(), only),
            None => ProjectionMask::all(),
        };
        let reader = guarded(&name, || {
            let builder = builder.with_batch_size(size).with_projection(read);
            builder.build().map_err(|error| damaged(&name, &error))
        })?;
        Ok(Rows { name, reader })
    }

    /// Returns the texts of some columns, row by row, reading no other column. One that
    /// is not there, or is none of texts, gives nulls.
    pub(super) fn texts<const N: usize>(
        self,
        names: [&str; N],
    ) -> Result<Vec<[Option<String>; N]>, Error> {
        let columns: Vec<_> = names.iter().filter_map(|name| self.place(name)).collect();
        let mut texts = Vec::new();
        let mut rows = self.columns_reader(columns)?;
        while let Some(batch) = rows.next()? {
            let columns = names
                .map(|name| batch.column_by_name(name).and_then(|it| it.as_string_opt::<i32>()));
            texts.extend((0..batch.num_rows()).map(|row| {
                columns.map(|column| {
                    let column = column.filter(|column| column.is_valid(row));
                    column.map(|column| column.value(row).to_owned())
                })
            }));
        }
        Ok(texts)
    }

    pub(super) fn row_count(&self) -> u64 {
        self.builder.metadata().row_groups().iter().map(|it| it.num_rows().unsigned_abs()).sum()
    }

    /// Returns where some columns are, group by group; one that is not there is nowhere.
    pub(super) fn places(&self, names: &[&str]) -> Option<Vec<Range<u64>>> {
        let columns: Vec<_> = names.iter().filter_map(|name| self.place(name)).collect();
        let groups = self.builder.metadata().row_groups().iter();
        let chunks = groups.flat_map(|group| columns.iter().map(|column| group.column(*column)));
        let places = chunks.map(|chunk| {
            let start = chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset());
            let start = u64::try_from(start).ok()?;
            Some(start..start.checked_add(u64::try_from(chunk.compressed_size()).ok()?)?)
        });
        places.collect()
    }

    fn place(&self, name: &str) -> Option<usize> {
        let columns = self.builder.parquet_schema().columns();
        columns.iter().position(|column| column.path().parts() == [name])
    }

    fn columns_reader(self, columns: Vec<usize>) -> Result<Rows, Error> {
        let (name, builder) = (self.name, self.builder);
        let mask = ProjectionMask::leaves(builder.parquet_schema(), columns);
        let reader = guarded(&name, || {
            builder.with_projection(mask).build().map_err(|error| damaged(&name, &error))
        })?;
        Ok(Rows { name, reader })
    }

    /// Returns the earliest `created_at`, if the file has any.
    pub(super) fn first_created_at(self) -> Result<Option<i64>, Error> {
        let Some(column) = self.place("created_at") else { return Ok(None) };
        let minima: Option<Vec<_>> = self
            .builder
            .metadata()
            .row_groups()
            .iter()
            .map(|group| match group.column(column).statistics() {
                Some(Statistics::Int64(values)) => values.min_opt().copied(),
                _ => None,
            })
            .collect();
        if let Some(minima) = minima {
            return Ok(minima.into_iter().min());
        }
        let mut rows = self.columns_reader(vec![column])?;
        let mut first = None;
        while let Some(batch) = rows.next()? {
            let instants: &ArrayRef = batch.column(0);
            let earliest = instants
                .as_primitive_opt::<TimestampMicrosecondType>()
                .and_then(|instants| instants.iter().flatten().min());
            first = [first, earliest].into_iter().flatten().min();
        }
        Ok(first)
    }
}

/// Picks the columns of a file that a schema names.
fn named(file: &SchemaDescriptor, schema: &Schema) -> ProjectionMask {
    let roots = file.root_schema().get_fields().iter().enumerate();
    let wanted = roots.filter(|(_, root)| schema.index_of(root.name()).is_ok());
    ProjectionMask::roots(file, wanted.map(|(place, _)| place))
}

/// The rows of a Parquet file.
pub(super) struct Rows {
    name: String,
    reader: ParquetRecordBatchReader,
}

impl Rows {
    pub(super) fn new(name: &str, reader: ParquetRecordBatchReader) -> Self {
        Self { name: name.to_owned(), reader }
    }

    pub(super) fn next(&mut self) -> Result<Option<RecordBatch>, Error> {
        let (name, reader) = (&self.name, &mut self.reader);
        guarded(name, || reader.next().transpose().map_err(|error| damaged(name, &error)))
    }
}

/// A file that lends no bytes beyond its end. Reads do not move a shared cursor.
#[derive(Clone)]
pub(super) struct Checked {
    file: Arc<File>,
    length: u64,
}

impl Length for Checked {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for Checked {
    type T = BufReader<Part>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        Ok(BufReader::new(Part { file: self.file.clone(), position: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        let end = start.checked_add(length as u64);
        if end.is_none_or(|end| end > self.length) {
            return Err(ParquetError::EOF(format!(
                "wanted {length} bytes at {start} of a file of {}",
                self.length
            )));
        }
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes.into())
    }
}

/// The same file for who copies whole chunks: it reads in large pieces.
pub(super) struct InLargePieces<'a>(pub(super) &'a Checked);

impl Length for InLargePieces<'_> {
    fn len(&self) -> u64 {
        self.0.length
    }
}

impl ChunkReader for InLargePieces<'_> {
    type T = BufReader<Part>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        let part = Part { file: self.0.file.clone(), position: start };
        Ok(BufReader::with_capacity(1 << 18, part))
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        self.0.get_bytes(start, length)
    }
}

/// The bytes of a file from one position on.
pub(super) struct Part {
    file: Arc<File>,
    position: u64,
}

impl Part {
    /// Returns the bytes of a whole file.
    pub(super) fn of(file: Arc<File>) -> Self {
        Self { file, position: 0 }
    }
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

/// Checks the last eight bytes: the footer's length and the end mark.
pub(super) fn check_tail(name: &str, file: &File, length: u64) -> Result<(), Error> {
    let cut = |what: String| Err(Error::Cut { name: name.to_owned(), what });
    if length < 12 {
        return cut(format!("{length} bytes are no Parquet file"));
    }
    let mut tail = [0; 8];
    file.read_exact_at(&mut tail, length - 8)
        .map_err(|source| Error::Read { name: name.to_owned(), source })?;
    let [size @ .., m0, m1, m2, m3] = tail;
    if [m0, m1, m2, m3] != *MAGIC {
        return cut("the Parquet footer is missing".to_owned());
    }
    let footer = u64::from(u32::from_le_bytes(size));
    if footer > length - 12 {
        return cut(format!("its footer claims {footer} bytes, the file has {length}"));
    }
    Ok(())
}

/// Refuses counts that no file of this length can have, before they are used to
/// reserve memory.
fn check_counts(name: &str, metadata: &ParquetMetaData) -> Result<(), Error> {
    let groups = metadata.row_groups();
    let negative = groups.iter().any(|group| {
        group.num_rows() < 0
            || group
                .columns()
                .iter()
                .any(|column| column.num_values() < 0 || column.compressed_size() < 0)
    });
    let rows = groups.iter().try_fold(0_i64, |sum, group| sum.checked_add(group.num_rows()));
    if negative || rows != Some(metadata.file_metadata().num_rows()) {
        let reason = "its footer contradicts itself about the number of rows".to_owned();
        return Err(Error::Damaged { name: name.to_owned(), reason });
    }
    Ok(())
}

pub(super) fn damaged(name: &str, error: &impl Display) -> Error {
    let (name, reason) = (name.to_owned(), error.to_string());
    match reason.rsplit_once("Disabled feature at compile time: ") {
        Some((_, "flate2")) => Error::Codec { name, codec: "gzip".to_owned() },
        Some((_, codec)) => Error::Codec { name, codec: codec.to_owned() },
        None => Error::Damaged { name, reason },
    }
}

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a decoder over bytes that nobody vouches for.
pub(super) fn guarded<T>(
    name: &str,
    decode: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    static QUIET: Once = Once::new();
    // The message of a caught panic would be a second, misleading report.
    QUIET.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                report(panic);
            }
        }));
    });
    let before = GUARDED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(decode));
    GUARDED.set(before);
    outcome.unwrap_or_else(|panic| {
        let reason = format!("its decoder gave up: {}", words(panic.as_ref()));
        Err(Error::Damaged { name: name.to_owned(), reason })
    })
}

fn words(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "no reason given".to_owned(),
    }
}
