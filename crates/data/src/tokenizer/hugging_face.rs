//! A `tokenizer.json` of Hugging Face, by their `tokenizers` crate.
//!
//! Truncation and padding, which such a file may order, are switched off: they are for batches of
//! sentences and would silently lose most of a document.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    Encoding, Model, ModelWrapper, NormalizedString, Normalizer, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer, Tokenizer,
};

use super::bounds;
use super::guarded::guarded;
use super::layout::printable_bytes;
use super::settings::Changes;
use super::special_tokens::AddedToken;
use crate::windows::Placed;
use crate::{DataError, Result};

/// Texts from which [`HuggingFace::framing`] learns what a post-processor adds; any that has ids will do.
const PROBES: [&str; 3] = ["a", "the", "0"];

/// The opened tokenizer.
pub(super) struct HuggingFace {
    tokenizer: Tokenizer,
    vocab_size: usize,
    alphabet: Alphabet,
}

/// Bytes or characters that a vocabulary has tokens for. The library drops the rest silently if no token stands for unknown text.
enum Alphabet {
    Everything,
    Bytes(Box<[bool; 256]>),
    Chars(HashSet<char>),
}

impl HuggingFace {
    /// Opens the content of a tokenizer.json. The error is a reason to print.
    pub(super) fn from_json(content: &str, changes: &Changes) -> Result<HuggingFace, String> {
        bounds::check(content)?;
        guarded("read the file", || HuggingFace::read(content, changes))?
    }

