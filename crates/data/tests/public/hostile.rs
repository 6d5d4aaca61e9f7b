//! Token files, indexes, tokenizers and corpora that somebody else made: of any content, size and kind. Each is
//! read or is an error, without a panic and in bounded memory.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_data::{Corpus, CorpusSpec, TokenFile, TokenWriter, Tokenizer, TokenizerSpec};
use phalanx_testing::hostile::{Random, make_fifo, mutate, mutate_json, overwrite, peak_bytes, survive};
use serde_json::{Value, json};
use tempfile::tempdir;

/// Maximum memory for reading one of the small files here.
const MAX_BYTES: usize = 4 << 20;

/// Opens a token file and what is in it, and reads it to its end.
fn read_tokens(path: &Path) -> bool {
    let Ok(file) = TokenFile::open(path) else { return false };
    let _ = file.tokenizer();
    let _ = file.check_vocab(100);
    true
}

/// A file of each format: name, bytes, and the name to open.
fn formats() -> Vec<(&'static str, Vec<u8>)> {
    let folder = tempdir().unwrap();
    let path = folder.path().join("own.bin");
    let mut writer = TokenWriter::create(&path, 80).unwrap();
    writer.push(&[3, 1, 4, 1, 5, 9, 2, 6]).unwrap();
    writer.finish(Some(&Tokenizer::char_of("abcdefgh"))).unwrap();
    let mut llm_c: Vec<u8> = [20_240_520u32, 1, 4].iter().flat_map(|word| word.to_le_bytes()).collect();
    llm_c.resize(1024, 0);
    llm_c.extend([1, 0, 2, 0, 3, 0, 4, 0]);
    vec![("own.bin", fs::read(&path).unwrap()), ("llm_c.bin", llm_c), ("nano.bin", vec![7, 0, 8, 0, 9, 0])]
}

#[test]
fn token_files_of_any_content_are_read_or_refused() {
    let folder = tempdir().unwrap();
    for (name, original) in formats() {
        let path = folder.path().join(name);
        let read = |bytes: &[u8]| {
            overwrite(&path, bytes);
            read_tokens(&path)
        };
        assert!(read(&original), "{name}");
        survive(name, 3000, MAX_BYTES, |random| mutate(random, &original), read);
    }
}

/// Megatron's index of two sequences of three ids.
fn index() -> Vec<u8> {
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1u64.to_le_bytes());
    index.push(8);
    index.extend([2u64, 3].iter().flat_map(|count| count.to_le_bytes()));
    index.extend([3i32, 3].iter().flat_map(|length| length.to_le_bytes()));
    index.extend([0i64, 6].iter().flat_map(|offset| offset.to_le_bytes()));
    index.extend([0i64, 1, 2].iter().flat_map(|document| document.to_le_bytes()));
    index
}

#[test]
fn indexes_of_any_content_are_read_or_refused() {
    let folder = tempdir().unwrap();
    let (data, path) = (folder.path().join("text.bin"), folder.path().join("text.idx"));
    fs::write(&data, [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0]).unwrap();
    let original = index();
    let read = |bytes: &[u8]| {
        overwrite(&path, bytes);
        read_tokens(&path)
    };
    assert!(read(&original));
    survive("index", 5000, MAX_BYTES, |random| mutate(random, &original), read);
}

#[test]
fn impossible_headers_name_the_field() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("own.bin");
    let (_, original) = formats().remove(0);
    for (at, value, words) in [
        (16, 0u64, "a vocabulary of 0 ids"),
        (16, 65_537, "a vocabulary of 65537 ids; 1 to 65536 fit 2 bytes"),
        (16, u64::MAX, "a vocabulary of"),
        (24, u64::MAX, "counts 18446744073709551615 tokens"),
        (24, 1 << 63, "counts"),
        (40, u64::MAX, "a tokenizer of"),
        (48, 1, "bytes 48 to 64"),
        (56, 1, "bytes 48 to 64"),
    ] {
        let mut bytes = original.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        let error = TokenFile::open(&path).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("own.bin"), "{at} = {value}: {error}");
    }
}

/// A small Hugging Face tokenizer of each kind of model.
fn tokenizers() -> [Value; 4] {
    let vocab = json!({ "a": 0, "b": 1, "ab": 2, "[UNK]": 3, "##b": 4 });
    let models = [
        json!({ "type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "unk_token": "[UNK]" }),
        json!({ "type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]",
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 100 }),
        json!({ "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" }),
        json!({ "type": "Unigram", "vocab": [["[UNK]", 0.0], ["a", -1.0], ["b", -2.0], ["ab", -1.5]], "unk_id": 0 }),
    ];
    models.map(|model| {
        json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [{ "id": 5, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true }],
            "normalizer": { "type": "Sequence", "normalizers": [{ "type": "NFC" }, { "type": "Lowercase" },
                { "type": "Replace", "pattern": { "Regex": "b+" }, "content": "b" }] },
            "pre_tokenizer": { "type": "Split", "pattern": { "Regex": "\\s+" }, "behavior": "Isolated", "invert": false },
            "post_processor": null, "decoder": null, "model": model,
        })
    })
}

