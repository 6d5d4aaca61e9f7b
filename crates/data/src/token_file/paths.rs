//! The files that a list of paths and patterns names, in an order that depends on their names alone.
//!
//! A pattern is what a shell understands within one folder name or file name: `*`, `?`, `[a-z]`, `[!a-z]`. A path that exists
//! is never taken for a pattern.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::megatron;
use crate::limits::TOKEN_FILES;
use crate::{DataError, Result, TokenFilesError};

/// Replaces each pattern by the files that match it, sorted by name; the entries themselves stay in their order. Of a pair of
/// Megatron's that a pattern matches, the `.idx` is left out.
///
/// # Errors
/// [`TokenFilesError::NoMatch`] for a pattern that no file matches, [`TokenFilesError::TooManyFiles`], those of reading a folder.
pub fn token_paths(entries: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in entries {
        match is_pattern(entry) && !entry.exists() {
            true => paths.extend(matching(entry)?),
            false => paths.push(entry.clone()),
        }
        if paths.len() > TOKEN_FILES {
            return Err(TokenFilesError::TooManyFiles { given: paths.len(), max: TOKEN_FILES }.into());
        }
    }
    Ok(paths)
}

fn is_pattern(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().iter().any(|byte| b"*?[".contains(byte))
}

fn matching(pattern: &Path) -> Result<Vec<PathBuf>> {
    let no_match =
        |reason: String| DataError::from(TokenFilesError::NoMatch { pattern: pattern.to_path_buf(), reason });
    let mut found = vec![PathBuf::new()];
    for part in pattern.components() {
        let name = part.as_os_str();
        if !matches!(part, Component::Normal(_)) || !is_pattern(Path::new(name)) {
            found.iter_mut().for_each(|path| path.push(name));
            continue;
        }
        if name == "**" {
            return Err(no_match("** is not understood: write one * for each folder".to_string()));
        }
        let wanted = name.as_encoded_bytes();
        let mut next = Vec::new();
        for folder in &found {
            next.extend(entries(folder, wanted)?);
        }
        found = next;
    }
    let mut files: Vec<PathBuf> = found.into_iter().filter(|path| path.exists()).collect();
    files.sort();
    let data: Vec<PathBuf> = files.iter().map(|path| megatron::data_path(path)).collect();
    let is_half = |at: usize| data[at] != files[at] && files.contains(&data[at]);
    let whole: Vec<PathBuf> =
        (0..files.len()).filter(|at| !is_half(*at)).map(|at| files[at].clone()).collect();
    if whole.is_empty() {
        return Err(no_match("no file has such a name".to_string()));
    }
    Ok(whole)
}

/// The entries of a folder whose names match; hidden ones only where the pattern begins with a dot.
fn entries(folder: &Path, wanted: &[u8]) -> Result<Vec<PathBuf>> {
    let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    if !here.is_dir() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(here).map_err(DataError::reading(here))? {
        let name = entry.map_err(DataError::reading(here))?.file_name();
        let bytes = name.as_encoded_bytes();
        if bytes.starts_with(b".") == wanted.starts_with(b".") && is_match(wanted, bytes) {
            found.push(folder.join(name));
        }
    }
    Ok(found)
}

/// Returns whether a pattern of a shell (`*`, `?`, `[abc]`, `[a-z]`) matches a whole name. If the part behind a `*` fails, only the last
/// `*` takes one byte more, so the time is bounded.
pub fn is_match(pattern: &[u8], name: &[u8]) -> bool {
    let (mut wanted, mut left) = (pattern, name);
    let mut star = None;
    loop {
        if let [b'*', rest @ ..] = wanted {
            (star, wanted) = (Some((rest, left)), rest);
        } else if let Some((rest, others)) =
            left.split_first().and_then(|(byte, others)| Some((behind(wanted, *byte)?, others)))
        {
            (wanted, left) = (rest, others);
        } else if wanted.is_empty() && left.is_empty() {
            return true;
        } else {
            let Some((rest, [_, others @ ..])) = star else { return false };
            (star, wanted, left) = (Some((rest, others)), rest, others);
        }
    }
}

/// The pattern behind its first element, if that matches `byte`.
fn behind(pattern: &[u8], byte: u8) -> Option<&[u8]> {
    let (first, rest) = pattern.split_first()?;
    let end = rest.iter().skip(1).position(|byte| *byte == b']');
    match (first, end) {
        (b'?', _) => Some(rest),
        (b'[', Some(end)) => is_in(&rest[..=end], byte).then(|| &rest[end + 2..]),
        (first, _) => (*first == byte).then_some(rest),
    }
}

/// Returns whether the set between brackets has a byte.
fn is_in(set: &[u8], byte: u8) -> bool {
    let (mut set, wanted) = match set {
        [b'!' | b'^', rest @ ..] if !rest.is_empty() => (rest, false),
        _ => (set, true),
    };
    while let [first, rest @ ..] = set {
        let (last, behind) = match rest {
            [b'-', last, behind @ ..] => (last, behind),
            _ => (first, rest),
        };
        if (first..=last).contains(&&byte) {
            return wanted;
        }
        set = behind;
    }
    !wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, matched, others) in [
            ("*.bin", vec!["a.bin", ".bin"], vec!["a.bins", "abin", ""]),
            ("a?c", vec!["abc", "a-c"], vec!["ac", "abbc"]),
            ("*_train_*.bin", vec!["x_train_000.bin", "_train_.bin"], vec!["x_val_000.bin"]),
            ("s[0-3x].bin", vec!["s0.bin", "s3.bin", "sx.bin"], vec!["s4.bin", "s.bin", "s-.bin"]),
            ("s[!0-3].bin", vec!["s4.bin", "sx.bin"], vec!["s0.bin", "s2.bin"]),
            ("a[]b", vec!["a[]b"], vec!["ab", "axb"]),
            ("a[-]b", vec!["a-b"], vec!["a[b"]),
        ] {
            for name in matched {
                assert!(is_match(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
            }
            for name in others {
                assert!(!is_match(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
            }
        }
    }
}
