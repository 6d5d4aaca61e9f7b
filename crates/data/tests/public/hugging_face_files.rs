//! The `tokenizer.json` that is written for a built-in tokenizer gives the same ids in Hugging Face's library.

use std::path::Path;

use phalanx_data::Tokenizer;

use crate::assert_says;

const TEXT: &str = "Hello world!  Two  spaces,\n\n\ttabs\r\nand it's 12 3456 'll I'VE\u{a0}\u{3000}naïve café e\u{301} \
                    漢字 🙂🙂👩‍👩‍👧 \u{0} ... ---   \n ends  ";

/// The tokenizer of the written file.
fn written(tokenizer: &Tokenizer, mask: Option<u32>) -> Tokenizer {
    let files = tokenizer.hugging_face_files(mask);
    Tokenizer::from_json(files.tokenizer.as_bytes(), Path::new("written")).unwrap()
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
    let config = gpt2.config(1024);
    assert_eq!((&config["eos_token"], &config["model_max_length"]), (&"<|endoftext|>".into(), &1024.into()));
    assert!(Tokenizer::byte().hugging_face_files(None).special.is_empty());
    // The row that a masked model has beside the vocabulary.
    let byte = Tokenizer::byte();
    assert_eq!(byte.hugging_face_files(Some(256)).id("mask_token"), Some(256));
    let masked = written(&byte, Some(256));
    assert_eq!((masked.mask(), masked.encode("a[MASK]b").unwrap()), (Some(256), vec![97, 256, 98]));
    // Written once more, as an import and an export do.
    let again = masked.hugging_face_files(Some(256));
    assert_eq!((again.id("mask_token"), again.special.len()), (Some(256), 1));
    assert_eq!(again.tokenizer, byte.hugging_face_files(Some(256)).tokenizer);
}
