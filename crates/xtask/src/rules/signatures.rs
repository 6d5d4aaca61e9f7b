//! A function with 8 or more parameters takes a struct instead.

use crate::finding::Finding;
use crate::source::SourceFile;
use crate::words::identifiers;
use crate::workspace::Workspace;

/// Most parameters of a function, `self` included.
const MAX_PARAMETERS: usize = 7;

pub fn check(workspace: &Workspace) -> Vec<Finding> {
    let found = |source: &SourceFile| {
        let path = source.path.clone();
        let finding = move |(line, name, count): (usize, String, usize)| {
            let what = format!("`{name}` has {count} parameters, more than {MAX_PARAMETERS}: take a struct");
            Finding { path: path.clone(), line, rule: "signatures", what }
        };
        long(source).into_iter().map(finding).collect::<Vec<_>>()
    };
    workspace.sources.iter().flat_map(found).collect()
}

/// Functions with too many parameters, tests aside: line, name and count.
fn long(source: &SourceFile) -> Vec<(usize, String, usize)> {
    let mut found = Vec::new();
    let mut names = identifiers(&source.code).peekable();
    while let Some((at, word)) = names.next() {
        let Some(&(name_at, name)) = names.peek() else { break };
        // `fn(u8)` is a type: the next word is not its name.
        let is_name = source.code[at + word.len()..name_at].trim().is_empty();
        if word != "fn" || !is_name || source.in_tests(at) {
            continue;
        }
        let count = parameters(&source.code[name_at + name.len()..]);
        if count > MAX_PARAMETERS {
            found.push((source.line(at), name.to_string(), count));
        }
    }
    found
}

/// How many parameters the head of a function has, from behind its name on.
fn parameters(head: &str) -> usize {
    let mut depth = 0usize;
    let (mut inside, mut count, mut blank) = (false, 0, true);
    let mut before = ' ';
    for letter in head.chars() {
        let is_arrow = letter == '>' && matches!(before, '-' | '=');
        before = letter;
        match letter {
            '(' if !inside && depth == 0 => inside = true,
            ')' if inside && depth == 0 => return count + usize::from(!blank),
            '(' | '[' | '{' | '<' => depth += 1,
            '>' if is_arrow => {}
            ')' | ']' | '}' | '>' => depth = depth.saturating_sub(1),
            ',' if inside && depth == 0 => (count, blank) = (count + 1, true),
            letter if letter.is_whitespace() => {}
            _ => blank = !inside && blank,
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted_whatever_their_types() {
        for (head, expected) in [
            ("()", 0),
            ("(&self)", 1),
            ("(a: u8, b: (u8, u8), c: [u8; 2],)", 3),
            ("<T: Fn(u8, u8) -> u8, const N: usize>(a: T, b: &dyn Fn(u8, u8) -> Vec<(u8, u8)>) -> u8", 2),
            ("<'a>(\n    &'a mut self,\n    (a, b): (u8, u8),\n    c: HashMap<u8, u8>,\n) {", 3),
        ] {
            assert_eq!(parameters(head), expected, "{head}");
        }
    }

    #[test]
    fn long_signatures_are_found_outside_tests() {
        let long_head = "fn f(a: u8, b: u8, c: u8, d: u8, e: u8, g: u8, h: u8, i: u8) {}\n";
        let text = format!("let x: fn(u8) = y;\n{long_head}#[cfg(test)]\nmod tests {{ {long_head} }}\n");
        assert_eq!(long(&SourceFile::new("crates/a/src/a.rs", &text)), [(2, "f".to_string(), 8)]);
    }
}
