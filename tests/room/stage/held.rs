//! What a stage holds: the turns under way and what belongs to them, however long
//! the table is.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{RecordBatch, StringArray};
use oclaw::stage::{Plan, annotate};
use oclaw::table::{Format, Provenance, Sink, Source, Target};
use oclaw::trajectory::{Turn, turn};
use tokio::sync::Notify;

use super::{SERVE, Stage, captured_turns, judge, judged, output};
use crate::forge::captured;
use crate::harness::memory;

const MEBIBYTE: usize = 1 << 20;

/// Writes turns of some 14 KiB each, and returns the path.
fn heavy(folder: &Path, rows: u32) -> std::path::PathBuf {
    let path = folder.join(format!("{rows}.parquet"));
    let mut sink: Option<Sink> = None;
    for first in (0..rows).step_by(100) {
        let turns: Vec<_> = (first..rows.min(first + 100))
            .map(|number| Turn {
                messages: format!(
                    r#"[{{"role":"user","content":"{number} {}"}}]"#,
                    "x".repeat(6000)
                ),
                prompt_ids: Some((0..1500).map(|id| id ^ number as i32).collect()),
                rollout_log_probs: Some(vec![Some(-0.5); 400]),
                response_ids: Some(vec![7; 400]),
                ..captured("s", number)
            })
            .collect();
        let batch = turn::batch(SERVE, &turns).unwrap();
        let target = Target::Path(path.clone());
        let sink = sink.get_or_insert_with(|| {
            let schema = batch.schema();
            Sink::create(&target, Some(Format::Parquet), schema, &Provenance::default()).unwrap()
        });
        sink.write(&batch).unwrap();
    }
    sink.unwrap().finish().unwrap();
    path
}

/// The bound is on what this thread holds; the decoder of the pages has some more
/// outside of it, a page at a time.
#[tokio::test]
async fn memory_does_not_grow_with_the_table() {
    let stage = Stage::new();
    let mut most = Vec::new();
    for rows in [3000, 9000] {
        let input = heavy(stage.folder.path(), rows);
        let plan = Plan { at_once: 256, ..judge() };
        let note = async |turn: Turn| {
            for _ in 0..(turn.turn * 37) % 11 {
                tokio::task::yield_now().await;
            }
            judged(Turn { judge_text: Some(vec![Some("It is fine.".repeat(20))]), ..turn })
        };
        let watch = memory::watch();
        let tally = stage.annotate(&input, &plan, note).await.unwrap();
        assert_eq!(tally.rows, u64::from(rows));
        most.push(watch.most());
    }
    assert!(most[1] < most[0] + most[0] / 20, "{most:?}");
    assert!(most[1] < 80 * MEBIBYTE, "{} MiB", most[1] / MEBIBYTE);
}

/// A first turn that takes its time holds back those after it, and no more of them
/// than may be under way are begun meanwhile.
#[tokio::test]
async fn a_held_turn_is_waited_for() {
    let stage = Stage::new();
    let input = stage.input(SERVE, &captured_turns(500));
    let (begun, written, held) = (Cell::new(0), Cell::new(0), Notify::new());
    let note = async |turn: Turn| {
        begun.set(begun.get() + 1);
        if turn.turn == 1 {
            held.notified().await;
        }
        judged(turn)
    };
    let source = Source::open(&[input]).unwrap();
    let target = output(&stage.path("out"));
    let plan = judge();
    let watch = |tally: &oclaw::stage::Tally| written.set(tally.rows);
    let table = annotate(source, &target, &plan, note, &watch);
    let looking = async {
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        let seen = (begun.get(), written.get());
        held.notify_one();
        seen
    };
    let (tally, seen) = tokio::join!(table, looking);
    assert_eq!(seen, (plan.at_once, 0));
    assert_eq!(tally.unwrap().rows, 500);
    let numbers: Vec<_> = stage.written().iter().map(|turn| turn.turn).collect();
    assert_eq!(numbers, (1..=500).collect::<Vec<_>>());
}

/// Rows are read when they are needed, and still called by their place in the file.
#[tokio::test]
async fn a_row_that_cannot_be_read_is_named() {
    let stage = Stage::new();
    let batch = turn::batch(SERVE, &captured_turns(200)).unwrap();
    let place = batch.schema().index_of("status").unwrap();
    let words = (0..200).map(|row| if row == 150 { "sunny" } else { "complete" });
    let mut columns = batch.columns().to_vec();
    columns[place] = Arc::new(StringArray::from_iter_values(words));
    let batch = RecordBatch::try_new(batch.schema(), columns).unwrap();
    let input = stage.path("in");
    let target = Target::Path(input.clone());
    let mut sink = Sink::create(&target, None, batch.schema(), &Provenance::default()).unwrap();
    sink.write(&batch).unwrap();
    sink.finish().unwrap();
    let begun = Cell::new(0);
    let note = async |turn: Turn| {
        begun.set(begun.get() + 1);
        judged(turn)
    };
    let error = stage.annotate(&input, &judge(), note).await.unwrap_err();
    let error = std::error::Error::source(&error).unwrap().to_string();
    assert!(error.contains("row 150: `status` is `sunny`"), "{error}");
    assert!((100..150).contains(&begun.get()), "{}", begun.get());
}
