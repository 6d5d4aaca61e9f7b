//! Python files that assign literals to names, as nanoGPT's `config/*.py`. Nothing is executed: numbers, their products and sums, text,
//! `True`, `False`, `None` and lists of these are read. Imports are passed over. An assignment of anything else is an
//! expression, which only a name that is not needed may have; other statements are an error.

use super::value::{Entry, Fault, Value, add, fault};

/// Bytes of a sum that is read, at most.
const MAX_SUM: usize = 200;

/// Reads the assignments.
///
/// # Errors
/// The line of what is no assignment of a literal.
pub fn read(text: &str) -> Result<Vec<Entry>, Fault> {
    let mut table = Vec::new();
    for (line, statement) in statements(text)? {
        let is_import = statement.starts_with("import ") || statement.starts_with("from ");
        let is_text = statement.starts_with(['"', '\'']);
        if is_import || is_text {
            continue;
        }
        let assigned =
            statement.split_once('=').filter(|(name, value)| is_name(name.trim()) && !value.starts_with('='));
        let Some((name, value)) = assigned else {
            return fault(
                line,
                format!("expected an assignment, as batch_size = 12, found {:?}", first_line(&statement)),
            );
        };
        let value = literal(value.trim()).unwrap_or_else(|| Value::Expression(value.trim().to_string()));
        add(&mut table, Entry { name: name.trim().to_string(), line, value })?;
    }
    if table.is_empty() { fault(1, "it has no assignments") } else { Ok(table) }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn is_name(word: &str) -> bool {
    word.chars().all(|c| c.is_alphanumeric() || c == '_')
        && !word.starts_with(|c: char| c.is_ascii_digit())
        && !word.is_empty()
}

/// The statements without comments, each with its first line: text in brackets or in `'''` goes on in the next line.
fn statements(text: &str) -> Result<Vec<(usize, String)>, Fault> {
    let (mut all, mut current, mut depth) = (Vec::new(), String::new(), 0usize);
    let (mut line, mut begin, mut is_first) = (1, 1, true);
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        if current.trim().is_empty() {
            begin = line;
        }
        if next == '#' {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
            continue;
        }
        if next == '"' || next == '\'' {
            let Some(end) = end_of_text(rest, next) else {
                return fault(line, "text without an end: the quotation mark is missing");
            };
            line += rest[..end].matches('\n').count();
            current += &rest[..end];
            rest = &rest[end..];
            continue;
        }
        rest = &rest[next.len_utf8()..];
        match next {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        line += usize::from(next == '\n');
        match next {
            '\n' | ';' if depth == 0 => {
                if is_first && current.starts_with([' ', '\t']) && !current.trim().is_empty() {
                    return fault(
                        begin,
                        "indented: only assignments of literals are read, and nothing is executed",
                    );
                }
                all.push((begin, std::mem::take(&mut current)));
                is_first = next == '\n';
            }
            _ => current.push(if next == '\n' { ' ' } else { next }),
        }
    }
    all.push((begin, current));
    Ok(all
        .into_iter()
        .map(|(line, text)| (line, text.trim().to_string()))
        .filter(|(_, text)| !text.is_empty())
        .collect())
}

/// Bytes of a text with its quotation marks.
fn end_of_text(rest: &str, quote: char) -> Option<usize> {
    let long: String = std::iter::repeat_n(quote, 3).collect();
    if rest.starts_with(&long) {
        return Some(3 + rest[3..].find(&long)? + 3);
    }
    let mut chars = rest.char_indices().skip(1);
    while let Some((at, next)) = chars.next() {
        match next {
            '\\' => drop(chars.next()),
            '\n' => return None,
            _ if next == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// The value of a literal; None for what is more.
fn literal(text: &str) -> Option<Value> {
    let inner = |open: char, close: char| text.strip_prefix(open)?.strip_suffix(close);
    match text {
        "True" => return Some(Value::Flag(true)),
        "False" => return Some(Value::Flag(false)),
        "None" => return Some(Value::Null),
        _ => {}
    }
    if let Some(quote) = text.chars().next().filter(|c| ['"', '\''].contains(c)) {
        let is_one = end_of_text(text, quote) == Some(text.len());
        return is_one.then(|| Value::Text(text.trim_matches(quote).to_string()));
    }
    if let Some(items) = inner('[', ']').or_else(|| inner('(', ')').filter(|items| items.contains(','))) {
        if items.contains(['[', '(', '{']) {
            return None;
        }
        let items = items.split(',').map(str::trim).filter(|item| !item.is_empty());
        return items.map(literal).collect::<Option<_>>().map(Value::List);
    }
    if text.len() > MAX_SUM {
        return None;
    }
    sum(text).filter(|number| number.is_finite()).map(|number| Value::Number(number, text.to_string()))
}

/// A sum of products of numbers.
fn sum(text: &str) -> Option<f64> {
    // A sign behind an operator or an exponent belongs to the number.
    let split = |c: &[char]| {
        text.char_indices().rev().find(|(at, next)| {
            let before = text[..*at].trim_end().chars().next_back();
            c.contains(next) && before.is_some_and(|before| before.is_ascii_digit() || before == '.')
        })
    };
    if let Some((at, sign)) = split(&['+', '-']) {
        let (left, right) = (sum(text[..at].trim())?, product(text[at + 1..].trim())?);
        return Some(if sign == '+' { left + right } else { left - right });
    }
    product(text)
}

fn product(text: &str) -> Option<f64> {
    if let Some((base, exponent)) = text.split_once("**") {
        return Some(number(base.trim())?.powf(number(exponent.trim())?));
    }
    let at = text.rfind(['*', '/']);
    let Some(at) = at else { return number(text) };
    let (left, right) = (text[..at].trim_end_matches('/').trim(), text[at + 1..].trim());
    let (one, other) = (product(left)?, number(right)?);
    Some(match &text[at..=at] {
        "*" => one * other,
        _ if text[..at].ends_with('/') => (one / other).floor(),
        _ => one / other,
    })
}

fn number(text: &str) -> Option<f64> {
    match Value::of_word(&text.replace('_', "")) {
        Value::Number(number, _) => Some(number),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_of_literals_are_read_and_nothing_is_executed() {
        let text = "\"\"\"doc\n\"\"\"\nimport time\n\n# comment\na = 5 * 8 # more\nb='x' ; c = True\nd = 6e-4\ne = [1,\n 2]\n\
                    f = 'ft-' + str(time.time())\ng = 2**20 - 1\nh = -1.5e-3\ni = 600_000 // 7\n";
        let entries = read(text).unwrap();
        let shown: Vec<String> =
            entries.iter().map(|of| format!("{}:{}={}", of.line, of.name, of.value)).collect();
        assert_eq!(
            shown,
            [
                "6:a=5 * 8",
                "7:b=\"x\"",
                "7:c=true",
                "8:d=6e-4",
                "9:e=[1, 2]",
                "11:f='ft-' + str(time.time())",
                "12:g=2**20 - 1",
                "13:h=-1.5e-3",
                "14:i=600_000 // 7"
            ]
        );
        let numbers: Vec<f64> = entries.iter().filter_map(|of| of.value.number()).collect();
        assert_eq!(numbers, [40.0, 6e-4, 1_048_575.0, -1.5e-3, 85714.0]);
        for (text, line, words) in [
            ("a = 1\nexec(open('x').read())\n", 2, "an assignment"),
            ("if True: a = 1\n", 1, "an assignment"),
            ("if True:\n    a = 1\n", 2, "indented"),
            ("a = 1\n  b = 2\n", 2, "indented"),
            ("a = 1\na = 2\n", 2, "twice"),
            ("a = 'x\n", 1, "quotation mark"),
            ("a == 1", 1, "an assignment"),
            ("", 1, "no assignments"),
        ] {
            let fault = read(text).unwrap_err();
            assert!(fault.line == line && fault.what.contains(words), "{text}: {fault:?}");
        }
    }
}
