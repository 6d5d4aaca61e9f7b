//! GPT-2's byte-pair encoding by `tiktoken-rs`, which carries the vocabulary (`r50k_base`).
//!
//! GPT-2 first splits text by a pattern whose every match has white space only at its start, or is
//! white space alone. So a text may be cut before any white-space character that something else
//! follows: both parts split as the whole does. That gives documents of any size in bounded memory,
//! and it avoids a limit: the pattern engine gives up (tiktoken-rs 0.12.1 panics) within a run of more
//! than about a million white-space characters, but not when the text ends with the run.

use tiktoken_rs::{CoreBPE, r50k_base};

use crate::corpus::BLOCK_BYTES;

const VOCAB_SIZE: usize = 50_257;

/// `<|endoftext|>`
const END_OF_TEXT: u32 = 50_256;

/// A longer run of white space is cut; well below the engine's limit.
const LONG_RUN: usize = 100_000;

thread_local! {
    /// Each thread has its own (made in about 35 ms): clones of one share the pattern engine's scratch
    /// memory, and two threads that contend for it are slower than one alone.
    static BPE: CoreBPE = r50k_base().expect("tiktoken-rs contains the vocabulary");
}

/// GPT-2's vocabulary.
pub(super) struct Gpt2;

impl Gpt2 {
    /// Part of every build with the feature `tokenizers`.
    pub(super) fn new() -> Result<Gpt2, String> {
        Ok(Gpt2)
    }

    pub(super) fn vocab_size(&self) -> usize {
        VOCAB_SIZE
    }

    pub(super) fn end_of_text(&self) -> u32 {
        END_OF_TEXT
    }

    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        encode(text)
    }

    pub(super) fn decode(&self, ids: &[u32]) -> String {
        decode(ids)
    }

    pub(super) fn last_cut(&self, text: &str) -> usize {
        last_cut(text)
    }

    /// The bytes of every token but the special one, by id.
    pub(super) fn ordinary_tokens(&self) -> Vec<Vec<u8>> {
        let bytes = |id: u32| BPE.with(|bpe| bpe.decode_bytes(&[id]).expect("an id of the vocabulary"));
        (0..END_OF_TEXT).map(bytes).collect()
    }
}

/// The ids of `text`, in which the spelling of a special token is plain text.
fn encode(text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    let mut start = 0;
    for cut in cuts_in_long_runs(text) {
        ids.extend(encode_whole(&text[start..cut]));
        start = cut;
    }
    ids.extend(encode_whole(&text[start..]));
    ids
}

fn encode_whole(text: &str) -> Vec<u32> {
    BPE.with(|bpe| bpe.encode_ordinary(text))
}

/// The text of `ids`; see [`super::Tokenizer::decode`].
fn decode(ids: &[u32]) -> String {
    let bytes = BPE.with(|bpe| bpe.decode_bytes(ids).unwrap_or_else(|_| decode_each(bpe, ids)));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Decodes id by id, because one of them is unknown: the byte 0xff, which is in no UTF-8, marks it.
fn decode_each(bpe: &CoreBPE, ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| bpe.decode_bytes(&[*id]).unwrap_or_else(|_| vec![0xff])).collect()
}

/// The last position at which `text` can be cut without changing its ids, or 0. It looks back two blocks; a caller that
/// gets 0 tries again with one more block.
fn last_cut(text: &str) -> usize {
    let mut following: Option<char> = None;
    for (at, character) in text.char_indices().rev() {
        if text.len() - at > 2 * BLOCK_BYTES {
            break;
        }
        let starts_word = following.is_some_and(|next| !next.is_whitespace());
        if starts_word && character.is_whitespace() {
            return at;
        }
        following = Some(character);
    }
    0
}

/// One cut that does not change ids in each long run of white space that is followed by other text, in ascending order.
fn cuts_in_long_runs(text: &str) -> Vec<usize> {
    let mut cuts = Vec::new();
    let (mut run, mut last) = (0, 0);
    for (at, character) in text.char_indices() {
        if character.is_whitespace() {
            (run, last) = (run + 1, at);
        } else {
            if run > LONG_RUN {
                cuts.push(last);
            }
            run = 0;
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_is_exact() {
        let text =
            "  Two  spaces\n\n\nthree lines\t\ttabs, it's 12 3456 'll\u{a0}\u{3000}漢字 🙂🙂 !!! \n ends  ";
        let whole = encode_whole(text);
        let mut cuts = 0;
        for end in (1..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let cut = last_cut(&text[..end]);
            let mut parts = encode_whole(&text[..cut]);
            parts.extend(encode_whole(&text[cut..]));
            assert_eq!(parts, whole, "cut before byte {cut}");
            cuts += usize::from(cut > 0);
        }
        assert!(cuts > 20);
    }

    #[test]
    fn a_cut_long_run_gives_the_same_ids() {
        for run in [" ".repeat(LONG_RUN + 1), "\n \t".repeat(LONG_RUN), "\u{a0}".repeat(LONG_RUN + 7)] {
            let text = format!("before{run}after it{run}b{run}");
            assert_eq!(cuts_in_long_runs(&text).len(), 2);
            assert_eq!(encode(&text), encode_whole(&text));
        }
    }

    #[test]
    fn a_run_beyond_the_engines_limit() {
        let text = format!("a{}b", " ".repeat(1_500_000));
        assert_eq!(decode(&encode(&text)), text);
    }
}
