//! Treatment of chunks in a dry run: the events of its trace that are of them, with their bytes, in order.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_plan::trace::{CollectiveOp, DType, Event, Memory, PhaseName, Site, Stream, Trace};

/// Kernels that chunks need; layers run others, too.
const KERNELS_OF_CHUNKS: [&str; 11] = [
    "fill",
    "copy",
    "convert",
    "add",
    "block_squares",
    "tree_sum",
    "norm",
    "count_non_finite",
    "adamw",
    "sgd",
    "own_optimizer",
];

/// Something that happens to chunks. Allocations and collectives are numbered from the end of `init`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Happening {
    Alloc {
        name: &'static str,
        bytes: u64,
        memory: Memory,
    },
    Free {
        allocation: u32,
    },
    Collective {
        op: CollectiveOp,
        group: &'static str,
        dtype: DType,
        count: u64,
    },
    Wait {
        collective: u32,
    },
    Copy {
        memories: [Memory; 2],
        bytes: u64,
    },
    WaitForCopy {
        copy: u32,
    },
    /// One or more blocks run.
    Runs,
    /// A first or second part of backward runs. It may have nothing to compute.
    HalfBackward,
}

/// A phase: what happens to chunks, and the chunks that blocks use, in order.
#[derive(Default)]
pub(super) struct Shown {
    pub(super) happenings: Vec<Happening>,
    pub(super) uses: Vec<u32>,
}

impl Shown {
    /// Blocks run: with what ran before them, if nothing else happened meanwhile.
    pub(super) fn run(&mut self, what: Happening) {
        let before = self.happenings.pop_if(|last| [Happening::Runs, Happening::HalfBackward].contains(last));
        self.happenings.push(if before == Some(Happening::Runs) { Happening::Runs } else { what });
    }

    /// The same without the halves of backward that `found` does not show.
    pub(super) fn without_empty_runs(self, found: &Shown) -> Shown {
        let mut happenings = Vec::new();
        for happening in self.happenings {
            match (happening, found.happenings.get(happenings.len())) {
                (Happening::HalfBackward, Some(Happening::Runs)) => happenings.push(Happening::Runs),
                (Happening::HalfBackward, _) => {}
                (other, _) => happenings.push(other),
            }
        }
        Shown { happenings, ..self }
    }
}

/// Returns whether a place made an action of a program, or executes it.
pub(super) fn is_of_chunks(site: Site) -> bool {
    let files = ["parallel/src/zero/", "plan/src/program/"];
    files.iter().any(|file| site.file.contains(file))
}

/// Returns whether an event is one of a layer that computes.
fn is_of_layer(event: &Event) -> bool {
    match event {
        Event::Alloc { site, name, .. } => {
            let layers = ["crates/layers/", "crates/models/", "parallel/src/tensor/"];
            layers.iter().any(|file| site.file.contains(file)) && *name != "exchange.copy"
        }
        Event::Kernel { name, .. } => !KERNELS_OF_CHUNKS.contains(name),
        _ => false,
    }
}

/// Happenings of chunks in a trace, phase by phase, from the phase behind `load` on.
pub(super) fn shown(trace: &Trace) -> Vec<Shown> {
    let (mut allocations, mut collectives, mut copies) =
        (BTreeMap::new(), BTreeMap::new(), Copies::default());
    let (mut submitted, mut staged) = (0, BTreeSet::new());
    let mut phases = Vec::new();
    for phase in &trace.phases {
        let mut shown = Shown::default();
        for event in &phase.events {
            if is_of_layer(event) {
                shown.run(Happening::Runs);
            }
            if !matches!(event, Event::Collective(_)) {
                shown.happenings.extend(copies.see(event));
            }
            match event {
                Event::Alloc { id, bytes, name, site, memory, .. }
                    if is_of_chunks(*site) && *name != "staged" =>
                {
                    if !matches!(phase.name, PhaseName::Init | PhaseName::Load) {
                        allocations.insert(*id, allocations.len() as u32);
                    }
                    shown.happenings.push(Happening::Alloc { name, bytes: *bytes, memory: *memory });
                }
                Event::Free { id, .. } => {
                    let own =
                        allocations.get(id).map(|allocation| Happening::Free { allocation: *allocation });
                    shown.happenings.extend(own);
                }
                Event::Collective(call) => {
                    let is_staged = std::mem::take(&mut copies.stages_foreign);
                    staged.extend((is_staged && call.op != CollectiveOp::Send).then_some(submitted));
                    if is_of_chunks(call.site) {
                        collectives.insert(submitted, collectives.len() as u32);
                        let (op, group, dtype, count) = (call.op, call.group, call.dtype, call.count);
                        shown.happenings.push(Happening::Collective { op, group, dtype, count });
                    }
                    submitted += 1;
                }
                Event::Wait { collective } => {
                    let own = collectives.get(collective);
                    copies.lands_foreign = staged.contains(collective);
                    shown.happenings.extend(own.map(|c| Happening::Wait { collective: *c }));
                }
                Event::Use { chunk } => shown.uses.push(*chunk),
                _ => {}
            }
        }
        phases.push(shown);
    }
    phases
}

/// The copies of a trace that are of chunks, or of the collectives of chunks where these are staged in host memory.
#[derive(Default)]
struct Copies {
    seen: u32,
    /// True while the copies of another collective are staged.
    stages_foreign: bool,
    /// True between the end of another collective and the copy of what it wrote.
    lands_foreign: bool,
    /// The last copy, before the event that ends it, with its stream.
    issued: Option<Stream>,
    /// For each event: the copy that it ends.
    ends: BTreeMap<u32, u32>,
}

impl Copies {
    fn see(&mut self, event: &Event) -> Option<Happening> {
        match event {
            Event::Alloc { name, site, .. } => {
                self.stages_foreign = *name == "staged" && !is_of_chunks(*site);
            }
            Event::Kernel { .. } | Event::Use { .. } => {
                (self.stages_foreign, self.lands_foreign) = (false, false);
            }
            Event::Copy { name, from, to, bytes, stream, .. } => {
                let is_foreign = match (from, to) {
                    (Memory::Device, Memory::Host) => self.stages_foreign,
                    (Memory::Host, Memory::Device) => std::mem::take(&mut self.lands_foreign),
                    _ => false,
                };
                let is_own = name.starts_with("copy_") && !is_foreign;
                self.issued = is_own.then_some(*stream);
                self.seen += u32::from(is_own);
                return is_own.then_some(Happening::Copy { memories: [*from, *to], bytes: *bytes });
            }
            Event::Record { number, stream } if self.issued == Some(*stream) => {
                self.ends.insert(*number, self.seen - 1);
                self.issued = None;
            }
            Event::HostWait { number } => {
                return self.ends.get(number).map(|copy| Happening::WaitForCopy { copy: *copy });
            }
            _ => {}
        }
        None
    }
}
