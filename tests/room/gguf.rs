//! The GGUF reader and converter on files made here: what is refused, and that
//! nothing is believed before it is checked.

use std::path::{Path, PathBuf};

use oclaw::gguf::blocks::{BlockType, dequantise};
use oclaw::gguf::{Dtype, Error, Gguf, Options, Value, convert};
use oclaw::tensors::Reader;
use proptest::prelude::*;

use crate::harness::gguf::{Builder, HIDDEN, f32_bytes, list, numbers, text, tiny_llama};

const AS_F32: Options = Options { dtype: Dtype::F32, replace: false };

struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join("model.gguf");
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Converts and returns the message of the error.
    fn refused(&self, builder: &Builder) -> String {
        let error = convert(&self.file(&builder.bytes()), &self.out(), &AS_F32).unwrap_err();
        self.assert_nothing_left();
        error.to_string()
    }

    fn assert_nothing_left(&self) {
        let names: Vec<_> = std::fs::read_dir(self.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| name != "model.gguf")
            .collect();
        assert!(names.is_empty(), "left behind: {names:?}");
    }
}

fn tensor(folder: &Path, name: &str) -> (Vec<usize>, Vec<u8>) {
    let reader = Reader::open(&folder.join("model.safetensors")).unwrap();
    let entry = reader.entries().iter().find(|entry| entry.name == name).unwrap();
    (entry.shape.clone(), reader.read(entry).unwrap())
}

#[test]
fn every_value_type_is_read() {
    let inner = list(5, &[(-1_i32).to_le_bytes().to_vec(), 2_i32.to_le_bytes().to_vec()]);
    let bytes = Builder::default()
        .value("u8", 0, [200])
        .value("i8", 1, [200])
        .value("u16", 2, 60_000_u16.to_le_bytes())
        .value("i16", 3, (-3_i16).to_le_bytes())
        .value("u32", 4, 4_000_000_000_u32.to_le_bytes())
        .value("i32", 5, (-5_i32).to_le_bytes())
        .value("f32", 6, 0.1_f32.to_le_bytes())
        .value("bool", 7, [1])
        .value("text", 8, text("Ġab"))
        .value("list", 9, list(9, &[inner]))
        .value("u64", 10, u64::MAX.to_le_bytes())
        .value("i64", 11, i64::MIN.to_le_bytes())
        .value("f64", 12, 0.1_f64.to_le_bytes())
        .bytes();
    let bench = Bench::new();
    let gguf = Gguf::open(&bench.file(&bytes)).unwrap();
    let inner = Value::List(vec![Value::Signed(-1), Value::Signed(2)]);
    for (key, wanted) in [
        ("u8", Value::Unsigned(200)),
        ("i8", Value::Signed(-56)),
        ("u16", Value::Unsigned(60_000)),
        ("i16", Value::Signed(-3)),
        ("u32", Value::Unsigned(4_000_000_000)),
        ("i32", Value::Signed(-5)),
        ("f32", Value::F32(0.1)),
        ("bool", Value::Bool(true)),
        ("text", Value::Text("Ġab".to_owned())),
        ("list", Value::List(vec![inner])),
        ("u64", Value::Unsigned(u64::MAX)),
        ("i64", Value::Signed(i64::MIN)),
        ("f64", Value::F64(0.1)),
    ] {
        assert_eq!(gguf.value(key), Some(&wanted), "{key}");
    }
    assert_eq!(gguf.number("f32").unwrap(), 0.1);
}

