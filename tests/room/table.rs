//! The door: formats, broken files, folders, atomic output.

mod broken;
mod follow;
mod output;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int32Array, Int64Array, NullArray, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use oclaw::table::{
    Error, Format, Provenance, Sink, Source, StageLine, Target, read_turns, row_json, write_shard,
};
use oclaw::trajectory::{Turn, Writer, turn};
use proptest::prelude::*;

use crate::forge::{STAGES, captured, finished, write};

const SERVE: &[Writer] = &[Writer::Serve];

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn write_batch(path: &Path, format: Format, batch: &RecordBatch, provenance: &Provenance) {
    let target = Target::Path(path.to_owned());
    let mut sink = Sink::create(&target, Some(format), batch.schema(), provenance).unwrap();
    sink.write(batch).unwrap();
    sink.finish().unwrap();
}

fn open_error(path: &Path) -> Error {
    read_turns(&[path.to_owned()]).unwrap_err()
}

#[test]
fn both_formats_give_back_what_was_written() {
    let folder = folder();
    let turns = vec![finished("a", 1), finished("a", 2), finished("b", 1)];
    for format in [Format::Parquet, Format::Ipc] {
        let path = write(&folder.path().join("t"), format, &STAGES, &turns);
        let source = Source::open(std::slice::from_ref(&path)).unwrap();
        let rows = if format == Format::Parquet { Some(3) } else { None };
        assert_eq!(source.total_rows(), rows);
        assert_eq!(read_turns(&[path]).unwrap(), turns, "{format:?}");
    }
}

#[test]
fn some_columns_can_be_read_alone() {
    let folder = folder();
    let turns = vec![finished("a", 1), finished("a", 2)];
    for format in [Format::Parquet, Format::Ipc] {
        let path = write(&folder.path().join("t"), format, &STAGES, &turns);
        let mut source = Source::open(&[path]).unwrap();
        source.only(&["score", "turn", "nowhere"]);
        let batch = source.next_batch().unwrap().unwrap();
        let schema = batch.schema();
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        assert_eq!((names, batch.num_rows()), (vec!["turn", "turn_id", "score"], 2), "{format:?}");
        source.rewind().unwrap();
        assert_eq!(source.next_turns().unwrap().unwrap(), turns, "{format:?}");
    }
}

#[test]
fn a_table_without_rows_keeps_its_columns() {
    let folder = folder();
    for format in [Format::Parquet, Format::Ipc] {
        let path = write(&folder.path().join("t"), format, &STAGES, &[]);
        let mut source = Source::open(&[path]).unwrap();
        assert_eq!(source.schema().fields().len(), oclaw::trajectory::columns().len());
        assert!(source.next_batch().unwrap().is_none());
    }
}

fn provenance() -> Provenance {
    let line = |command: &str| StageLine {
        command: command.to_owned(),
        version: "0.1.0".to_owned(),
        argv: vec![command.to_owned(), "--votes".to_owned(), "3".to_owned()],
        seed: Some(7),
        inputs: vec!["a.parquet 00ff".to_owned()],
        usage: None,
    };
    Provenance {
        lines: vec![line("serve"), line("judge")],
        tokenizer_hash: Some("t1".to_owned()),
        chat_template_hash: Some("c1".to_owned()),
    }
}

#[test]
fn provenance_survives_parquet_to_ipc_to_parquet() {
    let folder = folder();
    let batch = turn::batch(SERVE, &[captured("a", 1)]).unwrap();
    let mut path = folder.path().join("0");
    write_batch(&path, Format::Parquet, &batch, &provenance());
    for (index, format) in [(1, Format::Ipc), (2, Format::Parquet), (3, Format::Ipc)] {
        let mut source = Source::open(&[path]).unwrap();
        assert_eq!(*source.provenance(), provenance(), "before {format:?}");
        path = folder.path().join(index.to_string());
        let batch = source.next_batch().unwrap().unwrap();
        write_batch(&path, format, &batch, source.provenance());
    }
    assert_eq!(*Source::open(&[path]).unwrap().provenance(), provenance());
}

#[test]
fn several_inputs_put_their_provenance_together() {
    let folder = folder();
    let batch = turn::batch(SERVE, &[captured("a", 1)]).unwrap();
    let (one, two) = (folder.path().join("1"), folder.path().join("2"));
    let mut other = provenance();
    other.lines.truncate(1);
    other.tokenizer_hash = Some("t2".to_owned());
    write_batch(&one, Format::Parquet, &batch, &other);
    write_batch(&two, Format::Ipc, &batch, &provenance());
    let source = Source::open(&[one, two]).unwrap();
    assert_eq!(source.provenance().lines, provenance().lines);
    // Equal to neither, so that no check against one tokenizer can pass.
    assert_eq!(source.provenance().tokenizer_hash.as_deref(), Some("t2,t1"));
    assert_eq!(source.provenance().chat_template_hash.as_deref(), Some("c1"));
    // And each still says what it went through itself.
    let stages: Vec<_> = source.stages().map(|(_, lines)| lines.to_vec()).collect();
    assert_eq!(stages, [other.lines, provenance().lines]);
}

