//! Turns text files and folders into a list of documents, in an order that depends only on their names.
//!
//! Every file is read once when the corpus is opened, so that the skipped files and the number of bytes
//! are known before anything is tokenised. A file that the user names must be UTF-8; inside
//! a folder, files that are not text are skipped and counted. Documents are then read again in
//! blocks, so a corpus larger than memory is no problem. A `.jsonl` file holds one document a line
//! (see [`json_lines`]).

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::json_lines::{self, LineCounts};
use crate::limits::{CORPUS_DEPTH, CORPUS_ENTRIES, UNCUT_BYTES};
use crate::{DataError, Result};

/// How much of a file is read at a time.
pub(crate) const BLOCK_BYTES: usize = 1 << 20;

/// Rust's build folder, which is skipped.
const BUILD_FOLDER: &str = "target";

/// The text that a user asked for.
#[derive(Clone, Debug, Default)]
pub struct CorpusSpec {
    /// Files and folders, in the order of their documents. Folders are walked to their leaves.
    pub paths: Vec<PathBuf>,
    /// File extensions, with or without the dot, in any case. Inside folders, only files with one of them are read; if
    /// the list is empty, all text files.
    pub extensions: Vec<String>,
    /// The key of the text in each line of a `.jsonl` file; `text` when None.
    pub text_key: Option<String>,
}

/// One text file: one document, or many if it is a `.jsonl` file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// Where it is read from.
    pub path: PathBuf,
    /// The size of its text when the corpus was opened; never 0.
    pub bytes: u64,
    /// For a `.jsonl` file: the key of the text in each line.
    pub text_key: Option<String>,
}

impl Document {
    /// Hands out the text in parts: `take(text, last)`, where `last` ends a document. Parts of a document end where
    /// `last_cut` says, as in [`for_each_block`].
    ///
    /// # Errors
    /// Those of [`for_each_block`] and [`json_lines::for_each_text`].
    pub(crate) fn for_each_part(
        &self,
        last_cut: &dyn Fn(&str) -> usize,
        take: &mut dyn FnMut(&str, bool) -> Result<()>,
    ) -> Result<()> {
        match &self.text_key {
            None => for_each_block(&self.path, last_cut, take),
            Some(key) => json_lines::for_each_text(&self.path, key, &mut |text| take(text, true)).map(drop),
        }
    }
}

/// A file inside a folder that was skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub reason: SkipReason,
}

/// Why a file inside a folder was skipped. Files of other extensions, hidden files, folders named `target` and links to
/// folders are left out without a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// It has bytes that are not UTF-8, or zero bytes.
    NotText,
    /// It has no bytes.
    Empty,
    /// It is a `.jsonl` file, and no line of it has a text.
    NoLines,
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SkipReason::NotText => "not UTF-8 text",
            SkipReason::Empty => "empty",
            SkipReason::NoLines => "no line has a text",
        })
    }
}

/// The documents of a run's text; at least one.
#[derive(Clone, Debug)]
pub struct Corpus {
    documents: Vec<Document>,
    skipped: Vec<Skipped>,
    /// For each `.jsonl` file with skipped lines.
    skipped_lines: Vec<(PathBuf, LineCounts)>,
    text_key: String,
    origin: String,
    /// Number of files and folders of any kind that were found in folders.
    entries: usize,
}

impl Corpus {
    /// Finds the documents: a named file is one; a folder gives its text files sorted by name, folder
    /// by folder, following links to files but not to folders (so loops cannot occur).
    ///
    /// # Errors
    /// [`DataError::MissingPath`], [`DataError::NotUtf8`] for a named file that is not text,
    /// [`DataError::NoTextLines`] for a named `.jsonl` file without a text, [`DataError::NoText`] when no document is
    /// found, [`DataError::Read`] for what cannot be read.
    pub fn open(spec: &CorpusSpec) -> Result<Corpus> {
        let names: Vec<String> = spec.paths.iter().map(|path| path.display().to_string()).collect();
        let mut corpus = Corpus {
            documents: Vec::new(),
            skipped: Vec::new(),
            skipped_lines: Vec::new(),
            text_key: spec.text_key.clone().unwrap_or_else(|| json_lines::TEXT_KEY.to_string()),
            origin: names.join(", "),
            entries: 0,
        };
        let extensions: Vec<String> =
            spec.extensions.iter().map(|text| text.trim_start_matches('.').to_lowercase()).collect();
        for path in &spec.paths {
            let metadata = fs::metadata(path).map_err(DataError::reading(path))?;
            if metadata.is_dir() {
                corpus.walk(path, &extensions, 0)?;
            } else if metadata.is_file() {
                corpus.add_named(path)?;
            } else {
                // A pipe could be read only once, and every text is read at least twice.
                let cause = io::Error::other("it is neither a file nor a folder");
                return Err(DataError::Read { path: path.clone(), cause });
            }
        }
        if corpus.documents.is_empty() {
            return Err(corpus.no_text(spec));
        }
        Ok(corpus)
    }

