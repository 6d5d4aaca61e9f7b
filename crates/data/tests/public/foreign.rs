//! Files of tokenizers that were made to take memory and time, or to end the program: read, or refused by what they ask for.

use std::path::Path;

use phalanx_data::Tokenizer;
use serde_json::{Value, json};

use crate::assert_says;

/// A tokenizer of the given parts; the others do nothing.
fn file(parts: &[(&str, Value)]) -> String {
    let mut json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1, "cat": 2}, "unk_token": "[UNK]"},
    });
    for (key, part) in parts {
        json[*key] = part.clone();
    }
    json.to_string()
}

fn replace(pattern: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
}

fn sequence(key: &str, parts: impl IntoIterator<Item = Value>) -> Value {
    json!({"type": "Sequence", key: parts.into_iter().collect::<Value>()})
}

fn unigram(pieces: impl IntoIterator<Item = String>) -> Value {
    let pieces = std::iter::once("<unk>".to_string()).chain(pieces);
    let scored: Value = pieces.map(|piece| json!([piece, -1.0])).collect();
    json!({"type": "Unigram", "unk_id": 0, "vocab": scored})
}

#[test]
fn files_that_ask_for_too_much_are_refused_by_what_they_ask_for() {
    let long = "x".repeat(100 << 10);
    let byte_level = || json!({"type": "ByteLevel", "add_prefix_space": false});
    let doubled = (0..40).map(|n| if n % 2 == 0 { replace("a", "bb") } else { replace("b", "aa") });
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let word_piece = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 1_000_000_000u64, "vocab": {"[UNK]": 0}});
    let pair = |prefix: &str| json!({"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": prefix});
    let word_level =
        |unknown: &str| json!({"type": "WordLevel", "vocab": {unknown: 0}, "unk_token": unknown});
    // A table of characters without a tree, and one text of 101 bytes.
    let table = format!("AAAAAHh4{}", "eHh4".repeat(33));
    let refused: [(&str, Value, &[&str]); 17] = [
        ("normalizer", replace("", "x"), &["Replace of its normalizer", "empty pattern"]),
        ("decoder", sequence("decoders", [replace("", "x")]), &["Replace of its decoder", "empty pattern"]),
        ("normalizer", replace("e", &long), &["its normalizer", "102400 bytes of one byte", "at most 40"]),
        ("decoder", replace("e", &long), &["its decoder", "102400 bytes"]),
        ("normalizer", sequence("normalizers", doubled), &["its normalizer", "1099511627776 bytes"]),
        ("normalizer", json!({"type": "Prepend", "prepend": long}), &["its normalizer", "102401 bytes"]),
        ("normalizer", json!({"prepend": long}), &["its normalizer", "102401 bytes"]),
        ("normalizer", sequence("normalizers", (0..7).map(|_| json!({"type": "ByteLevel"}))), &["128 bytes"]),
        (
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": table}),
            &["precompiled_charsmap", "101 bytes in the place"],
        ),
        (
            "pre_tokenizer",
            sequence("pretokenizers", (0..4).map(|_| byte_level())),
            &["4 parts that lengthen"],
        ),
        ("pre_tokenizer", json!({"type": "FixedLength", "length": 0}), &["\"length\": 0"]),
        (
            "post_processor",
            json!({"type": "TemplateProcessing", "single": [text, text], "pair": [text], "special_tokens": {}}),
            &["its post_processor", "2 times"],
        ),
        ("model", unigram([long.clone()]), &["Unigram", "102400 bytes", "at most 512"]),
        ("model", word_piece, &["max_input_chars_per_word", "1000000000"]),
        ("model", pair(&long), &["continuing_subword_prefix", "102400 bytes"]),
        ("model", word_level(&long), &["unk_token", "102400 bytes"]),
        (
            "model",
            json!({"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.1}),
            &["dropout", "random", "null"],
        ),
    ];
    for (key, part, words) in refused {
        let read = Tokenizer::from_json(file(&[(key, part)]).as_bytes(), Path::new("there.json"));
        assert_says(read, &[&["there.json"], words].concat());
    }
}

#[test]
fn a_failure_within_the_library_is_an_error_with_the_name_of_the_file() {
    // Where the library unwraps: a table of characters that is none, and a pattern that matches nothing in the middle.
    let damaged = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    let read = Tokenizer::from_json(file(&[("normalizer", damaged)]).as_bytes(), Path::new("there.json"));
    assert_says(read, &["there.json", "the tokenizers library failed while it read the file"]);
    for pattern in ["x*", "(?=c)", "\\b", ""] {
        let part = json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": "y"});
        match Tokenizer::from_json(file(&[("normalizer", part)]).as_bytes(), Path::new("there.json")) {
            Ok(read) => match read.encode("the cat é") {
                Ok(ids) => assert!(!ids.is_empty(), "{pattern}"),
                Err(error) => {
                    assert!(error.to_string().contains("failed while it encoded a text"), "{error}")
                }
            },
            Err(error) => assert!(error.to_string().contains("there.json"), "{error}"),
        }
    }
}

#[test]
fn files_like_those_that_are_published_are_read() {
    let regex = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
    let meta = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    // Each mark gets a space; none of them makes another one.
    let marks = ".,;:!?()[]".chars().map(|mark| replace(&mark.to_string(), &format!(" {mark}")));
    let llama = [json!({"type": "Prepend", "prepend": "▁"}), replace(" ", "▁")];
    let prefixes = (1..=512).map(|length| "a".repeat(length));
    for parts in [
        vec![
            ("normalizer", sequence("normalizers", [json!({"type": "NFKC"}), regex])),
            ("pre_tokenizer", meta),
        ],
        vec![("normalizer", sequence("normalizers", marks))],
        vec![("normalizer", sequence("normalizers", llama))],
        vec![("decoder", sequence("decoders", [replace("▁", " "), json!({"type": "Fuse"})]))],
        vec![("model", unigram(prefixes)), ("pre_tokenizer", Value::Null)],
    ] {
        let read = Tokenizer::from_json(file(&parts).as_bytes(), Path::new("there.json")).unwrap();
        let ids = read.encode(&format!("the  cat. {}", "a".repeat(3000))).unwrap();
        assert!(ids.len() >= 3, "{parts:?}");
        read.decode(&ids);
    }
}
