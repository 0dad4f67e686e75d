//! Of Parquet files that become one, only the new columns are encoded.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use oclaw::table::{Format, Source};
use oclaw::trajectory::{Turn, Writer, columns, turn};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::super::judge::read;
use super::TAUGHT;
use super::foreign::pyarrow;
use crate::forge::{captured, finished, write};
use crate::harness::oclaw;

/// Writes a table as no stage does: not compressed, with dictionaries, with a column of
/// its own, one row group for each list of turns.
fn foreign(path: PathBuf, groups: &[Vec<Turn>]) -> PathBuf {
    let batch = |turns: &[Turn]| {
        let known = turn::batch(&TAUGHT, turns).unwrap();
        let mut fields = known.schema().fields().to_vec();
        fields.insert(3, Arc::new(Field::new("mood", DataType::Int64, true)));
        let moods: Int64Array = turns.iter().map(|turn| Some(i64::from(turn.turn) * 7)).collect();
        let mut arrays = known.columns().to_vec();
        arrays.insert(3, Arc::new(moods) as ArrayRef);
        RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap()
    };
    let properties = WriterProperties::builder().set_compression(Compression::UNCOMPRESSED);
    let file = File::create(&path).unwrap();
    let mut writer =
        ArrowWriter::try_new(file, batch(&[]).schema(), Some(properties.build())).unwrap();
    for turns in groups {
        writer.write(&batch(turns)).unwrap();
        writer.flush().unwrap();
    }
    writer.close().unwrap();
    path
}

/// Returns each column chunk of a file with its bytes, row group by row group.
pub(super) fn chunks(path: &Path) -> Vec<Vec<(ColumnChunkMetaData, Vec<u8>)>> {
    let bytes = fs::read(path).unwrap();
    let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
    let chunk = |chunk: &ColumnChunkMetaData| {
        let (start, length) = chunk.byte_range();
        (chunk.clone(), bytes[start as usize..(start + length) as usize].to_vec())
    };
    let groups = reader.metadata().row_groups().iter();
    groups.map(|group| group.columns().iter().map(chunk).collect()).collect()
}

pub(super) fn is_own(chunk: &ColumnChunkMetaData) -> bool {
    let name = &chunk.column_path().parts()[0];
    columns().iter().any(|column| column.name == name && column.writer == Writer::Advantage)
}

pub(super) fn advantage(words: &[&str], inputs: &[&Path], output: &Path) {
    oclaw().arg("advantage").args(words).arg("-o").arg(output).args(inputs).assert().success();
}

#[test]
fn chunks_of_other_columns_are_copied_to_the_byte() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let neutral = Turn { score: Some(0.0), ..captured("u", 1) };
    let log_probs = [-0.5, -1.25, -0.75].map(Some);
    let whole = Turn { rollout_log_probs: Some(log_probs.to_vec()), ..finished("s", 1) };
    let one = vec![vec![whole, neutral], vec![finished("s", 2)]];
    let first = foreign(at("1.parquet"), &one);
    let second = foreign(at("2.parquet"), &[vec![captured("s", 3), finished("t", 1)]]);
    let (spliced, plain) = (at("spliced.parquet"), at("plain"));
    let combine = ["--estimator", "combine"];
    advantage(&combine, &[&first, &second], &spliced);
    // A stream has no row groups: here each row was decoded and encoded again.
    advantage(&[&combine[..], &["--format", "ipc"]].concat(), &[&first, &second], &plain);
    let turns = read(&spliced);
    assert_eq!(turns.len(), 5);
    assert_eq!(turns, read(&plain));
    let combined = [-0.1 + 0.5 - 1.0, -0.2 + 1.25 - 1.0, -0.3 + 0.75 - 1.0_f32];
    assert_eq!(turns[0].advantages, Some(combined.to_vec()));
    assert_eq!(turns[2].rl_advantages, Some(vec![-1.0; 3]));
    assert_eq!(turns[1].promoted, Some(true));

    let before: Vec<_> = [chunks(&first), chunks(&second)].concat();
    let after = chunks(&spliced);
    assert_eq!(after.len(), 3);
    for (before, after) in before.iter().zip(&after) {
        let (own, others): (Vec<_>, Vec<_>) = after.iter().partition(|(chunk, _)| is_own(chunk));
        assert_eq!((own.len(), others.len()), (9, before.len()));
        for ((was, old), (is, new)) in before.iter().zip(others) {
            assert_eq!(was.column_path(), is.column_path());
            assert_eq!(old, new, "{}", is.column_path());
            assert_eq!(is.compression(), Compression::UNCOMPRESSED);
        }
        let zstd =
            |chunk: &ColumnChunkMetaData| matches!(chunk.compression(), Compression::ZSTD(_));
        assert!(own.iter().all(|(chunk, _)| zstd(chunk)));
    }
}

/// A file of ours counts its prompts, and one of somebody else may count otherwise.
#[test]
fn what_is_wrong_with_a_prompt_is_told_whoever_wrote_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let prompts = [Some(vec![5, 6]), None, Some(Vec::new()), Some(vec![5, 0, -3])];
    let turns =
        (1..).zip(prompts).map(|(number, prompt_ids)| Turn { prompt_ids, ..finished("s", number) });
    let turns: Vec<_> = turns.collect();
    told(&at, &write(&at("ours.parquet"), Format::Parquet, &TAUGHT, &turns));
    told(&at, &foreign(at("1.parquet"), &[turns]));
}

