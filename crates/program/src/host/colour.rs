//! Colours and line ends of what people read on a terminal. Files and pipes get plain text, and so does a terminal
//! when `NO_COLOR` is set (see no-color.org). Help and usage errors are coloured by clap, under the same rules.

/// Begins and ends bold red letters.
const ERROR: [&str; 2] = ["\u{1b}[1;31m", "\u{1b}[0m"];

/// Begins and ends what is trained, in green.
pub const TRAINED: [&str; 2] = ["\u{1b}[32m", "\u{1b}[0m"];

/// Marks the word before the first colon of an error.
pub fn error(text: &str) -> String {
    match text.split_once(':') {
        Some((word, rest)) => format!("{}{word}:{}{rest}", ERROR[0], ERROR[1]),
        None => text.to_string(),
    }
}

/// Breaks lines between words, so that each has at most `width` columns. A word that is longer stays whole, and so does
/// a line with columns (two spaces between words).
pub fn wrapped(text: &str, width: usize) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| wrapped_line(line, width)).collect();
    lines.join("\n")
}

fn wrapped_line(line: &str, width: usize) -> String {
    if line.chars().count() <= width || line.trim().contains("  ") {
        return line.to_string();
    }
    let (mut wrapped, mut column) = (String::new(), 0);
    for word in line.split(' ') {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            wrapped.push('\n');
            column = 0;
        } else if column > 0 {
            wrapped.push(' ');
            column += 1;
        }
        wrapped.push_str(word);
        column += length;
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words() {
        for (text, width, expected) in [
            ("one two three", 20, "one two three"),
            ("one two three", 8, "one two\nthree"),
            ("one two three", 7, "one two\nthree"),
            ("one two three", 6, "one\ntwo\nthree"),
            ("a /long/path/without/spaces b", 10, "a\n/long/path/without/spaces\nb"),
            ("first line\nsecond line", 6, "first\nline\nsecond\nline"),
            ("a table  with columns", 8, "a table  with columns"),
            ("é é é", 3, "é é\né"),
            ("", 4, ""),
        ] {
            assert_eq!(wrapped(text, width), expected, "{text:?} in {width}");
        }
    }

    #[test]
    fn the_word_error_is_marked() {
        assert_eq!(error("error: a: b"), "\u{1b}[1;31merror:\u{1b}[0m a: b");
        assert_eq!(error("no colon"), "no colon");
    }
}
