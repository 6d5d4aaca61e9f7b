//! Values as Python writes them: `json.dumps`, `repr` and `strftime`, which chat templates are written for.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Lists and dictionaries within each other that are written; Python stops at 1000.
const DEPTH: usize = 200;

/// The error for a value that is nested deeper than [`DEPTH`].
fn nested() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value is nested more than {DEPTH} times"))
}

/// Layout of JSON.
struct Layout {
    /// Text of one level of indentation; `None` for one line.
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

/// The filter `tojson`, as transformers defines it: `json.dumps` with its separators and `ensure_ascii=False`.
pub(super) fn to_json(value: &Value, given: Kwargs) -> Result<Value, Error> {
    let indent = given.get::<Option<Value>>("indent")?.filter(|indent| !indent.is_none());
    let indent = indent.map(|indent| match indent.as_str() {
        Some(text) => text.to_string(),
        None => " ".repeat(indent.as_usize().unwrap_or(0).min(64)),
    });
    let separators: Option<Vec<String>> = given.get("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    let flag = |name| given.get::<Option<bool>>(name).map(|flag| flag.unwrap_or(false));
    let layout = Layout { indent, item, key, ascii: flag("ensure_ascii")?, sorted: flag("sort_keys")? };
    given.assert_all_used()?;
    let mut text = String::new();
    write_json(value, &layout, 0, &mut text)?;
    Ok(Value::from(text))
}

fn write_json(value: &Value, layout: &Layout, depth: usize, to: &mut String) -> Result<(), Error> {
    let new_line = |depth: usize, to: &mut String| {
        if let Some(indent) = &layout.indent {
            to.push('\n');
            (0..depth).for_each(|_| to.push_str(indent));
        }
    };
    if depth > DEPTH {
        return Err(nested());
    }
    let is_map = value.kind() == ValueKind::Map;
    match value.kind() {
        ValueKind::None => to.push_str("null"),
        ValueKind::Bool => to.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => to.push_str(&number(value)),
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), layout.ascii, to),
        ValueKind::Map | ValueKind::Seq | ValueKind::Iterable => {
            to.push(if is_map { '{' } else { '[' });
            let mut items: Vec<Value> = value.try_iter()?.collect();
            if is_map && layout.sorted {
                items.sort();
            }
            for (place, item) in items.iter().enumerate() {
                to.push_str(if place > 0 { &layout.item } else { "" });
                new_line(depth + 1, to);
                if is_map {
                    quoted(&item.to_string(), layout.ascii, to);
                    to.push_str(&layout.key);
                    write_json(&value.get_item(item)?, layout, depth + 1, to)?;
                } else {
                    write_json(item, layout, depth + 1, to)?;
                }
            }
            if !items.is_empty() {
                new_line(depth, to);
            }
            to.push(if is_map { '}' } else { ']' });
        }
        other => {
            let reason = format!("tojson of {other}, which JSON does not have");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    }
    Ok(())
}

fn quoted(text: &str, ascii: bool, to: &mut String) {
    to.push('"');
    for char in text.chars() {
        match char {
            '"' => to.push_str("\\\""),
            '\\' => to.push_str("\\\\"),
            '\n' => to.push_str("\\n"),
            '\r' => to.push_str("\\r"),
            '\t' => to.push_str("\\t"),
            '\u{8}' => to.push_str("\\b"),
            '\u{c}' => to.push_str("\\f"),
            char if char < ' ' || ascii && !char.is_ascii() => {
                let mut halves = [0; 2];
                for half in char.encode_utf16(&mut halves) {
                    let _ = write!(to, "\\u{half:04x}");
                }
            }
            char => to.push(char),
        }
    }
    to.push('"');
}

/// A number as `repr` writes it: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
fn number(value: &Value) -> String {
    let Some(float) = f64::try_from(value.clone()).ok().filter(|_| !value.is_integer()) else {
        return value.to_string();
    };
    let exponent = format!("{float:e}");
    match exponent.split_once('e') {
        _ if float.is_nan() => "NaN".to_string(),
        _ if float.is_infinite() => (if float > 0.0 { "Infinity" } else { "-Infinity" }).to_string(),
        Some((digits, power)) if float != 0.0 && !(1e-4..1e16).contains(&float.abs()) => {
            let (sign, power) = power.strip_prefix('-').map_or(('+', power), |power| ('-', power));
            format!("{digits}e{sign}{power:0>2}")
        }
        _ => format!("{float:?}"),
    }
}

/// A value as `str` writes it.
pub(super) fn shown(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_string()),
        _ => repr(value, 0),
    }
}

