//! Measurements of `phalanx bench collectives`: the time of each collective at each size, compared with the limit of
//! memory or of the network.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use phalanx_collectives::bench::median_us;
use phalanx_collectives::network::algorithm;
use phalanx_collectives::pretended::hosts_of_threads;
use phalanx_collectives::{CollectiveOp, Endpoint, Group, Hosts, MetaGroup, Options};
use phalanx_cpu::{Cpu, peak};
use phalanx_drawing::report::{Table, bytes};
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{MemoryPlan, plan_memory_of};
use phalanx_tensor::{Arena, DType, Device, Memory};
use serde::{Deserialize, Serialize};

/// Bytes to measure the bandwidth of memory with.
const COPIED_BYTES: usize = 256 << 20;

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

/// Transport of the bytes between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// Shared memory of one host.
    Shared,
    /// TCP, each rank on a host of its own.
    Tcp,
    /// Two hosts: shared memory within, TCP between them.
    Hierarchical,
    /// MPI, each rank as if alone on its host.
    Mpi,
}

impl Transport {
    /// The hosts of `ranks` ranks.
    pub fn hosts(self, ranks: usize) -> Hosts {
        match self {
            Transport::Shared => Hosts::one(ranks),
            Transport::Tcp | Transport::Mpi => Hosts::new(vec![1; ranks]),
            Transport::Hierarchical => Hosts::new(vec![ranks.div_ceil(2), ranks / 2]),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Transport::Shared => "shared",
            Transport::Tcp => "tcp",
            Transport::Hierarchical => "hierarchical",
            Transport::Mpi => "mpi",
        }
    }
}

/// Times every operation with every size on ranks that are threads of this process and pretend to be on several hosts:
/// they speak TCP over the loopback device. Returns the figures of rank 0.
///
/// # Errors
/// When the system refuses sockets, threads or memory.
pub fn measure_over_hosts(
    task: &CollectivesTask,
    hosts: &Hosts,
    plaintext: bool,
    streams: usize,
) -> Result<Vec<CollectiveFigures>> {
    let sizes: Vec<usize> = hosts.clone().into();
    let (endpoints, _launchers) = hosts_of_threads(&sizes, plaintext, streams)?;
    let one = |endpoint| measure_as(task, endpoint);
    let results: Vec<Result<Vec<CollectiveFigures>>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = endpoints.into_iter().map(|endpoint| scope.spawn(|| one(endpoint))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    });
    let mut all = results.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(all.swap_remove(0))
}

/// Times every operation with every size as the rank of `endpoint`, which is not beside others on its host.
///
/// # Errors
/// A rank that died.
pub fn measure_as(task: &CollectivesTask, endpoint: Endpoint) -> Result<Vec<CollectiveFigures>> {
    let endpoint = endpoint.with_options(Options { overlap: false, ..Options::default() });
    let device = Device::new(Cpu::new(1), Arena::heap());
    measure(task, &device, &*endpoint.group("data"))
}

/// 10^9 bytes a second that one TCP connection of the loopback device carries.
///
/// # Errors
/// When the system refuses sockets.
pub fn loopback_gbs() -> Result<f64> {
    const BLOCK: usize = 1 << 20;
    const BLOCKS: usize = 512;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiver, _) = listener.accept()?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let sent = scope.spawn(move || {
            let block = vec![1u8; BLOCK];
            (0..BLOCKS).try_for_each(|_| sender.write_all(&block))
        });
        let mut block = vec![0u8; BLOCK];
        (0..BLOCKS).try_for_each(|_| receiver.read_exact(&mut block))?;
        sent.join().expect("writing does not panic")
    })?;
    Ok((BLOCK * BLOCKS) as f64 / start.elapsed().as_secs_f64() / 1e9)
}

/// 10^9 bytes a second that `ranks` cores copy together in memory.
///
/// # Errors
/// When there is no memory to copy.
pub fn copied_gbs(ranks: usize) -> Result<f64> {
    let cpu = Cpu::new(ranks);
    Ok(peak::bandwidth(&cpu, COPIED_BYTES).context("memory to measure its bandwidth")?.copied() / 1e9)
}

/// A measurement, and what it can be compared with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CollectiveRow {
    /// Measured figures.
    #[serde(flatten)]
    pub figures: CollectiveFigures,
    /// Transport of the bytes.
    pub transport: Transport,
    /// Name of the algorithm.
    pub algorithm: String,
    /// 10^9 bytes a second that each rank sends by the best algorithm known: comparable between operations and numbers of
    /// ranks, as in the benchmarks of NCCL.
    pub busbw_gbs: f64,
    /// `busbw_gbs` in relation to the measured limit: copies in memory, or one connection of the loopback device.
    pub limit_share: f64,
}

impl CollectiveRow {
    /// The row of a measurement with `limit_gbs` as its limit.
    pub fn new(figures: CollectiveFigures, transport: Transport, limit_gbs: f64) -> CollectiveRow {
        let CollectiveFigures { op, dtype, ranks, bytes, algbw_gbs, .. } = figures;
        let others = (ranks - 1) as f64 / ranks as f64;
        let busbw_gbs = match op {
            CollectiveOp::AllReduce => algbw_gbs * 2.0 * others,
            CollectiveOp::ReduceScatter | CollectiveOp::AllGather => algbw_gbs * others,
            _ => algbw_gbs,
        };
        let algorithm = algorithm(&transport.hosts(ranks), op, dtype, bytes / dtype.bytes()).to_string();
        CollectiveRow { figures, transport, algorithm, busbw_gbs, limit_share: busbw_gbs / limit_gbs }
    }
}

/// The rows as a table for people.
pub fn to_text(rows: &[CollectiveRow]) -> String {
    let table = Table::of(
        rows,
        &[
            ("op", &|row| row.figures.op.name().to_string()),
            ("type", &|row| row.figures.dtype.name().to_string()),
            ("ranks", &|row| row.figures.ranks.to_string()),
            ("transport", &|row| row.transport.name().to_string()),
            ("buffer", &|row| bytes(row.figures.bytes as u64)),
            ("algorithm", &|row| row.algorithm.clone()),
            ("us", &|row| format!("{:.1}", row.figures.us)),
            ("GB/s", &|row| format!("{:.2}", row.figures.algbw_gbs)),
            ("bus GB/s", &|row| format!("{:.2}", row.busbw_gbs)),
            ("of limit", &|row| format!("{:.0} %", row.limit_share * 100.0)),
        ],
    );
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transport_is_measured_and_compared() {
        let task = CollectivesTask {
            ops: vec![CollectiveOp::AllReduce, CollectiveOp::AllGather],
            dtype: DType::F32,
            bytes: vec![4096, 1 << 20],
        };
        for transport in [Transport::Tcp, Transport::Hierarchical] {
            let figures = measure_over_hosts(&task, &transport.hosts(3), true, 2).unwrap();
            let rows: Vec<CollectiveRow> =
                figures.into_iter().map(|figures| CollectiveRow::new(figures, transport, 10.0)).collect();
            assert_eq!(rows.len(), 4);
            assert!(
                rows.iter().all(|row| row.figures.us > 0.0 && row.busbw_gbs > 0.0 && row.figures.ranks == 3)
            );
            let expected = rows[1].figures.algbw_gbs * 4.0 / 3.0;
            assert!((rows[1].busbw_gbs - expected).abs() < 1e-9 && rows[1].algorithm == "direct");
            assert!(to_text(&rows).contains(transport.name()));
        }
    }
}
