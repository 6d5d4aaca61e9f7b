//! The `tokenizer.json` that is written for a built-in tokenizer gives the same ids in Hugging Face's library.

use std::path::Path;

use phalanx_data::Tokenizer;
use serde_json::Value;

use crate::assert_says;

const TEXT: &str = "Hello world!  Two  spaces,\n\n\ttabs\r\nand it's 12 3456 'll I'VE\u{a0}\u{3000}naïve café e\u{301} \
                    漢字 🙂🙂👩‍👩‍👧 \u{0} ... ---   \n ends  ";

/// The tokenizer of the written file.
fn written(tokenizer: &Tokenizer, mask: Option<u32>) -> Tokenizer {
    let files = tokenizer.hugging_face_files(mask);
    Tokenizer::from_json(files.tokenizer().as_bytes(), Path::new("written")).unwrap()
}

#[test]
fn built_in_tokenizers_keep_their_ids_and_texts() {
    for own in [Tokenizer::byte(), Tokenizer::gpt2(), Tokenizer::char_of(TEXT)] {
        let theirs = written(&own, None);
        assert!(theirs.describe().starts_with("tokenizer.json"), "{theirs:?}");
        assert_eq!(theirs.vocab_size(), own.vocab_size(), "{own:?}");
        assert_eq!(theirs.separator(), own.separator(), "{own:?}");
        for text in [TEXT, "", "a", " ", "\n"] {
            let Ok(ids) = own.encode(text) else { continue };
            assert_eq!(theirs.encode(text).unwrap(), ids, "{own:?}: {text:?}");
            assert_eq!(theirs.decode(&ids), text, "{own:?}");
        }
    }
}

#[test]
fn gpt2_keeps_its_ids_on_source_code() {
    let own = Tokenizer::gpt2();
    let text = include_str!("corpora.rs");
    assert!(written(&own, None).encode(text).unwrap() == own.encode(text).unwrap());
}

#[test]
fn a_character_outside_of_the_vocabulary_is_refused_in_both() {
    let own = Tokenizer::char_of("abc");
    assert_says(own.encode("abd"), &["'d'"]);
    assert!(written(&own, None).encode("abd").is_err());
}

#[test]
fn special_tokens_are_named() {
    let gpt2 = Tokenizer::gpt2().hugging_face_files(None);
    assert_eq!(
        [gpt2.id("bos_token"), gpt2.id("eos_token"), gpt2.id("mask_token")],
        [Some(50256), Some(50256), None]
    );
    let config: serde_json::Value =
        serde_json::from_str(&gpt2.complete(1024, true)["tokenizer_config.json"]).unwrap();
    assert_eq!((&config["eos_token"], &config["model_max_length"]), (&"<|endoftext|>".into(), &1024.into()));
    assert!(Tokenizer::byte().hugging_face_files(None).special().is_empty());
    // The row that a masked model has beside the vocabulary.
    let byte = Tokenizer::byte();
    assert_eq!(byte.hugging_face_files(Some(256)).id("mask_token"), Some(256));
    let masked = written(&byte, Some(256));
    assert_eq!((masked.mask(), masked.encode("a[MASK]b").unwrap()), (Some(256), vec![97, 256, 98]));
    // Written once more, as an import and an export do.
    let again = masked.hugging_face_files(Some(256));
    assert_eq!((again.id("mask_token"), again.special().len()), (Some(256), 1));
    assert_eq!(again.tokenizer(), byte.hugging_face_files(Some(256)).tokenizer());
}

/// Tokenizers of each kind of model, and of what changes a text before it, by the library's own implementation: golden ids
/// and texts that `tools/tokenizer_ids.py` writes, which also compares with twenty published ones.
#[test]
fn tokenizers_of_different_make_give_the_ids_of_the_library() {
    let goldens: Vec<Value> = serde_json::from_str(include_str!("../golden/tokenizers.json")).unwrap();
    let names: Vec<&str> = goldens.iter().map(|golden| golden["name"].as_str().unwrap()).collect();
    let expected = [
        "prefix-space",
        "added-tokens",
        "wordpiece",
        "unigram-bytes",
        "byte-fallback",
        "end-of-word",
        "word-level",
    ];
    assert_eq!(names, expected);
    for golden in &goldens {
        let name = &golden["name"];
        let content = golden["tokenizer"].to_string();
        let tokenizer = Tokenizer::from_json(content.as_bytes(), Path::new("made")).unwrap();
        let texts = golden["texts"].as_array().unwrap();
        assert!(texts.len() > 6, "{name}");
        for text in texts {
            let ids: Vec<u32> = serde_json::from_value(text["ids"].clone()).unwrap();
            let given = text["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(given).unwrap(), ids, "{name}: {given:?}");
            assert_eq!(text["decoded"], tokenizer.decode(&ids), "{name}: {given:?}");
            assert!(ids.iter().all(|id| tokenizer.token(*id).is_some()), "{name}");
        }
        assert_eq!(tokenizer.token(tokenizer.vocab_size() as u32), None, "{name}");
    }
}

/// An id between the first and the last may be nobody's.
#[test]
fn holes_between_the_ids_have_no_token() {
    let content = r#"{"model":{"type":"WordLevel","vocab":{"a":0,"b":3},"unk_token":"a"}}"#;
    let tokenizer = Tokenizer::from_json(content.as_bytes(), Path::new("holes")).unwrap();
    let tokens: Vec<Option<String>> = (0..5).map(|id| tokenizer.token(id)).collect();
    assert_eq!(tokenizer.vocab_size(), 4);
    assert_eq!(tokens, [Some("a".to_string()), None, None, Some("b".to_string()), None]);
    let byte = Tokenizer::byte();
    assert!((0..256).all(|id| byte.token(id).is_some()) && byte.token(byte.vocab_size() as u32).is_none());
}