#[test]
fn another_schema_is_refused_by_name() {
    let folder = folder();
    let path = folder.path().join("new.arrow");
    let batch = turn::batch(SERVE, &[captured("a", 1)]).unwrap();
    let newer = |version: &str| format!("has schema version {version}; this build reads up to 1");
    let odd = |version: &str| format!("has schema version `{version}`, which is no version number");
    for (version, wanted) in [
        ("2", newer("2")),
        ("99999999999999999999", newer("99999999999999999999")),
        ("0", odd("0")),
        ("abc", odd("abc")),
        ("-1", odd("-1")),
        ("", odd("")),
    ] {
        let metadata = std::collections::HashMap::from([(
            "oclaw.schema_version".to_owned(),
            version.to_owned(),
        )]);
        let schema = Schema::new_with_metadata(batch.schema().fields().clone(), metadata);
        let file = std::fs::File::create(&path).unwrap();
        let mut writer = arrow::ipc::writer::StreamWriter::try_new(file, &schema).unwrap();
        writer.finish().unwrap();
        let error = open_error(&path).to_string();
        assert!(error.contains("new.arrow") && error.contains(&wanted), "{error}");
    }
}

#[test]
fn a_folder_is_read_oldest_first_without_hidden_files() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    write(&at("a.parquet"), Format::Parquet, SERVE, &[captured("s", 3)]);
    write(&at("b.parquet"), Format::Parquet, SERVE, &[captured("s", 1)]);
    write(&at("c.parquet"), Format::Parquet, SERVE, &[captured("s", 2)]);
    write(&at(".tmp-d.parquet"), Format::Parquet, SERVE, &[captured("s", 4)]);
    std::fs::write(at("notes.txt"), "x").unwrap();
    std::fs::create_dir(at("sub")).unwrap();
    write(&at("sub/e.parquet"), Format::Parquet, SERVE, &[captured("s", 5)]);
    let turns = |input: PathBuf| -> Vec<u32> {
        read_turns(&[input]).unwrap().iter().map(|turn| turn.turn).collect()
    };
    assert_eq!(turns(folder.path().to_owned()), [1, 2, 3]);
    assert_eq!(turns(at("*.parquet")), [3, 1, 2], "a pattern goes by name");
    assert_eq!(turns(at("[bc].par*")), [1, 2]);
    assert_eq!(turns(at("s?b")), [5]);
    let empty = at("empty");
    std::fs::create_dir(&empty).unwrap();
    assert!(matches!(open_error(&empty), Error::NothingThere { .. }));
    assert!(matches!(open_error(&at("*.arrow")), Error::NothingThere { .. }));
    assert!(matches!(open_error(&at("none.parquet")), Error::Read { .. }));
}

fn with_column(batch: &RecordBatch, name: &str, array: ArrayRef) -> RecordBatch {
    let mut fields: Vec<_> = batch.schema().fields().iter().cloned().collect();
    let mut columns = batch.columns().to_vec();
    let field = Arc::new(Field::new(name, array.data_type().clone(), true));
    match batch.schema().index_of(name) {
        Ok(index) => (fields[index], columns[index]) = (field, array),
        Err(_) => {
            fields.push(field);
            columns.push(array);
        }
    }
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
}

fn without_column(batch: &RecordBatch, name: &str) -> RecordBatch {
    let index = batch.schema().index_of(name).unwrap();
    let others: Vec<_> = (0..batch.num_columns()).filter(|column| *column != index).collect();
    batch.project(&others).unwrap()
}

