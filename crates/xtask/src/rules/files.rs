//! Files are written by one room. A write that is not synced, or that follows a planted link, is easily made with
//! the standard library and never seen in a test.

use crate::finding::Finding;
use crate::source::SourceFile;
use crate::words::identifiers;
use crate::workspace::Workspace;

/// Crates that may create and rename files themselves: the room for files, and programs and helpers of the developers.
const MAY_WRITE: [&str; 3] = ["system", "testing", "xtask"];

/// Functions of the standard library, with the module or type before them.
const WRITES: [(&str, &str); 8] = [
    ("fs", "write"),
    ("fs", "rename"),
    ("fs", "copy"),
    ("fs", "create_dir_all"),
    ("File", "create"),
    ("File", "create_new"),
    ("File", "options"),
    ("OpenOptions", "new"),
];

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let sources = workspace.sources.iter().filter(|source| {
        let is_program = source.path.contains("/src/");
        is_program && source.crate_dir().is_some_and(|name| !MAY_WRITE.contains(&name))
    });
    sources
        .flat_map(|source| writes(source).into_iter().map(|(at, what)| finding(source, at, what)))
        .collect()
}

fn finding(source: &SourceFile, at: usize, what: String) -> Finding {
    Finding { path: source.path.clone(), line: source.line(at), rule: "files", what }
}

fn writes(source: &SourceFile) -> Vec<(usize, String)> {
    let code = &source.code;
    identifiers(code)
        .filter(|&(at, _)| !source.in_tests(at))
        .filter_map(|(at, word)| {
            let before = code[..at].strip_suffix("::")?;
            let (owner, _) = WRITES.iter().find(|(owner, name)| *name == word && ends_with(before, owner))?;
            let advice = "crates/system does that durably and follows no planted link: write, write_output, append, \
                          rename, create_folders";
            Some((at, format!("{owner}::{word}: {advice}")))
        })
        .collect()
}

/// Returns whether the last name of a path is `owner`.
fn ends_with(path: &str, owner: &str) -> bool {
    let rest = path.strip_suffix(owner);
    rest.is_some_and(|rest| !rest.ends_with(|letter: char| letter.is_alphanumeric() || letter == '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        let sources = vec![SourceFile::new(path, text)];
        check(&Workspace { crates: Default::default(), sources, texts: Vec::new() }).len()
    }

    #[test]
    fn writes_are_found_in_programs_alone() {
        let text = "fn f() { std::fs::write(a, b); fs::rename(a, b); File::create(a); OpenOptions::new(); }";
        for (path, expected) in [
            ("crates/train/src/run.rs", 4),
            ("crates/system/src/files/write.rs", 0),
            ("crates/xtask/src/main.rs", 0),
            ("crates/train/tests/a.rs", 0),
            ("crates/plan/examples/a.rs", 0),
        ] {
            assert_eq!(count(path, text), expected, "{path}");
        }
        let inner = format!("#[cfg(test)]\nmod tests {{ {text} }}");
        assert_eq!(count("crates/train/src/run.rs", &inner), 0);
        let others = "fn f() { fs::read(a); phalanx_system::files::write(a, b); files.write(&x); AtomicFile::create(a); }";
        assert_eq!(count("crates/train/src/run.rs", others), 0);
    }
}
