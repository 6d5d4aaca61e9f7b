//! Documents that are encoded in windows: their ids are those of the whole text, whatever the tokenizer looks at.

use std::path::Path;

use phalanx_data::{Tokenizer, tokenize_to_memory};
use phalanx_testing::sweeps;
use serde_json::{Value, json};

use crate::{assert_says, corpus, folder, write};

const LETTERS: &str = "abcdefghijklmnopqrstuvwxyz0123456789 .,\n▁Ġ";

/// Merges, the earlier first: words, numbers, and runs whose tokens depend on where they begin.
const MERGES: [(&str, &str); 14] = [
    ("t", "h"),
    ("th", "e"),
    ("▁", "the"),
    ("Ġ", "the"),
    ("a", "a"),
    ("aa", "a"),
    ("aaa", "aa"),
    ("1", "2"),
    ("12", "1"),
    ("o", "r"),
    ("or", "▁"),
    ("w", "or"),
    ("wor", "d"),
    ("▁", "▁"),
];

fn file(normalizer: Value, pre_tokenizer: Value, model: Value) -> Tokenizer {
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 0, "content": "<end>", "single_word": false, "lstrip": true, "rstrip": true,
            "normalized": false, "special": true}],
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null, "model": model,
    });
    Tokenizer::from_json(json.to_string().as_bytes(), Path::new("tokenizer.json")).unwrap()
}

fn byte_pairs() -> Value {
    let tokens = ["<end>".to_string(), "?".to_string()].into_iter();
    let tokens =
        tokens.chain(LETTERS.chars().map(String::from)).chain(MERGES.iter().map(|(a, b)| format!("{a}{b}")));
    let vocab: serde_json::Map<String, Value> =
        tokens.zip(0u32..).map(|(token, id)| (token, id.into())).collect();
    json!({"type": "BPE", "vocab": vocab, "merges": MERGES.map(|(a, b)| [a, b]), "unk_token": "?"})
}

fn pieces(continued: &str) -> Value {
    let words = ["<end>", "[UNK]", "the", "word", "a", "12", "121", ".", "wor"].map(String::from);
    let letters = LETTERS.chars().filter(|c| c.is_alphanumeric());
    let continued = letters.clone().map(|c| format!("{continued}{c}"));
    let vocab = words.into_iter().chain(letters.map(String::from)).chain(continued);
    let vocab: serde_json::Map<String, Value> =
        vocab.zip(0u32..).map(|(token, id)| (token, id.into())).collect();
    json!({"type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100})
}

fn unigram() -> Value {
    let words = ["<end>", "<unk>", "▁the", "▁word", "the", "aa", "aaa", "12", "21"].map(String::from);
    let vocab: Vec<Value> = words
        .into_iter()
        .chain(LETTERS.chars().map(String::from))
        .enumerate()
        .map(|(n, token)| json!([token, -1.0 - n as f64 / 7.0]))
        .collect();
    json!({"type": "Unigram", "vocab": vocab, "unk_id": 1})
}

/// Words, numbers, characters of several bytes, special tokens, and runs; longer than several windows.
fn text(run: usize) -> String {
    let mut text = String::new();
    for n in 0..9000u32 {
        text += ["the word ", "aaaa aaa", "  the\n", "1212121 ", "漢字é ", "x.y, ", "theword"]
            [(n * n % 97 % 7) as usize];
        if n % 1500 == 700 {
            text += " <end> ";
            text += &"a".repeat(run + n as usize % 5);
            text += &" ".repeat(n as usize % 300);
        }
    }
    text
}

#[test]
fn a_document_in_windows_has_the_ids_of_the_whole() {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prefixed = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]});
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false});
    let digits = split(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+");
    let spaced = json!({"type": "Sequence", "pretokenizers": [digits, bytes]});
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": true,
        "lowercase": true});
    let tokenizers = [
        ("one pre-token, as Llama 2 has", file(prefixed, json!(null), byte_pairs())),
        ("byte level, as GPT-2 has", file(json!(null), spaced, byte_pairs())),
        ("WordPiece", file(bert, json!({"type": "BertPreTokenizer"}), pieces("##"))),
        ("Unigram", file(json!({"type": "NFKC"}), metaspace, unigram())),
    ];
    let at = folder();
    for (first, run) in [3, 30_000].into_iter().enumerate() {
        let text = text(run);
        assert!(text.len() > 60_000);
        let long = write(at.path().join("long.txt"), text.repeat(3));
        let short = write(at.path().join("short.txt"), "the end");
        let found = corpus(&[&long, &short, &long]).unwrap();
        for (number, (name, tokenizer)) in tokenizers.iter().enumerate() {
            let whole = tokenizer.encode(&text.repeat(3)).unwrap();
            let expected = [whole.clone(), tokenizer.encode("the end").unwrap(), whole].concat();
            for threads in sweeps::share(&[1, 3], first + number, 2) {
                let tokens = tokenize_to_memory(&found, tokenizer, *threads, &mut |_| {}).unwrap();
                let mut ids = vec![0; tokens.len()];
                tokens.read(0, &mut ids).unwrap();
                let differs = ids.iter().zip(&expected).position(|(a, b)| a != b);
                assert!(
                    ids == expected,
                    "{name}, runs of {run}: {} and {} ids, first other {differs:?}",
                    ids.len(),
                    expected.len()
                );
            }
        }
    }
}

#[test]
fn a_text_that_cannot_be_cut_is_refused_by_name() {
    // Which token is the best depends on all the others.
    let tokenizer = file(json!(null), json!(null), unigram());
    let at = folder();
    let short = write(at.path().join("short.txt"), "the word ".repeat(3000));
    let tokens = tokenize_to_memory(&corpus(&[&short]).unwrap(), &tokenizer, 2, &mut |_| {}).unwrap();
    assert_eq!(tokens.len(), tokenizer.encode(&"the word ".repeat(3000)).unwrap().len());
    let long = write(at.path().join("long.txt"), "the word ".repeat(120_000));
    let failed = tokenize_to_memory(&corpus(&[&long]).unwrap(), &tokenizer, 2, &mut |_| {});
    assert_says(failed, &["long.txt", "cannot be cut", "1048576 bytes", "split the document"]);
}
