//! Slurm's lists of nodes: `gpu[01-03,7],login`, also with several brackets in a name (`rack[1-2]node[3-4]`).

/// Largest number of names in a list.
const MAX_NAMES: usize = 1 << 16;

/// Longest name of a host that DNS allows, and largest number of brackets in one: with both, any list takes a moment and little
/// memory.
const MAX_NAME_BYTES: usize = 253;
const MAX_BRACKETS: usize = 8;

/// The names in a list of nodes, in the order of the list.
///
/// # Errors
/// Brackets that do not match, ranges that are none, names that are too long, and more than 65,536 of them.
pub fn expand_nodes(list: &str) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    for pattern in split_outside_brackets(list)? {
        if pattern.is_empty() {
            return Err("a name is missing between two commas".to_string());
        }
        expand(pattern, &mut names)?;
    }
    Ok(names)
}

/// Splits at commas that are not in brackets.
fn split_outside_brackets(list: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in list.char_indices() {
        match (c, inside) {
            ('[', false) => inside = true,
            (']', true) => inside = false,
            ('[', true) | (']', false) => return Err(format!("brackets do not match at {:?}", &list[at..])),
            (',', false) => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("a bracket is not closed".to_string());
    }
    parts.push(&list[start..]);
    Ok(parts)
}

/// Appends the names of one pattern.
fn expand(pattern: &str, names: &mut Vec<String>) -> Result<(), String> {
    let brackets = pattern.matches('[').count();
    if brackets > MAX_BRACKETS {
        return Err(format!("{brackets} brackets in one name; expected at most {MAX_BRACKETS}"));
    }
    let mut heads = vec![String::new()];
    let mut rest = pattern;
    while let Some((before, after)) = rest.split_once('[') {
        let (choices, behind) = after.split_once(']').ok_or("a bracket is not closed")?;
        let choices = choices_of(choices)?;
        if heads.len().saturating_mul(choices.len()) > MAX_NAMES {
            return Err(format!("more than {MAX_NAMES} names"));
        }
        let longest = |texts: &[String]| texts.iter().map(String::len).max().unwrap_or(0);
        if longest(&heads) + before.len() + longest(&choices) > MAX_NAME_BYTES {
            return Err(format!("a name of more than {MAX_NAME_BYTES} bytes"));
        }
        heads = heads
            .iter()
            .flat_map(|head| choices.iter().map(move |choice| format!("{head}{before}{choice}")))
            .collect();
        rest = behind;
    }
    if heads.iter().any(|head| head.len() + rest.len() > MAX_NAME_BYTES) {
        return Err(format!("a name of more than {MAX_NAME_BYTES} bytes"));
    }
    if names.len() + heads.len() > MAX_NAMES {
        return Err(format!("more than {MAX_NAMES} names"));
    }
    names.extend(heads.into_iter().map(|head| head + rest));
    Ok(())
}

/// The numbers in brackets, with their leading zeros.
fn choices_of(text: &str) -> Result<Vec<String>, String> {
    let mut choices = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let wrong = || format!("{part:?} is no number and no range of numbers");
        if !is_number(first) || !is_number(last) {
            return Err(wrong());
        }
        let (from, to) = match (first.parse::<u64>(), last.parse::<u64>()) {
            (Ok(from), Ok(to)) if from <= to => (from, to),
            _ => return Err(wrong()),
        };
        if first.len() > MAX_NAME_BYTES {
            return Err(format!("a name of more than {MAX_NAME_BYTES} bytes"));
        }
        if to - from >= MAX_NAMES as u64 || choices.len() > MAX_NAMES {
            return Err(format!("more than {MAX_NAMES} names"));
        }
        choices.extend((from..=to).map(|number| format!("{number:0width$}", width = first.len())));
    }
    Ok(choices)
}
