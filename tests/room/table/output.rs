//! What is written: aside first, laid out as measured.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use oclaw::table::{Error, Format, Provenance, Sink, Source, Target, aside_of, read_turns};
use oclaw::trajectory::{Turn, Writer, columns, turn};
use parquet::basic::{Compression, Encoding};
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::{SERVE, folder};
use crate::forge::{STAGES, captured, finished, write};

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn sink(path: &Path, turns: &[Turn]) -> Sink {
    let batch = turn::batch(SERVE, turns).unwrap();
    let target = Target::Path(path.to_owned());
    let mut sink = Sink::create(&target, None, batch.schema(), &Provenance::default()).unwrap();
    sink.write(&batch).unwrap();
    sink
}

#[test]
fn a_sink_that_is_dropped_leaves_nothing() {
    let folder = folder();
    let path = folder.path().join("t.parquet");
    let unfinished = sink(&path, &[captured("a", 1)]);
    assert_eq!(names(folder.path()).len(), 1);
    assert!(names(folder.path())[0].starts_with(".tmp-"));
    drop(unfinished);
    assert_eq!(names(folder.path()), [] as [&str; 0]);
}

/// What a killed writer left goes with the next one of the same file; those who are
/// alive, and the files of others, stay.
#[test]
fn what_a_killed_writer_left_is_removed() {
    let folder = folder();
    // As long as a name may be.
    let name = "n".repeat(255);
    let path = folder.path().join(&name);
    let alive = sink(&path, &[captured("a", 1)]);
    let of = names(folder.path()).remove(0);
    let (left, other) = (format!("{}left", &of[..of.len() - 6]), ".tmp-of-other-left".to_owned());
    for name in [&left, &other] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    sink(&path, &[captured("b", 1)]).finish().unwrap();
    assert_eq!(names(folder.path()), [of, other.clone(), name.clone()]);
    alive.finish().unwrap();
    assert_eq!(names(folder.path()), [other, name]);
    assert_eq!(read_turns(&[path]).unwrap(), [captured("a", 1)]);
}

/// Whoever looks for what is abandoned takes nothing that has just been started.
#[test]
fn what_is_alive_keeps_its_name() {
    let folder = folder();
    let target = folder.path().join("t.parquet");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let aside = aside_of(&target).unwrap();
                    assert!(aside.path().exists());
                }
            });
        }
    });
    assert_eq!(names(folder.path()), [] as [&str; 0]);
}

#[test]
fn half_a_table_is_not_taken_for_whole() {
    let folder = folder();
    let mut half = sink(&folder.path().join("t.parquet"), &[captured("a", 1)]);
    let other = turn::batch(&STAGES[..2], &[captured("a", 2)]).unwrap();
    assert!(matches!(half.write(&other), Err(Error::Encode { .. })));
    // What would fit does not mend it.
    let fits = turn::batch(SERVE, &[captured("a", 3)]).unwrap();
    for error in [half.write(&fits).unwrap_err(), half.finish().unwrap_err()] {
        assert!(error.to_string().ends_with("a part of it was written by half before"), "{error}");
    }
    assert_eq!(names(folder.path()), [] as [&str; 0]);
}

#[test]
fn a_stream_takes_no_row_groups() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let turns = [finished("a", 1)];
    let input = write(&at("in.parquet"), Format::Parquet, &STAGES[..4], &turns);
    let source = Source::open(&[input]).unwrap();
    let schema = turn::batch(&STAGES, &[]).unwrap().schema();
    let own = columns().iter().filter(|column| column.writer == Writer::Advantage);
    let own: Vec<&str> = own.map(|column| column.name).collect();
    let splice = source.splice(&["turn_id"], (&schema, &own)).unwrap().unwrap();
    let create = |name: &str, format: Format| {
        let target = Target::Path(at(name));
        let told = Provenance::default();
        Sink::create_beside((&target, Some(format)), (schema.clone(), &splice), &told).unwrap()
    };
    let (mut table, encoding) = create("out.parquet", Format::Parquet);
    let encode = || {
        let mut new = encoding.as_ref().unwrap().start(&splice, 0).unwrap();
        new.write(&turn::arrays(&[Writer::Advantage], &turns).unwrap()).unwrap();
        new.finish().unwrap()
    };
    let (mut stream, _) = create("out.ipc", Format::Ipc);
    assert!(matches!(stream.append(&splice, 0, encode()), Err(Error::Encode { .. })));
    assert!(stream.finish().is_err());
    table.append(&splice, 0, encode()).unwrap();
    table.finish().unwrap();
    assert_eq!(read_turns(&[at("out.parquet")]).unwrap(), turns);
    assert_eq!(names(folder.path()), ["in.parquet", "out.parquet"]);
}

#[test]
fn a_file_is_replaced_at_once_at_the_end() {
    let folder = folder();
    let path = folder.path().join("t.parquet");
    let first = [captured("a", 1)];
    let second = [captured("a", 1), captured("a", 2)];
    sink(&path, &first).finish().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o600, 0o600);
    let under_way = sink(&path, &second);
    assert_eq!(read_turns(std::slice::from_ref(&path)).unwrap(), first);
    under_way.finish().unwrap();
    assert_eq!(read_turns(std::slice::from_ref(&path)).unwrap(), second);
    assert_eq!(names(folder.path()), ["t.parquet"]);
}

