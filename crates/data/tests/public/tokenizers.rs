//! Known ids, round trips, the tokenizer's file, and names that are no tokenizer.

use std::fs;
use std::path::Path;

use phalanx_data::{TOKENIZER_FILE, Tokenizer, TokenizerSpec};

use crate::{assert_says, corpus, folder, write};

const TEXTS: [&str; 6] = [
    "",
    "Hello world",
    "  two  spaces\n\n\ttabs\r\n",
    "naïve café, 漢字, 🙂 e\u{301}",
    "<|endoftext|>",
    "\0\u{1}",
];

/// A word-level model with gaps in its ids, and with truncation and padding, which must be ignored.
const WORD_LEVEL: &str = r#"{
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]"},
    "added_tokens": [{"id": 9, "content": "</s>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": null,
    "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1, "cat": 2, "sat": 5, "</s>": 9},
        "unk_token": "[UNK]"}
}"#;

/// A byte-level model without merges, with the Llama 3 kind of pattern, which needs look-ahead.
pub fn byte_level() -> String {
    // GPT-2's printable stand-ins for the 256 bytes, in their usual order.
    let printable = (33u8..=126).chain(161..=172).chain(174..=255);
    let mut chars: Vec<char> = printable.clone().map(char::from).collect();
    let spare = (0u32..).map(|n| char::from_u32(256 + n).expect("a character"));
    chars
        .extend((0u8..=255).filter(|byte| !printable.clone().any(|p| p == *byte)).zip(spare).map(|(_, c)| c));
    let vocab: serde_json::Map<String, serde_json::Value> =
        chars.iter().enumerate().map(|(id, c)| (c.to_string(), id.into())).collect();
    let pattern = r"\s+(?!\S)|\s+|[^\s]+";
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": []}
    })
    .to_string()
}

#[test]
fn gpt2_gives_the_published_ids() {
    let tokenizer = Tokenizer::gpt2();
    let table: [(&str, &[u32]); 6] = [
        ("\n\nHello", &[198, 198, 15496]),
        ("Hello world", &[15496, 995]),
        ("Hello, world!", &[15496, 11, 995, 0]),
        ("\n\n", &[628]),
        ("    ", &[220, 220, 220, 220]),
        ("<|endoftext|>", &[27, 91, 437, 1659, 5239, 91, 29]),
    ];
    for (text, ids) in table {
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text:?}");
    }
    assert_eq!((tokenizer.vocab_size(), tokenizer.separator()), (50257, Some(50256)));
    assert_eq!(tokenizer.decode(&[15496, 50256, 995]), "Hello<|endoftext|> world");
}

#[test]
fn every_kind_round_trips_and_survives_its_file() {
    let run = folder();
    let file = write(run.path().join("model/some.json"), byte_level());
    let byte_level = TokenizerSpec::HuggingFace(file);
    let tokenizers = [
        (Tokenizer::byte(), "byte, 256 ids"),
        (Tokenizer::char_of(&TEXTS.concat()), "char, 33 ids"),
        (Tokenizer::gpt2(), "gpt2, 50257 ids"),
        (Tokenizer::open(&byte_level, None).unwrap(), "tokenizer.json (BPE), 256 ids"),
    ];
    for (tokenizer, described) in tokenizers {
        assert_eq!(tokenizer.describe(), described);
        let at = run.path().join("run");
        tokenizer.save(&at).unwrap();
        assert_eq!(crate::names(&at), [TOKENIZER_FILE]);
        let loaded = Tokenizer::load(&at).unwrap();
        assert_eq!(loaded.describe(), described);
        assert_eq!(loaded.to_json(), tokenizer.to_json());
        for text in TEXTS {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(loaded.encode(text).unwrap(), ids, "{described}: {text:?}");
            assert_eq!(loaded.decode(&ids), text, "{described}");
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        }
    }
}

