//! Rows of chats: several in one sequence, or one in each, and the samples that they make.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use super::encode::{ChatEncoder, ChatExample};
use super::pairs::PairKind;
use super::records::Place;
use super::{ChatFiles, ChatFormat};
use crate::masking::NOT_PREDICTED;
use crate::rows::{BEFORE, RowKind};
use crate::token_file::{TokenWriter, Written};
use crate::{DataError, Progress, Result, Tokenizer};

/// The bit of an id that says that it is predicted, and that of the first one of a chat.
const TRAINED: u32 = 1 << 31;
const BEGINS: u32 = 1 << 30;

/// All but these.
pub(crate) const ID: u32 = BEGINS - 1;

/// Chats that are packed together.
const TOGETHER: usize = 1000;

/// Rows of chats, in memory.
#[derive(Clone, Debug, Default)]
pub struct PackedChats {
    /// Rows of `seq` ids, with the number of those used before them.
    rows: Vec<u32>,
    seq: usize,
    /// About the chats.
    pub lengths: ChatLengths,
}

/// Facts about chats, for people.
#[derive(Clone, Debug, Default)]
pub struct ChatLengths {
    /// Numbers of chats, by format.
    pub formats: BTreeMap<ChatFormat, u64>,
    /// Tokens of each, before it was cut, sorted.
    pub tokens: Vec<u32>,
    /// Number of chats without a token to predict in what is left of them.
    pub left_out: u64,
    /// Number of chats whose parts are joined to texts.
    pub joined: u64,
    /// Tokens in rows, and those to predict.
    pub used: [u64; 2],
    /// Number of times that special tokens are spelled.
    pub spelled: BTreeMap<String, u64>,
    /// Keys of records that are not read.
    pub unread: BTreeSet<String>,
}

