//! Time of a collective: the median of many calls, each after a barrier, as other libraries' benchmarks measure it (OSU, gloo's
//! `benchmark`).
//!
//! The same code runs on the recording device and group, so its memory can be planned by a dry run.

use std::time::{Duration, Instant};

use phalanx_plan::trace::CollectiveOp;
use phalanx_tensor::{Category, DType, Device};

use crate::error::CollectiveError;
use crate::group::Group;

/// Warm-up calls, which are not measured.
const WARM_UP: usize = 3;
/// Minimum and maximum number of measured calls.
const CALLS: [usize; 2] = [9, 2000];
/// Bytes that the measured calls move together, within these numbers of calls: several ticks of the system's clock, so that what
/// disturbs one of them is not the median.
const BYTES: usize = 1 << 30;

/// The operations that can be measured.
pub const OPS: [CollectiveOp; 4] =
    [CollectiveOp::AllReduce, CollectiveOp::ReduceScatter, CollectiveOp::AllGather, CollectiveOp::Broadcast];

/// Median microseconds of `op` over a whole buffer of `bytes` of `dtype` (rounded down to equal parts), as this
/// rank sees it. All ranks of the group call it with the same arguments.
///
/// # Errors
/// When a collective fails.
pub fn median_us(
    device: &Device,
    group: &dyn Group,
    op: CollectiveOp,
    dtype: DType,
    bytes: usize,
) -> Result<f64, CollectiveError> {
    let part = bytes / dtype.bytes() / group.world_size();
    let alloc = |elements: usize| device.alloc(dtype, [elements], Category::Communication, "bench");
    let mut whole = alloc(part * group.world_size());
    let mut shard = alloc(part);
    device.fill(whole.view_mut(), 0.0);
    device.fill(shard.view_mut(), 0.0);
    // All ranks derive the number of calls from the size alone.
    let calls = (BYTES / bytes.max(1)).clamp(CALLS[0], CALLS[1]);
    let mut times = Vec::with_capacity(calls);
    for call in 0..WARM_UP + calls {
        group.barrier().wait()?;
        let start = Instant::now();
        match op {
            CollectiveOp::AllReduce => whole = group.all_reduce(whole).wait()?,
            CollectiveOp::ReduceScatter => {
                (whole, shard) = group.reduce_scatter(whole, shard, false).wait()?;
            }
            CollectiveOp::AllGather => (shard, whole) = group.all_gather(shard, whole).wait()?,
            CollectiveOp::Broadcast => whole = group.broadcast(whole, 0).wait()?,
            other => panic!("{} cannot be measured", other.name()),
        }
        if call >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    times.sort_unstable();
    Ok(times[calls / 2].max(Duration::from_nanos(1)).as_secs_f64() * 1e6)
}
