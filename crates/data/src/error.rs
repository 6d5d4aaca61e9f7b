//! Errors of reading text, tokenizers, token files and samples.
//!
//! Each message says what was given, what was expected and what to do, and contains its cause (the
//! cause is not repeated as `source()`), so printing the error alone tells everything.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::content::{Foreign, other_encoding};
use crate::token_files_error::TokenFilesError;

/// An error of the data: the user's files, paths or numbers.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// The system starts no more threads.
    #[error(
        "cannot start a thread that reads text: {error}; `ulimit -u` limits processes and \
         threads, `ulimit -v` and `ulimit -d` the memory for their stacks: raise them"
    )]
    Threads {
        /// The system's.
        error: String,
    },

    /// A data source of the caller's own has no such sample.
    #[error("{reason}")]
    Source {
        /// Why, in words.
        reason: String,
    },

    /// A labelled row, or a file of rows, that cannot be used.
    #[error("{}, line {line}: {reason}", .path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The line on which the row begins, from 1.
        line: u64,
        /// Why, in words.
        reason: String,
    },

    /// A tokenizer's name that is neither a known word nor an existing file.
    #[error(
        "unknown tokenizer {given:?}: expected \"byte\", \"char\", \"gpt2\" or the path of a \
         tokenizer.json{}", did_you_mean(*.nearest)
    )]
    UnknownTokenizer {
        /// The name that the user gave.
        given: String,
        /// The word that was probably meant.
        nearest: Option<&'static str>,
    },

    /// The path of a tokenizer that does not exist.
    #[error(
        "tokenizer file {} does not exist: give the path of a Hugging Face tokenizer.json (or of the \
         folder that holds it, or vocab.json and merges.txt, or vocab.txt), or \"byte\", \"char\" or \"gpt2\"", .path.display()
    )]
    TokenizerMissing {
        /// The path that the user gave.
        path: PathBuf,
    },

    /// A file that does not describe a tokenizer.
    #[error(
        "{} does not hold a usable tokenizer: {reason}; give a Hugging Face tokenizer.json, or one \
         that a run of Phalanx wrote", .path.display()
    )]
    TokenizerFile {
        /// The file.
        path: PathBuf,
        /// Why it does not.
        reason: String,
    },

    /// Data whose ids mean something else than those that the model has learned.
    #[error(
        "{given} makes ids ({found}) other than those that the model of {origin} has learned ({learned}): {advice}; or, to \
         learn the token table anew, set data.new_tokenizer = true"
    )]
    OtherTokenizer {
        /// The key and its value.
        given: String,
        /// The tokenizer that it names.
        found: String,
        /// The model's tokenizer.
        learned: String,
        /// Origin of the model.
        origin: String,
        /// Advice on how to give the ids that the model has learned.
        advice: &'static str,
    },

    /// Text for a model whose tokenizer is not known.
    #[error(
        "the model of {origin} came without a tokenizer, and data.tokenizer was left out: name the tokenizer whose ids it has \
         learned, as data.tokenizer = \"tokenizer.json\" (or \"gpt2\", \"byte\", \"char\"); nothing was changed"
    )]
    NoTokenizer {
        /// Origin of the model.
        origin: String,
    },

    /// `char` without text.
    #[error(
        "the tokenizer \"char\" takes its vocabulary from the text, and no text was given: name text \
         files or folders, or choose another tokenizer"
    )]
    CharNeedsText,

    /// Text with a character that is not in the vocabulary.
    #[error(
        "character {character:?} (at byte {position} of the text) is not in the vocabulary of {vocab} \
         characters: remove it, or make the tokens and train on a text that contains it"
    )]
    UnknownCharacter {
        /// The character.
        character: char,
        /// Byte offset of the character in the text.
        position: usize,
        /// The number of characters in the vocabulary.
        vocab: usize,
    },

    /// Text that a `tokenizer.json` cannot encode.
    #[error("the tokenizer cannot encode the text: {reason}")]
    Encode {
        /// The error of the `tokenizers` library.
        reason: String,
    },

    /// A text that a `tokenizer.json` cannot encode in parts.
    #[error(
        "{} cannot be cut for the tokenizer from byte {position} of a document on: in the {limit} bytes from there, there is no \
         place around which the tokens do not depend on what is farther away, as in a very long word; split the document \
         there, or leave it out", .path.display()
    )]
    Uncut {
        /// The file.
        path: PathBuf,
        /// Byte of the document.
        position: usize,
        /// Bytes that are encoded at once.
        limit: usize,
    },

    /// An error of encoding, with the document in which it occurred.
    #[error("in {}: {cause}", .path.display())]
    InDocument {
        /// The document.
        path: PathBuf,
        /// The error.
        cause: Box<DataError>,
    },

    /// A path that does not exist.
    #[error("{}; check the spelling (relative paths start at the current folder)", no_such(*.key, .path))]
    MissingPath {
        /// The key of the configuration that names it, if one does.
        key: Option<&'static str>,
        /// The path that the user gave.
        path: PathBuf,
    },

    /// A named file that is no text, but of another format.
    #[error("{} is {is}: {way_out}", .path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// The format, as a noun phrase.
        is: &'static str,
        /// Advice to the user.
        way_out: &'static str,
    },

    /// A named text file that is not UTF-8.
    #[error(
        "{} is not UTF-8 text: its byte {position} does not begin a valid character; it looks like {is}: {way_out}",
        .path.display()
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The offset of the first bad byte.
        position: u64,
        /// The format that it has instead, as a noun phrase.
        is: &'static str,
        /// Advice to the user.
        way_out: &'static str,
    },

    /// A named JSON file that is broken.
    #[error(
        "{} is broken JSON: {reason}; mend it, or list its extension in data.plain (in `phalanx tokenize`: --plain) to read \
         it as plain text", .path.display()
    )]
    NotJson {
        /// The file.
        path: PathBuf,
        /// Place and kind of the fault.
        reason: String,
    },

    /// Paths that contain no document.
    #[error(
        "no text found in {given}: name UTF-8 text files, or folders that hold them and that are not hidden; what was found \
         instead:\n{found}"
    )]
    NoText {
        /// The paths.
        given: String,
        /// Description of what was found instead.
        found: String,
    },

    /// A named JSON file of which no record has a text.
    #[error(
        "{} holds no text ({found}): expected JSON objects, as {{{key:?}: \"...\"}}, one a line or in an array; if the text \
         has another key, name it with data.text_key (in `phalanx tokenize`: --text-key)", .path.display()
    )]
    NoTexts {
        /// The file.
        path: PathBuf,
        /// The key whose value is the text.
        key: String,
        /// Description of what was found instead.
        found: String,
    },

    /// More was skipped than may be.
    #[error(
        "{what} of the text were skipped, and at most {limit} may be: mend or remove what cannot be read, or allow it with \
         data.max_skipped = {suffices} (in `phalanx tokenize`: --max-skipped {suffices}); in detail:\n{notes}"
    )]
    TooMuchSkipped {
        /// Amount that was skipped.
        what: String,
        /// Amount that may be skipped.
        limit: String,
        /// The fraction that allows it.
        suffices: f64,
        /// Description of what was skipped, and why.
        notes: String,
    },

    /// Fewer tokens than one sample.
    #[error(
        "{origin} has {given} tokens, and one sample needs {needed} (a sequence of {} and the token \
         after it): give more text, a shorter sequence, or another validation part", .needed - 1
    )]
    TooShort {
        /// Which tokens.
        origin: String,
        /// Number of tokens.
        given: usize,
        /// Number of tokens that are needed.
        needed: usize,
    },

    /// An invalid fraction for the validation part.
    #[error(
        "a validation part of {given} is invalid: give a number from 0 (none) to less than 1, as 0.1 \
         for the last tenth"
    )]
    ValidationFraction {
        /// The number that the user gave.
        given: f64,
    },

    /// A token that the vocabulary does not have.
    #[error(
        "token {position} of {origin} is id {id}, and the vocabulary has {vocab} ids (0 to {}): the \
         tokens were made by another tokenizer, or the vocabulary must be larger",
        .vocab.saturating_sub(1)
    )]
    TokenOutOfRange {
        /// Which tokens.
        origin: String,
        /// The number of the first such token, from 0.
        position: usize,
        /// Its id.
        id: i64,
        /// The number of ids of the vocabulary.
        vocab: usize,
    },

    /// A token file that is not the one that the run was trained on.
    #[error(
        "{} does not hold the tokens that this run is trained on: its blake3 is {found}, and {expected} was \
         expected", .path.display()
    )]
    NotTheTokens {
        /// The file.
        path: PathBuf,
        /// The checksum of the run's tokens.
        expected: String,
        /// The checksum of the file.
        found: String,
    },

    /// A token that was in the vocabulary when the run started and no longer is.
    #[error(
        "token {position} of {origin} is id {id}, and the vocabulary has {vocab} ids (0 to {}): the tokens were \
         changed while they were in use; restore the original file, then continue with --resume",
        .vocab.saturating_sub(1)
    )]
    TokensChanged {
        /// Which tokens.
        origin: String,
        /// The number of the token, from 0.
        position: usize,
        /// Its id now.
        id: u32,
        /// The number of ids of the vocabulary.
        vocab: usize,
    },

    /// A file that has lost bytes since it was opened.
    #[error(
        "{} was shortened while it was in use: it had {expected} bytes and has {found}; restore the original \
         file, then continue with --resume", .path.display()
    )]
    Shortened {
        /// The file.
        path: PathBuf,
        /// Bytes when it was opened.
        expected: u64,
        /// Bytes now.
        found: u64,
    },

    /// A file of no known format.
    #[error(
        "{} is not a token file: {reason}. Known are Phalanx's own (made by `phalanx tokenize`), nanoGPT's \
         and llm.c's .bin, and Megatron's .bin with its .idx", .path.display()
    )]
    NotTokenFile {
        /// The file.
        path: PathBuf,
        /// Why it is not a token file.
        reason: String,
    },

    /// Token files that cannot be what is meant.
    #[error(transparent)]
    TokenFiles(#[from] TokenFilesError),

    /// A training part or a validation part that is too short for a sequence.
    #[error("{what}; {advice}")]
    PartTooShort {
        /// Which part, how many tokens it has, and how many are needed.
        what: String,
        /// Advice to the user: values that work.
        advice: String,
    },

    /// A file whose header and length disagree.
    #[error(
        "{} is damaged or cut short: {what}, so {expected} bytes were expected, and it has {found}; \
         copy it or make it again", .path.display()
    )]
    WrongSize {
        /// The file.
        path: PathBuf,
        /// Source of the expected size.
        what: String,
        /// Bytes expected.
        expected: u64,
        /// Bytes found.
        found: u64,
    },

    /// A file whose header has impossible values.
    #[error(
        "the header of {} is damaged, or of an unsupported kind: {reason}; copy the file or make it \
         again", .path.display()
    )]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// Which values.
        reason: String,
    },

    /// The system refused to read.
    #[error("cannot read {}: {cause}", .path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },

    /// The system refused to write: no permission, no space.
    #[error("cannot write {}: {cause}; an earlier file of that name is unchanged", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
}

