//! GGUF files made for a test: a writer, and a tiny Llama in six block types.

use half::{bf16, f16};

/// Width of the tiny model, which is one block of the quantised types per row.
pub(crate) const HIDDEN: usize = 32;
/// Tokens of the tiny model.
pub(crate) const TOKENS: &[&str] =
    &["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "Ġ"];

/// A GGUF file being put together.
#[derive(Default, Clone)]
pub(crate) struct Builder {
    values: Vec<(String, Vec<u8>)>,
    tensors: Vec<Tensor>,
}

#[derive(Clone)]
struct Tensor {
    name: String,
    shape: Vec<usize>,
    type_id: u32,
    bytes: Vec<u8>,
}

/// Returns a text as it stands in the file.
pub(crate) fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Returns a list as it stands in the file.
pub(crate) fn list(kind: u32, items: &[Vec<u8>]) -> Vec<u8> {
    let head = [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes()].concat();
    [head, items.concat()].concat()
}

impl Builder {
    /// Adds a value, or replaces it.
    pub(crate) fn value(mut self, key: &str, kind: u32, bytes: impl AsRef<[u8]>) -> Self {
        self.values.retain(|(known, _)| known != key);
        self.values.push((key.to_owned(), [&kind.to_le_bytes(), bytes.as_ref()].concat()));
        self
    }

    /// Adds a text.
    pub(crate) fn text(self, key: &str, value: &str) -> Self {
        self.value(key, 8, text(value))
    }

    /// Adds a u32.
    pub(crate) fn count(self, key: &str, value: u32) -> Self {
        self.value(key, 4, value.to_le_bytes())
    }

    /// Takes a value out.
    pub(crate) fn without_value(mut self, key: &str) -> Self {
        self.values.retain(|(known, _)| known != key);
        self
    }

    /// Adds a tensor with a row-major shape, or replaces it.
    pub(crate) fn tensor(
        mut self,
        name: &str,
        shape: &[usize],
        type_id: u32,
        bytes: Vec<u8>,
    ) -> Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self.tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), type_id, bytes });
        self
    }

    /// Takes a tensor out.
    pub(crate) fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// Returns the file's bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            file.extend(text(key));
            file.extend(value);
        }
        let mut data: Vec<u8> = Vec::new();
        for tensor in &self.tensors {
            file.extend(text(&tensor.name));
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            for length in tensor.shape.iter().rev() {
                file.extend((*length as u64).to_le_bytes());
            }
            file.extend(tensor.type_id.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        file
    }
}

/// Returns `count` numbers that differ from each other and from a pattern.
pub(crate) fn numbers(count: usize, start: usize) -> Vec<f32> {
    (0..count).map(|index| (((index + start) * 37 % 101) as f32 - 50.0) / 64.0).collect()
}

/// Returns f32 numbers as they stand in the file.
pub(crate) fn f32_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Returns blocks with a scale (and an offset) of 1/64 and any nibbles or bytes.
fn blocks(count: usize, halves: usize, payload: usize) -> Vec<u8> {
    (0..count)
        .flat_map(|block| {
            let halves = (0..halves).flat_map(|_| f16::from_f32(1.0 / 64.0).to_le_bytes());
            halves
                .chain((0..payload).map(move |at| (block * 29 + at * 53) as u8))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Returns a Llama of one layer with tied embeddings: two heads of width 16,
/// one key head, all six block types.
pub(crate) fn tiny_llama() -> Builder {
    let words = |words: &[&str]| list(8, &words.iter().map(|word| text(word)).collect::<Vec<_>>());
    let kinds = [3, 3, 3, 1, 1, 1, 1, 1].map(|kind: i32| kind.to_le_bytes().to_vec());
    let norm = |start| f32_bytes(&numbers(HIDDEN, start));
    let half = |count, start| {
        numbers(count, start).iter().flat_map(|&n| f16::from_f32(n).to_le_bytes()).collect()
    };
    let brain = |count, start| {
        numbers(count, start).iter().flat_map(|&n| bf16::from_f32(n).to_le_bytes()).collect()
    };
    let wide = 64;
    Builder::default()
        .text("general.architecture", "llama")
        .count("llama.embedding_length", HIDDEN as u32)
        .count("llama.block_count", 1)
        .count("llama.feed_forward_length", wide as u32)
        .count("llama.attention.head_count", 2)
        .count("llama.attention.head_count_kv", 1)
        .count("llama.context_length", 128)
        .value("llama.rope.freq_base", 6, 10_000_f32.to_le_bytes())
        .value("llama.attention.layer_norm_rms_epsilon", 6, 1e-5_f32.to_le_bytes())
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .value("tokenizer.ggml.tokens", 9, words(TOKENS))
        .value("tokenizer.ggml.token_type", 9, list(5, &kinds))
        .value("tokenizer.ggml.merges", 9, words(&["a b"]))
        .count("tokenizer.ggml.bos_token_id", 1)
        .count("tokenizer.ggml.eos_token_id", 2)
        .count("tokenizer.ggml.unknown_token_id", 0)
        .count("tokenizer.ggml.padding_token_id", 2)
        .text("tokenizer.chat_template", "{{ messages[0].content }}")
        .tensor("token_embd.weight", &[TOKENS.len(), HIDDEN], 8, blocks(TOKENS.len(), 1, 32))
        .tensor("output_norm.weight", &[HIDDEN], 0, norm(1))
        .tensor("blk.0.attn_norm.weight", &[HIDDEN], 0, norm(2))
        .tensor("blk.0.ffn_norm.weight", &[HIDDEN], 0, norm(3))
        .tensor("blk.0.attn_q.weight", &[32, HIDDEN], 0, f32_bytes(&numbers(32 * HIDDEN, 4)))
        .tensor("blk.0.attn_k.weight", &[16, HIDDEN], 1, half(16 * HIDDEN, 5))
        .tensor("blk.0.attn_v.weight", &[16, HIDDEN], 30, brain(16 * HIDDEN, 6))
        .tensor("blk.0.attn_output.weight", &[HIDDEN, 32], 2, blocks(HIDDEN, 1, 16))
        .tensor("blk.0.ffn_gate.weight", &[wide, HIDDEN], 3, blocks(wide, 2, 16))
        .tensor("blk.0.ffn_up.weight", &[wide, HIDDEN], 3, blocks(wide, 2, 16))
        .tensor("blk.0.ffn_down.weight", &[HIDDEN, wide], 8, blocks(2 * HIDDEN, 1, 32))
}
