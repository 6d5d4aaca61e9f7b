//! Which rows of a micro-batch tensors hold, and which documents these are rows of.

/// The rows of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// `[batch, seq]` of the micro-batch, even where tensors hold only some of its rows (tokens, batch-major).
    pub tokens: [usize; 2],
    /// Number of the first row of tensors that hold only some rows.
    pub first: usize,
    /// True if a sequence may have several documents, which do not see each other: the input
    /// [`POSITIONS`](crate::inputs::POSITIONS) says where each begins. If not, each sequence is one.
    pub documents: bool,
}

impl Rows {
    /// All rows of a micro-batch of `tokens` `[batch, seq]`, each sequence of which is one document.
    pub fn all(tokens: [usize; 2]) -> Rows {
        Rows { tokens, first: 0, documents: false }
    }

    /// The rows from `first` on.
    #[must_use]
    pub fn from(self, first: usize) -> Rows {
        Rows { first, ..self }
    }
}
