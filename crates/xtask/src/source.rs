//! A Rust file as the rules see it.
//!
//! One pass blanks comments and literals with spaces, so that byte offsets and lines of what remains are
//! those of the file, and a rule may look for words and braces without being misled by prose. From that
//! come the lines that are tests.

use crate::words::{identifiers, is_word};

/// A Rust file.
pub struct SourceFile {
    /// From the root of the workspace, with `/`.
    pub path: String,
    pub text: String,
    /// The text with comments and the insides of literals blanked.
    pub code: String,
    line_starts: Vec<usize>,
    /// Byte ranges of items under `#[cfg(test)]`.
    test_ranges: Vec<(usize, usize)>,
    /// All of the file is a test.
    is_test: bool,
}

impl SourceFile {
    pub fn new(path: &str, text: &str) -> SourceFile {
        let code = blank(text);
        let line_starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        let test_ranges = test_ranges(&code);
        let is_test = is_test(path);
        SourceFile { path: path.to_string(), text: text.to_string(), code, line_starts, test_ranges, is_test }
    }

    /// The folder under `crates/` that the file is in.
    pub fn crate_dir(&self) -> Option<&str> {
        self.path.strip_prefix("crates/").and_then(|rest| rest.split('/').next())
    }

    /// Line of a byte, from 1.
    pub fn line(&self, at: usize) -> usize {
        self.line_starts.partition_point(|&start| start <= at)
    }

    /// Returns whether the whole file is a test.
    pub fn is_test(&self) -> bool {
        self.is_test
    }

    /// Returns whether a byte belongs to tests.
    pub fn in_tests(&self, at: usize) -> bool {
        self.is_test || self.test_ranges.iter().any(|&(start, end)| (start..end).contains(&at))
    }

    /// Lines that are not tests.
    pub fn lines_without_tests(&self) -> usize {
        if self.is_test {
            return 0;
        }
        let tests: usize = self
            .test_ranges
            .iter()
            .map(|&(start, end)| self.line(end.saturating_sub(1)) - self.line(start) + 1)
            .sum();
        self.text.lines().count() - tests
    }
}

/// Returns whether the file at a path holds nothing but tests.
pub fn is_test(path: &str) -> bool {
    path.split('/').any(|part| matches!(part, "tests" | "benches" | "tests.rs"))
}

/// The braces of the item whose head is at `at`: the byte of `{` and the one after `}`. `None` for an item
/// that ends in `;`.
fn block_after(code: &str, at: usize) -> Option<(usize, usize)> {
    let bytes = code.as_bytes();
    let mut nested = 0usize;
    let open = (at..bytes.len()).find(|&i| {
        match bytes[i] {
            b'(' | b'[' => nested += 1,
            b')' | b']' => nested = nested.saturating_sub(1),
            _ => {}
        }
        nested == 0 && matches!(bytes[i], b'{' | b';')
    })?;
    if bytes[open] == b';' {
        return None;
    }
    let mut depth = 0usize;
    for (i, byte) in bytes.iter().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((open, i + 1));
        }
    }
    None
}

/// Items under `#[cfg(test)]`, also as one condition of several, from the attribute on.
fn test_ranges(code: &str) -> Vec<(usize, usize)> {
    let is_test = |condition: &str| {
        identifiers(condition).any(|(_, word)| word == "test") && !condition.contains("not(test")
    };
    code.match_indices("#[cfg(")
        .filter_map(|(at, _)| Some((at, at + code[at..].find(']')? + 1)))
        .filter(|&(at, item)| is_test(&code[at..item]))
        .map(|(at, item)| {
            let end = block_after(code, item).map_or_else(
                || code[item..].find(';').map_or(code.len(), |semicolon| item + semicolon + 1),
                |(_, end)| end,
            );
            (at, end)
        })
        .collect()
}

/// The code alone: every byte of a comment, and of a literal between its quotes, becomes a space.
fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => line_end(bytes, at),
            b'/' if bytes[at..].starts_with(b"/*") => comment_end(bytes, at),
            b'"' => string_end(bytes, at + 1),
            b'r' if at == 0 || !is_word(bytes[at - 1]) || matches!(bytes[at - 1], b'b' | b'c') => {
                raw_string_end(bytes, at).unwrap_or(at + 1)
            }
            b'\'' => char_end(bytes, at),
            _ => at + 1,
        };
        if end > at + 1 {
            for byte in &mut code[at..end] {
                if *byte != b'\n' && *byte != b'"' {
                    *byte = b' ';
                }
            }
        }
        at = end;
    }
    String::from_utf8(code).expect("whole literals and comments were replaced by spaces")
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|&byte| byte == b'\n').map_or(bytes.len(), |length| at + length)
}