fn repr(value: &Value, depth: usize) -> Result<String, Error> {
    if depth > DEPTH {
        return Err(nested());
    }
    let items = || value.try_iter().into_iter().flatten();
    let inner = |value: &Value| repr(value, depth + 1);
    Ok(match value.kind() {
        ValueKind::None => "None".to_string(),
        ValueKind::Bool => (if value.is_true() { "True" } else { "False" }).to_string(),
        ValueKind::Number => number(value),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
            let mut shown = String::from(quote);
            for char in text.chars() {
                match char {
                    '\n' => shown.push_str("\\n"),
                    '\r' => shown.push_str("\\r"),
                    '\t' => shown.push_str("\\t"),
                    '\\' => shown.push_str("\\\\"),
                    char if char == quote => shown.extend(['\\', char]),
                    char if char.is_control() => drop(write!(shown, "\\x{:02x}", u32::from(char))),
                    char => shown.push(char),
                }
            }
            shown.push(quote);
            shown
        }
        ValueKind::Map => {
            let pair = |key: Value| {
                let value = inner(&value.get_item(&key)?)?;
                Ok(format!("{}: {value}", inner(&key)?))
            };
            format!("{{{}}}", items().map(pair).collect::<Result<Vec<_>, Error>>()?.join(", "))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items = items().map(|item| inner(&item)).collect::<Result<Vec<_>, Error>>()?;
            format!("[{}]", items.join(", "))
        }
        _ => value.to_string(),
    })
}

/// A day, from which `strftime_now` is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Day {
    year: i64,
    month: i64,
    day: i64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

impl Day {
    /// Today, in UTC.
    pub fn today() -> Day {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Day::at(now.map_or(0, |since| since.as_secs() as i64 / 86_400))
    }

    /// The day that is so many after 1970-01-01 (the algorithm of H. Hinnant, `civil_from_days`).
    fn at(days: i64) -> Day {
        let shifted = days + 719_468;
        let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        Day { year: year + era * 400 + i64::from(month <= 2), month, day }
    }

    /// Days since 1970-01-01 (`days_from_civil`).
    fn days(self) -> i64 {
        let year = self.year - i64::from(self.month <= 2);
        let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
        let month = if self.month > 2 { self.month - 3 } else { self.month + 9 };
        let of_year = (153 * month + 2) / 5 + self.day - 1;
        era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
    }

    /// The day written as `2026-11-28`; `None` for anything else.
    pub fn parse(text: &str) -> Option<Day> {
        let mut numbers = text.splitn(3, '-').map(|number| number.parse().ok().filter(|number| *number > 0));
        let day = Day { year: numbers.next()??, month: numbers.next()??, day: numbers.next()?? };
        (day.year < 10_000 && day.month < 13 && day.day < 32 && Day::at(day.days()) == day).then_some(day)
    }

