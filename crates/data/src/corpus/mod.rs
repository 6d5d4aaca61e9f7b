//! Turns text files and folders into a list of documents, in an order that depends only on their names.
//!
//! Every file is read once when the corpus is opened, so that what cannot be read, and the number of bytes, are known
//! before anything is tokenised ([`Findings`]). A file that the user names must be text or JSON with texts; inside a
//! folder, files that are not are skipped and counted. Documents are then read again in blocks, so a corpus larger than
//! memory is no problem. What a file holds is told by its content ([`content`](crate::content)).

mod findings;
mod found;
mod records;
mod text;
mod walk;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

pub use findings::{Findings, Group, Groups};
pub(crate) use text::BLOCK_BYTES;

use crate::{DataError, Result};
use found::Found;
use records::Records;
use text::{Parts, Take};

/// The text that a user asked for.
#[derive(Clone, Debug, Default)]
pub struct CorpusSpec {
    /// Files and folders, in the order of their documents. Folders are walked to their leaves.
    pub paths: Vec<PathBuf>,
    /// File extensions, with or without the dot, in any case. Inside folders, only files with one of them are read; if
    /// the list is empty, all text files.
    pub extensions: Vec<String>,
    /// Extensions of the files that are plain text whatever they hold.
    pub plain: Vec<String>,
    /// The key of the text in each record of a JSON file; `text` when None.
    pub text_key: Option<String>,
    /// The fraction of lines, and of the bytes of files, that may be skipped; when None, 1 % of the lines and half of the
    /// bytes.
    pub max_skipped: Option<f64>,
}

/// One file that is read: one document, or many if it holds JSON records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// Path that it is read from.
    pub path: PathBuf,
    /// The size of its text when the corpus was opened; never 0.
    pub bytes: u64,
    /// For a JSON file: where its records are, and the key of the text in each.
    records: Option<(Records, String)>,
}

impl Document {
    /// Hands out the text in parts: `take(text, last)`, where `last` ends a document. Parts of a document end where
    /// `last_cut` says: `last_cut(text)` is the last position at which `text` may be cut, or 0.
    ///
    /// # Errors
    /// Those of reading, a text that cannot be cut, and those of `take`.
    pub(crate) fn for_each_part(&self, last_cut: &dyn Fn(&str) -> usize, take: Take) -> Result<()> {
        let mut parts = Parts::new(&self.path, last_cut, take);
        if let Some((records, key)) = &self.records {
            return records::for_each_text(&self.path, records, key, &mut parts);
        }
        text::for_each_block(&self.path, &mut |text| {
            parts.text.push_str(text);
            parts.grown()
        })?;
        parts.end_document()
    }
}

/// The documents of a run's text; at least one.
#[derive(Clone, Debug)]
pub struct Corpus {
    documents: Vec<Document>,
    findings: Findings,
    origin: String,
}

impl Corpus {
    /// Finds the documents: a named file is one, or many if it holds JSON records; a folder gives its files sorted by name,
    /// folder by folder. Links are followed, but no folder is read twice.
    ///
    /// # Errors
    /// [`DataError::MissingPath`]; for a named file that cannot be read [`DataError::NotText`], [`DataError::NotUtf8`],
    /// [`DataError::NotJson`] or [`DataError::NoTexts`]; [`DataError::NoText`] when no document is found,
    /// [`DataError::TooMuchSkipped`], [`DataError::Read`] for what cannot be read.
    pub fn open(spec: &CorpusSpec) -> Result<Corpus> {
        Corpus::open_watched(spec, &mut |_| {})
    }

    /// The same; `watch` is told, about once per megabyte, how many bytes were read.
    ///
    /// # Errors
    /// As for [`Corpus::open`].
    pub fn open_watched(spec: &CorpusSpec, watch: &mut dyn FnMut(u64)) -> Result<Corpus> {
        let names: Vec<String> = spec.paths.iter().map(|path| path.display().to_string()).collect();
        let mut found = Found::new(spec, watch);
        for path in &spec.paths {
            let metadata = fs::metadata(path).map_err(DataError::reading(path))?;
            if metadata.is_dir() {
                walk::walk(path, &mut found)?;
            } else if metadata.is_file() {
                found.add_named(path)?;
            } else {
                // A pipe could be read only once, and every text is read at least twice.
                let cause = io::Error::other("it is neither a file nor a folder");
                return Err(DataError::Read { path: path.clone(), cause });
            }
        }
        let Found { documents, mut findings, .. } = found;
        let origin = names.join(", ");
        if documents.is_empty() {
            return Err(no_text(spec, &origin, &findings));
        }
        remark_repeated(&documents, &mut findings.remarks)?;
        findings.check(spec.max_skipped)?;
        Ok(Corpus { documents, findings, origin })
    }

    /// In the order of their tokens.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// Returns whether there is more than one document.
    pub fn may_have_several_documents(&self) -> bool {
        self.findings.documents > 1
    }

    /// Files and records that were read, and those that were not.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// The sum over the documents.
    pub fn bytes(&self) -> u64 {
        self.findings.bytes
    }

    /// The paths that were asked for, as one text for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }
}

fn no_text(spec: &CorpusSpec, origin: &str, findings: &Findings) -> DataError {
    let given = if spec.paths.is_empty() { "an empty list of paths" } else { origin };
    let mut found = findings.notes().join("\n");
    if found.is_empty() {
        found = "no file at all".to_string();
    }
    if !spec.extensions.is_empty() {
        found += &format!("; no other file ends in {}", spec.extensions.join(" or "));
    }
    DataError::NoText { given: given.to_string(), found }
}

/// Remarks files that are read more than once: by the same or another name, by a link, or as a copy.
fn remark_repeated(documents: &[Document], remarks: &mut Groups) -> Result<()> {
    let mut sizes: HashMap<u64, usize> = HashMap::new();
    documents.iter().for_each(|document| *sizes.entry(document.bytes).or_default() += 1);
    let mut files: HashMap<(u64, u64), &Path> = HashMap::new();
    let mut contents: HashMap<blake3::Hash, &Path> = HashMap::new();
    for Document { path, bytes, .. } in documents.iter().filter(|document| sizes[&document.bytes] > 1) {
        let file = phalanx_system::files::open_regular(path).map_err(DataError::reading(path))?;
        let metadata = file.metadata().map_err(DataError::reading(path))?;
        let name = |earlier: &Path| format!("{} = {}", path.display(), earlier.display());
        match files.entry((metadata.dev(), metadata.ino())) {
            Entry::Occupied(earlier) => {
                let what = "the same file again (named or linked twice), read once more";
                remarks.add(what, *bytes, || name(earlier.get()));
                continue;
            }
            Entry::Vacant(place) => drop(place.insert(path)),
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(file).map_err(DataError::reading(path))?;
        match contents.entry(hasher.finalize()) {
            Entry::Occupied(earlier) => {
                remarks.add("copy of another file, read too", *bytes, || name(earlier.get()));
            }
            Entry::Vacant(place) => drop(place.insert(path)),
        }
    }
    Ok(())
}
