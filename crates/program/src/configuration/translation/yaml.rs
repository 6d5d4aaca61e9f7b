//! The part of YAML that configurations are written in: tables and lists by indentation, tables and lists in brackets, text with and without
//! quotes, numbers, flags, comments, and text of several lines after `|` and `>`. Anchors, tags, and several documents in one file are
//! refused by name.
//!
//! Written here because the crates that read all of YAML are either kept no more or return values without lines.

use std::borrow::Cow;

use super::value::{Entry, Fault, MAX_DEPTH, Value, add, fault};

/// A line that has content: its number, its indentation, and the rest without comment.
struct Line<'a> {
    number: usize,
    indent: usize,
    text: &'a str,
}

/// Reads a document.
///
/// # Errors
/// The line and what was expected, or what is not read, there.
pub fn read(text: &str) -> Result<Vec<Entry>, Fault> {
    let mut lines = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let bare = line.trim_start_matches(' ');
        let content = without_comment(bare).trim_end();
        if bare.starts_with('\t') {
            return fault(at + 1, "a tab: YAML indents with spaces");
        }
        if content == "---" && lines.is_empty() || content.is_empty() {
            continue;
        }
        if content == "---" || content == "..." || content.starts_with('%') {
            return fault(at + 1, "several documents in one file are not read");
        }
        lines.push(Line { number: at + 1, indent: line.len() - bare.len(), text: content });
    }
    let mut reader = Reader { lines, at: 0, whole: text.lines().collect() };
    let Some(first) = reader.lines.first() else { return fault(1, "it has no keys") };
    let (indent, number) = (first.indent, first.number);
    match reader.block(indent, 0)? {
        Value::Table(table) if reader.at == reader.lines.len() => Ok(table),
        Value::Table(_) => fault(reader.lines[reader.at].number, "this line is indented less than the first"),
        _ => fault(number, "expected a table, as learning_rate: 2e-5"),
    }
}

/// The text before a comment, which begins with `#` at the start or behind a space, outside of quotes.
fn without_comment(text: &str) -> &str {
    let (mut quote, mut before) = (None, ' ');
    for (at, next) in text.char_indices() {
        match (quote, next) {
            (None, '#') if before == ' ' => return &text[..at],
            (None, '"' | '\'') if " [{,:-".contains(before) => quote = Some(next),
            (Some(open), _) if next == open && before != '\\' => quote = None,
            _ => {}
        }
        before = next;
    }
    text
}

/// Splits `key: value`, outside of quotes and brackets.
fn key_of(text: &str) -> Option<(&str, &str)> {
    if let Some(quote) = text.chars().next().filter(|c| ['"', '\''].contains(c)) {
        let end = 1 + text[1..].find(quote)?;
        let rest = text[end + 1..].trim_start().strip_prefix(':')?;
        return Some((&text[1..end], rest.trim()));
    }
    if text.starts_with(['[', '{']) {
        return None;
    }
    match text.split_once(": ") {
        Some((key, value)) => Some((key.trim(), value.trim())),
        None => text.strip_suffix(':').map(|key| (key.trim(), "")),
    }
}

struct Reader<'a> {
    lines: Vec<Line<'a>>,
    at: usize,
    whole: Vec<&'a str>,
}

