//! Encoded rows in a token file, and the order in which a run reads them.
//!
//! The file is of Phalanx's own format. Its ids are, as one row behind another of `seq + 2` numbers: a first one with the
//! mark of its [`RowKind`], `seq`, the number of rows to train on and that of rows for evaluation alone; then for each row its class (0
//! for chats), its length, its ids, and zeros. The upper bit of a labelled row's id is its token type; of chats, see `chats::pack`.

use std::path::Path;

use super::{RowEncoder, Rows};
use crate::chats::pack;
use crate::permutation::mix;
use crate::token_file::{TokenWriter, Written};
use crate::{DataError, Permutation, Result, SampleOrder, Tokenizer, Tokens};

/// Numbers before the ids of a row: its class and its length.
pub(crate) const BEFORE: usize = 2;

/// The largest number of ids of a file, which its writer is told.
const ALL_NUMBERS: usize = 1 << 32;

/// Kind of the rows of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// Texts with a class.
    Labelled,
    /// Chats.
    Chats,
    /// Answers, of which two neighbours make a pair; the class of a chosen one is 1.
    Pairs,
}

impl RowKind {
    /// The first number of a file, and the bits of an id.
    fn layout(self) -> (u32, u32) {
        match self {
            RowKind::Labelled => (u32::from_le_bytes(*b"ROWS"), u32::MAX >> 1),
            RowKind::Chats => (u32::from_le_bytes(*b"CHAT"), pack::ID),
            RowKind::Pairs => (u32::from_le_bytes(*b"PAIR"), pack::ID),
        }
    }

    /// The first row of a file with so many rows to train on and for evaluation alone.
    pub(crate) fn head(self, seq: usize, counts: [usize; 2]) -> Vec<u32> {
        let mut head = vec![self.layout().0, seq as u32, counts[0] as u32, counts[1] as u32];
        head.resize(seq + BEFORE, 0);
        head
    }

    fn name(self) -> &'static str {
        match self {
            RowKind::Labelled => "labelled rows",
            RowKind::Chats => "chats",
            RowKind::Pairs => "pairs of answers",
        }
    }

    /// Number of neighbouring rows that stay together.
    pub fn together(self) -> usize {
        if self == RowKind::Pairs { 2 } else { 1 }
    }

    /// Number of rows held out, of `count` of which a `fraction` is.
    pub fn held_out(self, count: usize, fraction: f64) -> usize {
        let units = count / self.together();
        self.together() * (units - Tokens::training_part(units, fraction))
    }
}

/// Writes rows, those to train on and those for evaluation alone, with their classes by number. Returns what was written, and how
/// many rows were cut.
///
/// # Errors
/// A label that is not among the `classes`, those of encoding, [`DataError::Write`].
pub fn write_rows(
    path: &Path,
    tokenizer: &Tokenizer,
    seq: usize,
    parts: [Option<&Rows>; 2],
    classes: &[String],
) -> Result<(Written, usize)> {
    let encoder = RowEncoder::new(tokenizer, seq)?;
    let mut writer = TokenWriter::create(path, ALL_NUMBERS)?;
    let width = seq + BEFORE;
    writer.push(&RowKind::Labelled.head(seq, parts.map(|rows| rows.map_or(0, |rows| rows.rows.len()))))?;
    let (mut numbers, mut cut) = (Vec::new(), 0);
    for rows in parts.into_iter().flatten() {
        for row in &rows.rows {
            let class = rows.class(row, classes)?;
            let (ids, is_cut) = encoder.encode(row).map_err(|error| {
                let (file, line) = row.place;
                super::refused(&rows.files[file], line, error.to_string())
            })?;
            numbers.clear();
            numbers.extend([class as u32, ids.len() as u32]);
            numbers.extend(ids);
            numbers.resize(width, 0);
            writer.push(&numbers)?;
            writer.end_document();
            cut += usize::from(is_cut);
        }
    }
    Ok((writer.finish(Some(tokenizer))?, cut))
}

/// The rows of a run: those that it trains on, and those that are held out.
pub struct RowSamples {
    tokens: Tokens,
    seq: usize,
    kind: RowKind,
    /// Indices of the rows to train on, and of those held out.
    parts: [Vec<u32>; 2],
    order: RowOrder,
}

/// The order in which rows are trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowOrder {
    /// Shuffled or not.
    pub order: SampleOrder,
    /// Seed of the shuffling.
    pub seed: u64,
    /// The fraction of rows that is held out, evenly spread, if there are none for evaluation alone.
    pub held_out: f64,
}