#[test]
fn shards_of_different_writers_are_one_table() {
    let folder = folder();
    let batch = turn::batch(&[Writer::Serve, Writer::Judge], &[finished("a", 1)]).unwrap();
    let reversed: Vec<_> = (0..batch.num_columns()).rev().collect();
    let nullable_items = |batch: &RecordBatch| {
        let items = Field::new("element", DataType::Int64, true);
        let ids = batch.column_by_name("prompt_ids").unwrap();
        let cast = arrow::compute::cast(ids, &DataType::List(Arc::new(items))).unwrap();
        with_column(batch, "prompt_ids", cast)
    };
    let variants = [
        batch.clone(),
        without_column(&batch, "judge_text"),
        with_column(&batch, "mood", Arc::new(StringArray::from(vec!["fine"]))),
        batch.project(&reversed).unwrap(),
        nullable_items(&with_column(&batch, "turn", Arc::new(Int64Array::from(vec![1])))),
        with_column(&batch, "judge_error", Arc::new(NullArray::new(1))),
        with_column(&batch, "mood", Arc::new(NullArray::new(1))),
    ];
    let mut inputs = Vec::new();
    for (index, variant) in variants.iter().enumerate() {
        let path = folder.path().join(index.to_string());
        write_batch(
            &path,
            [Format::Parquet, Format::Ipc][index % 2],
            variant,
            &Provenance::default(),
        );
        inputs.push(path);
    }
    let mut source = Source::open(&inputs).unwrap();
    let mut moods = Vec::new();
    let mut rows = 0;
    while let Some(batch) = source.next_batch().unwrap() {
        assert_eq!(batch.schema().fields(), source.schema().fields());
        let (name, first) = source.place();
        assert_eq!((name, first), (inputs[rows].to_str().unwrap(), 0));
        let turn = source.read(&batch).unwrap().remove(0);
        assert_eq!(turn.prompt_ids, Some(vec![1, 2, 3, 4]));
        assert_eq!(turn.judge_text.is_some(), rows != 1);
        moods.push(row_json::value(batch.column_by_name("mood").unwrap(), 0));
        rows += 1;
    }
    assert_eq!(rows, variants.len());
    assert_eq!(moods[2], "fine");
    assert!(moods.iter().filter(|mood| mood.is_null()).count() == 6);
}

#[test]
fn columns_that_do_not_go_together_are_named() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let batch = turn::batch(SERVE, &[captured("a", 1)]).unwrap();
    let text = with_column(&batch, "mood", Arc::new(StringArray::from(vec!["fine"])));
    let number = with_column(&batch, "mood", Arc::new(Int32Array::from(vec![1])));
    write_batch(&at("1"), Format::Parquet, &text, &Provenance::default());
    write_batch(&at("2"), Format::Parquet, &number, &Provenance::default());
    let error = read_turns(&[at("1"), at("2")]).unwrap_err();
    assert!(matches!(&error, Error::Clash { column, .. } if column == "mood"), "{error}");

    let foreign = with_column(&batch, "score", Arc::new(StringArray::from(vec!["1"])));
    write_batch(&at("3"), Format::Ipc, &foreign, &Provenance::default());
    assert!(matches!(open_error(&at("3")), Error::Schema { .. }));
    write_batch(&at("4"), Format::Ipc, &without_column(&batch, "turn_id"), &Provenance::default());
    assert!(matches!(open_error(&at("4")), Error::Schema { .. }));
}

#[test]
fn a_null_where_none_may_be_names_file_and_row() {
    let folder = folder();
    let path = folder.path().join("t");
    let turns = [captured("a", 1), captured("a", 2)];
    let batch = turn::batch(SERVE, &turns).unwrap();
    let model: StringArray = vec![Some("m"), None].into_iter().collect();
    write_batch(
        &path,
        Format::Parquet,
        &with_column(&batch, "model", Arc::new(model)),
        &Provenance::default(),
    );
    let error = anyhow::Error::from(open_error(&path));
    let text = format!("{error:#}");
    assert!(
        text.ends_with("/t` breaks the schema: row 1: `model` is null and must not be"),
        "{text}"
    );
}

#[test]
fn reading_twice_gives_the_same_rows() {
    let folder = folder();
    let turns = vec![captured("a", 1), captured("a", 2)];
    let one = write(&folder.path().join("1"), Format::Ipc, SERVE, &turns);
    let two = write(&folder.path().join("2"), Format::Parquet, SERVE, &turns);
    let mut source = Source::open(&[one, two]).unwrap();
    let mut read = || {
        let mut found = Vec::new();
        while let Some(turns) = source.next_turns().unwrap() {
            found.extend(turns);
        }
        source.rewind().unwrap();
        found
    };
    let first = read();
    assert_eq!(first.len(), 4);
    assert_eq!(first, read());
}

