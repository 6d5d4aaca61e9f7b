//! Signs that a file of ids is probably something else.
//!
//! Bare ids have no header, so any file can be taken for them. But ids of a wrong width, text, archives and numbers of other kinds have
//! marks that ids of text never have. A sample of the file shows them: up to 64 windows, evenly spread. The result is a matter of
//! probability: a user who knows better sets `data.unusual_tokens`.

use super::foreign::{self, Look};
use super::source::OpenTokenFile;
use super::{IdType, Layout, TokenFormat, exact};
use crate::Result;

/// Bytes of one window of the sample, and the windows of a large file.
const WINDOW_BYTES: u64 = 1 << 14;
const WINDOWS: u64 = 64;

/// Bytes of one page: one of zeros alone was never written.
const PAGE_BYTES: usize = 4096;

/// Larger than the vocabulary of any tokenizer.
const NO_ID: i64 = 1 << 20;

/// The largest upper half of a 32-bit id below [`NO_ID`].
const UPPER: u16 = (NO_ID >> 16) as u16 - 1;

/// Describes the file at `source`, if it does not look like ids of its layout.
pub(super) fn look(source: &OpenTokenFile, layout: &Layout) -> Result<Option<Look>> {
    let sample = sample(source, layout)?;
    let head = &sample[..sample.len().min(WINDOW_BYTES as usize)];
    let bare = layout.format == TokenFormat::NanoGpt;
    let one = || one_id(layout.ids, &sample);
    let of_type = || match layout.ids {
        IdType::U8 | IdType::I8 => halves(&sample).or_else(|| noise(&sample)),
        IdType::U16 | IdType::I16 => words(&sample),
        IdType::U32 | IdType::I32 | IdType::I64 => wide(layout.ids, &sample),
    };
    let unlike = bare.then(|| {
        let by_magic = foreign::by_magic(head, source.bytes());
        by_magic.or_else(one).or_else(|| foreign::text(head, &sample)).or_else(of_type)
    });
    Ok(unlike.flatten().or_else(one).or_else(|| holes(layout, &sample)))
}

/// Bytes of ids from all parts of the file; its first ones first. Each window is aligned to eight bytes.
fn sample(source: &OpenTokenFile, layout: &Layout) -> Result<Vec<u8>> {
    let (start, bytes) = (layout.data.start, layout.data.end - layout.data.start);
    let whole = bytes <= WINDOW_BYTES * WINDOWS;
    let window = if whole { bytes } else { WINDOW_BYTES };
    let mut sample = Vec::new();
    for number in 0..if whole { 1 } else { WINDOWS } {
        let at = (bytes - window) / WINDOWS.saturating_sub(1) * number / 8 * 8;
        let from = sample.len();
        sample.resize(from + window as usize, 0);
        source.read(start + at, &mut sample[from..])?;
    }
    Ok(sample)
}

/// All ids are the same.
fn one_id(ids: IdType, sample: &[u8]) -> Option<Look> {
    let width = ids.bytes();
    let (first, rest) = sample.split_at_checked(width)?;
    let same = rest.len() >= 15 * width && rest.chunks_exact(width).all(|id| id == first);
    let what = format!("it holds one id only, {}", exact(ids, first));
    same.then(|| Look::new(what, "look where it comes from: a copy that was cut off may leave zeros"))
}

/// Pages of zeros, as a download that was cut off leaves them. Phalanx's own files have a name only when they are whole.
fn holes(layout: &Layout, sample: &[u8]) -> Option<Look> {
    let (pages, _) = sample.as_chunks::<PAGE_BYTES>();
    let empty = pages.iter().filter(|page| page.iter().all(|byte| *byte == 0)).count();
    let what =
        format!("{empty} of {} pages of {PAGE_BYTES} bytes that were looked at are zeros", pages.len());
    let is_hole = empty > 0 && layout.format != TokenFormat::Phalanx;
    is_hole.then(|| Look::new(what, "a copy that was cut off leaves them: fetch it again"))
}