fn told(at: &dyn Fn(&str) -> PathBuf, input: &Path) {
    let (spliced, plain) = (at("spliced.parquet"), at("plain"));
    for words in [
        vec!["-o", spliced.to_str().unwrap()],
        vec!["--format", "ipc", "-o", plain.to_str().unwrap()],
    ] {
        oclaw().arg("advantage").args(words).arg(input).assert().code(3);
    }
    let found = read(&spliced);
    assert_eq!(found, read(&plain));
    let told =
        found.iter().map(|turn| (turn.sample_reason.as_deref(), turn.advantage_error.as_deref()));
    let expected = [
        (None, None),
        (Some("no_token_ids"), None),
        (Some("no_token_ids"), None),
        (Some("refused"), Some("prompt_ids has id -3 at token 2")),
    ];
    assert_eq!(told.collect::<Vec<_>>(), expected);
    let kept: Vec<_> = found.into_iter().map(|turn| turn.prompt_ids).collect();
    assert_eq!(kept, [Some(vec![5, 6]), None, Some(Vec::new()), Some(vec![5, 0, -3])]);
}

/// That a neutral turn contradicts itself is seen in its lists alone. By the light columns
/// it is the first that is neutral, and would be the one to promote.
#[test]
fn what_was_supposed_gives_way_to_what_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let neutral = |number| Turn { score: Some(0.0), ..captured("s", number) };
    let broken = Turn { rollout_log_probs: Some(vec![Some(-0.5)]), ..neutral(1) };
    let turns = [broken, neutral(2), neutral(3), finished("t", 1)];
    let input = write(&at("in.parquet"), Format::Parquet, &TAUGHT, &turns);
    let (spliced, plain) = (at("spliced.parquet"), at("plain"));
    for (output, format) in [(&spliced, "parquet"), (&plain, "ipc")] {
        let mut command = oclaw();
        command.args(["advantage", "--format", format, "-o"]).args([output, &input]);
        let talk = command.assert().code(3).get_output().stderr.clone();
        let talk = String::from_utf8(talk).unwrap();
        // Counted once, however often they were noted.
        let rows = talk.lines().find(|line| line.trim().starts_with("turns")).expect(&talk);
        assert_eq!(rows.split_whitespace().last(), Some("4"), "{talk}");
    }
    let found = read(&spliced);
    assert_eq!(found, read(&plain));
    // What has gone down a pipe is not taken back.
    let (pipe, piped) = (at("pipe"), at("piped"));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let end = pipe.clone();
    let reader = std::thread::spawn(move || std::fs::read(end).unwrap());
    oclaw().args(["advantage", "-o"]).args([&pipe, &input]).assert().code(3);
    std::fs::write(&piped, reader.join().unwrap()).unwrap();
    assert_eq!(found, read(&piped));
    let promoted: Vec<_> = found.iter().map(|turn| turn.promoted).collect();
    assert_eq!(promoted, [false, true, false, false].map(Some));
}

#[test]
fn a_second_run_replaces_or_fills_and_tells_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let broken = Turn { rollout_log_probs: Some(vec![Some(-0.5)]), ..finished("s", 2) };
    let groups = [vec![finished("s", 1)], vec![broken, captured("t", 1)]];
    let input = foreign(at("in.parquet"), &groups);
    let once = at("once.parquet");
    let combine = ["advantage", "--estimator=combine", "-o"];
    oclaw().args(combine).args([&once, &input]).assert().code(3);
    for words in [["--replace", "--estimator=grpo"], ["--fill", "--estimator=grpo"]] {
        let (spliced, plain) = (at("twice.parquet"), at("plain"));
        for (output, format) in [(&spliced, "parquet"), (&plain, "ipc")] {
            let mut command = oclaw();
            command.arg("advantage").args(words).args(["--format", format, "-o"]);
            command.args([output, &once]).assert().code(3);
        }
        let turns = read(&spliced);
        assert_eq!(turns, read(&plain), "{words:?}");
        // What was noted before stays under `--fill`.
        let expected = read(&once)[0].advantages.clone();
        assert_eq!(turns[0].advantages == expected, words[0] == "--fill");
        assert_eq!(chunks(&spliced).len(), 2);
        let source = Source::open(&[spliced]).unwrap();
        let lines = &source.provenance().lines;
        assert_eq!(lines.len(), 2);
        assert!(lines[1].argv.contains(&words[0].to_owned()), "{:?}", lines[1].argv);
    }
    // A file may be replaced by what is made of it.
    advantage_in_place(&once);
}

fn advantage_in_place(path: &Path) {
    let before = read(path);
    let combine = ["advantage", "--replace", "--estimator=combine", "-o"];
    oclaw().args(combine).args([path, path]).assert().code(3);
    assert_eq!(read(path), before);
}

#[test]
fn pyarrow_reads_a_spliced_table() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let groups = [vec![finished("s", 1), captured("s", 2)], vec![finished("t", 1)]];
    let input = foreign(at("in.parquet"), &groups);
    let stream = write(&at("in.ipc"), Format::Ipc, &TAUGHT, &groups.concat());
    let (spliced, plain) = (at("spliced.parquet"), at("plain.parquet"));
    advantage(&[], &[&input], &spliced);
    advantage(&[], &[&stream], &plain);
    let code = r#"
import sys, pyarrow.parquet as parquet
before, spliced, plain = (parquet.read_table(path) for path in sys.argv[1:])
assert spliced.num_rows == 3 and spliced.column("mood").to_pylist() == [7, 14, 7]
assert spliced.select(before.column_names).equals(before)
assert spliced.drop_columns(["mood"]).equals(plain)
"#;
    if pyarrow(code, &[&input, &spliced, &plain]).is_none() {
        println!("skipped: no pyarrow in target/python (`.ci/run` installs it)");
    }
}
