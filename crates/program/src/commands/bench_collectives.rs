//! `phalanx bench collectives`: how long collectives between processes take.

use anyhow::{Context, Result, bail};
use phalanx_bench::collectives::{CollectiveFigures, CollectivesTask, to_text};
use phalanx_trace::CollectiveOp;

use crate::bench_args::{BenchCollectivesArgs, BenchOp};
use crate::launch::RankProcesses;
use crate::machine;
use crate::output::{print, print_line};
use crate::rank_output::Output;
use crate::signals::Signals;
use crate::task::Task;

/// Measures and prints one line per measurement.
///
/// # Errors
/// Invalid sizes, sizes that do not fit in memory, a rank that died.
pub fn bench_collectives(args: &BenchCollectivesArgs) -> Result<()> {
    if args.nproc == 0 {
        bail!("--nproc 0: expected at least 1 rank");
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
    let processes = RankProcesses::start(args.nproc, &Task::BenchCollectives(task), None, &Output::Gathered)?;
    let lines = processes.wait(&signals)?;
    let first = lines.first().context("the figures of rank 0")?;
    let figures: Vec<CollectiveFigures> = serde_json::from_str(first).context("the figures of rank 0")?;
    if args.json {
        for figure in &figures {
            print_line(&serde_json::to_string(figure)?)?;
        }
        return Ok(());
    }
    Ok(print(&to_text(&figures))?)
}
