//! Identifiers and the words they are made of.

/// Identifiers of Rust code with the byte at which each begins. Numbers are skipped.
pub fn identifiers(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let bytes = code.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < bytes.len() {
            let start = at;
            if !is_word(bytes[at]) {
                at += 1;
                continue;
            }
            while at < bytes.len() && is_word(bytes[at]) {
                at += 1;
            }
            if !bytes[start].is_ascii_digit() {
                return Some((start, &code[start..at]));
            }
        }
        None
    })
}

/// Returns whether a byte can be part of an identifier. Letters beyond ASCII can.
pub fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// The lower-case words of a snake, camel or kebab name: `PieceList2` is `piece`, `list2`.
pub fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut previous = '_';
    for letter in name.chars() {
        if !letter.is_alphanumeric() {
            previous = '_';
            continue;
        }
        let starts = previous == '_' || (letter.is_uppercase() && !previous.is_uppercase());
        match words.last_mut() {
            Some(word) if !starts => word.extend(letter.to_lowercase()),
            _ => words.push(letter.to_lowercase().collect()),
        }
        previous = letter;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fall_into_words() {
        for (name, expected) in [
            ("world_size", vec!["world", "size"]),
            ("PieceList2", vec!["piece", "list2"]),
            ("MAX_HEADER_BYTES", vec!["max", "header", "bytes"]),
            ("a-file.name", vec!["a", "file", "name"]),
            ("DType", vec!["dtype"]),
            ("__metadata__", vec!["metadata"]),
        ] {
            assert_eq!(words(name), expected, "{name}");
        }
    }

    #[test]
    fn identifiers_have_places() {
        let found: Vec<_> = identifiers("let x1 = 2u8 + größe;").collect();
        assert_eq!(found, [(0, "let"), (4, "x1"), (15, "größe")]);
    }
}
