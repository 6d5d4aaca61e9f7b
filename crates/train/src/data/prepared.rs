//! Data of a run once they are read: descriptions, and the tokenizer.

use phalanx_data::{DataError, Findings, Progress, TokenFile, Tokenizer};
use serde::Serialize;

/// Progress in preparing the data of a run.
pub enum TextProgress<'a> {
    /// So many bytes of the text were read, to find out what it holds.
    Reading(u64),
    /// All of it was read.
    Read(&'a Findings),
    /// It is being tokenised.
    Tokenising(Progress),
}

/// The result of preparing the data of a run.
pub struct Prepared {
    /// The tokenizer; None for a token file without one.
    pub tokenizer: Option<Tokenizer>,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of rows that the token table needs; 0 when it is not known.
    pub vocab: usize,
    /// Data that was read.
    pub read: DataRead,
    /// Names of the classes of labelled rows; none for other data.
    pub labels: Vec<String>,
    /// For people: token files that look unusual, what was assumed about the tokenizer, and special tokens that the text
    /// spells.
    pub notes: Vec<String>,
}

/// Data that was read for a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DataRead {
    /// Files of text, or token files.
    pub files: u64,
    /// Bytes of the text, or of the token files.
    pub bytes: u64,
    /// Documents, where that is known.
    pub documents: Option<u64>,
    /// Parts of text that were skipped or left out, if text was read now.
    pub findings: Option<Findings>,
}

impl DataRead {
    /// Describes the text before it is tokenised.
    pub fn of_text(findings: &Findings) -> DataRead {
        let Findings { files, bytes, documents, .. } = *findings;
        DataRead { files, bytes, documents: Some(documents), findings: Some(findings.clone()) }
    }

    /// Describes the token files.
    ///
    /// # Errors
    /// A file that was shortened since it was opened.
    pub fn of_tokens<'a>(files: impl Iterator<Item = &'a TokenFile>) -> Result<DataRead, DataError> {
        let mut read = DataRead { documents: Some(0), ..DataRead::default() };
        for file in files {
            read.files += 1;
            read.bytes += file.bytes();
            read.documents = read.documents.zip(file.documents()?).map(|(all, of_file)| all + of_file);
        }
        Ok(read)
    }
}
