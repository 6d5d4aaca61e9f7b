//! Token files that are read one after the other, as the one file that `cat` would make of their ids.
//!
//! A window may cross the border of two files, as it may cross the border of two documents in one: so samples depend only on the
//! sequence of tokens, and not on how it was cut into files.

use std::path::PathBuf;

use super::scan::Scan;
use super::{TokenFile, TokenType};
use crate::{DataError, Result, TokenFilesError, Tokenizer};

/// Separates the checksums of several files.
const JOIN: char = '+';

/// One or several token files of one format, id type and tokenizer.
pub struct TokenFiles {
    files: Vec<TokenFile>,
    /// Tokens up to the end of each file.
    ends: Vec<usize>,
}

impl TokenFiles {
    /// Opens the files of `paths`, at least one; `given` is the type of bare ids.
    ///
    /// # Errors
    /// Those of [`TokenFile::open_as`]; [`TokenFilesError::Unlike`], [`TokenFilesError::Twice`], and
    /// [`DataError::NotTokenFile`] for one of several files that has no token.
    pub fn open(paths: &[PathBuf], given: TokenType) -> Result<TokenFiles> {
        let files = paths.iter().map(|path| TokenFile::open_as(path, given)).collect::<Result<Vec<_>>>()?;
        TokenFiles::of(files)
    }

    pub(crate) fn of(files: Vec<TokenFile>) -> Result<TokenFiles> {
        assert!(!files.is_empty(), "at least one token file");
        let mut end = 0;
        let ends = files.iter().map(|file| {
            end += file.len();
            end
        });
        let files = TokenFiles { ends: ends.collect(), files };
        for (at, file) in files.files.iter().enumerate().skip(1) {
            files.files[..at].iter().try_for_each(|earlier| earlier.is_another(file))?;
            files.files[0].goes_with(file)?;
        }
        match files.files.iter().find(|file| file.is_empty() && files.files.len() > 1) {
            Some(file) => {
                let reason = "it holds no token; leave it out".to_string();
                Err(DataError::NotTokenFile { path: file.path().to_path_buf(), reason })
            }
            None => Ok(files),
        }
    }

    /// Refuses files of another format, id type or tokenizer, and files that both have.
    ///
    /// # Errors
    /// [`TokenFilesError::Unlike`], [`TokenFilesError::Twice`].
    pub fn goes_with(&self, other: &TokenFiles) -> Result<()> {
        self.files[0].goes_with(&other.files[0])?;
        other.files.iter().try_for_each(|file| self.files.iter().try_for_each(|own| own.is_another(file)))
    }

    /// The files, in their order.
    pub fn files(&self) -> &[TokenFile] {
        &self.files
    }

