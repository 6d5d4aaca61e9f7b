//! The integration tests of a crate are one program: a file of `tests/` that its `main.rs` does not name would never run.

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
}
