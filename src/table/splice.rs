//! New columns beside old ones: a Parquet file of which all other column chunks are
//! the input's, byte for byte. Nothing that a stage does not look at is decoded, and
//! nothing that it does not write is encoded; row groups keep their cut and can be
//! worked on in parallel.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::compute::concat_batches;
use arrow::datatypes::{FieldRef, SchemaRef};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};
use parquet::arrow::arrow_writer::{
    ArrowColumnChunk, ArrowColumnWriter, ArrowRowGroupWriterFactory, compute_leaves,
};
use parquet::arrow::{ArrowSchemaConverter, ProjectionMask};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::Length;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::SchemaDescriptor;

use super::Error;
use super::parquet_file::{Checked, InLargePieces, MAGIC, ParquetFile, damaged, guarded};
use super::sink::{Output, parquet_failure};
use super::size::{BATCH_BYTES, BATCH_ROWS};
use crate::trajectory::{Turn, turn};

/// So many files are held open at most.
pub(super) const MOST_FILES: usize = 64;

/// Row groups whose chunks go into another file as they are.
pub struct Splice {
    files: Vec<Spliced>,
    /// The file and the place in it of each row group.
    groups: Vec<(usize, usize)>,
    /// For each leaf column of the output whether it is the stage's own.
    own: Vec<bool>,
}

/// One input.
struct Spliced {
    name: String,
    bytes: Checked,
    metadata: ArrowReaderMetadata,
    /// The leaves that are decoded.
    read: ProjectionMask,
    /// For each leaf of the output the one here that it is copied from.
    origins: Vec<Option<usize>>,
}

impl Splice {
    /// Opens files. Returns nothing if one of them has a column in another shape than
    /// the output, a chunk beyond its end, or a row group too heavy to be held.
    pub(super) fn plan(
        files: Vec<(String, Arc<File>)>,
        read: &[&str],
        (schema, own): (&SchemaRef, &[&str]),
    ) -> Result<Option<Self>, Error> {
        let Ok(output) = ArrowSchemaConverter::new().convert(schema) else { return Ok(None) };
        let own = (0..output.num_columns()).map(|leaf| own.contains(&root(&output, leaf)));
        let own = own.collect();
        let mut splice = Self { files: Vec::new(), groups: Vec::new(), own };
        for (name, file) in files {
            let (bytes, metadata) = ParquetFile::into_parts(&name, file)?;
            let descriptor = metadata.parquet_schema();
            let Some(origins) = splice.origins(&output, descriptor) else { return Ok(None) };
            let wanted: Vec<usize> = (0..descriptor.num_columns())
                .filter(|leaf| read.contains(&root(descriptor, *leaf)))
                .collect();
            let groups = metadata.metadata().row_groups();
            let sound = |group| is_light(group, &wanted) && is_there(group, bytes.len());
            if !groups.iter().all(sound) {
                return Ok(None);
            }
            let places = groups.iter().enumerate().filter(|(_, group)| group.num_rows() > 0);
            splice.groups.extend(places.map(|(place, _)| (splice.files.len(), place)));
            let read = ProjectionMask::leaves(descriptor, wanted);
            splice.files.push(Spliced { name, bytes, metadata, read, origins });
        }
        // A table without rows has its schema, and is written as any other.
        Ok((!splice.groups.is_empty()).then_some(splice))
    }

    /// Finds the leaves of one input that the output's are copied from.
    fn origins(
        &self,
        output: &SchemaDescriptor,
        input: &SchemaDescriptor,
    ) -> Option<Vec<Option<usize>>> {
        let mut places = BTreeMap::new();
        for leaf in 0..input.num_columns() {
            places.insert(input.column(leaf).path().parts().to_vec(), leaf);
        }
        let origin = |(index, own): (usize, &bool)| {
            if *own {
                return Some(None);
            }
            let wanted = output.column(index);
            let place = *places.get(wanted.path().parts())?;
            (input.column(place) == wanted).then_some(Some(place))
        };
        self.own.iter().enumerate().map(origin).collect()
    }

