//! Which room may know which. The table is DESIGN's and ARCHITECTURE's; a new crate begins with a row here.
//!
//! Imports are read twice, from `Cargo.toml` and from the code; what a crate needs for its tests alone is
//! its own affair. Then the rules that no import shows: layers, optimizers and kernels that learn of ranks,
//! a group that everybody can reach, an environment that is read in the middle of things.

use crate::finding::Finding;
use crate::manifest::dependencies;
use crate::source::SourceFile;
use crate::words::{identifiers, words};
use crate::workspace::Workspace;

/// A crate's folder and the folders that it may import.
const MAY_IMPORT: [(&str, &str); 23] = [
    ("system", ""),
    ("plan", ""),
    ("simd", ""),
    ("tensor", "system plan"),
    ("cpu", "system plan simd tensor"),
    ("simulated", "system plan tensor"),
    ("collectives", "system plan simd tensor"),
    ("launch", "system tensor collectives"),
    ("mpi", "collectives"),
    ("layers", "system plan tensor"),
    ("optim", "plan tensor"),
    ("parallel", "plan tensor collectives layers optim"),
    ("models", "plan tensor collectives layers parallel"),
    ("drawing", "plan"),
    ("checkpoint", "system plan tensor"),
    ("data", "system"),
    ("train", "system plan simd tensor cpu collectives layers optim parallel models checkpoint data"),
    (
        "bench",
        "system plan simd tensor cpu collectives layers optim parallel models checkpoint data train drawing",
    ),
    ("phalanx", "plan tensor cpu cuda collectives launch layers optim parallel models checkpoint data train"),
    (
        "program",
        "system plan simd tensor cpu cuda simulated collectives launch mpi layers optim parallel models checkpoint \
         data train bench drawing",
    ),
    ("testing", "system plan tensor collectives"),
    ("xtask", ""),
    ("cuda", "system plan tensor"),
];

/// The folders that a crate may import; `None` for a crate without a row.
fn allowed_imports(name: &str) -> Option<Vec<&'static str>> {
    let row = MAY_IMPORT.iter().find(|(known, _)| *known == name);
    row.map(|(_, rooms)| rooms.split_whitespace().collect())
}

/// Crates whose code must not know how many ranks there are, nor which it is.
const RANKLESS: [&str; 5] = ["layers", "tensor", "cpu", "simd", "optim"];

/// Files of those crates in which one such word means something else: file, word, meaning.
const OTHER_MEANINGS: [(&str, &str, &str); 4] = [
    ("crates/tensor/src/shape.rs", "MAX_RANK", "the largest number of dimensions"),
    ("crates/tensor/src/shape.rs", "rank", "the number of dimensions"),
    ("crates/tensor/src/record.rs", "rank", "the label of a trace"),
    ("crates/tensor/src/device.rs", "rank", "the label of a trace"),
];

/// Crates that may read arguments and environment.
const MAY_READ_ENVIRONMENT: [&str; 4] = ["program", "phalanx", "testing", "xtask"];

/// Crates that may differ by feature: the face and the leaves that wrap foreign engines.
const MAY_HAVE_FEATURES: [&str; 5] = ["phalanx", "data", "cuda", "nccl", "mpi"];

/// Files that execute programs of chunks.
const EXECUTORS: [&str; 4] = [
    "crates/parallel/src/zero/executor.rs",
    "crates/parallel/src/zero/sums.rs",
    "crates/parallel/src/zero/updates.rs",
    "crates/parallel/src/zero/views.rs",
];

/// Words of what passes decide: stages, memories, options, and whether a run is dry.
const STRATEGIES: [&str; 9] = [
    "ZeroStage",
    "Memory",
    "Residence",
    "Options",
    "Policies",
    "policies",
    "residence",
    "is_meta",
    "is_host_addressable",
];

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    for name in &workspace.crates {
        let path = format!("crates/{name}/Cargo.toml");
        let Some(allowed) = allowed_imports(name) else {
            let what =
                format!("nobody said what {name} may import: add a row to MAY_IMPORT in tidy's imports.rs");
            findings.push(finding(&path, 1, what));
            continue;
        };
        for (dependency, line) in dependencies(workspace.text(&path).unwrap_or_default()) {
            if let Some(room) = room(&dependency).filter(|room| !allowed.contains(room)) {
                findings.push(finding(&path, line, may_not(name, room)));
            }
        }
    }
    for source in &workspace.sources {
        let Some(name) = source.crate_dir() else { continue };
        let found = imported(source, name)
            .into_iter()
            .chain(ranks(source, name))
            .chain(globals(source))
            .chain(strategies(source))
            .chain(environment(source, name))
            .chain(features(source, name));
        findings.extend(found.map(|(at, what)| finding(&source.path, source.line(at), what)));
    }
    findings.extend(stale_meanings(workspace));
    findings
}

fn finding(path: &str, line: usize, what: String) -> Finding {
    Finding { path: path.to_string(), line, rule: "imports", what }
}

