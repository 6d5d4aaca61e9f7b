//! One id for each distinct character of a text, in code point order, as nanoGPT's character-level
//! `prepare.py` numbers them.

use std::fmt;

use crate::{Corpus, DataError, Result};

const NOT_IN_VOCABULARY: u32 = u32::MAX;
const CODE_POINTS: usize = char::MAX as usize + 1;

/// Sorted distinct characters; the id of a character is its index.
pub(super) struct CharVocabulary {
    chars: Vec<char>,
    /// The ids of the ASCII characters, for speed; others are found by binary search.
    ascii: [u32; 128],
}

impl CharVocabulary {
    /// The characters of `text`.
    pub(super) fn of_text(text: &str) -> CharVocabulary {
        let mut seen = vec![false; CODE_POINTS];
        mark(&mut seen, text);
        CharVocabulary::of_seen(&seen)
    }

    /// The characters of all documents, which are read once.
    pub(super) fn of_corpus(corpus: &Corpus) -> Result<CharVocabulary> {
        let mut seen = vec![false; CODE_POINTS];
        for document in corpus.documents() {
            document.for_each_part(&|text| text.len(), &mut |text, _| {
                mark(&mut seen, text);
                Ok(())
            })?;
        }
        Ok(CharVocabulary::of_seen(&seen))
    }

    /// The vocabulary that [`fmt::Display`] wrote. The error is a reason to print.
    pub(super) fn from_chars(chars: &str) -> Result<CharVocabulary, String> {
        let chars: Vec<char> = chars.chars().collect();
        if chars.is_empty() {
            return Err("its list of chars is empty".to_string());
        }
        match chars.windows(2).find(|pair| pair[0] >= pair[1]) {
            Some(pair) => Err(format!("its chars are not in order and distinct: {pair:?}")),
            None => Ok(CharVocabulary::of_sorted(chars)),
        }
    }

    fn of_seen(seen: &[bool]) -> CharVocabulary {
        let chars =
            (0u32..).zip(seen).filter(|(_, seen)| **seen).filter_map(|(code, _)| char::from_u32(code));
        CharVocabulary::of_sorted(chars.collect())
    }

    fn of_sorted(chars: Vec<char>) -> CharVocabulary {
        let mut ascii = [NOT_IN_VOCABULARY; 128];
        for (id, char) in (0..).zip(&chars) {
            if char.is_ascii() {
                ascii[*char as usize] = id;
            }
        }
        CharVocabulary { chars, ascii }
    }

    pub(super) fn len(&self) -> usize {
        self.chars.len()
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len());
        for (position, character) in text.char_indices() {
            let id = self.id(character);
            if id == NOT_IN_VOCABULARY {
                return Err(DataError::UnknownCharacter { character, position, vocab: self.len() });
            }
            ids.push(id);
        }
        Ok(ids)
    }

    pub(super) fn decode(&self, ids: &[u32]) -> String {
        let char = |id: &u32| self.chars.get(*id as usize).copied();
        ids.iter().map(|id| char(id).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    }

    fn id(&self, character: char) -> u32 {
        match self.ascii.get(character as usize) {
            Some(&id) => id,
            None => self.chars.binary_search(&character).map_or(NOT_IN_VOCABULARY, |place| place as u32),
        }
    }
}

/// The characters in order, without anything between.
impl fmt::Display for CharVocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.chars.iter().try_for_each(|char| write!(f, "{char}"))
    }
}

fn mark(seen: &mut [bool], text: &str) {
    for character in text.chars() {
        seen[character as usize] = true;
    }
}
