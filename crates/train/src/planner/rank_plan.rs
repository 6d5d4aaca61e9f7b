//! The plan of one rank: offsets and peaks of its memories, the order in which it uses chunks, and the cost of its step.

use phalanx_plan::trace::{Memory, PhaseName, Trace};
use phalanx_plan::{Cost, MemoryError, MemoryPlan, Peak, plan_memory, plan_memory_of};
use serde::{Deserialize, Serialize};

/// The plan of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankPlan {
    /// The rank. It is not written, so that ranks with equal plans can share what is: the reader sets it.
    #[serde(skip)]
    pub rank: usize,
    /// Offsets and peaks of device memory.
    pub memory: MemoryPlan,
    /// Offsets and peaks of host memory.
    pub host: MemoryPlan,
    /// Offsets and peaks of disk memory.
    pub disk: MemoryPlan,
    /// Hash of the collectives that its chunks start, which the ranks of a pipeline coordinate have in common; None where it has no
    /// programs of chunks.
    pub programs: Option<u64>,
    /// Cost of one step.
    pub step: Cost,
    /// Number of parameters on this rank, by their bytes, and of those that are trained.
    pub parameters: [u64; 2],
    /// Number of planned allocations in all memories.
    pub allocations: u64,
}

impl RankPlan {
    /// Places the allocations of a dry run in an arena. `parameters` counts those of the rank, and those that are trained.
    ///
    /// # Errors
    /// When a phase keeps what it must free.
    ///
    /// # Panics
    /// On a trace without a phase `step`.
    pub fn of(trace: &Trace, parameters: [u64; 2]) -> Result<RankPlan, MemoryError> {
        let step = Cost::of(trace.phase(PhaseName::Step).expect("every dry run has a step"));
        let memory = plan_memory(trace)?;
        let [host, disk] = [plan_memory_of(trace, Memory::Host)?, plan_memory_of(trace, Memory::Disk)?];
        let slots =
            |memory: &MemoryPlan| memory.phases.iter().map(|phase| phase.slots.len() as u64).sum::<u64>();
        let allocations = slots(&memory) + slots(&host) + slots(&disk);
        let rank = trace.rank;
        Ok(RankPlan { rank, memory, host, disk, programs: None, step, parameters, allocations })
    }

    /// The plan without the offsets of allocations, which are most of it.
    pub fn without_offsets(mut self) -> RankPlan {
        for memory in [&mut self.memory, &mut self.host, &mut self.disk] {
            memory.phases.iter_mut().for_each(|phase| phase.slots = Vec::new());
        }
        self
    }

    /// The peak of a run without a diagnosis. A diagnosis has the tensors of a step, but may need a little more
    /// memory, since they may pack worse.
    pub fn peak(&self) -> Peak {
        RankPlan::peak_in(&self.memory)
    }

    /// The same for any memory.
    pub fn peak_of(&self, memory: Memory) -> Peak {
        RankPlan::peak_in(match memory {
            Memory::Device => &self.memory,
            Memory::Host => &self.host,
            Memory::Disk => &self.disk,
        })
    }

    fn peak_in(memory: &MemoryPlan) -> Peak {
        let phases = memory.phases.iter().filter(|phase| phase.name != PhaseName::Diagnose);
        let larger = |max: Peak, peak: Peak| if peak.is_above(&max) { peak } else { max };
        phases.map(|phase| phase.peak).fold(Peak::default(), larger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_plan::PhasePlan;

    #[test]
    fn the_peak_of_a_rank_leaves_out_the_diagnosis() {
        let phase = |name, bytes| {
            let peak = Peak { bytes, ..Peak::default() };
            PhasePlan { name, slots: Vec::new(), peak }
        };
        let phases = vec![
            phase(PhaseName::Init, 64),
            phase(PhaseName::Step, 5_448_384),
            phase(PhaseName::Diagnose, 5_464_192),
            phase(PhaseName::Save, 128),
        ];
        let peak = Peak { bytes: 5_464_192, ..Peak::default() };
        let memory = MemoryPlan { align: 64, arena_bytes: peak.bytes, persistent_bytes: 64, peak, phases };
        assert_eq!(RankPlan::peak_in(&memory).bytes, 5_448_384);
    }
}