    /// The day by a format of `strftime`. The error is the part that is about the time of the day, or is not known.
    pub(super) fn format(self, format: &str) -> Result<String, String> {
        let month = MONTHS[self.month as usize - 1];
        let weekday = DAYS[self.days().rem_euclid(7) as usize];
        let of_year = self.days() - Day { month: 1, day: 1, ..self }.days() + 1;
        let (mut text, mut chars) = (String::new(), format.chars());
        while let Some(char) = chars.next() {
            if char != '%' {
                text.push(char);
                continue;
            }
            match chars.next() {
                Some('Y') => text.push_str(&self.year.to_string()),
                Some('y') => text.push_str(&format!("{:02}", self.year % 100)),
                Some('m') => text.push_str(&format!("{:02}", self.month)),
                Some('d') => text.push_str(&format!("{:02}", self.day)),
                Some('e') => text.push_str(&format!("{:2}", self.day)),
                Some('j') => text.push_str(&format!("{of_year:03}")),
                Some('B') => text.push_str(month),
                Some('b' | 'h') => text.push_str(&month[..3]),
                Some('A') => text.push_str(weekday),
                Some('a') => text.push_str(&weekday[..3]),
                Some('F') => text.push_str(&self.to_string()),
                Some('%') => text.push('%'),
                Some('-') if chars.as_str().starts_with('d') => {
                    chars.next();
                    text.push_str(&self.day.to_string());
                }
                other => return Err(format!("%{}", other.map_or(String::new(), String::from))),
            }
        }
        Ok(text)
    }
}

impl std::fmt::Display for Day {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by Python 3.11: `datetime.date(y, m, d).strftime(format)`.
    #[test]
    fn days_are_written_as_by_strftime() {
        for (day, expected) in [
            ("2026-11-28", "28 Nov 2026|Saturday, November 28, 2026|26-332|Sat"),
            ("2024-02-29", "29 Feb 2024|Thursday, February 29, 2024|24-060|Thu"),
            ("1970-01-01", "01 Jan 1970|Thursday, January 01, 1970|70-001|Thu"),
            ("2100-12-31", "31 Dec 2100|Friday, December 31, 2100|00-365|Fri"),
        ] {
            let parsed = Day::parse(day).unwrap();
            assert_eq!(parsed.format("%d %b %Y|%A, %B %d, %Y|%y-%j|%a").unwrap(), expected);
            assert_eq!(parsed.to_string(), day);
        }
        for wrong in ["2026-02-29", "2026-13-01", "28 Nov", "2026-1", "2026-01-00", ""] {
            assert_eq!(Day::parse(wrong), None, "{wrong}");
        }
        assert_eq!(Day::today().format("%H:%M"), Err("%H".to_string()));
    }

    /// Written by Python 3.11's `json.dumps(..., ensure_ascii=False)` and `str`.
    #[test]
    fn values_are_written_as_by_python() {
        let value: Value = serde_json::from_str(
            r#"{"b": [1, -2.5, 1e16, 1e15, 1e-5, 0.0001, 2.0], "a": null, "t": [true, "é\"\n\u0001😀", {}, []]}"#,
        )
        .unwrap();
        let json = |given: &[(&str, Value)]| {
            let given = given.iter().map(|(name, value)| (*name, value.clone())).collect();
            to_json(&value, given).unwrap().to_string()
        };
        let numbers = "[1, -2.5, 1e+16, 1000000000000000.0, 1e-05, 0.0001, 2.0]";
        let text = r#"é\"\n\u0001😀"#;
        assert_eq!(json(&[]), format!(r#"{{"b": {numbers}, "a": null, "t": [true, "{text}", {{}}, []]}}"#));
        let indented = json(&[("indent", Value::from(2)), ("sort_keys", Value::from(true))]);
        assert!(indented.starts_with("{\n  \"a\": null,\n  \"b\": [\n    1,\n    -2.5,"), "{indented}");
        assert!(json(&[("ensure_ascii", Value::from(true))]).contains(r#"\u00e9\"\n\u0001\ud83d\ude00"#));
        let expected = format!("{{'b': {numbers}, 'a': None, 't': [True, 'é\"\\n\\x01😀', {{}}, []]}}");
        assert_eq!(shown(&value).unwrap(), expected);
    }
}
