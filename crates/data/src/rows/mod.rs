//! Labelled rows: a text, perhaps a second one, and a class for both, in files of JSON lines or CSV.
//!
//! A row is encoded as the tokenizer's files frame a text: `[CLS] text [SEP]`, with a second text `[CLS] text [SEP] text_pair [SEP]`,
//! whose last part has token type 1. What is longer than a sequence is cut, of two texts from the end of the longer one, as
//! `truncation="longest_first"` of transformers does.

mod csv;
mod encode;
mod json_lines;
mod samples;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub use encode::RowEncoder;
pub(crate) use samples::BEFORE;
pub use samples::{RowKind, RowOrder, RowSamples, write_rows};

use crate::{DataError, Result};

/// Largest file of rows, which is read whole.
const MAX_FILE_BYTES: u64 = 2 << 30;

/// The key of the class, and that of the second text.
const LABEL_KEY: &str = "label";
const PAIR_KEY: &str = "text_pair";

/// Advice where a label is neither a name nor a number.
const ONE_CLASS: &str = "a row has one class, by its name or its number (regression, and several classes of one row, are not computed here)";

/// A row of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The first text.
    pub text: String,
    /// The second text, if there is one.
    pub pair: Option<String>,
    /// The class, by its name or its number.
    pub label: String,
    /// Index of its file in [`Rows::files`], and the line on which it begins, from 1.
    pub place: (usize, u64),
}

/// The rows of files, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// The rows.
    pub rows: Vec<Row>,
    /// The files.
    pub files: Vec<PathBuf>,
    /// Bytes of the files.
    pub bytes: u64,
    /// Keys or columns that are not read.
    pub unread: BTreeSet<String>,
}

/// The classes of labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundClasses {
    /// The labels are numbers, from 0 to below this.
    Numbers(usize),
    /// The labels are these names, sorted.
    Names(Vec<String>),
}

/// The values of a row, by key or column; `None` for one that it has, but not as a text.
struct Fields<'a> {
    line: u64,
    get: &'a dyn Fn(&str) -> Option<Value>,
    /// The keys that there are, for messages.
    names: String,
}

/// A value under a key.
enum Value {
    Text(String),
    /// A whole number of JSON.
    Number(String),
    /// Null, which counts as absent.
    Null,
    /// Another value, as it is written.
    Other(String),
}

impl Rows {
    /// Reads the rows of files, whose first text is under `text_key`.
    ///
    /// # Errors
    /// [`DataError::Row`] with the line of the first row that is wrong, [`DataError::Read`].
    pub fn read(paths: &[PathBuf], text_key: &str) -> Result<Rows> {
        let mut rows = Rows::default();
        for path in paths {
            rows.add(path, text_key)?;
        }
        match rows.rows.is_empty() {
            true => Err(refused(&rows.files[0], 1, "there is no row in the files".to_string())),
            false => Ok(rows),
        }
    }

