//! Plain English, as far as a program can tell: doc comments that are no sentence, riddles that have a plain word, and
//! names that readers had to guess.
//!
//! Doc comments and names are checked in Rust files, phrases in every text.

use crate::finding::Finding;
use crate::source::SourceFile;
use crate::words::{identifiers, words};
use crate::workspace::Workspace;

/// This file, which has to spell out what it refuses.
const OWN_FILE: &str = "crates/xtask/src/rules/wording.rs";

/// Forbidden beginnings of doc comments, each with the reason.
const OPENINGS: [(&str, &str); 3] = [
    ("Of ", "says of what, but not what: name the thing first (\"The seed of the dropout mask\")"),
    ("See the module", "sends the reader away: say here in one line what the item is"),
    ("As above", "sends the reader away: say here in one line what the item is"),
];

/// Phrases, in lower case, and what to write in their place.
const PHRASES: [(&str, &str); 10] = [
    ("who stands where", "each rank's coordinates"),
    ("stands at place", "has the coordinates"),
    ("what falls", "name it: the dropout mask"),
    ("the nearest known is", "did you mean"),
    ("the nearest is", "did you mean"),
    ("go on on", "resume on"),
    ("goes on on", "resumes on"),
    ("see the module's head", "one line that says what the item is"),
    ("in 1 batch of", "1 micro-batch of"),
    ("its like", "name it: the rank's peers"),
];

/// Words that no name has, and what to write in their place.
const WORDS: [(&str, &str); 8] = [
    ("crew", "rank processes"),
    ("seat", "rank host"),
    ("seats", "rank hosts"),
    ("mistake", "planted fault"),
    ("mistaken", "with a planted fault"),
    ("wish", "stop requested"),
    ("least", "min"),
    ("most", "max"),
];

/// Whole names, in lower case, and what to write in their place.
const NAMES: [(&str, &str); 3] = [
    ("way", "the field's term: strategy, mode, path"),
    ("ways", "the field's term: strategies, modes, paths"),
    ("older", "what the thing is"),
];

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    let sources = workspace.sources.iter().filter(|source| source.path != OWN_FILE);
    for source in sources {
        let found = doc_comments(&source.text).into_iter().chain(phrases(&source.text)).chain(names(source));
        findings.extend(found.map(|(line, what)| finding(&source.path, line, what)));
    }
    for (path, text) in workspace.texts.iter().filter(|(path, _)| path.ends_with(".md")) {
        findings.extend(phrases(text).into_iter().map(|(line, what)| finding(path, line, what)));
    }
    findings
}

fn finding(path: &str, line: usize, what: String) -> Finding {
    Finding { path: path.to_string(), line, rule: "wording", what }
}

/// First lines of doc comments that say nothing: their numbers and what is wrong.
fn doc_comments(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut inside = false;
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        let content = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        let first = content.filter(|_| !inside).map(str::trim_start);
        inside = content.is_some();
        let Some(first) = first else { continue };
        if let Some((opening, wrong)) = OPENINGS.iter().find(|(opening, _)| first.starts_with(opening)) {
            found
                .push((number, format!("a doc comment that begins with \"{}\" {wrong}", opening.trim_end())));
        }
    }
    found
}

/// Lines with a phrase that has a plain word.
fn phrases(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.to_lowercase();
        for (phrase, plain) in PHRASES.iter().filter(|(phrase, _)| contains(&line, phrase)) {
            found.push((number, format!("\"{phrase}\": write: {plain}")));
        }
    }
    found
}

/// Returns whether a line has the phrase as whole words.
fn contains(line: &str, phrase: &str) -> bool {
    let is_word = |letter: Option<char>| letter.is_some_and(char::is_alphanumeric);
    line.match_indices(phrase).any(|(at, _)| {
        !is_word(line[..at].chars().next_back()) && !is_word(line[at + phrase.len()..].chars().next())
    })
}

/// Names that readers must guess, each name of a file once, where it comes first.
fn names(source: &SourceFile) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    for (at, name) in identifiers(&source.code) {
        if seen.contains(&name) {
            continue;
        }
        seen.push(name);
        let words = words(name);
        let has = |(word, _): &&(&str, &str)| words.iter().any(|part| part == word);
        let is = |(whole, _): &&(&str, &str)| name.to_lowercase() == *whole;
        if let Some((word, plain)) = WORDS.iter().find(has).or_else(|| NAMES.iter().find(is)) {
            found.push((source.line(at), format!("`{name}` has the word `{word}`: write {plain}")));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(found: &[(usize, String)]) -> Vec<usize> {
        found.iter().map(|(line, _)| *line).collect()
    }

    #[test]
    fn doc_comments_name_their_thing() {
        let text = "//! Of files.\n//! Of more.\n\n/// Of a rank.\nstruct A {\n    /// The seed.\n    /// Of all.\n    \
                    b: u8,\n    /// See the module's head.\n    c: u8,\n    // Of a comment.\n    /// As above.\n    d: u8,\n}\n";
        assert_eq!(lines(&doc_comments(text)), [1, 4, 9, 12]);
        assert!(doc_comments("/// Offsets of chunks.\n").is_empty());
    }

    #[test]
    fn phrases_are_whole_words_in_code_and_prose() {
        let text =
            "// The table says who stands where.\nlet text = \"What falls is random\";\n// what fallse\n";
        assert_eq!(lines(&phrases(text)), [1, 2]);
        assert!(phrases("a split like that").is_empty(), "\"its like\" is no part of \"a split like\"");
    }

    #[test]
    fn names_are_told_once_a_file_and_words_of_prose_are_not_names() {
        let text = "// the least of all ways\nfn at_least(least: u8) { at_least(least) }\nlet almost = always;\nlet on_the_way = Way;\n";
        let found = names(&SourceFile::new("crates/a/src/a.rs", text));
        assert_eq!(lines(&found), [2, 2, 4]);
        assert!(found[0].1.contains("`at_least`") && found[1].1.contains("`least`"), "{found:?}");
    }
}
