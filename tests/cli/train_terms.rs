//! Losses, the way of the learning rate, and the numbers as TensorBoard reads them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use oclaw::advantage::{self, Estimator, Method};
use oclaw::table::{Format, Source};
use serde_json::Value;

use crate::forge::{STAGES, finished, write};
use crate::harness::{fixture_models as models, oclaw};

fn table(folder: &Path) -> PathBuf {
    let method = Method::new(Estimator::Combine);
    let turns = [1, 2].map(|number| advantage::note(finished("s", number), false, &method));
    write(&folder.join("batch.parquet"), Format::Parquet, &STAGES, &turns)
}

fn train(folder: &Path, flags: &[&str]) -> assert_cmd::Command {
    let mut command = oclaw();
    command.args(["train", "--lr", "1e-4", "--model"]).arg(models().join("tiny-qwen3"));
    command.arg("--out").arg(folder.join("policy")).args(flags).arg(table(folder));
    command
}

/// Blamed answers fall in the first update; in the second they have drifted, and
/// OPSM drops them.
#[test]
fn every_loss_trains_and_tells_what_opsm_dropped() {
    for form in ["ppo", "gspo", "cispo"] {
        let folder = tempfile::tempdir().unwrap();
        let metrics = folder.path().join("metrics.jsonl");
        let path = metrics.to_str().unwrap();
        let loss = ["--estimator", "grpo", "--loss", form, "--opsm-delta", "0", "--epochs", "2"];
        let flags = [&loss[..], &["--metrics", path]].concat();
        train(folder.path(), &flags).assert().success();
        let line: Value = serde_json::from_slice(&fs::read(&metrics).unwrap()).unwrap();
        assert_eq!(line["reward"], -1.0);
        assert!((line["opsm_dropped"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{form}: {line}");
        let record = fs::read(folder.path().join("policy/latest/oclaw/train.json")).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        assert_eq!((&record["settings"]["loss"], &record["updates"]), (&form.into(), &2.into()));
    }
}

/// No policy term, and no advantage to warn of.
#[test]
fn topk_kl_has_the_loss_of_the_teacher_alone() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("metrics.jsonl");
    let flags = ["--estimator", "topk-kl", "--w-opd", "0.5", "--metrics"];
    let flags = [&flags[..], &[metrics.to_str().unwrap()]].concat();
    let run = train(folder.path(), &flags).assert().success();
    let line: Value = serde_json::from_slice(&fs::read(&metrics).unwrap()).unwrap();
    assert_eq!((&line["policy_loss"], &line["turns"]), (&0.0.into(), &2.into()));
    assert!(line["distill_loss"].as_f64().unwrap() > 0.0, "{line}");
    assert_eq!(
        (&line["loss"], line["distill_clip_fraction"].is_null()),
        (&line["distill_loss"], true)
    );
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    assert!(talk.contains("distillation loss") && !talk.contains("hardly differ"), "{talk}");
}

/// A folder as any model's: it teaches as it lies there.
#[test]
fn the_moving_average_is_a_teacher() {
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), &["--batch-turns", "1", "--ema", "0.5"]).assert().success();
    let policy = folder.path().join("policy/latest");
    let record: Value =
        serde_json::from_slice(&fs::read(policy.join("oclaw/train.json")).unwrap()).unwrap();
    assert_eq!(record["settings"]["ema"], 0.5);
    let scores = |teacher: &Path| {
        let out = folder.path().join("taught.parquet");
        let mut command = oclaw();
        command.args(["teacher-lp", "--replace", "--model"]).arg(teacher).arg("-o").arg(&out);
        command.arg(folder.path().join("batch.parquet")).assert().success();
        let mut source = Source::open(&[out]).unwrap();
        source.next_turns().unwrap().unwrap()[0].teacher_log_probs.clone()
    };
    let [start, average, newest] =
        [models().join("tiny-qwen3"), policy.join("ema"), policy].map(|it| scores(&it));
    assert!(start != average && average != newest && start != newest);
}

