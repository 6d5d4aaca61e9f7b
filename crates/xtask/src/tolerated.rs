//! Files that do not follow a rule yet: `crates/xtask/tolerated.txt`, a debt that may only shrink.
//!
//! A line is a rule, a path, and how many findings the rule has there. A file with more findings than its line says is
//! reported with all of them; one with fewer must have its line lowered.

use std::collections::BTreeMap;

use crate::finding::Finding;
use crate::sizes_list::{Entry, parse};

/// The list, from the root.
pub const LIST: &str = "crates/xtask/tolerated.txt";

/// How many findings each rule has in each file, by "rule path", with the line of the first.
pub fn measure(findings: &[Finding]) -> BTreeMap<String, (usize, usize)> {
    let mut counts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for finding in findings {
        let count = counts.entry(name(finding)).or_insert((0, finding.line));
        count.0 += 1;
    }
    counts
}

fn name(finding: &Finding) -> String {
    format!("{} {}", finding.rule, finding.path)
}

/// The findings that the list does not tolerate, and what is wrong about the list.
pub fn untolerated(findings: Vec<Finding>, list: &str) -> Vec<Finding> {
    let measured = measure(&findings);
    let mut about_list = Vec::new();
    let mut tolerated = BTreeMap::new();
    for entry in parse(list) {
        let (line, what) = match entry {
            Err(at) => (at, "this is no entry: write a rule, a path and a count".to_string()),
            Ok(Entry { name, lines: allowed, at }) => {
                tolerated.insert(name, allowed);
                match measured.get(name) {
                    None => (at, format!("{name} has nothing to tolerate any more: remove its entry")),
                    Some(&(count, _)) if count < allowed => {
                        (at, format!("{name} is down to {count}: lower its entry (--shrink does it)"))
                    }
                    Some(_) => continue,
                }
            }
        };
        about_list.push(Finding { path: LIST.to_string(), line, rule: "tolerated", what });
    }
    let is_tolerated = |finding: &Finding| {
        let name = name(finding);
        tolerated.get(name.as_str()).is_some_and(|allowed| measured[&name].0 <= *allowed)
    };
    findings.into_iter().filter(|finding| !is_tolerated(finding)).chain(about_list).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(counts: &[(&'static str, &str, usize)]) -> Vec<Finding> {
        let of_file = |(rule, path, count): &(&'static str, &str, usize)| {
            let one = |line| Finding { path: path.to_string(), line, rule, what: "wrong".into() };
            (1..=*count).map(one).collect::<Vec<_>>()
        };
        counts.iter().flat_map(of_file).collect()
    }

    #[test]
    fn the_list_only_shrinks() {
        let list = "# Debt.\nwording a.rs 2\nsignatures a.rs 1\n";
        for (counts, expected) in [
            (vec![("wording", "a.rs", 2), ("signatures", "a.rs", 1)], vec![]),
            // One more than tolerated: all are shown, since nobody knows which is new.
            (vec![("wording", "a.rs", 3), ("signatures", "a.rs", 1)], vec!["a.rs", "a.rs", "a.rs"]),
            (vec![("wording", "a.rs", 1), ("signatures", "a.rs", 1)], vec![LIST]),
            (vec![("wording", "a.rs", 2)], vec![LIST]),
            (vec![("wording", "a.rs", 2), ("signatures", "a.rs", 1), ("wording", "b.rs", 1)], vec!["b.rs"]),
        ] {
            let left = untolerated(findings(&counts), list);
            let paths: Vec<&str> = left.iter().map(|finding| finding.path.as_str()).collect();
            assert_eq!(paths, expected, "{counts:?}");
        }
        assert_eq!(untolerated(Vec::new(), "what is this\n").len(), 1);
    }
}
