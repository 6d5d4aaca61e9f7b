//! What one rank of `phalanx bench collectives` measures: the time of each collective at each size.

use std::sync::Arc;

use anyhow::Result;
use phalanx_collectives::bench::median_us;
use phalanx_collectives::{CollectiveOp, Group, MetaGroup};
use phalanx_drawing::report::{Table, bytes};
use phalanx_plan::{MemoryPlan, plan_memory_of};
use phalanx_tensor::{DType, Device, Memory};
use phalanx_trace::PhaseName;
use serde::{Deserialize, Serialize};

/// Which collectives to time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CollectivesTask {
    /// Operations, one after another, each with all sizes.
    pub ops: Vec<CollectiveOp>,
    /// Type of the elements.
    pub dtype: DType,
    /// Bytes of the whole buffer.
    pub bytes: Vec<usize>,
}

/// One measurement of a collective.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct CollectiveFigures {
    /// The operation.
    pub op: CollectiveOp,
    /// Type of the elements.
    pub dtype: DType,
    /// Ranks.
    pub ranks: usize,
    /// Bytes of the whole buffer.
    pub bytes: usize,
    /// Median microseconds of a call.
    pub us: f64,
    /// 10^9 bytes of the whole buffer a second.
    pub algbw_gbs: f64,
}

/// The plans of one rank's memories for the largest measurement, in the order of `Memory::ALL`: the same code runs on
/// the device that only records.
///
/// # Errors
/// None but a bug of the bench.
pub fn plan(task: &CollectivesTask, rank: usize, ranks: usize) -> Result<[MemoryPlan; 3]> {
    let device = Device::meta(1);
    let recorder = Arc::clone(device.recorder().expect("Meta records"));
    let group: Arc<dyn Group> = Arc::new(MetaGroup::new("data", rank, ranks, recorder));
    measure(task, &device, &*group)?;
    let trace = device.take_trace(rank);
    let [device, host, disk] = Memory::ALL.map(|memory| plan_memory_of(&trace, memory));
    Ok([device?, host?, disk?])
}

/// Times every operation with every size on `device`, whose memory replays [`plan`].
///
/// # Errors
/// A rank that died.
pub fn measure(task: &CollectivesTask, device: &Device, group: &dyn Group) -> Result<Vec<CollectiveFigures>> {
    let (ranks, dtype) = (group.world_size(), task.dtype);
    device.phase(PhaseName::Init, || ());
    device.phase(PhaseName::Bench, || {
        let mut all = Vec::new();
        for (op, bytes) in task.ops.iter().flat_map(|op| task.bytes.iter().map(|bytes| (*op, *bytes))) {
            let us = median_us(device, group, op, dtype, bytes)?;
            all.push(CollectiveFigures { op, dtype, ranks, bytes, us, algbw_gbs: bytes as f64 / us / 1e3 });
        }
        Ok(all)
    })
}

/// The figures as a table for people.
pub fn to_text(figures: &[CollectiveFigures]) -> String {
    let mut table = Table::new(&["op", "type", "ranks", "buffer", "us", "GB/s"]);
    for CollectiveFigures { op, dtype, ranks, bytes: size, us, algbw_gbs } in figures {
        let (us, rate) = (format!("{us:.1}"), format!("{algbw_gbs:.2}"));
        let (op, dtype) = (op.name().to_string(), dtype.name().to_string());
        table.row([op, dtype, ranks.to_string(), bytes(*size as u64), us, rate]);
    }
    table.to_string()
}
