//! Estimates of a candidate's step and memory from a few numbers, so that very many can be compared. What is planned in earnest is decided by
//! them; what is proposed, by plans.

use std::collections::HashMap;

use phalanx_plan::pipeline::{Plan, generate, in_flight};
use phalanx_plan::trace::CollectiveOp;
use phalanx_plan::{Costs, Machine, Precision, StageCost, ZeroStage, simulate, textbook};
use phalanx_train::appraisal::ReplicaWork;

use crate::host::card_needs::CardNeeds;

use super::candidate::{Axes, Candidate, Placed, Scheduled};

/// Sequences of micro-batches for which kernels are timed.
pub const MAX_MICRO: usize = 256;

/// The kernels of a replica that some tensor ranks share, with some checkpointing.
pub struct Work {
    /// Seconds of kernels and of the collectives of the tensor axis, by the logarithm of the sequences of a micro-batch.
    by_micro: Vec<(f64, f64)>,
    update_s: f64,
    activations: u64,
}

impl Work {
    /// Times a replica's work on a machine; `None` where no link joins the tensor ranks.
    pub fn of(work: &ReplicaWork, machine: &Machine) -> Option<Work> {
        let sizes = (0..=MAX_MICRO.ilog2()).map(|log| 1u64 << log);
        let by_micro = sizes.map(|size| Some((work.kernels_s(machine, size), work.tensor_s(machine, size)?)));
        Some(Work {
            by_micro: by_micro.collect::<Option<_>>()?,
            update_s: work.update_s(machine),
            activations: work.activations,
        })
    }

    fn seconds(&self, micro: usize) -> (f64, f64) {
        let below = (micro.ilog2() as usize).min(self.by_micro.len() - 1);
        let scale = micro as f64 / (1u64 << below) as f64;
        let (kernels, tensor) = self.by_micro[below];
        (kernels * scale, tensor * scale)
    }
}

/// Stages of a pipeline: how the time of a step depends on micro-batches, in the time of a micro-batch in an average stage.
#[derive(Clone, Copy, Debug)]
pub struct Filled {
    slope: f64,
    intercept: f64,
    /// Activations that a rank holds at most, in those of a micro-batch in an average stage.
    held: f64,
}

impl Filled {
    /// Simulates a schedule with the operations of its stages; `None` where there is no such schedule.
    pub fn of(plan: Plan, ranks: usize, costs: &[StageCost]) -> Option<Filled> {
        let total: f64 = costs.iter().map(|cost| cost.forward + cost.input + cost.weight).sum();
        let one = total / ranks as f64;
        let run = |micro_batches| {
            let schedule = generate(plan, ranks, micro_batches).ok()?;
            let makespan = simulate(&schedule, &Costs { stages: costs.to_vec(), message: 0.0 }).makespan;
            Some((makespan / one, schedule))
        };
        let (short, schedule) = run(2 * ranks)?;
        let (long, _) = run(4 * ranks)?;
        let slope = (long - short) / (2 * ranks) as f64;
        let held = in_flight(&schedule).ranks.iter().map(|held| held.to_input).max()?;
        Some(Filled {
            slope,
            intercept: short - slope * (2 * ranks) as f64,
            held: held as f64 / plan.chunks() as f64,
        })
    }

    const ALONE: Filled = Filled { slope: 1.0, intercept: 0.0, held: 1.0 };
}

/// Parts of an estimated step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Parts {
    /// Kernels of the slowest stage.
    pub kernels: f64,
    /// Collectives of the tensor axis.
    pub tensor: f64,
    /// Waits for other stages.
    pub bubble: f64,
    /// Gathers and reductions over the data axis that compute waits for.
    pub data: f64,
    /// Copies from and to host memory, and updates there.
    pub host: f64,
}

impl Parts {
    /// The step.
    pub fn seconds(&self) -> f64 {
        self.kernels + self.tensor + self.bubble + self.data + self.host
    }
}

