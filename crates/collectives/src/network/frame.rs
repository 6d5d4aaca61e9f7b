//! The message that a rank sends to a peer of another host at the start of a call: its descriptor, in a frame of fixed length.
//!
//! The frame is a magic number and the words of the descriptor's cell and of the group's name, 8 bytes each, little
//! endian. Addresses are left out. Whoever receives it reads it as it reads a cell of shared memory: every number is
//! checked where it is used, and nothing is allocated for it.

use phalanx_plan::trace::Site;

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

/// Describes the call in a frame as errors describe a peer's call; None for bytes that are no frame.
pub fn describe_frame(bytes: &[u8]) -> Option<String> {
    let heard = HeardCall::default();
    heard.read(bytes.try_into().ok()?).then(|| heard.descriptor.describe(&heard.name.read()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_plan::trace::{CollectiveOp, DType};
    use phalanx_testing::hostile::{mutate, survive};

    fn sent() -> (Descriptor, [u8; FRAME_BYTES]) {
        let own = Descriptor {
            group: 0x1234_5678,
            sequence: 9,
            op: CollectiveOp::Send,
            dtype: DType::BF16,
            accumulate: false,
            by_device: false,
            count: 1 << 40,
            root: Some(3),
            tag: Some(77),
            source: 0xdead_beef,
            source_bytes: 5,
            target: 0xfeed,
        };
        let (name, mut frame) = (GroupName::default(), [0xff; FRAME_BYTES]);
        name.write("pipeline", 0);
        write(&own, Site { file: "crates/models/src/gpt2.rs", line: 12 }, &name, &mut frame);
        (own, frame)
    }

    #[test]
    fn a_frame_carries_the_call_and_no_address() {
        let (own, frame) = sent();
        let heard = HeardCall::default();
        assert!(heard.read(&frame) && describe_frame(&frame[1..]).is_none());
        let expected = Descriptor { source: 0, source_bytes: 0, target: 0, ..own };
        assert_eq!(heard.descriptor.read(), Some(expected));
        let text = describe_frame(&frame).unwrap();
        assert!(text.contains("send to rank 3 of 1099511627776 bf16"), "{text}");
        assert!(text.contains("group pipeline) at crates/models/src/gpt2.rs:12"), "{text}");
    }

    #[test]
    fn frames_of_a_hostile_peer_are_read_without_panics() {
        let (_, frame) = sent();
        survive(
            "frames",
            20_000,
            64 << 10,
            |random| mutate(random, &frame),
            |bytes| {
                let Ok(frame) = bytes.try_into() else { return false };
                let heard = HeardCall::default();
                let is_frame = heard.read(frame);
                is_frame && describe_frame(bytes).is_some() && heard.descriptor.read().is_some()
            },
        );
    }
}
