//! `.jsonl` files: which lines become documents, and what is said of the others.

use phalanx_data::{Corpus, CorpusSpec, SkipReason, Tokenizer, Tokens, tokenize_to_memory};

use crate::{assert_says, corpus, folder, write};

const LINES: &str = concat!(
    "{\"text\": \"one\"}\n",
    "not JSON\n",
    "\n",
    "{\"id\": 1, \"text\": \"two\\nlines\"}\r\n",
    "[\"text\"]\n",
    "{\"content\": \"other\"}\n",
    "{\"text\": 7}\n",
    "{\"text\": \"\"}\n",
    "{\"text\": \"é\"}",
);

fn all(tokens: &Tokens) -> Vec<u32> {
    let mut ids = vec![0; tokens.len()];
    tokens.read(0, &mut ids).unwrap();
    ids
}

#[test]
fn each_line_with_a_text_is_a_document_and_the_others_are_counted() {
    let at = folder();
    let path = write(at.path().join("a.JSONL"), LINES);
    let found = corpus(&[&path]).unwrap();
    assert_eq!((found.documents().len(), found.bytes()), (1, 3 + 9 + 2));
    let [(skipped_in, lines)] = found.skipped_lines() else { panic!("{:?}", found.skipped_lines()) };
    assert_eq!(skipped_in, &path);
    assert_eq!((lines.lines, lines.skipped(), lines.first_skipped), (8, 5, Some(2)));
    assert_eq!(
        lines.to_string(),
        "skipped 5 of 8 lines: 1 not valid JSON, 1 not an object, 1 without the key \"text\", 1 with a \"text\" that \
         is not a string, 1 with an empty \"text\" (the first is line 2)"
    );
    for threads in [1, 3] {
        let gpt2 = Tokenizer::gpt2();
        let tokens = tokenize_to_memory(&found, &gpt2, threads, &mut |_| {}).unwrap();
        let mut expected = Vec::new();
        for (i, text) in ["one", "two\nlines", "é"].into_iter().enumerate() {
            expected.extend((i > 0).then(|| gpt2.separator().unwrap()));
            expected.extend(gpt2.encode(text).unwrap());
        }
        assert_eq!(all(&tokens), expected);
    }
    // The vocabulary of `char` has the characters of the texts alone.
    let char = Tokenizer::from_key("char", Some(&found)).unwrap();
    assert_eq!(char.vocab_size(), "\nnoetwlisé".chars().count());
}

#[test]
fn another_key_may_hold_the_text() {
    let at = folder();
    let path = write(at.path().join("a.jsonl"), LINES);
    let spec = |key: &str| CorpusSpec {
        paths: vec![path.clone()],
        text_key: Some(key.to_string()),
        ..CorpusSpec::default()
    };
    let found = Corpus::open(&spec("content")).unwrap();
    assert_eq!((found.bytes(), found.skipped_lines()[0].1.without_key), (5, 5));
    assert_says(Corpus::open(&spec("body")), &["a.jsonl", "no text", "8 of 8 lines", "\"body\"", "text_key"]);
}

#[test]
fn a_file_without_a_text_is_an_error_or_skipped() {
    let at = folder();
    let bad = write(at.path().join("in/bad.jsonl"), "{\"a\": 1}\n2\n");
    assert_says(corpus(&[&bad]), &["bad.jsonl", "skipped 2 of 2 lines", "1 not an object", "line 1"]);
    assert_says(corpus(&[&at.path().join("in")]), &["no text found", "1 .jsonl files", "\"text\""]);
    write(at.path().join("in/good.jsonl"), "{\"text\": \"a\\u0000\"}\n");
    let found = corpus(&[&at.path().join("in")]).unwrap();
    assert_eq!((found.documents().len(), found.bytes()), (1, 2));
    assert_eq!(found.skipped()[0].reason, SkipReason::NoLines);
    let blank = write(at.path().join("blank.jsonl"), "\n \n");
    assert_says(corpus(&[&blank]), &["no text found", "1 empty files"]);
    let latin1 = write(at.path().join("latin1.jsonl"), b"{\"text\": \"a\"}\n{\"text\": \"caf\xe9\"}\n");
    assert_says(corpus(&[&latin1]), &["latin1.jsonl", "byte 27"]);
}

#[test]
fn text_from_many_lines_is_that_of_as_many_files() {
    let at = folder();
    let (mut lines, mut paths) = (String::new(), Vec::new());
    for i in 0..200u32 {
        let text = format!("document {i} ").repeat(i as usize % 7 + 1);
        lines += &format!("{{\"n\": {i}, \"text\": {text:?}}}\n");
        paths.push(write(at.path().join(format!("{i:03}.txt")), &text));
    }
    let jsonl = write(at.path().join("all.jsonl"), lines);
    let paths: Vec<_> = paths.iter().map(|path| path.as_path()).collect();
    let gpt2 = Tokenizer::gpt2();
    let ids = |found: &Corpus| all(&tokenize_to_memory(found, &gpt2, 2, &mut |_| {}).unwrap());
    assert_eq!(ids(&corpus(&[&jsonl]).unwrap()), ids(&corpus(&paths).unwrap()));
}
