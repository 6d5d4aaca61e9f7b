//! `phalanx bench collectives`: how long collectives between ranks take.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use phalanx_bench::collectives::{
    CollectiveFigures, CollectiveRow, CollectivesTask, Transport, copied_gbs, loopback_gbs, measure_as,
    measure_over_hosts, to_text,
};
use phalanx_collectives::Carrier;
use phalanx_collectives::pretended::lone_rank;
use phalanx_launch::ForeignRank;
use phalanx_mpi::LONGEST_MESSAGE;
use phalanx_plan::trace::CollectiveOp;

use crate::arguments::bench_args::{BenchCollectivesArgs, BenchOp, BenchTransport};
use crate::arguments::network_args::STREAMS;
use crate::host::environment::foreign;
use crate::host::machine;
use crate::host::output::{print, print_line};
use crate::host::signals::Signals;
use crate::jobs::launch::RankProcesses;
use crate::jobs::rank_output::Output;
use crate::jobs::task::Task;

/// Ranks, if nothing else is said.
const RANKS: usize = 2;

/// Estimated bytes of the process of a rank beside its buffers.
const PROCESS: u64 = 16 << 20;

/// Measures and prints one line per measurement.
///
/// # Errors
/// Invalid sizes, sizes that do not fit in memory, a rank that died.
pub fn bench_collectives(args: &BenchCollectivesArgs) -> Result<()> {
    let rank = match args.transport {
        BenchTransport::Mpi => Some(rank_of_mpirun(args)?),
        _ => None,
    };
    let nproc = rank.as_ref().map_or(args.nproc.unwrap_or(RANKS), |rank| rank.world_size);
    let streams = args.streams.unwrap_or(STREAMS);
    check(args, nproc)?;
    let signals = Signals::take_over()?;
    let all = [BenchOp::AllReduce, BenchOp::ReduceScatter, BenchOp::AllGather];
    let ops = if args.op.is_empty() { &all[..] } else { &args.op };
    let ops = ops.iter().map(|op| match op {
        BenchOp::AllReduce => CollectiveOp::AllReduce,
        BenchOp::ReduceScatter => CollectiveOp::ReduceScatter,
        BenchOp::AllGather => CollectiveOp::AllGather,
        BenchOp::Broadcast => CollectiveOp::Broadcast,
    });
    let task = CollectivesTask { ops: ops.collect(), dtype: args.dtype.dtype(), bytes: args.bytes.clone() };
    let transport = match args.transport {
        BenchTransport::Shared => Transport::Shared,
        BenchTransport::Tcp => Transport::Tcp,
        BenchTransport::Hierarchical => Transport::Hierarchical,
        BenchTransport::Mpi => Transport::Mpi,
    };
    let (figures, limit_gbs) = match (transport, rank) {
        (Transport::Shared, _) => {
            let processes =
                RankProcesses::start(nproc, &Task::BenchCollectives(task), None, &Output::Gathered)?;
            let lines = processes.wait(&signals)?;
            let first = lines.first().context("the figures of rank 0")?;
            let figures: Vec<CollectiveFigures> =
                serde_json::from_str(first).context("the figures of rank 0")?;
            (figures, copied_gbs(nproc)?)
        }
        (_, Some(rank)) => {
            let figures = measure_over_mpi(&task, &rank)?;
            if rank.rank > 0 {
                return Ok(());
            }
            (figures, loopback_gbs()?)
        }
        (_, None) => {
            let hosts = transport.hosts(nproc);
            (measure_over_hosts(&task, &hosts, args.plaintext, streams)?, loopback_gbs()?)
        }
    };
    let rows = figures.into_iter().map(|figures| CollectiveRow::new(figures, transport, limit_gbs));
    let rows: Vec<CollectiveRow> = rows.collect();
    if args.json {
        return rows.iter().try_for_each(|row| Ok(print_line(&serde_json::to_string(row)?)?));
    }
    Ok(print(&to_text(&rows))?)
}

/// Refuses sizes and options that cannot be measured.
fn check(args: &BenchCollectivesArgs, nproc: usize) -> Result<()> {
    if matches!(args.transport, BenchTransport::Shared | BenchTransport::Mpi) {
        if args.plaintext || args.streams.is_some() {
            bail!(
                "--plaintext and --streams are for --transport tcp and hierarchical: shared memory has no connections, \
                 and MPI has its own"
            );
        }
    } else if nproc < 2 {
        bail!("--nproc {nproc}: hosts need at least 2 ranks");
    }
    let dtype = args.dtype.dtype();
    let min = dtype.bytes() * nproc;
    if let Some(size) = args.bytes.iter().find(|size| **size < min) {
        bail!("--bytes {size}: {nproc} ranks share at least {min} bytes (one {} each)", dtype.name());
    }
    let largest = args.bytes.iter().copied().max().unwrap_or(0) as u64;
    let needed = nproc as u64 * (2 * largest + PROCESS);
    if let Some(available) = machine::available().filter(|available| needed > available.bytes) {
        bail!("{nproc} ranks need {needed} bytes, and {available}: give smaller --bytes or --nproc");
    }
    Ok(())
}

/// The rank that mpirun has given to this process.
fn rank_of_mpirun(args: &BenchCollectivesArgs) -> Result<ForeignRank> {
    let library = phalanx_mpi::library().context("--transport mpi")?;
    let Some(rank) = foreign()?.rank else {
        bail!(
            "--transport mpi: start the ranks with mpirun of {library}, as in `mpirun -n 2 phalanx bench collectives`"
        )
    };
    if let Some(nproc) = args.nproc.filter(|nproc| *nproc != rank.world_size) {
        bail!("--nproc {nproc}: {} has started {} ranks", rank.launcher.name(), rank.world_size);
    }
    Ok(rank)
}

/// Measures as one of the ranks that mpirun has started.
fn measure_over_mpi(task: &CollectivesTask, rank: &ForeignRank) -> Result<Vec<CollectiveFigures>> {
    let mpi = phalanx_mpi::start(rank.rank, rank.world_size, LONGEST_MESSAGE).context("starting MPI")?;
    let mpi = Arc::new(mpi);
    let endpoint = lone_rank(rank.rank, rank.world_size, Arc::clone(&mpi) as Arc<dyn Carrier>)?;
    let figures = measure_as(task, endpoint)?;
    mpi.finish();
    Ok(figures)
}
