//! ARCHITECTURE.md's map of rooms is the map: one row for each folder of `crates/`, and no other.

use std::collections::BTreeMap;

use crate::finding::Finding;

/// The file with the map, from the root.
pub const MAP: &str = "ARCHITECTURE.md";

pub fn check(crates: &[String], map: Option<&str>) -> Vec<Finding> {
    let finding = |line, what| Finding { path: MAP.to_string(), line, rule: "rooms", what };
    let Some(map) = map else {
        return vec![finding(1, "there is no map: write it, with a table of rooms under a heading".into())];
    };
    let rows = rows(map);
    if rows.is_empty() {
        let what = "no table under a heading with the word \"rooms\": add one, | `crate` | what it holds |";
        return vec![finding(1, what.to_string())];
    }
    let first = *rows.values().min().unwrap_or(&1);
    let missing = crates.iter().filter(|name| !rows.contains_key(name.as_str())).map(|name| {
        finding(first, format!("crates/{name} is not on the map: add the row | `{name}` | ... |"))
    });
    let stale =
        rows.iter().filter(|(name, _)| crates.iter().all(|known| known != *name)).map(|(name, &line)| {
            finding(line, format!("crates/{name} does not exist: remove or correct the row"))
        });
    missing.chain(stale).collect()
}

/// Names in backticks in the first cells of the table under the heading with "rooms", with their lines.
fn rows(map: &str) -> BTreeMap<&str, usize> {
    let mut rows = BTreeMap::new();
    let mut inside = false;
    for (line, text) in (1..).zip(map.lines()) {
        if text.starts_with('#') {
            inside = text.to_lowercase().contains("rooms");
        }
        if let Some(cells) = text.trim().strip_prefix('|').filter(|_| inside) {
            let cell = cells.split('|').next().unwrap_or(cells);
            for name in cell.split('`').skip(1).step_by(2) {
                rows.insert(name.strip_prefix("crates/").unwrap_or(name).trim_end_matches('/'), line);
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP_TEXT: &str = "\
# Architecture
| `elsewhere` | not a room |
## The map of rooms
| crate | holds |
|---|---|
| `crates/a/` | one |
| `b`, `gone` | two |
## Next
| `other` | no |
";

    #[test]
    fn missing_and_stale_rows() {
        let crates = ["a", "b", "c"].map(str::to_string);
        let found = check(&crates, Some(MAP_TEXT));
        let found: Vec<_> = found.iter().map(|finding| (finding.line, finding.what.as_str())).collect();
        assert_eq!(
            found,
            [
                (6, "crates/c is not on the map: add the row | `c` | ... |"),
                (7, "crates/gone does not exist: remove or correct the row"),
            ]
        );
        assert_eq!(check(&crates, None).len(), 1);
        assert_eq!(check(&crates, Some("# Nothing\n")).len(), 1);
    }
}
