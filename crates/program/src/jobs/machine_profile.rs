//! The profile of this machine, measured.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use phalanx_bench::collectives::{CollectiveFigures, CollectivesTask};
use phalanx_bench::disk::{self, DiskTask};
use phalanx_bench::steps::DeviceLimits;
use phalanx_plan::trace::{CollectiveOp, DType};
use phalanx_plan::{CollectiveRate, Link, Machine, TransferRate};
use phalanx_tensor::{DiskOptions, ProductMethod};
use phalanx_train::config::{DeviceChoice, DeviceKind};

use crate::host::cards;
use crate::host::environment::Environment;
use crate::host::machine;
use crate::host::output::note;
use crate::host::signals::Signals;
use crate::jobs::launch::RankProcesses;
use crate::jobs::rank_output::Output;
use crate::jobs::task::Task;
use crate::plans::planned::Planned;

/// Largest number of ranks whose collectives are measured on this machine.
const MAX_RANKS: usize = 16;

/// Bytes to measure the bandwidth of memory with.
const MEMORY_BYTES: usize = 256 << 20;

/// Bytes that are read and written to measure a disk, and those of a chunk of them.
const DISK_BYTES: u64 = 512 << 20;
const DISK_CHUNK: u64 = 16 << 20;

/// The collectives that move chunks.
const OPS: [CollectiveOp; 3] =
    [CollectiveOp::AllReduce, CollectiveOp::ReduceScatter, CollectiveOp::AllGather];

/// Measures this machine: products, memory, copies, the folders of disk memory, and the collectives of the data axis of `planned` at
/// some sizes.
///
/// # Errors
/// Memory that the system does not give, collectives that cannot be measured.
pub fn measured(planned: &Planned, sizes: &[u64], environment: Environment) -> Result<Machine> {
    let (spec, ranks) = (&planned.plan.spec, planned.plan.spec.mesh.axes.data);
    let types = BTreeSet::from([DType::F32, spec.precision.types.compute]);
    let environment = environment.of_run(&planned.config.device)?;
    let processor = environment.processor(spec.device.threads, spec.device.products)?;
    let card = card_limits(planned)?;
    let flops_per_s = |dtype| match &card {
        None => processor.flops_per_s(dtype),
        Some(card) if dtype == DType::F32 => card.f32_flops_per_s,
        Some(card) => card.half_flops_per_s,
    };
    let tflops: BTreeMap<DType, f64> =
        types.into_iter().map(|dtype| (dtype, flops_per_s(dtype) / 1e12)).collect();
    let bandwidth = processor.bandwidth(MEMORY_BYTES).context("memory to measure its bandwidth")?;
    let copy_gb_per_s = match planned.config.device.choice() {
        DeviceChoice::Cpu => bandwidth.copied() / 1e9,
        DeviceChoice::Cuda { .. } => cards::COPY_BYTES_PER_S / 1e9,
        DeviceChoice::Simulated(simulated) => simulated.copy_bytes_per_s / 1e9,
    };
    let line = |gb_per_s| TransferRate::Line { latency_us: 0.0, gb_per_s };
    let available = machine::available().map_or(u64::MAX, |available| available.bytes);
    // What cards send to each other is not measured.
    let collectives = match ranks {
        ranks if ranks > 1 && !spec.device.linked => measured_collectives(ranks, sizes, available)?,
        _ => Vec::new(),
    };
    let links = (!spec.device.linked).then(|| Link {
        name: "memory of the host".to_string(),
        devices: None,
        shared_by: 1,
        time: line(bandwidth.copied() / 1e9),
        step_us: 0.0,
    });
    let mut measured = Machine {
        name: format!("this machine ({})", machine::processor()),
        sources: vec![format!(
            "measured now, with {} per rank",
            phalanx_drawing::report::plural(spec.device.threads, "thread")
        )],
        memory_bytes: available,
        host_bytes: available,
        computes_on_host: matches!(planned.config.device.choice(), DeviceChoice::Cpu),
        tflops,
        memory_gb_per_s: card.as_ref().map_or(bandwidth.max(), |card| card.bytes_per_s) / 1e9,
        host_gb_per_s: bandwidth.max() / 1e9,
        copy: line(copy_gb_per_s),
        disk_read: None,
        disk_write: None,
        devices_per_host: None,
        links: links.into_iter().collect(),
        collectives,
        planned_only: None,
        host_cores: None,
        products: BTreeMap::new(),
        launch_us: 0.0,
        power_w: None,
        usd_per_hour: None,
    };
    if let Some(disk) = &spec.device.disk {
        measure_disk(&mut measured, disk, spec.world_size());
    }
    Ok(measured)
}

/// Limits of a rank's card by published figures; `None` for a run on the processor.
fn card_limits(planned: &Planned) -> Result<Option<DeviceLimits>> {
    if planned.config.device.kind != DeviceKind::Cuda {
        return Ok(None);
    }
    let tf32 = planned.plan.spec.device.products == Some(ProductMethod::Tf32);
    let limits = cards::limits_of(0, planned.plan.spec.world_size(), tf32);
    let unknown =
        "--machine here: there is no card here whose rates are known; give a profile, such as --machine h100";
    limits.map(Some).context(unknown)
}

/// Measures the folders of disk memory, whose rates `ranks` ranks share.
pub fn measure_disk(machine: &mut Machine, options: &DiskOptions, ranks: usize) {
    let (options, chunk) = (options.clone(), DISK_CHUNK);
    let task = DiskTask { options, bytes: DISK_BYTES, chunk, rounds: 2 };
    let figures = match task.measure(&mut |_, _| {}, &mut || Ok(())) {
        Ok(figures) => figures,
        Err(error) => return note(&format!("the disk is not measured: {error:#}")),
    };
    let rate = |rates: &[f64]| {
        let gb_per_s = disk::best(rates) / 1e9 / ranks as f64;
        Some(TransferRate::Line { latency_us: 0.0, gb_per_s })
    };
    machine.disk_read = rate(&figures.read_bytes_per_s);
    machine.disk_write = rate(&figures.write_bytes_per_s);
}

fn measured_collectives(ranks: usize, sizes: &[u64], available: u64) -> Result<Vec<CollectiveRate>> {
    let smallest = (DType::F32.bytes() * ranks) as u64;
    let fitting = |size: &u64| *size >= smallest && 2 * ranks as u64 * size <= available;
    let sizes: BTreeSet<u64> = sizes.iter().copied().filter(fitting).collect();
    if ranks > MAX_RANKS || sizes.is_empty() {
        note(&format!(
            "collectives of {ranks} ranks are not measured on this machine; their times follow from the bandwidth of its memory"
        ));
        return Ok(Vec::new());
    }
    let bytes = sizes.iter().map(|size| *size as usize).collect();
    let task = CollectivesTask { ops: OPS.to_vec(), dtype: DType::F32, bytes };
    let processes = RankProcesses::start(ranks, &Task::BenchCollectives(task), None, &Output::Gathered)?;
    let lines = processes.wait(&Signals::take_over()?)?;
    let first = lines.first().context("the figures of rank 0")?;
    let figures: Vec<CollectiveFigures> = serde_json::from_str(first).context("the figures of rank 0")?;
    let of = |op: CollectiveOp| {
        let own = figures.iter().filter(|figure| figure.op == op);
        let bytes_us = own.map(|figure| (figure.bytes as u64, figure.us)).collect();
        CollectiveRate { op, ranks, time: TransferRate::Measured { bytes_us } }
    };
    Ok(OPS.into_iter().map(of).collect())
}
