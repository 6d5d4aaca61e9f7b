//! Rooms within a crate: a file imports its own folder, and folders that stand before it.
//!
//! `lib.rs` passes names on to other crates; within the crate it imports nothing and is not imported, so that each path says its folder.

use super::circles::{files_of, imports};
use crate::finding::Finding;
use crate::workspace::Workspace;

/// Crates with rooms: the folders of `src`, each before those that may import it.
const FLOORS: [(&str, &[&str]); 2] = [
    ("train", &["config", "engine", "data", "planner", "jobs"]),
    ("program", &["arguments", "host", "configuration", "folders", "plans", "reports", "jobs", "commands"]),
];

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, floors) in FLOORS {
        let files = files_of(workspace, name);
        let floor = |module: &str| floors.iter().position(|floor| Some(*floor) == module.split("::").next());
        for (module, source) in files.iter().filter(|(module, _)| !module.is_empty()) {
            let Some(own) = floor(module) else {
                let what = format!("stands in no room: move it into one of {}", floors.join(", "));
                findings.push(Finding { path: source.path.clone(), line: 1, rule: "floors", what });
                continue;
            };
            for import in imports(module, source, &files) {
                let what = match floor(&import.to) {
                    Some(floor) if floor <= own => continue,
                    Some(_) => format!("imports {}, which is above it", import.to),
                    None => "imports a name that lib.rs passes on: write the path with its room".to_string(),
                };
                findings.push(Finding { path: import.path, line: import.line, rule: "floors", what });
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::SourceFile;

    #[test]
    fn rooms_import_those_before_them() {
        let files = [
            ("lib.rs", "mod config; mod engine; mod planner; pub use engine::Rank;"),
            ("config/mod.rs", "mod bounds;"),
            ("config/bounds.rs", "use super::check;"),
            ("engine/mod.rs", "use crate::planner::Plan;"),
            ("planner/mod.rs", "use crate::engine::Rank;\nuse crate::config;"),
            ("planner/placing.rs", "use crate::Rank;"),
            ("alone.rs", ""),
        ];
        let sources = files.iter().map(|(path, text)| {
            SourceFile::new(&format!("crates/train/src/{path}"), &format!("{text}\nfn f() {{}}\n"))
        });
        let workspace =
            Workspace { crates: vec!["train".to_string()], sources: sources.collect(), texts: Vec::new() };
        let found = check(&workspace);
        let found: Vec<(&str, &str)> =
            found.iter().map(|finding| (finding.path.as_str(), finding.what.as_str())).collect();
        assert_eq!(found.len(), 3, "{found:?}");
        for (path, words) in [
            ("alone.rs", "in no room"),
            ("engine/mod.rs", "imports planner, which is above"),
            ("planner/placing.rs", "lib.rs passes on"),
        ] {
            assert!(found.iter().any(|(at, what)| at.ends_with(path) && what.contains(words)), "{found:?}");
        }
    }
}
