//! The files of a corpus while it is opened: reads each once, and decides whether it is a document.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::findings::{Findings, Groups};
use super::records::{self, Outcome, Records, TEXT_KEY, WITHOUT_KEY, quoted};
use super::text::{BLOCK_BYTES, MARK, for_each_block};
use super::{CorpusSpec, Document};
use crate::content::{self, Content, Foreign, HEAD_BYTES, JsonLayout, extension, recognise};
use crate::{DataError, Result};

/// Documents and findings so far.
pub(super) struct Found<'a> {
    pub(super) documents: Vec<Document>,
    pub(super) findings: Findings,
    /// Lower case, without dots.
    pub(super) extensions: Vec<String>,
    /// Number of files and folders of any kind that were found in folders.
    pub(super) entries: usize,
    plain: Vec<String>,
    text_key: String,
    watch: &'a mut dyn FnMut(u64),
    /// Bytes that were read, and what of them `watch` knows.
    read: u64,
    watched: u64,
}

/// Results of reading a file whole.
#[derive(Default)]
struct Measured {
    /// Documents, and bytes of their text.
    documents: u64,
    bytes: u64,
    /// Records of a JSON file, and those that have no text.
    lines: u64,
    skipped_lines: Groups,
    remarks: Groups,
    /// Location of the records of a JSON file.
    records: Option<Records>,
}

