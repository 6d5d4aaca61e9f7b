//! Text to ids and back, in four kinds: bytes, the characters of a text, GPT-2's byte-pair encoding,
//! and whatever the tokenizer files of a Hugging Face folder describe.
//!
//! A run keeps its tokenizer in one file, `tokenizer.json`, so that text can be decoded when the
//! training text is long gone. A `tokenizer.json` of Hugging Face without files beside it is kept as it is; a folder's
//! files are kept in `{"kind":"files","files":{...}}`; the other kinds are `{"kind":"byte"}`, `{"kind":"gpt2"}` and
//! `{"kind":"char","chars":"..."}`.
//!
//! Special tokens: [`Tokenizer::encode`] adds nothing around a text; [`Tokenizer::framing`] is what documents begin and
//! end with. The spelling of a special token inside a text is plain text to `gpt2` (as tiktoken's `encode_ordinary`, which
//! nanoGPT uses) and the special token to a `tokenizer.json` (as `transformers` does); [`Tokenizer::spelled`] counts them.

mod beside;
#[cfg(feature = "tokenizers")]
mod bounds;
mod char_vocabulary;
mod class;
mod files;
mod from_files;
#[cfg(feature = "tokenizers")]
mod gguf;
#[cfg(feature = "tokenizers")]
mod gpt2;
#[cfg(feature = "tokenizers")]
mod guarded;
#[cfg(feature = "tokenizers")]
mod hugging_face;
mod hugging_face_files;
mod layout;
mod roles;
mod settings;
mod spec;
mod special_tokens;
mod spelled;
mod vocabulary_files;
#[cfg(not(feature = "tokenizers"))]
mod without_feature;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use files::{TOKENIZER_FILE, TokenizerFiles};
#[cfg(feature = "tokenizers")]
pub use gguf::GgufVocabulary;
pub use hugging_face_files::HuggingFaceFiles;
pub use spec::TokenizerSpec;
pub use special_tokens::SpecialToken;
pub use spelled::Spelled;

use crate::limits::{self, KEPT_TOKENIZER_BYTES, TOKENIZER_BYTES};
use crate::windows::Placed;
use crate::{Corpus, DataError, Result};
use char_vocabulary::CharVocabulary;
use from_files::FromFiles;
#[cfg(feature = "tokenizers")]
use gpt2::Gpt2;
use hugging_face_files::END_OF_TEXT;
#[cfg(not(feature = "tokenizers"))]
use without_feature::Gpt2;

/// Converts text to ids and back. Clones share the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    algorithm: Arc<Algorithm>,
    /// True if a token separates documents of bytes or characters.
    separated: bool,
    /// A chat template in place of that of the files.
    template: Option<Arc<str>>,
}

#[allow(clippy::large_enum_variant, reason = "there is one of it in a tokenizer, behind an `Arc`")]
enum Algorithm {
    Byte,
    Char(CharVocabulary),
    Gpt2(Gpt2),
    HuggingFace(FromFiles),
}

/// The separator of bytes: no UTF-8 has it.
const BYTE_SEPARATOR: u32 = 0xff;

/// Phalanx's own form of the tokenizer file; any other JSON is read as Hugging Face's.
#[derive(Serialize, Deserialize)]
struct SavedTokenizer {
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chars: Option<String>,
    /// True if a token separates documents.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    separated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<TokenizerFiles>,
    /// A chat template in place of that of the files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    template: Option<String>,
}

impl Tokenizer {
    fn of(algorithm: Algorithm) -> Tokenizer {
        Tokenizer { algorithm: Arc::new(algorithm), separated: false, template: None }
    }

