//! Special tokens that are spelled inside a text. transformers reads them as special tokens; `gpt2`, `byte` and `char`
//! read them as plain text. So they are counted and reported, once for all documents.

use std::collections::BTreeMap;

use super::hugging_face_files::{END_OF_TEXT, MASK};
use super::{Algorithm, Tokenizer};

/// Counts of the special tokens that texts spell, and of the ids that stand for unknown text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spelled {
    counts: BTreeMap<String, u64>,
    unknown: u64,
}

impl Spelled {
    /// Adds the counts of another part of the text.
    pub fn add(&mut self, other: Spelled) {
        for (token, count) in other.counts {
            *self.counts.entry(token).or_default() += count;
        }
        self.unknown += other.unknown;
    }

    /// Number of times that a token was spelled.
    pub fn count(&self, token: &str) -> u64 {
        self.counts.get(token).copied().unwrap_or(0)
    }
}

/// Spellings that an export of `gpt2`, `byte` and `char` makes special.
const OF_EXPORTS: [&str; 2] = [END_OF_TEXT, MASK];

impl Tokenizer {
    /// Counts the special tokens that are spelled in `text` and read as plain text; not those that end in its first `known`
    /// bytes.
    pub(crate) fn spelled_in(&self, text: &str, known: usize) -> Spelled {
        let mut spelled = Spelled::default();
        let mut count = |token: &str| {
            let ends = text.match_indices(token).map(|(start, _)| start + token.len());
            let times = ends.filter(|end| *end > known).count() as u64;
            if times > 0 {
                spelled.counts.insert(token.to_string(), times);
            }
        };
        match &*self.algorithm {
            Algorithm::HuggingFace(opened) if opened.reads_special_as_plain() => {
                opened.library.added().iter().for_each(|(_, token)| count(token));
            }
            Algorithm::HuggingFace(_) => {}
            _ => OF_EXPORTS.iter().for_each(|token| count(token)),
        }
        spelled
    }

    /// Counts the ids of text that are special tokens, where texts may spell them, or stand for unknown text.
    pub(crate) fn spelled_by_ids(&self, ids: &[u32]) -> Spelled {
        let mut spelled = Spelled::default();
        let Algorithm::HuggingFace(opened) = &*self.algorithm else { return spelled };
        let unknown = opened.unknown_id();
        spelled.unknown = ids.iter().filter(|id| Some(**id) == unknown).count() as u64;
        if !opened.reads_special_as_plain() {
            let added = opened.added_ids();
            let known = ids.iter().filter(|id| Some(**id) != unknown);
            for token in known.filter_map(|id| added.get(id)) {
                *spelled.counts.entry(token.clone()).or_default() += 1;
            }
        }
        spelled
    }

    /// Describes these counts to people, in at most two lines.
    pub fn describe_spelled(&self, spelled: &Spelled) -> Vec<String> {
        let mut lines = Vec::new();
        let total: u64 = spelled.counts.values().sum();
        if total > 0 {
            let shown: Vec<String> =
                spelled.counts.iter().map(|(token, count)| format!("{token:?} {count} times")).collect();
            let how = match &*self.algorithm {
                Algorithm::HuggingFace(opened) if !opened.reads_special_as_plain() => {
                    "read as these tokens, as transformers does (to read them as text, set split_special_tokens = true in \
                     tokenizer_config.json)"
                }
                Algorithm::HuggingFace(_) => {
                    "read as plain text (split_special_tokens), as transformers does"
                }
                _ => "read as plain text, where transformers reads an exported tokenizer's special tokens",
            };
            lines.push(format!("the text spells special tokens, {}: {how}", shown.join(", ")));
        }
        if spelled.unknown > 0 {
            let count = spelled.unknown;
            lines.push(format!(
                "{count} tokens are the one for unknown text: the vocabulary has no others for them"
            ));
        }
        lines
    }
}

/// The last position in `text` that is not inside of something that may become a special token's spelling.
pub(super) fn last_cut(text: &str) -> usize {
    let begins = |token: &&str| (1..token.len()).rev().find(|length| text.ends_with(&token[..*length]));
    text.len() - OF_EXPORTS.iter().filter_map(begins).max().unwrap_or(0)
}