impl<'a> Found<'a> {
    pub(super) fn new(spec: &CorpusSpec, watch: &'a mut dyn FnMut(u64)) -> Found<'a> {
        let lower =
            |list: &[String]| list.iter().map(|text| text.trim_start_matches('.').to_lowercase()).collect();
        Found {
            documents: Vec::new(),
            findings: Findings::default(),
            extensions: lower(&spec.extensions),
            entries: 0,
            plain: lower(&spec.plain),
            text_key: spec.text_key.clone().unwrap_or_else(|| TEXT_KEY.to_string()),
            watch,
            read: 0,
            watched: 0,
        }
    }

    /// Adds a file that the user has named, which must be a document unless it is empty.
    pub(super) fn add_named(&mut self, path: &Path) -> Result<()> {
        let read = self.measure(path)?;
        self.add(path.to_path_buf(), read);
        Ok(())
    }

    /// Adds a file of a folder, which is skipped if it is no document.
    pub(super) fn add_found(&mut self, path: PathBuf) -> Result<()> {
        // Files of one kind are one group, and what is each file's own stands behind its name.
        let (reason, detail) = match self.measure(&path) {
            Ok(read) => {
                self.add(path, read);
                return Ok(());
            }
            Err(DataError::NotText { is, way_out, .. } | DataError::NotUtf8 { is, way_out, .. }) => {
                (format!("{is} ({way_out})"), String::new())
            }
            // A regular file that is not opened as one is a pointer.
            Err(DataError::Read { cause, .. }) if cause.kind() == ErrorKind::InvalidInput => {
                ("a git-lfs pointer, not the file itself (`git lfs pull`)".to_string(), String::new())
            }
            Err(DataError::NotJson { reason, .. }) => ("broken JSON".to_string(), format!(" ({reason})")),
            Err(DataError::NoTexts { found, key, .. }) => {
                let what = "data.text_key names another key, and data.plain reads JSON as plain text";
                (format!("JSON without texts under the key {key:?} ({what})"), format!(" ({found})"))
            }
            Err(other) => return Err(other),
        };
        let bytes = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        self.findings.skipped_files.add(&reason, bytes, || format!("{}{detail}", path.display()));
        Ok(())
    }

    fn add(&mut self, path: PathBuf, read: Measured) {
        let findings = &mut self.findings;
        findings.lines += read.lines;
        findings.skipped_lines.join(read.skipped_lines);
        if read.documents == 0 {
            return findings.left_out.add("empty file", 0, || path.display().to_string());
        }
        findings.remarks.join(read.remarks);
        findings.files += 1;
        findings.documents += read.documents;
        findings.bytes += read.bytes;
        let records = read.records.map(|records| (records, self.text_key.clone()));
        self.documents.push(Document { path, bytes: read.bytes, records });
    }

    /// Reads a whole file.
    fn measure(&mut self, path: &Path) -> Result<Measured> {
        let (head, is_whole) = head(path)?;
        let is_plain = self.plain.contains(&extension(path));
        let content = if is_plain { Content::Text } else { recognise(path, &head, is_whole) };
        match content {
            Content::Foreign(foreign) => Err(not_text(path, foreign)),
            Content::Json(layout) => self.measure_records(path, layout),
            Content::Text => self.measure_text(path, &head, is_plain),
        }
    }

    fn measure_text(&mut self, path: &Path, head: &[u8], is_plain: bool) -> Result<Measured> {
        let mut read = Measured { documents: 1, ..Measured::default() };
        let (mut zeros, mut line_ends) = (false, false);
        for_each_block(path, &mut |text| {
            read.bytes += text.len() as u64;
            zeros |= text.as_bytes().contains(&0);
            line_ends |= text.contains("\r\n");
            self.watch(text.len());
            Ok(())
        })?;
        if zeros && !is_plain {
            return Err(not_text(path, content::with_zeros(path)));
        }
        if read.bytes == 0 {
            return Ok(Measured::default());
        }
        let looks_like = if is_plain { None } else { content::looks_like(path, head) };
        let name = || path.display().to_string();
        for what in looks_like.into_iter().chain(line_ends.then_some("CRLF line ends, kept as they are")) {
            read.remarks.add(what, 0, name);
        }
        if head.starts_with(MARK.as_bytes()) {
            read.remarks.add("byte order mark, dropped", 0, name);
        }
        Ok(read)
    }

    fn measure_records(&mut self, path: &Path, layout: JsonLayout) -> Result<Measured> {
        let key = self.text_key.clone();
        let without_texts = |found| DataError::NoTexts { path: path.to_path_buf(), key: key.clone(), found };
        let records = records::find(path, layout, &key)?.map_err(without_texts)?;
        let unit = if records == Records::Lines { "line" } else { "record" };
        let mut read = Measured::default();
        let strange = records::for_each_record(path, &records, &key, &mut |number, outcome, _| {
            let name = || format!("{} {unit} {number}", path.display());
            read.lines += 1;
            match outcome {
                Outcome::Text { bytes, .. } => {
                    (read.documents, read.bytes) = (read.documents + 1, read.bytes + bytes);
                    self.watch(bytes as usize);
                }
                Outcome::Empty => read.remarks.add("empty text, which makes no document", 0, name),
                Outcome::Skipped(WITHOUT_KEY) => {
                    read.skipped_lines.add(&format!("without the key {key:?}"), 0, name);
                }
                Outcome::Skipped(what) => read.skipped_lines.add(what, 0, name),
            }
            Ok(())
        })?;
        if read.documents == 0 && read.skipped_lines.count() > 0 {
            let mut found = format!("skipped {} of {} lines: ", read.skipped_lines.count(), read.lines);
            found += &read.skipped_lines.describe();
            if !strange.keys.is_empty() {
                found += &format!("; the first object has the keys {}", quoted(&strange.keys));
            }
            return Err(without_texts(found));
        }
        let by_content = !["json", "jsonl", "ndjson"].contains(&extension(path).as_str());
        for (count, what) in [
            (u64::from(by_content), "JSON by its content, so each record is a document"),
            (strange.lone_surrogates, "half of a surrogate pair, read as U+FFFD"),
            (strange.repeated_keys, "record with the key of the text twice, of which the last counts"),
        ] {
            read.remarks.add_some(what, count, 0, || path.display().to_string());
        }
        read.records = Some(records);
        Ok(read)
    }

    /// Counts bytes that were read.
    fn watch(&mut self, bytes: usize) {
        self.read += bytes as u64;
        if self.read - self.watched >= BLOCK_BYTES as u64 {
            self.watched = self.read;
            (self.watch)(self.read);
        }
    }
}

fn not_text(path: &Path, Foreign { is, way_out }: Foreign) -> DataError {
    DataError::NotText { path: path.to_path_buf(), is, way_out }
}

/// The first bytes of a file, and whether they are all.
fn head(path: &Path) -> Result<(Vec<u8>, bool)> {
    let mut head = Vec::new();
    let file = phalanx_system::files::open_regular(path).map_err(DataError::reading(path))?;
    file.take(HEAD_BYTES as u64 + 1).read_to_end(&mut head).map_err(DataError::reading(path))?;
    let is_whole = head.len() <= HEAD_BYTES;
    head.truncate(HEAD_BYTES);
    Ok((head, is_whole))
}
