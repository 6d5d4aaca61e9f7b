//! The known name that a person most likely meant.

/// The candidate with the fewest insertions, deletions and replacements from `wanted`; the first of
/// several. `None` only without candidates.
pub(crate) fn nearest<'a>(wanted: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates.min_by_key(|candidate| distance(wanted, candidate))
}

/// Levenshtein distance in characters, one row at a time.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_and_choices() {
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("same", "same"), 0);
        let known = ["h.0.attn.weight", "h.0.attn.bias", "wte.weight"];
        assert_eq!(nearest("wte.wieght", known.into_iter()), Some("wte.weight"));
        assert_eq!(nearest("h.0.attn.biass", known.into_iter()), Some("h.0.attn.bias"));
        assert_eq!(nearest("x", [].into_iter()), None);
    }
}
