//! The part of `phalanx doctor` about NVIDIA GPUs: driver, cards and libraries; with `--kernels`, whether their kernels compute the same as
//! the processor's, and how fast.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use phalanx_cuda::checks::graphs::{self, GraphFigures};
use phalanx_cuda::checks::rates::{self, Rate, Sizes, Work};
use phalanx_cuda::checks::{Bench, Case, GROUPS, link_of_one_rank, programs};
use phalanx_cuda::driver::known_version;
use phalanx_cuda::{CONTEXT_BYTES, Error, Limits, libraries, nccl_version};
use serde_json::{Value, json};

use crate::host::cards;
use crate::host::environment::{self, Environment};
use phalanx_drawing::report::{Table, bytes, plural};

/// Driver, cards and libraries, for people.
pub fn to_text() -> String {
    let cards = match phalanx_cuda::usable_cards() {
        // Most machines have none, and need none.
        Err(Error::NoDriver) => {
            return "GPUs              none: there is no CUDA driver (libcuda.so)\n".to_string();
        }
        Err(error) => return format!("GPUs              none that can be used: {error}\n{}", driver_text()),
        Ok(cards) => cards,
    };
    let mut text = driver_text();
    for card in &cards {
        let limits =
            card.limits().map_or("its clocks are unknown".to_string(), |limits| limits_text(&limits));
        let (major, minor) = card.capability;
        let (index, name, memory) = (card.index, &card.name, bytes(card.memory_bytes));
        text.push_str(&format!(
            "GPU {index}             {name}, compute capability {major}.{minor}, {memory}; {limits}\n"
        ));
    }
    for library in libraries(&environment::cuda_options(None)) {
        let (name, purpose, package) = (library.name, library.purpose, library.package);
        match library.found {
            Some(found) => {
                let path = library.path.unwrap_or_default();
                text.push_str(&format!("{name:<17} {found} in {path} ({purpose})\n"));
            }
            None => text.push_str(&format!("{name:<17} missing ({purpose}): {package}\n")),
        }
    }
    match cards::look() {
        Ok(found) => text.push_str(&format!("device.kind       \"auto\" is \"cuda\": {found}\n")),
        Err(error) => text.push_str(&format!("device.kind       \"auto\" is \"cpu\": {error}\n")),
    }
    text
}

/// The line of the driver's version.
fn driver_text() -> String {
    let version = known_version();
    version.map_or(String::new(), |version| format!("CUDA driver       {}\n", version_text(version)))
}

/// 12.4 for 12040
fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The published limits of a card's architecture at its highest clocks.
fn limits_text(limits: &Limits) -> String {
    format!(
        "by published figures at most {:.0} TFLOPS in bf16, {:.1} in f32, {:.0} GB/s",
        limits.half_flops_per_s / 1e12,
        limits.f32_flops_per_s / 1e12,
        limits.memory_bytes_per_s / 1e9
    )
}

