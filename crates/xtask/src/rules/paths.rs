//! No path of one machine: what is written here must run anywhere. Tests may name what a system has.

use crate::finding::Finding;
use crate::workspace::Workspace;

/// Folders at the root of a file system that only one machine has so.
const ROOTS: [&str; 4] = ["work", "root", "home", "tmp"];

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in &workspace.sources {
        for at in machine_paths(&source.text) {
            if !source.in_tests(at) {
                findings.push(finding(&source.path, source.line(at)));
            }
        }
    }
    for (path, text) in &workspace.texts {
        if path.split('/').all(|part| part != "tests") {
            for at in machine_paths(text) {
                findings.push(finding(path, text[..at].matches('\n').count() + 1));
            }
        }
    }
    findings
}

fn finding(path: &str, line: usize) -> Finding {
    let what = "a path of one machine: take it from an argument, or make it relative to the project";
    Finding { path: path.to_string(), line, rule: "paths", what: what.to_string() }
}

/// Bytes at which such paths begin. A slash within a longer path or an address does not begin one.
fn machine_paths(text: &str) -> Vec<usize> {
    let begins = |at: &usize| {
        let before = text[..*at].chars().next_back();
        before.is_none_or(|letter| !letter.is_alphanumeric() && !"._-~/$}".contains(letter))
    };
    let is_root = |at: &usize| {
        ROOTS.iter().any(|root| text[at + 1..].strip_prefix(root).is_some_and(|rest| rest.starts_with('/')))
    };
    text.match_indices('/').map(|(at, _)| at).filter(is_root).filter(begins).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_only() {
        for (text, expected) in [
            ("open(\"/tmp/x\")", 1),
            ("see /home/me and /tmp/main", 2),
            ("/root/", 1),
            ("https://site.org/home/page", 0),
            ("runs/tmp/x, ./tmp/x, ~/tmp/x, $X/tmp/y", 0),
            ("/tmpfs/ /dev/shm/", 0),
        ] {
            assert_eq!(machine_paths(text).len(), expected, "{text}");
        }
    }
}
