//! Which checkpoints of a run stay on disk.

use serde::{Deserialize, Serialize};

/// Which checkpoints of a run stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Keep {
    /// So many of the newest; 0 is another word for all.
    Newest(usize),
    /// In words.
    Word(KeepWord),
}

/// Words for [`Keep`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepWord {
    /// Every checkpoint.
    All,
}

impl Keep {
    /// The number of newest checkpoints that stay; None for all.
    pub fn newest(self) -> Option<usize> {
        match self {
            Keep::Newest(0) | Keep::Word(KeepWord::All) => None,
            Keep::Newest(count) => Some(count),
        }
    }
}
