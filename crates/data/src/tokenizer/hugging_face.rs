//! A `tokenizer.json` of Hugging Face, by their `tokenizers` crate.
//!
//! Truncation and padding, which such a file may order, are switched off: they are for batches of
//! sentences and would silently lose most of a document.

use std::collections::HashMap;

use serde::Deserialize;
use tokenizers::{ModelWrapper, Tokenizer};

use crate::limits::TOKENIZER_PARTS;
use crate::windows::Placed;
use crate::{DataError, Result};

/// Tokens by which known model families end a text; a tokenizer.json does not say which of its
/// special tokens does.
const END_OF_TEXT: [&str; 6] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[SEP]"];

/// Tokens by which known masked language models hide a token.
const MASK: [&str; 3] = ["[MASK]", "<mask>", "<|mask|>"];

/// The opened tokenizer and the file's content, which a run keeps.
pub(super) struct HuggingFace {
    tokenizer: Tokenizer,
    content: String,
    vocab_size: usize,
    separator: Option<u32>,
    mask: Option<u32>,
}

impl HuggingFace {
    /// Opens the content of a tokenizer.json. The error is a reason to print.
    pub(super) fn from_json(content: &str) -> Result<HuggingFace, String> {
        let parts = json_parts(content);
        if parts > TOKENIZER_PARTS {
            return Err(format!(
                "it has {parts} commas, colons and brackets; at most {TOKENIZER_PARTS} are read"
            ));
        }
        let mut tokenizer: Tokenizer = content.parse().map_err(|e| {
            format!("it is not a Hugging Face tokenizer.json of a kind that is known here: {e}")
        })?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| format!("its truncation cannot be switched off: {e}"))?;
        let vocab: HashMap<String, u32> = tokenizer.get_vocab(true);
        check_added_tokens(content, &tokenizer)?;
        // The largest id counts, not the number of tokens: ids may have holes.
        let Some(largest) = vocab.values().max() else {
            return Err("its vocabulary is empty".to_string());
        };
        let first = |known: &[&str]| known.iter().find_map(|token| vocab.get(*token)).copied();
        let (separator, mask) = (first(&END_OF_TEXT), first(&MASK));
        let vocab_size = *largest as usize + 1;
        Ok(HuggingFace { tokenizer, content: content.to_string(), vocab_size, separator, mask })
    }

    pub(super) fn content(&self) -> &str {
        &self.content
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token of the vocabulary.
    pub(super) fn id(&self, content: &str) -> Option<u32> {
        self.tokenizer.token_to_id(content)
    }

    pub(super) fn separator(&self) -> Option<u32> {
        self.separator
    }

    pub(super) fn mask(&self) -> Option<u32> {
        self.mask
    }

    pub(super) fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// The family of the model: `BPE`, `Unigram`, ...
    pub(super) fn model(&self) -> &'static str {
        match self.tokenizer.get_model() {
            ModelWrapper::BPE(_) => "BPE",
            ModelWrapper::WordPiece(_) => "WordPiece",
            ModelWrapper::WordLevel(_) => "WordLevel",
            ModelWrapper::Unigram(_) => "Unigram",
        }
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let add_special_tokens = false;
        match self.tokenizer.encode_fast(text, add_special_tokens) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(DataError::Encode { reason: e.to_string() }),
        }
    }

    pub(super) fn encode_window(&self, text: &str) -> Result<Vec<Placed>> {
        let add_special_tokens = false;
        let encoding = self.tokenizer.encode(text, add_special_tokens);
        let encoding = encoding.map_err(|e| DataError::Encode { reason: e.to_string() })?;
        let mut last_word = None;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets()).zip(encoding.get_word_ids());
        let placed = |((id, place), word): ((&u32, &(usize, usize)), &Option<u32>)| {
            let begins_word = last_word.replace(*word) != Some(*word);
            Placed { id: *id, start: place.0 as u32, end: place.1 as u32, begins_word }
        };
        Ok(tokens.map(placed).collect())
    }

    pub(super) fn decode(&self, ids: &[u32]) -> String {
        // A decoder of the library subtracts 1 from the number of tokens (tokenizers 0.23.2, `BPEDecoder`).
        if ids.is_empty() {
            return String::new();
        }
        let skip_special_tokens = false;
        let decoded = self.tokenizer.decode(ids, skip_special_tokens);
        decoded.unwrap_or_else(|_| char::REPLACEMENT_CHARACTER.to_string())
    }
}

/// Commas, colons and opening brackets of a JSON text, outside of its strings: a measure of the memory that it
/// takes when it is parsed.
fn json_parts(text: &str) -> usize {
    let (mut parts, mut in_string, mut escaped) = (0, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b':' | b'[' | b'{' if !in_string => parts += 1,
            _ => {}
        }
    }
    parts
}

/// The part of the file that the `tokenizers` library does not check.
#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// Where an added token's id is not the next free one, the library gives it another and only logs it
/// (tokenizers 0.23.2); a model trained with the file's ids would read the wrong ones.
fn check_added_tokens(content: &str, tokenizer: &Tokenizer) -> Result<(), String> {
    let file: AddedTokens = serde_json::from_str(content).map_err(|e| format!("its added tokens: {e}"))?;
    for AddedToken { id, content } in file.added_tokens {
        let given = tokenizer.token_to_id(&content);
        if given != Some(id) {
            let given = given.map_or("none".to_string(), |given| given.to_string());
            return Err(format!(
                "its added token {content:?} has id {id}, and the tokenizers library gives it {given}"
            ));
        }
    }
    Ok(())
}
