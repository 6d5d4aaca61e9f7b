//! `tokenizer.json`: ids that are not there or too many, merges of nothing, text that is no tokenizer.

use serde_json::{Value, json};

use crate::hostile::Random;
use crate::reliability::groups::hostile::{Attempt, change_somewhere, flip, nested};
use crate::reliability::world::Case;

pub(super) fn make(case: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    let mut json = right();
    let (input, bytes) = match random.below(6) {
        0 => {
            let mut bytes = json.to_string().into_bytes();
            flip(&mut bytes, random);
            ("flipped bytes".to_string(), bytes)
        }
        1 => {
            let depth = 10usize.pow(1 + random.below(5) as u32);
            (format!("{depth} nested arrays"), nested(depth).into_bytes())
        }
        2 => {
            let kinds =
                ["", "{}", "[]", "null", "{\"kind\":\"char\"}", "{\"kind\":\"char\",\"chars\":\"aab\"}"];
            let text = *random.pick(&kinds);
            (format!("the text {text:?}"), text.as_bytes().to_vec())
        }
        _ => {
            let changes: Vec<String> =
                (0..1 + random.below(2)).map(|_| change_somewhere(&mut json, random)).collect();
            (changes.join(", "), json.to_string().into_bytes())
        }
    };
    case.write("tokenizer.json", bytes)?;
    let words: &[&str] = match random.below(2) {
        0 => &["tokenize", "--tokenizer", "tokenizer.json", "--out", "t.bin", "text.txt"],
        _ => &[
            "train",
            "small.toml",
            "--set",
            "data.tokenizer=tokenizer.json",
            "--set",
            "train.steps=3",
            "--quiet",
        ],
    };
    Ok(Attempt::new(format!("tokenizer.json: {input}"), words.iter().copied()))
}

/// A small BPE of Hugging Face's form.
fn right() -> Value {
    let letters = "abcdefghijklmnopqrstuvwxyz";
    let mut vocab = serde_json::Map::new();
    vocab.insert("<unk>".to_string(), json!(0));
    for (id, letter) in (1..).zip(letters.chars()) {
        vocab.insert(letter.to_string(), json!(id));
    }
    vocab.insert("an".to_string(), json!(27));
    vocab.insert("ank".to_string(), json!(28));
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{ "id": 0, "content": "<unk>", "single_word": false, "lstrip": false, "rstrip": false,
                           "normalized": false, "special": true }],
        "pre_tokenizer": { "type": "Whitespace" }, "decoder": null,
        "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "vocab": vocab,
                   "merges": [["a", "n"], ["an", "k"]] },
    })
}
