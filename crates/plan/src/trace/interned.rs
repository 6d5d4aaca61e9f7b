//! Names that are `&'static str` in the process that planned, read in the process of a rank.
//!
//! A plan names allocations, kernels and source files by string literals. A launcher sends the plan to its
//! ranks, and what a rank reads lies in a buffer that it drops. So each distinct name is leaked once, here and nowhere
//! else: a program has a few hundred of them, and [`MAX_NAMES`] bounds what a damaged file could leak.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use serde::de::{Deserializer, Error, Visitor};

/// A string literal, or a name that [`interned`] has read.
///
/// The fields that `#[serde(deserialize_with = "interned")]` reads have this type by this name: where serde's derive sees
/// a reference, it demands input that lives forever.
pub type StaticName = &'static str;

/// Largest number of distinct names that a process reads.
const MAX_NAMES: usize = 1 << 16;

/// Largest number of bytes of a name.
const MAX_NAME_BYTES: usize = 4096;

static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// The one copy of `name` that lives as long as the process; `None` when there are too many names or this one is too
/// long.
fn intern(name: &str) -> Option<&'static str> {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return Some(known);
    }
    if names.len() >= MAX_NAMES || name.len() > MAX_NAME_BYTES {
        return None;
    }
    let leaked: &'static str = Box::leak(name.into());
    names.insert(leaked);
    Some(leaked)
}

/// Reads a name.
///
/// # Errors
/// Something else than a text, a text of more than 4,096 bytes, or one name too many.
pub fn interned<'de, D: Deserializer<'de>>(deserializer: D) -> Result<StaticName, D::Error> {
    struct Name;

    impl Visitor<'_> for Name {
        type Value = StaticName;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "a name of at most {MAX_NAME_BYTES} bytes")
        }

        fn visit_str<E: Error>(self, name: &str) -> Result<StaticName, E> {
            let length = name.len();
            intern(name).ok_or_else(|| {
                E::custom(format!(
                    "a name of {length} bytes beyond {MAX_NAMES} names of {MAX_NAME_BYTES} bytes"
                ))
            })
        }
    }

    deserializer.deserialize_str(Name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_leaked_once_and_a_long_one_is_refused() {
        // Two copies at different addresses.
        let copies = ["trace.test".to_string(), "trace.test".to_string()];
        let [first, second] = copies.each_ref().map(|name| intern(name).unwrap());
        assert!(std::ptr::eq(first, second));
        assert_eq!(intern(&"x".repeat(MAX_NAME_BYTES + 1)), None);
    }
}
