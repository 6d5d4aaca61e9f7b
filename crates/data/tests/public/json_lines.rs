//! JSON files: which lines and records become documents, and what is said of the others.

use phalanx_data::{Corpus, CorpusSpec, Tokenizer, Tokens, tokenize_to_memory};

use crate::{assert_says, corpus, folder, tolerant, write};

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

/// The texts of a corpus, each as one string.
fn texts(found: &Corpus) -> String {
    let tokens = tokenize_to_memory(found, &Tokenizer::gpt2(), 2, &mut |_| {}).unwrap();
    Tokenizer::gpt2().decode(&all(&tokens)).replace("<|endoftext|>", "|")
}

#[test]
fn each_line_with_a_text_is_a_document_and_the_others_are_counted() {
    let at = folder();
    let path = write(at.path().join("a.JSONL"), LINES);
    assert_says(
        corpus(&[&path]),
        &[
            "4 of 8 lines (50 %)",
            "at most 1 %",
            "data.max_skipped = 0.5",
            "1 x not an object: ",
            "a.JSONL line 5",
        ],
    );
    let found = tolerant(&[&path]).unwrap();
    let findings = found.findings();
    assert_eq!((found.documents().len(), found.bytes(), findings.documents), (1, 3 + 9 + 2, 3));
    let shown = path.display();
    let expected = format!(
        "data: skipped 4 of 8 lines: 1 x not valid JSON: {shown} line 2; 1 x not an object: {shown} line 5; 1 x without the \
         key \"text\": {shown} line 6; 1 x with another value than a string under the key: {shown} line 7\n\
         data: 1 x empty text, which makes no document: {shown} line 8"
    );
    assert_eq!(findings.notes().join("\n"), expected);
    assert_eq!(texts(&found), "one|two\nlines|é");
    // The vocabulary of `char` has the characters of the texts alone, and what separates documents.
    let char = Tokenizer::from_key("char", Some(&found)).unwrap();
    assert_eq!(char.vocab_size(), "\nnoetwlisé".chars().count() + 1);
}

