//! The characters by which byte-level vocabularies spell bytes.

/// A character that can be printed for each byte, as GPT-2's vocabulary spells them.
pub(super) fn printable_bytes() -> Vec<char> {
    let as_is = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = (256u32..).filter_map(char::from_u32);
    (0..=255u8)
        .map(
            |byte| {
                if as_is(byte) { char::from(byte) } else { others.next().expect("more than 256 characters") }
            },
        )
        .collect()
}
