//! The header of a GGUF file, and its tensors by name.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::Error;
use super::blocks::{BlockType, dequantise, type_name};

/// Items that all lists of a header may have together. The largest vocabularies
/// have a third of a million tokens.
const ITEM_LIMIT: u64 = 1 << 24;
/// Lists inside lists.
const DEPTH_LIMIT: u32 = 4;
/// Dimensions of a tensor.
const DIMENSION_LIMIT: u32 = 4;

/// A value in the header.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// u8, u16, u32 or u64.
    Unsigned(u64),
    /// i8, i16, i32 or i64.
    Signed(i64),
    /// f32.
    F32(f32),
    /// f64.
    F64(f64),
    /// One byte, 0 or 1.
    Bool(bool),
    /// UTF-8.
    Text(String),
    /// Values of one type.
    List(Vec<Value>),
}

/// Where a tensor lies and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Shape, row-major (the file has it the other way round).
    pub shape: Vec<usize>,
    /// ggml's number of the block type.
    pub type_id: u32,
    offset: u64,
}

/// An open GGUF file.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    file: File,
    length: u64,
    data_start: u64,
    values: HashMap<String, Value>,
    tensors: Vec<TensorInfo>,
}

impl Gguf {
    /// Opens a file and reads its header.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut header = Header { path, input: BufReader::new(&file), read: 0, length, items: 0 };
        let (values, tensors) = header.read_all()?;
        let alignment = match values.get("general.alignment") {
            None => 32,
            Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() => *alignment,
            Some(other) => {
                return Err(header.malformed(format!("an alignment of {other:?}")));
            }
        };
        let data_start = header.read.next_multiple_of(alignment);
        let path = path.to_owned();
        Ok(Self { path, file, length, data_start, values, tensors })
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tensors in the order of the header.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns a value of the header.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Returns a value that must be text.
    pub fn text(&self, key: &str) -> Result<&str, Error> {
        match self.value(key) {
            Some(Value::Text(text)) => Ok(text),
            _ => Err(self.missing(key, "text")),
        }
    }

    /// Returns a value that must be a whole number of 0 or more.
    pub fn count(&self, key: &str) -> Result<usize, Error> {
        match self.value(key) {
            Some(Value::Unsigned(number)) => usize::try_from(*number).ok(),
            Some(Value::Signed(number)) => usize::try_from(*number).ok(),
            _ => None,
        }
        .ok_or_else(|| self.missing(key, "whole number"))
    }

    /// Returns a value that must be a number.
    pub fn number(&self, key: &str) -> Result<f64, Error> {
        match self.value(key) {
            // The shortest decimal that gives this f32: 1e-5, not 9.99999975e-6.
            Some(Value::F32(number)) => number.to_string().parse().ok(),
            Some(Value::F64(number)) => Some(*number),
            _ => None,
        }
        .ok_or_else(|| self.missing(key, "number"))
    }

    /// Returns a value that must be a list of texts.
    pub fn texts(&self, key: &str) -> Result<Vec<&str>, Error> {
        let missing = || self.missing(key, "list of texts");
        let Some(Value::List(items)) = self.value(key) else { return Err(missing()) };
        let texts = items.iter().map(|item| match item {
            Value::Text(text) => Ok(text.as_str()),
            _ => Err(missing()),
        });
        texts.collect()
    }

    pub(super) fn missing(&self, key: &str, wanted: &'static str) -> Error {
        Error::MissingKey { path: self.path.clone(), key: key.to_owned(), wanted }
    }

    /// Reads a tensor and turns it into f32.
    pub fn read(&self, tensor: &TensorInfo) -> Result<Vec<f32>, Error> {
        let malformed = |problem: String| Error::Malformed { path: self.path.clone(), problem };
        let Some(kind) = BlockType::from_id(tensor.type_id) else {
            return Err(Error::Unsupported {
                path: self.path.clone(),
                what: format!("the type of tensor `{}`", tensor.name),
                found: type_name(tensor.type_id),
                supported: "F32, F16, BF16, Q4_0, Q4_1, Q8_0",
            });
        };
        let numbers = tensor.shape.iter().try_fold(1_usize, |product, &n| product.checked_mul(n));
        let row = tensor.shape.last().copied().unwrap_or(1);
        let size = numbers.filter(|_| kind.bytes(row).is_some()).and_then(|n| kind.bytes(n));
        let start = self.data_start.checked_add(tensor.offset);
        let end = start.zip(size).and_then(|(start, size)| start.checked_add(size as u64));
        let (Some(start), Some(size), Some(end)) = (start, size, end) else {
            let TensorInfo { name, shape, .. } = tensor;
            return Err(malformed(format!("tensor `{name}` {shape:?} cannot be")));
        };
        if end > self.length {
            let problem =
                format!("cut: tensor `{}` ends at byte {end} of {}", tensor.name, self.length);
            return Err(malformed(problem));
        }
        let mut bytes = vec![0; size];
        self.file
            .read_exact_at(&mut bytes, start)
            .map_err(|source| Error::Read { path: self.path.clone(), source })?;
        Ok(dequantise(kind, &bytes))
    }
}

