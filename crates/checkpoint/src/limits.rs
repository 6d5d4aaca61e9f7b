//! Largest sizes of the files that this crate reads whole. A file of another program, or a damaged one, may
//! have any size; nothing beyond these bounds is read. What this crate writes obeys the same bounds, so what
//! it wrote can be read again.

use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// `manifest.json`, and the piece list of one rank: room for 200,000 pieces.
pub(crate) const MANIFEST_BYTES: u64 = 64 << 20;

/// The caller's state in a manifest. Parsed JSON takes up to 40 times its text, so this part, which may have
/// any form, is bounded more tightly.
pub(crate) const STATE_BYTES: usize = 8 << 20;

/// `config.json` of a Hugging Face folder. The largest that are published name 21,000 labels in 1 MB.
pub(crate) const CONFIG_BYTES: u64 = 4 << 20;

/// `model.safetensors.index.json`: room for 300,000 tensors.
pub(crate) const INDEX_BYTES: u64 = 32 << 20;

/// The header of a safetensors file: what the format allows.
pub(crate) const HEADER_BYTES: u64 = 100_000_000;

/// Tensors of a safetensors file. A header of the largest size has room for more only if their names have less than 40
/// bytes; an entry takes up to three times the memory of its text.
pub(crate) const TENSORS: usize = 1_000_000;

/// The name of a tensor, of a state or of a file.
pub(crate) const NAME_BYTES: usize = 1 << 10;

/// Dimensions of a tensor in a file.
const DIMENSIONS: usize = 8;

/// Deserializes a shape of at most [`DIMENSIONS`] sizes: a list of any length would take many times the
/// memory of its text.
pub(crate) fn shape<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<usize>, D::Error> {
    struct Shape;

    impl<'de> Visitor<'de> for Shape {
        type Value = Vec<usize>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "a shape of at most {DIMENSIONS} sizes")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sizes: A) -> Result<Vec<usize>, A::Error> {
            let mut shape = Vec::new();
            while let Some(size) = sizes.next_element()? {
                if shape.len() == DIMENSIONS {
                    return Err(A::Error::custom(format!("a shape has more than {DIMENSIONS} sizes")));
                }
                shape.push(size);
            }
            Ok(shape)
        }
    }

    from.deserialize_seq(Shape)
}
