//! Folders with tokenizer files: ids as transformers gives them, roles of special tokens as the files say, what is refused,
//! and what is told.

use std::path::Path;

use phalanx_data::{Tokenizer, tokenize_to_file, tokenize_to_memory};
use serde_json::{Value, json};

use crate::{assert_says, corpus, folder, write};

/// Names and contents of the files of a folder.
type Files = Vec<(&'static str, String)>;

/// A word-level tokenizer.json with these added special tokens, from id 3 on.
fn words(added: &[&str]) -> String {
    let token = |(content, id): (&&str, u32)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
               "special": true})
    };
    let added: Vec<Value> = added.iter().zip(3..).map(token).collect();
    json!({
        "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1, "cat": 2}, "unk_token": "[UNK]"}
    })
    .to_string()
}

fn open(files: &[(&str, String)]) -> Result<Tokenizer, phalanx_data::DataError> {
    let at = folder();
    files.iter().for_each(|(name, content)| drop(write(at.path().join(name), content)));
    Tokenizer::from_key(at.path().to_str().unwrap(), None)
}

/// The goldens are those of `tools/golden_tokenizer_files.py`, by transformers.
#[test]
fn vocabulary_files_give_the_ids_of_transformers_and_are_written_back_as_they_were() {
    let goldens: Vec<Value> = serde_json::from_str(include_str!("../golden/tokenizer_files.json")).unwrap();
    assert_eq!(goldens.len(), 7);
    for golden in &goldens {
        let (name, files) = (&golden["name"], golden["files"].as_object().unwrap());
        let text = |content: &Value| content.as_str().unwrap().to_string();
        let files: Vec<_> = files.iter().map(|(name, content)| (name.as_str(), text(content))).collect();
        let opened = open(&files).unwrap_or_else(|error| panic!("{name}: {error}"));
        // As a run keeps it.
        let kept = Tokenizer::from_json(opened.to_json().as_bytes(), Path::new("kept")).unwrap();
        for tokenizer in [&opened, &kept] {
            let texts = golden["texts"].as_array().unwrap();
            for text in texts {
                let ids: Vec<u32> = serde_json::from_value(text["ids"].clone()).unwrap();
                let given = text["text"].as_str().unwrap();
                assert_eq!(tokenizer.encode(given).unwrap(), ids, "{name}: {given:?}");
            }
            let [begin, end] = ["begin", "end"]
                .map(|key| -> Vec<u32> { serde_json::from_value(golden[key].clone()).unwrap() });
            assert_eq!(tokenizer.framing(), [&begin[..], &end[..]], "{name}");
            let roles = &golden["roles"];
            let separator = [&roles["eos_token"], &roles["sep_token"]].into_iter().find(|id| !id.is_null());
            assert_eq!(json!(tokenizer.separator()), *separator.unwrap(), "{name}");
            assert_eq!(json!(tokenizer.mask()), roles["mask_token"], "{name}");
            let written = tokenizer.hugging_face_files(None).complete(64, true);
            files.iter().for_each(|(file, content)| assert_eq!(written[*file], *content, "{name}: {file}"));
            // The tokenizer.json beside them has the same ids.
            let made = Tokenizer::from_json(written["tokenizer.json"].as_bytes(), Path::new("made")).unwrap();
            assert_eq!(made.encode("a rank").unwrap().len(), tokenizer.encode("a rank").unwrap().len());
        }
        assert_eq!(opened.digest(), kept.digest(), "{name}");
    }
}