#[test]
fn a_file_may_be_read_and_written_by_the_same_stage() {
    let folder = folder();
    let path = folder.path().join("t.parquet");
    let turns: Vec<_> = (1..=30).map(|number| captured("a", number)).collect();
    sink(&path, &turns).finish().unwrap();
    let mut source = Source::open(std::slice::from_ref(&path)).unwrap();
    let target = Target::Path(path.clone());
    let mut copy = Sink::create(&target, None, source.schema(), source.provenance()).unwrap();
    while let Some(batch) = source.next_batch().unwrap() {
        copy.write(&batch).unwrap();
    }
    copy.finish().unwrap();
    assert_eq!(read_turns(&[path]).unwrap(), turns);
}

#[test]
fn a_link_stays_a_link() {
    let folder = folder();
    let (file, link) = (folder.path().join("t.parquet"), folder.path().join("latest"));
    sink(&file, &[captured("a", 1)]).finish().unwrap();
    symlink("t.parquet", &link).unwrap();
    sink(&link, &[captured("b", 1)]).finish().unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(read_turns(&[file]).unwrap(), [captured("b", 1)]);
}

#[test]
fn a_device_is_written_to_and_not_replaced() {
    let folder = folder();
    let link = folder.path().join("null");
    symlink("/dev/null", &link).unwrap();
    sink(&link, &[captured("a", 1)]).finish().unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(names(folder.path()), ["null"]);
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let folder = folder();
    let schema = turn::batch(SERVE, &[]).unwrap().schema();
    for path in [folder.path().to_owned(), folder.path().join("nowhere/t.parquet")] {
        let target = Target::Path(path.clone());
        let made = Sink::create(&target, None, schema.clone(), &Provenance::default());
        let error = made.err().unwrap();
        assert!(matches!(error, Error::Write { .. }));
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
}

/// Path of each leaf with its encodings, and whether it has a dictionary.
fn encodings(path: &Path) -> BTreeMap<String, (Vec<Encoding>, bool)> {
    let reader = SerializedFileReader::new(fs::File::open(path).unwrap()).unwrap();
    let group = reader.metadata().row_group(0);
    let describe = |column: &parquet::file::metadata::ColumnChunkMetaData| {
        assert!(
            matches!(column.compression(), Compression::ZSTD(level) if level.compression_level() == 1)
        );
        let found = (column.encodings().collect(), column.dictionary_page_offset().is_some());
        (column.column_path().string(), found)
    };
    group.columns().iter().map(describe).collect()
}

#[test]
fn numbers_per_token_are_split_into_bytes_and_texts_have_no_dictionary() {
    let folder = folder();
    let turns: Vec<_> = (1..=50).map(|number| finished("a", number)).collect();
    let path = write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &turns);
    let found = encodings(&path);
    for leaf in [
        "prompt_ids.list.item",
        "response_ids.list.item",
        "rollout_log_probs.list.item",
        "teacher_log_probs.list.item.list.item",
        "teacher_topk_ids.list.item.list.item",
        "teacher_at_student.list.item.list.item",
        "student_topk_ids.list.item",
        "rl_advantages.list.item",
        "advantages.list.item",
    ] {
        let (encodings, dictionary) = &found[leaf];
        assert!(encodings.contains(&Encoding::BYTE_STREAM_SPLIT), "{leaf}: {encodings:?}");
        assert!(!dictionary, "{leaf}");
    }
    for leaf in [
        "messages",
        "tools",
        "response",
        "next_state",
        "judge_text.list.item",
        "votes.list.item",
        "loss_mask.list.item",
    ] {
        let (encodings, dictionary) = &found[leaf];
        assert!(encodings.contains(&Encoding::PLAIN) && !dictionary, "{leaf}: {encodings:?}");
    }
    assert!(found["session_id"].1, "short words that repeat keep their dictionary");
}

#[test]
fn what_a_long_session_repeats_compresses_away() {
    let folder = folder();
    // 150 turns, each request repeating all that was said before.
    let mut said = String::new();
    let mut turns = Vec::new();
    for number in 1..=150_u32 {
        let mut turn = captured("a", number);
        for word in 0..60_u32 {
            said.push_str(&format!("{} ", (number * 7919 + word * 104_729) % 99_991));
        }
        turn.messages = format!(r#"[{{"role":"user","content":"{said}"}}]"#);
        turn.prompt_ids = Some(said.bytes().map(|byte| i32::from(byte) * 97).collect());
        turns.push(turn);
    }
    let path = write(&folder.path().join("t.parquet"), Format::Parquet, SERVE, &turns);
    let raw: usize = turns.iter().map(|turn| 5 * turn.messages.len()).sum();
    let stored = fs::metadata(&path).unwrap().len() as usize;
    assert!(stored * 20 < raw, "{stored} of {raw} bytes");
}

#[test]
fn row_groups_are_bounded_by_bytes() {
    let folder = folder();
    let path = folder.path().join("t.parquet");
    let turns: Vec<_> = (1..=40).map(|turn| super::heavy(turn, 1 << 20)).collect();
    sink(&path, &turns).finish().unwrap();
    let reader = SerializedFileReader::new(fs::File::open(&path).unwrap()).unwrap();
    let groups = reader.metadata().row_groups();
    assert_eq!(groups.iter().map(|group| group.num_rows()).sum::<i64>(), 40);
    assert!(groups.len() >= 3, "{} groups", groups.len());
    assert!(groups.iter().all(|group| group.total_byte_size() <= 17 << 20));
}
