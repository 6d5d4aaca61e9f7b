//! What a rank sends to a peer of another host at the start of a call: its descriptor, in a frame of fixed length.
//!
//! The frame is a magic number and the words of the descriptor's cell and of the group's name, 8 bytes each, little
//! endian. Addresses are left out. Whoever receives it reads it as it reads a cell of shared memory: every number is
//! checked where it is used, and nothing is allocated for it.

use phalanx_trace::Site;

use crate::shared_memory::control::GroupName;
use crate::shared_memory::descriptor::{Descriptor, DescriptorCell};

/// Words of a frame: the magic number, the descriptor's 8 numbers and 17 words of call site, 6 words of name.
const WORDS: usize = 32;
/// Bytes of a frame.
pub(crate) const FRAME_BYTES: usize = WORDS * 8;

const MAGIC: u64 = u64::from_le_bytes(*b"PHXCALL1");

/// A call that a peer has announced.
#[derive(Default)]
pub(crate) struct HeardCall {
    pub(crate) descriptor: DescriptorCell,
    pub(crate) name: GroupName,
}

/// Writes the frame of this rank's call.
pub(crate) fn write(own: &Descriptor, site: Site, name: &GroupName, frame: &mut [u8; FRAME_BYTES]) {
    let cell = DescriptorCell::default();
    cell.write(&Descriptor { source: 0, source_bytes: 0, target: 0, ..*own }, site);
    let mut words = frame.chunks_exact_mut(8);
    let mut put = |value: u64| words.next().expect("a word for each").copy_from_slice(&value.to_le_bytes());
    put(MAGIC);
    cell.for_each_word(&mut |word| put(word.load()));
    name.for_each_word(&mut |word| put(word.load()));
}

impl HeardCall {
    /// Takes over a frame. Returns whether it is one.
    pub(crate) fn read(&self, frame: &[u8; FRAME_BYTES]) -> bool {
        let mut words =
            frame.chunks_exact(8).map(|eight| u64::from_le_bytes(eight.try_into().expect("8 bytes")));
        let mut take = || words.next().expect("a word for each");
        let magic = take();
        self.descriptor.for_each_word(&mut |word| word.store(take()));
        self.name.for_each_word(&mut |word| word.store(take()));
        magic == MAGIC
    }
}