    fn add(&mut self, path: &Path, text_key: &str) -> Result<()> {
        let bytes = crate::limits::read(path, MAX_FILE_BYTES)?;
        self.bytes += bytes.len() as u64;
        self.files.push(path.to_path_buf());
        let text = str::from_utf8(&bytes).map_err(|error| {
            let line = 1 + bytes[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count() as u64;
            refused(
                path,
                line,
                "the line is not UTF-8: convert the file (`iconv -f WINDOWS-1252 -t UTF-8`)".to_string(),
            )
        })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let mut take = |fields: Fields| {
            let row = row(&fields, text_key, self.files.len() - 1);
            self.rows.push(row.map_err(|reason| refused(path, fields.line, reason))?);
            Ok(())
        };
        let unread = match extension {
            "jsonl" | "ndjson" | "json" => json_lines::each(path, text, &mut take)?,
            "csv" => csv::each(path, text, &mut take)?,
            _ => {
                let reason = "rows are read from files that end with .jsonl (one JSON object a line) or .csv"
                    .to_string();
                return Err(refused(path, 1, reason));
            }
        };
        let is_read = |name: &String| [text_key, LABEL_KEY, PAIR_KEY].contains(&name.as_str());
        self.unread.extend(unread.into_iter().filter(|name| !is_read(name)));
        Ok(())
    }

    /// The classes of the labels: their numbers, if all are whole numbers, else their names.
    ///
    /// # Errors
    /// Labels that are all the same, and more than `max` of them.
    pub fn classes(&self, max: usize) -> Result<FoundClasses> {
        let labels: BTreeSet<&str> = self.rows.iter().map(|row| row.label.as_str()).collect();
        let numbers: Option<Vec<usize>> = labels.iter().map(|label| label.parse().ok()).collect();
        let count =
            numbers.as_ref().map_or(labels.len(), |numbers| numbers.iter().max().map_or(0, |max| max + 1));
        let whole = |reason: String| Err(refused(&self.files[0], 1, reason));
        match (labels.len(), count, numbers) {
            (1, ..) => whole(format!(
                "all rows have the label {:?}: there is nothing to tell apart",
                self.rows[0].label
            )),
            (_, count, _) if count > max => whole(format!(
                "the labels make {count} classes, and at most {max} are possible: is {LABEL_KEY:?} the class?"
            )),
            (_, count, Some(_)) => Ok(FoundClasses::Numbers(count)),
            (.., None) => Ok(FoundClasses::Names(labels.into_iter().map(str::to_string).collect())),
        }
    }

    /// The number of a row's class: that of its name, or else the number that it is.
    ///
    /// # Errors
    /// [`DataError::Row`] for a label that is not among the classes.
    pub fn class(&self, row: &Row, classes: &[String]) -> Result<usize> {
        let by_name = classes.iter().position(|class| *class == row.label);
        let by_number = || row.label.parse::<usize>().ok().filter(|number| *number < classes.len());
        by_name.or_else(by_number).ok_or_else(|| {
            let (file, line) = row.place;
            let shown: Vec<String> = classes.iter().take(8).map(|class| format!("{class:?}")).collect();
            let more = if classes.len() > 8 { ", ..." } else { "" };
            let last = classes.len() - 1;
            let reason = format!(
                "the label {:?} is not among the classes {}{more} (numbers 0 to {last})",
                row.label,
                shown.join(", ")
            );
            refused(&self.files[file], line, reason)
        })
    }
}

fn refused(path: &Path, line: u64, reason: String) -> DataError {
    DataError::Row { path: path.to_path_buf(), line, reason }
}

/// The row of these values; the error is a reason to print.
fn row(fields: &Fields, text_key: &str, file: usize) -> Result<Row, String> {
    let missing = |key: &str| format!("there is no {key:?}: the row has {}", fields.names);
    let text = |key: &str| match (fields.get)(key) {
        Some(Value::Text(text)) => Ok(Some(text)),
        None | Some(Value::Null) => Ok(None),
        Some(Value::Number(given) | Value::Other(given)) => {
            Err(format!("{key:?} is {given}, expected a text"))
        }
    };
    let label = match (fields.get)(LABEL_KEY) {
        Some(Value::Text(label)) if label.trim().is_empty() => Err(format!("{LABEL_KEY:?} is empty")),
        Some(Value::Text(label) | Value::Number(label)) => Ok(label),
        Some(Value::Other(given)) => Err(format!("{LABEL_KEY:?} is {given}: {ONE_CLASS}")),
        None | Some(Value::Null) => Err(missing(LABEL_KEY)),
    };
    let first = text(text_key)?.ok_or_else(|| missing(text_key))?;
    // An empty column is none.
    let pair = text(PAIR_KEY)?.filter(|pair| !pair.is_empty());
    Ok(Row { text: first, pair, label: label?, place: (file, fields.line) })
}