#[test]
fn tokenizers_of_any_content_are_read_or_refused() {
    for (number, original) in tokenizers().into_iter().enumerate() {
        let read = |bytes: &[u8]| {
            let Ok(tokenizer) = Tokenizer::from_json(bytes, Path::new("tokenizer.json")) else {
                return false;
            };
            let ids = tokenizer.encode("ab ba <|endoftext|> \u{e9}").unwrap_or_default();
            tokenizer.decode(&ids);
            tokenizer.decode(&[0, 1, 5, u32::MAX]);
            true
        };
        let mut original = original;
        if number == 3 {
            original["added_tokens"][0]["id"] = json!(4);
        }
        assert!(read(original.to_string().as_bytes()), "{number}");
        let structured = |random: &mut Random| {
            let mut changed = original.clone();
            mutate_json(random, &mut changed);
            changed.to_string().into_bytes()
        };
        let seed = format!("tokenizer {number}");
        let accepted = survive(&seed, 700, 16 << 20, structured, read);
        assert!(accepted < 700, "{accepted} accepted");
        let text = original.to_string();
        survive(&seed, 300, 16 << 20, |random| mutate(random, text.as_bytes()), read);
    }
}

#[test]
fn a_tokenizer_of_very_many_values_is_refused_before_it_is_parsed() {
    let [mut original, ..] = tokenizers();
    original["model"]["merges"] = json!("HERE");
    let text = original.to_string().replace("\"HERE\"", &format!("[{}[]]", "[],".repeat(4 << 20)));
    let (read, peak) = peak_bytes(|| Tokenizer::from_json(text.as_bytes(), Path::new("tokenizer.json")));
    let error = read.unwrap_err().to_string();
    assert!(error.contains("at most 6000000") && error.contains("tokenizer.json"), "{error}");
    assert!(peak < MAX_BYTES, "{peak} bytes");
    // Strings count as one, whatever is in them.
    original["added_tokens"][0]["content"] = json!(format!("\\\"{}", ",".repeat(7_000_000)));
    original["model"]["merges"] = json!([["a", "b"]]);
    Tokenizer::from_json(original.to_string().as_bytes(), Path::new("tokenizer.json")).unwrap();
}

#[test]
fn only_regular_files_of_expected_size_are_read() {
    let folder = tempdir().unwrap();
    let [fifo, zero, large] = ["fifo", "zero", "large"].map(|name| folder.path().join(name));
    make_fifo(&fifo);
    std::os::unix::fs::symlink("/dev/zero", &zero).unwrap();
    fs::File::create(&large).unwrap().set_len(1 << 40).unwrap();
    for (path, word) in [(&fifo, "a FIFO"), (&zero, "a device"), (&large, "bytes; at most 167772160")] {
        let spec = TokenizerSpec::from_key(path.to_str().unwrap()).unwrap();
        let error = Tokenizer::open(&spec, None).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains(path.to_str().unwrap()), "{error}");
    }
    for path in [&fifo, &zero] {
        let spec = CorpusSpec { paths: vec![path.clone()], ..CorpusSpec::default() };
        let error = Corpus::open(&spec).unwrap_err().to_string();
        assert!(error.contains("neither a file nor a folder"), "{error}");
        // Beside an invalid index, so that the file itself is opened.
        let index: PathBuf = path.with_extension("idx");
        make_fifo(&index);
        fs::remove_file(index).unwrap();
    }
    // A FIFO in the place of an index is not an index.
    let data = folder.path().join("text.bin");
    fs::write(&data, [1, 0, 2, 0]).unwrap();
    make_fifo(&folder.path().join("text.idx"));
    assert_eq!(TokenFile::open(&data).unwrap().len(), 2);
}

#[test]
fn folders_within_folders_end_somewhere() {
    let folder = tempdir().unwrap();
    let paths = vec![folder.path().to_path_buf()];
    let open = || Corpus::open(&CorpusSpec { paths: paths.clone(), ..CorpusSpec::default() });
    let mut deepest = folder.path().to_path_buf();
    for _ in 0..128 {
        deepest.push("a");
    }
    fs::create_dir_all(&deepest).unwrap();
    fs::write(deepest.join("text.txt"), "text").unwrap();
    // A link to a folder above leads nowhere new.
    std::os::unix::fs::symlink(folder.path(), deepest.join("loop")).unwrap();
    assert_eq!(open().unwrap().documents().len(), 1);
    fs::create_dir(deepest.join("a")).unwrap();
    let error = open().unwrap_err().to_string();
    assert!(error.contains("nested more than 128 deep"), "{error}");
}

#[test]
fn what_a_tokenizer_makes_of_a_text_is_bounded() {
    let [original, ..] = tokenizers();
    let made = |content: usize| {
        let mut file = original.clone();
        file["normalizer"] =
            json!({"type": "Replace", "pattern": {"String": "e"}, "content": "ab".repeat(content / 2)});
        file["pre_tokenizer"] = Value::Null;
        Tokenizer::from_json(file.to_string().as_bytes(), Path::new("tokenizer.json"))
    };
    // As much as is allowed, on a text of the size of a window.
    let (tokenizer, text) = (made(40).unwrap(), "e".repeat(1 << 16));
    let (ids, peak) = peak_bytes(|| tokenizer.encode(&text).unwrap().len());
    assert!(ids == 20 << 16 && peak < 400 << 20, "{ids} ids, {peak} bytes");
    assert!(made(42).unwrap_err().to_string().contains("42 bytes of one byte"));
}
