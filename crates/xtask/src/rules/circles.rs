//! No circles of imports between the files of a crate: a file that needs another is not needed by it, directly or through
//! others. So each file can be read after those that it imports, and moved without them.
//!
//! A `mod.rs` or `lib.rs` may import the files of its own folder (it declares them and passes their names on), and they
//! may import it.

use std::collections::{BTreeMap, BTreeSet};

use crate::finding::Finding;
use crate::source::SourceFile;
use crate::words::identifiers;
use crate::workspace::Workspace;

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    workspace.crates.iter().flat_map(|name| circles(workspace, name)).map(|circle| finding(&circle)).collect()
}

/// The finding for a circle, at its first import.
fn finding(circle: &[Import]) -> Finding {
    let steps: Vec<String> =
        circle.iter().map(|import| format!("{} imports {}", import.from, import.to)).collect();
    let what = format!(
        "a circle of imports: {}; move what is shared into a file that imports neither",
        steps.join(", ")
    );
    Finding { path: circle[0].path.clone(), line: circle[0].line, rule: "circles", what }
}

/// A module that imports another one.
#[derive(Clone, Debug)]
pub(super) struct Import {
    from: String,
    pub(super) to: String,
    pub(super) path: String,
    pub(super) line: usize,
}

/// The files of a crate with code beside tests, by module.
pub(super) fn files_of<'a>(workspace: &'a Workspace, name: &str) -> BTreeMap<String, &'a SourceFile> {
    let root = format!("crates/{name}/src/");
    workspace
        .sources
        .iter()
        .filter(|source| source.lines_without_tests() > 0)
        .filter_map(|source| source.path.strip_prefix(&root).map(|path| (module(path), source)))
        .collect()
}

