//! Block types against recorded numbers, bit for bit; a real GGUF file against
//! the recorded hashes of its tensors, and its tokenizer against recorded ids.

use std::path::{Path, PathBuf};

use oclaw::gguf::blocks::{BlockType, dequantise};
use oclaw::gguf::{Dtype, Options, convert};
use oclaw::tensors::Reader;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::harness::{golden_json, list};

fn from_hex(text: &str) -> Vec<u8> {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn golden_blocks_are_exact() {
    let Some(cases) = golden_json("model/gguf_blocks.json") else { return };
    let cases = cases.as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let name = case["type"].as_str().unwrap();
        let id = case["ggml_type_id"].as_u64().unwrap() as u32;
        // A type that oclaw does not read is refused by name, see the room's tests.
        let Some(kind) = BlockType::from_id(id) else {
            println!("{name}: skipped: not a type that is read");
            continue;
        };
        let found = dequantise(kind, &from_hex(case["bytes_hex"].as_str().unwrap()));
        let wanted: Vec<f32> = case["values_f32"]
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_f64().unwrap() as f32)
            .collect();
        assert_eq!(found.len(), wanted.len(), "{name}");
        for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert_eq!(found.to_bits(), wanted.to_bits(), "{name} {index}: {found} {wanted}");
        }
    }
}

/// Returns the GGUF file of SmolLM2, if this machine has it.
fn smollm2() -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os("OCLAW_SMOLLM2_GGUF")?);
    path.exists().then_some(path)
}

#[test]
fn golden_hashes_of_smollm2() {
    let Some(recorded) = golden_json("model/smollm2_gguf_dequant.json") else { return };
    let Some(gguf) = smollm2() else {
        println!("skipped: no weights (OCLAW_SMOLLM2_GGUF names no file)");
        return;
    };
    assert_eq!(hash(&std::fs::read(&gguf).unwrap()), recorded["gguf_sha256"].as_str().unwrap());
    let folder = tempfile::tempdir().unwrap();
    for (dtype, key) in [(Dtype::F32, "f32_sha256"), (Dtype::Bf16, "bf16_sha256")] {
        let out = folder.path().join(key);
        convert(&gguf, &out, &Options { dtype, replace: false }).unwrap();
        check_hashes(&out, &recorded["tensors"], key);
    }
    check_tokenizer(&folder.path().join("bf16_sha256"));
}

fn check_hashes(folder: &Path, recorded: &Value, key: &str) {
    let reader = Reader::open(&folder.join("model.safetensors")).unwrap();
    assert_eq!(reader.entries().len(), recorded.as_object().unwrap().len());
    for entry in reader.entries() {
        let recorded = &recorded[&entry.name];
        let shape: Vec<u64> =
            recorded["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert!(entry.shape.iter().map(|&n| n as u64).eq(shape), "{}", entry.name);
        let found = hash(&reader.read(entry).unwrap());
        assert_eq!(found, recorded[key].as_str().unwrap(), "{} {key}", entry.name);
    }
}

/// The written tokenizer gives the recorded ids.
fn check_tokenizer(folder: &Path) {
    let Some(recorded) = golden_json("model/smollm2-135m-instruct.json") else { return };
    let tokenizer = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    let check = |text: &Value, ids: &Value| {
        let text = text.as_str().unwrap();
        let found = tokenizer.encode_fast(text, false).unwrap();
        let wanted: Vec<u32> =
            ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(found.get_ids(), wanted, "{text}");
    };
    for case in list(&recorded, "encode") {
        check(&case["text"], &case["ids"]);
    }
    for case in list(&recorded, "chat") {
        check(&case["rendered"], &case["ids"]);
    }
}