/// Driver, cards and libraries, for scripts.
pub fn to_json() -> Value {
    let card = |card: &phalanx_cuda::Card| {
        let limits = card.limits();
        json!({
            "index": card.index, "name": card.name, "capability": [card.capability.0, card.capability.1],
            "memory_bytes": card.memory_bytes, "multiprocessors": card.multiprocessors,
            "limits_published": limits.map(|limits| json!({
                "bf16_flops_per_s": limits.half_flops_per_s, "f32_flops_per_s": limits.f32_flops_per_s,
                "memory_bytes_per_s": limits.memory_bytes_per_s,
            })),
        })
    };
    let (cards, error) = match phalanx_cuda::usable_cards() {
        Ok(cards) => (cards, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let library = |library: &phalanx_cuda::LibraryState| json!({ "name": library.name, "found": library.found, "path": library.path });
    let libraries = libraries(&environment::cuda_options(None));
    json!({
        "driver": known_version().map(version_text),
        "cards": cards.iter().map(card).collect::<Vec<_>>(), "error": error,
        "libraries": libraries.iter().map(library).collect::<Vec<_>>(),
        "usable": cards::look().is_ok(),
    })
}

/// Results of `doctor --kernels`.
pub struct Kernels {
    /// Messages of the compiler about programs that it refuses.
    refused: Vec<String>,
    groups: Vec<(&'static str, Vec<Case>)>,
    rates: Vec<Rate>,
    limits: Option<Limits>,
    /// Result of making an NCCL communicator with this card alone: the version and the bytes that it takes, or the error; `None` without
    /// the library.
    nccl: Option<Result<(i32, u64), String>>,
    /// Bytes of the card that the driver has taken for this process (and other programs for themselves).
    driver_bytes: u64,
    /// As many graphs as a device keeps; None where they are switched off.
    graphs: Option<Result<GraphFigures, String>>,
}

impl Kernels {
    /// Compares every kernel of the first card with the processor's, and measures.
    ///
    /// # Errors
    /// No usable card, or a card that fails.
    pub fn check(environment: Environment) -> Result<Kernels> {
        let cards = phalanx_cuda::usable_cards()?;
        let limits = cards[0].limits();
        let kernels = environment.cpu(crate::host::machine::cores(), None)?;
        let options = environment::cuda_options(None);
        // Ahead, on all cores: one core takes minutes.
        let refused = programs::compile(&options)?.iter().map(ToString::to_string).collect();
        let bench = Bench::new(&options, Arc::clone(&kernels) as _)?;
        let groups: Vec<_> = GROUPS.iter().map(|group| (group.name, group.run(&bench))).collect();
        // A card without clocks is the emulator.
        let sizes = if limits.is_some() { Sizes::CARD } else { Sizes::EMULATOR };
        let failed = groups.iter().flat_map(|(_, cases)| cases).any(|case| case.fault.is_some());
        let rates = if failed { Vec::new() } else { rates::measure(&bench, sizes)? };
        let driver_bytes = bench.other_bytes()?;
        let graphs =
            (options.graphs && !failed).then(|| graphs::measure(&bench).map_err(|error| error.to_string()));
        let nccl = link_of_one_rank(&options, kernels);
        let nccl = nccl.map_err(|error| error.to_string()).transpose();
        Ok(Kernels { refused, groups, rates, limits, nccl, driver_bytes, graphs })
    }

    fn faults(&self) -> Vec<String> {
        let cases = self.groups.iter().flat_map(|(group, cases)| cases.iter().map(move |case| (group, case)));
        let cases = cases
            .filter_map(|(group, case)| Some(format!("{group}: {}: {}", case.name, case.fault.as_ref()?)));
        let link = self.nccl.as_ref().and_then(|tried| tried.as_ref().err().cloned());
        let graphs = self.graphs.as_ref().and_then(|measured| measured.as_ref().err());
        self.refused
            .iter()
            .cloned()
            .chain(cases)
            .chain(link)
            .chain(graphs.map(|error| format!("graphs: {error}")))
            .collect()
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let mut table = Table::new(&["kernels", "comparisons", "largest difference", ""]);
        for (name, cases) in &self.groups {
            // Of what is allowed, where anything is.
            let worst =
                cases.iter().filter(|case| case.tolerance > 0.0).map(|case| case.worst / case.tolerance);
            let worst = worst.fold(None, |worst: Option<f64>, share| Some(worst.unwrap_or(0.0).max(share)));
            let allowed = worst
                .map_or("same numbers".to_string(), |share| format!("{:.0}% of the allowed", 100.0 * share));
            let failed = cases.iter().filter(|case| case.fault.is_some()).count();
            let verdict = if failed == 0 { "ok".to_string() } else { format!("{failed} FAILED") };
            table.row([name.to_string(), cases.len().to_string(), allowed, verdict]);
        }
        let mut text = format!("{table}");
        for fault in self.faults().iter().take(10) {
            text.push_str(&format!("  {fault}\n"));
        }
        if !self.rates.is_empty() {
            text.push_str(&format!("\n{}", self.rates_text()));
        }
        text.push_str(&match &self.nccl {
            None => "NCCL was not found, so it was not tried\n".to_string(),
            Some(Err(error)) => format!("communication between cards FAILED: {error}\n"),
            Some(Ok((version, taken))) => format!(
                "NCCL {}: a communicator of this card alone moves bytes, and sums have the processor's bits (several cards were not tried); \
                 it takes {}\n",
                nccl_version(*version),
                bytes(*taken)
            ),
        });
        let used = bytes(self.driver_bytes);
        text.push_str(&format!(
            "memory of the card for the driver's context, kernels and libraries: {used} (the plan allows {}, with graphs)\n",
            bytes(CONTEXT_BYTES)
        ));
        if let Some(Ok(GraphFigures { graphs, nodes, bytes: taken })) = self.graphs {
            text.push_str(&format!(
                "{graphs} graphs of {nodes} launches, as many as are kept, take {} more\n",
                bytes(taken)
            ));
        }
        text
    }

    fn rates_text(&self) -> Table {
        let last = if self.limits.is_some() {
            "of the published limit"
        } else {
            "no limit is known: an emulator's rates mean nothing"
        };
        let mut table = Table::new(&["rate", "time", "per second", last]);
        for rate in &self.rates {
            let per_s = match rate.work {
                Work::Flops(..) => format!("{:.2} TFLOPS", rate.per_s() / 1e12),
                Work::Bytes(_) => format!("{:.1} GB/s", rate.per_s() / 1e9),
            };
            let share =
                self.limits.map_or(String::new(), |limits| format!("{:.0}%", 100.0 * rate.share(&limits)));
            table.row([rate.name.clone(), format!("{:.1} us", 1e6 * rate.seconds), per_s, share]);
        }
        table
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        let rate = |rate: &Rate| {
            let share = self.limits.map(|limits| rate.share(&limits));
            json!({ "name": rate.name, "seconds": rate.seconds, "per_s": rate.per_s(), "share_of_published_limit": share })
        };
        let group = |(name, cases): &(&str, Vec<Case>)| json!({ "name": name, "comparisons": cases.len() });
        json!({
            "groups": self.groups.iter().map(group).collect::<Vec<_>>(), "faults": self.faults(),
            "nccl": self.nccl.as_ref().map(|tried| json!({
                "version": tried.as_ref().ok().map(|(version, _)| nccl_version(*version)),
                "bytes": tried.as_ref().ok().map(|(_, bytes)| bytes), "error": tried.as_ref().err(),
            })),
            "rates": self.rates.iter().map(rate).collect::<Vec<_>>(), "driver_bytes": self.driver_bytes,
            "graphs": self.graphs.as_ref().and_then(|measured| measured.as_ref().ok()).map(|found| json!({ "graphs": found.graphs, "launches": found.nodes, "bytes": found.bytes })),
        })
    }

    /// The error of kernels that differ.
    ///
    /// # Errors
    /// Results that differ.
    pub fn verdict(&self) -> Result<()> {
        match self.faults().len() {
            0 => Ok(()),
            count => Err(anyhow!(
                "{} of kernels differ from the processor's: please report it with this output",
                plural(count, "result")
            )),
        }
    }
}