/// The header being read. Nothing is allocated for a length that the rest of
/// the file cannot hold.
struct Header<'a> {
    path: &'a Path,
    input: BufReader<&'a File>,
    read: u64,
    length: u64,
    items: u64,
}

impl Header<'_> {
    fn read_all(&mut self) -> Result<(HashMap<String, Value>, Vec<TensorInfo>), Error> {
        if self.length < 4 || &self.bytes::<4>()? != b"GGUF" {
            return Err(self.malformed("it does not begin with `GGUF`".to_owned()));
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            return Err(self.malformed(format!("version {version}, supported are 2 and 3")));
        }
        let tensor_count = self.u64()?;
        let value_count = self.u64()?;
        // A tensor takes 32 bytes or more, a value 13.
        self.check(tensor_count, 32)?;
        self.check(value_count, 13)?;
        let mut values = HashMap::new();
        for _ in 0..value_count {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind, 0)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(self.malformed(format!("the key `{key}` stands twice")));
            }
        }
        let mut tensors = Vec::new();
        for _ in 0..tensor_count {
            tensors.push(self.tensor()?);
        }
        Ok((values, tensors))
    }

    fn tensor(&mut self) -> Result<TensorInfo, Error> {
        let name = self.text()?;
        let dimensions = self.u32()?;
        if dimensions > DIMENSION_LIMIT {
            return Err(self.malformed(format!("tensor `{name}` has {dimensions} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let length = self.u64()?;
            shape.push(usize::try_from(length).map_err(|_| {
                self.malformed(format!("tensor `{name}` has a dimension of {length}"))
            })?);
        }
        // The file has the fastest dimension first.
        shape.reverse();
        Ok(TensorInfo { name, shape, type_id: self.u32()?, offset: self.u64()? })
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<Value, Error> {
        Ok(match kind {
            0 => Value::Unsigned(u8::from_le_bytes(self.bytes()?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.bytes()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.bytes()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.bytes()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.bytes()?).into()),
            6 => Value::F32(f32::from_le_bytes(self.bytes()?)),
            7 => match self.bytes::<1>()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.malformed(format!("a truth value of {other}"))),
            },
            8 => Value::Text(self.text()?),
            9 => self.list(depth)?,
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.bytes()?)),
            12 => Value::F64(f64::from_le_bytes(self.bytes()?)),
            _ => return Err(self.malformed(format!("a value of type {kind}"))),
        })
    }

    fn list(&mut self, depth: u32) -> Result<Value, Error> {
        if depth >= DEPTH_LIMIT {
            return Err(self.malformed(format!("lists nested more than {DEPTH_LIMIT} deep")));
        }
        let kind = self.u32()?;
        let count = self.u64()?;
        self.check(count, 1)?;
        self.items += count;
        if self.items > ITEM_LIMIT {
            return Err(self.malformed(format!("more than {ITEM_LIMIT} list items")));
        }
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(self.value(kind, depth + 1)?);
        }
        Ok(Value::List(items))
    }

    fn text(&mut self) -> Result<String, Error> {
        let length = self.u64()?;
        self.check(length, 1)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|error| {
            let text = String::from_utf8_lossy(error.as_bytes()).into_owned();
            self.malformed(format!("the text `{text}` is not UTF-8"))
        })
    }

    fn u32(&mut self) -> Result<u32, Error> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Error> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.input.read_exact(bytes).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                self.malformed(format!("cut: the header goes on after byte {}", self.length))
            }
            _ => Error::Read { path: self.path.to_owned(), source },
        })?;
        self.read += bytes.len() as u64;
        Ok(())
    }

    /// Refuses a count of things that the rest of the file cannot hold.
    fn check(&self, count: u64, least_bytes: u64) -> Result<(), Error> {
        let rest = self.length.saturating_sub(self.read);
        match count.checked_mul(least_bytes) {
            Some(bytes) if bytes <= rest => Ok(()),
            _ => Err(self.malformed(format!(
                "a count of {count} at byte {}, with {rest} bytes to come",
                self.read
            ))),
        }
    }

    fn malformed(&self, problem: String) -> Error {
        Error::Malformed { path: self.path.to_owned(), problem }
    }
}
