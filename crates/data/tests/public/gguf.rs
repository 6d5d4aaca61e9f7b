//! Tokenizers as GGUF files describe them: the algorithm, what each row is, and what llama.cpp does not do.

use std::path::Path;

use phalanx_data::{GgufVocabulary, Tokenizer};
use serde_json::{Value, json};

use crate::tokenizers::byte_level;

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn gguf(tokenizer: &Value, rows: usize) -> Result<GgufVocabulary, String> {
    Tokenizer::from_json(tokenizer.to_string().as_bytes(), Path::new("test")).unwrap().gguf(rows)
}

/// The tokenizer of a name among those that the library has read.
fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers.json");
    let all: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    all.as_array().unwrap().iter().find(|each| each["name"] == name).unwrap()["tokenizer"].clone()
}

#[test]
fn splits_have_the_names_of_llama_cpp() {
    let with = |pre_tokenizers: Value, ignore_merges: bool| {
        let mut tokenizer: Value = serde_json::from_str(&byte_level()).unwrap();
        tokenizer["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": pre_tokenizers});
        tokenizer["model"]["ignore_merges"] = json!(ignore_merges);
        gguf(&tokenizer, 256).map(|vocabulary| vocabulary.pre.to_string())
    };
    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let split = |pattern: &str| json!([{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}, bytes(false)]);
    let qwen = LLAMA_3.replace("{1,3}", "");
    for (parts, ignore_merges, expected) in [
        (split(LLAMA_3), true, Ok("llama-bpe")),
        (split(LLAMA_3), false, Ok("dbrx")),
        (split(&qwen), false, Ok("qwen2")),
        (json!([bytes(true)]), false, Ok("gpt-2")),
        (json!([{"type": "Digits", "individual_digits": true}, bytes(true)]), false, Ok("smollm")),
        (split(&qwen), true, Err("splits text")),
        (split(r"\s+"), false, Err("splits text")),
        (json!([{"type": "Digits", "individual_digits": false}, bytes(true)]), false, Err("splits text")),
    ] {
        match (with(parts.clone(), ignore_merges), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{parts}"),
            (Err(found), Err(expected)) => assert!(found.contains(expected), "{found}"),
            (found, expected) => panic!("{found:?} in place of {expected:?}: {parts}"),
        }
    }
}

#[test]
fn every_row_has_a_token_and_its_kind() {
    let made = gguf(&golden("byte-fallback"), 620).unwrap();
    assert_eq!((made.model, made.pre, made.tokens.len(), made.kinds.len()), ("llama", "default", 620, 620));
    // Unknown, two that control, bytes.
    assert_eq!((made.kinds[0], made.kinds[1], made.kinds[2]), (2, 3, 3));
    let byte = made.tokens.iter().position(|token| token == "<0x0A>").unwrap();
    assert_eq!(made.kinds[byte], 6);
    // The earlier a merge, the higher the score of what it makes; tokens that no merge makes have the highest.
    let tokenizer = golden("byte-fallback");
    let merges = tokenizer["model"]["merges"].as_array().unwrap();
    let made_by = |index: usize| match &merges[index] {
        Value::String(pair) => pair.replacen(' ', "", 1),
        pair => [pair[0].as_str().unwrap(), pair[1].as_str().unwrap()].concat(),
    };
    let score = |token: &str| made.scores[made.tokens.iter().position(|each| each == token).unwrap()];
    assert_eq!((score(&made_by(0)), score("<0x0A>")), (0.0, 0.0));
    assert!(score(&made_by(1)) < 0.0 && made.merges.is_empty());

    let mut tokenizer: Value = serde_json::from_str(&byte_level()).unwrap();
    tokenizer["added_tokens"] = json!([
        {"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
        {"id": 257, "content": "<tool>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false},
    ]);
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(LLAMA_3);
    let made = gguf(&tokenizer, 260).unwrap();
    assert_eq!((made.model, made.scores.is_empty(), made.tokens.len()), ("gpt2", true, 260));
    assert_eq!(made.tokens[256..], ["<|end|>", "<tool>", "[PAD258]", "[PAD259]"]);
    assert_eq!(made.kinds[255..], [1, 3, 4, 5, 5]);
    // An added token behind the rows is left out; any other would be missed.
    let made = gguf(&tokenizer, 257).unwrap();
    assert_eq!(
        (made.tokens.len(), &made.notes[..]),
        (257, &["added tokens without a row in the model are left out: \"<tool>\"".to_string()][..])
    );
    assert!(gguf(&tokenizer, 255).unwrap_err().contains("258 ids, and the model 255 rows"));
}

#[test]
fn what_llama_cpp_does_not_do_is_refused_by_name() {
    for (name, expected) in [
        ("wordpiece", "\"WordPiece\""),
        ("unigram-bytes", "\"Unigram\""),
        ("word-level", "\"WordLevel\""),
        ("prefix-space", "splits text"),
        ("end-of-word", "end_of_word_suffix"),
    ] {
        let error = gguf(&golden(name), 1000).unwrap_err();
        assert!(error.contains(expected), "{name}: {error}");
    }
    assert_eq!(Tokenizer::gpt2().gguf(50_304).unwrap().pre, "gpt-2");
    assert_eq!(Tokenizer::byte().gguf(256).unwrap().merges.len(), 0);
    assert!(Tokenizer::char_of("abc").gguf(3).unwrap_err().contains("\"WordLevel\""));
}

/// Gemma's splits at the spaces that its normalizer has replaced; Phi-3's removes spaces behind added tokens.
#[test]
fn what_gemma_and_phi3_add_is_known() {
    let mut tokenizer = golden("byte-fallback");
    tokenizer["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    let made = gguf(&tokenizer, 620).unwrap();
    assert_eq!((made.name, made.notes.len()), (None, 0));
    let id = tokenizer["model"]["vocab"].as_object().unwrap().len();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.iter_mut().for_each(|token| token["rstrip"] = json!(token["content"] == "</s>"));
    let mut end = added[0].clone();
    (end["id"], end["content"], end["rstrip"]) = (json!(id), json!("<|endoftext|>"), json!(false));
    added.push(end);
    let made = gguf(&tokenizer, 620).unwrap();
    assert_eq!((made.name, made.notes.len()), (Some("phi-3"), 0));
    tokenizer["added_tokens"][3]["rstrip"] = json!(true);
    let made = gguf(&tokenizer, 620).unwrap();
    assert!(made.name.is_none() && made.notes[0].contains("spaces beside added tokens"), "{:?}", made.notes);
    tokenizer["normalizer"] = Value::Null;
    assert!(gguf(&tokenizer, 620).unwrap_err().contains("prepares text by"));
}
