//! Event files for TensorBoard.
//!
//! A record is its length (u64, little-endian), the masked CRC-32C of those eight
//! bytes, the record, and its masked CRC-32C. A record is a protobuf message `Event`:
//! `wall_time` (1, double), `step` (2, int64), `file_version` (3, string), `summary`
//! (5, a message of `value`s (1), each with a `tag` (1, string) and a `simple_value`
//! (2, float)).

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use oclaw::train::Metrics;
use serde_json::Value;

/// Protobuf's wire types.
const VARINT: u64 = 0;
const EIGHT_BYTES: u64 = 1;
const DELIMITED: u64 = 2;
const FOUR_BYTES: u64 = 5;

/// An event file, made with the first step.
pub(super) struct Board {
    folder: PathBuf,
    file: Option<(PathBuf, File)>,
}

impl Board {
    pub(super) fn open(folder: &Path) -> anyhow::Result<Self> {
        if folder.exists() && !folder.is_dir() {
            anyhow::bail!("`{}`: event files go into a folder", folder.display());
        }
        Ok(Self { folder: folder.to_owned(), file: None })
    }

    /// Appends the numbers of a step; what is not known is left out.
    pub(super) fn write(&mut self, metrics: &Metrics) -> anyhow::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        let mut summary = Vec::new();
        for (tag, number) in scalars(&serde_json::to_value(metrics)?) {
            let mut value = Vec::new();
            delimited(&mut value, 1, tag.as_bytes());
            key(&mut value, 2, FOUR_BYTES);
            value.extend((number as f32).to_le_bytes());
            delimited(&mut summary, 1, &value);
        }
        let mut event = at(now);
        key(&mut event, 2, VARINT);
        varint(&mut event, metrics.step);
        delimited(&mut event, 5, &summary);
        let mut bytes = Vec::new();
        let path = match &self.file {
            Some((path, _)) => path.clone(),
            None => {
                let mut first = at(now);
                delimited(&mut first, 3, b"brain.Event:2");
                record(&mut bytes, &first);
                // TensorBoard reads the files of a folder in the order of their names.
                self.folder.join(format!(
                    "events.out.tfevents.{:010}.{}.oclaw",
                    now as u64,
                    process::id()
                ))
            }
        };
        record(&mut bytes, &event);
        let writing = || format!("cannot write the metrics to `{}`", path.display());
        if self.file.is_none() {
            fs::create_dir_all(&self.folder).with_context(writing)?;
            let file = File::options().create(true).append(true).open(&path);
            self.file = Some((path.clone(), file.with_context(writing)?));
        }
        match &mut self.file {
            Some((_, file)) => file.write_all(&bytes).with_context(writing),
            None => Ok(()),
        }
    }
}

/// Returns the numbers of a step, by tag.
fn scalars(metrics: &Value) -> Vec<(String, f64)> {
    let members = metrics.as_object().into_iter().flatten();
    let mut scalars = Vec::new();
    for (name, value) in members.filter(|(name, _)| *name != "step") {
        let own = value.as_f64().map(|number| (format!("train/{name}"), number));
        let parts = value.as_object().into_iter().flatten();
        let parts =
            parts.filter_map(|(part, value)| Some((format!("{name}/{part}"), value.as_f64()?)));
        scalars.extend(own.into_iter().chain(parts));
    }
    scalars
}

/// Begins an event.
fn at(wall_time: f64) -> Vec<u8> {
    let mut event = Vec::new();
    key(&mut event, 1, EIGHT_BYTES);
    event.extend(wall_time.to_le_bytes());
    event
}

fn key(out: &mut Vec<u8>, field: u64, wire_type: u64) {
    varint(out, field << 3 | wire_type);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn delimited(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    key(out, field, DELIMITED);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn record(out: &mut Vec<u8>, event: &[u8]) {
    let length = (event.len() as u64).to_le_bytes();
    out.extend(length);
    out.extend(masked(&length).to_le_bytes());
    out.extend(event);
    out.extend(masked(event).to_le_bytes());
}

/// A checksum that stays one where the bytes have checksums in them.
fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}
