//! Traffic of a rank in a phase, by the size of the messages: collectives of a group, and copies between memories.
//!
//! The size of a message decides its rate, so sums of bytes are not enough to compare chunk sizes.

use crate::trace::{Category, CollectiveOp, Event, Memory, Phase, PhaseName, Trace};
use serde::Serialize;

use crate::machine::Machine;

/// The kind of a movement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Movement {
    /// A collective over the data axis.
    Collective(CollectiveOp),
    /// A copy from one memory to another.
    Copy(Memory, Memory),
}

/// All movements of one kind and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Kind of the movement.
    pub movement: Movement,
    /// Bytes of one message: of a collective those of the whole buffer.
    pub message_bytes: u64,
    /// Number of movements.
    pub calls: u64,
    /// Bytes that this rank sends or copies, in all.
    pub bytes: u64,
}

impl Traffic {
    /// Seconds of all of them one after another, at the rates of this message size; `group` are the world ranks of the data axis. `None`
    /// where the machine's profile lacks the rate.
    pub fn seconds(&self, machine: &Machine, group: &[usize]) -> Option<f64> {
        let one = match self.movement {
            Movement::Copy(from, to) => machine.copy_s([from, to], self.message_bytes)?,
            Movement::Collective(op) => {
                machine.collective_of_bytes_s(op, group, self.message_bytes, self.bytes / self.calls)?
            }
        };
        Some(self.calls as f64 * one)
    }
}

/// Collectives of the group `data` that move chunks, and copies between memories: largest messages first. Messages of
/// less than `smallest` bytes (losses, norms) are left out.
pub fn traffic(phase: &Phase, smallest: u64) -> Vec<Traffic> {
    let mut all: Vec<Traffic> = Vec::new();
    let mut add = |movement: Movement, message_bytes: u64, bytes: u64| {
        if message_bytes < smallest {
            return;
        }
        match all.iter_mut().find(|t| (t.movement, t.message_bytes) == (movement, message_bytes)) {
            Some(same) => {
                same.calls += 1;
                same.bytes += bytes;
            }
            None => all.push(Traffic { movement, message_bytes, calls: 1, bytes }),
        }
    };
    for event in &phase.events {
        match event {
            Event::Collective(c) if c.group == "data" && c.world_size > 1 => {
                add(Movement::Collective(c.op), c.count * c.dtype.bytes() as u64, c.sent_bytes);
            }
            Event::Copy { from, to, bytes, .. } => add(Movement::Copy(*from, *to), *bytes, *bytes),
            _ => {}
        }
    }
    all.sort_by_key(|traffic| std::cmp::Reverse(traffic.message_bytes));
    all
}

/// The most bytes of one category that a phase has in a memory at a time, of what lives since `init` too.
pub fn category_peak(trace: &Trace, phase: PhaseName, memory: Memory, category: Category) -> u64 {
    let mut live = std::collections::HashMap::new();
    let (mut bytes, mut peak) = (0, 0);
    for one in trace.phases.iter().filter(|one| one.name == PhaseName::Init || one.name == phase) {
        for event in &one.events {
            match event {
                Event::Alloc { id, memory: lies, bytes: size, category: of, .. }
                    if *lies == memory && *of == category =>
                {
                    live.insert(*id, *size);
                    bytes += size;
                }
                Event::Free { id, .. } => bytes -= live.remove(id).unwrap_or(0),
                _ => {}
            }
            if one.name == phase {
                peak = peak.max(bytes);
            }
        }
    }
    peak
}

/// Bytes that are live in a memory after each allocation and free of a phase, at its beginning first.
pub fn live_bytes(trace: &Trace, phase: PhaseName, memory: Memory) -> Vec<u64> {
    let mut sizes = std::collections::HashMap::new();
    let (mut bytes, mut line) = (0u64, Vec::new());
    for one in trace.phases.iter().filter(|one| one.name == PhaseName::Init || one.name == phase) {
        if one.name == phase {
            line.push(bytes);
        }
        for event in &one.events {
            let change = match event {
                Event::Alloc { id, memory: lies, bytes: size, .. } if *lies == memory => {
                    sizes.insert(*id, *size);
                    bytes += size;
                    true
                }
                Event::Free { id, memory: lies } if *lies == memory => {
                    bytes -= sizes.remove(id).unwrap_or(0);
                    true
                }
                _ => false,
            };
            if change && one.name == phase {
                line.push(bytes);
            }
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use crate::trace::Site;

    use super::*;

    #[test]
    fn peaks_count_one_category_and_what_was_there_before() {
        let alloc = |id, memory, bytes, category| Event::Alloc {
            id,
            memory,
            bytes,
            category,
            name: "t",
            site: Site::caller(),
        };
        let free = |id| Event::Free { id, memory: Memory::Device };
        let (communication, state) = (Category::Communication, Category::Optimizer);
        let init = vec![alloc(0, Memory::Device, 10, communication), alloc(1, Memory::Device, 99, state)];
        let step = vec![
            alloc(2, Memory::Device, 5, communication),
            alloc(3, Memory::Host, 50, communication),
            free(2),
            alloc(4, Memory::Device, 7, communication),
            free(4),
        ];
        let phases = vec![
            Phase { name: PhaseName::Init, events: init },
            Phase { name: PhaseName::Step, events: step },
        ];
        let trace = Trace { rank: 0, phases, faults: Vec::new() };
        assert_eq!(category_peak(&trace, PhaseName::Step, Memory::Device, communication), 17);
        assert_eq!(category_peak(&trace, PhaseName::Step, Memory::Host, communication), 50);
        assert_eq!(live_bytes(&trace, PhaseName::Step, Memory::Device), [109, 114, 109, 116, 109]);
        assert_eq!(live_bytes(&trace, PhaseName::Step, Memory::Host), [0, 50]);
    }
}