/// An estimate.
#[derive(Clone, Copy, Debug)]
pub struct Estimate {
    /// Time of a step.
    pub parts: Parts,
    /// Bytes of device memory: states and activations, without buffers.
    pub bytes: u64,
}

/// Numbers of a run that no candidate changes, and what was worked out for some of them.
pub struct Numbers<'a> {
    pub machine: &'a Machine,
    /// Parameters, and those that are trained.
    pub parameters: [u64; 2],
    /// Elements of a block.
    pub block: u64,
    /// Element types.
    pub precision: Precision,
    /// Numbers that the optimizer keeps for a parameter.
    pub states: u64,
    /// Bytes of the hidden state of a sequence.
    pub message: u64,
    /// Work by tensor ranks and checkpointing.
    pub work: HashMap<(usize, usize), Work>,
    /// Pipelines by ranks and schedule.
    pub filled: HashMap<(usize, usize), Filled>,
    /// True if devices are cards, of which driver and NCCL take memory.
    pub has_card: bool,
    data: HashMap<(usize, usize), Option<[f64; 2]>>,
}

impl<'a> Numbers<'a> {
    /// Numbers without work and pipelines.
    pub fn new(
        machine: &'a Machine,
        (parameters, block): ([u64; 2], u64),
        (precision, states): (Precision, u64),
        message: u64,
    ) -> Numbers<'a> {
        let (work, filled, data) = (HashMap::new(), HashMap::new(), HashMap::new());
        Numbers {
            machine,
            parameters,
            block,
            precision,
            states,
            message,
            work,
            filled,
            has_card: false,
            data,
        }
    }

    /// Seconds of a gather over the data axis: of each call, and of each byte of the whole buffer.
    fn gather(&mut self, of: &Candidate) -> Option<[f64; 2]> {
        let machine = self.machine;
        *self.data.entry((of.data, of.tensor)).or_insert_with(|| {
            let members: Vec<usize> = (0..of.data).map(|replica| replica * of.tensor).collect();
            let time = |bytes: u64| {
                let sent = bytes / of.data as u64 * (of.data as u64 - 1);
                machine.collective_of_bytes_s(CollectiveOp::AllGather, &members, bytes, sent)
            };
            let (few, many) = (time(1 << 10)?, time(1 << 30)?);
            Some([few, (many - few) / f64::from(1 << 30)])
        })
    }

    /// The estimate of a candidate; `None` where it is not possible.
    pub fn estimate(&mut self, axes: &Axes, of: &Candidate) -> Option<Estimate> {
        let gather = if of.data > 1 { self.gather(of)? } else { [0.0; 2] };
        let work = self.work.get(&(of.tensor, of.checkpointing))?;
        let filled = match of.pipeline {
            1 => Filled::ALONE,
            ranks => *self.filled.get(&(ranks, of.schedule))?,
        };
        let (stages, micro_batches) = (of.pipeline as f64, of.micro_batches() as f64);
        let (kernels, tensor) = work.seconds(of.micro);
        let unit = (kernels + tensor) / stages;
        let whole = unit * (filled.slope * micro_batches + filled.intercept).max(micro_batches);
        let mut parts = Parts {
            kernels: kernels / stages * micro_batches,
            tensor: tensor / stages * micro_batches,
            ..Parts::default()
        };
        parts.bubble = whole - parts.kernels - parts.tensor;
        if of.pipeline > 1 {
            let message = self.machine.collective_of_bytes_s(
                CollectiveOp::Send,
                &[0, of.data * of.tensor],
                self.message * of.micro as u64,
                self.message * of.micro as u64 / of.tensor as u64,
            )?;
            parts.bubble += 2.0 * (stages * axes.schedules[of.schedule].chunks_of() as f64) * message;
        }
        let share = |all: u64| all / (of.pipeline * of.tensor) as u64;
        let [all, trained] = self.parameters.map(share);
        let sharded = if of.zero > 0 { of.data as f64 } else { 1.0 };
        parts.kernels += work.update_s / stages / sharded;
        let mut types = self.precision;
        if of.sends_half {
            types.communicate = types.compute;
        }
        parts.data = self.data_s(of, gather, (types, [all, trained]), (unit, micro_batches));
        let book =
            textbook([all, trained], of.data as u64, ZeroStage::from_number(of.zero)?, types, self.states)
                .state;
        parts.host = self.host_s(of, &book, micro_batches);
        let away = |from: Placed, bytes: u64| if of.placed >= from { 0 } else { bytes };
        let bytes = self.beside(of)
            + away(Placed::Parameters, book.parameters)
            + away(
                Placed::Gradients,
                if of.defers { trained * types.accumulate.bytes() as u64 } else { book.gradients },
            )
            + away(Placed::Optimizer, book.optimizer)
            + (work.activations as f64 * of.micro as f64 * filled.held / stages) as u64;
        Some(Estimate { parts, bytes })
    }

    /// Bytes that a card needs beside what is planned, at least.
    fn beside(&self, of: &Candidate) -> u64 {
        let axes = [of.data, of.tensor].into_iter().filter(|ranks| *ranks > 1);
        let needs = || CardNeeds { communicators: axes.collect(), ..CardNeeds::NONE };
        if self.has_card { needs().bytes() } else { 0 }
    }

    /// Seconds in which compute waits for the data axis.
    fn data_s(
        &self,
        of: &Candidate,
        [call, byte]: [f64; 2],
        (types, [all, trained]): (Precision, [u64; 2]),
        (unit, micro_batches): (f64, f64),
    ) -> f64 {
        if of.data == 1 {
            return 0.0;
        }
        let chunks = (all as f64 / (self.block as f64 / of.tensor as f64).max(1.0)).max(1.0);
        let moved = |elements: u64, bytes: usize| chunks * call + elements as f64 * bytes as f64 * byte;
        let (gather, reduce) = (moved(all, types.compute.bytes()), moved(trained, types.communicate.bytes()));
        let exposed = |time: f64, beside: f64| (time - 0.8 * beside).max(time / chunks);
        let times = if of.defers { 1.0 } else { micro_batches };
        match of.zero {
            0 => exposed(2.0 * reduce, 2.0 / 3.0 * unit) * times,
            1 | 2 => exposed(reduce, 2.0 / 3.0 * unit) * times + gather,
            _ => {
                exposed(2.0 * gather + if of.defers { 0.0 } else { reduce }, unit) * micro_batches
                    + if of.defers { exposed(reduce, 2.0 / 3.0 * unit) } else { 0.0 }
            }
        }
    }

    /// Seconds of copies and updates of what lies in host memory.
    fn host_s(&self, of: &Candidate, book: &phalanx_plan::trace::Bytes, micro_batches: f64) -> f64 {
        let copy = |bytes: u64| self.machine.copy.seconds(bytes);
        match of.placed {
            Placed::Device => 0.0,
            Placed::Optimizer => copy(book.gradients) + copy(book.parameters) + self.update_of_host(book),
            Placed::Gradients => {
                copy(book.gradients) * micro_batches + copy(book.parameters) + self.update_of_host(book)
            }
            Placed::Parameters => {
                (copy(book.gradients) + 2.0 * copy(book.parameters)) * micro_batches
                    + self.update_of_host(book)
            }
        }
    }

    fn update_of_host(&self, book: &phalanx_plan::trace::Bytes) -> f64 {
        2.0 * book.optimizer as f64 / (self.machine.host_gb_per_s * 1e9)
    }
}

impl Scheduled {
    /// Stages of each rank, where the schedule has several.
    pub fn chunks_of(&self) -> usize {
        self.plan().map_or(1, Plan::chunks)
    }

    /// The schedule, if it is one with a name.
    pub fn plan(&self) -> Option<Plan> {
        Some(self.name.parse::<Plan>().ok()?.with_chunks(self.chunks))
    }
}
