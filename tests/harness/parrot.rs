//! A model that always says the same.

use std::path::Path;

use tch::{Kind, Tensor};

use super::fixture_models;

/// `{"name": "set"}` in ids of the tiny models, each of which stands in it once.
pub(crate) const CALL: [i64; 7] = [785, 816, 598, 514, 664, 1, 92];
/// `<think>`, `Hm.`, `</think>`.
pub(crate) const THOUGHT: [i64; 5] = [1018, 39, 76, 13, 1019];
/// ` The name is set`.
pub(crate) const SPEECH: [i64; 4] = [502, 633, 294, 632];
/// What ends an answer.
const END: i64 = 1017;
/// Width of the tiny models.
const WIDTH: i64 = 64;
const WORDS: i64 = 1024;

/// Writes a copy of tiny-llama that answers with these ids, whatever it is asked. An
/// id leads to the next one, so each may stand there once; any other id, such as the
/// last of a prompt, leads to the first.
pub(crate) fn parrot(folder: &Path, ids: &[i64]) {
    let from = fixture_models().join("tiny-llama");
    for entry in std::fs::read_dir(&from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let chain: Vec<i64> = ids.iter().copied().chain([END]).collect();
    let other = WIDTH - 1;
    assert!((chain.len() as i64) < other, "too long");
    // Layers add nothing; a state is the place of its token in the chain.
    let mut places = vec![other; WORDS as usize];
    let head = Tensor::zeros([WORDS, WIDTH], (Kind::Float, tch::Device::Cpu));
    let mut before = other;
    for (place, id) in chain.iter().enumerate() {
        assert_eq!(places[*id as usize], other, "{id} stands there twice");
        places[*id as usize] = place as i64;
        let _ = head.get(*id).get(before).fill_(10.0);
        before = place as i64;
    }
    let embedded = Tensor::from_slice(&places).one_hot(WIDTH).to_kind(Kind::Float);
    let file = folder.join("model.safetensors");
    let changed = Tensor::read_safetensors(&file).unwrap().into_iter().map(|(name, tensor)| {
        let tensor = match name.as_str() {
            "model.embed_tokens.weight" => embedded.shallow_clone(),
            "lm_head.weight" => head.shallow_clone(),
            "model.norm.weight" => tensor.ones_like(),
            name if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") => {
                tensor.zeros_like()
            }
            _ => tensor,
        };
        (name, tensor)
    });
    Tensor::write_safetensors(&changed.collect::<Vec<_>>(), &file).unwrap();
}
