//! Encodes a long document in windows that overlap, for tokenizers that must see what is around a token.
//!
//! Two neighbouring windows both encode the text in which they overlap. Near the ends of the overlap, the one that begins
//! or ends there may make other tokens than the whole document has. Between, where both make the same tokens of the same
//! bytes for [`AGREED_BYTES`], the first window's tokens are taken up to a position, and the second's from there on.
//! These are the tokens of the whole document:
//!
//! - Pre-tokens are encoded each by itself, and a pre-tokenizer reads from the left to the right: two readings with a
//!   common boundary read alike from there on. So the position is a boundary between pre-tokens of both windows.
//! - The merges of a byte-pair encoding leave tokens of which each pair of neighbours is what the two would be merged to
//!   alone, and no other tokens of a text have this property. A position between the same two tokens keeps it, so there the
//!   position may also lie within a pre-token, of which some files have only one.
//! - What is added before a text, or removed from its ends, lies outside of the part that agrees.
//!
//! Two windows that agree nowhere, as in a long word, are encoded as one, up to [`MAX_WINDOW_BYTES`].

use std::path::Path;

use crate::{DataError, Result};

/// Bytes of a window. The `tokenizers` library takes up to 150 bytes of memory for each.
pub(crate) const WINDOW_BYTES: usize = 1 << 16;

/// Bytes of two neighbouring windows that are the same.
const OVERLAP_BYTES: usize = 1 << 13;

/// Bytes in a row of which two windows must make the same tokens.
const AGREED_BYTES: u32 = 1 << 11;

/// Largest text that is encoded at once, where windows do not agree.
const MAX_WINDOW_BYTES: usize = 1 << 20;

/// A token, with the bytes of the window that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) id: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// True if it is the first of its pre-token.
    pub(crate) begins_word: bool,
}

/// A part of a document that is encoded by itself.
pub(crate) struct Window {
    pub(crate) text: String,
    /// The byte of the document at which it begins.
    pub(crate) start: usize,
    /// Bytes of it that no earlier window has.
    pub(crate) new_bytes: usize,
    pub(crate) begins_document: bool,
    pub(crate) ends_document: bool,
}

impl Window {
    /// A part of a document from its byte `start` on that shares no text with others.
    pub(crate) fn alone(text: &str, start: usize, ends_document: bool) -> Window {
        let (text, new_bytes, begins_document) = (text.to_string(), text.len(), start == 0);
        Window { text, start, new_bytes, begins_document, ends_document }
    }

    /// Returns whether it is a whole document.
    pub(crate) fn is_alone(&self) -> bool {
        self.begins_document && self.ends_document
    }
}

/// Cuts documents into windows.
#[derive(Default)]
pub(crate) struct Cutter {
    text: String,
    start: usize,
    /// Bytes of the text that the last window has, too.
    known: usize,
}

/// The last position up to `at` at which a character begins, or the end of a shorter text.
pub(crate) fn boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default()
}

impl Cutter {
    /// Adds text to a document, which `ends` with it, and gives the windows that are complete to `send`.
    ///
    /// # Errors
    /// Those of `send`.
    pub(crate) fn push(
        &mut self,
        text: &str,
        ends: bool,
        send: &mut dyn FnMut(Window) -> Result<()>,
    ) -> Result<()> {
        self.text.push_str(text);
        while self.text.len() > WINDOW_BYTES {
            let end = boundary(&self.text, WINDOW_BYTES);
            let next = boundary(&self.text, end - OVERLAP_BYTES);
            send(self.window(end, false))?;
            self.text.drain(..next);
            (self.start, self.known) = (self.start + next, end - next);
        }
        if ends {
            let last = self.window(self.text.len(), true);
            *self = Cutter::default();
            send(last)?;
        }
        Ok(())
    }

    fn window(&self, end: usize, ends_document: bool) -> Window {
        Window {
            text: self.text[..end].to_string(),
            start: self.start,
            new_bytes: end - self.known,
            begins_document: self.start == 0,
            ends_document,
        }
    }
}

