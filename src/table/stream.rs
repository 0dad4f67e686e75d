//! Arrow IPC streams in. A stream that just ends is not at its end: the decoder
//! of the arrow crate takes that for success, so the end mark is checked here.

use std::io::{self, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow::ipc::reader::StreamReader;

use super::Error;
use super::parquet_file::guarded;

/// The first four bytes of a stream.
pub(super) const MAGIC: &[u8] = &[0xff; 4];
/// The last eight bytes of a stream.
pub(super) const END: &[u8] = &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// A stream being read.
pub(super) struct Stream {
    name: String,
    reader: StreamReader<Watched>,
    ran_dry: Arc<AtomicBool>,
    done: bool,
}

/// A reader that notes when it was asked for more than there was.
struct Watched {
    bytes: BufReader<Box<dyn Read + Send>>,
    ran_dry: Arc<AtomicBool>,
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.bytes.read(buffer)?;
        if count == 0 && !buffer.is_empty() {
            self.ran_dry.store(true, Ordering::Relaxed);
        }
        Ok(count)
    }
}

impl Stream {
    /// Starts to read a stream: its schema is known afterwards.
    pub(super) fn open(name: &str, bytes: Box<dyn Read + Send>) -> Result<Self, Error> {
        let ran_dry = Arc::new(AtomicBool::new(false));
        let bytes = BufReader::with_capacity(1 << 16, bytes);
        let watched = Watched { bytes, ran_dry: ran_dry.clone() };
        let reader = guarded(name, || {
            StreamReader::try_new(watched, None).map_err(|error| {
                failure(
                    name,
                    "the stream ends within its schema",
                    &error,
                    ran_dry.load(Ordering::Relaxed),
                )
            })
        })?;
        Ok(Self { name: name.to_owned(), reader, ran_dry, done: false })
    }

    pub(super) fn schema(&self) -> SchemaRef {
        self.reader.schema()
    }

    /// Returns the next batch, or nothing after the end mark.
    pub(super) fn next(&mut self) -> Result<Option<RecordBatch>, Error> {
        if self.done {
            return Ok(None);
        }
        let (name, reader, ran_dry) = (&self.name, &mut self.reader, &self.ran_dry);
        let batch = guarded(name, || {
            reader.next().transpose().map_err(|error| {
                failure(
                    name,
                    "the stream ends within a batch",
                    &error,
                    ran_dry.load(Ordering::Relaxed),
                )
            })
        })?;
        if batch.is_some() {
            return Ok(batch);
        }
        if self.ran_dry.load(Ordering::Relaxed) {
            let what = "the stream has no end mark; its writer died or was stopped".to_owned();
            return Err(Error::Cut { name: self.name.clone(), what });
        }
        self.done = true;
        // Whoever wrote the stream may still be flushing; let it finish in peace.
        let mut rest = [0; 1];
        match self.reader.get_mut().read(&mut rest) {
            Ok(0) => Ok(None),
            Ok(_) => {
                let reason = "there are bytes after the stream's end mark".to_owned();
                Err(Error::Damaged { name: self.name.clone(), reason })
            }
            Err(source) => Err(Error::Read { name: self.name.clone(), source }),
        }
    }
}

fn failure(name: &str, cut: &str, error: &arrow::error::ArrowError, ran_dry: bool) -> Error {
    let name = name.to_owned();
    match ran_dry {
        true => Error::Cut { name, what: cut.to_owned() },
        false => Error::Damaged { name, reason: error.to_string() },
    }
}
