//! A source file over 500 lines (tests aside) or a test file over 700 holds two ideas.

use crate::finding::Finding;
use crate::source::SourceFile;
use crate::workspace::Workspace;

const FILE_LINES: usize = 500;
const TEST_FILE_LINES: usize = 700;

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    workspace.sources.iter().filter_map(check_file).collect()
}

fn check_file(source: &SourceFile) -> Option<Finding> {
    let (lines, limit) = match source.is_test() {
        false => (source.lines_without_tests(), FILE_LINES),
        true => (source.text.lines().count(), TEST_FILE_LINES),
    };
    let what = format!("the file has {lines} lines, more than {limit}: it holds two ideas, split it");
    (lines > limit).then(|| Finding { path: source.path.clone(), line: 1, rule: "sizes", what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_up_to_their_limits() {
        for (path, lines, words) in [
            ("crates/a/src/b.rs", 500, None),
            ("crates/a/src/b.rs", 501, Some("501 lines, more than 500")),
            ("crates/a/tests/b.rs", 700, None),
            ("crates/a/tests/b.rs", 701, Some("701 lines, more than 700")),
        ] {
            let found = check_file(&SourceFile::new(path, &"// b\n".repeat(lines)));
            assert_eq!(found.is_some(), words.is_some());
            assert!(found.is_none_or(|found| found.what.contains(words.unwrap())));
        }
    }
}
