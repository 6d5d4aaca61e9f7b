//! The tokens of a run behind one type, whether they lie in memory or in a file.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::token_file::{NARROW_VOCAB, TokenFile, TokenFiles, TokenType};
use crate::{DataError, Result};

/// A range of tokens. Clones and splits share the underlying storage.
#[derive(Clone)]
pub struct Tokens {
    source: Storage,
    range: Range<usize>,
    /// The name of the tokens in messages: a file, the paths of a text, or a part of either.
    origin: String,
    vocab: Option<usize>,
    /// Ids from this one upward are refused when they are read.
    limit: usize,
}

/// Storage of the ids: in memory as 16 or 32 bits each, or in files.
#[derive(Clone)]
enum Storage {
    Narrow(Arc<Vec<u16>>),
    Wide(Arc<Vec<u32>>),
    Files(Arc<TokenFiles>),
}

impl Tokens {
    /// Tokens in memory, with a vocabulary of `vocab` ids; `origin` names them in messages.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] for an id that the vocabulary does not have.
    pub fn from_ids(origin: &str, ids: &[u32], vocab: usize) -> Result<Tokens> {
        if let Some(position) = ids.iter().position(|&id| id as usize >= vocab) {
            let (origin, id) = (origin.to_string(), i64::from(ids[position]));
            return Err(DataError::TokenOutOfRange { origin, position, id, vocab });
        }
        let mut store = TokenStore::new(vocab);
        store.extend(ids);
        Ok(store.into_tokens(origin.to_string()))
    }

    /// The tokens of a token file, which stay there.
    ///
    /// # Errors
    /// Those of [`TokenFile::open`], and [`TokenFilesError::LooksLike`](crate::TokenFilesError::LooksLike) for a file that is probably something else.
    pub fn open(path: &Path) -> Result<Tokens> {
        let file = TokenFile::open(path)?;
        file.check_look()?;
        TokenFiles::of(vec![file]).map(Tokens::from)
    }

    /// The tokens of several token files, one after the other; `given` is the type of bare ids.
    ///
    /// # Errors
    /// Those of [`TokenFiles::open`].
    pub fn open_all(paths: &[PathBuf], given: TokenType) -> Result<Tokens> {
        TokenFiles::open(paths, given).map(Tokens::from)
    }

