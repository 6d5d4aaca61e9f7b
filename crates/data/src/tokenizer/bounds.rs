//! Bounds on what a `tokenizer.json` may ask of the `tokenizers` library, which has no bounds of its own: a file of a few kilobytes can
//! make gigabytes of one page of text, or compute for hours. A file that asks for more than the bounds is refused before the library sees
//! it.
//!
//! No chain of its replacements may make more than [`GROWTH`] bytes of one. Two are a chain if the second can match what the first has written.
//! Unicode's own forms (`NFKC` and so on), which make up to 11 bytes of one from a few characters, are not counted.

use std::fmt;

use base64::Engine;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// Bytes that a normalizer or a decoder may make of one: a window then takes up to 250 MB. Published ones make up to 33 by this count (SentencePiece's
/// table of characters, then a mark for spaces).
const GROWTH: usize = 40;

/// Parts of a pre-tokenizer that may lengthen a text; each makes up to 5 bytes of one. Published ones have up to two.
const LENGTHENING_PARTS: usize = 3;

/// Bytes of a piece of a Unigram model, which are compared at every byte of a text, and of what is copied for each token: the token for unknown text,
/// prefix and suffix. Published ones have up to 100.
const PIECE_BYTES: usize = 512;

/// Bytes of all pieces of a Unigram model: each may take 250 bytes of memory. Published ones have up to 10 million.
const ALL_PIECES_BYTES: usize = 1 << 24;

/// Characters of a word that a WordPiece model divides, in a time that grows with their square. Published ones have 100 or 200.
const WORD_CHARS: u64 = 1000;

/// Bytes of what a table of characters (`precompiled_charsmap`) puts in the place of one. SentencePiece's have up to 33.
const MAPPED_BYTES: usize = 64;

/// The parts of a file that have bounds.
#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct File {
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Model,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Model {
    unk_token: Option<Value>,
    continuing_subword_prefix: Option<Value>,
    end_of_word_suffix: Option<Value>,
    max_input_chars_per_word: Option<Value>,
    vocab: Pieces,
}

/// The pieces of a Unigram model; nothing of the other models, whose vocabularies are objects.
#[derive(Default)]
struct Pieces {
    longest: usize,
    all: usize,
}

/// Refuses a file that asks for more than the bounds. The error is a reason to print.
pub(super) fn check(content: &str) -> Result<(), String> {
    let file: File = serde_json::from_str(content)
        .map_err(|e| format!("it is not a Hugging Face tokenizer.json of a kind that is known here: {e}"))?;
    check_growth("normalizer", &file.normalizer)?;
    check_growth("decoder", &file.decoder)?;
    let lengthens = |part: &&&Value| part["type"] == "ByteLevel" || !part["replacement"].is_null();
    let lengthening = leaves(&file.pre_tokenizer).iter().filter(lengthens).count();
    if lengthening > LENGTHENING_PARTS {
        return Err(format!(
            "its pre_tokenizer has {lengthening} parts that lengthen a text (ByteLevel, Metaspace); at most {LENGTHENING_PARTS} are run"
        ));
    }
    if leaves(&file.pre_tokenizer).iter().any(|part| part["length"] == 0) {
        return Err("a part of its pre_tokenizer has \"length\": 0; expected at least 1".into());
    }
    for part in leaves(&file.post_processor) {
        let places = part["single"].as_array().into_iter().flatten();
        let places = places.filter(|place| !place["Sequence"].is_null()).count();
        if places > 1 {
            return Err(format!(
                "its post_processor puts a text {places} times into what it makes; expected once"
            ));
        }
    }
    file.model.check()
}

impl Model {
    fn check(&self) -> Result<(), String> {
        for (name, given) in [
            ("unk_token", &self.unk_token),
            ("continuing_subword_prefix", &self.continuing_subword_prefix),
            ("end_of_word_suffix", &self.end_of_word_suffix),
        ] {
            let bytes = given.as_ref().and_then(Value::as_str).map_or(0, str::len);
            if bytes > PIECE_BYTES {
                return Err(format!("{name} of its model has {bytes} bytes; at most {PIECE_BYTES} are used"));
            }
        }
        if let Some(chars) = self.max_input_chars_per_word.as_ref().and_then(Value::as_u64)
            && chars > WORD_CHARS
        {
            return Err(format!(
                "max_input_chars_per_word of its model is {chars}, and the time for a word grows with its square; at most \
                 {WORD_CHARS} are allowed"
            ));
        }
        let Pieces { longest, all } = self.vocab;
        if longest > PIECE_BYTES {
            return Err(format!(
                "a piece of its Unigram model has {longest} bytes; at most {PIECE_BYTES} are used"
            ));
        }
        if all > ALL_PIECES_BYTES {
            return Err(format!(
                "the pieces of its Unigram model have {all} bytes; at most {ALL_PIECES_BYTES} are used"
            ));
        }
        Ok(())
    }
}

