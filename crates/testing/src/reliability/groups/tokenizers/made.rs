//! Tokenizers that are made at random, each with an encoder of its own that is a few lines long: the vocabularies are of a
//! text of lower-case words alone, so that splits and normalisers have nothing to do that is not written here.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::hostile::Random;

/// Words of the texts.
pub(super) const WORDS: [&str; 10] =
    ["chunk", "rank", "shard", "gather", "reduce", "step", "plan", "arena", "ring", "tensor"];

/// Spellings of a token that ends a text: some are known anywhere, some only from the folder's files.
const ENDS: [&str; 6] = ["</s>", "[EOS]", "<|im_end|>", "<|endoftext|>", "<fim-des-textes>", "<eos>"];

/// The family of the model in a `tokenizer.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One id a word.
    WordLevel,
    /// The longest piece that fits, continued pieces behind `##`.
    WordPiece,
    /// Byte-level byte-pair encoding, as GPT-2.
    ByteLevel,
    /// Single characters, and `▁` for spaces and before the first word, as SentencePiece.
    Unigram,
}

pub(super) const KINDS: [Kind; 4] = [Kind::WordLevel, Kind::WordPiece, Kind::ByteLevel, Kind::Unigram];

/// A tokenizer.
pub(super) struct Made {
    pub(super) kind: Kind,
    /// Spelling to id; ids may have holes.
    pub(super) vocab: BTreeMap<String, u32>,
    /// Pairs to merge, the earlier first.
    merges: Vec<(String, String)>,
    /// True if a byte-level tokenizer puts a space before the first word.
    pub(super) prefix_space: bool,
    /// The token that ends a text, in the vocabulary.
    pub(super) end: String,
    /// Another special token, which no text uses.
    pub(super) other: String,
}

impl Made {
    pub(super) fn new(kind: Kind, random: &mut Random) -> Made {
        let mut merges = Vec::new();
        let mut spellings: Vec<String> = match kind {
            Kind::WordLevel => WORDS.map(String::from).to_vec(),
            Kind::WordPiece => pieces(random),
            Kind::ByteLevel => {
                merges = pairs(random);
                let merged = merges.iter().map(|(a, b)| format!("{a}{b}"));
                letters().chain(["Ġ", "Ċ"].map(String::from)).chain(merged).collect()
            }
            Kind::Unigram => letters().chain(["▁", "\n"].map(String::from)).collect(),
        };
        spellings.sort();
        spellings.dedup();
        let end = (*random.pick(&ENDS)).to_string();
        let other = "<unused-role>".to_string();
        spellings.extend([end.clone(), other.clone(), UNKNOWN.to_string()]);
        random.shuffle(&mut spellings);
        // The ids of a Unigram are places in a list; those of the others may have holes.
        let hole = if kind == Kind::Unigram { 0 } else { random.below(3) as u32 };
        let mut next = 0;
        let mut vocab = BTreeMap::new();
        for spelling in spellings {
            vocab.insert(spelling, next);
            next += 1 + if random.chance(0.1) { hole } else { 0 };
        }
        let prefix_space = kind == Kind::ByteLevel && random.chance(0.5);
        Made { kind, vocab, merges, prefix_space, end, other }
    }

    /// One more than the largest id.
    pub(super) fn ids(&self) -> usize {
        self.vocab.values().max().map_or(0, |id| *id as usize + 1)
    }

    pub(super) fn id(&self, spelling: &str) -> u32 {
        self.vocab[spelling]
    }

    /// The ids of a text of words.
    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        let spelled: Vec<String> = match self.kind {
            Kind::WordLevel => text.split_whitespace().map(String::from).collect(),
            Kind::WordPiece => text.split_whitespace().flat_map(|word| self.longest_pieces(word)).collect(),
            Kind::ByteLevel => {
                let first = if self.prefix_space { " " } else { "" };
                let spaced = format!("{first}{text}").replace(' ', "Ġ").replace('\n', "Ċ");
                words_and_marks(&spaced).into_iter().flat_map(|word| self.merged(word)).collect()
            }
            Kind::Unigram => format!(" {text}").replace(' ', "▁").chars().map(String::from).collect(),
        };
        spelled
            .iter()
            .map(|piece| self.id(self.vocab.get_key_value(piece).map_or(UNKNOWN, |(key, _)| key)))
            .collect()
    }

    fn longest_pieces(&self, word: &str) -> Vec<String> {
        let mut found = Vec::new();
        let mut rest = word;
        while !rest.is_empty() {
            let mark = if found.is_empty() { "" } else { "##" };
            let fits = (1..=rest.len())
                .rev()
                .find(|end| self.vocab.contains_key(&format!("{mark}{}", &rest[..*end])));
            let Some(end) = fits else { return vec![UNKNOWN.to_string()] };
            found.push(format!("{mark}{}", &rest[..end]));
            rest = &rest[end..];
        }
        found
    }

    /// The letters of a word, of which the earliest pair of the list is merged as long as there is one.
    fn merged(&self, word: &str) -> Vec<String> {
        let mut parts: Vec<String> = word.chars().map(String::from).collect();
        loop {
            let rank =
                |at: usize| self.merges.iter().position(|(a, b)| *a == parts[at] && *b == parts[at + 1]);
            let places = 0..parts.len().saturating_sub(1);
            let Some((_, at)) = places.filter_map(|at| Some((rank(at)?, at))).min() else { return parts };
            let second = parts.remove(at + 1);
            parts[at].push_str(&second);
        }
    }

    /// `tokenizer.json`.
    pub(super) fn file(&self) -> Value {
        let mut added: Vec<Value> = [&self.end, &self.other]
            .map(|content| {
                json!({"id": self.id(content), "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false, "special": true})
            })
            .to_vec();
        added.sort_by_key(|token| token["id"].as_u64());
        let (split, model, decoder) = match self.kind {
            Kind::WordLevel => (
                json!({"type": "WhitespaceSplit"}),
                json!({"type": "WordLevel", "vocab": self.vocab, "unk_token": UNKNOWN}),
                Value::Null,
            ),
            Kind::WordPiece => (
                json!({"type": "WhitespaceSplit"}),
                json!({"type": "WordPiece", "unk_token": UNKNOWN, "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100, "vocab": self.vocab}),
                json!({"type": "WordPiece", "prefix": "##", "cleanup": false}),
            ),
            Kind::ByteLevel => {
                let bytes = json!({"type": "ByteLevel", "add_prefix_space": self.prefix_space, "trim_offsets": true,
                                   "use_regex": true});
                let merges: Vec<String> = self.merge_lines();
                let model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                                   "vocab": self.vocab, "merges": merges});
                (bytes.clone(), model, bytes)
            }
            Kind::Unigram => {
                let mut list: Vec<(&String, &u32)> = self.vocab.iter().collect();
                list.sort_by_key(|(_, id)| **id);
                let scored: Vec<Value> = list.iter().map(|(piece, _)| json!([piece, -1.0])).collect();
                let spaces = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
                let model = json!({"type": "Unigram", "unk_id": self.id(UNKNOWN), "vocab": scored, "byte_fallback": false});
                (spaces.clone(), model, spaces)
            }
        };
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
               "pre_tokenizer": split, "post_processor": null, "decoder": decoder, "model": model})
    }

    /// `merges.txt` without its first line.
    pub(super) fn merge_lines(&self) -> Vec<String> {
        self.merges.iter().map(|(a, b)| format!("{a} {b}")).collect()
    }
}

