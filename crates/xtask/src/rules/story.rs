//! A source file opens with its story; unsafe code says why it is safe; nothing unfinished stays.

use crate::finding::Finding;
use crate::source::SourceFile;
use crate::words::identifiers;
use crate::workspace::Workspace;

/// Maximum number of lines between the beginning of a reason and its `unsafe`.
const SAFETY_LINES: usize = 6;

/// Macros that stand for work not done or for a search not cleaned up.
const UNFINISHED: [&str; 3] = ["todo", "unimplemented", "dbg"];

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    workspace
        .sources
        .iter()
        .flat_map(|source| {
            let found = opening(source).into_iter().chain(unexplained(source)).chain(unfinished(source));
            found.map(|(line, what)| Finding { path: source.path.clone(), line, rule: "story", what })
        })
        .collect()
}

/// Files under `src` begin with a comment.
fn opening(source: &SourceFile) -> Option<(usize, String)> {
    let needs = source.path.contains("/src/") && !source.text.trim_start().starts_with("//");
    needs.then(|| (1, "the file opens without its story: begin with //! what it does and why so".into()))
}

/// `unsafe` blocks and impls without a SAFETY comment.
fn unexplained(source: &SourceFile) -> Vec<(usize, String)> {
    let lines: Vec<&str> = source.text.lines().collect();
    let mut found = Vec::new();
    for (at, _) in identifiers(&source.code).filter(|&(_, word)| word == "unsafe") {
        let next = source.code[at + "unsafe".len()..].trim_start();
        if !next.starts_with('{') && !next.starts_with("impl") {
            continue;
        }
        let line = source.line(at);
        let above = &lines[line.saturating_sub(1 + SAFETY_LINES)..line];
        if !above.iter().any(|text| text.contains("SAFETY:")) {
            let what = "unsafe without its reason: write // SAFETY: the invariant and who keeps it, above it";
            found.push((line, what.to_string()));
        }
    }
    found
}

/// Also in tests: a test that does not run tests nothing.
fn unfinished(source: &SourceFile) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, word) in identifiers(&source.code) {
        let before = source.code[..at].trim_end();
        let after = &source.code[at + word.len()..];
        if UNFINISHED.contains(&word) && after.starts_with('!') {
            found.push((source.line(at), format!("`{word}!` is left: finish it or return an error")));
        }
        if word == "ignore" && before.ends_with("#[") {
            found.push((source.line(at), "a test is ignored: make it run or remove it".to_string()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(found: Vec<(usize, String)>) -> Vec<usize> {
        found.into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn files_open_with_a_story() {
        let open = |path, text| opening(&SourceFile::new(path, text)).is_some();
        assert!(!open("crates/x/src/a.rs", "//! Story.\n"));
        assert!(!open("crates/x/src/a.rs", "\n// Story.\n"));
        assert!(open("crates/x/src/a.rs", "use std::io;\n"));
        assert!(open("crates/x/src/a.rs", ""));
        assert!(!open("crates/x/tests/a.rs", "use std::io;\n"));
    }

    #[test]
    fn unsafe_code_has_a_reason_near_by() {
        let text = "\
// SAFETY: kept by the caller.
unsafe { a() }
unsafe fn b() {}
//
//
//
//
//
let x = unsafe { c() }; // SAFETY: here too
//
//
//
//
//
//
unsafe impl Send for D {}
/// unsafe { in words }
";
        assert_eq!(lines(unexplained(&SourceFile::new("a.rs", text))), [16]);
        let far = text.replace("// SAFETY: here too", "");
        assert_eq!(lines(unexplained(&SourceFile::new("a.rs", &far))), [9, 16]);
    }

    #[test]
    fn unfinished_work_is_seen_in_tests_too() {
        let text =
            ["to", "do!();\ndbg", "!(x);\n#[ig", "nore = \"slow\"]\n// dbg", "!()\nlet todo = 1;"].concat();
        assert_eq!(lines(unfinished(&SourceFile::new("crates/x/tests/a.rs", &text))), [1, 2, 3]);
    }
}
