//! Text to ids and back, in four kinds: bytes, the characters of a text, GPT-2's byte-pair encoding,
//! and whatever a Hugging Face `tokenizer.json` describes.
//!
//! A run keeps its tokenizer in one file, `tokenizer.json`, so that text can be decoded when the
//! training text is long gone. For the Hugging Face kind it is that library's own file, unchanged; the
//! other kinds write `{"kind":"byte"}`, `{"kind":"gpt2"}` or `{"kind":"char","chars":"..."}`.
//!
//! Special tokens: nothing is added around a text. Their spelling inside a text is plain text to
//! `gpt2` (as tiktoken's `encode_ordinary`, which nanoGPT uses) and the special token to a
//! `tokenizer.json` (as `transformers` does).

mod char_vocabulary;
#[cfg(feature = "tokenizers")]
mod gpt2;
#[cfg(feature = "tokenizers")]
mod hugging_face;
mod hugging_face_files;
mod spec;
#[cfg(not(feature = "tokenizers"))]
mod without_feature;

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub use hugging_face_files::{HuggingFaceFiles, SpecialToken};
pub use spec::TokenizerSpec;

use crate::limits::{self, TOKENIZER_BYTES};
use crate::windows::Placed;
use crate::{Corpus, DataError, Result};
use char_vocabulary::CharVocabulary;
#[cfg(feature = "tokenizers")]
use gpt2::Gpt2;
#[cfg(feature = "tokenizers")]
use hugging_face::HuggingFace;
#[cfg(not(feature = "tokenizers"))]
use without_feature::{Gpt2, HuggingFace};

/// The name of the tokenizer's file in a run folder.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Converts text to ids and back. Cheap to share between threads.
pub struct Tokenizer {
    algorithm: Algorithm,
}

enum Algorithm {
    Byte,
    Char(Box<CharVocabulary>),
    Gpt2(Gpt2),
    HuggingFace(Box<HuggingFace>),
}

/// Phalanx's own form of the tokenizer file; any other JSON is read as Hugging Face's.
#[derive(Serialize, Deserialize)]
struct SavedTokenizer {
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chars: Option<String>,
}

impl Tokenizer {
    /// Makes the tokenizer that `spec` asks for. `corpus` gives `char` its vocabulary; the other kinds
    /// do not read it.
    ///
    /// # Errors
    /// [`DataError::CharNeedsText`] for `char` without a corpus, the errors of reading the corpus, and
    /// [`DataError::TokenizerFile`] for a file that is no Hugging Face tokenizer.
    pub fn open(spec: &TokenizerSpec, corpus: Option<&Corpus>) -> Result<Tokenizer> {
        match spec {
            TokenizerSpec::Byte => Ok(Tokenizer::byte()),
            TokenizerSpec::Gpt2 => {
                let refuse = |reason| DataError::TokenizerFile { path: "gpt2".into(), reason };
                Ok(Tokenizer { algorithm: Algorithm::Gpt2(Gpt2::new().map_err(refuse)?) })
            }
            TokenizerSpec::Char => {
                let corpus = corpus.ok_or(DataError::CharNeedsText)?;
                Ok(Tokenizer { algorithm: Algorithm::Char(Box::new(CharVocabulary::of_corpus(corpus)?)) })
            }
            TokenizerSpec::HuggingFace(path) => {
                let content = limits::read(path, TOKENIZER_BYTES)?;
                Tokenizer::from_json(&content, path)
            }
        }
    }

    /// [`TokenizerSpec::from_key`], then [`Tokenizer::open`], with the errors of both.
    pub fn from_key(key: &str, corpus: Option<&Corpus>) -> Result<Tokenizer> {
        Tokenizer::open(&TokenizerSpec::from_key(key)?, corpus)
    }

    /// Each byte of UTF-8 is its own id: 256 ids, no text is unknown.
    pub fn byte() -> Tokenizer {
        Tokenizer { algorithm: Algorithm::Byte }
    }

    /// GPT-2's byte-pair encoding: 50257 ids, no text is unknown.
    #[cfg(feature = "tokenizers")]
    pub fn gpt2() -> Tokenizer {
        Tokenizer { algorithm: Algorithm::Gpt2(Gpt2) }
    }

    /// The vocabulary of the distinct characters of `text`, in code point order.
    pub fn char_of(text: &str) -> Tokenizer {
        Tokenizer { algorithm: Algorithm::Char(Box::new(CharVocabulary::of_text(text))) }
    }