/// The circles of a crate: for each, its modules in order, each with one import of another module of the circle.
fn circles(workspace: &Workspace, name: &str) -> Vec<Vec<Import>> {
    let files = files_of(workspace, name);
    let imports: BTreeMap<&str, Vec<Import>> =
        files.iter().map(|(module, source)| (module.as_str(), imports(module, source, &files))).collect();
    // Every module that a module reaches. Two that reach each other are in one circle.
    let reached = |from: &str| {
        let mut seen = BTreeSet::new();
        let mut next = vec![from.to_string()];
        while let Some(module) = next.pop() {
            for import in imports.get(module.as_str()).into_iter().flatten() {
                if seen.insert(import.to.clone()) {
                    next.push(import.to.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<String>> =
        imports.keys().map(|module| (*module, reached(module))).collect();
    let mut circles: Vec<Vec<&str>> = Vec::new();
    for module in imports.keys().copied().filter(|module| reached[module].contains(*module)) {
        let mutual = |other: &str| reached[module].contains(other) && reached[other].contains(module);
        match circles.iter_mut().find(|circle| mutual(circle[0])) {
            Some(circle) => circle.push(module),
            None => circles.push(vec![module]),
        }
    }
    let first_inside = |circle: &Vec<&str>, module: &str| {
        imports[module].iter().find(|import| circle.contains(&import.to.as_str())).cloned()
    };
    circles
        .into_iter()
        .map(|circle| circle.iter().filter_map(|module| first_inside(&circle, module)).collect())
        .collect()
}

/// The module of a file: `a/b.rs` and `a/b/mod.rs` are `a::b`, `lib.rs` and `main.rs` are empty.
fn module(path: &str) -> String {
    let path = path.strip_suffix(".rs").unwrap_or(path);
    let path = path.strip_suffix("mod").map_or(path, |folder| folder.trim_end_matches('/'));
    if matches!(path, "lib" | "main") { String::new() } else { path.replace('/', "::") }
}

/// Imports of a file from its own crate, by paths from `crate`, `self` or `super`.
pub(super) fn imports(from: &str, source: &SourceFile, files: &BTreeMap<String, &SourceFile>) -> Vec<Import> {
    let mut found = Vec::new();
    for (at, word) in identifiers(&source.code) {
        let begins = !source.code[..at].trim_end().ends_with("::");
        let goes_on = source.code[at + word.len()..].trim_start().starts_with("::");
        if !begins || !goes_on || !matches!(word, "crate" | "self" | "super") || source.in_tests(at) {
            continue;
        }
        for path in paths(&source.code[at..]) {
            let Some(to) = resolve(from, &path, files) else { continue };
            let parent = from.is_empty() || to.starts_with(&format!("{from}::"));
            if to != from && !parent {
                let (path, line) = (source.path.clone(), source.line(at));
                found.push(Import { from: from.to_string(), to, path, line });
            }
        }
    }
    found
}

/// The paths that a text begins with: `a::{b::c, d}` are `a::b::c` and `a::d`.
fn paths(text: &str) -> Vec<Vec<String>> {
    let text = text.trim_start();
    let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    let Some(rest) = rest.trim_start().strip_prefix("::") else { return vec![vec![word.to_string()]] };
    let rest = rest.trim_start();
    let tails = match rest.strip_prefix('{') {
        Some(inside) => branches(inside).into_iter().flat_map(paths).collect(),
        None => paths(rest),
    };
    let with_word = |tail: Vec<String>| std::iter::once(word.to_string()).chain(tail).collect();
    tails.into_iter().map(with_word).collect()
}

/// The parts between commas up to the brace that closes.
fn branches(inside: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, letter) in inside.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                parts.push(&inside[start..at]);
                start = at + 1;
                if letter == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    parts
}

/// The module that a path from module `from` leads to.
fn resolve(from: &str, path: &[String], files: &BTreeMap<String, &SourceFile>) -> Option<String> {
    let mut at: Vec<&str> = if path[0] == "crate" { Vec::new() } else { from.split("::").collect() };
    for word in path {
        match word.as_str() {
            "crate" | "self" => {}
            "super" => {
                at.pop();
            }
            word => at.push(word),
        }
    }
    (0..=at.len()).rev().map(|length| at[..length].join("::")).find(|module| files.contains_key(module))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The circles of a crate with these files, each as its modules.
    fn found(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let sources =
            files.iter().map(|(path, text)| SourceFile::new(&format!("crates/a/src/{path}"), text)).collect();
        let workspace = Workspace { crates: vec!["a".to_string()], sources, texts: Vec::new() };
        let modules = |circle: Vec<Import>| circle.into_iter().map(|import| import.from).collect();
        circles(&workspace, "a").into_iter().map(modules).collect()
    }

    #[test]
    fn circles_of_two_and_of_more() {
        let files = [
            ("lib.rs", "mod b; mod c;"),
            ("b.rs", "use crate::c::{self, C};"),
            ("c.rs", "use super::d::{e::E, F};\nuse std::fmt;"),
            ("d/mod.rs", "mod e; pub use e::E;"),
            ("d/e.rs", "fn f() { crate::b::g() }"),
        ];
        assert_eq!(found(&files), [["b", "c", "d::e"]]);
        assert_eq!(found(&files[..4]), Vec::<Vec<String>>::new());
    }

    #[test]
    fn what_is_no_circle() {
        for files in [
            // A parent passes on what its children have, and they use what it has.
            [("d/mod.rs", "pub use self::e::E;"), ("d/e.rs", "use super::D;")],
            [("lib.rs", "use crate::b::B;"), ("b.rs", "use crate::B;")],
            // Tests may use what they like.
            [("b.rs", "use crate::c::C;"), ("c.rs", "#[cfg(test)]\nmod tests { use crate::b::B; }")],
            [("b.rs", "use crate::c::C;"), ("c.rs", "// use crate::b::B;\nfn f() { self.b }")],
        ] {
            assert_eq!(found(&files), Vec::<Vec<String>>::new(), "{files:?}");
        }
    }

    #[test]
    fn a_finding_names_every_import_of_the_circle() {
        let import = |from: &str, to: &str| Import {
            from: from.to_string(),
            to: to.to_string(),
            path: format!("{from}.rs"),
            line: 3,
        };
        let found = finding(&[import("b", "c"), import("c", "b")]);
        assert_eq!((found.path.as_str(), found.line), ("b.rs", 3));
        assert!(found.what.contains("b imports c, c imports b;"), "{found:?}");
    }
}
