//! The words that a key of the configuration takes: what its type says when it is given a word that it does not have.

use std::fmt;
use std::iter::once;

use phalanx_train::RunConfig;
use serde::Deserialize;
use serde::de::value::{MapDeserializer, StrDeserializer};
use serde::de::{Error, IntoDeserializer};

/// Why a word is refused: the words that are known, where the key has a choice of words.
#[derive(Debug)]
struct Refusal(Option<&'static [&'static str]>);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a value of this key")
    }
}

impl std::error::Error for Refusal {}

impl Error for Refusal {
    fn custom<T: fmt::Display>(_: T) -> Refusal {
        Refusal(None)
    }

    fn unknown_variant(_: &str, known: &'static [&'static str]) -> Refusal {
        Refusal(Some(known))
    }
}

/// The words that `table.key` takes; None for a key that takes any text, or no text.
pub fn of(key: &str) -> Option<&'static [&'static str]> {
    let (table, key) = key.split_once('.')?;
    // No choice has an empty word.
    let word: StrDeserializer<Refusal> = "".into_deserializer();
    let keys = MapDeserializer::new(once((key, word)));
    let tables = MapDeserializer::new(once((table, keys)));
    RunConfig::deserialize(tables).err()?.0
}

/// The words as a message lists them: `"a" or "b"`, `"a", "b", "c"`.
pub fn list(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    if quoted.len() == 2 { quoted.join(" or ") } else { format!("one of {}", quoted.join(", ")) }
}
