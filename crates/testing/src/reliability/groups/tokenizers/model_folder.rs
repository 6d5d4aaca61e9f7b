//! A Hugging Face folder with a GPT-2 of one layer and width 8, whose weights come from a seed.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::hostile::Random;

/// Longest sequence of the model.
pub(super) const POSITIONS: usize = 16;

const WIDTH: usize = 8;

/// `config.json` with `rows` of the token table.
pub(super) fn config(rows: usize) -> Value {
    json!({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 1, "n_embd": WIDTH, "n_head": 2,
           "n_positions": POSITIONS, "vocab_size": rows, "activation_function": "gelu_new"})
}

/// Writes `config.json` and `model.safetensors` into `folder`.
///
/// # Errors
/// The system's.
pub(super) fn write(folder: &Path, rows: usize, random: &mut Random) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("config.json"), config(rows).to_string())?;
    let mut header = Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, shape) in tensors(rows) {
        let start = data.len();
        for _ in 0..shape.iter().product() {
            let is_norm = name.contains("ln_") && name.ends_with("weight");
            let number = random.fraction() as f32 - 0.5 + if is_norm { 1.0 } else { 0.0 };
            data.extend(number.to_le_bytes());
        }
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(folder.join("model.safetensors"), file)
}

fn tensors(rows: usize) -> Vec<(String, Vec<usize>)> {
    let block = [
        ("ln_1", vec![WIDTH], true),
        ("attn.c_attn", vec![WIDTH, 3 * WIDTH], true),
        ("attn.c_proj", vec![WIDTH, WIDTH], true),
        ("ln_2", vec![WIDTH], true),
        ("mlp.c_fc", vec![WIDTH, 4 * WIDTH], true),
        ("mlp.c_proj", vec![4 * WIDTH, WIDTH], true),
    ]
    .map(|(name, shape, biased)| (format!("h.0.{name}"), shape, biased));
    let ends = [
        ("wte", vec![rows, WIDTH], false),
        ("wpe", vec![POSITIONS, WIDTH], false),
        ("ln_f", vec![WIDTH], true),
    ]
    .map(|(name, shape, biased)| (name.to_string(), shape, biased));
    let mut tensors = Vec::new();
    for (name, shape, biased) in ends.into_iter().chain(block) {
        if biased {
            tensors.push((format!("transformer.{name}.bias"), vec![shape[shape.len() - 1]]));
        }
        tensors.push((format!("transformer.{name}.weight"), shape));
    }
    tensors
}