    /// The tokenizer saved by [`Tokenizer::save`] in the folder `run`.
    ///
    /// # Errors
    /// [`DataError::MissingPath`] without such a file, [`DataError::TokenizerFile`] with a damaged one.
    pub fn load(run: &Path) -> Result<Tokenizer> {
        let path = run.join(TOKENIZER_FILE);
        let content = limits::read(&path, TOKENIZER_BYTES)?;
        Tokenizer::from_json(&content, &path)
    }

    /// Writes [`TOKENIZER_FILE`] into the folder `run`, whole or not at all.
    ///
    /// # Errors
    /// [`DataError::Write`].
    pub fn save(&self, run: &Path) -> Result<()> {
        let path = run.join(TOKENIZER_FILE);
        phalanx_files::write(&path, self.to_json()).map_err(DataError::writing(&path))
    }

    /// The content of the tokenizer's file.
    pub fn to_json(&self) -> String {
        let (kind, chars) = match &self.algorithm {
            Algorithm::HuggingFace(tokenizer) => return tokenizer.content().to_string(),
            Algorithm::Byte => ("byte", None),
            Algorithm::Gpt2(_) => ("gpt2", None),
            Algorithm::Char(vocabulary) => ("char", Some(vocabulary.to_string())),
        };
        let saved = SavedTokenizer { kind: Some(kind.to_string()), chars };
        serde_json::to_string(&saved).expect("two optional strings are always JSON")
    }

    /// The files for Hugging Face's programs. `mask` is the id of the token that a masked model was trained to fill; if
    /// it is the first id behind the vocabulary, it becomes the token `[MASK]`.
    pub fn hugging_face_files(&self, mask: Option<u32>) -> HuggingFaceFiles {
        let files = match &self.algorithm {
            Algorithm::Byte => HuggingFaceFiles::of_bytes(),
            Algorithm::Char(vocabulary) => HuggingFaceFiles::of_characters(&vocabulary.to_string()),
            Algorithm::Gpt2(gpt2) => HuggingFaceFiles::of_gpt2(&gpt2.ordinary_tokens(), gpt2.end_of_text()),
            Algorithm::HuggingFace(known) => {
                HuggingFaceFiles::of_file(known.content(), |token| known.id(token))
            }
        };
        match mask.filter(|id| *id as usize == self.vocab_size()) {
            Some(id) => files.with_mask(id),
            None => files,
        }
    }

    /// Checksum of everything that affects encoding and decoding, in hexadecimal. It is the same for two tokenizers
    /// whose files differ only in layout.
    pub fn digest(&self) -> String {
        let json = self.to_json();
        let sorted = serde_json::from_str::<serde_json::Value>(&json).map(|value| value.to_string());
        blake3::hash(sorted.unwrap_or(json).as_bytes()).to_hex().to_string()
    }

    /// The tokenizer that the content of a tokenizer file describes; `origin` names it in errors.
    ///
    /// # Errors
    /// [`DataError::TokenizerFile`].
    pub fn from_json(content: &[u8], origin: &Path) -> Result<Tokenizer> {
        let refuse = |reason: String| DataError::TokenizerFile { path: origin.to_path_buf(), reason };
        let content = str::from_utf8(content).map_err(|e| refuse(format!("it is not UTF-8: {e}")))?;
        let saved: SavedTokenizer = serde_json::from_str(content)
            .map_err(|e| refuse(format!("it is not the JSON of a tokenizer: {e}")))?;
        let algorithm = match (saved.kind.as_deref(), saved.chars) {
            (None, _) => Algorithm::HuggingFace(Box::new(HuggingFace::from_json(content).map_err(refuse)?)),
            (Some("byte"), None) => Algorithm::Byte,
            (Some("gpt2"), None) => Algorithm::Gpt2(Gpt2::new().map_err(refuse)?),
            (Some("char"), Some(chars)) => {
                Algorithm::Char(Box::new(CharVocabulary::from_chars(&chars).map_err(refuse)?))
            }
            (Some(kind), chars) => {
                let given = if chars.is_some() { "with" } else { "without" };
                return Err(refuse(format!(
                    "kind {kind:?} {given} chars; expected \"byte\" or \"gpt2\" without, or \"char\" with"
                )));
            }
        };
        Ok(Tokenizer { algorithm })
    }