    fn read(content: &str, changes: &Changes) -> Result<HuggingFace, String> {
        let mut tokenizer: Tokenizer = content.parse().map_err(|e| {
            format!("it is not a Hugging Face tokenizer.json of a kind that is known here: {e}")
        })?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| format!("its truncation cannot be switched off: {e}"))?;
        check_added_tokens(content, &tokenizer)?;
        change(&mut tokenizer, changes)?;
        if let ModelWrapper::BPE(model) = tokenizer.get_model()
            && model.dropout.is_some_and(|dropout| dropout > 0.0)
        {
            return Err(
                "its model has a dropout, by which the ids of a text are random: set it to null".into()
            );
        }
        // The largest id counts, not the number of tokens: ids may have holes.
        let vocab: HashMap<String, u32> = tokenizer.get_vocab(true);
        let Some(largest) = vocab.values().max() else {
            return Err("its vocabulary is empty".to_string());
        };
        let vocab_size = *largest as usize + 1;
        let alphabet = alphabet(&tokenizer);
        Ok(HuggingFace { tokenizer, vocab_size, alphabet })
    }

    /// Makes `token` an added token, with a new id if the vocabulary lacks it; returns the new id. The error is a reason to
    /// print.
    pub(super) fn add(&mut self, token: &AddedToken) -> Result<Option<u32>, String> {
        let AddedToken { content, id: expected, file, .. } = token;
        let before = self.id(content);
        let is_added = before.is_some_and(|id| self.token(id).is_some_and(|(_, added)| added));
        if !is_added {
            let added = tokenizers::AddedToken::from(content.clone(), token.special)
                .single_word(token.single_word)
                .lstrip(token.lstrip)
                .rstrip(token.rstrip)
                .normalized(token.normalized);
            guarded("added a token", || self.tokenizer.add_tokens([added]))?
                .map_err(|error| format!("{file}: {content:?}: {error}"))?;
        }
        let now = self.id(content);
        if let (Some(expected), true) = (expected, now != *expected) {
            let now = now.map_or("none".to_string(), |id| id.to_string());
            return Err(format!(
                "{file} gives {content:?} the id {expected}, and in the vocabulary it has {now}"
            ));
        }
        self.vocab_size = self.vocab_size.max(now.map_or(0, |id| id as usize + 1));
        Ok(now.filter(|_| before.is_none()))
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token of the vocabulary.
    pub(super) fn id(&self, content: &str) -> Option<u32> {
        self.tokenizer.token_to_id(content)
    }

    /// The token of an id, and whether it is an added one.
    pub(super) fn token(&self, id: u32) -> Option<(String, bool)> {
        let is_added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id);
        Some((self.tokenizer.id_to_token(id)?, is_added))
    }

    /// Ids and spellings of the added tokens that are not white space alone.
    pub(super) fn added(&self) -> Vec<(u32, String)> {
        let added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let spelled = added.iter().filter(|(_, token)| !token.content.trim().is_empty());
        let mut spelled: Vec<_> = spelled.map(|(id, token)| (*id, token.content.clone())).collect();
        spelled.sort();
        spelled
    }

    /// Spellings of the special tokens.
    pub(super) fn special(&self) -> Vec<String> {
        let added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let special = added.values().filter(|token| token.special && !token.content.is_empty());
        special.map(|token| token.content.clone()).collect()
    }

    /// The spelling of the model's token for unknown text.
    pub(super) fn unknown(&self) -> Option<String> {
        match self.tokenizer.get_model() {
            ModelWrapper::BPE(model) => model.unk_token.clone(),
            ModelWrapper::WordPiece(model) => Some(model.unk_token.clone()),
            ModelWrapper::WordLevel(model) => Some(model.unk_token.clone()),
            ModelWrapper::Unigram(model) => {
                let id = serde_json::to_value(model).ok()?["unk_id"].as_u64()?;
                model.id_to_token(u32::try_from(id).ok()?)
            }
        }
    }

    /// The special tokens that the post-processor puts before and behind a text. The error is a reason to print.
    pub(super) fn framing(&self) -> Result<[Vec<u32>; 2], String> {
        for probe in PROBES {
            let encoded = guarded("encoded a first text", || self.tokenizer.encode(probe, true))?;
            let Ok(encoding) = encoded else { continue };
            let added = encoding.get_special_tokens_mask();
            let Some(first) = added.iter().position(|mark| *mark == 0) else { continue };
            let last = added.iter().rposition(|mark| *mark == 0).unwrap_or(first);
            let ids = encoding.get_ids();
            return Ok([ids[..first].to_vec(), ids[last + 1..].to_vec()]);
        }
        Ok([Vec::new(), Vec::new()])
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

    /// The content of a `tokenizer.json` with what was changed and added.
    pub(super) fn content(&self) -> Value {
        serde_json::to_value(&self.tokenizer).unwrap_or_default()
    }

    /// Everything that decides the ids of a text without special tokens, in one spelling for all files of the same meaning.
    pub(super) fn meaning(&self) -> Value {
        let mut meaning = self.content();
        for key in ["version", "truncation", "padding", "post_processor", "decoder", "added_tokens"] {
            meaning[key] = Value::Null;
        }
        for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if meaning["model"][key] == "" {
                meaning["model"][key] = Value::Null;
            }
        }
        if let Some(vocab) = meaning["model"]["vocab"].as_object_mut() {
            self.added().iter().for_each(|(_, content)| drop(vocab.remove(content)));
        }
        without(&mut meaning["pre_tokenizer"], "trim_offsets");
        meaning
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.encoding(text, |tokenizer| tokenizer.encode_fast(text, false))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes `text` by `encode`, unless the library would lose a part of it.
    fn encoding(
        &self,
        text: &str,
        encode: impl FnOnce(&Tokenizer) -> tokenizers::Result<Encoding>,
    ) -> Result<Encoding> {
        let encoded = guarded("encoded a text", || match self.lost(text) {
            Some(reason) => Err(reason),
            None => encode(&self.tokenizer).map_err(|error| error.to_string()),
        });
        encoded.and_then(|encoded| encoded).map_err(|reason| DataError::Encode { reason })
    }

    /// The ids of a text without a look for added tokens, as transformers' `_encode_without_added_tokens`.
    pub(super) fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        let encode = || -> tokenizers::Result<Vec<u32>> {
            let mut parts = PreTokenizedString::from(self.normalized(text));
            if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut parts)?;
            }
            let mut ids = Vec::new();
            for (part, ..) in parts.get_splits(OffsetReferential::Normalized, OffsetType::Byte) {
                ids.extend(self.tokenizer.get_model().tokenize(part)?.into_iter().map(|token| token.id));
            }
            Ok(ids)
        };
        let encoded = guarded("encoded a text", || match self.lost(text) {
            Some(reason) => Err(reason),
            None => encode().map_err(|error| error.to_string()),
        });
        encoded.and_then(|encoded| encoded).map_err(|reason| DataError::Encode { reason })
    }

    pub(super) fn encode_window(&self, text: &str) -> Result<Vec<Placed>> {
        let encoding = self.encoding(text, |tokenizer| tokenizer.encode(text, false))?;
        let mut last_word = None;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets()).zip(encoding.get_word_ids());
        let placed = |((id, place), word): ((&u32, &(usize, usize)), &Option<u32>)| {
            let begins_word = last_word.replace(*word) != Some(*word);
            Placed { id: *id, start: place.0 as u32, end: place.1 as u32, begins_word }
        };
        Ok(tokens.map(placed).collect())
    }

    /// Describes the first part of `text` that the library would drop silently.
    fn lost(&self, text: &str) -> Option<String> {
        let advice =
            "the tokenizers library would drop it in silence; use a tokenizer that was made on such text";
        match &self.alphabet {
            Alphabet::Everything => None,
            Alphabet::Bytes(known) => {
                let byte = self.normalized(text).bytes().find(|byte| !known[usize::from(*byte)])?;
                Some(format!(
                    "the vocabulary has no token for the byte 0x{byte:02x} of the text, and {advice}"
                ))
            }
            Alphabet::Chars(known) => {
                let normalized = self.normalized(text);
                let is_lost = |char: &char| !char.is_whitespace() && !known.contains(char);
                let char = normalized.chars().find(is_lost)?;
                Some(format!(
                    "the vocabulary has no token for the character {char:?} of the text, and {advice}"
                ))
            }
        }
    }

    fn normalized(&self, text: &str) -> String {
        let mut normalized = NormalizedString::from(text);
        match self.tokenizer.get_normalizer() {
            Some(normalizer) if normalizer.normalize(&mut normalized).is_ok() => normalized.get().to_string(),
            _ => text.to_string(),
        }
    }

    pub(super) fn decode(&self, ids: &[u32]) -> String {
        // A decoder of the library subtracts 1 from the number of tokens (tokenizers 0.23.2, `BPEDecoder`).
        if ids.is_empty() {
            return String::new();
        }
        let skip_special_tokens = false;
        let decoded = guarded("decoded ids", || self.tokenizer.decode(ids, skip_special_tokens));
        let replacement = || char::REPLACEMENT_CHARACTER.to_string();
        decoded.map_or_else(|_| replacement(), |decoded| decoded.unwrap_or_else(|_| replacement()))
    }
}

