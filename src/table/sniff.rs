//! What an input is, by its first bytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::{Error, Format, parquet_file, stream};

/// Reads the first bytes, without moving a cursor.
pub(super) fn head(name: &str, file: &File) -> Result<Vec<u8>, Error> {
    let mut head = [0; 8];
    let mut count = 0;
    while count < head.len() {
        match file.read_at(&mut head[count..], count as u64) {
            Ok(0) => break,
            Ok(read) => count += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(Error::Read { name: name.to_owned(), source }),
        }
    }
    Ok(head[..count].to_vec())
}

/// Tells a format by its first bytes.
pub(super) fn sniff(name: &str, head: &[u8]) -> Result<Format, Error> {
    let name = name.to_owned();
    if head.is_empty() {
        return Err(Error::Empty { name });
    }
    if head.starts_with(parquet_file::MAGIC) {
        return Ok(Format::Parquet);
    }
    if head.starts_with(stream::MAGIC) {
        return Ok(Format::Ipc);
    }
    if parquet_file::MAGIC.starts_with(head) || stream::MAGIC.starts_with(head) {
        return Err(Error::Cut { name, what: format!("{} bytes", head.len()) });
    }
    let found = match head {
        b"ARROW1\0\0" => "an Arrow file".to_owned(),
        [0x1f, 0x8b, ..] => "a gzip file".to_owned(),
        [b'{' | b'[', ..] => "JSON".to_owned(),
        _ => format!("it starts with `{}`", head.escape_ascii()),
    };
    Err(Error::Foreign { name, found })
}
