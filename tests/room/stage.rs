//! The loop of a stage: order, concurrency, columns, failures.

mod held;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use arrow::array::{RecordBatch, StringArray};
use arrow::datatypes::{Field, Schema};
use oclaw::stage::{self, Error, Existing, Output, Plan, Rules, Tally};
use oclaw::table::{self, Format, Provenance, Sink, Source, StageLine, Target, Usage, read_turns};
use oclaw::trajectory::words::SampleKind;
use oclaw::trajectory::{Turn, Writer, turn};

use crate::forge::{captured, finished, write};

const SERVE: &[Writer] = &[Writer::Serve];
const JUDGED: &[Writer] = &[Writer::Serve, Writer::Judge];

fn output(path: &Path) -> Output {
    Output { target: Target::Path(path.to_owned()), format: None }
}

fn judge() -> Plan {
    Plan { at_once: 8, ..Plan::new(Writer::Judge) }
}

fn judged(turn: Turn) -> Turn {
    Turn { score: Some(1.0), votes: Some(vec![Some(1)]), ..turn }
}

fn captured_turns(count: u32) -> Vec<Turn> {
    (1..=count).map(|number| captured("a", number)).collect()
}

struct Stage {
    folder: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn input(&self, writers: &[Writer], turns: &[Turn]) -> PathBuf {
        write(&self.path("in"), Format::Parquet, writers, turns)
    }

    async fn annotate(
        &self,
        input: &Path,
        plan: &Plan,
        note: impl AsyncFn(Turn) -> Turn,
    ) -> Result<Tally, Error> {
        let source = Source::open(&[input.to_owned()])?;
        stage::annotate(source, &output(&self.path("out")), plan, note, &|_| {}).await
    }

    fn written(&self) -> Vec<Turn> {
        read_turns(&[self.path("out")]).unwrap()
    }
}

#[tokio::test]
async fn rows_keep_their_order_and_notes_their_rows() {
    let stage = Stage::new();
    let input = stage.input(SERVE, &captured_turns(100));
    let (running, most) = (Cell::new(0_usize), Cell::new(0_usize));
    let note = async |turn: Turn| {
        running.set(running.get() + 1);
        most.set(most.get().max(running.get()));
        // Later turns tend to be done first.
        for _ in 0..(turn.turn * 37) % 11 {
            tokio::task::yield_now().await;
        }
        running.set(running.get() - 1);
        let text = Some(vec![Some(format!("about {}", turn.turn))]);
        judged(Turn { judge_text: text, ..turn })
    };
    let tally = stage.annotate(&input, &judge(), note).await.unwrap();
    assert_eq!(tally, Tally { rows: 100, kept: 0, failed: 0 });
    assert_eq!(most.get(), 8, "as many at once as were allowed");
    let written = stage.written();
    for (number, turn) in (1..=100).zip(&written) {
        assert_eq!(turn.turn, number);
        assert_eq!(turn.judge_text, Some(vec![Some(format!("about {number}"))]));
    }
}

#[tokio::test]
async fn a_note_writes_only_its_own_columns() {
    let stage = Stage::new();
    let input = stage.input(SERVE, &captured_turns(3));
    let note = async |turn: Turn| {
        let own = judged(turn);
        Turn { model: "forged".to_owned(), hints: Some(vec!["no".to_owned()]), ..own }
    };
    stage.annotate(&input, &judge(), note).await.unwrap();
    let expected: Vec<_> = captured_turns(3).into_iter().map(judged).collect();
    assert_eq!(stage.written(), expected);
}