/// The parts of a sequence, and of those in it; a part that is no sequence by itself.
pub(super) fn leaves(part: &Value) -> Vec<&Value> {
    let inner = ["normalizers", "pretokenizers", "processors", "decoders"];
    match inner.iter().find_map(|key| part[*key].as_array()) {
        Some(parts) => parts.iter().flat_map(leaves).collect(),
        None => vec![part],
    }
}

/// A part that writes text.
struct Writes<'a> {
    /// Bytes that it makes of one, at most.
    growth: usize,
    /// Text that it looks for, if that is a string, and text that it writes.
    known: Option<(&'a str, &'a str)>,
}

/// Refuses parts that look for nothing, and chains of parts that make too much of a byte.
fn check_growth(of: &str, part: &Value) -> Result<(), String> {
    let parts = leaves(part).into_iter().map(|leaf| writes(of, leaf)).collect::<Result<Vec<_>, String>>()?;
    // The growth from each part on, from the last to the first.
    let mut from: Vec<usize> = vec![1; parts.len()];
    for at in (0..parts.len()).rev() {
        let mut unknown = false;
        let mut next = 1;
        for later in at + 1..parts.len() {
            let is_chain = unknown
                || match (parts[at].known, parts[later].known) {
                    (Some((_, written)), Some((sought, _))) => {
                        sought.chars().any(|char| written.contains(char))
                    }
                    _ => true,
                };
            unknown |= parts[later].known.is_none();
            next = if is_chain { next.max(from[later]) } else { next };
        }
        from[at] = parts[at].growth.saturating_mul(next);
    }
    match from.into_iter().max().filter(|growth| *growth > GROWTH) {
        Some(growth) => {
            Err(format!("its {of} may make {growth} bytes of one byte of text; at most {GROWTH} are allowed"))
        }
        None => Ok(()),
    }
}

fn writes<'a>(of: &str, part: &'a Value) -> Result<Writes<'a>, String> {
    if let (false, Some(content)) = (part["pattern"].is_null(), part["content"].as_str()) {
        let sought = part["pattern"]["String"].as_str();
        return match sought {
            Some("") => Err(format!(
                "a Replace of its {of} has an empty pattern, on which the tokenizers library fails: remove that part"
            )),
            Some(sought) => {
                let growth = content.len().div_ceil(sought.len()).max(1);
                Ok(Writes { growth, known: Some((sought, content)) })
            }
            None => Ok(Writes { growth: content.len().max(1), known: None }),
        };
    }
    let growth = match part["type"].as_str() {
        // A character of two bytes for a byte; or a space in the place of a mark, which may be empty and so lie at every byte.
        Some("ByteLevel" | "BPEDecoder" | "CTC" | "WordPiece") => 2,
        _ => 1 + part["prepend"].as_str().map_or(0, str::len),
    };
    let mapped = longest_mapped(&part["precompiled_charsmap"]);
    if mapped > MAPPED_BYTES {
        return Err(format!(
            "the precompiled_charsmap of its {of} puts {mapped} bytes in the place of a character; at most {MAPPED_BYTES} are allowed"
        ));
    }
    // The long ones stand for characters of three bytes.
    Ok(Writes { growth: growth.max(mapped.div_ceil(3)), known: None })
}

/// Bytes of the longest text in a table of characters: the bytes of a tree, the tree, and texts that end with a zero. 0 for
/// what is no such table, which the library refuses.
fn longest_mapped(table: &Value) -> usize {
    let text = table.as_str().unwrap_or_default();
    let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap_or_default();
    let tree = bytes.first_chunk().map_or(0, |size| u32::from_le_bytes(*size) as usize);
    let texts = bytes.get(tree.saturating_add(4)..).unwrap_or_default();
    texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0)
}

impl<'de> Deserialize<'de> for Pieces {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Pieces, D::Error> {
        deserializer.deserialize_any(PiecesVisitor)
    }
}

struct PiecesVisitor;

impl<'de> Visitor<'de> for PiecesVisitor {
    type Value = Pieces;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pieces, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Pieces::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Pieces, A::Error> {
        let mut pieces = Pieces::default();
        while let Some((piece, _)) = list.next_element::<(String, IgnoredAny)>()? {
            pieces.longest = pieces.longest.max(piece.len());
            pieces.all += piece.len();
        }
        Ok(pieces)
    }

    fn visit_unit<E>(self) -> Result<Pieces, E> {
        Ok(Pieces::default())
    }
}
