//! Tests that would never run: a file of `tests/` that its `main.rs` does not name, as the integration tests of a crate are one program;
//! a test or an example of the documentation in a library whose manifest says that it has none, which saves a build of it.

use crate::finding::Finding;
use crate::workspace::Workspace;

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    for main in &workspace.sources {
        let Some(folder) = main.path.strip_suffix("main.rs").filter(|folder| folder.ends_with("/tests/"))
        else {
            continue;
        };
        let files = workspace.sources.iter().filter_map(|source| {
            let module = source.path.strip_prefix(folder)?.strip_suffix(".rs")?;
            (module != "main" && !module.contains('/')).then_some((&source.path, module))
        });
        for (path, module) in files {
            if !main.code.lines().any(|line| line == format!("mod {module};")) {
                let what = format!("its tests never run: add `mod {module};` to {}", main.path);
                findings.push(Finding { path: path.clone(), line: 1, rule: "test_files", what });
            }
        }
    }
    findings.extend(left_out(workspace));
    findings
}

/// The line of the first example in the documentation of a file, from 0: code in a fence that does not say `text`.
fn example(text: &str) -> Option<usize> {
    let fence = |line: &'_ str| {
        let line = line.trim_start();
        let text = line.strip_prefix("//!").or_else(|| line.strip_prefix("///"))?;
        text.trim().strip_prefix("```").map(|word| word == "text")
    };
    let mut begins = text.lines().enumerate().filter_map(|(at, line)| Some((at, fence(line)?))).step_by(2);
    begins.find(|(_, is_text)| !is_text).map(|(at, _)| at)
}

/// Tests and examples that never run because of `test = false` or `doctest = false` in `[lib]`.
fn left_out(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in workspace.sources.iter().filter(|source| source.path.contains("/src/")) {
        let Some(room) = source.crate_dir() else { continue };
        let manifest = workspace.text(&format!("crates/{room}/Cargo.toml")).unwrap_or_default();
        let lib =
            manifest.split("\n[lib]").nth(1).and_then(|lib| lib.split("\n[").next()).unwrap_or_default();
        let mut found = |key: &str, line: Option<usize>| {
            if let Some(line) = line.filter(|_| lib.lines().any(|line| line == format!("{key} = false"))) {
                let what =
                    format!("never runs: take `{key} = false` out of the manifest of {room}, or move it");
                findings.push(Finding {
                    path: source.path.clone(),
                    line: line + 1,
                    rule: "test_files",
                    what,
                });
            }
        };
        found("test", source.code.lines().position(|line| line.trim() == "#[test]"));
        found("doctest", example(&source.text));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::SourceFile;

    #[test]
    fn every_file_of_tests_is_a_module_of_the_program() {
        let count = |main: &str| {
            let file = |name: &str, text: &str| SourceFile::new(&format!("crates/a/tests/{name}.rs"), text);
            let sources = vec![file("main", main), file("b", ""), file("rig/mod", "")];
            check(&Workspace { crates: Vec::new(), sources, texts: Vec::new() }).len()
        };
        assert_eq!(count("mod b;\nmod rig;\n"), 0);
        assert_eq!(count("// mod b;\nmod bb;\n"), 1);
    }

    #[test]
    fn a_library_without_tests_has_none() {
        let text = "/// ```text\n/// a\n/// ```\n/// ```\n/// a();\n/// ```\nfn a() {}\n#[cfg(test)]\nmod tests {\n    #[test]\n    fn b() {}\n}\n";
        let lines = |lib: &str| {
            let texts =
                vec![("crates/a/Cargo.toml".to_string(), format!("[package]\n\n[lib]\n{lib}\n[lints]\n"))];
            let sources = vec![SourceFile::new("crates/a/src/lib.rs", text)];
            let findings = check(&Workspace { crates: Vec::new(), sources, texts });
            findings.into_iter().map(|finding| finding.line).collect::<Vec<_>>()
        };
        assert_eq!(lines(""), []);
        assert_eq!(lines("test = false\n"), [10]);
        assert_eq!(lines("doctest = false\n"), [4]);
    }
}