/// The folder of a package of ours: `phalanx-plan` and `phalanx_plan` live in `plan`.
pub fn room(package: &str) -> Option<&str> {
    match package {
        "phalanx" | "xtask" => Some(package),
        _ => package.strip_prefix("phalanx-").or_else(|| package.strip_prefix("phalanx_")),
    }
}

fn may_not(name: &str, other: &str) -> String {
    format!("{name} may not import {other}: pass what it needs as data or a closure, or move the code")
}

/// Paths into crates that this one may not import.
fn imported(source: &SourceFile, name: &str) -> Vec<(usize, String)> {
    let allowed = allowed_imports(name).unwrap_or_default();
    outside_tests(source)
        .filter_map(|(at, word)| word.strip_prefix("phalanx_").map(|room| (at, room)))
        .filter(|(_, room)| MAY_IMPORT.iter().any(|(known, _)| known == room))
        .filter(|(_, room)| *room != name && !allowed.contains(room))
        .map(|(at, room)| (at, may_not(name, room)))
        .collect()
}

/// Names of ranks and groups in crates that must not know them.
fn ranks(source: &SourceFile, name: &str) -> Vec<(usize, String)> {
    if !RANKLESS.contains(&name) {
        return Vec::new();
    }
    outside_tests(source)
        .filter(|(_, word)| knows_ranks(word) && meaning(&source.path, word).is_none())
        .map(|(at, word)| {
            (
                at,
                format!(
                    "`{word}`: {name} knows no rank and no group; let the caller pass a range or a slice"
                ),
            )
        })
        .collect()
}

fn knows_ranks(name: &str) -> bool {
    let words = words(name);
    let is_group = name.starts_with(char::is_uppercase) && words.iter().any(|word| word == "group");
    let is_world = words.windows(2).any(|pair| pair == ["world", "size"]);
    is_group || is_world || words.iter().any(|word| matches!(word.as_str(), "rank" | "ranks"))
}

fn meaning(path: &str, word: &str) -> Option<&'static str> {
    let entry = OTHER_MEANINGS.iter().find(|(file, known, _)| *file == path && *known == word);
    entry.map(|(_, _, meaning)| *meaning)
}

/// Exceptions that nothing needs any more.
fn stale_meanings(workspace: &Workspace) -> Vec<Finding> {
    let needed = |path: &str, word: &str| {
        let source = workspace.sources.iter().find(|source| source.path == path);
        source.is_some_and(|source| outside_tests(source).any(|(_, known)| known == word))
    };
    OTHER_MEANINGS
        .iter()
        .filter(|(path, word, _)| !needed(path, word))
        .map(|(path, word, meaning)| {
            let what = format!(
                "`{word}` as {meaning} is gone: remove the row of OTHER_MEANINGS in tidy's imports.rs"
            );
            finding(path, 1, what)
        })
        .collect()
}

/// Strategies in the executor of programs.
fn strategies(source: &SourceFile) -> Vec<(usize, String)> {
    if !EXECUTORS.contains(&source.path.as_str()) {
        return Vec::new();
    }
    let found = outside_tests(source).filter(|(_, word)| STRATEGIES.contains(word));
    let what =
        |word: &str| format!("`{word}`: an executor knows no strategy; a pass of plan/src/program decides");
    found.map(|(at, word)| (at, what(word))).collect()
}

/// Groups that live in a static.
fn globals(source: &SourceFile) -> Vec<(usize, String)> {
    let code = &source.code;
    outside_tests(source)
        .filter(|&(at, word)| word == "static" && !code[..at].ends_with('\''))
        .filter(|&(at, _)| {
            let head = code[at..].split([';', '=', '{']).next().unwrap_or_default();
            identifiers(head).any(|(_, word)| words(word).iter().any(|part| part == "group"))
        })
        .map(|(at, _)| (at, "a process group in a global: pass it to whoever needs it".to_string()))
        .collect()
}

/// Arguments and environment read outside the face.
fn environment(source: &SourceFile, name: &str) -> Vec<(usize, String)> {
    // An example is a program of its own, with arguments of its own.
    if MAY_READ_ENVIRONMENT.contains(&name) || source.path.contains("/examples/") {
        return Vec::new();
    }
    outside_tests(source)
        .filter(|&(at, word)| {
            let before = source.code[..at].trim_end();
            let after = source.code[at + word.len()..].trim_start();
            word == "env" && (before.ends_with("std::") || after.starts_with("::"))
        })
        .map(|(at, _)| {
            (
                at,
                format!(
                    "{name} reads arguments or environment: only crates/program does; take it as a value"
                ),
            )
        })
        .collect()
}