    /// The ids of `text`, without anything added around it.
    ///
    /// # Errors
    /// [`DataError::UnknownCharacter`] for `char`, [`DataError::Encode`] for a `tokenizer.json`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.algorithm {
            Algorithm::Byte => Ok(text.bytes().map(u32::from).collect()),
            Algorithm::Char(vocabulary) => vocabulary.encode(text),
            Algorithm::Gpt2(gpt2) => Ok(gpt2.encode(text)),
            Algorithm::HuggingFace(tokenizer) => tokenizer.encode(text),
        }
    }

    /// The text of `ids`. Never fails: an id outside the vocabulary (a model may have spare rows) and
    /// bytes that are not UTF-8 (a cut character) become U+FFFD; a `tokenizer.json` drops such ids.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.algorithm {
            Algorithm::Byte => decode_bytes(ids),
            Algorithm::Char(vocabulary) => vocabulary.decode(ids),
            Algorithm::Gpt2(gpt2) => gpt2.decode(ids),
            Algorithm::HuggingFace(tokenizer) => tokenizer.decode(ids),
        }
    }

    /// How the vocabulary spells an id; `None` for a hole between its ids and beyond them.
    pub fn token(&self, id: u32) -> Option<String> {
        match &self.algorithm {
            Algorithm::HuggingFace(tokenizer) => tokenizer.token(id),
            _ => ((id as usize) < self.vocab_size()).then(|| self.decode(&[id])),
        }
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        match &self.algorithm {
            Algorithm::Byte => 256,
            Algorithm::Char(vocabulary) => vocabulary.len(),
            Algorithm::Gpt2(gpt2) => gpt2.vocab_size(),
            Algorithm::HuggingFace(tokenizer) => tokenizer.vocab_size(),
        }
    }

    /// The id that separates two documents, if the vocabulary has one: `<|endoftext|>` for `gpt2`, the first known
    /// end-of-text token of a `tokenizer.json`, none for bytes and characters.
    pub fn separator(&self) -> Option<u32> {
        match &self.algorithm {
            Algorithm::Byte | Algorithm::Char(_) => None,
            Algorithm::Gpt2(gpt2) => Some(gpt2.end_of_text()),
            Algorithm::HuggingFace(tokenizer) => tokenizer.separator(),
        }
    }

    /// The id that replaces a hidden token, if the vocabulary has one: the first known mask token of a
    /// `tokenizer.json`, none for the other kinds.
    pub fn mask(&self) -> Option<u32> {
        match &self.algorithm {
            Algorithm::Byte | Algorithm::Char(_) | Algorithm::Gpt2(_) => None,
            Algorithm::HuggingFace(tokenizer) => tokenizer.mask(),
        }
    }

    /// Kind and size for messages: `gpt2, 50257 ids`.
    pub fn describe(&self) -> String {
        let kind = match &self.algorithm {
            Algorithm::Byte => "byte".to_string(),
            Algorithm::Char(_) => "char".to_string(),
            Algorithm::Gpt2(_) => "gpt2".to_string(),
            Algorithm::HuggingFace(tokenizer) => format!("tokenizer.json ({})", tokenizer.model()),
        };
        format!("{kind}, {} ids", self.vocab_size())
    }

    /// The last position at which `text` may be cut: encoding the two parts separately gives the ids of the whole,
    /// whatever text follows. 0 when there is no such position. A tokenizer that [`Tokenizer::needs_windows`] is given
    /// parts that are cut anywhere.
    pub(crate) fn last_cut(&self, text: &str) -> usize {
        match &self.algorithm {
            Algorithm::Byte | Algorithm::Char(_) | Algorithm::HuggingFace(_) => text.len(),
            Algorithm::Gpt2(gpt2) => gpt2.last_cut(text),
        }
    }

    /// Whether no position is known at which a text may be cut, so that it is encoded in windows that overlap. Normalisers and
    /// added prefixes of a `tokenizer.json` may look at the whole text.
    pub(crate) fn needs_windows(&self) -> bool {
        matches!(self.algorithm, Algorithm::HuggingFace(_))
    }

    /// The tokens of a window, with their places.
    pub(crate) fn encode_window(&self, text: &str) -> Result<Vec<Placed>> {
        match &self.algorithm {
            Algorithm::HuggingFace(tokenizer) => tokenizer.encode_window(text),
            Algorithm::Byte | Algorithm::Char(_) | Algorithm::Gpt2(_) => unreachable!("it needs no windows"),
        }
    }

    /// Whether windows may be joined within a pre-token.
    pub(crate) fn joins_within_words(&self) -> bool {
        matches!(&self.algorithm, Algorithm::HuggingFace(tokenizer) if tokenizer.model() == "BPE")
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({})", self.describe())
    }
}

fn decode_bytes(ids: &[u32]) -> String {
    // 0xff occurs in no UTF-8, so an id above 255 becomes U+FFFD like any other stray byte.
    let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(0xff)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
