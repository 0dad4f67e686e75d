//! New columns beside old ones: a Parquet file of which all other column chunks are
//! the input's, byte for byte. Nothing that a stage does not look at is decoded, and
//! nothing that it does not write is encoded; row groups keep their cut and can be
//! worked on in parallel.

mod shape;

use std::fs::File;
use std::sync::Arc;

use arrow::array::ArrayRef;
use arrow::datatypes::{FieldRef, SchemaRef};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};
use parquet::arrow::arrow_writer::{
    ArrowColumnChunk, ArrowColumnWriter, ArrowRowGroupWriterFactory, ArrowWriterOptions,
    compute_leaves,
};
use parquet::arrow::{ArrowWriter, ProjectionMask};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use parquet::file::reader::Length;
use parquet::file::statistics::Statistics;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::SchemaDescriptor;

use super::parquet_file::{Checked, InLargePieces, MAGIC, ParquetFile, Rows, damaged, guarded};
use super::sink::{Output, parquet_failure};
use super::size::BATCH_BYTES;
use super::{Error, layout};
use crate::trajectory::{Turn, turn};
use shape::{Shape, root};

/// So many files are held open at most.
pub(super) const MOST_FILES: usize = 64;
/// So many rows become turns together.
const SLICE: usize = 256;
/// Most bytes of the columns of a row group that are read. What is made of them is held
/// until the group is whole.
const MOST_BYTES: i64 = 16 * BATCH_BYTES as i64;

/// Row groups whose chunks go into another file as they are.
pub struct Splice {
    files: Vec<Spliced>,
    /// The file and the place in it of each row group.
    groups: Vec<(usize, usize)>,
    shape: Shape,
}

/// One input.
struct Spliced {
    name: String,
    bytes: Checked,
    metadata: ArrowReaderMetadata,
    /// The leaves that are decoded.
    read: Vec<usize>,
    /// For each leaf of the output the one here that it is copied from.
    origins: Vec<Option<usize>>,
    /// We wrote it. Others may count other things as null in their statistics.
    ours: bool,
    /// The leaf of the prompts, if what the file says of them may be taken for granted.
    trusted: Option<usize>,
}

impl Splice {
    /// Opens files. Returns nothing if one of them has a column in another shape than
    /// the first, a chunk beyond its end, or a row group too heavy to be held.
    pub(super) fn plan(
        files: Vec<(String, Arc<File>)>,
        read: &[&str],
        (schema, own): (&SchemaRef, &[&str]),
    ) -> Result<Option<Self>, Error> {
        let (mut spliced, mut places, mut shape) = (Vec::new(), Vec::new(), None);
        for (name, file) in files {
            let (bytes, metadata) = ParquetFile::into_parts(&name, file)?;
            if shape.is_none() {
                shape = Shape::of(&metadata, schema, own);
            }
            let descriptor = metadata.parquet_schema();
            let Some(origins) = shape.as_ref().and_then(|shape| shape.origins(descriptor)) else {
                return Ok(None);
            };
            let read = leaves(descriptor, read);
            let groups = metadata.metadata().row_groups();
            let sound = |group| weight(group, &read) <= MOST_BYTES && is_there(group, bytes.len());
            if !groups.iter().all(sound) {
                return Ok(None);
            }
            let filled = groups.iter().enumerate().filter(|(_, group)| group.num_rows() > 0);
            places.extend(filled.map(|(place, _)| (spliced.len(), place)));
            let creator = metadata.metadata().file_metadata().created_by();
            let ours = creator.is_some_and(|creator| creator.starts_with("oclaw "));
            let trusted = None;
            spliced.push(Spliced { name, bytes, metadata, read, origins, ours, trusted });
        }
        // A table without rows has its schema, and is written as any other.
        let shape = shape.filter(|_| !places.is_empty());
        Ok(shape.map(|shape| Self { files: spliced, groups: places, shape }))
    }

    /// Reads only these columns from now on.
    pub fn narrow(&mut self, read: &[&str]) {
        for file in &mut self.files {
            file.read = leaves(file.metadata.parquet_schema(), read);
        }
    }