    /// Makes the tokenizer that `spec` asks for. `corpus` gives `char` its vocabulary, and tells bytes and characters
    /// whether there are several documents to separate; the other kinds do not read it.
    ///
    /// # Errors
    /// [`DataError::CharNeedsText`] for `char` without a corpus, the errors of reading the corpus, and
    /// [`DataError::TokenizerFile`] for files that are no Hugging Face tokenizer.
    pub fn open(spec: &TokenizerSpec, corpus: Option<&Corpus>) -> Result<Tokenizer> {
        let several = corpus.is_some_and(Corpus::may_have_several_documents);
        match spec {
            TokenizerSpec::Byte => Ok(Tokenizer { separated: several, ..Tokenizer::byte() }),
            TokenizerSpec::Gpt2 => {
                let refuse = |reason| DataError::TokenizerFile { path: "gpt2".into(), reason };
                Ok(Tokenizer::of(Algorithm::Gpt2(Gpt2::new().map_err(refuse)?)))
            }
            TokenizerSpec::Char => {
                let corpus = corpus.ok_or(DataError::CharNeedsText)?;
                let vocabulary = Algorithm::Char(CharVocabulary::of_corpus(corpus)?);
                Ok(Tokenizer { separated: several, ..Tokenizer::of(vocabulary) })
            }
            TokenizerSpec::HuggingFace(path) if path.is_dir() => {
                Tokenizer::of_folder(path)?.ok_or_else(|| DataError::TokenizerMissing { path: path.clone() })
            }
            // A tokenizer.json belongs to the files beside it; a file of another name stands alone.
            TokenizerSpec::HuggingFace(path) if path.ends_with(TOKENIZER_FILE) => {
                let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
                let opened = Tokenizer::of_folder(folder.unwrap_or(Path::new(".")))?;
                opened.ok_or_else(|| DataError::TokenizerMissing { path: path.clone() })
            }
            TokenizerSpec::HuggingFace(path) => Tokenizer::of_file(path),
        }
    }

    /// The tokenizer of a Hugging Face folder or of a run; `None` where the folder has no vocabulary.
    ///
    /// # Errors
    /// [`DataError::TokenizerFile`] for files that cannot be used, and those of reading.
    pub fn of_folder(folder: &Path) -> Result<Option<Tokenizer>> {
        let Some(files) = TokenizerFiles::read(folder)? else { return Ok(None) };
        if let Some(content) = files.get(TOKENIZER_FILE) {
            let path = folder.join(TOKENIZER_FILE);
            let saved = SavedTokenizer::parse(content.as_bytes(), &path)?;
            if saved.kind.is_some() {
                return Tokenizer::of_saved(saved, content, &path).map(Some);
            }
        }
        let refuse = |reason| DataError::TokenizerFile { path: folder.to_path_buf(), reason };
        let mut opened = FromFiles::open(files).map_err(refuse)?;
        opened.compare(folder);
        Ok(Some(Tokenizer::of(Algorithm::HuggingFace(opened))))
    }

    /// The same with further special tokens: those that the vocabulary lacks get ids behind its last one.
    ///
    /// # Errors
    /// [`DataError::TokenizerFile`] for a tokenizer of no Hugging Face files, and tokens that it refuses.
    pub fn adding(&self, tokens: &[String]) -> Result<Tokenizer> {
        let refuse = |reason| DataError::TokenizerFile { path: "model.add_tokens".into(), reason };
        let Algorithm::HuggingFace(opened) = &*self.algorithm else {
            return Err(refuse(format!("{} has no added tokens", self.describe())));
        };
        let files = opened.files().with_special_tokens(tokens).map_err(refuse)?;
        let algorithm = Algorithm::HuggingFace(FromFiles::open(files).map_err(refuse)?);
        Ok(Tokenizer { algorithm: Arc::new(algorithm), ..self.clone() })
    }

    fn of_file(path: &Path) -> Result<Tokenizer> {
        Tokenizer::from_json(&limits::read(path, KEPT_TOKENIZER_BYTES)?, path)
    }

    /// [`TokenizerSpec::from_key`], then [`Tokenizer::open`], with the errors of both.
    pub fn from_key(key: &str, corpus: Option<&Corpus>) -> Result<Tokenizer> {
        Tokenizer::open(&TokenizerSpec::from_key(key)?, corpus)
    }

    /// Each byte of UTF-8 is its own id: 256 ids, no text is unknown.
    pub fn byte() -> Tokenizer {
        Tokenizer::of(Algorithm::Byte)
    }

    /// GPT-2's byte-pair encoding: 50257 ids, no text is unknown.
    #[cfg(feature = "tokenizers")]
    pub fn gpt2() -> Tokenizer {
        Tokenizer::of(Algorithm::Gpt2(Gpt2))
    }

    /// The vocabulary of the distinct characters of `text`, in code point order.
    pub fn char_of(text: &str) -> Tokenizer {
        Tokenizer::of(Algorithm::Char(CharVocabulary::of_text(text)))
    }