#[test]
fn records_are_found_however_they_are_written() {
    let at = folder();
    let table: [(&str, &str, &str); 16] = [
        ("alpaca.json", "[{\"text\": \"a\"},\n {\"text\": \"b\"}]", "a|b"),
        ("one line.json", "[{\"text\": \"a\"}, {\"text\": \"b\"}]", "a|b"),
        ("array.jsonl", "[\n{\"text\": \"a\"},\n{\"text\": \"b\"}\n]\n", "a|b"),
        ("strings.json", "[\"a\", \"b\"]", "a|b"),
        ("data.json", "{\"version\": 1, \"data\": [{\"text\": \"a\"}, {\"text\": \"b\"}]}", "a|b"),
        ("data strings.json", "{\"data\": [\"a\", \"b\"]}", "a|b"),
        ("other member.json", "{\"meta\": [1], \"train\": [{\"text\": \"a\"}, {\"text\": \"b\"}]}", "a|b"),
        ("columns.json", "{\"id\": [1, 2], \"text\": [\"a\", \"b\"]}", "a|b"),
        ("lines.json", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n", "a|b"),
        ("lines.txt", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n", "a|b"),
        ("lines", "\u{feff}{\"text\": \"a\"}\r\n{\"text\": \"b\"}\r\n", "a|b"),
        ("pretty.json", "{\n  \"text\": \"a\"\n}\n{\n  \"text\": \"b\"\n}\n", "a|b"),
        ("single.json", "{\n  \"text\": \"a\"\n}\n", "a"),
        (
            "python.jsonl",
            "{\"text\": \"\\ud83d\", \"loss\": NaN}\n{\"text\": \"b\", \"n\": -Infinity, \"text\": \"c\"}",
            "\u{fffd}|c",
        ),
        ("prose.txt", "[1] A note, {\"not\": \"JSON\"}\n", "[1] A note, {\"not\": \"JSON\"}\n"),
        ("toml.txt", "[section]\na = 1\n[other]\nb = 2\n", "[section]\na = 1\n[other]\nb = 2\n"),
    ];
    for (name, content, expected) in table {
        let path = write(at.path().join(name), content);
        assert_eq!(texts(&corpus(&[&path]).unwrap()), expected, "{name}");
    }
    let notes = |name: &str| corpus(&[&at.path().join(name)]).unwrap().findings().notes().join("\n");
    assert!(notes("lines.txt").contains("JSON by its content, so each record is a document"));
    assert!(notes("python.jsonl").contains("1 x half of a surrogate pair, read as U+FFFD"));
    assert!(notes("python.jsonl").contains("1 x record with the key of the text twice"));
    assert_eq!(notes("alpaca.json"), "");
}

#[test]
fn json_without_texts_is_refused_with_what_it_has() {
    let at = folder();
    let table: [(&str, &str, &[&str]); 8] = [
        (
            "alpaca.json",
            "[{\"instruction\": \"a\", \"output\": \"b\"}]",
            &["\"instruction\", \"output\"", "text_key"],
        ),
        (
            "config.json",
            "{\"name\": \"x\", \"files\": [\"a\"]}",
            &["one object with the keys \"name\", \"files\""],
        ),
        (
            "splits.json",
            "{\"train\": [{\"text\": \"a\"}], \"test\": [{\"text\": \"a\"}]}",
            &["\"train\", \"test\"", "which is meant"],
        ),
        ("columns.json", "{\"text\": {\"0\": \"a\", \"1\": \"b\"}}", &["one object with the keys \"text\""]),
        (
            "cut.json",
            "[{\"text\": \"a\"}, {\"text\": \"b",
            &["broken JSON", "ends within a value", "data.plain"],
        ),
        (
            "comments.json",
            "// a comment\n{\"text\": \"a\"}",
            &["broken JSON", "at byte 0, a value was expected"],
        ),
        ("numbers.json", "[1, 2, 3]", &["3 x not an object"]),
        (
            "notebook.ipynb",
            "{\n \"cells\": [{\"source\": [\"a\"]}],\n \"nbformat\": 4\n}",
            &["\"cells\", \"nbformat\""],
        ),
    ];
    for (name, content, words) in table {
        let path = write(at.path().join(name), content);
        assert_says(corpus(&[&path]), &[&[name], words].concat());
        // As plain text, if it is asked for.
        let plain = vec!["json".to_string(), ".IPYNB".to_string()];
        let found = Corpus::open(&CorpusSpec { paths: vec![path], plain, ..CorpusSpec::default() }).unwrap();
        assert_eq!(texts(&found), content, "{name}");
    }
}

#[test]
fn another_key_may_hold_the_text() {
    let at = folder();
    let path = write(at.path().join("a.jsonl"), LINES);
    let spec = |key: &str| CorpusSpec {
        paths: vec![path.clone()],
        text_key: Some(key.to_string()),
        max_skipped: Some(0.9),
        ..CorpusSpec::default()
    };
    let found = Corpus::open(&spec("content")).unwrap();
    assert_eq!((found.bytes(), found.findings().skipped_lines.count()), (5, 7));
    assert_says(
        Corpus::open(&spec("body")),
        &["a.jsonl", "no text", "8 of 8 lines", "\"body\"", "text_key", "\"text\""],
    );
}

#[test]
fn a_file_without_a_text_is_an_error_or_skipped() {
    let at = folder();
    let bad = write(at.path().join("in/bad.jsonl"), "{\"a\": 1}\n2\n");
    assert_says(
        corpus(&[&bad]),
        &["bad.jsonl", "skipped 2 of 2 lines", "1 x not an object", "line 2", "keys \"a\""],
    );
    assert_says(corpus(&[&at.path().join("in")]), &["no text found", "bad.jsonl", "\"text\""]);
    let good = write(at.path().join("in/good.jsonl"), "{\"text\": \"a\\u0000\"}\n");
    assert_says(corpus(&[&at.path().join("in")]), &["of 13 bytes", "bad.jsonl"]);
    let found = tolerant(&[&at.path().join("in")]).unwrap();
    assert_eq!((found.documents().len(), found.bytes()), (1, 2));
    assert_eq!(found.documents()[0].path, good);
    assert!(found.findings().notes()[0].starts_with("data: skipped 1 of 2 files: 1 x JSON without texts"));
    let blank = write(at.path().join("blank.jsonl"), "\n \n");
    assert_says(corpus(&[&blank]), &["no text found", "1 x empty file"]);
    let latin1 = write(at.path().join("latin1.jsonl"), b"{\"text\": \"a\"}\n{\"text\": \"caf\xe9\"}\n");
    assert_says(corpus(&[&latin1]), &["latin1.jsonl", "byte 27", "iconv"]);
}

#[test]
fn text_from_many_lines_is_that_of_as_many_files() {
    let at = folder();
    let (mut lines, mut paths) = (String::new(), Vec::new());
    for i in 0..200u32 {
        // The last is longer than what is held of a line.
        let repeated = if i == 199 { 200_000 } else { i as usize % 7 + 1 };
        let text = format!("document {i} é ").repeat(repeated);
        lines += &format!("{{\"n\": {i}, \"text\": {text:?}}}\n");
        paths.push(write(at.path().join(format!("{i:03}.txt")), &text));
    }
    let jsonl = write(at.path().join("all.jsonl"), lines);
    let paths: Vec<_> = paths.iter().map(|path| path.as_path()).collect();
    let gpt2 = Tokenizer::gpt2();
    let ids = |found: &Corpus| all(&tokenize_to_memory(found, &gpt2, 2, &mut |_| {}).unwrap());
    assert!(ids(&corpus(&[&jsonl]).unwrap()) == ids(&corpus(&paths).unwrap()));
}