fn change(tokenizer: &mut Tokenizer, changes: &Changes) -> Result<(), String> {
    if let Some(normalizer) = &changes.normalizer {
        let changed = tokenizers::NormalizerWrapper::deserialize(normalizer);
        let changed = changed.map_err(|error| format!("its normalizer: {error}"))?;
        tokenizer.with_normalizer(Some(changed)).map_err(|error| format!("its normalizer: {error}"))?;
    }
    if let Some(pre_tokenizer) = &changes.pre_tokenizer {
        let changed = tokenizers::PreTokenizerWrapper::deserialize(pre_tokenizer);
        tokenizer.with_pre_tokenizer(Some(changed.map_err(|error| format!("its pre_tokenizer: {error}"))?));
    }
    tokenizer.set_encode_special_tokens(changes.plain_special);
    Ok(())
}

fn alphabet(tokenizer: &Tokenizer) -> Alphabet {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return Alphabet::Everything };
    if model.unk_token.is_some() || model.byte_fallback {
        return Alphabet::Everything;
    }
    let vocab = model.get_vocab();
    let split = serde_json::to_string(&tokenizer.get_pre_tokenizer()).unwrap_or_default();
    let normalized = serde_json::to_string(&tokenizer.get_normalizer()).unwrap_or_default();
    if split.contains("\"ByteLevel\"") {
        let mut known: Box<[bool; 256]> =
            Box::new(std::array::from_fn(|byte| matches!(byte, 0xc0 | 0xc1 | 0xf5..)));
        for (byte, char) in printable_bytes().into_iter().enumerate() {
            known[byte] |= vocab.contains_key(char.to_string().as_str());
        }
        return if known.contains(&false) { Alphabet::Bytes(known) } else { Alphabet::Everything };
    }
    // Text that is removed or rewritten after the normalizer needs no token.
    if normalized.contains("\"ByteLevel\"")
        || split.contains("Removed")
        || split.contains("CharDelimiterSplit")
    {
        return Alphabet::Everything;
    }
    let affixes = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
    let [prefix, suffix] = affixes.map(|affix| affix.as_deref().unwrap_or_default());
    let single = |token: &String| {
        let token = token.strip_prefix(prefix).unwrap_or(token);
        let mut chars = token.strip_suffix(suffix).unwrap_or(token).chars();
        chars.next().filter(|_| chars.next().is_none())
    };
    Alphabet::Chars(vocab.keys().filter_map(single).collect())
}

/// Removes a key from a value and everything in it.
fn without(value: &mut Value, key: &str) {
    match value {
        Value::Object(object) => {
            object.remove(key);
            object.values_mut().for_each(|value| without(value, key));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| without(value, key)),
        _ => {}
    }
}

/// The part of the file that the `tokenizers` library does not check.
#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<ListedToken>,
}

#[derive(Deserialize)]
struct ListedToken {
    id: u32,
    content: String,
}

/// Checks that the library gives each added token the id in the file. If that id is not the next free one, the library gives another and
/// only logs it (tokenizers 0.23.2); a model trained with the file's ids would read the wrong ones.
fn check_added_tokens(content: &str, tokenizer: &Tokenizer) -> Result<(), String> {
    let file: AddedTokens = serde_json::from_str(content).map_err(|e| format!("its added tokens: {e}"))?;
    for ListedToken { id, content } in file.added_tokens {
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