/// Joins the tokens of the windows of a document.
#[derive(Default)]
pub(crate) struct Seam {
    open: Option<Open>,
}

/// A window whose last tokens wait for the next window.
struct Open {
    window: Window,
    tokens: Vec<Placed>,
    /// The first token that was not handed out.
    from: usize,
}

impl Seam {
    /// Adds the next window with its tokens, and returns the ids of the document that are certain now. `encode` encodes two
    /// windows that agree nowhere; `within_words` says whether a position within a pre-token is one, too.
    ///
    /// # Errors
    /// [`DataError::Uncut`], and those of `encode`.
    pub(crate) fn join(
        &mut self,
        document: &Path,
        window: Window,
        tokens: Vec<Placed>,
        within_words: bool,
        encode: &dyn Fn(&str) -> Result<Vec<Placed>>,
    ) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let mut open = match self.open.take() {
            None => Open { window, tokens, from: 0 },
            Some(last) => {
                let shift = (window.start - last.window.start) as u32;
                match agreement(&last.tokens, &tokens, shift, within_words) {
                    Some((end, from)) if end >= last.from => {
                        ids.extend(last.tokens[last.from..end].iter().map(|token| token.id));
                        Open { window, tokens, from }
                    }
                    _ => last.with(document, window, encode)?,
                }
            }
        };
        if open.window.ends_document {
            ids.extend(open.tokens[open.from..].iter().map(|token| token.id));
        } else {
            open.window.text.shrink_to_fit();
            self.open = Some(open);
        }
        Ok(ids)
    }
}

impl Open {
    /// This window and the next one as a single window.
    fn with(
        self,
        document: &Path,
        next: Window,
        encode: &dyn Fn(&str) -> Result<Vec<Placed>>,
    ) -> Result<Open> {
        let mut window = self.window;
        let (start, known) = (window.start, window.text.len() - (next.start - window.start));
        window.text.push_str(&next.text[known..]);
        window.ends_document = next.ends_document;
        let uncut =
            || DataError::Uncut { path: document.to_path_buf(), position: start, limit: MAX_WINDOW_BYTES };
        if window.text.len() > MAX_WINDOW_BYTES {
            return Err(uncut());
        }
        let tokens = encode(&window.text)?;
        // What was handed out must also be the beginning of the larger window.
        let decided = self.tokens.len().min(self.from + 1);
        match tokens.get(..decided) == Some(&self.tokens[..decided]) {
            true => Ok(Open { window, tokens, from: self.from }),
            false => Err(uncut()),
        }
    }
}

/// The numbers of a token of `left` and of one of `right`, which begins `shift` bytes behind `left`, from which on the
/// tokens of `right` follow those of `left`.
fn agreement(left: &[Placed], right: &[Placed], shift: u32, within_words: bool) -> Option<(usize, usize)> {
    let moved = |token: &Placed| Placed { start: token.start + shift, end: token.end + shift, ..*token };
    let (mut at, mut next) = (left.partition_point(|token| token.end <= shift), 0);
    // The longest run so far: its first tokens, its length and its bytes.
    let (mut best, mut run) = ((0, 0, 0, 0), 0);
    while at < left.len() && next < right.len() {
        let (a, b) = (left[at], moved(&right[next]));
        if a == b {
            run += 1;
            (at, next) = (at + 1, next + 1);
            let bytes = a.end.saturating_sub(left[at - run].start);
            if bytes > best.3 {
                best = (at - run, next - run, run, bytes);
            }
            continue;
        }
        run = 0;
        (at, next) = (at + usize::from(a.start <= b.start), next + usize::from(b.start <= a.start));
    }
    let (at, next, count, bytes) = best;
    if bytes < AGREED_BYTES {
        return None;
    }
    // The position nearest to the middle.
    let is_boundary = |place: &usize| within_words || left[at + place].begins_word;
    let place = (1..count).filter(is_boundary).min_by_key(|place| place.abs_diff(count / 2))?;
    Some((at + place, next + place))
}
