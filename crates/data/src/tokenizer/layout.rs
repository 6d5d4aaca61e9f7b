//! The content of a `tokenizer.json`, and how byte-level vocabularies spell bytes.

use serde_json::{Map, Value, json};

/// A `tokenizer.json` without special tokens.
pub(super) fn content_of(pre_tokenizer: Value, decoder: Value, model: Value) -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": model,
    })
}

/// Byte-pair encoding of bytes, spelled as GPT-2's vocabulary spells them.
pub(super) fn byte_pairs(vocab: Map<String, Value>, merges: Vec<String>) -> Value {
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges,
    });
    content_of(bytes.clone(), bytes, model)
}

/// A character that can be printed for each byte, as GPT-2's vocabulary spells them.
pub(super) fn printable_bytes() -> Vec<char> {
    let as_is = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = (256u32..).filter_map(char::from_u32);
    (0..=255u8)
        .map(
            |byte| {
                if as_is(byte) { char::from(byte) } else { others.next().expect("more than 256 characters") }
            },
        )
        .collect()
}
