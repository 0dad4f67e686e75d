//! Files of other writers: whatever they have besides the table's own columns, and
//! however they compress it, is still there afterwards.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output};

use oclaw::table::{Format, Source};
use oclaw::trajectory::{Turn, turn};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::{BloomFilterPosition, EnabledStatistics, WriterProperties};

use super::super::judge::read;
use super::spliced::{advantage, chunks, is_own};
use super::{TAUGHT, table, words};
use crate::forge::{captured, finished, write};
use crate::harness::{oclaw, root};

/// Runs Python with pyarrow, if it is there.
pub(super) fn pyarrow(code: &str, paths: &[&Path]) -> Option<Output> {
    let packages = root().join("target/python");
    let python = |code: &str, paths: &[&Path]| {
        Command::new("python3").env("PYTHONPATH", &packages).args(["-c", code]).args(paths).output()
    };
    if !python("import pyarrow.parquet", &[]).is_ok_and(|output| output.status.success()) {
        return None;
    }
    let output = python(code, paths).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(output)
}

fn turns() -> Vec<Turn> {
    let stated = Turn { reward_explicit: Some(0.5), ..captured("t", 2) };
    let bare =
        Turn { prompt_ids: None, response_ids: None, rollout_log_probs: None, ..captured("u", 1) };
    let neutral = Turn { score: Some(0.0), ..captured("v", 1) };
    vec![finished("s", 1), finished("t", 1), stated, bare, neutral]
}

#[test]
fn every_codec_and_index_of_our_own_library() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let batch = turn::batch(&TAUGHT, &turns()).unwrap();
    let plain = at("plain.ipc");
    let stream = write(&at("in.ipc"), Format::Ipc, &TAUGHT, &turns());
    advantage(&["--format", "ipc"], &[&stream], &plain);
    let zstd = Compression::ZSTD(ZstdLevel::try_new(19).unwrap());
    for codec in [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::LZ4_RAW, zstd] {
        let input = at("in.parquet");
        let properties = WriterProperties::builder()
            .set_compression(codec)
            .set_statistics_enabled(EnabledStatistics::Page)
            .set_bloom_filter_enabled(true)
            .set_bloom_filter_position(BloomFilterPosition::AfterRowGroup)
            .set_data_page_row_count_limit(1)
            .set_write_batch_size(1)
            .set_max_row_group_row_count(Some(2));
        let file = File::create(&input).unwrap();
        let mut writer =
            ArrowWriter::try_new(file, batch.schema(), Some(properties.build())).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        let spliced = at("spliced.parquet");
        advantage(&[], &[&input], &spliced);
        assert_eq!(read(&spliced), read(&plain));

        let (before, after) = (chunks(&input), chunks(&spliced));
        assert_eq!((before.len(), after.len()), (3, 3));
        let mut filters = 0;
        for (before, after) in before.iter().zip(&after) {
            let others = after.iter().filter(|(chunk, _)| !is_own(chunk));
            for ((was, old), (is, new)) in before.iter().zip(others) {
                assert_eq!(old, new, "{}", is.column_path());
                assert_eq!(was.compression(), is.compression());
                // In a file of ours these would be taken for granted.
                let prompts = is.column_path().parts()[0] == "prompt_ids";
                assert_eq!(is.statistics(), was.statistics().filter(|_| !prompts));
                assert!(was.offset_index_offset().is_some());
                filters += usize::from(was.bloom_filter_offset().is_some());
                // What points into the old file would point at something else here.
                assert_eq!(is.bloom_filter_offset(), None);
                assert_eq!((is.column_index_offset(), is.offset_index_offset()), (None, None));
            }
        }
        assert!(filters > 0);
    }
}

#[test]
fn a_table_without_rows_has_its_columns() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let empty = table(folder.path(), &TAUGHT, &[]);
    let output = at("out.parquet");
    advantage(&[], &[&empty], &output);
    let source = Source::open(std::slice::from_ref(&output)).unwrap();
    assert_eq!(source.total_rows(), Some(0));
    assert!(source.schema().index_of("advantages").is_ok());
    // Beside one that has some it changes nothing.
    let rows = write(&at("rows.parquet"), Format::Parquet, &TAUGHT, &turns());
    let (alone, beside) = (at("alone.parquet"), at("beside.parquet"));
    advantage(&[], &[&rows], &alone);
    advantage(&[], &[&empty, &rows, &empty], &beside);
    assert_eq!(chunks(&alone).len(), chunks(&beside).len());
    assert_eq!(read(&alone), read(&beside));
}

#[test]
fn a_chunk_that_its_file_has_not_is_no_part_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let whole = write(&at("whole.parquet"), Format::Parquet, &TAUGHT, &turns());
    let bytes = fs::read(&whole).unwrap();
    let footer = u32::from_le_bytes(bytes[bytes.len() - 8..bytes.len() - 4].try_into().unwrap());
    // The footer is whole and the rows before it are not.
    let cut = at("cut.parquet");
    let rows = bytes.len() - 8 - footer as usize;
    fs::write(&cut, [&bytes[..rows / 2], &bytes[rows..]].concat()).unwrap();
    let output = at("out.parquet");
    let run = oclaw().arg("advantage").arg("-o").args([&output, &cut]).assert();
    let run = run.code(1);
    let talk = words(run.get_output());
    assert!(talk.contains(&cut.display().to_string()), "{talk}");
    assert!(!output.exists());
}

