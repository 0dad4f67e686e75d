//! safetensors files: opened by their header, read tensor by tensor, written as
//! a stream. No tensor library: weights are bytes with a type and a shape here.
//!
//! A file is never mapped into memory, so one that is replaced or cut while we
//! read gives an error, not a crash. Absent on purpose: arithmetic, folders,
//! atomic replacement (the caller writes aside and renames).

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

/// Longest header that is read, as in every other implementation.
const HEADER_LIMIT: u64 = 100_000_000;
/// Bytes of the number in front of the header.
const LENGTH_BYTES: u64 = 8;

/// What can be wrong with a safetensors file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened or read.
    #[error("`{}`: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's own message.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("`{}`: cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's own message.
        source: io::Error,
    },
    /// The file is no whole safetensors file.
    #[error("`{}`: not a safetensors file ({problem})", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The bytes handed over for a tensor are not what was announced.
    #[error("`{}`: tensor {name} has {found} bytes, announced {wanted}", path.display())]
    WrongSize {
        /// The file.
        path: PathBuf,
        /// Name of the tensor, or nothing if there are more than announced.
        name: String,
        /// Bytes handed over.
        found: usize,
        /// Bytes announced.
        wanted: usize,
    },
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name in the file.
    pub name: String,
    /// Type of an element.
    pub dtype: Dtype,
    /// Shape, row-major.
    pub shape: Vec<usize>,
    /// First and one past the last byte, counted from the end of the header.
    range: (usize, usize),
}

/// An open safetensors file whose header has been checked against its length.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: File,
    data_start: u64,
    entries: Vec<Entry>,
}

impl Reader {
    /// Opens a file and checks its header.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Read { path: path.to_owned(), source };
        let malformed = |problem: String| Error::Malformed { path: path.to_owned(), problem };
        let mut file = File::open(path).map_err(failed)?;
        let file_length = file.metadata().map_err(failed)?.len();
        if file_length < LENGTH_BYTES {
            return Err(malformed(format!("only {file_length} bytes long")));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut length).map_err(failed)?;
        let header_length = u64::from_le_bytes(length);
        if header_length > HEADER_LIMIT || header_length > file_length - LENGTH_BYTES {
            return Err(malformed(format!("a header of {header_length} bytes cannot be")));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header).map_err(failed)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| malformed(format!("its header: {error}")))?;
        let data_start = LENGTH_BYTES + header_length;
        let wanted = data_start + metadata.data_len() as u64;
        if wanted != file_length {
            let problem = format!("{file_length} bytes long, its header announces {wanted}");
            return Err(malformed(problem));
        }
        let entries = metadata.offset_keys().into_iter().filter_map(|name| {
            let info = metadata.info(&name)?;
            let (dtype, shape) = (info.dtype, info.shape.clone());
            Some(Entry { dtype, shape, range: info.data_offsets, name })
        });
        let entries = entries.collect();
        Ok(Self { path: path.to_owned(), file, data_start, entries })
    }

    /// Returns the file's tensors in the order of their bytes.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Reads the bytes of one of this file's tensors.
    pub fn read(&self, entry: &Entry) -> Result<Vec<u8>, Error> {
        let (from, to) = entry.range;
        let mut bytes = vec![0; to - from];
        self.read_into(entry, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads them to where there is room for just so many.
    pub fn read_into(&self, entry: &Entry, bytes: &mut [u8]) -> Result<(), Error> {
        let (from, to) = entry.range;
        assert_eq!(bytes.len(), to - from, "room for `{}`", entry.name);
        self.file
            .read_exact_at(bytes, self.data_start + from as u64)
            .map_err(|source| Error::Read { path: self.path.clone(), source })
    }
}

/// A safetensors file being written, tensor by tensor in the announced order.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    /// The tensors still to come, last first.
    awaited: Vec<(String, usize)>,
}

impl Writer {
    /// Creates the file and writes the header. The metadata is
    /// `{"format":"pt"}`, which transformers' loaders ask for.
    pub fn create(
        path: &Path,
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
    ) -> Result<Self, Error> {
        let malformed = |problem: String| Error::Malformed { path: path.to_owned(), problem };
        let mut offset = 0_usize;
        let mut infos = Vec::new();
        let mut awaited = Vec::new();
        for (name, dtype, shape) in tensors {
            let size = shape
                .iter()
                .try_fold(dtype.bitsize(), |product, &length| product.checked_mul(length))
                .ok_or_else(|| malformed(format!("tensor {name} is too large")))?
                / 8;
            let end = offset.saturating_add(size);
            let data_offsets = (offset, end);
            offset = end;
            awaited.push((name.clone(), size));
            infos.push((name, TensorInfo { dtype, shape, data_offsets }));
        }
        awaited.reverse();
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let header = Metadata::new(Some(metadata), infos)
            .map_err(|error| malformed(error.to_string()))
            .and_then(|header| {
                serde_json::to_vec(&header).map_err(|error| malformed(error.to_string()))
            });
        let mut header = header?;
        // The data begins at a multiple of 8 bytes; the header is padded with spaces.
        header.resize(header.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
        let failed = |source| Error::Write { path: path.to_owned(), source };
        let mut file = BufWriter::new(File::create(path).map_err(failed)?);
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
        file.write_all(&header).map_err(failed)?;
        Ok(Self { path: path.to_owned(), file, awaited })
    }

    /// Writes the bytes of the next tensor.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let (name, wanted) = self.awaited.pop().unwrap_or_default();
        if bytes.len() != wanted {
            return Err(self.wrong_size(name, bytes.len(), wanted));
        }
        self.file
            .write_all(bytes)
            .map_err(|source| Error::Write { path: self.path.clone(), source })
    }

    /// Ends the file and waits until it is on the disk.
    pub fn finish(mut self) -> Result<(), Error> {
        if let Some((name, wanted)) = self.awaited.pop() {
            return Err(self.wrong_size(name, 0, wanted));
        }
        let failed = |source| Error::Write { path: self.path.clone(), source };
        self.file.flush().map_err(failed)?;
        self.file.get_ref().sync_all().map_err(failed)
    }

    fn wrong_size(&self, name: String, found: usize, wanted: usize) -> Error {
        Error::WrongSize { path: self.path.clone(), name, found, wanted }
    }
}
