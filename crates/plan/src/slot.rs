//! The planned place of one allocation in an arena.

use crate::trace::{Category, Site, StaticName, interned};
use serde::{Deserialize, Serialize};

/// The position of one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// First byte in the arena, a multiple of the plan's alignment.
    pub offset: u64,
    /// Bytes, as requested.
    pub bytes: u64,
    /// Category of the tensor.
    pub category: Category,
    /// Name of the tensor.
    #[serde(deserialize_with = "interned")]
    pub name: StaticName,
    /// Call site of the allocation.
    pub site: Site,
}

impl Slot {
    /// First byte after the slot and its alignment.
    pub fn end(&self, align: u64) -> u64 {
        self.offset + self.bytes.next_multiple_of(align)
    }
}