impl RowSamples {
    /// The rows of a kind in `tokens`, for sequences of `seq` tokens.
    ///
    /// # Errors
    /// A file that has no such rows, or rows for another `seq`; a part without rows.
    pub fn open(kind: RowKind, tokens: Tokens, seq: usize, order: RowOrder) -> Result<RowSamples> {
        let width = seq + BEFORE;
        let refuse =
            |reason: String| Err(DataError::Source { reason: format!("{}: {reason}", tokens.origin()) });
        let mut head = [0; 4];
        if tokens.len() >= head.len() {
            tokens.read(0, &mut head)?;
        }
        let [mark, of_seq, train, evaluated] = head;
        if mark != kind.layout().0 {
            return refuse(format!("it holds no {}", kind.name()));
        }
        if of_seq as usize != seq {
            return refuse(format!(
                "its rows were cut for model.seq = {of_seq}, and model.seq = {seq}: start a new run"
            ));
        }
        let count = train as usize + evaluated as usize;
        if tokens.len() != (count + 1) * width {
            return refuse(format!(
                "it is damaged: {count} rows need {} numbers, and it has {}",
                (count + 1) * width,
                tokens.len()
            ));
        }
        let parts = RowSamples::parts(kind, [train as usize, evaluated as usize], order.held_out);
        let empty = parts.iter().position(Vec::is_empty);
        match empty {
            Some(0) => refuse("no row is left to train on: give more, or lower data.validation".to_string()),
            _ => Ok(RowSamples { tokens, seq, kind, parts, order }),
        }
    }

