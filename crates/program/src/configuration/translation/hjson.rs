//! JSON as DeepSpeed reads it: with the reader of HJSON (hjson.github.io), which takes comments (`#`, `//`, `/* */`), trailing and missing
//! commas, keys and text without quotes, and text in `'''`. A key that is given twice is an error there and here.
//!
//! Written here because no crate for HJSON that is kept tells the lines of keys, and serde_json reads none of this.

use super::value::{Entry, Fault, MAX_DEPTH, Value, add, fault};

/// Reads a table, whose outer braces may be missing.
///
/// # Errors
/// The line and what was expected there.
pub fn read(text: &str) -> Result<Vec<Entry>, Fault> {
    let mut reader = Reader { text: text.strip_prefix('\u{feff}').unwrap_or(text), at: 0 };
    reader.skip(true)?;
    let table = match reader.peek() {
        Some('{') => {
            reader.at += 1;
            reader.table(Some('}'), 0)?
        }
        Some('[') => return fault(reader.line(), "expected a table in braces, found a list"),
        _ => reader.table(None, 0)?,
    };
    reader.skip(true)?;
    match reader.peek() {
        Some(next) => fault(reader.line(), format!("expected the end of the file, found {next:?}")),
        None if table.is_empty() => fault(1, "it has no keys"),
        None => Ok(table),
    }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn line(&self) -> usize {
        self.text[..self.at].matches('\n').count() + 1
    }

    fn take(&mut self, word: &str) -> bool {
        let found = self.rest().starts_with(word);
        self.at += if found { word.len() } else { 0 };
        found
    }

    /// Skips space and comments; ends of lines too if `all`.
    fn skip(&mut self, all: bool) -> Result<(), Fault> {
        loop {
            let rest = self.rest();
            let space =
                rest.len() - rest.trim_start_matches(|c: char| c.is_whitespace() && (all || c != '\n')).len();
            self.at += space;
            let rest = self.rest();
            if rest.starts_with('#') || rest.starts_with("//") {
                self.at += rest.find('\n').unwrap_or(rest.len());
            } else if rest.starts_with("/*") {
                match rest.find("*/") {
                    Some(end) => self.at += end + 2,
                    None => return fault(self.line(), "this comment has no end: */ is missing"),
                }
            } else {
                return Ok(());
            }
        }
    }

    /// Reads the entries of a table up to `end`, or to the end of the text.
    fn table(&mut self, end: Option<char>, depth: usize) -> Result<Vec<Entry>, Fault> {
        let (mut table, begin) = (Vec::new(), self.line());
        loop {
            self.skip(true)?;
            match (self.peek(), end) {
                (None, None) => return Ok(table),
                (None, Some(end)) => {
                    return fault(
                        self.line(),
                        format!("{end} is missing: it closes what begins in line {begin}"),
                    );
                }
                (Some(next), Some(end)) if next == end => {
                    self.at += end.len_utf8();
                    return Ok(table);
                }
                (Some(_), _) => {}
            }
            let line = self.line();
            let name = self.key()?;
            self.skip(true)?;
            if !self.take(":") {
                return fault(
                    line,
                    format!("expected a colon after the key {name:?}, as in {{\"train_batch_size\": 32}}"),
                );
            }
            let value = self.value(depth + 1)?;
            add(&mut table, Entry { name, line, value })?;
            self.separator(end)?;
        }
    }

    /// Skips a comma; without one, the next value must be in another line.
    fn separator(&mut self, end: Option<char>) -> Result<(), Fault> {
        self.skip(false)?;
        match self.peek() {
            Some(',') => {
                self.at += 1;
                Ok(())
            }
            None | Some('\n') => Ok(()),
            next if next == end => Ok(()),
            Some(next) => fault(self.line(), format!("expected a comma or a new line before {next:?}")),
        }
    }

    fn key(&mut self) -> Result<String, Fault> {
        match self.peek() {
            Some(quote @ ('"' | '\'')) => self.quoted(quote),
            _ => {
                let rest = self.rest();
                let end =
                    rest.find(|c: char| c.is_whitespace() || "{}[],:".contains(c)).unwrap_or(rest.len());
                self.at += end;
                match &rest[..end] {
                    "" => {
                        fault(self.line(), format!("expected a key, found {:?}", self.peek().unwrap_or(' ')))
                    }
                    name => Ok(name.to_string()),
                }
            }
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, Fault> {
        self.skip(true)?;
        if depth > MAX_DEPTH {
            return fault(self.line(), format!("more than {MAX_DEPTH} tables within each other"));
        }
        match self.peek() {
            None => fault(self.line(), "the text ends before a value"),
            Some('{') => {
                self.at += 1;
                Ok(Value::Table(self.table(Some('}'), depth)?))
            }
            Some('[') => {
                self.at += 1;
                self.list(depth)
            }
            Some('\'') if self.rest().starts_with("'''") => self.lines(),
            Some(quote @ ('"' | '\'')) => Ok(Value::Text(self.quoted(quote)?)),
            Some(next @ ('}' | ']' | ',' | ':')) => {
                fault(self.line(), format!("expected a value, found {next:?}"))
            }
            Some(_) => Ok(self.bare()),
        }
    }

    fn list(&mut self, depth: usize) -> Result<Value, Fault> {
        let (mut values, begin) = (Vec::new(), self.line());
        loop {
            self.skip(true)?;
            match self.peek() {
                None => {
                    return fault(
                        self.line(),
                        format!("] is missing: it closes what begins in line {begin}"),
                    );
                }
                Some(']') => {
                    self.at += 1;
                    return Ok(Value::List(values));
                }
                Some(_) => values.push(self.value(depth + 1)?),
            }
            self.separator(Some(']'))?;
        }
    }

    /// A number, `true`, `false` or `null` up to a comma, a bracket or a comment; else text up to the end of the line.
    fn bare(&mut self) -> Value {
        let line = self.rest().split('\n').next().unwrap_or_default();
        let ends = ["//", "/*", "#", ",", "}", "]"];
        let end = ends.iter().filter_map(|mark| line.find(mark)).min().unwrap_or(line.len());
        let short = Value::of_word(line[..end].trim());
        if matches!(short, Value::Text(_)) {
            self.at += line.len();
            return Value::Text(line.trim().to_string());
        }
        self.at += end;
        short
    }

    fn quoted(&mut self, quote: char) -> Result<String, Fault> {
        let (line, mut text) = (self.line(), String::new());
        self.at += 1;
        let mut chars = self.rest().char_indices();
        let no_end = || fault(line, "text without an end: the quotation mark is missing");
        while let Some((at, next)) = chars.next() {
            match next {
                _ if next == quote => {
                    self.at += at + 1;
                    return Ok(text);
                }
                '\n' => return no_end(),
                '\\' => match chars.next().map(|(_, next)| next) {
                    Some('n') => text.push('\n'),
                    Some('t') => text.push('\t'),
                    Some('r') => text.push('\r'),
                    Some('b') => text.push('\u{8}'),
                    Some('f') => text.push('\u{c}'),
                    Some('u') => {
                        let digits: String = chars.by_ref().take(4).map(|(_, digit)| digit).collect();
                        match u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32) {
                            Some(character) => text.push(character),
                            None => return fault(line, format!("\\u{digits} is no character")),
                        }
                    }
                    Some(other @ ('"' | '\'' | '\\' | '/')) => text.push(other),
                    _ => return fault(line, "a backslash that escapes nothing"),
                },
                _ => text.push(next),
            }
        }
        no_end()
    }

    /// Text of several lines between `'''`.
    fn lines(&mut self) -> Result<Value, Fault> {
        let line = self.line();
        self.at += 3;
        match self.rest().split_once("'''") {
            Some((text, _)) => {
                self.at += text.len() + 3;
                Ok(Value::Text(text.trim_matches('\n').trim().to_string()))
            }
            None => fault(line, "text without an end: ''' is missing"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configuration::translation::value::shown;

    #[test]
    fn json_is_read_as_hjson_reads_it() {
        for (text, read) in [
            ("{\"a\": 1, \"b\": {\"c\": [1, 2.5e8], \"d\": null}}", "1:a=1 1:b.c=[1, 2.5e8] 1:b.d=null"),
            ("{a: 1 # one\n b: true, // two\n /* three\n */ c: \"auto\",\n}", "1:a=1 2:b=true 4:c=\"auto\""),
            ("a: 1\nb: -2\n\n'c': on, or off\n", "1:a=1 2:b=-2 4:c=\"on, or off\""),
            ("{\"a\": '''\n  x\n  '''\n b: {}}", "1:a=\"x\" 4:b={}"),
            ("{\"a\": [1\n2,],\n\"b\": 'q\\u0041\\n'}", "1:a=[1, 2] 3:b=\"qA\\n\""),
            ("{\"a\": inf\n}", "1:a=\"inf\""),
            ("{\"l\": [{\"x\": 1}, {\"x\": 2}]}", "1:l.x=1 1:l.x=2"),
        ] {
            assert_eq!(shown(super::read(text).unwrap()), read, "{text}");
        }
    }

    #[test]
    fn what_is_no_json_names_line_and_reason() {
        for (text, line, words) in [
            ("", 1, "no keys"),
            ("hello", 1, "colon"),
            ("[1]", 1, "a list"),
            ("{\"a\": 1,\n\"b\": 2,\n\"a\": 3}", 3, "given twice, first in line 1"),
            ("{\"x\": {\"a\": 1,\n\"a\": 3}}", 2, "given twice"),
            ("{\"a\": 1", 1, "} is missing"),
            ("{\"a\": [1\n", 2, "] is missing"),
            ("{\"a\": \"x\n}", 1, "quotation mark"),
            ("{\"a\": 1} b", 1, "the end of the file"),
            ("{\"a\" 1}", 1, "colon"),
            ("{\"a\": \"x\" \"b\": 1}", 1, "comma"),
            ("{\"a\": /* }", 1, "comment"),
            ("{\"a\": }", 1, "a value"),
        ] {
            let fault = read(text).unwrap_err();
            assert!(fault.line == line && fault.what.contains(words), "{text}: {fault:?}");
        }
        assert!(read(&"{a:".repeat(100)).unwrap_err().what.contains("tables within"));
    }
}
