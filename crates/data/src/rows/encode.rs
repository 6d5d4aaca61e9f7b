//! The ids of a row.

use super::Row;
use crate::{DataError, Result, Tokenizer};

/// The bit of an id that says its token type, that of the second text.
const SECOND: u32 = 1 << 31;

/// Encodes rows for sequences of a length.
pub struct RowEncoder<'a> {
    tokenizer: &'a Tokenizer,
    seq: usize,
    begin: &'a [u32],
    end: &'a [u32],
}

impl<'a> RowEncoder<'a> {
    /// Encodes rows by `tokenizer`, for sequences of `seq` tokens.
    ///
    /// # Errors
    /// A tokenizer that puts nothing before a text, where the model looks, and sequences that have no room for a text.
    pub fn new(tokenizer: &'a Tokenizer, seq: usize) -> Result<RowEncoder<'a>> {
        let [begin, end] = tokenizer.framing();
        let refuse = |reason: String| Err(DataError::Source { reason });
        if begin.is_empty() || end.is_empty() {
            return refuse(format!(
                "a row is [CLS] text [SEP], and the class is read from its first token, but the tokenizer ({}) puts nothing around a \
                 text: name that of a BERT in data.tokenizer, a folder with tokenizer.json or vocab.txt",
                tokenizer.describe()
            ));
        }
        let frame = begin.len() + 2 * end.len();
        match seq > frame + 1 {
            true => Ok(RowEncoder { tokenizer, seq, begin, end }),
            false => refuse(format!("model.seq = {seq}: a row of two texts needs at least {}", frame + 2)),
        }
    }

    /// The ids of a row, and whether a text was cut.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode(&self, row: &Row) -> Result<(Vec<u32>, bool)> {
        let text = self.tokenizer.encode(&row.text)?;
        let pair = row.pair.as_ref().map(|pair| self.tokenizer.encode(pair)).transpose()?;
        let (first, second) = (text.len(), pair.as_ref().map_or(0, Vec::len));
        let frame = self.begin.len() + self.end.len() * if pair.is_some() { 2 } else { 1 };
        let [first_kept, second_kept] = kept([first, second], self.seq - frame);
        let mut ids = [self.begin, &text[..first_kept], self.end].concat();
        if let Some(pair) = &pair {
            ids.extend(pair[..second_kept].iter().chain(self.end).map(|id| id | SECOND));
        }
        Ok((ids, first_kept < first || second_kept < second))
    }
}

/// Tokens that stay of two texts where there is room for `room` tokens: the longer one is cut, and if both are long, both to
/// halves, as the tokenizers library does it.
fn kept([first, second]: [usize; 2], room: usize) -> [usize; 2] {
    if first + second <= room {
        return [first, second];
    }
    let (short, is_first) = if first > second { (second, false) } else { (first, true) };
    let mut long = if short > room { short } else { short.max(room - short) };
    let mut short = short;
    if short + long > room {
        short = room / 2;
        long = short + room % 2;
    }
    if is_first { [short, long.min(second)] } else { [long.min(first), short] }
}

#[cfg(test)]
mod tests {
    use super::kept;

    /// Lengths that the tokenizers library (0.22) leaves of pairs by `longest_first`.
    #[test]
    fn the_longer_text_is_cut() {
        for (lengths, room, expected) in [
            ([5, 3], 8, [5, 3]),
            ([5, 3], 7, [4, 3]),
            ([3, 5], 7, [3, 4]),
            ([9, 9], 7, [3, 4]),
            ([2, 90], 10, [2, 8]),
            ([90, 2], 10, [8, 2]),
            ([90, 0], 10, [10, 0]),
            ([30, 40], 10, [5, 5]),
            ([40, 30], 11, [6, 5]),
        ] {
            assert_eq!(kept(lengths, room), expected, "{lengths:?} into {room}");
        }
    }
}