    /// Indices of the rows to train on, and of those held out: the ones for evaluation alone, or a `fraction` of the others.
    fn parts(kind: RowKind, [train, evaluated]: [usize; 2], fraction: f64) -> [Vec<u32>; 2] {
        if evaluated > 0 {
            return [0..train as u32, train as u32..(train + evaluated) as u32].map(Iterator::collect);
        }
        let each = kind.together();
        let mut by_place: Vec<u32> = (0..(train / each) as u32).collect();
        // Multiples of the golden ratio, without their whole part: evenly spread, since rows may be sorted by their class, and those of a
        // smaller fraction are among those of a larger one.
        by_place.sort_by_key(|row| u64::from(*row).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut trained = by_place.split_off(kind.held_out(train, fraction) / each);
        trained.sort_unstable();
        by_place.sort_unstable();
        [trained, by_place].map(|units| {
            units
                .into_iter()
                .flat_map(|unit| (0..each as u32).map(move |row| unit * each as u32 + row))
                .collect()
        })
    }

    /// Numbers of rows to train on and held out.
    pub fn counts(&self) -> [usize; 2] {
        self.parts.each_ref().map(Vec::len)
    }

    /// Refuses rows with ids that a model of `vocab` rows does not have, or with other classes than its `classes`.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`], [`DataError::Source`].
    pub fn check(&self, vocab: usize, classes: usize) -> Result<()> {
        let (mut ids, bits) = (vec![0; self.seq], self.kind.layout().1);
        for row in self.parts.iter().flatten() {
            let (class, length) = self.read(*row, &mut ids)?;
            if class >= classes || length == 0 || length > self.seq {
                let reason =
                    format!("{}: row {row} is damaged: class {class}, length {length}", self.tokens.origin());
                return Err(DataError::Source { reason });
            }
            if let Some(place) = ids.iter().position(|id| (id & bits) as usize >= vocab) {
                let (origin, id) = (self.tokens.origin().to_string(), i64::from(ids[place] & bits));
                let position = (*row as usize + 1) * (self.seq + BEFORE) + BEFORE + place;
                return Err(DataError::TokenOutOfRange { origin, position, id, vocab });
            }
        }
        Ok(())
    }

    /// Index of the row at `position` of the run: the number of samples before it.
    pub fn trained(&self, position: u64) -> u32 {
        let ([rows, _], each) = (&self.parts, self.kind.together() as u64);
        let (epoch, index) = (position / rows.len() as u64, position % rows.len() as u64);
        let index = match self.order.order {
            SampleOrder::Sequential => index,
            SampleOrder::Shuffled => {
                let key = mix(mix(self.order.seed) ^ epoch);
                each * Permutation::new(rows.len() as u64 / each, key).at(index / each) + index % each
            }
        };
        rows[index as usize]
    }

    /// Index of row `index` of `chosen` that are evaluated, evenly spread over those held out.
    pub fn evaluated(&self, index: usize, chosen: usize) -> u32 {
        let ([_, held], each) = (&self.parts, self.kind.together());
        held[each * (index / each * (held.len() / each) / (chosen / each)) + index % each]
    }

    /// Number of rows of both parts, by whose numbers [`RowSamples::trained`] and [`RowSamples::evaluated`] go.
    pub fn len(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }

    /// Returns whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the ids of a row, zeros behind it; returns its class and its length.
    ///
    /// # Errors
    /// Those of [`Tokens::read`].
    pub fn read(&self, row: u32, ids: &mut [u32]) -> Result<(usize, usize)> {
        let at = (row as usize + 1) * (self.seq + BEFORE);
        let mut before = [0; BEFORE];
        self.tokens.read(at, &mut before)?;
        self.tokens.read(at + BEFORE, ids)?;
        Ok((before[0] as usize, before[1] as usize))
    }

    /// The class of a row.
    ///
    /// # Errors
    /// Those of [`Tokens::read`].
    pub fn class(&self, row: u32) -> Result<usize> {
        let mut class = [0];
        self.tokens.read((row as usize + 1) * (self.seq + BEFORE), &mut class)?;
        Ok(class[0] as usize)
    }

    /// Writes the ids and the targets of a row.
    ///
    /// # Errors
    /// Those of [`Tokens::read`].
    pub fn fill(&self, row: u32, ids: &mut [u32], targets: &mut [u32]) -> Result<()> {
        let (class, _) = self.read(row, ids)?;
        match self.kind {
            RowKind::Labelled => targets.fill(class as u32),
            RowKind::Chats | RowKind::Pairs => pack::sample(ids, targets),
        }
        Ok(())
    }

    /// Writes the position of each token of a row in its text or chat. The padding counts as one of its own.
    ///
    /// # Errors
    /// Those of [`Tokens::read`].
    pub fn positions(&self, row: u32, to: &mut [u32]) -> Result<()> {
        let (_, length) = self.read(row, to)?;
        match self.kind {
            RowKind::Labelled => {
                let positions = (0..length as u32).chain(0..);
                to.iter_mut().zip(positions).for_each(|(to, position)| *to = position);
            }
            RowKind::Chats | RowKind::Pairs => pack::positions(to, length),
        }
        Ok(())
    }

    /// The share of the rows held out that are among those that `trained` trains on; None without any.
    ///
    /// # Errors
    /// Those of reading.
    pub fn trained_share(&self, trained: &RowSamples) -> Result<Option<f64>> {
        let [_, held] = &self.parts;
        if held.is_empty() {
            return Ok(None);
        }
        let mut ids = vec![0; self.seq];
        let mut seen = std::collections::HashSet::new();
        let mut digest = |rows: &RowSamples, row: u32| {
            ids.resize(rows.seq, 0);
            let (_, length) = rows.read(row, &mut ids)?;
            let bytes: Vec<u8> = ids[..length.min(rows.seq)].iter().flat_map(|id| id.to_le_bytes()).collect();
            Ok::<_, DataError>(blake3::hash(&bytes))
        };
        for row in &trained.parts[0] {
            seen.insert(digest(trained, *row)?);
        }
        let mut found = 0;
        for row in held {
            found += usize::from(seen.contains(&digest(self, *row)?));
        }
        Ok(Some(found as f64 / held.len() as f64))
    }

    /// Kind of the rows.
    pub fn kind(&self) -> RowKind {
        self.kind
    }

    /// The tokens that hold the rows.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_held_out_are_spread_and_nested() {
        for count in [3, 10, 200, 1001] {
            let [trained, held] = RowSamples::parts(RowKind::Chats, [count, 0], 0.1);
            assert_eq!((trained.len() + held.len(), held.len()), (count, count.div_ceil(10)), "{count}");
            let [_, more] = RowSamples::parts(RowKind::Chats, [count, 0], 0.25);
            assert!(held.iter().all(|row| more.contains(row)), "{count}");
            // In any run of 40 rows there are 1 to 8 of a tenth.
            let near = |first: usize| {
                held.iter().filter(|row| (first..first + 40).contains(&(**row as usize))).count()
            };
            assert!((0..count.saturating_sub(40)).all(|first| (1..9).contains(&near(first))), "{count}");
        }
        assert_eq!(RowSamples::parts(RowKind::Chats, [2, 3], 0.5), [vec![0, 1], vec![2, 3, 4]]);
    }
}