    /// In the order of their tokens.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// The files inside folders that are not text.
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// The `.jsonl` files of which lines were skipped.
    pub fn skipped_lines(&self) -> &[(PathBuf, LineCounts)] {
        &self.skipped_lines
    }

    /// The sum over the documents.
    pub fn bytes(&self) -> u64 {
        self.documents.iter().map(|document| document.bytes).sum()
    }

    /// The paths that were asked for, as one text for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    fn add_named(&mut self, path: &Path) -> Result<()> {
        let read = self.measure(path)?;
        if let Some(lines) =
            read.lines.as_ref().filter(|lines| lines.lines > 0 && lines.lines == lines.skipped())
        {
            let (key, found) = (self.text_key.clone(), lines.to_string());
            return Err(DataError::NoTextLines { path: path.to_path_buf(), key, found });
        }
        self.add(path.to_path_buf(), read);
        Ok(())
    }

    /// Reads a whole file.
    fn measure(&self, path: &Path) -> Result<Measured> {
        let (mut bytes, mut zeros) = (0, false);
        let mut count = |text: &str| {
            bytes += text.len() as u64;
            zeros |= text.as_bytes().contains(&0);
            Ok(())
        };
        let lines = match json_lines::is_json_lines(path) {
            true => Some(json_lines::for_each_text(path, &self.text_key, &mut count)?),
            false => {
                for_each_block(path, &|text| text.len(), &mut |text, _| count(text))?;
                None
            }
        };
        // A zero in the text of a line was written as an escape, on purpose.
        Ok(Measured { bytes, zeros: zeros && lines.is_none(), lines })
    }

    fn walk(&mut self, folder: &Path, extensions: &[String], depth: usize) -> Result<()> {
        let refuse =
            |what: String| Err(DataError::Read { path: folder.to_path_buf(), cause: io::Error::other(what) });
        if depth > CORPUS_DEPTH {
            return refuse(format!(
                "folders are nested more than {CORPUS_DEPTH} deep: give a folder further down"
            ));
        }
        let entries = sorted_entries(folder)?;
        self.entries += entries.len();
        if self.entries > CORPUS_ENTRIES {
            return refuse(format!(
                "with it there are more than {CORPUS_ENTRIES} files and folders: join small files into larger ones"
            ));
        }
        for path in entries {
            let name = path.file_name().unwrap_or_default();
            if name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            // For a link, this is the kind of the link itself: links to folders are not followed.
            let own = fs::symlink_metadata(&path).map_err(DataError::reading(&path))?;
            if own.is_dir() {
                if name != BUILD_FOLDER {
                    self.walk(&path, extensions, depth + 1)?;
                }
            } else if is_wanted(&path, extensions) && fs::metadata(&path).is_ok_and(|found| found.is_file()) {
                self.add_found(path)?;
            }
        }
        Ok(())
    }

    fn add_found(&mut self, path: PathBuf) -> Result<()> {
        match self.measure(&path) {
            Ok(read) if !read.zeros => self.add(path, read),
            Ok(_) | Err(DataError::NotUtf8 { .. }) => {
                self.skipped.push(Skipped { path, reason: SkipReason::NotText });
            }
            Err(other) => return Err(other),
        }
        Ok(())
    }

    fn add(&mut self, path: PathBuf, Measured { bytes, lines, .. }: Measured) {
        let text_key = lines.as_ref().map(|lines| lines.key.clone());
        let reason = if lines.as_ref().is_some_and(|lines| lines.lines > 0) {
            SkipReason::NoLines
        } else {
            SkipReason::Empty
        };
        self.skipped_lines
            .extend(lines.filter(|lines| lines.skipped() > 0).map(|lines| (path.clone(), lines)));
        if bytes == 0 {
            self.skipped.push(Skipped { path, reason });
        } else {
            self.documents.push(Document { path, bytes, text_key });
        }
    }

    fn no_text(&self, spec: &CorpusSpec) -> DataError {
        let given = if spec.paths.is_empty() { "an empty list of paths" } else { &self.origin };
        let count = |reason| self.skipped.iter().filter(|skipped| skipped.reason == reason).count();
        let (empty, not_text) = (count(SkipReason::Empty), count(SkipReason::NotText));
        let mut found = format!("{empty} empty files, {not_text} that are not UTF-8 text");
        if count(SkipReason::NoLines) > 0 {
            let key = &self.text_key;
            found += &format!(
                ", {} .jsonl files without a string {key:?} in any line",
                count(SkipReason::NoLines)
            );
        }
        if !spec.extensions.is_empty() {
            found += &format!(", and no other file that ends in {}", spec.extensions.join(" or "));
        }
        DataError::NoText { given: given.to_string(), found }
    }
}

