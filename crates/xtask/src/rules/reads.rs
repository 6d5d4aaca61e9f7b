//! Files are opened in one room, which opens regular files only and reads no more than its caller expects. What
//! is opened elsewhere may be a FIFO that hangs the program or a device that fills its memory.

use crate::finding::Finding;
use crate::source::SourceFile;
use crate::words::identifiers;
use crate::workspace::Workspace;

/// Crates that may open any file: the room for files, and programs and helpers of the developers.
const MAY_OPEN: [&str; 3] = ["system", "testing", "xtask"];

/// Type or module, and its function that opens a file for reading.
const OPENERS: [(&str, &str); 3] = [("fs", "read"), ("fs", "read_to_string"), ("File", "open")];

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let sources = workspace.sources.iter().filter(|source| {
        let may_open = source.crate_dir().is_none_or(|name| MAY_OPEN.contains(&name));
        // A build script reads the sources.
        !may_open && !source.path.contains("/examples/") && !source.path.ends_with("/build.rs")
    });
    sources.flat_map(opened).collect()
}

fn opened(source: &SourceFile) -> Vec<Finding> {
    let calls = identifiers(&source.code).filter(|&(at, word)| {
        let before = source.code[..at].strip_suffix("::").unwrap_or_default();
        let is_opener = |(owner, call): &(&str, &str)| {
            let rest = (word == *call).then(|| before.strip_suffix(owner)).flatten();
            rest.is_some_and(|rest| !rest.ends_with(|letter: char| letter.is_alphanumeric() || letter == '_'))
        };
        OPENERS.iter().any(is_opener) && !source.in_tests(at)
    });
    let what = "a file is opened outside of the room for files: use phalanx_system::files::open_regular, read_bounded or \
                read_text, with the largest size that is expected";
    calls
        .map(|(at, _)| Finding {
            path: source.path.clone(),
            line: source.line(at),
            rule: "reads",
            what: what.to_string(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openers_and_their_namesakes() {
        for (code, expected) in [
            ("fn f() { std::fs::read(path); }", 1),
            ("fn f() { fs::read_to_string(path); File::open(path); }", 2),
            (
                "fn f() { TokenFile::open(path); phalanx_system::files::open_regular(path); limits::read(path); }",
                0,
            ),
            ("fn f() { fs::read_dir(path); fs::write(path, text); file.read(out); }", 0),
            ("#[cfg(test)]\nmod tests { fn f() { fs::read(path); } }", 0),
        ] {
            assert_eq!(opened(&SourceFile::new("crates/a/src/a.rs", code)).len(), expected, "{code}");
        }
    }
}