impl PackedChats {
    /// Encodes and packs the chats of files into rows of `seq` tokens: several whole chats in each, or one.
    ///
    /// # Errors
    /// [`DataError::Row`] for the first record that is refused, in the order of the files; chats of which none has a token to predict.
    pub fn encode(
        files: &ChatFiles,
        encoder: &ChatEncoder,
        (seq, one_each): (usize, bool),
        threads: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<PackedChats> {
        let mut packed = PackedChats { seq, ..PackedChats::default() };
        let places = files.records()?;
        let encode = |at: usize| encoder.example(files, &places[at]);
        let tokens = |example: &ChatExample| example.ids.len();
        in_parts(&places, threads, &encode, &tokens, progress, &mut |examples| {
            let chats = examples.into_iter().filter_map(|example| packed.cut(example)).collect();
            packed.pack(chats, one_each);
        })?;
        packed.finished()
    }

    /// Encodes the pairs of files into rows of `seq` tokens: of each pair one behind the other, without those of which an answer is cut off.
    ///
    /// # Errors
    /// As [`PackedChats::encode`].
    pub fn encode_pairs(
        files: &ChatFiles,
        encoder: &ChatEncoder,
        (seq, kind): (usize, PairKind),
        threads: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<PackedChats> {
        let mut packed = PackedChats { seq, ..PackedChats::default() };
        let places = files.records()?;
        let encode = |at: usize| encoder.pair(files, (&places, at), kind);
        let tokens = |(answers, _): &([ChatExample; 2], bool)| answers.iter().map(|one| one.ids.len()).sum();
        in_parts(&places, threads, &encode, &tokens, progress, &mut |pairs| {
            for ([first, second], is_chosen) in pairs {
                let left_out = packed.lengths.left_out;
                if let [Some(first), Some(second)] = [packed.cut(first), packed.cut(second)] {
                    packed.push(first, u32::from(is_chosen));
                    packed.push(second, 0);
                } else {
                    packed.lengths.left_out = left_out + 1;
                }
            }
        })?;
        packed.finished()
    }

    fn finished(mut self) -> Result<PackedChats> {
        self.lengths.tokens.sort_unstable();
        let reason =
            || format!("no chat has an answer within its first {} tokens: raise model.seq", self.seq);
        match self.rows.is_empty() {
            false => Ok(self),
            true => Err(DataError::Source { reason: reason() }),
        }
    }

    /// Notes a chat, and makes of it the ids of a row, if there is one to predict among them.
    fn cut(&mut self, example: ChatExample) -> Option<Vec<u32>> {
        let lengths = &mut self.lengths;
        if let Some(format) = example.format {
            *lengths.formats.entry(format).or_default() += 1;
        }
        lengths.tokens.push(example.ids.len() as u32);
        lengths.joined += u64::from(example.is_joined);
        lengths.unread.extend(example.unread);
        for (token, count) in example.spelled {
            *lengths.spelled.entry(token).or_default() += count;
        }
        let bit = |trained: bool| if trained { TRAINED } else { 0 };
        let tokens = example.ids.iter().zip(&example.trained).take(self.seq);
        let mut ids: Vec<u32> = tokens.map(|(id, trained)| id | bit(*trained)).collect();
        if ids.iter().skip(1).all(|id| id & TRAINED == 0) {
            lengths.left_out += 1;
            return None;
        }
        ids[0] = ids[0] & ID | BEGINS;
        Some(ids)
    }

    /// Adds rows of chats: each goes where the least room is left that suffices, the longest first.
    fn pack(&mut self, mut chats: Vec<Vec<u32>>, one_each: bool) {
        let mut rows: Vec<Vec<u32>> = Vec::new();
        if one_each {
            rows = chats;
        } else {
            chats.sort_by_key(|ids| std::cmp::Reverse(ids.len()));
            let mut room: BTreeSet<(usize, usize)> = BTreeSet::new();
            for ids in chats {
                let (left, row) = match room.range((ids.len(), 0)..).next().copied() {
                    Some(found) => {
                        room.remove(&found);
                        found
                    }
                    None => {
                        rows.push(Vec::new());
                        (self.seq, rows.len() - 1)
                    }
                };
                room.insert((left - ids.len(), row));
                rows[row].extend(ids);
            }
        }
        rows.into_iter().for_each(|ids| self.push(ids, 0));
    }

    /// Adds a row of a class.
    fn push(&mut self, mut ids: Vec<u32>, class: u32) {
        let trained = ids.iter().filter(|id| **id & TRAINED != 0).count();
        self.lengths.used[0] += ids.len() as u64;
        self.lengths.used[1] += trained as u64;
        self.rows.extend([class, ids.len() as u32]);
        ids.resize(self.seq, 0);
        self.rows.extend(ids);
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len() / (self.seq + BEFORE)
    }

    /// Returns whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Writes rows of a kind to train on, and those for evaluation alone, into a token file.
    ///
    /// # Errors
    /// [`DataError::Write`].
    pub fn write(
        path: &std::path::Path,
        tokenizer: &Tokenizer,
        kind: RowKind,
        parts: [Option<&PackedChats>; 2],
    ) -> Result<Written> {
        let seq = parts.into_iter().flatten().map(|part| part.seq).next().unwrap_or(1);
        let counts = parts.map(|part| part.map_or(0, PackedChats::len));
        let mut writer = TokenWriter::create(path, 1 << 32)?;
        writer.push(&kind.head(seq, counts))?;
        for part in parts.into_iter().flatten() {
            writer.push(&part.rows)?;
        }
        let chats: usize = parts.into_iter().flatten().map(|part| part.lengths.tokens.len()).sum();
        (0..chats).for_each(|_| writer.end_document());
        writer.finish(Some(tokenizer))
    }
}

/// Encodes records by several threads, some at a time: `take` receives what `encode` makes of each, in order.
fn in_parts<T: Send>(
    places: &[Place],
    threads: usize,
    encode: &(dyn Fn(usize) -> Result<T> + Sync),
    tokens: &dyn Fn(&T) -> usize,
    progress: &mut dyn FnMut(Progress),
    take: &mut dyn FnMut(Vec<T>),
) -> Result<()> {
    let of = places.iter().map(|place| place.text.len() as u64).sum();
    let mut done = Progress { of, ..Progress::default() };
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    for start in (0..places.len()).step_by(TOGETHER) {
        let together = start..places.len().min(start + TOGETHER);
        let share = together.len().div_ceil(threads.get());
        let encoded: Vec<Result<Vec<T>>> = std::thread::scope(|scope| {
            let parts = together.clone().step_by(share).map(|first| first..together.end.min(first + share));
            let started: Vec<_> = parts.map(|part| scope.spawn(move || part.map(encode).collect())).collect();
            started
                .into_iter()
                .map(|thread| thread.join().expect("an encoder that panics ends the program"))
                .collect()
        });
        let all: Vec<T> = encoded.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        done.tokens += all.iter().map(|one| tokens(one) as u64).sum::<u64>();
        done.documents += together.len();
        done.bytes += places[together].iter().map(|place| place.text.len() as u64).sum::<u64>();
        take(all);
        progress(done);
    }
    Ok(())
}

/// Makes a sample of the ids of a row: their targets, and the ids without their bits.
pub(crate) fn sample(ids: &mut [u32], targets: &mut [u32]) {
    let next =
        ids.iter().skip(1).map(|id| if id & (TRAINED | BEGINS) == TRAINED { id & ID } else { NOT_PREDICTED });
    targets.iter_mut().zip(next.chain([NOT_PREDICTED])).for_each(|(target, next)| *target = next);
    ids.iter_mut().for_each(|id| *id &= ID);
}

/// The position of each of the ids of a row in its chat, in place of them. What is behind the first `used` counts as one chat.
pub(crate) fn positions(ids: &mut [u32], used: usize) {
    let mut position = 0;
    for (at, id) in ids.iter_mut().enumerate() {
        position = if *id & BEGINS != 0 || at == used { 0 } else { position };
        (*id, position) = (position, position + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(length: u32, trained: u32) -> ChatExample {
        let ids = (0..length).map(|at| 10 * length + at).collect();
        ChatExample { ids, trained: (0..length).map(|at| at >= trained).collect(), ..ChatExample::default() }
    }

    #[test]
    fn chats_lie_whole_in_rows_and_nothing_crosses() {
        let mut packed = PackedChats { seq: 8, ..PackedChats::default() };
        let chats = [chat(3, 1), chat(5, 3), chat(9, 2), chat(4, 2), chat(3, 3)];
        let chats: Vec<Vec<u32>> = chats.into_iter().filter_map(|chat| packed.cut(chat)).collect();
        packed.pack(chats, false);
        assert_eq!((packed.len(), packed.lengths.left_out, packed.lengths.used), (3, 1, [20, 12]));
        let mut row = packed.rows[12..20].to_vec();
        assert_eq!(packed.rows[11], 8);
        let (mut places, mut targets) = (row.clone(), [0; 8]);
        positions(&mut places, 8);
        sample(&mut row, &mut targets);
        assert_eq!(row, [50, 51, 52, 53, 54, 30, 31, 32]);
        assert_eq!(places, [0, 1, 2, 3, 4, 0, 1, 2]);
        let none = NOT_PREDICTED;
        assert_eq!(targets, [none, none, 53, 54, none, 31, 32, none]);

        let mut last = packed.rows[22..30].to_vec();
        positions(&mut last, packed.rows[21] as usize);
        assert_eq!((packed.rows[21], last), (4, vec![0, 1, 2, 3, 0, 1, 2, 3]));
    }
}