#[tokio::test]
async fn unknown_columns_pass_through() {
    let stage = Stage::new();
    let batch = turn::batch(SERVE, &captured_turns(2)).unwrap();
    let mut fields: Vec<_> = batch.schema().fields().iter().cloned().collect();
    let mut columns = batch.columns().to_vec();
    fields.insert(0, Arc::new(Field::new("mood", arrow::datatypes::DataType::Utf8, true)));
    columns.insert(0, Arc::new(StringArray::from(vec![Some("fine"), None])));
    let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns.clone()).unwrap();
    let input = stage.path("in");
    let target = Target::Path(input.clone());
    let mut sink = Sink::create(&target, None, batch.schema(), &Provenance::default()).unwrap();
    sink.write(&batch).unwrap();
    sink.finish().unwrap();
    stage.annotate(&input, &judge(), async |turn| judged(turn)).await.unwrap();
    let mut source = Source::open(&[stage.path("out")]).unwrap();
    let batch = source.next_batch().unwrap().unwrap();
    assert_eq!(batch.schema().field(0).name(), "mood");
    assert_eq!(batch.column(0), &columns[0]);
    assert_eq!(batch.schema().fields().last().unwrap().name(), "judge_error");
}

#[tokio::test]
async fn a_second_run_is_refused_unless_told_what_to_do() {
    let stage = Stage::new();
    let mut turns = captured_turns(4);
    turns[0] = judged(turns[0].clone());
    turns[1].judge_error = Some("timeout".to_owned());
    turns[2] = Turn { score: Some(0.0), votes: Some(vec![Some(0)]), ..turns[2].clone() };
    let input = stage.input(JUDGED, &turns);
    let note = async |turn: Turn| {
        let text = Some(vec![Some("again".to_owned())]);
        judged(Turn { judge_text: text, judge_error: None, ..turn })
    };
    let error = stage.annotate(&input, &judge(), note).await.unwrap_err();
    assert_eq!(error.to_string(), "column `score` is there already: `judge` has run on this table");
    assert!(!stage.path("out").exists());

    let fill = Plan { existing: Existing::Fill, ..judge() };
    let tally = stage.annotate(&input, &fill, note).await.unwrap();
    assert_eq!(tally, Tally { rows: 4, kept: 2, failed: 0 });
    let again: Vec<_> = stage.written().iter().map(|turn| turn.judge_text.is_some()).collect();
    assert_eq!(again, [false, true, false, true], "the failed and the missing one");

    let replace = Plan { existing: Existing::Replace, ..judge() };
    let tally = stage.annotate(&input, &replace, note).await.unwrap();
    assert_eq!(tally.kept, 0);
    assert!(stage.written().iter().all(|turn| turn.judge_text.is_some()));
}

#[tokio::test]
async fn a_missing_stage_is_named() {
    let stage = Stage::new();
    let input = stage.input(SERVE, &captured_turns(1));
    let plan = Plan { needs: &["messages", "hints"], ..Plan::new(Writer::TeacherLp) };
    let error = stage.annotate(&input, &plan, async |turn| turn).await.unwrap_err();
    assert_eq!(error.to_string(), "there is no column `hints`: run `oclaw hint` first");
}

#[tokio::test]
async fn failed_notes_are_counted_and_kept_null() {
    let stage = Stage::new();
    let input = stage.input(SERVE, &captured_turns(10));
    let seen = Cell::new(0);
    let note = async |turn: Turn| match turn.turn % 3 {
        0 => Turn { judge_error: Some("timeout".to_owned()), ..turn },
        1 => turn,
        _ => judged(turn),
    };
    let source = Source::open(&[input]).unwrap();
    let watch = |tally: &Tally| seen.set(seen.get().max(tally.rows));
    let done = stage::annotate(source, &output(&stage.path("out")), &judge(), note, &watch).await;
    assert_eq!(done.unwrap(), Tally { rows: 10, kept: 0, failed: 3 });
    assert_eq!(seen.get(), 10);
    assert_eq!(stage.written()[2].score, None);
}

#[tokio::test]
async fn a_note_without_a_required_value_is_an_error_and_leaves_nothing() {
    let stage = Stage::new();
    let input = stage.input(SERVE, &captured_turns(1));
    let plan = Plan::new(Writer::Advantage);
    let error = stage.annotate(&input, &plan, async |turn| turn).await.unwrap_err();
    assert!(matches!(error, Error::Note { .. }));
    let names: Vec<_> = std::fs::read_dir(stage.folder.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "only the input");
}

