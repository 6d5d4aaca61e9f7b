//! Equal shares of something that is divided into pieces.

/// One of equal shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Index of this share.
    pub index: usize,
    /// Number of shares.
    pub of: usize,
}

impl Share {
    /// All of it.
    pub const WHOLE: Share = Share { index: 0, of: 1 };

    /// The first piece of this share, and the number of its pieces.
    ///
    /// # Errors
    /// When they cannot be dealt out evenly; `what` names them.
    pub fn of(self, what: &str, pieces: Pieces) -> Result<(usize, usize), CannotCut> {
        let Pieces { count, repeat, .. } = pieces;
        match self.of {
            of if count.is_multiple_of(of) => Ok((self.index * (count / of), count / of)),
            of if repeat && of.is_multiple_of(count) => Ok((self.index / (of / count), 1)),
            holders => Err(CannotCut { what: what.to_string(), pieces: count, holders }),
        }
    }
}

/// Into which pieces something may be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Number of equal results side by side, each of which is divided (3 in GPT-2's `c_attn`).
    pub packed: usize,
    /// Number of equal pieces of each (heads).
    pub count: usize,
    /// True if several holders may have the same piece when there are more holders than pieces (heads of keys and values).
    pub repeat: bool,
}

impl Pieces {
    /// So many pieces of one result, each of which has one holder.
    pub fn of(count: usize) -> Pieces {
        Pieces { packed: 1, count, repeat: false }
    }
}

/// A layer that cannot be divided so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}: {holders} ranks cannot share {pieces} pieces evenly; expected a number of ranks that divides {pieces}"
)]
pub struct CannotCut {
    /// The layer or parameter.
    pub what: String,
    /// Number of its pieces.
    pub pieces: usize,
    /// Number of ranks that were to share them.
    pub holders: usize,
}