#[test]
fn blocks_by_hand() {
    let half = |number: f32| half::f16::from_f32(number).to_le_bytes();
    let nibbles: Vec<u8> = (0..16).map(|low| low | (15 - low) << 4).collect();
    let found = dequantise(BlockType::Q4_0, &[&half(0.5)[..], &nibbles].concat());
    assert_eq!(found[..3], [-4.0, -3.5, -3.0]);
    assert_eq!(found[16..19], [3.5, 3.0, 2.5]);
    let found = dequantise(BlockType::Q4_1, &[&half(0.5)[..], &half(-1.0), &nibbles].concat());
    assert_eq!(found[..3], [-1.0, -0.5, 0.0]);
    assert_eq!(found[16..19], [6.5, 6.0, 5.5]);
    let bytes: Vec<u8> = (0..32).map(|at: u8| at.wrapping_sub(2)).collect();
    let found = dequantise(BlockType::Q8_0, &[&half(0.25)[..], &bytes].concat());
    assert_eq!(found[..4], [-0.5, -0.25, 0.0, 0.25]);
    assert_eq!(dequantise(BlockType::F16, &half(-1.5)), [-1.5]);
    assert_eq!(dequantise(BlockType::Bf16, &[0x80, 0x3f]), [1.0]);
}

#[test]
fn a_tiny_llama_becomes_a_folder() {
    let bench = Bench::new();
    let file = bench.file(&tiny_llama().bytes());
    let converted = convert(&file, &bench.out(), &AS_F32).unwrap();
    assert_eq!(converted.tensors, 11);
    // q: row 2 j + s of each head of width 16 becomes row 8 s + j.
    let stored = numbers(32 * HIDDEN, 4);
    let row = |index: usize| stored[index * HIDDEN..(index + 1) * HIDDEN].to_vec();
    let order = |head: usize| (0..16).map(move |index| head * 16 + 2 * (index % 8) + index / 8);
    let wanted: Vec<f32> = order(0).chain(order(1)).flat_map(row).collect();
    let (shape, bytes) = tensor(&bench.out(), "model.layers.0.self_attn.q_proj.weight");
    assert_eq!((shape, bytes), (vec![32, HIDDEN], f32_bytes(&wanted)));
    let (shape, bytes) = tensor(&bench.out(), "model.norm.weight");
    assert_eq!((shape, bytes), (vec![HIDDEN], f32_bytes(&numbers(HIDDEN, 1))));
    let config = std::fs::read_to_string(bench.out().join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["rms_norm_eps"], 1e-5);
    assert_eq!(config["tie_word_embeddings"], true);
    assert_eq!(config["torch_dtype"], "float32");
    assert_eq!((&config["bos_token_id"], &config["eos_token_id"]), (&1.into(), &2.into()));
    let tokenizer = tokenizers::Tokenizer::from_file(bench.out().join("tokenizer.json")).unwrap();
    let ids = tokenizer.encode_fast("ab<|im_end|>a11", false).unwrap();
    assert_eq!(ids.get_ids(), [5, 2, 3, 6, 6]);
}

#[test]
fn an_existing_folder_is_replaced_only_when_told() {
    let bench = Bench::new();
    let file = bench.file(&tiny_llama().bytes());
    std::fs::create_dir(bench.out()).unwrap();
    std::fs::write(bench.out().join("mine.txt"), "x").unwrap();
    assert!(matches!(convert(&file, &bench.out(), &AS_F32), Err(Error::Exists { .. })));
    assert!(bench.out().join("mine.txt").exists());
    let replace = Options { replace: true, ..AS_F32 };
    // A broken file takes nothing away.
    let broken = bench.folder.path().join("broken.gguf");
    std::fs::write(&broken, b"GGUF").unwrap();
    assert!(convert(&broken, &bench.out(), &replace).is_err());
    assert!(bench.out().join("mine.txt").exists());
    convert(&file, &bench.out(), &replace).unwrap();
    assert!(!bench.out().join("mine.txt").exists());
    assert!(bench.out().join("model.safetensors").exists());
    assert_eq!(std::fs::read_dir(bench.folder.path()).unwrap().count(), 3);
}