/// Block comments nest.
fn comment_end(bytes: &[u8], mut at: usize) -> usize {
    let mut depth = 0usize;
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

/// After the closing quote of a string whose inside begins at `at`.
fn string_end(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// `r"..."` or `r#"..."#` at `at`; `None` when it is another word.
fn raw_string_end(bytes: &[u8], at: usize) -> Option<usize> {
    let hashes = bytes[at + 1..].iter().take_while(|&&byte| byte == b'#').count();
    let inside = at + 1 + hashes + 1;
    if bytes.get(inside - 1) != Some(&b'"') {
        return None;
    }
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let length = bytes[inside..].windows(close.len()).position(|window| window == close)?;
    Some(inside + length + close.len())
}

/// After a character literal; a lifetime or label ends after its quote.
fn char_end(bytes: &[u8], at: usize) -> usize {
    match bytes.get(at + 1) {
        Some(b'\\') => {
            let close = bytes.iter().skip(at + 3).position(|&byte| byte == b'\'');
            close.map_or(bytes.len(), |length| at + 3 + length + 1)
        }
        Some(&first) => {
            let width = match first {
                0xf0.. => 4,
                0xe0.. => 3,
                0xc0.. => 2,
                _ => 1,
            };
            if bytes.get(at + 1 + width) == Some(&b'\'') { at + width + 2 } else { at + 1 }
        }
        None => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked() {
        for (text, expected) in [
            ("a // b\nc", "a     \nc"),
            ("a /* b /* c */ d */ e", "a                   e"),
            (r#"f("g \" h") i"#, r#"f("  "  " ) i"#),
            ("r#\"a \" b\"# c", "  \"  \"  \"  c"),
            ("bar\"x\"", "bar\" \""),
            ("'{' 'a '\\'' '\\u{7d}' b", "    'a                b"),
            ("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}"),
            ("'é' x", "     x"),
        ] {
            let blanked = blank(text);
            assert_eq!(blanked.len(), text.len());
            let expected_words: Vec<_> = expected.split_whitespace().collect();
            let found = blanked.replace('"', " ");
            let expected = expected_words.join(" ").replace('"', " ");
            assert_eq!(
                found.split_whitespace().collect::<Vec<_>>(),
                expected.split_whitespace().collect::<Vec<_>>(),
                "{text}"
            );
        }
    }

    #[test]
    fn tests_do_not_count() {
        let text = "fn free() {}\n#[cfg(test)]\nmod tests {\n    fn unseen() {}\n}\n";
        let source = SourceFile::new("crates/x/src/a.rs", text);
        assert_eq!((source.lines_without_tests(), source.crate_dir()), (1, Some("x")));
        assert!(source.in_tests(text.find("unseen").unwrap()));
        assert!(!source.in_tests(text.find("free").unwrap()));
    }

    #[test]
    fn conditions_of_tests() {
        for (condition, expected) in [
            ("test", true),
            ("all(test, unix)", true),
            ("not(test)", false),
            ("unix", false),
            ("any(test)", true),
        ] {
            let text = format!("#[cfg({condition})]\n#[path = \"b.rs\"]\nmod b;\nfn after() {{}}\n");
            let source = SourceFile::new("crates/x/src/a.rs", &text);
            assert_eq!(source.in_tests(text.find("mod").unwrap()), expected, "{condition}");
            assert!(!source.in_tests(text.find("after").unwrap()), "{condition}");
        }
    }

    #[test]
    fn test_files_are_tests_throughout() {
        for (path, expected) in [
            ("crates/x/tests/a.rs", 0),
            ("crates/x/src/tests.rs", 0),
            ("crates/x/benches/b.rs", 0),
            ("crates/x/src/a.rs", 2),
        ] {
            assert_eq!(SourceFile::new(path, "// a\nfn f() {}\n").lines_without_tests(), expected, "{path}");
        }
    }
}