    /// The same tokenizer for the documents of `corpus`: bytes separate them by an id that no text has. The vocabulary
    /// stays as it is.
    #[must_use]
    pub fn for_corpus(self, corpus: &Corpus) -> Tokenizer {
        let separates = matches!(*self.algorithm, Algorithm::Byte) && corpus.may_have_several_documents();
        Tokenizer { separated: self.separated || separates, ..self }
    }

    /// The tokenizer saved by [`Tokenizer::save`] in the folder `run`.
    ///
    /// # Errors
    /// [`DataError::MissingPath`] without such a file, [`DataError::TokenizerFile`] with a damaged one.
    pub fn load(run: &Path) -> Result<Tokenizer> {
        Tokenizer::of_file(&run.join(TOKENIZER_FILE))
    }

    /// Writes [`TOKENIZER_FILE`] into the folder `run`, whole or not at all.
    ///
    /// # Errors
    /// [`DataError::Write`].
    pub fn save(&self, run: &Path) -> Result<()> {
        let path = run.join(TOKENIZER_FILE);
        phalanx_system::files::write(&path, self.to_json()).map_err(DataError::writing(&path))
    }

    /// The content of the tokenizer's file.
    pub fn to_json(&self) -> String {
        let (kind, chars, files) = match &*self.algorithm {
            Algorithm::HuggingFace(opened)
                if self.template.is_none() && opened.files().is_tokenizer_json_alone() =>
            {
                return opened.tokenizer_json().to_string();
            }
            Algorithm::HuggingFace(opened) => ("files", None, Some(opened.files().clone())),
            Algorithm::Byte => ("byte", None, None),
            Algorithm::Gpt2(_) => ("gpt2", None, None),
            Algorithm::Char(vocabulary) => ("char", Some(vocabulary.to_string()), None),
        };
        let template = self.template.as_deref().map(str::to_string);
        let (kind, separated) = (Some(kind.to_string()), self.separated);
        let saved = SavedTokenizer { kind, chars, separated, files, template };
        serde_json::to_string(&saved).expect("strings are always JSON")
    }

    /// The files for Hugging Face's programs: those that were read, or made ones. `mask` is the id of the token that a
    /// masked model was trained to fill; if it is the first id behind the vocabulary, it becomes the token `[MASK]`.
    pub fn hugging_face_files(&self, mask: Option<u32>) -> HuggingFaceFiles {
        let files = match &*self.algorithm {
            Algorithm::Byte => HuggingFaceFiles::of_bytes(self.separated),
            Algorithm::Char(vocabulary) => {
                HuggingFaceFiles::of_characters(&vocabulary.to_string(), self.separator())
            }
            Algorithm::Gpt2(gpt2) => HuggingFaceFiles::of_gpt2(&gpt2.ordinary_tokens(), gpt2.end_of_text()),
            Algorithm::HuggingFace(opened) => HuggingFaceFiles::of_files(opened),
        };
        let files = self.template.iter().fold(files, |files, source| files.with_chat_template(source));
        match mask.filter(|id| *id as usize == self.vocab_size()) {
            Some(id) => files.with_mask(id),
            None => files,
        }
    }

