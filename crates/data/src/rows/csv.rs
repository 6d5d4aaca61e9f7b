//! Rows in CSV (RFC 4180): the first line names the columns. A field in quotes may have commas, line ends, and quotes, which are
//! doubled. Empty lines are passed over.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Fields, Value, refused};
use crate::Result;

/// The line at which a record begins, and its fields.
type Record = (u64, Vec<String>);

/// The rest of a file.
struct Reader<'a> {
    rest: &'a str,
    /// Number of the line that begins the rest.
    line: u64,
}

/// Gives each row to `take`; returns all columns.
pub(super) fn each(
    path: &Path,
    text: &str,
    take: &mut dyn FnMut(Fields) -> Result<()>,
) -> Result<BTreeSet<String>> {
    let mut reader = Reader { rest: text, line: 1 };
    let mut next = || reader.record().map_err(|(line, reason)| refused(path, line, reason));
    let Some((_, columns)) = next()? else { return Ok(BTreeSet::new()) };
    let names: BTreeSet<String> = columns.iter().cloned().collect();
    if names.len() < columns.len() {
        return Err(refused(path, 1, "the first line names a column twice".to_string()));
    }
    let quoted: Vec<String> = columns.iter().map(|name| format!("{name:?}")).collect();
    while let Some((line, fields)) = next()? {
        if fields.len() != columns.len() {
            let (given, expected) = (fields.len(), columns.len());
            let reason = format!(
                "it has {given} fields, and the first line names {expected} columns ({}): a field with a comma needs quotes",
                quoted.join(", ")
            );
            return Err(refused(path, line, reason));
        }
        let get = |name: &str| {
            let place = columns.iter().position(|column| column == name)?;
            Some(Value::Text(fields[place].clone()))
        };
        take(Fields { line, get: &get, names: format!("the columns {}", quoted.join(", ")) })?;
    }
    Ok(names)
}

impl Reader<'_> {
    /// The next record, with the line on which it begins. The error is a line and a reason to print.
    fn record(&mut self) -> Result<Option<Record>, (u64, String)> {
        while let Some(rest) = self.rest.strip_prefix("\r\n").or_else(|| self.rest.strip_prefix('\n')) {
            (self.rest, self.line) = (rest, self.line + 1);
        }
        if self.rest.is_empty() || self.rest == "\r" {
            return Ok(None);
        }
        let (first_line, mut fields) = (self.line, Vec::new());
        loop {
            fields.push(if self.rest.starts_with('"') { self.quoted()? } else { self.plain()? });
            if let Some(rest) = self.rest.strip_prefix(',') {
                self.rest = rest;
                continue;
            }
            let rest = self.rest.strip_prefix("\r\n").or_else(|| self.rest.strip_prefix('\n'));
            if let Some(rest) = rest {
                (self.rest, self.line) = (rest, self.line + 1);
            }
            return Ok(Some((first_line, fields)));
        }
    }

    /// A field without quotes.
    fn plain(&mut self) -> Result<String, (u64, String)> {
        let end = self.rest.find([',', '\n']).unwrap_or(self.rest.len());
        let (field, rest) = self.rest.split_at(end);
        let field = if rest.starts_with(',') { field } else { field.strip_suffix('\r').unwrap_or(field) };
        if field.contains('"') {
            let reason = "a quote stands within a field that does not begin with one: put the field in quotes, and double \
                          those within it";
            return Err((self.line, reason.to_string()));
        }
        self.rest = &self.rest[field.len()..];
        Ok(field.to_string())
    }

    /// A field in quotes.
    fn quoted(&mut self) -> Result<String, (u64, String)> {
        let (opened, mut field) = (self.line, String::new());
        self.rest = &self.rest[1..];
        loop {
            let Some(end) = self.rest.find('"') else {
                return Err((opened, "a quote that opens on this line is never closed".to_string()));
            };
            field.push_str(&self.rest[..end]);
            self.line += self.rest[..end].matches('\n').count() as u64;
            self.rest = &self.rest[end + 1..];
            match self.rest.chars().next() {
                Some('"') => {
                    field.push('"');
                    self.rest = &self.rest[1..];
                }
                None | Some(',' | '\n') => return Ok(field),
                Some('\r') if self.rest[1..].starts_with('\n') || self.rest.len() == 1 => {
                    return Ok(field);
                }
                Some(other) => {
                    let reason = format!(
                        "the quote that closes a field is followed by {other:?}, expected a comma or the end of the line: quotes \
                         within a field are doubled"
                    );
                    return Err((self.line, reason));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(text: &str) -> Result<Vec<Record>, (u64, String)> {
        let mut reader = Reader { rest: text, line: 1 };
        std::iter::from_fn(|| reader.record().transpose()).collect()
    }

    #[test]
    fn fields_quotes_and_lines() {
        let text = "text,label\r\n\"a, \"\"b\"\"\nc\",0\n\nd,\n\"\",1";
        let expected = [(1, ["text", "label"]), (2, ["a, \"b\"\nc", "0"]), (5, ["d", ""]), (6, ["", "1"])];
        let expected = expected.map(|(line, fields)| (line, fields.map(String::from).to_vec()));
        assert_eq!(records(text).unwrap(), expected);
    }

    #[test]
    fn broken_quotes_are_named_by_their_line() {
        for (text, line, part) in [
            ("a,b\n\"c,d\ne,f\n", 2, "never closed"),
            ("a,b\n\"x\ny\" z,1\n", 3, "is followed by ' '"),
            ("a,b\nx\"y,1\n", 2, "does not begin with one"),
        ] {
            let (at, reason) = records(text).unwrap_err();
            assert!(at == line && reason.contains(part), "{text:?}: line {at}: {reason}");
        }
    }
}
