//! A name says what a thing is. These words say nothing, and gather everything.

use crate::finding::Finding;
use crate::words::{identifiers, words};
use crate::workspace::Workspace;

const BANNED: [&str; 9] =
    ["helper", "helpers", "util", "utils", "utilities", "manager", "managers", "common", "misc"];

/// Words that are followed by the name of what they declare.
const DECLARES: [&str; 8] = ["mod", "fn", "struct", "enum", "trait", "type", "union", "macro_rules"];

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    let paths = workspace.sources.iter().map(|source| &source.path);
    for path in paths.chain(workspace.texts.iter().map(|(path, _)| path)) {
        if let Some(word) = banned(path) {
            findings.push(finding(path, 1, &format!("the path has the word `{word}`")));
        }
    }
    for source in &workspace.sources {
        for (at, name, word) in declared(&source.code) {
            findings.push(finding(&source.path, source.line(at), &format!("`{name}` has the word `{word}`")));
        }
    }
    findings
}

fn finding(path: &str, line: usize, what: &str) -> Finding {
    let what = format!("{what}: name it after what it does, or move it to what it belongs to");
    Finding { path: path.to_string(), line, rule: "names", what }
}

/// Declared names with a banned word: place, name and word.
fn declared(code: &str) -> Vec<(usize, &str, &'static str)> {
    let mut found = Vec::new();
    let mut declares = false;
    for (at, name) in identifiers(code) {
        if declares && let Some(word) = banned(name) {
            found.push((at, name, word));
        }
        declares = DECLARES.contains(&name);
    }
    found
}

fn banned(name: &str) -> Option<&'static str> {
    let words = words(name);
    BANNED.into_iter().find(|banned| words.iter().any(|word| word == banned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_count_and_parts_of_words_do_not() {
        for (name, expected) in [
            ("ChunkManager", Some("manager")),
            ("io_utils", Some("utils")),
            ("crates/x/src/common.rs", Some("common")),
            ("commonest", None),
            ("utilisation", None),
            ("management", None),
        ] {
            assert_eq!(banned(name), expected, "{name}");
        }
    }

    #[test]
    fn only_what_is_declared_here() {
        let code = "mod misc; fn call() { their::util(); } struct FileHelper; let manager = 1;";
        let names: Vec<_> = declared(code).into_iter().map(|(_, name, _)| name).collect();
        assert_eq!(names, ["misc", "FileHelper"]);
    }
}
