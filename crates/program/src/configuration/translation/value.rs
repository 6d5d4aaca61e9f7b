//! Values of another program's configuration, each with its line: what every reader of a format returns.

use std::fmt;

/// A value as written.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing: `null`, `None`, `~`.
    Null,
    /// True or false.
    Flag(bool),
    /// A number, and how it was written.
    Number(f64, String),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// A table.
    Table(Vec<Entry>),
    /// An expression that is more than a literal, which is not evaluated.
    Expression(String),
}

/// A value with its name in its table and its line, from 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// Line of the name.
    pub line: usize,
    /// The value.
    pub value: Value,
}

/// Why a text could not be read, and the line.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// Line, from 1.
    pub line: usize,
    /// The expected value.
    pub what: String,
}

/// A fault in a line.
pub fn fault<T>(line: usize, what: impl Into<String>) -> Result<T, Fault> {
    Err(Fault { line, what: what.into() })
}

/// Tables within tables, at most.
pub const MAX_DEPTH: usize = 64;

/// Adds an entry; a name that the table has already is refused.
///
/// # Errors
/// A name that is given twice.
pub fn add(table: &mut Vec<Entry>, entry: Entry) -> Result<(), Fault> {
    if let Some(first) = table.iter().find(|other| other.name == entry.name) {
        return fault(
            entry.line,
            format!("{} is given twice, first in line {}: remove one of the two", entry.name, first.line),
        );
    }
    table.push(entry);
    Ok(())
}

/// The entries of tables within tables under names as `zero_optimization.stage`; those of tables in a list have the list's name. A
/// table without entries is an entry itself.
pub fn flat(table: Vec<Entry>) -> Vec<Entry> {
    let mut all = Vec::new();
    for Entry { name, line, value } in table {
        let inner = |entries: Vec<Entry>| {
            let named = |entry: Entry| Entry { name: format!("{name}.{}", entry.name), ..entry };
            flat(entries).into_iter().map(named).collect::<Vec<_>>()
        };
        match value {
            Value::Table(entries) if !entries.is_empty() => all.extend(inner(entries)),
            Value::List(values) if values.iter().any(|value| matches!(value, Value::Table(_))) => {
                for value in values {
                    match value {
                        Value::Table(entries) => all.extend(inner(entries)),
                        value => all.push(Entry { name: name.clone(), line, value }),
                    }
                }
            }
            value => all.push(Entry { name, line, value }),
        }
    }
    all
}

/// A table as `line:name=value`, for the tests of readers.
#[cfg(test)]
pub fn shown(table: Vec<Entry>) -> String {
    let entries = flat(table);
    entries.iter().map(|of| format!("{}:{}={}", of.line, of.name, of.value)).collect::<Vec<_>>().join(" ")
}

impl Value {
    /// The number, flag or text of a word that stands without quotes.
    pub fn of_word(word: &str) -> Value {
        match word {
            "null" => Value::Null,
            "true" => Value::Flag(true),
            "false" => Value::Flag(false),
            _ => match number(word) {
                Some(number) => Value::Number(number, word.to_string()),
                None => Value::Text(word.to_string()),
            },
        }
    }

    /// The number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Value::Number(number, _) => Some(*number),
            _ => None,
        }
    }

    /// The number, if it is whole and at least 0.
    pub fn whole(&self) -> Option<u64> {
        self.number().filter(|n| *n >= 0.0 && n.fract() == 0.0 && *n < 2f64.powi(63)).map(|n| n as u64)
    }

    /// The flag, if it is one.
    pub fn flag(&self) -> Option<bool> {
        match self {
            Value::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    /// The text, if it is one.
    pub fn text(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value without quotes, to be compared with words.
    pub fn word(&self) -> String {
        self.text().map_or_else(|| self.to_string(), str::to_string)
    }

    /// The same as TOML; nothing has none.
    pub fn to_toml(&self) -> Option<toml::Value> {
        Some(match self {
            Value::Flag(flag) => (*flag).into(),
            Value::Number(number, _) => match self.whole() {
                Some(whole) => toml::Value::Integer(whole as i64),
                None => toml::Value::Float(*number),
            },
            Value::Text(text) => text.clone().into(),
            Value::List(values) => {
                toml::Value::Array(values.iter().map(Value::to_toml).collect::<Option<_>>()?)
            }
            Value::Null | Value::Table(_) | Value::Expression(_) => return None,
        })
    }
}

/// A decimal number. Words such as `inf` and `nan` are text.
fn number(word: &str) -> Option<f64> {
    let begins = word.trim_start_matches(['+', '-']).starts_with(|c: char| c.is_ascii_digit() || c == '.');
    word.parse().ok().filter(|number: &f64| begins && number.is_finite())
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Null => f.write_str("null"),
            Value::Flag(flag) => write!(f, "{flag}"),
            Value::Number(_, text) | Value::Expression(text) => f.write_str(text),
            Value::Text(text) => write!(f, "{text:?}"),
            Value::List(values) => {
                let values: Vec<String> = values.iter().map(Value::to_string).collect();
                write!(f, "[{}]", values.join(", "))
            }
            Value::Table(entries) => {
                let entries: Vec<String> =
                    entries.iter().map(|of| format!("{}: {}", of.name, of.value)).collect();
                write!(f, "{{{}}}", entries.join(", "))
            }
        }
    }
}