#[test]
fn flags_that_would_do_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (flags, wanted) in [
        (&["--loss", "cispo", "--dual-clip", "3"][..], "`--loss cispo` has none"),
        (&["--kl-unbiased"], "give `--kl-coef`"),
        (&["--schedule", "cosine"], "needs `--total-steps`"),
        (&["--total-steps", "9"], "`--schedule` linear or cosine"),
        (&["--schedule", "linear", "--warmup", "9", "--total-steps", "9"], "is 9, no more than"),
        (&["--ema", "1"], "wanted a number above 0 and below 1"),
        (&["--opsm-delta", "-1"], "wanted a number, 0 or more"),
        (&["--estimator", "topk-kl", "--subset", "teacher"], "`--subset` does nothing under"),
        (&["--save-rounding", "nearest", "--dtype", "f32"], "`--dtype f32` rounds nothing"),
    ] {
        let run = train(folder.path(), flags).assert().code(2);
        let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
        assert!(talk.contains(wanted), "{flags:?}: {talk}");
        assert!(!folder.path().join("policy").exists());
    }
    let flags = ["--loss", "cispo", "--dual-clip", "0", "--kl", "k2", "--dtype", "bf16"];
    let run = train(folder.path(), &flags).assert().success();
    let talk = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    for told in [
        "note: `--kl` does nothing: `--kl-coef` is 0",
        "weights are rounded to bf16 (stochastic) where they are written",
    ] {
        assert!(talk.contains(told), "{told}: {talk}");
    }
    let record = fs::read(folder.path().join("policy/latest/oclaw/train.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let written = (&record["dtype"], &record["settings"]["save_rounding"]);
    assert_eq!(written, (&"bf16".into(), &"stochastic".into()));
}

/// CRC-32C bit by bit, masked as TensorFlow's record format says.
fn masked(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Takes the records out of an event file.
fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let record = &bytes[12..12 + length];
        assert_eq!((word(8), word(12 + length)), (masked(&bytes[..8]), masked(record)));
        found.push(record.to_vec());
        bytes = &bytes[16 + length..];
    }
    found
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (first, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            break;
        }
    }
    value
}

/// Takes a message apart: field number and bytes (of a varint its value).
fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let length = match key & 7 {
            0 => {
                found.push((key >> 3, varint(&mut bytes).to_le_bytes().to_vec()));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        found.push((key >> 3, bytes[..length].to_vec()));
        bytes = &bytes[length..];
    }
    found
}

/// Returns the scalars of an event, by tag.
fn scalars(summary: &[u8]) -> BTreeMap<String, f32> {
    let scalar = |(_, value): (u64, Vec<u8>)| {
        let value: BTreeMap<_, _> = fields(&value).into_iter().collect();
        let tag = String::from_utf8(value[&1].clone()).unwrap();
        (tag, f32::from_le_bytes(value[&2][..].try_into().unwrap()))
    };
    fields(summary).into_iter().map(scalar).collect()
}

#[test]
fn event_files_say_what_the_metrics_say() {
    assert_eq!(masked(b"123456789"), 0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8));
    let folder = tempfile::tempdir().unwrap();
    let (metrics, board) = (folder.path().join("metrics.jsonl"), folder.path().join("board"));
    let paths = [metrics.to_str().unwrap(), board.to_str().unwrap()];
    let flags = ["--batch-turns", "1", "--metrics", paths[0], "--tensorboard", paths[1]];
    train(folder.path(), &flags).assert().success();
    let file = fs::read_dir(&board).unwrap().next().unwrap().unwrap();
    assert!(file.file_name().to_str().unwrap().starts_with("events.out.tfevents."));
    let records = records(&fs::read(file.path()).unwrap());
    assert!(fields(&records[0]).contains(&(3, b"brain.Event:2".to_vec())));
    let text = fs::read_to_string(&metrics).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((records.len(), lines.len()), (3, 2));
    for (record, line) in records[1..].iter().zip(&lines) {
        let event: BTreeMap<_, _> = fields(record).into_iter().collect();
        assert_eq!(u64::from_le_bytes(event[&2][..].try_into().unwrap()), line["step"]);
        assert!(f64::from_le_bytes(event[&1][..].try_into().unwrap()) > 1.7e9, "wall time");
        let found = scalars(&event[&5]);
        for key in ["loss", "gradient_norm", "learning_rate", "reward", "staleness_max"] {
            let wanted = line[key].as_f64().unwrap() as f32;
            assert_eq!(found[&format!("train/{key}")], wanted, "{key}");
        }
        assert!(line["reference_kl"].is_null() && !found.contains_key("train/reference_kl"));
    }
    // A run without a step leaves no event file, and none in place of a folder.
    let none = folder.path().join("none");
    train(folder.path(), &["--tensorboard", none.to_str().unwrap()]).assert().success();
    assert!(!none.exists());
}