    /// The same tokens, for a model of `vocab` ids: reading an id that it does not have is an error. The
    /// tokens were checked ([`Tokens::check_vocab`]), so such an id means that the file was changed since.
    pub fn limited_to(self, vocab: usize) -> Tokens {
        Tokens { limit: vocab, ..self }
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Name of the tokens in messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The number of ids of the vocabulary, where it is known.
    pub fn vocab_size(&self) -> Option<usize> {
        self.vocab
    }

    /// The bytes of memory that the tokens take; 0 for a file, which stays on the disk.
    pub fn resident_bytes(&self) -> usize {
        match &self.source {
            Storage::Narrow(ids) => ids.capacity() * size_of::<u16>(),
            Storage::Wide(ids) => ids.capacity() * size_of::<u32>(),
            Storage::Files(_) => 0,
        }
    }

    /// Fills `out` with tokens, starting at number `at`.
    ///
    /// # Errors
    /// [`DataError::TokensChanged`] for an id beyond [`Tokens::limited_to`], [`DataError::Shortened`],
    /// [`DataError::Read`].
    ///
    /// # Panics
    /// When `at + out.len()` is beyond [`Tokens::len`].
    pub fn read(&self, at: usize, out: &mut [u32]) -> Result<()> {
        assert!(
            at <= self.len() && out.len() <= self.len() - at,
            "{} tokens from {at} on of {} that {} has",
            out.len(),
            self.len(),
            self.origin
        );
        let start = self.range.start + at;
        let end = start + out.len();
        match &self.source {
            Storage::Narrow(ids) => {
                out.iter_mut().zip(&ids[start..end]).for_each(|(out, id)| *out = u32::from(*id));
            }
            Storage::Wide(ids) => out.copy_from_slice(&ids[start..end]),
            Storage::Files(files) => files.read(start, out)?,
        }
        match out.iter().position(|&id| id as usize >= self.limit) {
            None => Ok(()),
            Some(place) => {
                let (origin, position) = match &self.source {
                    Storage::Files(files) => files.place(start + place),
                    Storage::Narrow(_) | Storage::Wide(_) => (self.origin.clone(), at + place),
                };
                Err(DataError::TokensChanged { origin, position, id: out[place], vocab: self.limit })
            }
        }
    }

    /// Checks every token of the source (of all parts that it was split into) against a vocabulary of
    /// `vocab` ids. Free for tokens in memory whose vocabulary is known to be no larger; a file is
    /// read once, whatever its header says.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] with the first token that is out of range.
    pub fn check_vocab(&self, vocab: usize) -> Result<()> {
        let first = match &self.source {
            Storage::Files(files) => return files.scan(vocab)?.out_of_range.map_or(Ok(()), Err),
            _ if self.vocab.is_some_and(|own| own <= vocab) => None,
            Storage::Narrow(ids) => first_beyond(ids, vocab),
            Storage::Wide(ids) => first_beyond(ids, vocab),
        };
        match first {
            None => Ok(()),
            Some((position, id)) => {
                Err(DataError::TokenOutOfRange { origin: self.origin.clone(), position, id, vocab })
            }
        }
    }

    /// Refuses token files that are not `expected` any more ([`TokenFiles::check_unchanged`]). Tokens in memory
    /// cannot change.
    ///
    /// # Errors
    /// Those of [`TokenFiles::check_unchanged`].
    pub fn check_unchanged(&self, expected: &str) -> Result<()> {
        match &self.source {
            Storage::Files(files) => files.check_unchanged(expected),
            Storage::Narrow(_) | Storage::Wide(_) => Ok(()),
        }
    }

    /// The tokens of the training part, of `count` tokens of which the last `validation` are held out.
    pub fn training_part(count: usize, validation: f64) -> usize {
        // In f64, 1 - 0.9 is slightly less than 0.1; without this, a tenth of ten tokens would be 0.
        let rounding = 1e-6;
        (count as f64 * (1.0 - validation) + rounding) as usize
    }

    /// The training part and the validation part, which is the last `validation` of the tokens: with
    /// 0.1 the last tenth, with 0 empty. The training part is rounded down, as nanoGPT's
    /// `int(0.9 * n)`.
    ///
    /// # Errors
    /// [`DataError::ValidationFraction`] outside of `0.0..1.0`.
    pub fn split(&self, validation: f64) -> Result<(Tokens, Tokens)> {
        if !(0.0..1.0).contains(&validation) {
            return Err(DataError::ValidationFraction { given: validation });
        }
        let cut = self.range.start + Tokens::training_part(self.len(), validation);
        let part = |name: &str, range| Tokens {
            source: self.source.clone(),
            range,
            origin: format!("the {name} part of {}", self.origin),
            vocab: self.vocab,
            limit: self.limit,
        };
        let (start, end) = (self.range.start, self.range.end);
        Ok((part("training", start..cut), part("validation", cut..end)))
    }
}

impl From<TokenFiles> for Tokens {
    fn from(files: TokenFiles) -> Tokens {
        Tokens {
            range: 0..files.len(),
            origin: files.origin(),
            vocab: files.vocab_size(),
            limit: usize::MAX,
            source: Storage::Files(Arc::new(files)),
        }
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokens({} tokens of {})", self.len(), self.origin)
    }
}

/// Tokens that are collected in memory, stored as narrow as their vocabulary allows.
pub(crate) struct TokenStore {
    ids: Growing,
    vocab: usize,
}

enum Growing {
    Narrow(Vec<u16>),
    Wide(Vec<u32>),
}

impl TokenStore {
    pub(crate) fn new(vocab: usize) -> TokenStore {
        let ids = match vocab <= NARROW_VOCAB {
            true => Growing::Narrow(Vec::new()),
            false => Growing::Wide(Vec::new()),
        };
        TokenStore { ids, vocab }
    }

    /// Appends ids, which must be below the vocabulary's size.
    pub(crate) fn extend(&mut self, ids: &[u32]) {
        debug_assert!(ids.iter().all(|&id| (id as usize) < self.vocab));
        match &mut self.ids {
            Growing::Narrow(all) => all.extend(ids.iter().map(|&id| id as u16)),
            Growing::Wide(all) => all.extend(ids),
        }
    }

    pub(crate) fn into_tokens(self, origin: String) -> Tokens {
        let (source, count) = match self.ids {
            Growing::Narrow(mut ids) => {
                ids.shrink_to_fit();
                let count = ids.len();
                (Storage::Narrow(Arc::new(ids)), count)
            }
            Growing::Wide(mut ids) => {
                ids.shrink_to_fit();
                let count = ids.len();
                (Storage::Wide(Arc::new(ids)), count)
            }
        };
        Tokens { source, range: 0..count, origin, vocab: Some(self.vocab), limit: usize::MAX }
    }
}

/// The first id outside a vocabulary of `vocab` ids, with its position.
fn first_beyond<T: Copy + Into<i64>>(ids: &[T], vocab: usize) -> Option<(usize, i64)> {
    let place = ids.iter().position(|&id| id.into() >= vocab as i64)?;
    Some((place, ids[place].into()))
}