#[test]
fn the_small_kinds_number_as_documented() {
    let tokenizer = Tokenizer::char_of("banana\n漢");
    assert_eq!(tokenizer.encode("\nabn漢").unwrap(), [0, 1, 2, 3, 4]);
    assert_eq!(tokenizer.to_json(), r#"{"kind":"char","chars":"\nabn漢"}"#);
    assert_eq!(Tokenizer::byte().encode("é").unwrap(), [0xc3, 0xa9]);
    assert_eq!(Tokenizer::byte().to_json(), r#"{"kind":"byte"}"#);
    assert_eq!(Tokenizer::gpt2().to_json(), r#"{"kind":"gpt2"}"#);
}

#[test]
fn decoding_never_fails() {
    assert_eq!(Tokenizer::byte().decode(&[104, 0xc3, 105, 256, u32::MAX]), "h\u{fffd}i\u{fffd}\u{fffd}");
    assert_eq!(Tokenizer::char_of("ab").decode(&[0, 2, 1]), "a\u{fffd}b");
    assert_eq!(Tokenizer::gpt2().decode(&[15496, 50257, 995]), "Hello\u{fffd} world");
    let word_level = Tokenizer::from_json(WORD_LEVEL.as_bytes(), Path::new("here")).unwrap();
    assert_eq!(word_level.decode(&[1, 77, 2]), "the cat");
}

#[test]
fn a_hugging_face_file_is_obeyed_except_for_truncation_and_padding() {
    let run = folder();
    let file = write(run.path().join(TOKENIZER_FILE), WORD_LEVEL);
    for key in [file.to_str().unwrap(), run.path().to_str().unwrap()] {
        let tokenizer = Tokenizer::from_key(key, None).unwrap();
        assert_eq!(tokenizer.encode("the cat sat on the cat").unwrap(), [1, 2, 5, 0, 1, 2]);
        assert_eq!(tokenizer.encode("sat</s>").unwrap(), [5, 9]);
        assert_eq!((tokenizer.vocab_size(), tokenizer.separator()), (10, Some(9)));
        assert_eq!(tokenizer.to_json(), WORD_LEVEL);
    }
}

#[test]
fn a_mask_token_is_found_where_there_is_one() {
    for tokenizer in [Tokenizer::byte(), Tokenizer::gpt2(), Tokenizer::char_of("[MASK]")] {
        assert_eq!(tokenizer.mask(), None, "{tokenizer:?}");
    }
    for (token, id) in [("[MASK]", Some(9)), ("<mask>", Some(9)), ("[SEP]", None)] {
        let content = WORD_LEVEL.replace("</s>", token);
        let tokenizer = Tokenizer::from_json(content.as_bytes(), Path::new("here")).unwrap();
        assert_eq!(tokenizer.mask(), id, "{token}");
    }
}

#[test]
fn char_takes_its_vocabulary_from_all_documents() {
    let at = folder();
    let a = write(at.path().join("a.txt"), "cab");
    let b = write(at.path().join("b.txt"), "dé");
    let corpus = corpus(&[&a, &b]).unwrap();
    let tokenizer = Tokenizer::from_key("char", Some(&corpus)).unwrap();
    assert_eq!(tokenizer.encode("abcdé").unwrap(), [0, 1, 2, 3, 4]);
    assert_says(tokenizer.encode("abx"), &["'x'", "byte 2", "5 characters"]);
    assert_says(Tokenizer::from_key("char", None), &["no text was given"]);
}

#[test]
fn names_that_are_no_tokenizer() {
    let at = folder();
    let missing = at.path().join("no/tokenizer.json");
    let table: [(&str, &[&str]); 5] = [
        ("bytes", &["\"bytes\"", "\"byte\", \"char\", \"gpt2\"", "tokenizer.json", "did you mean \"byte\"?"]),
        ("gpt-2", &["did you mean \"gpt2\"?"]),
        ("cl100k", &["unknown tokenizer \"cl100k\"", "path of a tokenizer.json"]),
        ("mine.json", &["mine.json does not exist"]),
        (missing.to_str().unwrap(), &["tokenizer.json does not exist", "\"gpt2\""]),
    ];
    for (key, parts) in table {
        assert_says(TokenizerSpec::from_key(key), parts);
    }
    let folder = at.path().to_str().unwrap();
    assert_says(Tokenizer::from_key(folder, None), &["does not exist", "folder that holds it"]);
    for key in ["byte", "char", "gpt2"] {
        assert_eq!(TokenizerSpec::from_key(key).unwrap().to_string(), key);
    }
}

#[test]
fn damaged_tokenizer_files() {
    let run = folder();
    assert_says(Tokenizer::load(run.path()), &["no such file", TOKENIZER_FILE]);
    let moved = WORD_LEVEL.replace("\"id\": 9", "\"id\": 8");
    let table: [(&[u8], &str); 10] = [
        (b"", "not the JSON of a tokenizer"),
        (b"{\"kind\":\"char\",\"cha", "not the JSON of a tokenizer"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{\"kind\":\"words\"}", "kind \"words\" without chars"),
        (b"{\"kind\":\"char\"}", "kind \"char\" without chars"),
        (b"{\"kind\":\"char\",\"chars\":\"\"}", "empty"),
        (b"{\"kind\":\"char\",\"chars\":\"aba\"}", "not in order"),
        (b"{\"model\":{\"type\":\"Telepathy\"}}", "not a Hugging Face tokenizer.json"),
        (&WORD_LEVEL.as_bytes()[..300], "not the JSON of a tokenizer"),
        (moved.as_bytes(), "its added token \"</s>\" has id 8, and the tokenizers library gives it 9"),
    ];
    for (content, part) in table {
        fs::write(run.path().join(TOKENIZER_FILE), content).unwrap();
        assert_says(Tokenizer::load(run.path()), &["tokenizer.json does not hold a usable tokenizer", part]);
    }
}
