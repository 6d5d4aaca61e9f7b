//! Short texts in shared memory: call sites, names of groups, the reason why a job ended.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::shared_memory::word::Word;

/// Text in shared memory, stored in words. Of text that is too long, the end is kept.
#[repr(C)]
pub(crate) struct Text<const WORDS: usize> {
    length: AtomicU32,
    line: AtomicU32,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Default for Text<WORDS> {
    fn default() -> Text<WORDS> {
        Text { length: 0.into(), line: 0.into(), words: std::array::from_fn(|_| 0.into()) }
    }
}

impl<const WORDS: usize> Text<WORDS> {
    /// `line` 0 means none.
    pub(crate) fn write(&self, text: &str, line: u32) {
        let bytes = &text.as_bytes()[text.len().saturating_sub(WORDS * 8)..];
        for (word, chunk) in self.words.iter().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
        }
        self.line.store(line, Ordering::Relaxed);
        self.length.store(bytes.len() as u32, Ordering::Release);
    }

    /// Visits the words of the text.
    pub(crate) fn for_each_word(&self, visit: &mut impl FnMut(Word)) {
        visit(Word::Four(&self.line));
        self.words.iter().for_each(|word| visit(Word::Eight(word)));
        visit(Word::Four(&self.length));
    }

    pub(crate) fn read(&self) -> String {
        let length = (self.length.load(Ordering::Acquire) as usize).min(WORDS * 8);
        let bytes = self.words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes());
        let text = String::from_utf8_lossy(&bytes.take(length).collect::<Vec<u8>>()).into_owned();
        match self.line.load(Ordering::Relaxed) {
            0 => text,
            line => format!("{text}:{line}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_keeps_its_tail() {
        let text = Text::<2>::default();
        text.write("a/very/long/path/to/file.rs", 7);
        assert_eq!(text.read(), "/path/to/file.rs:7");
    }
}
