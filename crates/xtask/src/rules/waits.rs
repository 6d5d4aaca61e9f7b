//! A test waits for a process that it has started with a bound (`phalanx_testing::process::finish`): a test that waits for ever
//! says nothing.

use crate::finding::Finding;
use crate::source::SourceFile;
use crate::workspace::Workspace;

/// Calls that wait without a time limit. `Child::wait` is not among them: after a kill it returns, and a collective has
/// a function of this name.
const UNBOUNDED: [&str; 3] = [".wait_with_output()", ".output()", ".status()"];

/// A rig of its own: its bound ends what `mpirun` has started, too.
const ALLOWED: &str = "crates/mpi/tests/started/mod.rs";

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let starts =
        |source: &&SourceFile| ["std::process", "rig::"].iter().any(|word| source.code.contains(word));
    let tests =
        workspace.sources.iter().filter(|source| source.is_test() && source.path != ALLOWED).filter(starts);
    let of_source = |source: &SourceFile| {
        let calls = UNBOUNDED.iter().flat_map(|call| source.code.match_indices(call));
        let finding = |(at, call): (usize, &str)| Finding {
            path: source.path.clone(),
            line: source.line(at),
            rule: "waits",
            what: format!(
                "`{call}` waits for ever if the process does; use phalanx_testing::process::finish"
            ),
        };
        calls.map(finding).collect::<Vec<_>>()
    };
    tests.flat_map(of_source).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_of_tests_are_bounded() {
        let lines = |path: &str, text: &str| -> Vec<usize> {
            let sources = vec![SourceFile::new(path, text)];
            let found = check(&Workspace { crates: Vec::new(), sources, texts: Vec::new() });
            found.into_iter().map(|finding| finding.line).collect()
        };
        let text = "use std::process::Child; let a = child.wait_with_output();\nb.wait(); // .output()\nlet c = command.output();\n";
        assert_eq!(lines("crates/launch/tests/x.rs", text), [1, 3]);
        assert!(lines("crates/launch/src/x.rs", text).is_empty() && lines(ALLOWED, text).is_empty());
    }
}
