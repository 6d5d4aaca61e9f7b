//! A function over 70 lines, a source file over 500 (tests aside) or a test file over 700 holds two ideas.

use crate::finding::Finding;
use crate::source::SourceFile;
use crate::workspace::Workspace;

const FUNCTION_LINES: usize = 70;
const FILE_LINES: usize = 500;
const TEST_FILE_LINES: usize = 700;

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    workspace.sources.iter().flat_map(check_file).collect()
}

fn check_file(source: &SourceFile) -> Vec<Finding> {
    let finding = |line, what: &str, lines, limit| Finding {
        path: source.path.clone(),
        line,
        rule: "sizes",
        what: format!("{what} has {lines} lines, more than {limit}: it holds two ideas, split it"),
    };
    let (lines, limit) = match source.is_test() {
        false => (source.lines_without_tests(), FILE_LINES),
        true => (source.text.lines().count(), TEST_FILE_LINES),
    };
    let mut findings = Vec::new();
    if lines > limit {
        findings.push(finding(1, "the file", lines, limit));
    }
    for function in source.functions().into_iter().filter(|function| function.lines > FUNCTION_LINES) {
        let what = format!("`{}`", function.name);
        findings.push(finding(function.first_line, &what, function.lines, FUNCTION_LINES));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_functions_up_to_their_limits() {
        let function = |lines: usize| format!("fn f() {{\n{}}}\n", "    g();\n".repeat(lines - 2));
        for (path, text, expected) in [
            ("crates/a/src/b.rs", "// b\n".repeat(500), vec![]),
            ("crates/a/src/b.rs", "// b\n".repeat(501), vec![(1, "501 lines, more than 500")]),
            ("crates/a/tests/b.rs", "// b\n".repeat(700), vec![]),
            ("crates/a/tests/b.rs", "// b\n".repeat(701), vec![(1, "701 lines, more than 700")]),
            ("crates/a/src/b.rs", function(70), vec![]),
            ("crates/a/src/b.rs", format!("\n{}", function(71)), vec![(2, "`f` has 71 lines, more than 70")]),
        ] {
            let found = check_file(&SourceFile::new(path, &text));
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (finding, (line, words)) in found.iter().zip(expected) {
                assert_eq!(finding.line, line);
                assert!(finding.what.contains(words), "{finding:?}");
            }
        }
    }
}