/// What reading a file whole has found.
struct Measured {
    /// Bytes of its text.
    bytes: u64,
    /// Whether it has zero bytes.
    zeros: bool,
    /// The lines of a `.jsonl` file.
    lines: Option<LineCounts>,
}

/// The entries of `folder` by name, so that every machine walks in the same order.
fn sorted_entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(DataError::reading(folder))?;
    let mut paths = Vec::new();
    // One more entry than is allowed is enough to refuse.
    for entry in entries.take(CORPUS_ENTRIES + 1) {
        paths.push(entry.map_err(DataError::reading(folder))?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Whether `path` has one of the extensions (lower case, without dot), or there are none.
fn is_wanted(path: &Path, extensions: &[String]) -> bool {
    let extension = path.extension().and_then(OsStr::to_str).map(str::to_lowercase);
    extensions.is_empty() || extension.is_some_and(|extension| extensions.contains(&extension))
}

/// Reads a text file in blocks and passes it on in parts: `take(text, last)` gets the text up to the position that
/// `last_cut` returns (0: read on), and the end of the file with `last` set.
///
/// # Errors
/// [`DataError::NotUtf8`] with the offset of the first bad byte, the errors of reading, those of `take`.
pub(crate) fn for_each_block(
    path: &Path,
    last_cut: &dyn Fn(&str) -> usize,
    take: &mut dyn FnMut(&str, bool) -> Result<()>,
) -> Result<()> {
    let mut file = phalanx_files::open_regular(path).map_err(DataError::reading(path))?;
    let mut text = String::new();
    // Bytes that are read but not decoded. At the start of an iteration these are at most three: the beginning of a
    // character.
    let mut bytes: Vec<u8> = Vec::new();
    let mut decoded = 0u64;
    loop {
        let read = file.by_ref().take(BLOCK_BYTES as u64).read_to_end(&mut bytes);
        let at_end = read.map_err(DataError::reading(path))? < BLOCK_BYTES;
        let valid = match str::from_utf8(&bytes) {
            Ok(all) => all,
            Err(e) if e.error_len().is_none() && !at_end => {
                str::from_utf8(&bytes[..e.valid_up_to()]).expect("the bytes before valid_up_to are UTF-8")
            }
            Err(e) => {
                let position = decoded + e.valid_up_to() as u64;
                return Err(DataError::NotUtf8 { path: path.to_path_buf(), position });
            }
        };
        text.push_str(valid);
        let length = valid.len();
        decoded += length as u64;
        bytes.drain(..length);

        let end = if at_end { text.len() } else { last_cut(&text) };
        if end == 0 && text.len() > UNCUT_BYTES {
            let reason = format!(
                "its first {} bytes cannot be cut for the tokenizer, and at most {UNCUT_BYTES} are held at a time: \
                 split the text",
                text.len()
            );
            return Err(DataError::Read { path: path.to_path_buf(), cause: io::Error::other(reason) });
        }
        if end > 0 || at_end {
            take(&text[..end], at_end)?;
            text.drain(..end);
        }
        if at_end {
            return Ok(());
        }
    }
}
