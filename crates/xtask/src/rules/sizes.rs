//! A function over 70 lines, a source file over 500 (tests aside) or a test file over 700 holds two ideas. Those that
//! do so today are on a list that may only shrink.

use std::collections::BTreeMap;

use crate::finding::Finding;
use crate::sizes_list::{Entry, parse};
use crate::source::is_test;
use crate::workspace::Workspace;

/// The list, from the root.
pub const LIST: &str = "crates/xtask/sizes.txt";

const FUNCTION_LINES: usize = 70;
const FILE_LINES: usize = 500;
const TEST_FILE_LINES: usize = 700;

/// What is too large: name as on the list, with its lines and the line it begins at.
pub fn measure(workspace: &Workspace) -> BTreeMap<String, (usize, usize)> {
    let mut large = BTreeMap::new();
    for source in &workspace.sources {
        let (lines, limit) = match source.is_test() {
            false => (source.lines_without_tests(), FILE_LINES),
            true => (source.text.lines().count(), TEST_FILE_LINES),
        };
        if lines > limit {
            large.insert(source.path.clone(), (lines, 1));
        }
        for function in source.functions().into_iter().filter(|function| function.lines > FUNCTION_LINES) {
            let name = format!("{}::{}", source.path, function.name);
            let entry = large.entry(name).or_insert((0, function.first_line));
            *entry = (*entry).max((function.lines, function.first_line));
        }
    }
    large
}

pub fn check(workspace: &Workspace, list: &str) -> Vec<Finding> {
    compare(&measure(workspace), list)
}

fn compare(large: &BTreeMap<String, (usize, usize)>, list: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |path: &str, line, what| {
        findings.push(Finding { path: path.to_string(), line, rule: "sizes", what });
    };
    let mut listed = BTreeMap::new();
    for entry in parse(list) {
        match entry {
            Err(at) => {
                find(LIST, at, "this is no entry: write a path or path::function and its lines".into())
            }
            Ok(Entry { name, lines, at }) => {
                listed.insert(name, lines);
                match large.get(name) {
                    None => {
                        find(LIST, at, format!("{name} is no longer too large (or gone): remove its entry"))
                    }
                    Some(&(now, line)) if now > lines => {
                        let path = name.split("::").next().unwrap_or(name);
                        find(path, line, format!("{name} grew from {lines} lines to {now}: split it"));
                    }
                    Some(&(now, _)) if now < lines => {
                        let what =
                            format!("{name} shrank to {now} lines: lower its entry (--shrink does it)");
                        find(LIST, at, what);
                    }
                    Some(_) => {}
                }
            }
        }
    }
    for (name, &(lines, line)) in large {
        if !listed.contains_key(name.as_str()) {
            let (path, limit) = match name.split_once("::") {
                Some((path, _)) => (path, FUNCTION_LINES),
                None if is_test(name) => (name.as_str(), TEST_FILE_LINES),
                None => (name.as_str(), FILE_LINES),
            };
            find(
                path,
                line,
                format!("{name} has {lines} lines, more than {limit}: it holds two ideas, split it"),
            );
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_only_shrinks() {
        let large: BTreeMap<_, _> = [("a.rs", 600), ("a.rs::f", 90), ("a.rs::A::g", 80), ("b.rs", 501)]
            .map(|(name, lines)| (name.to_string(), (lines, 7)))
            .into();
        for (list, expected) in [
            ("a.rs 600\na.rs::f 90\na.rs::A::g 80\nb.rs 501\n", vec![]),
            ("a.rs 600\na.rs::f 90\na.rs::A::g 80\n", vec![("b.rs", 7, "501 lines")]),
            ("a.rs 600\na.rs::f 89\na.rs::A::g 80\nb.rs 501\n", vec![("a.rs", 7, "grew from 89")]),
            ("a.rs 601\na.rs::f 90\na.rs::A::g 80\nb.rs 501\n", vec![(LIST, 1, "lower its entry")]),
            ("c.rs 600\na.rs 600\na.rs::f 90\na.rs::A::g 80\nb.rs 501", vec![(LIST, 1, "remove its entry")]),
            (
                "a.rs 600\nb.rs 501\nx",
                vec![(LIST, 3, "no entry"), ("a.rs", 7, "80 lines"), ("a.rs", 7, "90 lines")],
            ),
        ] {
            let found = compare(&large, list);
            assert_eq!(found.len(), expected.len(), "{list}: {found:?}");
            for (finding, (path, line, words)) in found.iter().zip(expected) {
                assert_eq!((finding.path.as_str(), finding.line), (path, line), "{finding:?}");
                assert!(finding.what.contains(words), "{finding:?}");
            }
        }
    }
}