#[tokio::test]
async fn a_cut_input_is_an_error_and_leaves_nothing() {
    let stage = Stage::new();
    let input = write(&stage.path("in"), Format::Ipc, SERVE, &captured_turns(5));
    let bytes = std::fs::read(&input).unwrap();
    std::fs::write(&input, &bytes[..bytes.len() - 8]).unwrap();
    let error = stage.annotate(&input, &judge(), async |turn| judged(turn)).await.unwrap_err();
    assert!(matches!(error, Error::Table(table::Error::Cut { .. })), "{error}");
    let names: Vec<_> = std::fs::read_dir(stage.folder.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "only the input");
}

#[tokio::test]
async fn several_batches_and_files_are_one_run() {
    let stage = Stage::new();
    let heavy = |number: u32| {
        let content = "x".repeat(6 << 20);
        let messages = format!(r#"[{{"role":"user","content":"{content}"}}]"#);
        Turn { messages, ..captured("a", number) }
    };
    let first: Vec<_> = (1..=5).map(heavy).collect();
    let one = write(&stage.path("1"), Format::Ipc, SERVE, &first);
    let two = write(&stage.path("2"), Format::Parquet, SERVE, &[]);
    let three = write(&stage.path("3"), Format::Parquet, SERVE, &captured_turns(3));
    let source = Source::open(&[one, two, three]).unwrap();
    let note = async |turn: Turn| judged(turn);
    let done = stage::annotate(source, &output(&stage.path("out")), &judge(), note, &|_| {}).await;
    assert_eq!(done.unwrap().rows, 8);
    let numbers: Vec<_> = stage.written().iter().map(|turn| turn.turn).collect();
    assert_eq!(numbers, [1, 2, 3, 4, 5, 1, 2, 3]);
}

#[tokio::test]
async fn an_empty_table_stays_a_table() {
    let stage = Stage::new();
    let input = stage.input(SERVE, &[]);
    let line = StageLine { command: "judge".to_owned(), ..StageLine::default() };
    let plan = Plan { line: Some(line.clone()), ..judge() };
    let tally = stage.annotate(&input, &plan, async |turn| judged(turn)).await.unwrap();
    assert_eq!(tally, Tally::default());
    let source = Source::open(&[stage.path("out")]).unwrap();
    assert!(source.schema().index_of("score").is_ok());
    assert_eq!(source.provenance().lines, [line]);
}

/// What a stage used is known at its end, stands in its own line, and stays there
/// when the next stage writes its own.
#[tokio::test]
async fn usage_joins_the_line() {
    let stage = Stage::new();
    let input = stage.input(SERVE, &captured_turns(3));
    let line = |command: &str| StageLine { command: command.to_owned(), ..StageLine::default() };
    let usage = Arc::new(Mutex::new(Usage::default()));
    let plan = Plan { line: Some(line("judge")), usage: Some(usage.clone()), ..judge() };
    let note = async |turn: Turn| {
        usage.lock().unwrap().calls += 2;
        judged(turn)
    };
    stage.annotate(&input, &plan, note).await.unwrap();
    let first = StageLine { usage: Some(Usage { calls: 6, ..Usage::default() }), ..line("judge") };
    let judged_table = stage.path("out");
    let lines = |path: &Path| Source::open(&[path.to_owned()]).unwrap().provenance().lines.clone();
    assert_eq!(lines(&judged_table), std::slice::from_ref(&first));

    for (format, name) in [(Format::Ipc, "stream"), (Format::Parquet, "file")] {
        let target = Target::Path(stage.path(name));
        let next = Output { target, format: Some(format) };
        let plan = Plan { line: Some(line("hint")), ..Plan::new(Writer::Hint) };
        let source = Source::open(std::slice::from_ref(&judged_table)).unwrap();
        stage::annotate(source, &next, &plan, async |turn| turn, &|_| {}).await.unwrap();
        assert_eq!(lines(&stage.path(name)), [first.clone(), line("hint")]);
    }
}

#[tokio::test]
async fn a_survey_sees_what_would_be_noted() {
    let stage = Stage::new();
    let mut turns = captured_turns(3);
    turns[1].score = Some(1.0);
    let input = stage.input(&[Writer::Serve, Writer::Judge], &turns);
    let open = || Source::open(std::slice::from_ref(&input)).unwrap();
    let mut seen = Vec::new();
    let fill = Plan { existing: Existing::Fill, ..judge() };
    let tally = stage::survey(open(), &fill, async |turn| seen.push(turn.turn)).await.unwrap();
    assert_eq!((tally, seen), (Tally { rows: 3, kept: 1, failed: 0 }, vec![1, 3]));
    let refused = stage::survey(open(), &judge(), async |_| {}).await;
    assert!(matches!(refused, Err(Error::ColumnExists { column: "score", .. })), "{refused:?}");
}

/// Notes each turn with the mean score of all: what no single pass could.
fn regroup(source: Source, out: &Path) -> Result<Tally, Error> {
    let (needs, reads) = (&["score"], &["score"]);
    let plan = Plan { needs, reads, ..Plan::new(Writer::Advantage) };
    let rules = Rules {
        suppose: |turn: Turn| turn.score,
        look: |turn: Turn| turn.score,
        decide: |scores: Vec<Option<f32>>| {
            let scores: Vec<f32> = scores.into_iter().flatten().collect();
            Ok(scores.iter().sum::<f32>() / scores.len() as f32)
        },
        note: |turn: &mut Turn, mean: &f32, (): &mut ()| {
            (turn.sample_kind, turn.promoted) = (Some(SampleKind::None), Some(false));
            turn.reward = Some(*mean);
            turn.score
        },
        merge: |(), ()| {},
    };
    let (tally, ()) = stage::regroup(source, &output(out), &plan, rules, &mut |_| {})?;
    Ok(tally)
}

fn mixed() -> Vec<Turn> {
    let mut turns = captured_turns(4);
    turns[0] = judged(turns[0].clone());
    turns[1] = Turn { score: Some(-1.0), ..finished("a", 2) };
    turns[2] = judged(turns[2].clone());
    turns[3] = judged(turns[3].clone());
    turns
}

#[test]
fn regroup_sees_every_turn_before_it_notes_one() {
    let stage = Stage::new();
    let one = write(&stage.path("1"), Format::Parquet, JUDGED, &mixed()[..1]);
    let two = write(&stage.path("2"), Format::Ipc, JUDGED, &mixed()[1..]);
    let source = Source::open(&[one, two]).unwrap();
    let tally = regroup(source, &stage.path("out")).unwrap();
    assert_eq!(tally.rows, 4);
    let rewards: Vec<_> = stage.written().iter().map(|turn| turn.reward).collect();
    assert_eq!(rewards, [Some(0.5); 4]);
}

#[test]
fn regroup_reads_a_pipe_twice() {
    let stage = Stage::new();
    for format in [Format::Ipc, Format::Parquet] {
        let input = write(&stage.path("in"), format, JUDGED, &mixed());
        let pipe = stage.path("pipe");
        let _ = std::fs::remove_file(&pipe);
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let end = pipe.clone();
        let feeder = std::thread::spawn(move || {
            std::fs::write(end, std::fs::read(input).unwrap()).unwrap();
        });
        let source = Source::open(std::slice::from_ref(&pipe)).unwrap();
        regroup(source, &stage.path("out")).unwrap();
        feeder.join().unwrap();
        let rewards: Vec<_> = stage.written().iter().map(|turn| turn.reward).collect();
        assert_eq!(rewards, [Some(0.5); 4]);
    }
}
