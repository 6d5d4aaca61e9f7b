//! `phalanx bench collectives`: how long collectives between ranks take.

use anyhow::{Context, Result, bail};
use phalanx_bench::collectives::{
    CollectiveFigures, CollectiveRow, CollectivesTask, Transport, copied_gbs, loopback_gbs,
    measure_over_hosts, to_text,
};
use phalanx_trace::CollectiveOp;

use crate::bench_args::{BenchCollectivesArgs, BenchOp, BenchTransport};
use crate::launch::RankProcesses;
use crate::machine;
use crate::output::{print, print_line};
use crate::rank_output::Output;
use crate::signals::Signals;
use crate::task::Task;

/// Connections between two ranks of different hosts.
const STREAMS: usize = 2;

/// Measures and prints one line per measurement.
///
/// # Errors
/// Invalid sizes, sizes that do not fit in memory, a rank that died.
pub fn bench_collectives(args: &BenchCollectivesArgs) -> Result<()> {
    if args.nproc == 0 {
        bail!("--nproc 0: expected at least 1 rank");
    }
    let streams = args.streams.unwrap_or(STREAMS);
    if args.transport == BenchTransport::Shared {
        if args.plaintext || args.streams.is_some() {
            bail!(
                "--plaintext and --streams are for --transport tcp and hierarchical: nothing leaves shared memory"
            );
        }
    } else if args.nproc < 2 || streams == 0 {
        bail!("--nproc {} --streams {streams}: hosts need at least 2 ranks and 1 connection", args.nproc);
    }
    let dtype = args.dtype.dtype();
    let min = dtype.bytes() * args.nproc;
    if let Some(size) = args.bytes.iter().find(|size| **size < min) {
        bail!("--bytes {size}: {} ranks share at least {min} bytes (one {} each)", args.nproc, dtype.name());
    }
    let largest = args.bytes.iter().copied().max().unwrap_or(0) as u64;
    let needed = args.nproc as u64 * 2 * largest;
    if let Some(available) = machine::available().filter(|available| needed > available.bytes) {
        bail!("{} ranks need {needed} bytes, and {available}: give smaller --bytes", args.nproc);
    }
    let signals = Signals::take_over()?;
    let all = [BenchOp::AllReduce, BenchOp::ReduceScatter, BenchOp::AllGather];
    let ops = if args.op.is_empty() { &all[..] } else { &args.op };
    let ops = ops.iter().map(|op| match op {
        BenchOp::AllReduce => CollectiveOp::AllReduce,
        BenchOp::ReduceScatter => CollectiveOp::ReduceScatter,
        BenchOp::AllGather => CollectiveOp::AllGather,
        BenchOp::Broadcast => CollectiveOp::Broadcast,
    });
    let task = CollectivesTask { ops: ops.collect(), dtype, bytes: args.bytes.clone() };
    let transport = match args.transport {
        BenchTransport::Shared => Transport::Shared,
        BenchTransport::Tcp => Transport::Tcp,
        BenchTransport::Hierarchical => Transport::Hierarchical,
    };
    let (figures, limit_gbs) = if transport == Transport::Shared {
        let processes =
            RankProcesses::start(args.nproc, &Task::BenchCollectives(task), None, &Output::Gathered)?;
        let lines = processes.wait(&signals)?;
        let first = lines.first().context("the figures of rank 0")?;
        let figures: Vec<CollectiveFigures> = serde_json::from_str(first).context("the figures of rank 0")?;
        (figures, copied_gbs(args.nproc)?)
    } else {
        let hosts = transport.hosts(args.nproc);
        (measure_over_hosts(&task, &hosts, args.plaintext, streams)?, loopback_gbs()?)
    };
    let rows = figures.into_iter().map(|figures| CollectiveRow::new(figures, transport, limit_gbs));
    let rows: Vec<CollectiveRow> = rows.collect();
    if args.json {
        return rows.iter().try_for_each(|row| Ok(print_line(&serde_json::to_string(row)?)?));
    }
    Ok(print(&to_text(&rows))?)
}