    /// The number of tokens of all files.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The size of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(TokenFile::bytes).sum()
    }

    /// The name of one file, or of the first and the number of files.
    pub fn origin(&self) -> String {
        let first = self.files[0].path().display();
        match self.files.len() {
            1 => first.to_string(),
            several => format!("the {several} token files {first} ..."),
        }
    }

    /// The number of ids of the vocabulary, where the format tells it.
    pub fn vocab_size(&self) -> Option<usize> {
        self.files.iter().filter_map(TokenFile::vocab_size).max()
    }

    /// The tokenizer by which all were made, which only Phalanx's own format holds.
    ///
    /// # Errors
    /// Those of [`TokenFile::tokenizer`].
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        self.files[0].tokenizer()
    }

    /// Fills `out` with tokens, starting at number `at` of all.
    ///
    /// # Errors
    /// Those of [`TokenFile::read`].
    ///
    /// # Panics
    /// When `at + out.len()` is beyond [`TokenFiles::len`].
    pub fn read(&self, mut at: usize, mut out: &mut [u32]) -> Result<()> {
        while !out.is_empty() {
            let number = self.number_of(at);
            let here = out.len().min(self.ends[number] - at);
            let (part, rest) = out.split_at_mut(here);
            self.files[number].read(at - self.start_of(number), part)?;
            (at, out) = (at + here, rest);
        }
        Ok(())
    }

    /// The name of the file that holds token `at`, and the number of the token in it.
    pub(crate) fn place(&self, at: usize) -> (String, usize) {
        let number = self.number_of(at);
        (self.files[number].path().display().to_string(), at - self.start_of(number))
    }

    /// The file that holds token `at`.
    fn number_of(&self, at: usize) -> usize {
        assert!(at < self.len(), "token {at} of {}", self.len());
        self.ends.partition_point(|end| *end <= at)
    }

    fn start_of(&self, number: usize) -> usize {
        self.ends[number] - self.files[number].len()
    }

    /// Reads all files once: their checksums, the largest id, and the first token that a vocabulary of `vocab` ids lacks.
    ///
    /// # Errors
    /// Those of [`TokenFile::scan`].
    pub fn scan(&self, vocab: usize) -> Result<Scan> {
        let scans = self.files.iter().map(|file| file.scan(vocab)).collect::<Result<Vec<_>>>()?;
        let blake3: Vec<&str> = scans.iter().map(|scan| scan.blake3.as_str()).collect();
        Ok(Scan {
            blake3: blake3.join(&JOIN.to_string()),
            largest: scans.iter().map(|scan| scan.largest).max().unwrap_or(0),
            out_of_range: scans.into_iter().find_map(|scan| scan.out_of_range),
        })
    }

    /// Refuses files whose checksums (as those of [`TokenFiles::scan`]) are not `expected`, in this order.
    ///
    /// # Errors
    /// [`DataError::NotTheTokens`] with the first such file.
    pub fn check_checksums(&self, found: &str, expected: &str) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        let mut differing = self.files.iter().zip(found.split(JOIN).zip(expected.split(JOIN)));
        let first = differing.find(|(_, (found, expected))| found != expected);
        let file = first.map_or(&self.files[0], |(file, _)| file);
        let (found, expected) = first.map_or((found, expected), |(_, pair)| pair);
        let (path, expected, found) = (file.path().to_path_buf(), expected.to_string(), found.to_string());
        Err(DataError::NotTheTokens { path, expected, found })
    }

    /// Refuses files whose checksums are no longer `expected`. Reads a file only if it was modified since it was opened or last
    /// checked.
    ///
    /// # Errors
    /// [`DataError::NotTheTokens`], and those of [`TokenFile::scan`].
    pub fn check_unchanged(&self, expected: &str) -> Result<()> {
        let each = expected.split(JOIN);
        self.files.iter().zip(each).try_for_each(|(file, expected)| file.check_unchanged(expected))
    }
}

impl TokenFile {
    fn is_another(&self, other: &TokenFile) -> Result<()> {
        let what = "are one file";
        match self.source.identity() == other.source.identity() {
            true => {
                let (one, other) = (self.path().into(), other.path().into());
                Err(TokenFilesError::Twice { one, other, what }.into())
            }
            false => Ok(()),
        }
    }

    /// Refuses a file of another format, id type or tokenizer.
    fn goes_with(&self, other: &TokenFile) -> Result<()> {
        let header = |file: &TokenFile| (file.format(), file.id_type(), file.vocab_size());
        if header(self) == header(other) && self.tokenizer_json()? == other.tokenizer_json()? {
            return Ok(());
        }
        let [own, others] = [self, other].map(|file| {
            let tokenizer = file.tokenizer()?;
            let name = tokenizer.as_ref().map_or(String::new(), |tokenizer| {
                format!(", tokenizer {} ({})", tokenizer.describe(), &tokenizer.digest()[..8])
            });
            let ids = file.vocab_size().map_or(String::new(), |vocab| format!(", {vocab} ids"));
            let kind = format!("{} ({}{ids}{name})", file.format(), file.id_type());
            Ok::<_, DataError>((kind, tokenizer.map(|tokenizer| tokenizer.digest())))
        });
        let (own, others) = (own?, others?);
        if own == others {
            return Ok(());
        }
        let (one, other) = (self.path().to_path_buf(), other.path().to_path_buf());
        Err(TokenFilesError::Unlike { one, other, former: own.0, latter: others.0 }.into())
    }
}