    /// Gives turns a single id 0 for their prompt where the file says that every one has
    /// ids, and none below 0; then prompts are not read. Only of files of ours is it known
    /// what they count as null.
    pub fn trust_prompts(&mut self) {
        for file in &mut self.files {
            let prompts = leaves(file.metadata.parquet_schema(), &["prompt_ids"]);
            file.trusted = prompts.first().copied().filter(|_| file.ours);
        }
    }

    /// Returns the number of row groups.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Returns the number of rows of a row group.
    pub fn rows(&self, group: usize) -> u64 {
        u64::try_from(self.place(group).1.num_rows()).unwrap_or_default()
    }

    /// Returns what the output is.
    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    fn place(&self, group: usize) -> (&Spliced, &RowGroupMetaData) {
        let (file, place) = self.groups[group];
        let file = &self.files[file];
        (file, file.metadata.metadata().row_group(place))
    }

    /// Starts to read the rows of a row group.
    pub fn read(&self, group: usize) -> Result<Reading<'_>, Error> {
        let place = self.groups[group].1;
        let (file, metadata) = self.place(group);
        let heaviest = weight(metadata, &file.read) / metadata.num_rows().max(1);
        let most = BATCH_BYTES / usize::try_from(heaviest).unwrap_or(1).max(1);
        let sound = file.trusted.filter(|leaf| is_sound(metadata.column(*leaf)));
        let leaves = file.read.iter().copied().filter(|leaf| sound != Some(*leaf));
        let read = ProjectionMask::leaves(file.metadata.parquet_schema(), leaves);
        let reader = guarded(&file.name, || {
            let metadata = file.metadata.clone();
            ParquetRecordBatchReaderBuilder::new_with_metadata(file.bytes.clone(), metadata)
                .with_row_groups(vec![place])
                .with_projection(read)
                .with_batch_size(most.clamp(1, SLICE))
                .build()
                .map_err(|error| damaged(&file.name, &error))
        })?;
        let before = &file.metadata.metadata().row_groups()[..place];
        let first = before.iter().map(|group| group.num_rows().max(0) as u64).sum();
        let rows = Rows::new(&file.name, reader);
        Ok(Reading { name: &file.name, rows, first, sound: sound.is_some() })
    }

    /// Writes a row group.
    pub(super) fn append(
        &self,
        writer: &mut SerializedFileWriter<Output>,
        group: usize,
        new: Encoded,
    ) -> Result<(), ParquetError> {
        let (file, metadata) = self.place(group);
        let mut chunks = new.chunks.into_iter();
        let mut group = writer.next_row_group()?;
        for origin in &file.origins {
            let Some(leaf) = origin else {
                if let Some(chunk) = chunks.next() {
                    chunk.append_to_row_group(&mut group)?;
                }
                continue;
            };
            let mut metadata = metadata.column(*leaf).clone();
            if !file.ours && metadata.column_path().parts()[0] == "prompt_ids" {
                // In a file of ours they would be taken for granted.
                metadata = metadata.into_builder().clear_statistics().build()?;
            }
            let close = ColumnCloseResult {
                bytes_written: u64::try_from(metadata.compressed_size()).unwrap_or_default(),
                rows_written: new.rows,
                metadata,
                bloom_filter: None,
                column_index: None,
                offset_index: None,
            };
            group.append_column(&InLargePieces(&file.bytes), close)?;
        }
        group.close()?;
        Ok(())
    }
}

/// The rows of a row group, as turns that have the columns that are to be read and no
/// other.
pub struct Reading<'a> {
    name: &'a str,
    rows: Rows,
    /// The number of the next row in its file.
    first: u64,
    /// Prompts are known to be sound, and not read.
    sound: bool,
}

impl Reading<'_> {
    /// Returns some more rows, or nothing at the end.
    pub fn next_turns(&mut self) -> Result<Option<Vec<Turn>>, Error> {
        let Some(batch) = self.rows.next()? else { return Ok(None) };
        let mut turns = turn::read_part(&batch).map_err(|source| {
            let source = source.from_row(self.first);
            Error::Schema { name: self.name.to_owned(), source }
        })?;
        if self.sound {
            turns.iter_mut().for_each(|turn| turn.prompt_ids = Some(vec![0]));
        }
        self.first += turns.len() as u64;
        Ok(Some(turns))
    }
}

