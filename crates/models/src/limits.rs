//! The largest sizes of a model that are taken from a file or a configuration.
//!
//! Each is several times what the largest published models have (126 layers, a width of 53,248, 262,144 tokens
//! in the vocabulary, contexts of 10 million), and so small that no product of them leaves 64 bits. They keep a
//! mistyped or hostile number from being planned: it is refused by name instead.

/// Transformer blocks.
pub const MAX_LAYERS: usize = 1024;

/// Width of the residual stream, and number of attention heads, each of which has at least one element.
pub const MAX_HIDDEN: usize = 1 << 18;

/// Width within an MLP.
pub const MAX_INTERMEDIATE: usize = 1 << 20;

/// Rows of the token table.
pub const MAX_VOCAB: usize = 1 << 24;

/// Rows of the position table: the longest sequence.
pub const MAX_POSITIONS: usize = 1 << 24;

/// Classes of whole sequences.
pub const MAX_LABELS: usize = 4096;
