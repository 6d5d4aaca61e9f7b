//! The token files of a run: those that it trains on, and those that it evaluates, if they are files of their own.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use phalanx_data::{DataError, Scan, TokenFile, TokenFiles, TokenFilesError};

use crate::config::DataConfig;

/// Name of the token file in a run folder: a resumed run reads the tokens it started with.
pub const TOKENS_FILE: &str = "tokens.bin";

/// Separates the checksums of the files for training from those of the files for evaluation.
const EVALUATED: char = '|';

/// File names that a message lists.
const SHOWN: usize = 8;

/// Open token files.
pub struct TokenData {
    /// Files to train on; a part of them is held out when there are none for evaluation.
    pub train: TokenFiles,
    /// Files for evaluation.
    pub evaluated: Option<TokenFiles>,
}

impl TokenData {
    /// Opens the files that `data` names, or the one that was made of text, in `folder`.
    ///
    /// # Errors
    /// Files that are missing or damaged, do not go together, or are given twice.
    pub fn open(data: &DataConfig, folder: &Path) -> Result<TokenData, DataError> {
        let open = |paths: Vec<PathBuf>, key| {
            TokenFiles::open(&paths, data.token_type).map_err(|error| error.of_key(key))
        };
        let train = match &data.tokens {
            Some(named) => open(named.paths(), "data.tokens")?,
            None => TokenFiles::open(&[folder.join(TOKENS_FILE)], data.token_type)?,
        };
        let evaluated =
            data.validation_paths().map(|paths| open(paths, "data.validation_tokens")).transpose()?;
        evaluated.iter().try_for_each(|evaluated| train.goes_with(evaluated))?;
        Ok(TokenData { train, evaluated })
    }

    /// All files.
    pub fn files(&self) -> impl Iterator<Item = &TokenFile> {
        self.train.files().iter().chain(self.evaluated.iter().flat_map(TokenFiles::files))
    }

    /// Refuses files that are probably something else than tokens, unless `data` accepts them; returns notes about those, and
    /// about files for evaluation that are trained on.
    ///
    /// # Errors
    /// [`TokenFilesError::LooksLike`].
    pub fn check_looks(&self, data: &DataConfig) -> Result<Vec<String>, DataError> {
        let mut notes = Vec::new();
        for file in self.files() {
            if !data.unusual_tokens {
                file.check_look()?;
            } else if let Some(look) = file.look()? {
                let (path, ids) = (file.path().display(), file.id_type());
                notes.push(format!(
                    "{path}: {}; read as {ids} ids all the same (data.unusual_tokens)",
                    look.is
                ));
            }
        }
        let name =
            |file: &TokenFile| file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_for_evaluation = |name: &String| {
            let words = name.split(|letter: char| !letter.is_ascii_alphanumeric());
            words.clone().any(|word| ["val", "valid", "validation", "test", "eval"].contains(&word))
        };
        let mixed: Vec<String> = self.train.files().iter().map(name).filter(is_for_evaluation).collect();
        if let (Some(first), true) = (mixed.first(), self.train.files().len() > 1) {
            notes.push(format!(
                "{first} is trained on, as data.tokens says; by its name it is for evaluation: then name it in \
                 data.validation_tokens instead"
            ));
        }
        Ok(notes)
    }

    /// Reads all files once. `expected` are the checksums that they must have, where those are known.
    ///
    /// # Errors
    /// [`DataError::NotTheTokens`], ids that a vocabulary of `vocab` ids does not have, and files for evaluation whose content is
    /// trained on.
    pub fn scan(&self, vocab: usize, expected: Option<&str>) -> Result<ScannedTokens, DataError> {
        let train = self.train.scan(vocab)?;
        let evaluated = self.evaluated.as_ref().map(|files| files.scan(vocab)).transpose()?;
        let mut scans: Vec<Scan> = [Some(train), evaluated].into_iter().flatten().collect();
        let checksums: Vec<&str> = scans.iter().map(|scan| scan.blake3.as_str()).collect();
        let checksums = checksums.join(&EVALUATED.to_string());
        expected.map_or(Ok(()), |expected| self.check_checksums(&checksums, expected))?;
        let notes = self.same_content(&scans)?;
        let largest = scans.iter().map(|scan| scan.largest).max().unwrap_or(0);
        match scans.iter_mut().find_map(|scan| scan.out_of_range.take()) {
            Some(error) => Err(error),
            None => Ok(ScannedTokens { checksums, largest, notes, files: Vec::new() }),
        }
    }

    fn check_checksums(&self, found: &str, expected: &str) -> Result<(), DataError> {
        let [(found, found_evaluated), (expected, evaluated)] =
            [found, expected].map(TokenData::checksums_of);
        self.train.check_checksums(found, expected)?;
        let both = self.evaluated.iter().zip(found_evaluated.zip(evaluated));
        both.into_iter().try_for_each(|(files, (found, expected))| files.check_checksums(found, expected))
    }

    /// The checksums of the files to train on, and of those for evaluation, from [`ScannedTokens::checksums`].
    pub fn checksums_of(all: &str) -> (&str, Option<&str>) {
        all.split_once(EVALUATED).map_or((all, None), |(train, evaluated)| (train, Some(evaluated)))
    }

    /// Refuses a file for evaluation whose content is trained on; notes about files for training that are alike.
    fn same_content(&self, scans: &[Scan]) -> Result<Vec<String>, DataError> {
        let checksums = scans.iter().flat_map(|scan| scan.blake3.split('+'));
        let mut seen: HashMap<&str, (&TokenFile, bool)> = HashMap::new();
        let mut notes = Vec::new();
        for (at, (file, checksum)) in self.files().zip(checksums).enumerate() {
            let is_trained = at < self.train.files().len();
            let Some((earlier, was_trained)) = seen.insert(checksum, (file, is_trained)) else { continue };
            let (one, other) = (earlier.path().to_path_buf(), file.path().to_path_buf());
            if was_trained != is_trained {
                let what = "have the same content, and one is for training, the other for evaluation";
                return Err(TokenFilesError::Twice { one, other, what }.into());
            }
            notes.push(format!(
                "{} and {} have the same content: their tokens count twice",
                one.display(),
                other.display()
            ));
        }
        Ok(notes)
    }

    /// Lines for people: the files in their order, their format, tokens and bytes, and the largest id where it is known.
    pub fn describe(&self, largest: Option<u32>) -> Vec<String> {
        let mut lines = vec![line("tokens", &self.train)];
        lines.extend(self.evaluated.as_ref().map(|files| line("validation", files)));
        lines.extend(largest.map(|id| format!("the largest id of the token files is {id}")));
        lines
    }
}

/// Result of a scan of all files.
pub struct ScannedTokens {
    /// Checksums of all files, in hexadecimal.
    pub checksums: String,
    /// The largest id.
    pub largest: u32,
    /// For people: files of the same content.
    pub notes: Vec<String>,
    /// For people: what was read.
    pub files: Vec<String>,
}

fn line(what: &str, files: &TokenFiles) -> String {
    let all = files.files();
    let names = all.iter().take(SHOWN).map(|file| file.path().display().to_string());
    let names = names.collect::<Vec<_>>().join(", ");
    let more = all.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let count =
        if all.len() == 1 { "1 file".to_string() } else { format!("{} files, in this order", all.len()) };
    format!(
        "{what:<11} {} tokens of type {} in {} bytes ({}), {count}: {names}{more}",
        files.len(),
        all[0].id_type(),
        files.bytes(),
        all[0].format()
    )
}