/// Bytes that are no 16-bit ids.
fn words(sample: &[u8]) -> Option<Look> {
    let words: Vec<u16> = sample.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word)).collect();
    if words.len() < 8 || words.iter().all(|word| *word == words[0]) {
        return None;
    }
    floats(&words).or_else(|| wider(&words)).or_else(|| noise(sample)).or_else(|| narrower(&words))
}

/// The words at some of the four places in each group of 64 bits.
fn lanes<'a>(words: &'a [u16], places: &'a [usize]) -> impl Iterator<Item = u16> + 'a {
    words.iter().enumerate().filter(|(at, _)| places.contains(&(at % 4))).map(|(_, word)| *word)
}

/// Numbers whose exponents lie near that of 1. Ids that were stored as floating-point numbers have no sign.
fn floats(words: &[u16]) -> Option<Look> {
    // Among all words at some places, those that can be the upper part of such a number, and the negative ones.
    let shares = |places: &[usize], smallest: u16| {
        let [mut all, mut near, mut negative] = [0; 3];
        for word in lanes(words, places).filter(|word| *word != 0) {
            all += 1;
            near += usize::from((smallest..0x4800).contains(&(word & 0x7fff)));
            negative += usize::from(word > 0x8000);
        }
        (all, 20 * near >= 19 * all, negative)
    };
    for (places, others, smallest, bits) in [
        (&[0, 1, 2, 3][..], &[][..], 0x1400, 16),
        (&[1, 3], &[0, 2], 0x3000, 32),
        (&[3], &[0, 1, 2], 0x3c00, 64),
    ] {
        let (all, are_near, negative) = shares(places, smallest);
        let both_signs = (all / 5..=all - all / 5).contains(&negative);
        let others_differ = !others.is_empty() && !shares(others, smallest).1;
        if 2 * all >= lanes(words, places).count().max(32)
            && are_near
            && (both_signs || others_differ && negative == 0)
        {
            let what = format!("its bits are those of {bits}-bit floating-point numbers");
            return Some(Look::new(
                what,
                "convert its numbers to integers, or name the file that holds the tokens",
            ));
        }
    }
    None
}

/// Ids of 32 or 64 bits, in either order of bytes.
fn wider(words: &[u16]) -> Option<Look> {
    let [a, b, c, d] = [0, 1, 2, 3].map(|place| lanes(words, &[place]).max().unwrap_or(0));
    let swap = "swap its bytes (numpy: `ids.byteswap()`)";
    match () {
        () if [c, d] == [0, 0] && b <= UPPER && a.max(b) > 0 => {
            Some(Look::of_type("of four 16-bit numbers three are 0, or nearly so, as in 64-bit ids", "i64"))
        }
        () if [b, d] == [0, 0] => {
            Some(Look::of_type("every second 16-bit number is 0, as in 32-bit ids", "u32"))
        }
        () if b.max(d) <= UPPER && a.max(c) >= 4096 && words.len() >= 64 => Some(Look::of_type(
            &format!("every second 16-bit number is {} or less, as in 32-bit ids", b.max(d)),
            "u32",
        )),
        () if words.len() >= 16
            && lanes(words, &[0, 2]).all(|word| word % 256 == 0 && word / 256 <= UPPER) =>
        {
            Some(Look::new(
                "its upper halves come first, as in 32-bit ids whose first byte is the highest",
                swap,
            ))
        }
        () if words.iter().all(|word| word % 256 == 0) => {
            Some(Look::new("every second byte is 0, as in ids whose first byte is the highest", swap))
        }
        () => None,
    }
}

