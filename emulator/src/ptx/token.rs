//! PTX text to tokens. A token knows its line, for messages and for the directives that end with their line.

use super::PtxError;

/// A token and its line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token<'a> {
    /// The line, from 1.
    pub line: u32,
    /// What it is.
    pub kind: Kind<'a>,
}

/// Kinds of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind<'a> {
    /// A directive, opcode, name or number: letters, digits, `.`, `_`, `$`, `%` and `::`.
    Word(&'a str),
    /// A text in double quotes, without them.
    Text(&'a str),
    /// Any other letter.
    Sign(char),
}

fn is_word(letter: u8) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, b'.' | b'_' | b'$' | b'%')
}

/// The tokens of a text, without comments.
pub fn tokens(text: &str) -> Result<Vec<Token<'_>>, PtxError> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1u32);
    while at < bytes.len() {
        let rest = &text[at..];
        let first = bytes[at];
        let length = if first == b'\n' {
            line += 1;
            1
        } else if first.is_ascii_whitespace() {
            1
        } else if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").ok_or_else(|| PtxError::new(line, "a comment has no end"))?;
            line += rest[..end].matches('\n').count() as u32;
            end + 2
        } else if first == b'"' {
            let end = rest[1..].find('"').ok_or_else(|| PtxError::new(line, "a text has no end"))?;
            found.push(Token { line, kind: Kind::Text(&rest[1..1 + end]) });
            end + 2
        } else if is_word(first) {
            let length = word_length(bytes, at);
            found.push(Token { line, kind: Kind::Word(&rest[..length]) });
            length
        } else {
            let sign = rest.chars().next().unwrap_or(' ');
            found.push(Token { line, kind: Kind::Sign(sign) });
            sign.len_utf8()
        };
        at += length;
    }
    Ok(found)
}

/// Length of the word at `at`; `::` within a word belongs to it (`.shared::cta`), a single colon ends it.
fn word_length(bytes: &[u8], at: usize) -> usize {
    let mut end = at;
    loop {
        if end < bytes.len() && is_word(bytes[end]) {
            end += 1;
        } else if bytes[end..].starts_with(b"::") && bytes[at..end].contains(&b'.') {
            end += 2;
        } else {
            return end - at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_signs_and_comments() {
        let found =
            tokens("@!%p1 ld.shared::cta.u32 %r1, [sh+4]; // end\n/* two\nlines */ $L_1: \"x y\"").unwrap();
        let kinds: Vec<_> = found.iter().map(|token| token.kind).collect();
        use Kind::{Sign, Text, Word};
        assert_eq!(
            kinds,
            [
                Sign('@'),
                Sign('!'),
                Word("%p1"),
                Word("ld.shared::cta.u32"),
                Word("%r1"),
                Sign(','),
                Sign('['),
                Word("sh"),
                Sign('+'),
                Word("4"),
                Sign(']'),
                Sign(';'),
                Word("$L_1"),
                Sign(':'),
                Text("x y"),
            ]
        );
        assert_eq!(found.last().map(|token| token.line), Some(3));
        assert!(tokens("/* no end").is_err());
    }
}