impl Reader<'_> {
    /// Reads the table or list whose lines have this indentation.
    fn block(&mut self, indent: usize, depth: usize) -> Result<Value, Fault> {
        let line = &self.lines[self.at];
        if depth > MAX_DEPTH {
            return fault(line.number, format!("more than {MAX_DEPTH} tables within each other"));
        }
        if line.text == "-" || line.text.starts_with("- ") {
            return self.list(indent, depth);
        }
        if key_of(line.text).is_none() {
            let (number, text) = (line.number, line.text);
            self.at += 1;
            return scalar(number, &self.in_brackets(text), depth);
        }
        let mut table = Vec::new();
        while let Some(line) = self.lines.get(self.at).filter(|line| line.indent >= indent) {
            if line.indent > indent {
                return fault(line.number, "this line is indented more than the others of its table");
            }
            let number = line.number;
            let Some((name, value)) = key_of(line.text) else {
                return fault(number, format!("expected a key and a colon, found {:?}", line.text));
            };
            let (name, value) = (name.to_string(), value.to_string());
            self.at += 1;
            let value = self.value(number, &value, indent, depth)?;
            add(&mut table, Entry { name, line: number, value })?;
        }
        Ok(Value::Table(table))
    }

    fn list(&mut self, indent: usize, depth: usize) -> Result<Value, Fault> {
        let mut values = Vec::new();
        while let Some(line) = self
            .lines
            .get(self.at)
            .filter(|line| line.indent == indent && (line.text == "-" || line.text.starts_with("- ")))
        {
            let rest = line.text[1..].trim_start();
            let inner = indent + line.text.len() - rest.len();
            if rest.is_empty() {
                let number = line.number;
                self.at += 1;
                values.push(self.value(number, "", indent, depth)?);
            } else {
                // The item's first line stands where its other lines do.
                let text = rest;
                self.lines[self.at] = Line { number: line.number, indent: inner, text };
                values.push(self.block(inner, depth + 1)?);
            }
        }
        Ok(Value::List(values))
    }

    /// The value behind a key: in the same line, or in lines that are indented more.
    fn value(&mut self, number: usize, text: &str, indent: usize, depth: usize) -> Result<Value, Fault> {
        if matches!(text.trim_end_matches(['-', '+']), "|" | ">") {
            let begin = self.lines.get(self.at).map_or(self.whole.len(), |line| line.number - 1);
            while self.lines.get(self.at).is_some_and(|line| line.indent > indent) {
                self.at += 1;
            }
            let end = self.lines.get(self.at).map_or(self.whole.len(), |line| line.number - 1);
            let lines: Vec<&str> = self.whole[begin..end.max(begin)].iter().map(|line| line.trim()).collect();
            return Ok(Value::Text(
                lines.join(if text.starts_with('|') { "\n" } else { " " }).trim_end().to_string(),
            ));
        }
        if !text.is_empty() {
            return scalar(number, &self.in_brackets(text), depth);
        }
        let Some(next) = self.lines.get(self.at) else { return Ok(Value::Null) };
        let is_list = next.indent == indent && next.text.starts_with("- ");
        if next.indent > indent || is_list {
            let indent = next.indent;
            return self.block(indent, depth + 1);
        }
        Ok(Value::Null)
    }

    /// A value that begins in a line: one in brackets goes on in the next lines up to its last bracket.
    fn in_brackets<'a>(&mut self, text: &'a str) -> Cow<'a, str> {
        let mut all = Cow::Borrowed(text);
        let mut open = Open::default().after(text);
        while text.starts_with(['[', '{'])
            && open.brackets > 0
            && let Some(line) = self.lines.get(self.at)
        {
            open = open.after(line.text);
            all.to_mut().extend([" ", line.text]);
            self.at += 1;
        }
        all
    }
}

/// Brackets and the quotation mark that are open behind a text.
#[derive(Clone, Copy, Default)]
struct Open {
    brackets: usize,
    quote: Option<char>,
}

impl Open {
    fn after(self, text: &str) -> Open {
        text.chars().fold(self, Open::then)
    }

    fn then(self, next: char) -> Open {
        let Open { brackets, quote } = self;
        match (quote, next) {
            (Some(open), _) => Open { quote: Some(open).filter(|open| *open != next), ..self },
            (None, '"' | '\'') => Open { quote: Some(next), ..self },
            (None, '[' | '{') => Open { brackets: brackets + 1, ..self },
            (None, ']' | '}') => Open { brackets: brackets.saturating_sub(1), ..self },
            (None, _) => self,
        }
    }
}

