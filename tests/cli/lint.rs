//! `oclaw lint`.

use std::sync::Arc;

use arrow::array::StringArray;
use arrow::datatypes::Schema;
use oclaw::table::{Format, Provenance, Sink, Target};
use oclaw::trajectory::{Writer, turn};

use crate::forge::{STAGES, captured, finished, write};
use crate::harness::oclaw;

fn run(folder: &tempfile::TempDir, inputs: &[&str]) -> (Option<i32>, String, String) {
    let output = oclaw().current_dir(folder.path()).arg("lint").args(inputs).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_sound_table_has_no_findings() {
    let folder = tempfile::tempdir().unwrap();
    let turns = [finished("a", 1), finished("a", 2)];
    write(&folder.path().join("t.parquet"), Format::Parquet, &STAGES, &turns);
    let expected = (Some(0), String::new(), "2 rows, 0 findings\n".to_owned());
    assert_eq!(run(&folder, &["t.parquet"]), expected);
}

#[test]
fn each_finding_is_one_line_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let mut odd = captured("b\nforged: row 0", 2);
    odd.response_ids = Some(vec![5, 6]);
    odd.session_confidence = 2.0;
    let twin = captured("a", 1);
    write(&folder.path().join("1"), Format::Parquet, &[Writer::Serve], &[twin.clone(), odd]);
    write(&folder.path().join("2"), Format::Ipc, &[Writer::Serve], &[twin]);
    let (code, stdout, stderr) = run(&folder, &["1", "2"]);
    assert_eq!(code, Some(3));
    let expected = "\
1: row 1 (session b\\nforged: row 0, turn 2): session_confidence: 2, wanted 0 to 1
1: row 1 (session b\\nforged: row 0, turn 2): rollout_log_probs: 3 values for 2 response ids
2: row 0 (session a, turn 1): turn_id: `a-turn-1` is there twice
2: row 0 (session a, turn 1): request_id: choice 0 of `a-request-1` is there twice
1: row 1 (session b\\nforged: row 0, turn 2): usage_completion_tokens: 3, with 2 response ids
";
    assert_eq!(stdout, expected);
    assert_eq!(stderr, "3 rows, 5 findings\n");
}

/// A run with two shards per stage, whose stages tell of the same turns.
fn a_run(folder: &tempfile::TempDir) {
    let run = folder.path().join("run");
    for (stage, writers) in
        [("turns", &STAGES[..1]), ("judged", &STAGES[..2]), ("ready", &STAGES[..])]
    {
        std::fs::create_dir_all(run.join(stage)).unwrap();
        for session in ["a", "b"] {
            let turns = [finished(session, 1), finished(session, 2)];
            let name = run.join(stage).join(format!("{session}.parquet"));
            write(&name, Format::Parquet, writers, &turns);
        }
    }
    let turns = [finished("a", 1), finished("a", 2)];
    write(&run.join("ready.parquet"), Format::Parquet, &STAGES, &turns);
    write(&run.join("tried.parquet"), Format::Parquet, &STAGES, &turns);
}

#[test]
fn a_turn_may_stand_in_the_tables_of_several_stages() {
    let folder = tempfile::tempdir().unwrap();
    a_run(&folder);
    for (inputs, rows) in [
        (&["run"][..], 16),
        (&["run/turns", "run/ready.parquet"], 6),
        (&["run/turns", "run/judged", "run/ready"], 12),
        (&["run/turns/a.parquet", "run/ready/a.parquet"], 4),
    ] {
        let expected = (Some(0), String::new(), format!("{rows} rows, 0 findings\n"));
        assert_eq!(run(&folder, inputs), expected, "{inputs:?}");
    }
}

#[test]
fn a_turn_may_not_stand_twice_in_the_shards_of_one_stage() {
    let folder = tempfile::tempdir().unwrap();
    a_run(&folder);
    // The spool of a stage that was moved back into itself.
    for stage in ["turns", "ready"] {
        let stage = folder.path().join("run").join(stage);
        std::fs::copy(stage.join("b.parquet"), stage.join("c.parquet")).unwrap();
    }
    let (code, stdout, stderr) = run(&folder, &["run"]);
    assert_eq!((code, stderr.as_str()), (Some(3), "20 rows, 8 findings\n"), "{stdout}");
    for stage in ["turns", "ready"] {
        for (row, turn) in [(0, 1), (1, 2)] {
            let line = format!(
                "row {row} (session b, turn {turn}): turn_id: `b-turn-{turn}` is there twice"
            );
            assert!(stdout.contains(&format!("run/{stage}/c.parquet: {line}\n")), "{stdout}");
        }
    }
    let (code, _, stderr) = run(&folder, &["run/turns/b.parquet", "run/turns/c.parquet"]);
    assert_eq!((code, stderr.as_str()), (Some(3), "4 rows, 4 findings\n"));
}

#[test]
fn a_run_without_tables_has_nothing_to_check() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("run/policy")).unwrap();
    let (code, stdout, stderr) = run(&folder, &["run"]);
    assert_eq!(
        (code, stdout.as_str(), stderr.as_str()),
        (Some(1), "", "oclaw lint: `run`: no tables\n")
    );
}

#[test]
fn a_row_that_cannot_be_read_is_a_finding() {
    let folder = tempfile::tempdir().unwrap();
    let turns = [captured("a", 1), captured("a", 2), captured("a", 3)];
    let batch = turn::batch(&[Writer::Serve], &turns).unwrap();
    let index = batch.schema().index_of("status").unwrap();
    let mut columns = batch.columns().to_vec();
    columns[index] = Arc::new(StringArray::from(vec![Some("complete"), Some("done"), None]));
    let mut fields: Vec<_> = batch.schema().fields().iter().cloned().collect();
    fields[index] = Arc::new(fields[index].as_ref().clone().with_nullable(true));
    let batch = arrow::array::RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap();
    let target = Target::Path(folder.path().join("t"));
    let mut sink = Sink::create(&target, None, batch.schema(), &Provenance::default()).unwrap();
    sink.write(&batch).unwrap();
    sink.finish().unwrap();
    let (code, stdout, _) = run(&folder, &["t"]);
    assert_eq!(code, Some(3));
    let expected = "\
t: row 1: status: `done`, wanted one of `complete`, `truncated`, `aborted`, `failed`
t: row 2: status: null and must not be
";
    assert_eq!(stdout, expected);
}

#[test]
fn an_unreadable_table_is_no_finding() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t"), "PAR1 something else").unwrap();
    let (code, stdout, stderr) = run(&folder, &["t"]);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    assert!(stderr.starts_with("oclaw lint: `t` is cut short: the Parquet footer is missing\n"));
}