/// Returns the leaves of some columns.
fn leaves(schema: &SchemaDescriptor, columns: &[&str]) -> Vec<usize> {
    (0..schema.num_columns()).filter(|leaf| columns.contains(&root(schema, *leaf))).collect()
}

/// Whether every row has ids and none is below 0, as the chunk's statistics say.
fn is_sound(chunk: &ColumnChunkMetaData) -> bool {
    match chunk.statistics() {
        Some(Statistics::Int32(ids)) => {
            ids.null_count_opt() == Some(0) && ids.min_opt().is_some_and(|least| *least >= 0)
        }
        _ => false,
    }
}

/// Returns the bytes of some columns of a row group. A dictionary may say much in few
/// bytes: each value weighs four at least.
fn weight(group: &RowGroupMetaData, leaves: &[usize]) -> i64 {
    let weight = |leaf: &usize| {
        let chunk = group.column(*leaf);
        chunk.uncompressed_size().max(chunk.num_values().saturating_mul(4)).max(0)
    };
    leaves.iter().map(weight).fold(0, i64::saturating_add)
}

/// Whether every chunk of a row group lies inside its file. Whoever decodes one that
/// does not names it.
fn is_there(group: &RowGroupMetaData, length: u64) -> bool {
    group.columns().iter().all(|chunk| {
        let data = chunk.data_page_offset();
        let start = chunk.dictionary_page_offset().unwrap_or(data);
        let end = start.checked_add(chunk.compressed_size());
        let magic = MAGIC.len() as i64;
        let inside = |end: i64| u64::try_from(end).is_ok_and(|end| end <= length);
        magic <= start && start <= data && end.is_some_and(inside)
    })
}

/// How new columns are encoded, on any thread.
pub struct Encoding {
    name: String,
    factory: ArrowRowGroupWriterFactory,
}

impl Encoding {
    /// Makes writers of the new columns alone: each one, used or not, takes memory and
    /// time.
    pub(super) fn new(name: &str, splice: &Splice) -> Result<Self, ParquetError> {
        let new = &splice.shape.new;
        let options = ArrowWriterOptions::new().with_properties(layout::properties(new));
        let writer = ArrowWriter::try_new_with_options(std::io::sink(), new.clone(), options)?;
        let (_, factory) = writer.into_serialized_writer()?;
        Ok(Self { name: name.to_owned(), factory })
    }

    /// Starts the new columns of a row group.
    pub fn start(&self, splice: &Splice, group: usize) -> Result<Columns<'_>, Error> {
        let writers = self.factory.create_column_writers(group);
        let writers = writers.map_err(|error| parquet_failure(&self.name, error))?;
        Ok(Columns { name: &self.name, writers, rows: splice.rows(group) })
    }
}

/// New columns of a row group, being encoded.
pub struct Columns<'a> {
    name: &'a str,
    writers: Vec<ArrowColumnWriter>,
    rows: u64,
}

/// New columns of a row group.
pub struct Encoded {
    chunks: Vec<ArrowColumnChunk>,
    rows: u64,
}

impl Columns<'_> {
    /// Encodes some more rows: every column of the stage, in the order of the output.
    pub fn write(&mut self, columns: &[(FieldRef, ArrayRef)]) -> Result<(), Error> {
        let failed = |error| parquet_failure(self.name, error);
        let mut writers = self.writers.iter_mut();
        for (field, array) in columns {
            for leaf in compute_leaves(field, array).map_err(failed)? {
                if let Some(writer) = writers.next() {
                    writer.write(&leaf).map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    /// Ends the columns.
    pub fn finish(self) -> Result<Encoded, Error> {
        let chunks: Result<_, _> = self.writers.into_iter().map(ArrowColumnWriter::close).collect();
        let chunks = chunks.map_err(|error| parquet_failure(self.name, error))?;
        Ok(Encoded { chunks, rows: self.rows })
    }
}