/// Ids of 8 bits, of which two make a word: both of its bytes have one distribution. Ids of 16 bits in the other order of bytes:
/// their lower byte varies less than the upper one.
fn narrower(words: &[u16]) -> Option<Look> {
    let mut counts = [[0usize; 256]; 2];
    words.iter().for_each(|word| {
        word.to_le_bytes().iter().zip(&mut counts).for_each(|(byte, counts)| counts[usize::from(*byte)] += 1)
    });
    let [low, high] = &counts;
    let kinds = |counts: &[usize]| counts.iter().filter(|count| **count > 0).count();
    let all = words.len();
    let many = kinds(low) >= 16 && kinds(high) >= 16;
    let apart: usize = low.iter().zip(high).map(|(low, high)| low.abs_diff(*high)).sum();
    let used = (0..256).filter(|byte| low[*byte] + high[*byte] > 0).count();
    // Two samples of one distribution over `used` values differ by about the root of (4 / pi) all used.
    let alike = all >= 12 * used && apart.pow(2) <= 3 * all * used;
    let ascii = many && kinds(&low[128..]) + kinds(&high[128..]) == 0 && all >= 64;
    if (alike && 4 * high[0] <= 3 * all) || ascii {
        return Some(Look::of_type("both bytes of each 16-bit number vary alike, as in 8-bit ids", "u8"));
    }
    let small = |counts: &[usize]| counts[..16].iter().sum::<usize>();
    let swapped = all >= 256 && many && small(low) > 2 * small(high) + all / 10;
    let what =
        "the lower byte of each id varies less than the upper one, as in ids whose first byte is the highest";
    swapped.then(|| Look::new(what, "swap its bytes (numpy: `ids.byteswap()`)"))
}

/// Bytes of which each occurs as often as any other: by Pearson's test, beyond five standard deviations.
fn noise(sample: &[u8]) -> Option<Look> {
    let mut counts = [0f64; 256];
    sample.iter().for_each(|byte| counts[usize::from(*byte)] += 1.0);
    let expected = sample.len() as f64 / 256.0;
    let square: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
    let what = "all its bytes occur equally often, as in compressed or encrypted files";
    (expected >= 16.0 && square < 255.0 + 5.0 * 510f64.sqrt())
        .then(|| Look::new(what, "unpack it, or name the file that holds the tokens"))
}

/// Bytes that are no 8-bit ids: those at even places differ from those at odd ones.
fn halves(sample: &[u8]) -> Option<Look> {
    let mut counts = [[0usize; 16]; 2];
    let (pairs, _) = sample.as_chunks::<2>();
    pairs.iter().for_each(|pair| (0..2).for_each(|half| counts[half][usize::from(pair[half] >> 4)] += 1));
    let apart: usize = counts[0].iter().zip(&counts[1]).map(|(even, odd)| even.abs_diff(*odd)).sum();
    let what = "bytes at even places differ from those at odd ones, as in ids of 16 bits or more";
    let half = pairs.iter().all(|pair| pair[1] == 0) && pairs.iter().any(|pair| pair[0] > 0);
    let differ = half || 5 * apart > 4 * pairs.len();
    (pairs.len() >= 64 && differ).then(|| Look::new(what, "set data.token_type to their type"))
}

/// Bytes that are no 32-bit or 64-bit ids.
fn wide(ids: IdType, sample: &[u8]) -> Option<Look> {
    let numbers: Vec<i64> = sample.chunks_exact(ids.bytes()).map(|id| exact(ids, id)).collect();
    let upper = numbers.iter().skip(1).step_by(2).max().copied().unwrap_or(0);
    let is_pair = ids.bytes() == 4 && numbers.len() >= 8 && upper == 0 && numbers.iter().any(|id| *id > 0);
    if is_pair {
        return Some(Look::of_type("every second 32-bit number is 0, as in 64-bit ids", "i64"));
    }
    let beyond = numbers.iter().find(|id| !(0..NO_ID).contains(*id))?;
    let words = sample.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word));
    let what = format!(
        "as {}-bit ids it holds {beyond}, and no tokenizer has so many; as 16-bit ids they go up to {}",
        8 * ids.bytes(),
        words.max().unwrap_or(0)
    );
    Some(Look::new(what, "set data.token_type to their type"))
}
