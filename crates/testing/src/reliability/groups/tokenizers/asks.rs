//! Parts of a `tokenizer.json` that are valid, but harmful.

use serde_json::{Value, json};

/// A part that was made to do harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// A replacement of nothing.
    EmptyPattern,
    /// 100 KB for each letter of a text.
    MuchText,
    /// A piece of 100 KB, each beginning of which is one, too.
    LongPiece,
    /// A table of characters that ends early.
    DamagedTable,
    /// Ids that are random.
    Dropout,
}

impl Ask {
    pub(super) fn name(self) -> &'static str {
        match self {
            Ask::EmptyPattern => "a replacement of nothing",
            Ask::MuchText => "100 KB for each letter",
            Ask::LongPiece => "a piece of 100 KB",
            Ask::DamagedTable => "a table of characters that ends early",
            Ask::Dropout => "a dropout",
        }
    }

    /// Puts it into a file.
    pub(super) fn put(self, file: &mut Value) {
        let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
        match self {
            Ask::EmptyPattern => file["normalizer"] = replace("", "x"),
            Ask::MuchText => file["normalizer"] = replace("e", &"x".repeat(100_000)),
            Ask::LongPiece => {
                let lengths = (0..400).chain([100_000]);
                let pieces: Value = lengths.map(|length| json!(["a".repeat(length + 1), -1.0])).collect();
                file["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": pieces});
            }
            Ask::DamagedTable => {
                file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
            }
            Ask::Dropout => file["model"]["dropout"] = json!(0.1),
        }
    }

    /// Words that the refusal must contain.
    pub(super) fn refused(self) -> &'static [&'static str] {
        match self {
            Ask::EmptyPattern => &["tokenizer.json", "normalizer", "empty pattern"],
            Ask::MuchText => &["tokenizer.json", "normalizer", "100000 bytes of one byte"],
            Ask::LongPiece => &["tokenizer.json", "100001 bytes"],
            Ask::DamagedTable => &["tokenizer.json", "the tokenizers library failed"],
            Ask::Dropout => &["tokenizer.json", "dropout"],
        }
    }
}