#[test]
fn roles_of_special_tokens_come_from_the_files() {
    let both = words(&["<|endoftext|>", "</s>", "[EOS]", "[MASK]"]);
    let config = |value: Value| ("tokenizer_config.json", value.to_string());
    let map = |value: Value| ("special_tokens_map.json", value.to_string());
    let model = |value: Value| ("config.json", value.to_string());
    let generation = |value: Value| ("generation_config.json", value.to_string());
    let object =
        json!({"content": "</s>", "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    // What stands beside tokenizer.json, the separator, and what is told.
    let table: [(Files, Option<u32>, &[&str]); 13] = [
        (vec![config(json!({"eos_token": "</s>"}))], Some(4), &[]),
        (vec![config(json!({"eos_token": object}))], Some(4), &[]),
        (vec![map(json!({"eos_token": "[EOS]"}))], Some(5), &[]),
        (
            vec![config(json!({"eos_token": "</s>"})), map(json!({"eos_token": "[EOS]"}))],
            Some(5),
            &["eos_token is \"[EOS]\" in special_tokens_map.json and \"</s>\" in tokenizer_config.json"],
        ),
        (vec![config(json!({"eos_token": null, "bos_token": "</s>"}))], None, &[]),
        (vec![config(json!({"pad_token": "</s>"})), model(json!({"eos_token_id": 5}))], Some(5), &[]),
        (
            vec![generation(json!({"eos_token_id": [4, 5]}))],
            Some(4),
            &["guessed by their spelling: bos_token \"<|endoftext|>\", mask_token \"[MASK]\""],
        ),
        (
            vec![config(json!({"eos_token": "</s>"})), generation(json!({"eos_token_id": [4, 5]}))],
            Some(4),
            &[],
        ),
        (
            vec![config(json!({"eos_token": "</s>"})), model(json!({"eos_token_id": 50256}))],
            Some(4),
            &["eos_token_id is 50256 in config.json and 4 (\"</s>\") by tokenizer_config.json"],
        ),
        (
            vec![config(json!({"pad_token": "</s>"})), model(json!({"eos_token_id": 2}))],
            None,
            &["eos_token_id = 2 of config.json is not used: it is the ordinary token \"cat\""],
        ),
        (
            vec![config(json!({"eos_token": "<new>"}))],
            Some(7),
            &["\"<new>\" of tokenizer_config.json is added to the vocabulary with the id 7"],
        ),
        (vec![model(json!({"model_type": "bert"}))], None, &[]),
        (
            vec![],
            Some(3),
            &["guessed by their spelling", "eos_token \"<|endoftext|>\"", "mask_token \"[MASK]\""],
        ),
    ];
    for (beside, separator, told) in table {
        let files = [&[("tokenizer.json", both.clone())], &beside[..]].concat();
        let tokenizer = open(&files).unwrap();
        assert_eq!(tokenizer.separator(), separator, "{beside:?}");
        let notes = tokenizer.notes().join("\n");
        told.iter().for_each(|part| assert!(notes.contains(part), "{part} is missing in: {notes}"));
        assert_eq!(told.is_empty(), notes.is_empty(), "{beside:?}: {notes}");
        let written = tokenizer.hugging_face_files(None).complete(64, true);
        for (file, content) in files.iter().filter(|(file, _)| *file != "config.json") {
            assert_eq!(written[*file], *content);
        }
    }
    // Lists of ids that end a generation stay lists.
    let files = [("tokenizer.json", both), model(json!({"eos_token_id": [5, 4], "pad_token_id": null}))];
    let ids = open(&files).unwrap().hugging_face_files(None).model_ids();
    assert_eq!((&ids["eos_token_id"], &ids["pad_token_id"]), (&json!([5, 4]), &json!(null)));
    let unknown = open(&[("tokenizer.json", words(&["<stop>"]))]).unwrap();
    assert!(unknown.describe_boundaries().contains("no token is known that ends a text"), "{unknown:?}");
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let config = |value: Value| ("tokenizer_config.json", value.to_string());
    let tokenizer = || ("tokenizer.json", words(&["</s>"]));
    let vocab = || ("vocab.json", json!({"a": 0, "b": 1}).to_string());
    let merges = |text: &str| ("merges.txt", text.to_string());
    let pieces = || ("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n".to_string());
    let spm = |name| (name, "\0".to_string());
    let table: [(Files, &[&str]); 18] = [
        (vec![spm("tokenizer.model")], &["tokenizer.model", "SentencePiece", "save_pretrained"]),
        (vec![spm("spiece.model"), config(json!({}))], &["spiece.model", "SentencePiece"]),
        (vec![spm("tekken.json")], &["tekken.json", "save_pretrained"]),
        (vec![config(json!({"eos_token": "</s>"}))], &["does not exist", "vocab.txt"]),
        (vec![vocab()], &["vocab.json without merges.txt"]),
        (vec![merges("a b\n")], &["merges.txt without vocab.json"]),
        (vec![vocab(), merges("#version: 0.2\na b c\n")], &["line 2 of merges.txt", "a b c"]),
        (vec![("vocab.json", "[]".into()), merges("")], &["vocab.json is not an object"]),
        (vec![("vocab.json", json!({"a</w>": 0}).to_string()), merges("")], &["</w>"]),
        (
            vec![vocab(), merges(""), config(json!({"tokenizer_class": "Qwen2Tokenizer"}))],
            &["Qwen2Tokenizer"],
        ),
        (vec![pieces(), config(json!({"tokenizer_class": "BertweetTokenizer"}))], &["BertweetTokenizer"]),
        (vec![("vocab.txt", "a\nb\n".into())], &["vocab.txt has no \"[UNK]\""]),
        (vec![pieces(), config(json!({"do_basic_tokenize": false}))], &["do_basic_tokenize = false"]),
        (vec![tokenizer(), config(json!({"add_bos_token": true}))], &["add_bos_token = true", "bos_token"]),
        (vec![tokenizer(), config(json!({"add_prefix_space": true}))], &["add_prefix_space = true"]),
        (
            vec![tokenizer(), ("tokenizer_config.json", "{".into())],
            &["tokenizer_config.json is not valid JSON"],
        ),
        (vec![tokenizer(), ("added_tokens.json", json!({"</s>": 9}).to_string())], &["</s>", "the id 9"]),
        (
            vec![tokenizer(), config(json!({"added_tokens_decoder": {"9": {"content": "x"}}}))],
            &["tokenizer_config.json gives \"x\" the id 9", "it has 4"],
        ),
    ];
    for (files, parts) in table {
        assert_says(open(&files), parts);
    }
    let large = [("tokenizer_config.json", " ".repeat((16 << 20) + 1)), tokenizer()];
    assert_says(open(&large), &["tokenizer_config.json", "at most 16777216"]);
    let random = words(&[]).replace("\"WordLevel\"", "\"BPE\",\"dropout\":0.1,\"merges\":[]");
    assert_says(open(&[("tokenizer.json", random)]), &["dropout"]);
}

/// A `tokenizer.json` counts; other files that say something else are named.
#[test]
#[allow(clippy::too_many_lines, reason = "a list of cases")]
fn what_disagrees_beside_a_tokenizer_json_is_said() {
    // A model of SentencePiece: pieces with a spelling, a score, and a type.
    let pieces = |tokens: &[&str]| -> String {
        let piece = |token: &&str| {
            let fields = [&[10, token.len() as u8], token.as_bytes(), &[21, 0, 0, 0, 0, 24, 1]].concat();
            [&[10, fields.len() as u8], &fields[..]].concat()
        };
        let trainer = [18, 2, 8, 1];
        String::from_utf8(tokens.iter().flat_map(piece).chain(trainer).collect()).unwrap()
    };
    let config = |value: Value| ("tokenizer_config.json", value.to_string());
    let vocab = |value: Value| ("vocab.json", value.to_string());
    let model = |tokens: &[&str]| ("tokenizer.model", pieces(tokens));
    let pairs = json!({
        "added_tokens": [], "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "ba": 3}, "merges": [["a", "b"], ["b", "a"]]}
    })
    .to_string();
    let same = json!({"[UNK]": 0, "the": 1, "cat": 2});
    let merges = |text: &str| ("merges.txt", text.to_string());
    // The tokenizer.json, what stands beside it, and what is told.
    let words = words(&["</s>"]);
    let table: [(&String, Files, &[&str]); 13] = [
        (&words, vec![vocab(same), model(&["[UNK]", "the", "cat"])], &[]),
        (&words, vec![("vocab.txt", "[UNK]\nthe\ncat\n</s>\n".into())], &[]),
        (
            &words,
            vec![vocab(json!({"the": 1, "cat": 7, "dog": 8}))],
            &[
                "vocab.json disagrees with tokenizer.json about 2 of its 3 tokens, first about \"cat\" (id 7, and 2 there)",
                "tokenizer.json counts",
            ],
        ),
        (&words, vec![vocab(json!(["the"]))], &["vocab.json is not an object of tokens and ids"]),
        (
            &words,
            vec![("vocab.txt", "the\n".into())],
            &["vocab.txt disagrees", "\"the\" (id 0, and 1 there)"],
        ),
        (
            &words,
            vec![model(&["[UNK]", "dog"])],
            &["tokenizer.model disagrees", "\"dog\" (id 1, and none there)"],
        ),
        (&words, vec![("spiece.model", "no".into())], &["spiece.model cannot be compared", "SentencePiece"]),
        (&words, vec![("tekken.json", "{}".into())], &["tekken.json (Mistral's) is not compared"]),
        (&pairs, vec![merges("#version: 0.2\na b\nb a\n")], &[]),
        (
            &pairs,
            vec![merges("b a\na b\n")],
            &["merges.txt disagrees", "from merge 0 on (\"b a\", and \"a b\" there)"],
        ),
        (&pairs, vec![merges("a b\n")], &["from merge 1 on (none, and \"b a\" there)"]),
        (
            &words,
            vec![config(
                json!({"eos_token": "</s>", "model_max_length": 64, "legacy": false, "src_lang": null}),
            )],
            &[],
        ),
        (
            &words,
            vec![config(json!({"eos_token": "</s>", "keep_accents": true, "image_token": "<image>"}))],
            &[
                "tokenizer_config.json has keys that are not known here",
                "image_token = \"<image>\", keep_accents = true",
            ],
        ),
    ];
    for (tokenizer, beside, told) in table {
        let files = [&[("tokenizer.json", tokenizer.clone())], &beside[..]].concat();
        let opened = open(&files).unwrap();
        let notes = opened
            .notes()
            .iter()
            .filter(|note| !note.contains("guessed"))
            .cloned()
            .collect::<Vec<_>>()
            .join("\n");
        told.iter().for_each(|part| assert!(notes.contains(part), "{part} is missing in: {notes}"));
        assert_eq!(told.is_empty(), notes.is_empty(), "{beside:?}: {notes}");
        assert_eq!(opened.encode("the").is_ok(), tokenizer == &words);
    }
}

/// The library drops what a vocabulary without a token for unknown text lacks.
#[test]
fn text_that_would_be_lost_is_refused() {
    let pairs = |vocab: Value, merges: &str| {
        open(&[("vocab.json", vocab.to_string()), ("merges.txt", merges.to_string())]).unwrap()
    };
    let tokenizer = pairs(json!({"a": 0, "b": 1, "ab": 2}), "a b\n");
    assert_eq!(tokenizer.encode("abba").unwrap(), [2, 1, 0]);
    assert_says(tokenizer.encode("abc"), &["0x63", "drop it in silence"]);
    assert!(tokenizer.notes()[0].contains("as GPT-2's"), "{:?}", tokenizer.notes());
}

#[test]
fn documents_of_bytes_and_characters_have_a_boundary() {
    let at = folder();
    let [a, b] = ["a.txt", "b.txt"].map(|name| at.path().join(name));
    write(a.clone(), "ab");
    write(b.clone(), "ba<|endoftext|>");
    let (one, two) = (corpus(&[&a]).unwrap(), corpus(&[&a, &b]).unwrap());
    for (key, alone, end) in [("byte", 256, 255), ("char", 2, 12)] {
        let single = Tokenizer::from_key(key, Some(&one)).unwrap();
        assert_eq!((single.vocab_size(), single.separator()), (alone, None), "{key}");
        let tokenizer = Tokenizer::from_key(key, Some(&two)).unwrap();
        assert_eq!(tokenizer.separator(), Some(end), "{key}");
        let tokens = tokenize_to_memory(&two, &tokenizer, 2, &mut |_| {}).unwrap();
        let mut ids = vec![0; tokens.len()];
        tokens.read(0, &mut ids).unwrap();
        assert_eq!((tokens.len(), ids[2]), (2 + 1 + 15, end), "{key}");
        assert_eq!(tokenizer.decode(&ids), "ab<|endoftext|>ba<|endoftext|>", "{key}");
        // A run keeps it, and its ids mean the same as without it.
        let kept = Tokenizer::from_json(tokenizer.to_json().as_bytes(), Path::new("kept")).unwrap();
        assert_eq!((kept.separator(), kept.vocab_size()), (Some(end), tokenizer.vocab_size()));
        let exported = tokenizer.hugging_face_files(None);
        assert_eq!(exported.id("eos_token"), Some(end), "{key}");
        let theirs = Tokenizer::from_json(exported.tokenizer().as_bytes(), Path::new("theirs")).unwrap();
        assert_eq!(theirs.encode("ab").unwrap(), tokenizer.encode("ab").unwrap());
        assert!(tokenizer.agrees_with(&theirs), "{key}");
    }
    assert!(!Tokenizer::byte().agrees_with(&Tokenizer::char_of("ab")));
    assert!(
        Tokenizer::gpt2().agrees_with(
            &Tokenizer::from_json(
                Tokenizer::gpt2().hugging_face_files(None).tokenizer().as_bytes(),
                Path::new("exported")
            )
            .unwrap()
        )
    );
}

#[test]
fn special_tokens_that_a_text_spells_are_counted() {
    let at = folder();
    let text = write(at.path().join("a.txt"), "the <|endoftext|> cat [MASK]<|endoftext|> dog");
    let found = corpus(&[&text]).unwrap();
    let file = open(&[("tokenizer.json", words(&["<|endoftext|>", "[MASK]"]))]).unwrap();
    let plain = [
        ("tokenizer.json", words(&["<|endoftext|>", "[MASK]"])),
        ("tokenizer_config.json", json!({"split_special_tokens": true}).to_string()),
    ];
    let table = [
        (Tokenizer::byte(), "read as plain text, where transformers"),
        (Tokenizer::gpt2(), "read as plain text, where transformers"),
        (file, "read as these tokens, as transformers does"),
        (open(&plain).unwrap(), "read as plain text (split_special_tokens)"),
    ];
    for (tokenizer, how) in table {
        let written = tokenize_to_file(&found, &tokenizer, &at.path().join("t.bin"), 1, &mut |_| {}).unwrap();
        assert_eq!((written.spelled.count("<|endoftext|>"), written.spelled.count("[MASK]")), (2, 1));
        let told = tokenizer.describe_spelled(&written.spelled).join("\n");
        assert!(told.contains(how) && told.contains("\"<|endoftext|>\" 2 times"), "{tokenizer:?}: {told}");
        assert_eq!(told.contains("unknown text"), how.contains("these") || how.contains("split"), "{told}");
    }
}

/// Blocks never end inside of a spelling.
#[test]
fn a_spelling_across_blocks_is_counted() {
    let at = folder();
    for before in (1 << 20) - 14..(1 << 20) + 1 {
        let text = write(at.path().join("a.txt"), "x".repeat(before) + "<|endoftext|>" + &"y".repeat(20));
        let found = corpus(&[&text]).unwrap();
        let written =
            tokenize_to_file(&found, &Tokenizer::byte(), &at.path().join("t.bin"), 2, &mut |_| {}).unwrap();
        assert_eq!((written.spelled.count("<|endoftext|>"), written.tokens), (1, before as u64 + 33));
    }
}

/// A `tokenizer.json` reads long texts in windows that overlap.
#[test]
fn a_spelling_in_two_windows_is_counted_once() {
    let at = folder();
    let tokenizer = words(&["<|endoftext|>"]);
    let split = ("tokenizer_config.json", json!({"split_special_tokens": true}).to_string());
    for files in [vec![("tokenizer.json", tokenizer.clone())], vec![("tokenizer.json", tokenizer), split]] {
        let tokenizer = open(&files).unwrap();
        for before in (0..10_000).step_by(997).chain((0..20).map(|shift| 8192 - shift)) {
            let content = "the cat ".repeat(1 << 13)[before..].to_string()
                + "<|endoftext|> "
                + &"the cat ".repeat(1 << 13);
            let found = corpus(&[&write(at.path().join("a.txt"), content)]).unwrap();
            let written =
                tokenize_to_file(&found, &tokenizer, &at.path().join("t.bin"), 2, &mut |_| {}).unwrap();
            assert_eq!(written.spelled.count("<|endoftext|>"), 1, "{before} {tokenizer:?}");
        }
    }
}
