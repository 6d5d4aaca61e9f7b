//! The crate from outside: every kind of tokenizer, corpus and token file, good and bad, and the
//! samples that come of them. One binary, because linking the tokenizers takes longer than the tests.

mod chats;
mod corpora;
mod foreign;
mod gguf;
mod hostile;
mod hugging_face_files;
mod json_lines;
mod masking;
mod samples;
mod token_files;
mod token_lists;
mod token_looks;
mod tokenizer_folders;
mod tokenizers;
mod windows;

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_data::{Corpus, CorpusSpec, DataError};
use tempfile::TempDir;

/// Counts what each thread holds.
#[global_allocator]
static ALLOCATOR: phalanx_testing::hostile::Counting = phalanx_testing::hostile::Counting;

/// A folder that is removed at the end of the test.
fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Writes a file, with the folders above it.
fn write(path: PathBuf, content: impl AsRef<[u8]>) -> PathBuf {
    fs::create_dir_all(path.parent().expect("a file in a folder")).expect("folders");
    fs::write(&path, content).expect("a file");
    path
}

fn corpus(paths: &[&Path]) -> Result<Corpus, DataError> {
    let paths = paths.iter().map(|path| path.to_path_buf()).collect();
    Corpus::open(&CorpusSpec { paths, ..CorpusSpec::default() })
}

/// The same, where everything may be skipped.
fn tolerant(paths: &[&Path]) -> Result<Corpus, DataError> {
    let paths = paths.iter().map(|path| path.to_path_buf()).collect();
    Corpus::open(&CorpusSpec { paths, max_skipped: Some(1.0), ..CorpusSpec::default() })
}

/// The names in `folder`, sorted, to check that no file remains.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Asserts that the message of an error contains every one of `parts`.
#[track_caller]
fn assert_says<T>(result: Result<T, DataError>, parts: &[&str]) {
    let Err(error) = result else { panic!("no error, but expected one that says {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is missing in: {message}");
    }
}
