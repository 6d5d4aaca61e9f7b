//! Finds the known name that is closest to a mistyped one.

/// The candidate with the fewest insertions, deletions and replacements from `wanted`; the first of
/// several. `None` only without candidates.
pub(crate) fn nearest<'a>(wanted: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates.min_by_key(|candidate| strsim::levenshtein(wanted, candidate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_that_was_meant() {
        let known = ["h.0.attn.weight", "h.0.attn.bias", "wte.weight"];
        assert_eq!(nearest("wte.wieght", known.into_iter()), Some("wte.weight"));
        assert_eq!(nearest("h.0.attn.biass", known.into_iter()), Some("h.0.attn.bias"));
        assert_eq!(nearest("x", [].into_iter()), None);
    }
}
