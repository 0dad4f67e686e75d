//! `oclaw convert`: exit codes and words; the numbers are tested in the library.

#[cfg(feature = "torch")]
use oclaw::advantage::{self, Estimator, Method};
#[cfg(feature = "torch")]
use oclaw::table::Format;
#[cfg(feature = "torch")]
use oclaw::trajectory::Turn;

#[cfg(feature = "torch")]
use crate::forge::{STAGES, captured, write};
#[cfg(feature = "torch")]
use crate::harness::fixture_models;
use crate::harness::gguf::tiny_llama;
use crate::harness::oclaw;

#[test]
fn a_file_becomes_a_folder_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    std::fs::write(&file, tiny_llama().bytes()).unwrap();
    let out = folder.path().join("deeper/tiny");

    let done = oclaw().arg("convert").arg(&file).arg("-o").arg(&out).output().unwrap();
    let talk = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(0), "{talk}");
    assert!(done.stdout.is_empty());
    assert!(talk.contains("11 tensors"), "{talk}");
    for name in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ] {
        assert!(out.join(name).exists(), "{name}");
    }
    let config = std::fs::read_to_string(out.join("config.json")).unwrap();
    assert!(config.contains("\"bfloat16\""), "{config}");

    let again = oclaw().arg("convert").arg(&file).arg("-o").arg(&out).output().unwrap();
    let talk = String::from_utf8(again.stderr).unwrap();
    assert_eq!(again.status.code(), Some(2), "{talk}");
    assert!(
        talk.contains("exists already") && talk.contains("hint: ") && talk.contains("--replace"),
        "{talk}"
    );

    let replaced = oclaw()
        .args(["convert", "--replace", "--dtype", "f32", "-q", "-o"])
        .arg(&out)
        .arg(&file)
        .output()
        .unwrap();
    assert_eq!(replaced.status.code(), Some(0));
    assert!(replaced.stderr.is_empty());
    let config = std::fs::read_to_string(out.join("config.json")).unwrap();
    assert!(config.contains("\"float32\""), "{config}");
}

#[test]
fn bad_input_is_one_line_naming_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("notes.gguf");
    std::fs::write(&file, "not a model").unwrap();
    let out = folder.path().join("out");
    for input in [&file, &folder.path().join("absent.gguf")] {
        let failed = oclaw().arg("convert").arg(input).arg("-o").arg(&out).output().unwrap();
        let talk = String::from_utf8(failed.stderr).unwrap();
        assert_eq!(failed.status.code(), Some(1), "{talk}");
        assert!(talk.contains(&*input.to_string_lossy()), "{talk}");
        assert_eq!(talk.lines().count(), 1, "{talk}");
        assert!(!out.exists());
    }
    // Weights that end too early are seen when the folder is half written.
    let bytes = tiny_llama().bytes();
    std::fs::write(&file, &bytes[..bytes.len() - 64]).unwrap();
    let out = folder.path().join("some/where/out");
    let failed = oclaw().arg("convert").arg(&file).arg("-o").arg(&out).output().unwrap();
    let talk = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{talk}");
    assert!(!talk.contains(".tmp-"), "{talk}");
    assert!(!folder.path().join("some").exists(), "{talk}");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    std::fs::write(&file, tiny_llama().bytes()).unwrap();
    // A file stands where a folder is needed; holds for root, too.
    let out = file.join("out");
    let failed = oclaw().arg("convert").arg(&file).arg("-o").arg(&out).output().unwrap();
    let talk = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{talk}");
    assert!(talk.contains(&*out.to_string_lossy()), "{talk}");
}

/// What `train --lora-rank` wrote is merged to the very weights of its policy.
#[cfg(feature = "torch")]
#[test]
fn an_adapter_is_added_to_its_model() {
    let folder = tempfile::tempdir().unwrap();
    let turns = [captured("s", 1), captured("t", 2)].map(|turn| {
        let turn = Turn { score: Some(1.0), ..turn };
        advantage::note(turn, false, &Method::new(Estimator::Combine))
    });
    let table = write(&folder.path().join("batch.parquet"), Format::Parquet, &STAGES, &turns);
    let policy = folder.path().join("policy");
    let mut train = oclaw();
    train.args(["train", "--lora-rank", "2", "--lora-targets", "q_proj,up_proj", "--model"]);
    train.arg(fixture_models().join("tiny-qwen3")).arg("--out").arg(&policy).arg(&table);
    train.assert().success();
    let text = std::fs::read(policy.join("latest/oclaw/train.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(record["settings"]["lr"], 1e-4);
    assert_eq!(record["settings"]["compute"]["lora_alpha"], 4.0);

    let (adapter, out) = (policy.join("latest/adapter"), folder.path().join("merged"));
    let merge = || {
        let mut merge = oclaw();
        merge.args(["convert", "--merge"]).arg(&adapter).arg("-o").arg(&out);
        merge
    };
    merge().assert().success();
    for file in ["model.safetensors", "config.json", "tokenizer.json"] {
        let bytes = |folder: &std::path::Path| std::fs::read(folder.join(file)).unwrap();
        assert!(bytes(&out) == bytes(&policy.join("latest")), "{file}");
    }
    let again = merge().output().unwrap();
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8(again.stderr).unwrap().contains("exists already"));
    let elsewhere = merge().arg("--replace").arg("--base").arg(folder.path()).output().unwrap();
    assert_eq!(elsewhere.status.code(), Some(1));
    assert!(out.join("model.safetensors").exists(), "what was there stays");
}