    /// Checksum of everything that decides the meaning of ids, in hexadecimal. It is the same for two tokenizers whose
    /// files differ only in layout, or in what separates documents.
    pub fn digest(&self) -> String {
        let (json, changes) = match &*self.algorithm {
            Algorithm::HuggingFace(opened) => (opened.tokenizer_json().to_string(), opened.changes()),
            _ => (Tokenizer { separated: false, template: None, ..self.clone() }.to_json(), None),
        };
        let sorted = serde_json::from_str::<serde_json::Value>(&json).map(|value| value.to_string());
        let mut hasher = blake3::Hasher::new();
        hasher.update(sorted.unwrap_or(json).as_bytes());
        if let Some(changes) = changes {
            hasher.update(changes.to_string().as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// The tokenizer that the content of a tokenizer file describes; `origin` names it in errors.
    ///
    /// # Errors
    /// [`DataError::TokenizerFile`].
    pub fn from_json(content: &[u8], origin: &Path) -> Result<Tokenizer> {
        let saved = SavedTokenizer::parse(content, origin)?;
        let content = str::from_utf8(content).unwrap_or_default();
        Tokenizer::of_saved(saved, content, origin)
    }

    fn of_saved(saved: SavedTokenizer, content: &str, origin: &Path) -> Result<Tokenizer> {
        let refuse = |reason: String| DataError::TokenizerFile { path: origin.to_path_buf(), reason };
        let opened = |files| FromFiles::open(files).map(Algorithm::HuggingFace).map_err(refuse);
        let algorithm = match (saved.kind.as_deref(), saved.chars, saved.files) {
            (None, ..) if content.len() as u64 > TOKENIZER_BYTES => {
                let found = content.len();
                return Err(refuse(format!("it has {found} bytes; at most {TOKENIZER_BYTES} are read")));
            }
            (None, ..) => {
                files::check_parts(content).map_err(refuse)?;
                opened(TokenizerFiles::of_tokenizer_json(content))?
            }
            (Some("files"), None, Some(files)) => opened(files)?,
            (Some("byte"), None, None) => Algorithm::Byte,
            (Some("gpt2"), None, None) => Algorithm::Gpt2(Gpt2::new().map_err(refuse)?),
            (Some("char"), Some(chars), None) => {
                Algorithm::Char(CharVocabulary::from_chars(&chars).map_err(refuse)?)
            }
            (Some(kind), chars, _) => {
                let given = if chars.is_some() { "with" } else { "without" };
                return Err(refuse(format!(
                    "kind {kind:?} {given} chars; expected \"byte\" or \"gpt2\" without, \"char\" with, or \"files\" \
                     with files"
                )));
            }
        };
        let separated = saved.separated && matches!(algorithm, Algorithm::Byte | Algorithm::Char(_));
        Ok(Tokenizer { separated, template: saved.template.map(Arc::from), ..Tokenizer::of(algorithm) })
    }

    /// The ids of `text`, without anything added around it.
    ///
    /// # Errors
    /// [`DataError::UnknownCharacter`] for `char`, [`DataError::Encode`] for a `tokenizer.json`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &*self.algorithm {
            Algorithm::Byte => Ok(text.bytes().map(u32::from).collect()),
            Algorithm::Char(vocabulary) => vocabulary.encode(text),
            Algorithm::Gpt2(gpt2) => Ok(gpt2.encode(text)),
            Algorithm::HuggingFace(opened) => opened.library.encode(text),
        }
    }

    /// The text of `ids`. Never fails: an id outside the vocabulary (a model may have spare rows) and
    /// bytes that are not UTF-8 (a cut character) become U+FFFD; a `tokenizer.json` drops such ids.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &*self.algorithm {
            Algorithm::Byte => self.decode_documents(ids, &decode_bytes),
            Algorithm::Char(vocabulary) => self.decode_documents(ids, &|ids| vocabulary.decode(ids)),
            Algorithm::Gpt2(gpt2) => gpt2.decode(ids),
            Algorithm::HuggingFace(opened) => opened.library.decode(ids),
        }
    }

    /// Spelling of an id in the vocabulary; `None` for a hole between its ids and beyond them.
    pub fn token(&self, id: u32) -> Option<String> {
        match &*self.algorithm {
            Algorithm::HuggingFace(opened) => opened.library.token(id).map(|(content, _)| content),
            _ => ((id as usize) < self.vocab_size()).then(|| self.decode(&[id])),
        }
    }

    /// The text of ids among which the separator stands for the end of a text.
    fn decode_documents(&self, ids: &[u32], decode: &dyn Fn(&[u32]) -> String) -> String {
        let separator = self.separator();
        let documents = ids.split(|id| Some(*id) == separator).map(decode);
        documents.collect::<Vec<_>>().join(END_OF_TEXT)
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        match &*self.algorithm {
            Algorithm::Byte => 256,
            Algorithm::Char(vocabulary) => vocabulary.len() + usize::from(self.separated),
            Algorithm::Gpt2(gpt2) => gpt2.vocab_size(),
            Algorithm::HuggingFace(opened) => opened.library.vocab_size(),
        }
    }

    /// The id that separates two documents, if the vocabulary has one: `<|endoftext|>` for `gpt2`, the token with the role
    /// `eos_token` (or `sep_token`) of a `tokenizer.json`; if there are several documents, 255 for bytes, which no UTF-8
    /// has, and the id behind the last of characters.
    pub fn separator(&self) -> Option<u32> {
        match &*self.algorithm {
            Algorithm::Byte => self.separated.then_some(BYTE_SEPARATOR),
            Algorithm::Char(vocabulary) => self.separated.then_some(vocabulary.len() as u32),
            Algorithm::Gpt2(gpt2) => Some(gpt2.end_of_text()),
            Algorithm::HuggingFace(opened) => opened.separator().map(|token| token.id),
        }
    }

    /// The ids that a document begins and ends with, as the files of a `tokenizer.json` say; none for the other kinds.
    pub fn framing(&self) -> [&[u32]; 2] {
        match &*self.algorithm {
            Algorithm::HuggingFace(opened) => opened.framing().each_ref().map(Vec::as_slice),
            _ => [&[], &[]],
        }
    }

    /// Returns whether the ids of `self` mean the same in `other`, which may have further ids.
    pub fn agrees_with(&self, other: &Tokenizer) -> bool {
        self.digest() == other.digest()
            || [self.separated, true].into_iter().any(|separated| {
                let own = Tokenizer { separated, ..self.clone() }.opened();
                own.zip(other.opened()).is_some_and(|(own, other)| {
                    match (&*own.algorithm, &*other.algorithm) {
                        (Algorithm::HuggingFace(own), Algorithm::HuggingFace(other)) => {
                            own.agrees_with(other)
                        }
                        _ => false,
                    }
                })
            })
    }

    /// The tokenizer as one of Hugging Face's library, if this build has it.
    pub(crate) fn opened(&self) -> Option<Tokenizer> {
        match &*self.algorithm {
            Algorithm::HuggingFace(_) => Some(self.clone()),
            _ => {
                Tokenizer::from_json(self.hugging_face_files(None).tokenizer().as_bytes(), Path::new("")).ok()
            }
        }
    }

    /// Notes for people on what was guessed, assumed, applied or added when the files were read.
    pub fn notes(&self) -> &[String] {
        match &*self.algorithm {
            Algorithm::HuggingFace(opened) => opened.notes(),
            _ => &[],
        }
    }

    /// Kind and size for messages: `gpt2, 50257 ids`.
    pub fn describe(&self) -> String {
        let kind = match &*self.algorithm {
            Algorithm::Byte => "byte".to_string(),
            Algorithm::Char(_) => "char".to_string(),
            Algorithm::Gpt2(_) => "gpt2".to_string(),
            Algorithm::HuggingFace(opened) => {
                format!("{} ({})", opened.files().vocabulary(), opened.library.model())
            }
        };
        format!("{kind}, {} ids", self.vocab_size())
    }

    /// The last position at which `text` may be cut: encoding the two parts separately gives the ids of the whole,
    /// whatever text follows, and no special token is spelled across it. 0 when there is no such position. A tokenizer that
    /// [`Tokenizer::needs_windows`] is given parts that are cut anywhere.
    pub(crate) fn last_cut(&self, text: &str) -> usize {
        match &*self.algorithm {
            Algorithm::HuggingFace(_) => text.len(),
            Algorithm::Byte | Algorithm::Char(_) => spelled::last_cut(text),
            Algorithm::Gpt2(gpt2) => gpt2.last_cut(text),
        }
    }

    /// Returns whether no position is known at which a text may be cut, so that it is encoded in windows that overlap. Normalisers and
    /// added prefixes of a `tokenizer.json` may look at the whole text.
    pub(crate) fn needs_windows(&self) -> bool {
        matches!(*self.algorithm, Algorithm::HuggingFace(_))
    }

    /// The tokens of a window, with their places.
    pub(crate) fn encode_window(&self, text: &str) -> Result<Vec<Placed>> {
        match &*self.algorithm {
            Algorithm::HuggingFace(opened) => opened.library.encode_window(text),
            Algorithm::Byte | Algorithm::Char(_) | Algorithm::Gpt2(_) => unreachable!("it needs no windows"),
        }
    }

    /// Returns whether windows may be joined within a pre-token.
    pub(crate) fn joins_within_words(&self) -> bool {
        matches!(&*self.algorithm, Algorithm::HuggingFace(opened) if opened.library.model() == "BPE")
    }
}

impl SavedTokenizer {
    fn parse(content: &[u8], origin: &Path) -> Result<SavedTokenizer> {
        let refuse = |reason: String| DataError::TokenizerFile { path: origin.to_path_buf(), reason };
        let content = str::from_utf8(content).map_err(|e| refuse(format!("it is not UTF-8: {e}")))?;
        serde_json::from_str(content).map_err(|e| refuse(format!("it is not the JSON of a tokenizer: {e}")))
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