    /// Returns the number of row groups.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Returns the number of rows of a row group.
    pub fn rows(&self, group: usize) -> u64 {
        u64::try_from(self.place(group).1.num_rows()).unwrap_or_default()
    }

    fn place(&self, group: usize) -> (&Spliced, &RowGroupMetaData) {
        let (file, place) = self.groups[group];
        let file = &self.files[file];
        (file, file.metadata.metadata().row_group(place))
    }

    /// Decodes the columns of a row group that are to be read.
    pub fn read(&self, group: usize) -> Result<RecordBatch, Error> {
        let (file, place) = self.groups[group];
        let file = &self.files[file];
        let failed = |error: arrow::error::ArrowError| Error::Damaged {
            name: file.name.clone(),
            reason: error.to_string(),
        };
        guarded(&file.name, || {
            let metadata = file.metadata.clone();
            let reader =
                ParquetRecordBatchReaderBuilder::new_with_metadata(file.bytes.clone(), metadata)
                    .with_row_groups(vec![place])
                    .with_projection(file.read.clone())
                    .with_batch_size(BATCH_ROWS)
                    .build()
                    .map_err(|error| damaged(&file.name, &error))?;
            let batches: Result<Vec<_>, _> = reader.collect();
            let mut batches = batches.map_err(failed)?;
            match (batches.pop(), batches.is_empty()) {
                (Some(whole), true) => Ok(whole),
                (Some(last), false) => {
                    batches.push(last);
                    concat_batches(&batches[0].schema(), &batches).map_err(failed)
                }
                (None, _) => Err(Error::Damaged {
                    name: file.name.clone(),
                    reason: format!("row group {place} has no rows"),
                }),
            }
        })
    }

    /// Makes turns of some rows of what [`Splice::read`] returned. They have the columns
    /// that are to be read, and no other.
    pub fn turns(
        &self,
        group: usize,
        batch: &RecordBatch,
        rows: Range<usize>,
    ) -> Result<Vec<Turn>, Error> {
        turn::read_part(&batch.slice(rows.start, rows.len())).map_err(|source| {
            let (file, place) = self.groups[group];
            let file = &self.files[file];
            let before = &file.metadata.metadata().row_groups()[..place];
            let first: u64 = before.iter().map(|group| group.num_rows().max(0) as u64).sum();
            let source = source.from_row(first + rows.start as u64);
            Error::Schema { name: file.name.clone(), source }
        })
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
            let metadata = metadata.column(*leaf).clone();
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

    /// Returns the places of the stage's own leaves in the output.
    fn own(&self) -> impl Iterator<Item = usize> {
        (0..self.own.len()).filter(|leaf| self.own[*leaf])
    }
}

fn root(schema: &SchemaDescriptor, leaf: usize) -> &str {
    schema.get_column_root(leaf).name()
}

/// Whether some columns of a row group can be held all at once. A dictionary may say
/// much in few bytes: each value weighs four at least.
fn is_light(group: &RowGroupMetaData, leaves: &[usize]) -> bool {
    let weight = |leaf: &usize| {
        let chunk = group.column(*leaf);
        chunk.uncompressed_size().max(chunk.num_values().saturating_mul(4)).max(0)
    };
    let bytes = leaves.iter().map(weight).fold(0, i64::saturating_add);
    group.num_rows() <= BATCH_ROWS as i64 && bytes <= 2 * BATCH_BYTES as i64
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
    pub(super) fn new(name: &str, factory: ArrowRowGroupWriterFactory) -> Self {
        Self { name: name.to_owned(), factory }
    }

    /// Starts the new columns of a row group.
    pub fn start(&self, splice: &Splice, group: usize) -> Result<Columns<'_>, Error> {
        let writers = self.factory.create_column_writers(group);
        let writers = writers.map_err(|error| parquet_failure(&self.name, error))?;
        let mut own = splice.own().peekable();
        let writers = writers.into_iter().enumerate();
        let writers = writers.filter(|(leaf, _)| own.next_if_eq(leaf).is_some());
        let writers = writers.map(|(_, writer)| writer).collect();
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