#[test]
fn what_cannot_be_converted_is_named() {
    let bench = Bench::new();
    let tiny = tiny_llama;
    let q4_k = tiny().tensor("blk.0.ffn_up.weight", &[64, HIDDEN], 12, vec![0; 2000]);
    for (builder, words) in [
        (q4_k, ["`blk.0.ffn_up.weight`", "`Q4_K`"]),
        (tiny().text("general.architecture", "qwen2"), ["`general.architecture`", "`qwen2`"]),
        (tiny().text("tokenizer.ggml.model", "llama"), ["`tokenizer.ggml.model`", "`llama`"]),
        (tiny().text("tokenizer.ggml.pre", "llama-bpe"), ["`tokenizer.ggml.pre`", "`llama-bpe`"]),
        (tiny().count("llama.expert_count", 8), ["`llama.expert_count`", "`8`"]),
        (tiny().text("llama.rope.scaling.type", "yarn"), ["rope.scaling", "`yarn`"]),
        (tiny().without_tensor("blk.0.ffn_up.weight"), ["`blk.0.ffn_up.weight`", "missing"]),
        (
            tiny().tensor("rope_freqs.weight", &[8], 0, vec![0; 32]),
            ["`rope_freqs.weight`", "a tensor"],
        ),
        (tiny().count("llama.embedding_length", 64), ["token_embd.weight", "wanted [8, 64]"]),
        (tiny().without_value("llama.context_length"), ["`llama.context_length`", "whole number"]),
        (tiny().count("tokenizer.ggml.bos_token_id", 8), ["bos_token_id", "id of a token"]),
        (tiny().count("general.alignment", 33), ["alignment", "33"]),
    ] {
        let message = bench.refused(&builder);
        for word in words {
            assert!(message.contains(word), "`{word}` is not in: {message}");
        }
    }
}

#[test]
fn a_cut_file_is_refused_wherever_it_is_cut() {
    let bench = Bench::new();
    let bytes = tiny_llama().bytes();
    for length in (0..bytes.len() - 32).step_by(97) {
        let error = convert(&bench.file(&bytes[..length]), &bench.out(), &AS_F32).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "cut at {length}: {error}");
        bench.assert_nothing_left();
    }
}

#[test]
fn counts_that_cannot_be_are_not_believed() {
    let bench = Bench::new();
    let head = |tensors: u64, values: u64| {
        let counts = [tensors.to_le_bytes(), values.to_le_bytes()].concat();
        [&b"GGUF"[..], &3_u32.to_le_bytes(), &counts].concat()
    };
    let value = |kind: u32, bytes: &[u8]| {
        [&head(0, 1), &text("k")[..], &kind.to_le_bytes(), bytes].concat()
    };
    let mut deep = 0_u8.to_le_bytes().to_vec();
    for _ in 0..1000 {
        deep = [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &deep].concat();
    }
    for (what, bytes) in [
        ("no magic", b"GGML\x03\0\0\0".to_vec()),
        ("version 1", [&b"GGUF"[..], &1_u32.to_le_bytes(), &[0; 16]].concat()),
        ("tensors", head(u64::MAX, 0)),
        ("values", head(0, u64::MAX / 2)),
        ("text length", value(8, &u64::MAX.to_le_bytes())),
        (
            "list length",
            value(9, &list(10, &[])[..4]).into_iter().chain(u64::MAX.to_le_bytes()).collect(),
        ),
        ("depth", value(9, &deep)),
        ("value type", value(77, &[0; 64])),
        ("truth value", value(7, &[2])),
        ("not UTF-8", value(8, &[&2_u64.to_le_bytes()[..], b"\xff\xfe"].concat())),
    ] {
        let error = Gguf::open(&bench.file(&bytes)).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{what}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the bytes say, the answer is a folder or an error.
    #[test]
    fn damaged_files_never_panic(changes in prop::collection::vec((0.0..1.0_f64, any::<u8>()), 1..4)) {
        let mut bytes = tiny_llama().bytes();
        for (place, byte) in changes {
            let at = (place * bytes.len() as f64) as usize;
            bytes[at] = byte;
        }
        let bench = Bench::new();
        let _ = convert(&bench.file(&bytes), &bench.out(), &AS_F32);
    }
}