/// The token for what is in no vocabulary.
const UNKNOWN: &str = "<unk>";

fn letters() -> impl Iterator<Item = String> {
    ('a'..='z').map(String::from)
}

/// Words with the letters between marks for spaces and line ends; a mark for a space begins the word behind it.
fn words_and_marks(text: &str) -> Vec<&str> {
    let starts = text.char_indices().filter(|(_, character)| "ĠĊ".contains(*character)).map(|(at, _)| at);
    let mut edges: Vec<usize> = std::iter::once(0).chain(starts).chain([text.len()]).collect();
    edges.dedup();
    edges.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// Each word whole or in two parts, and all letters, so that every word can be spelled.
fn pieces(random: &mut Random) -> Vec<String> {
    let mut pieces: Vec<String> = letters().chain(letters().map(|letter| format!("##{letter}"))).collect();
    for word in WORDS {
        let at = 1 + random.below(word.len() - 1);
        match random.below(3) {
            0 => pieces.push(word.to_string()),
            1 => pieces.extend([word[..at].to_string(), format!("##{}", &word[at..])]),
            _ => {}
        }
    }
    pieces
}

/// Merges of letters within the words, each of two parts that are there when it comes.
fn pairs(random: &mut Random) -> Vec<(String, String)> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for word in WORDS {
        let mut parts: Vec<String> = word.chars().map(String::from).collect();
        for _ in 0..random.below(parts.len()) {
            let at = random.below(parts.len() - 1);
            let pair = (parts[at].clone(), parts[at + 1].clone());
            let second = parts.remove(at + 1);
            parts[at].push_str(&second);
            // One spelling has one pair: the ids of a vocabulary are of spellings.
            if pairs.iter().all(|(a, b)| format!("{a}{b}") != parts[at]) {
                pairs.push(pair);
            }
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The encoders against ids that were written by hand.
    #[test]
    fn encoders_give_the_ids_that_the_rules_say() {
        let vocab = |words: &[&str]| words.iter().map(|word| word.to_string()).zip(0..).collect();
        let merges = [("a", "n"), ("r", "an")].map(|(a, b)| (a.to_string(), b.to_string())).to_vec();
        let made = |kind, words: &[&str], prefix_space| Made {
            kind,
            vocab: vocab(words),
            merges: merges.clone(),
            prefix_space,
            end: String::new(),
            other: String::new(),
        };
        let bytes = ["Ġ", "Ċ", "r", "a", "n", "k", "an", "ran"];
        for (made, ids) in [
            (made(Kind::WordLevel, &["<unk>", "rank", "plan"], false), vec![1, 0, 1]),
            (made(Kind::WordPiece, &["<unk>", "ran", "##k", "rank", "sh"], false), vec![3, 0, 3]),
            (
                made(Kind::ByteLevel, &[&bytes[..], &["s", "h", "d", "<unk>"]].concat(), false),
                vec![7, 5, 0, 8, 9, 3, 2, 10, 1, 7, 5],
            ),
            (
                made(Kind::ByteLevel, &[&bytes[..], &["s", "h", "d", "<unk>"]].concat(), true),
                vec![0, 7, 5, 0, 8, 9, 3, 2, 10, 1, 7, 5],
            ),
            (
                made(Kind::Unigram, &["▁", "\n", "r", "a", "n", "k", "s", "h", "d", "<unk>"], false),
                vec![0, 2, 3, 4, 5, 0, 6, 7, 3, 2, 8, 1, 2, 3, 4, 5],
            ),
        ] {
            assert_eq!(made.encode("rank shard\nrank"), ids, "{:?}", made.kind);
        }
    }
}
