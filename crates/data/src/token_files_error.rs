//! Errors of the token files that a user names: what they look like, and how they go together.

use std::path::PathBuf;

use thiserror::Error;

use crate::TokenFormat;

/// Token files that cannot be what is meant.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenFilesError {
    /// A token file that is probably something else.
    #[error(
        "{} does not look like token ids ({ids}): {is}; {advice}. If it is meant as it is, set data.unusual_tokens = \
         true", .path.display()
    )]
    LooksLike {
        /// The file.
        path: PathBuf,
        /// The type of ids that it would be read as.
        ids: &'static str,
        /// Description of its appearance.
        is: String,
        /// Advice to the user.
        advice: String,
    },

    /// A type of ids that the file's header contradicts.
    #[error(
        "data.token_type = {given:?}, but the header of {} ({format} format) says that its ids are {found}: leave \
         data.token_type out, which is for bare ids", .path.display()
    )]
    OtherType {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: TokenFormat,
        /// The type in its header.
        found: &'static str,
        /// The type that the user gave.
        given: &'static str,
    },

    /// A pattern that no file matches.
    #[error(
        "no token file matches {}: {reason} (relative paths start at the current folder; * and ? stand for a part of \
         one name, and {{a,b}} is not understood)", .pattern.display()
    )]
    NoMatch {
        /// The pattern that the user gave.
        pattern: PathBuf,
        /// Why.
        reason: String,
    },

    /// More token files than are kept open.
    #[error(
        "{given} or more token files are named, and at most {max} are read as one: join them into larger ones"
    )]
    TooManyFiles {
        /// Number of files so far.
        given: usize,
        /// The largest number.
        max: usize,
    },

    /// Token files that do not go together.
    #[error(
        "{} and {} do not go together: the former is {former}, the latter {latter}; files of one run need one format, \
         one type of ids and one tokenizer: make them again, alike", .one.display(), .other.display()
    )]
    Unlike {
        /// A file.
        one: PathBuf,
        /// Another one.
        other: PathBuf,
        /// Description of the first.
        former: String,
        /// Description of the other.
        latter: String,
    },

    /// Tokens that are given twice.
    #[error("{} and {} {what}: leave one of them out", .one.display(), .other.display())]
    Twice {
        /// A file.
        one: PathBuf,
        /// The same file, or one of the same content.
        other: PathBuf,
        /// Relation of the two, for the message: `are one file`.
        what: &'static str,
    },
}
