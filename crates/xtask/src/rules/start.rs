//! `cargo run`, with which the README begins, works only while the workspace has one program to run.

use crate::finding::Finding;
use crate::workspace::Workspace;

/// Line of the workspace's `Cargo.toml` that makes `cargo run` and `cargo build` mean the program alone.
const DEFAULT: &str = "default-members = [\"crates/program\"]";

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let toml = workspace.text("Cargo.toml").unwrap_or_default();
    if toml.lines().any(|line| line == DEFAULT) {
        return Vec::new();
    }
    let what = format!(
        "`{DEFAULT}` is missing: `cargo run` of the README finds several programs and refuses to choose one"
    );
    vec![Finding { path: "Cargo.toml".to_string(), line: 1, rule: "start", what }]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(toml: &str) -> usize {
        let texts = vec![("Cargo.toml".to_string(), toml.to_string())];
        check(&Workspace { crates: Vec::new(), sources: Vec::new(), texts }).len()
    }

    #[test]
    fn the_program_alone_is_the_default() {
        assert_eq!(
            count("[workspace]\nmembers = [\"crates/*\"]\ndefault-members = [\"crates/program\"]\n"),
            0
        );
        assert_eq!(
            count("[workspace]\nmembers = [\"crates/*\"]\n# default-members = [\"crates/program\"]\n"),
            1
        );
        assert_eq!(count("[workspace]\ndefault-members = [\"crates/program\", \"crates/xtask\"]\n"), 1);
    }
}