const WRITE: &str = r#"
import sys, decimal, pyarrow as pa, pyarrow.parquet as pq
source, folder = sys.argv[1:]
table = pq.read_table(source)
rows = range(table.num_rows)
more = {
    "mood": pa.array([{"name": str(row), "parts": [[row], None, []]} for row in rows]),
    "marks": pa.array([[("one", row)] if row else None for row in rows], pa.map_(pa.string(), pa.int64())),
    "price": pa.array([decimal.Decimal(row) / 4 for row in rows], pa.decimal128(9, 2)),
    "grade": pa.array([["good", "bad"][row % 2] for row in rows]).dictionary_encode(),
    "bytes": pa.array([bytes([row, 0, 255]) for row in rows]),
    "seen": pa.array([row * 10**9 for row in rows], pa.timestamp("ns", "Europe/Berlin")),
    "nothing": pa.nulls(len(rows)),
}
for place, (name, values) in enumerate(more.items()):
    table = table.add_column(3 * place, name, values)
table = table.replace_schema_metadata({**(table.schema.metadata or {}), b"owner": b"somebody"})
usual = dict(row_group_size=2, write_page_index=True, write_page_checksum=True, use_compliant_nested_type=False)
for codec in ["none", "snappy", "lz4", "zstd"]:
    pq.write_table(table, f"{folder}/{codec}.parquet", compression=codec, **usual)
pq.write_table(table, f"{folder}/elements.parquet", row_group_size=2, write_page_index=True)
pq.write_table(table, f"{folder}/pages.parquet", data_page_version="2.0", use_dictionary=False, **usual)
pq.write_table(table, f"{folder}/filter.parquet", bloom_filter_options={"turn_id": True, "session_id": True}, **usual)
pq.write_table(table, f"{folder}/deflated.parquet", compression="gzip")
# Codecs that this build need not know, for columns that nobody looks at.
leaves = {path: "zstd" for path in (pq.ParquetFile(f"{folder}/none.parquet").schema.column(leaf).path for leaf in range(len(pq.ParquetFile(f"{folder}/none.parquet").schema)))}
for codec in ["gzip", "brotli"]:
    codecs = leaves | {path: codec for path in leaves if path.split(".")[0] in [*more, "messages", "tools"]}
    pq.write_table(table, f"{folder}/{codec}.parquet", compression=codecs, **usual)
"#;

const COMPARE: &str = r#"
import sys, pyarrow.parquet as pq
paths = sys.argv[1:]
for before, after in zip(paths[::2], paths[1::2]):
    old, new = pq.read_table(before), pq.read_table(after, page_checksum_verification=True)
    kept = new.select(old.column_names)
    for name in old.column_names:
        assert kept[name].to_pylist() == old[name].to_pylist(), (before, name)
    assert new.schema.metadata[b"owner"] == b"somebody", before
    was, now = (pq.ParquetFile(path).metadata for path in (before, after))
    assert kept.equals(old), before
    assert kept.schema.equals(old.schema), before
    assert was.num_row_groups == now.num_row_groups == 3, before
    for group in range(3):
        places = {}
        for leaf in range(now.num_columns):
            chunk = now.row_group(group).column(leaf)
            places[chunk.path_in_schema] = chunk
            assert not chunk.has_column_index and not chunk.has_offset_index, chunk
        for leaf in range(was.num_columns):
            chunk = was.row_group(group).column(leaf)
            copied = places[chunk.path_in_schema]
            for what in ("compression", "num_values", "total_compressed_size"):
                assert getattr(chunk, what) == getattr(copied, what), (before, chunk, copied)
            assert set(chunk.encodings) == set(copied.encodings), (before, chunk, copied)
            # Bounds of floats may be dropped; none may be made up.
            bounds = copied.statistics and copied.statistics.has_min_max
            assert not bounds or chunk.statistics == copied.statistics, (before, chunk, copied)
"#;

#[test]
fn whatever_pyarrow_writes_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let ours = write(&at("ours.parquet"), Format::Parquet, &TAUGHT, &turns());
    let theirs = at("theirs");
    fs::create_dir(&theirs).unwrap();
    if pyarrow(WRITE, &[&ours, &theirs]).is_none() {
        println!("skipped: no pyarrow in target/python (`.ci/run` installs it)");
        return;
    }
    let plain = at("plain.parquet");
    advantage(&[], &[&ours], &plain);
    let mut paths = Vec::new();
    for name in ["none", "snappy", "lz4", "zstd", "elements", "pages", "filter", "gzip", "brotli"] {
        let (before, after) = (theirs.join(format!("{name}.parquet")), at(&format!("{name}.out")));
        advantage(&[], &[&before], &after);
        if !["gzip", "brotli"].contains(&name) {
            assert_eq!(read(&after), read(&plain), "{name}");
        }
        paths.extend([before, after]);
    }
    let deflated = theirs.join("deflated.parquet");
    let run = oclaw().arg("advantage").arg(&deflated).assert().code(1);
    let talk = words(run.get_output());
    assert!(talk.contains("deflated.parquet` is compressed by `gzip`, which this"), "{talk}");
    assert!(talk.contains("hint: write it with zstd"), "{talk}");
    let paths: Vec<&Path> = paths.iter().map(|path| path.as_path()).collect();
    pyarrow(COMPARE, &paths);
}
