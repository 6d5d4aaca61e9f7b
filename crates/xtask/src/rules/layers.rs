//! ARCHITECTURE.md's drawing of the rooms is true: every crate stands in it once, and imports only crates below it.
//!
//! The drawing is the first fenced block under the heading with the word "layers". A line is a layer; a crate is a name
//! in square brackets. What `Cargo.toml` says a crate needs for its tests alone does not count.

use std::collections::BTreeMap;

use super::imports::room;
use super::rooms::MAP;
use crate::finding::Finding;
use crate::manifest::dependencies;
use crate::workspace::Workspace;

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let finding = |line, what| Finding { path: MAP.to_string(), line, rule: "layers", what };
    let boxes = boxes(workspace.text(MAP).unwrap_or_default());
    if boxes.is_empty() {
        let what = "no drawing under a heading with the word \"layers\": add a fenced block with a [crate] for each crate";
        return vec![finding(1, what.to_string())];
    }
    let mut lines: BTreeMap<&str, usize> = BTreeMap::new();
    let mut findings = Vec::new();
    for (name, line) in boxes {
        if lines.insert(name, line).is_some() {
            findings.push(finding(line, format!("[{name}] is drawn twice")));
        }
        if workspace.crates.iter().all(|known| known != name) {
            findings.push(finding(line, format!("crates/{name} does not exist: remove its box")));
        }
    }
    let last = lines.values().copied().max().unwrap_or(1);
    for name in &workspace.crates {
        let Some(&line) = lines.get(name.as_str()) else {
            findings.push(finding(
                last,
                format!("crates/{name} is not drawn: add [{name}] above all that it imports"),
            ));
            continue;
        };
        let manifest = workspace.text(&format!("crates/{name}/Cargo.toml")).unwrap_or_default();
        for (dependency, _) in dependencies(manifest) {
            let below = room(&dependency).and_then(|room| lines.get(room));
            if below.is_some_and(|below| *below <= line) {
                let what = format!("[{name}] imports {dependency}, which is not drawn below it");
                findings.push(finding(line, what));
            }
        }
    }
    findings
}

/// The names in brackets of the drawing, with their lines.
fn boxes(map: &str) -> Vec<(&str, usize)> {
    let mut boxes = Vec::new();
    let (mut under_heading, mut inside) = (false, false);
    for (line, text) in (1..).zip(map.lines()) {
        if text.starts_with("```") {
            if inside {
                break;
            }
            inside = under_heading;
        } else if text.starts_with('#') && !inside {
            under_heading = text.to_lowercase().contains("layers");
        } else if inside {
            let names = text.split('[').skip(1).filter_map(|rest| rest.split_once(']'));
            boxes.extend(names.map(|(name, _)| (name, line)));
        }
    }
    boxes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A workspace of three crates, `top` on `middle` on `bottom`, with this drawing.
    fn workspace(drawing: &str) -> Workspace {
        let manifest = |name: &str, dependencies: &str| {
            (format!("crates/{name}/Cargo.toml"), format!("[dependencies]\n{dependencies}"))
        };
        let map = format!("# Map\n```\n[elsewhere]\n```\n## Crates in layers\n```text\n{drawing}```\n");
        Workspace {
            crates: ["bottom", "middle", "top"].map(str::to_string).into(),
            sources: Vec::new(),
            texts: vec![
                (MAP.to_string(), map),
                manifest("bottom", "serde = \"1\"\n[dev-dependencies]\nphalanx-top.workspace = true\n"),
                manifest("middle", "phalanx-bottom.workspace = true\n"),
                manifest("top", "phalanx-middle.workspace = true\nphalanx-bottom.workspace = true\n"),
            ],
        }
    }

    #[test]
    fn every_crate_is_drawn_once_above_what_it_imports() {
        for (drawing, expected) in [
            ("| [top] |\n| [middle] |\n| [bottom] |\n", vec![]),
            ("[top] [middle]\n[bottom]\n", vec![(7, "[top] imports phalanx-middle")]),
            ("[top]\n[bottom]\n[middle]\n", vec![(9, "[middle] imports phalanx-bottom")]),
            ("[top]\n[bottom]\n", vec![(8, "crates/middle is not drawn")]),
            ("[top]\n[middle] [gone]\n[bottom] [bottom]\n", vec![(8, "crates/gone"), (9, "drawn twice")]),
        ] {
            let found = check(&workspace(drawing));
            assert_eq!(found.len(), expected.len(), "{drawing}: {found:?}");
            for (finding, (line, words)) in found.iter().zip(expected) {
                assert!(finding.line == line && finding.what.contains(words), "{drawing}: {finding:?}");
            }
        }
        let mut none = workspace("");
        none.texts.clear();
        assert_eq!(check(&none).len(), 1);
    }
}
