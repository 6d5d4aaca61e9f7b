//! The word or path by which a user names a tokenizer.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::{DataError, Result};

const WORDS: [&str; 3] = ["byte", "char", "gpt2"];

/// Which tokenizer, resolved from the user's word but not yet opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSpec {
    /// `byte`: 256 ids.
    Byte,
    /// `char`: the distinct characters of the training text.
    Char,
    /// `gpt2`: byte-pair encoding, 50257 ids.
    Gpt2,
    /// The path of an existing Hugging Face `tokenizer.json`, or of a folder with tokenizer files.
    HuggingFace(PathBuf),
}

impl TokenizerSpec {
    /// Reads `byte`, `char`, `gpt2`, or the path of a `tokenizer.json` or of a folder.
    ///
    /// # Errors
    /// [`DataError::TokenizerMissing`] for a path to nothing, [`DataError::UnknownTokenizer`] with the
    /// nearest word for anything else.
    pub fn from_key(key: &str) -> Result<TokenizerSpec> {
        match key {
            "byte" => return Ok(TokenizerSpec::Byte),
            "char" => return Ok(TokenizerSpec::Char),
            "gpt2" => return Ok(TokenizerSpec::Gpt2),
            _ => {}
        }
        let path = Path::new(key);
        // What is neither file nor folder (such as a pipe) is refused when it is opened, with an error that names its kind.
        if path.exists() {
            Ok(TokenizerSpec::HuggingFace(path.to_path_buf()))
        } else if key.contains(['/', '\\']) || key.ends_with(".json") {
            Err(DataError::TokenizerMissing { path: path.to_path_buf() })
        } else {
            Err(DataError::UnknownTokenizer { given: key.to_string(), nearest: nearest(key) })
        }
    }
}

/// The key that [`TokenizerSpec::from_key`] reads.
impl fmt::Display for TokenizerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenizerSpec::Byte => f.write_str("byte"),
            TokenizerSpec::Char => f.write_str("char"),
            TokenizerSpec::Gpt2 => f.write_str("gpt2"),
            TokenizerSpec::HuggingFace(path) => write!(f, "{}", path.display()),
        }
    }
}

/// The known word that was probably meant: `given` is a prefix of it or at most two edits away.
fn nearest(given: &str) -> Option<&'static str> {
    let given = given.trim().to_lowercase();
    let distance = |word: &str| {
        let begins = given.len() >= 2 && (given.starts_with(word) || word.starts_with(&given));
        if begins { 1 } else { strsim::levenshtein(&given, word) }
    };
    WORDS.into_iter().map(|word| (distance(word), word)).filter(|(d, _)| *d <= 2).min().map(|(_, w)| w)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word() {
        let table = [
            ("bytes", Some("byte")),
            ("Byte", Some("byte")),
            ("bite", Some("byte")),
            ("character", Some("char")),
            ("cahr", Some("char")),
            ("gpt-2", Some("gpt2")),
            ("gpt", Some("gpt2")),
            ("GPT4", Some("gpt2")),
            ("sentencepiece", None),
            ("", None),
        ];
        for (given, expected) in table {
            assert_eq!(nearest(given), expected, "{given}");
        }
    }
}