fn heavy(turn: u32, bytes: usize) -> Turn {
    let mut heavy = captured("a", turn);
    heavy.messages = format!(r#"[{{"role":"user","content":"{}"}}]"#, "x".repeat(bytes));
    heavy
}

#[test]
fn batches_are_bounded_by_bytes() {
    let folder = folder();
    // 48 rows of 1 MB, one row that is heavier than a batch, 40 light ones.
    let mut turns: Vec<_> = (1..=48).map(|turn| heavy(turn, 1 << 20)).collect();
    turns.push(heavy(49, 20 << 20));
    turns.extend((50..90).map(|turn| heavy(turn, 10)));
    for format in [Format::Parquet, Format::Ipc] {
        let path = write(&folder.path().join("t"), format, SERVE, &turns);
        let mut source = Source::open(&[path]).unwrap();
        let mut seen = 0;
        while let Some(batch) = source.next_batch().unwrap() {
            let read = source.read(&batch).unwrap();
            let bytes: usize = read.iter().map(|turn| turn.messages.len()).sum();
            assert!(bytes <= 16 << 20 || read.len() == 1, "{bytes} bytes in {} rows", read.len());
            assert_eq!(source.place().1, seen as u64);
            assert_eq!(read[..], turns[seen..seen + read.len()]);
            seen += read.len();
        }
        assert_eq!(seen, turns.len(), "{format:?}");
    }
}

#[test]
fn shards_are_sorted_and_never_replace_one() {
    let folder = folder();
    let turns = [captured("b", 1), captured("a", 2), captured("a", 1)];
    let path = write_shard(folder.path(), SERVE, &turns, &provenance()).unwrap();
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(name.ends_with(".parquet") && name.len() == 36 + 8, "{name}");
    let expected = [captured("a", 1), captured("a", 2), captured("b", 1)];
    assert_eq!(read_turns(std::slice::from_ref(&path)).unwrap(), expected);
    assert_eq!(*Source::open(&[path]).unwrap().provenance(), provenance());
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "nothing else is left in the folder");
    let nowhere = folder.path().join("nowhere");
    assert!(matches!(
        write_shard(&nowhere, SERVE, &turns, &provenance()),
        Err(Error::Write { .. })
    ));
}

#[test]
fn rows_as_json_keep_nulls_and_short_numbers() {
    let batch = turn::batch(SERVE, &[captured("a", 1)]).unwrap();
    let row = row_json::row(&batch, 0);
    assert_eq!(row.len(), batch.num_columns());
    assert_eq!(row["rollout_log_probs"].to_string(), "[-0.5,-1.25,null]");
    assert_eq!(row["sampling"]["temperature"].to_string(), "0.7");
    assert_eq!(row["sampling"]["top_p"], serde_json::Value::Null);
    assert_eq!(row["created_at"], "2025-11-29T13:34:57.000000Z");
    assert_eq!(row["tools"], serde_json::Value::Null);
    assert_eq!(row["session_end"], false);
}

fn any_text() -> impl Strategy<Value = String> {
    any::<String>()
}

prop_compose! {
    fn any_turn()(
        session in any_text(),
        number in any::<u32>(),
        texts in prop::array::uniform4(prop::option::of(any_text())),
        ids in prop::option::of(prop::collection::vec(any::<i32>(), 0..6)),
        log_probs in prop::option::of(prop::collection::vec(prop::option::of(-30.0_f32..0.0), 0..6)),
        votes in prop::option::of(prop::collection::vec(prop::option::of(any::<i8>()), 0..4)),
        hints in prop::option::of(prop::collection::vec(any_text(), 0..3)),
        words in prop::option::of(prop::collection::vec(prop::option::of(any_text()), 0..3)),
        teacher in prop::option::of(prop::collection::vec(
            prop::option::of(prop::collection::vec(-30.0_f32..0.0, 0..4)), 0..3)),
        top in prop::option::of(prop::collection::vec(
            prop::option::of(prop::collection::vec(any::<i32>(), 0..4)), 0..3)),
    ) -> Turn {
        let [tools, next, reason, client] = texts;
        Turn {
            session_id: session,
            turn: number,
            tools,
            next_state: next,
            untrainable_reason: reason,
            client,
            prompt_ids: ids.clone(),
            response_ids: ids,
            rollout_log_probs: log_probs,
            votes,
            hints,
            judge_text: words.clone(),
            teacher_error: words,
            teacher_log_probs: teacher,
            teacher_topk_ids: top,
            ..finished("x", 1)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_turns_round_trip(turns in prop::collection::vec(any_turn(), 0..12)) {
        let folder = folder();
        let path = |name: &str| folder.path().join(name);
        let parquet = write(&path("1"), Format::Parquet, &STAGES, &turns);
        let read = read_turns(&[parquet]).unwrap();
        prop_assert_eq!(&read, &turns);
        let ipc = write(&path("2"), Format::Ipc, &STAGES, &read);
        let read = read_turns(&[ipc]).unwrap();
        let parquet = write(&path("3"), Format::Parquet, &STAGES, &read);
        prop_assert_eq!(&read_turns(&[parquet]).unwrap(), &turns);
    }
}