impl DataError {
    /// Turns an I/O error on `path` into [`DataError::MissingPath`] or [`DataError::Read`].
    pub(crate) fn reading(path: &Path) -> impl FnOnce(io::Error) -> DataError + '_ {
        move |cause| {
            let path = path.to_path_buf();
            if cause.kind() == io::ErrorKind::NotFound {
                DataError::MissingPath { key: None, path }
            } else {
                DataError::Read { path, cause }
            }
        }
    }

    /// The error with the key of the configuration that names the path, if that is missing.
    pub fn of_key(self, key: &'static str) -> DataError {
        match self {
            DataError::MissingPath { path, .. } => DataError::MissingPath { key: Some(key), path },
            other => other,
        }
    }

    /// The error of a file whose byte `position` begins no character, with what the bytes around it look like.
    pub(crate) fn not_utf8(path: &Path, position: u64) -> DataError {
        const AROUND: u64 = 1 << 12;
        let mut bytes = Vec::new();
        // A file that cannot be read any more is described by what is known.
        let _ = phalanx_system::files::open_regular(path).and_then(|mut file| {
            file.seek(SeekFrom::Start(position.saturating_sub(AROUND)))?;
            file.take(2 * AROUND).read_to_end(&mut bytes)
        });
        let Foreign { is, way_out } = other_encoding(path, &bytes);
        DataError::NotUtf8 { path: path.to_path_buf(), position, is, way_out }
    }

    /// Turns an I/O error on `path` into [`DataError::Write`].
    pub(crate) fn writing(path: &Path) -> impl FnOnce(io::Error) -> DataError + '_ {
        move |cause| DataError::Write { path: path.to_path_buf(), cause }
    }
}

fn no_such(key: Option<&'static str>, path: &Path) -> String {
    match key {
        Some(key) => format!("{key} = {:?}: no such file or folder", path.display().to_string()),
        None => format!("no such file or folder: {}", path.display()),
    }
}

fn did_you_mean(nearest: Option<&'static str>) -> String {
    nearest.map_or_else(String::new, |word| format!("; did you mean \"{word}\"?"))
}