/// Code that differs by feature outside the leaves.
fn features(source: &SourceFile, name: &str) -> Vec<(usize, String)> {
    if MAY_HAVE_FEATURES.contains(&name) {
        return Vec::new();
    }
    outside_tests(source)
        .filter(|&(at, word)| {
            word == "feature" && source.code[at + word.len()..].trim_start().starts_with('=')
        })
        .map(|(at, _)| {
            (at, format!("{name} differs by feature: put what differs behind a trait, in a leaf crate"))
        })
        .collect()
}

fn outside_tests(source: &SourceFile) -> impl Iterator<Item = (usize, &str)> {
    identifiers(&source.code).filter(|&(at, _)| !source.in_tests(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Rule = fn(&SourceFile, &str) -> Vec<(usize, String)>;

    /// Number of findings of a rule in a text, as a file of crate `name`.
    fn count(rule: Rule, name: &str, text: &str) -> usize {
        rule(&SourceFile::new(&format!("crates/{name}/src/a.rs"), text), name).len()
    }

    #[test]
    fn the_table_has_no_loops() {
        for (name, _) in MAY_IMPORT {
            for other in allowed_imports(name).unwrap() {
                let back = allowed_imports(other).unwrap();
                assert!(!back.contains(&name), "{name} and {other}");
            }
        }
        // What no table may ever say.
        for (name, never) in [
            ("collectives", &["layers"][..]),
            ("parallel", &["models"]),
            ("checkpoint", &["parallel", "collectives"]),
            ("data", &["plan"]),
        ] {
            let allowed = allowed_imports(name).unwrap();
            assert!(never.iter().all(|other| !allowed.contains(other)), "{name}");
        }
    }

    #[test]
    fn manifests_and_unknown_crates() {
        let manifest = |name: &str, dependency: &str| {
            let toml = format!("[dependencies]\n{dependency}.workspace = true\nserde = \"1\"\n");
            (format!("crates/{name}/Cargo.toml"), toml)
        };
        let workspace = Workspace {
            crates: ["data", "layers", "newcomer"].map(str::to_string).into(),
            sources: vec![SourceFile::new("crates/layers/src/a.rs", "// Story.\nuse phalanx_optim::Sgd;\n")],
            texts: vec![
                manifest("data", "phalanx-plan"),
                manifest("layers", "phalanx-tensor"),
                manifest("newcomer", "phalanx"),
            ],
        };
        let found = check(&workspace);
        let found = found.iter().filter(|finding| !finding.path.starts_with("crates/tensor/"));
        let found: Vec<_> = found.map(|finding| (finding.path.as_str(), finding.line)).collect();
        assert_eq!(
            found,
            [("crates/data/Cargo.toml", 2), ("crates/newcomer/Cargo.toml", 1), ("crates/layers/src/a.rs", 2)]
        );
    }

    #[test]
    fn paths_into_other_crates() {
        let text = "use phalanx_models::Gpt2;\n// phalanx_train\nfn f() { phalanx_plan::trace::x() }";
        assert_eq!(count(imported, "parallel", text), 1);
        assert_eq!(count(imported, "train", text), 0);
        assert_eq!(count(imported, "data", text), 2);
        let tests = "#[cfg(test)]\nmod tests { use phalanx_models::Gpt2; }";
        assert_eq!(count(imported, "parallel", tests), 0);
    }

    #[test]
    fn ranks_are_unknown_to_kernels() {
        for (text, expected) in [
            ("fn f(rank: usize, world_size: usize, data: &dyn Group) {}", 3),
            ("fn f(my_rank: usize, g: SubGroup) {}", 2),
            ("// the rank of a group\nfn f(group_bytes: usize, world: u8, ranking: u8) {}", 0),
        ] {
            assert_eq!(count(ranks, "layers", text), expected, "{text}");
            assert_eq!(count(ranks, "parallel", text), 0, "{text}");
        }
    }

    #[test]
    fn executors_know_no_strategy() {
        let text = "fn f(stage: ZeroStage) { if self.policies.overlap {} }";
        for (path, expected) in [(EXECUTORS[0], 2), ("crates/parallel/src/zero/map.rs", 0)] {
            assert_eq!(strategies(&SourceFile::new(path, text)).len(), expected, "{path}");
        }
    }

    #[test]
    fn globals_environment_and_features() {
        let global: Rule = |source, _| globals(source);
        assert_eq!(count(global, "train", "static WORLD: OnceLock<Arc<dyn Group>> = OnceLock::new();"), 1);
        assert_eq!(count(global, "train", "static GROUPS: u8 = 0;"), 0);
        assert_eq!(count(global, "train", "fn group(name: &'static str) -> Group { x }"), 0);
        let text = "use std::env;\nfn f() { env::var(\"X\"); env!(\"Y\"); }";
        assert_eq!(count(environment, "train", text), 2);
        assert_eq!(count(environment, "phalanx", text), 0);
        let text = "#[cfg(feature = \"x\")] #[target_feature(enable = \"avx2\")] fn f() {}";
        assert_eq!(count(features, "train", text), 1);
        assert_eq!(count(features, "cuda", text), 0);
    }
}
