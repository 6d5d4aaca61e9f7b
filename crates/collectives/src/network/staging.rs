//! Memory for sums on their way: of bounded size, kept from call to call.

/// A cache line, in which numbers of any type are aligned.
#[derive(Clone)]
#[repr(align(64))]
struct CacheLine {
    _bytes: [u8; 64],
}

/// Memory of which parts are handed out one after the other.
#[derive(Default)]
pub(crate) struct Staging {
    lines: Vec<CacheLine>,
    taken: usize,
}

impl Staging {
    /// Bytes of a cache line.
    pub(crate) fn lines_bytes() -> usize {
        size_of::<CacheLine>()
    }

    /// Cache lines that `bytes` take.
    pub(crate) fn lines_for(bytes: usize) -> usize {
        bytes.div_ceil(64)
    }

    /// Takes everything back, and makes room for so many cache lines. Parts that were handed out before are gone.
    pub(crate) fn reset(&mut self, lines: usize) {
        self.taken = 0;
        if self.lines.len() < lines {
            // What was there is not needed: nothing is copied.
            self.lines.clear();
            self.lines.resize(lines, CacheLine { _bytes: [0; 64] });
        }
    }

    /// The next `bytes`, valid until the next reset.
    pub(crate) fn take(&mut self, bytes: usize) -> *mut u8 {
        let first = self.taken;
        self.taken += Staging::lines_for(bytes);
        self.lines[first..self.taken].as_mut_ptr().cast()
    }
}
