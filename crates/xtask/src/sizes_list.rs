//! The list of what is larger than it should be: `crates/xtask/sizes.txt`, a debt that may only shrink.
//!
//! A line is a path or `path::function`, and its lines. `#` begins a comment.

use std::collections::BTreeMap;

/// An entry of the list.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    pub name: &'a str,
    pub lines: usize,
    /// Where in the list, from 1.
    pub at: usize,
}

/// The entries, or for a line that is none, its number.
pub fn parse(list: &str) -> Vec<Result<Entry<'_>, usize>> {
    (1..)
        .zip(list.lines())
        .map(|(at, text)| (at, text.split('#').next().unwrap_or(text).trim()))
        .filter(|(_, text)| !text.is_empty())
        .map(|(at, text)| {
            let (name, lines) = text.rsplit_once(char::is_whitespace).ok_or(at)?;
            let lines = lines.parse().map_err(|_| at)?;
            Ok(Entry { name: name.trim(), lines, at })
        })
        .collect()
}

/// The list with entries lowered to what `measured` says and those that it does not name dropped; comments
/// stay, and nothing is added or raised.
pub fn shrink(list: &str, measured: &BTreeMap<String, (usize, usize)>) -> String {
    let mut shrunk = String::new();
    for line in list.lines() {
        match parse(line).pop() {
            Some(Ok(entry)) => {
                if let Some(&(lines, _)) = measured.get(entry.name) {
                    let old = entry.lines.to_string();
                    let new = entry.lines.min(lines).to_string();
                    let at = line[entry.name.len()..].find(&old).map_or(0, |at| at + entry.name.len());
                    shrunk.push_str(&format!("{}{new}{}\n", &line[..at], &line[at + old.len()..]));
                }
            }
            _ => shrunk.push_str(&format!("{line}\n")),
        }
    }
    shrunk
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# Debt.\n\na/b.rs 600\na/b.rs::f 71 # a reason\nwhat is this\n";

    #[test]
    fn entries_and_noise() {
        let entry = |name, lines, at| Ok(Entry { name, lines, at });
        assert_eq!(parse(LIST), [entry("a/b.rs", 600, 3), entry("a/b.rs::f", 71, 4), Err(5)]);
    }

    #[test]
    fn shrinking_lowers_and_drops_and_never_raises() {
        let measured = |entries: &[(&str, usize)]| {
            entries.iter().map(|&(name, lines)| (name.to_string(), (lines, 1))).collect()
        };
        let tail = "what is this\n";
        let shrunk = shrink(LIST, &measured(&[("a/b.rs", 550)]));
        assert_eq!(shrunk, format!("# Debt.\n\na/b.rs 550\n{tail}"));
        let shrunk = shrink(LIST, &measured(&[("a/b.rs", 700), ("a/b.rs::f", 71), ("c.rs", 900)]));
        assert_eq!(shrunk, LIST);
    }
}