/// A value without line ends.
fn scalar(line: usize, text: &str, depth: usize) -> Result<Value, Fault> {
    let inner = |open: char, close: char| Some(text.strip_prefix(open)?.strip_suffix(close)?.trim());
    if depth > MAX_DEPTH {
        return fault(line, format!("more than {MAX_DEPTH} lists within each other"));
    }
    if let Some(items) = inner('[', ']') {
        let items = items_of(items).into_iter().map(|item| scalar(line, item, depth + 1));
        return Ok(Value::List(items.collect::<Result<_, _>>()?));
    }
    if let Some(items) = inner('{', '}') {
        let mut table = Vec::new();
        for item in items_of(items) {
            let Some((name, value)) = key_of(item) else {
                return fault(line, format!("expected a key and a colon, found {item:?}"));
            };
            add(&mut table, Entry { name: name.to_string(), line, value: scalar(line, value, depth + 1)? })?;
        }
        return Ok(Value::Table(table));
    }
    for quote in ['"', '\''] {
        if text.starts_with(quote) {
            return match text[1..].strip_suffix(quote) {
                Some(inner) => Ok(Value::Text(inner.to_string())),
                None => fault(line, format!("text without an end: {quote} is missing")),
            };
        }
    }
    match text.chars().next() {
        Some('&' | '*') => fault(line, "anchors are not read: write the value out"),
        Some('!') => fault(line, "tags are not read: leave it out"),
        Some('[' | '{') => fault(line, "a bracket without an end"),
        Some('?' | '@' | '`') => fault(line, format!("{text:?} needs quotation marks")),
        _ => Ok(match text {
            "" | "~" | "Null" | "NULL" => Value::Null,
            "True" | "TRUE" | "yes" | "Yes" | "on" => Value::Flag(true),
            "False" | "FALSE" | "no" | "No" | "off" => Value::Flag(false),
            _ if text.contains('_') && text.chars().all(|c| c.is_ascii_digit() || c == '_') => {
                Value::of_word(&text.replace('_', ""))
            }
            _ => Value::of_word(text),
        }),
    }
}

/// The items between commas, outside of brackets and quotes.
fn items_of(text: &str) -> Vec<&str> {
    let (mut items, mut open, mut begin) = (Vec::new(), Open::default(), 0);
    for (at, next) in text.char_indices() {
        if next == ',' && open.brackets == 0 && open.quote.is_none() {
            items.push(text[begin..at].trim());
            begin = at + 1;
        }
        open = open.then(next);
    }
    items.push(text[begin..].trim());
    items.into_iter().filter(|item| !item.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configuration::translation::value::shown;

    #[test]
    fn configurations_are_read() {
        for (text, read) in [
            ("a: 1_000\nb: 2e-5 # rate\n\nc:\nd: auto\n", "1:a=1000 2:b=2e-5 4:c=null 5:d=\"auto\""),
            ("---\na:\n  b: true\n  c:\n    d: x y\ne: no\n", "3:a.b=true 5:a.c.d=\"x y\" 6:e=false"),
            (
                "l:\n  - p: 1\n    q: 2\n  - p: 3\nm:\n- x\n- 'y'\n",
                "2:l.p=1 3:l.q=2 4:l.p=3 5:m=[\"x\", \"y\"]",
            ),
            ("a: [1, 'b, c', [2]]\nb: {x: 1, y: z}\n", "1:a=[1, \"b, c\", [2]] 2:b.x=1 2:b.y=\"z\""),
            (
                "t: |\n  one\n  two # not a comment\nu: <|end|>\nv: a#b\n",
                "1:t=\"one\\ntwo # not a comment\" 4:u=\"<|end|>\" 5:v=\"a#b\"",
            ),
            ("path: a:b\n\"q\": \"# x\"\n", "1:path=\"a:b\" 2:q=\"# x\""),
            (
                "l: [a, # one\n  'b]',\n\n  {x: 1,\n  y: 2}\n]\nm:\n  - [1,\n    2]\n  - 3\n",
                "1:l=\"a\" 1:l=\"b]\" 1:l.x=1 1:l.y=2 7:m=[[1, 2], 3]",
            ),
        ] {
            assert_eq!(shown(super::read(text).unwrap()), read, "{text}");
        }
    }

    #[test]
    fn what_is_not_read_names_its_line() {
        for (text, line, words) in [
            ("", 1, "no keys"),
            ("a: 1\na: 2\n", 2, "twice"),
            ("a: 1\n\tb: 2\n", 2, "tab"),
            ("a: &x 1\n", 1, "anchors"),
            ("a: !!int 1\n", 1, "tags"),
            ("a: 1\n---\nb: 2\n", 2, "documents"),
            ("a: 1\n  b: 2\n", 2, "indented more"),
            ("  a: 1\nb: 2\n", 2, "indented less"),
            ("a: [1\n", 1, "bracket"),
            ("b: 1\na: [1,\n  2\nc: 3\n", 2, "bracket"),
            ("a: \"x\n", 1, "missing"),
            ("- a\n", 1, "a table"),
            ("a: 1\nhello\n", 2, "a key and a colon"),
        ] {
            let fault = read(text).unwrap_err();
            assert!(fault.line == line && fault.what.contains(words), "{text}: {fault:?}");
        }
    }
}
