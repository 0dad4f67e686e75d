//! Whether weights fit in where others were.

use std::path::Path;

use crate::model::Config;

/// Refuses weights of another model: what waits was checked against this one.
pub(super) fn same_shape(folder: &Path, served: &Config, found: &Config) -> Result<(), String> {
    let shape = |config: &Config| {
        [
            ("vocab_size", config.vocab_size),
            ("hidden_size", config.hidden_size),
            ("num_hidden_layers", config.num_hidden_layers),
            ("num_attention_heads", config.num_attention_heads),
            ("num_key_value_heads", config.num_key_value_heads),
            ("head_dim", config.head_dim),
            ("intermediate_size", config.intermediate_size),
            ("max_position_embeddings", config.max_position_embeddings),
        ]
    };
    let folder = folder.display();
    if served.family != found.family {
        let (found, served) = (found.family, served.family);
        return Err(format!("`{folder}` is a {found:?} model, the served one is {served:?}"));
    }
    for ((name, served), (_, found)) in shape(served).into_iter().zip(shape(found)) {
        if served != found {
            return Err(format!("`{folder}` has `{name}` {found}, the served model {served}"));
        }
    }
    Ok(())
}
