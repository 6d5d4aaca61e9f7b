//! Decides in which memory each chunk lies, where the configuration gives fractions or a budget.
//!
//! Under `placement = "auto"`, parts of chunks leave device memory until the plan fits its budget. What is used latest
//! leaves first (Belady, as in PatrickStar and Gemini, but exact: the dry run has the order of all uses): optimizer states,
//! which are used once a step, and gradients, from the chunk that is updated last; then parameters under ZeRO stage 3, whose
//! next use after the peak is farthest. How many must leave is guessed from chunk programs, whose bytes are added to those that the dry run
//! has beside chunks while each block runs, and confirmed by exact plans: one that fits, and one with a part more that does not (the peak
//! falls with each part, nearly: the windows of the first may raise it). Then those that fit again come back. What leaves first goes to disk
//! where host memory has no room for all. Where chunks are updated within backward, the optimizer states that leave are spread over
//! the blocks instead: the kernels of each block hide copies for a time, and copies of neighbouring blocks would exceed it.
//!
//! Each pipeline coordinate is decided on its own, on its first and its last rank, whose plans stand for the others.

use std::cell::RefCell;
use std::collections::HashMap;

use phalanx_parallel::zero::{ChunkResidence, Residence};
use phalanx_plan::program::{self, RankChunks};
use phalanx_plan::trace::{Memory, PhaseName, Trace};
use phalanx_plan::{Coordinates, Lookahead, Mesh, ZeroStage, plan_memory_of, uses_before_peak};

use crate::config::{AutoPlacement, Fractions, PlacementRule};
use crate::engine::spec::Spec;
use crate::planner::budget::BudgetError;
use crate::planner::dry_run::{DryRuns, MakeRank, on_meta};
use crate::planner::placement_guesses::{Guesses, smallest};

/// Parts that are tried to come back after the bisection.
const RETURNS: usize = 8;

/// Places where the peak is looked at before a budget is refused.
const LOOKS: usize = 8;

/// A part of a chunk that may lie elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkPart {
    Optimizer,
    Gradients,
    Parameters,
}

/// A part of one chunk.
#[derive(Clone, Copy, Debug)]
struct Move {
    /// Stage and chunk of the stage.
    stage: usize,
    chunk: usize,
    part: ChunkPart,
    bytes: u64,
}

/// The chunks of one stage.
struct StageChunks {
    index: usize,
    /// Elements of each chunk that this rank updates.
    elements: Vec<u64>,
    /// Bytes of its parameters on this rank, of each chunk.
    parameters: Vec<u64>,
    /// Bytes of optimizer states and master weights of each chunk.
    optimizer: Vec<u64>,
    /// Number of chunks of trained parameters; they come first.
    trained: usize,
}

impl Spec {
    /// The specification with the memories of all chunks decided. `reserve`: bytes of the device budget that stay free
    /// beside the headroom.
    pub(crate) fn with_placed_chunks(
        mut self,
        make_rank: &MakeRank,
        reserve: u64,
    ) -> Result<Spec, BudgetError> {
        match self.placement {
            PlacementRule::Uniform(_) => {}
            PlacementRule::Fractions(fractions) => {
                for pipeline in 0..self.mesh.axes.pipeline {
                    let rank = first_rank(self.mesh.axes, pipeline);
                    for chunks in stage_chunks(on_meta(&self, rank, make_rank).1.chunks().described()) {
                        let keeps_gradients = !self.zero.update_in_backward;
                        self.zero.residence[chunks.index] =
                            of_fractions((&chunks.elements, chunks.trained), fractions, keeps_gradients);
                    }
                }
            }
            PlacementRule::Auto(auto) => {
                let mut refused: Option<BudgetError> = None;
                for pipeline in 0..self.mesh.axes.pipeline {
                    let search = Search::new(&self, first_rank(self.mesh.axes, pipeline), make_rank, auto);
                    match search.place(reserve) {
                        Ok(residence) => {
                            residence.into_iter().for_each(|(stage, lies)| self.zero.residence[stage] = lies);
                        }
                        Err(error) => {
                            refused = refused.into_iter().chain([error]).max_by_key(BudgetError::weight)
                        }
                    }
                }
                if let Some(error) = refused {
                    return Err(error);
                }
            }
        }
        Ok(self)
    }
}

fn first_rank(axes: Mesh, pipeline: usize) -> usize {
    axes.rank(Coordinates { pipeline, data: 0, tensor: 0 })
}

fn stage_chunks(chunks: &RankChunks) -> Vec<StageChunks> {
    let RankChunks { policies, stages, .. } = chunks;
    let of = |stage: &program::StageChunks| {
        let elements: Vec<u64> = stage.chunks.iter().map(|chunk| policies.part(chunk.elements)).collect();
        let types = stage.chunks.iter().map(|chunk| chunk.dtype);
        StageChunks {
            index: stage.index,
            parameters: types.zip(&elements).map(|(t, own)| t.bytes_of(*own as usize) as u64).collect(),
            optimizer: (0..stage.chunks.len()).map(|c| stage.optimizer_bytes(policies, c)).collect(),
            trained: stage.trained,
            elements,
        }
    };
    stages.iter().map(of).collect()
}

/// Memories by fractions of bytes, spread over the chunks: the bytes elsewhere differ from the fraction by half a chunk at
/// most. The first `trained` chunks alone have optimizer states.
fn of_fractions(
    (elements, trained): (&[u64], usize),
    fractions: Fractions,
    keeps_gradients: bool,
) -> Residence {
    let Fractions { away, sharded, parameters, optimizer } = fractions;
    let memory = |leaves: bool| if leaves { away } else { Memory::Device };
    // Gradients go where the update of their chunk finds the states.
    let of_chunk = |(parameters, optimizer)| {
        let gradients = if keeps_gradients { optimizer } else { Memory::Device };
        ChunkResidence { parameters, gradients, optimizer }
    };
    let of_trained = spread(&elements[..trained], optimizer).chain(std::iter::repeat(false));
    let chunks = spread(elements, parameters).zip(of_trained);
    let chunks = chunks.map(|(parameters, optimizer)| of_chunk((memory(parameters), memory(optimizer))));
    let whole = (0..).zip(spread(elements, sharded)).filter(|(_, sharded)| !sharded).map(|(chunk, _)| chunk);
    Residence::of_chunks(chunks.collect(), ChunkResidence::DEVICE).with_whole(whole)
}

/// For each chunk whether it is among those that make up a fraction of all elements.
fn spread(elements: &[u64], fraction: f64) -> impl Iterator<Item = bool> {
    let (mut taken, mut seen) = (0.0, 0.0);
    elements.iter().map(move |elements| {
        let elements = *elements as f64;
        seen += elements;
        let is_taken = taken + elements / 2.0 <= fraction * seen;
        taken += if is_taken { elements } else { 0.0 };
        is_taken
    })
}

/// The numbers below `count`, of which any first few are spread evenly: van der Corput's sequence in base 2.
fn evenly(count: usize) -> impl Iterator<Item = usize> {
    let bits = count.next_power_of_two().trailing_zeros();
    let reversed = move |number: usize| number.reverse_bits().checked_shr(usize::BITS - bits).unwrap_or(0);
    (0..1 << bits).map(reversed).filter(move |number| *number < count)
}

/// Memories of the parts of one rank: one for each move, in order.
type Away = Vec<Memory>;

/// The search for the placement of one rank.
struct Search<'a> {
    spec: &'a Spec,
    rank: usize,
    make_rank: &'a MakeRank<'a>,
    auto: AutoPlacement,
    stages: Vec<StageChunks>,
    /// Parts that may leave device memory, the one used latest first.
    moves: Vec<Move>,
    /// Peaks of device and host memory that are known.
    known: RefCell<HashMap<Away, [u64; 2]>>,
    guesses: Guesses,
}

impl<'a> Search<'a> {
    fn new(spec: &'a Spec, rank: usize, make_rank: &'a MakeRank<'a>, auto: AutoPlacement) -> Search<'a> {
        let (_, engine) = on_meta(spec, rank, make_rank);
        let trace = DryRuns::of(spec, make_rank).trace(rank);
        let guesses = Guesses::new(engine.chunks().described(), &trace);
        let stages = stage_chunks(engine.chunks().described());
        let (moves, known) = (Vec::new(), RefCell::default());
        let mut search = Search { spec, rank, make_rank, auto, stages, moves, known, guesses };
        search.moves = search.moves_in_order(&trace, engine.uses_of_step());
        search
    }

    fn moves_in_order(&self, trace: &Trace, uses: Vec<u32>) -> Vec<Move> {
        let precision = self.spec.precision.types;
        let states: u64 = self.stages.iter().flat_map(|stage| &stage.optimizer).sum();
        let accumulate = precision.accumulate.bytes() as u64;
        let all = |part| {
            let of_stage = move |stage: &'_ StageChunks| {
                let index = stage.index;
                let has_part =
                    if part == ChunkPart::Parameters { stage.elements.len() } else { stage.trained };
                let each = stage.elements[..has_part].iter().enumerate();
                let each = each.map(move |(chunk, elements)| Move {
                    stage: index,
                    chunk,
                    part,
                    bytes: match part {
                        ChunkPart::Parameters => stage.parameters[chunk],
                        ChunkPart::Gradients => accumulate * elements,
                        ChunkPart::Optimizer => stage.optimizer[chunk],
                    },
                });
                each.collect::<Vec<_>>()
            };
            self.stages.iter().flat_map(of_stage).collect::<Vec<Move>>()
        };
        let optimizer = if states == 0 { Vec::new() } else { all(ChunkPart::Optimizer) };
        // An update within backward keeps none.
        let keeps_gradients = !self.spec.zero.update_in_backward;
        let gradients = if keeps_gradients { all(ChunkPart::Gradients) } else { Vec::new() };
        let mut moves: Vec<Move> = if keeps_gradients && self.spec.batch.micro_batches == 1 && states > 0 {
            // Gradients are used as often as states, and the host updates a chunk where it finds both.
            gradients.into_iter().zip(optimizer).flat_map(|(gradients, states)| [gradients, states]).collect()
        } else {
            // Each micro-batch adds to them.
            gradients.into_iter().chain(optimizer).collect()
        };
        moves.reverse();
        if self.spec.zero.update_in_backward {
            moves = evenly(moves.len()).map(|at| moves[at]).collect();
        }
        if self.spec.zero.stage == ZeroStage::Three {
            let parameters = all(ChunkPart::Parameters);
            let distance = next_uses(trace, uses, parameters.len());
            let mut order: Vec<usize> = (0..parameters.len()).collect();
            order.sort_by_key(|chunk| (std::cmp::Reverse(distance[*chunk]), *chunk));
            moves.extend(order.into_iter().map(|chunk| parameters[chunk]));
        }
        moves
    }

    /// The first `count` moves away, the first `on_disk` of them on disk.
    fn away(&self, count: usize, on_disk: usize) -> Away {
        let lies = |index| match index {
            index if index >= count => Memory::Device,
            index if index < on_disk || self.auto.host_bytes.is_none() => Memory::Disk,
            _ => Memory::Host,
        };
        (0..self.moves.len()).map(lies).collect()
    }

    fn residence(&self, away: &Away) -> Vec<(usize, Residence)> {
        let of_stage = |stage: &StageChunks| {
            let mut chunks = vec![ChunkResidence::DEVICE; stage.elements.len()];
            for (moved, memory) in self.moves.iter().zip(away).filter(|(moved, _)| moved.stage == stage.index)
            {
                match moved.part {
                    ChunkPart::Optimizer => chunks[moved.chunk].optimizer = *memory,
                    ChunkPart::Gradients => chunks[moved.chunk].gradients = *memory,
                    ChunkPart::Parameters => chunks[moved.chunk].parameters = *memory,
                }
            }
            (stage.index, Residence::of_chunks(chunks, ChunkResidence::DEVICE))
        };
        self.stages.iter().map(of_stage).collect()
    }

    /// The first and the last rank of the pipeline coordinate: others do not allocate anything that neither does.
    fn ranks(&self) -> Vec<usize> {
        let mesh = self.spec.mesh.axes;
        let at = mesh.coordinates(self.rank);
        let last = mesh.rank(Coordinates { data: mesh.data - 1, tensor: mesh.tensor - 1, ..at });
        if last == self.rank { vec![self.rank] } else { vec![self.rank, last] }
    }

    /// The planned peaks of device and host memory.
    fn peaks(&self, away: &Away) -> Result<[u64; 2], BudgetError> {
        if let Some(peaks) = self.known.borrow().get(away) {
            return Ok(*peaks);
        }
        let mut spec = self.spec.clone();
        for (stage, residence) in self.residence(away) {
            spec.zero.residence[stage] = residence;
        }
        let runs = DryRuns::of(&spec, self.make_rank);
        let mut peaks = [0; 2];
        for rank in self.ranks() {
            let trace = runs.trace(rank);
            let peak = |memory| plan_memory_of(&trace, memory).map(|plan| plan.arena_bytes);
            peaks = [peaks[0].max(peak(Memory::Device)?), peaks[1].max(peak(Memory::Host)?)];
        }
        self.known.borrow_mut().insert(away.clone(), peaks);
        Ok(peaks)
    }

    fn place(&self, reserve: u64) -> Result<Vec<(usize, Residence)>, BudgetError> {
        let limit = self.auto.usable_bytes().saturating_sub(reserve);
        let count = self.fewest(limit, reserve)?;
        let Some(on_disk) = self.fewest_on_disk(count)? else { return Err(self.host_is_too_small(count)?) };
        let mut away = self.away(count, on_disk);
        self.bring_back(&mut away, limit)?;
        Ok(self.residence(&away))
    }

    /// The peak of device memory when so many moves are away, on disk where host memory has no room.
    fn device(&self, count: usize) -> Result<u64, BudgetError> {
        let on_disk = self.fewest_on_disk(count)?.unwrap_or(if self.auto.disk { count } else { 0 });
        Ok(self.peaks(&self.away(count, on_disk))?[0])
    }

    /// The fewest moves with which device memory suffices.
    fn fewest(&self, limit: u64, reserve: u64) -> Result<usize, BudgetError> {
        let all = self.moves.len();
        // Allocations may leave gaps, and peaks of chunks and of others may not meet: as far as they do where nothing is away.
        let nothing = self.device(0)?;
        if nothing <= limit {
            return Ok(0);
        }
        let off = nothing as i64 - self.guess(0, 0)[0] as i64;
        let guessed = |count: usize| self.guess(count, self.guessed_on_disk(count))[0] as i64 + off;
        let guess = smallest((all, all), |count| Ok::<_, BudgetError>(guessed(count) <= limit as i64))?;
        let fits = |count: usize| Ok::<_, BudgetError>(self.device(count)? <= limit);
        if let Some(fewest) = smallest((all, guess.unwrap_or(all)), fits)? {
            return Ok(fewest);
        }
        match self.first_enough(limit)? {
            Ok(enough) => Ok(smallest((enough, enough), fits)?.unwrap_or(enough)),
            Err(min) => Err(self.device_is_too_small(min, limit, reserve)),
        }
    }

    /// The peaks of device and host memory with `count` moves away, guessed.
    fn guess(&self, count: usize, on_disk: usize) -> [u64; 2] {
        self.guesses.peaks([count, on_disk], &self.residence(&self.away(count, on_disk)))
    }

    /// The fewest moves to disk with which host memory seems to suffice.
    fn guessed_on_disk(&self, count: usize) -> usize {
        let Some(limit) = self.auto.host_bytes.filter(|_| self.auto.disk) else { return 0 };
        let fits = |on_disk: usize| Ok::<_, BudgetError>(self.guess(count, on_disk)[1] <= limit);
        smallest((count, 0), fits).ok().flatten().unwrap_or(count)
    }

    /// Some number of moves that suffices: none, all, all but parameters, or one of a few between. Or else the smallest peak
    /// of them.
    fn first_enough(&self, limit: u64) -> Result<Result<usize, u64>, BudgetError> {
        let all = self.moves.len();
        let without_parameters =
            self.moves.iter().filter(|moved| moved.part != ChunkPart::Parameters).count();
        let between = (1..LOOKS).map(|look| all * look / LOOKS);
        let mut min = u64::MAX;
        for count in [0, all, without_parameters].into_iter().chain(between) {
            let device = self.device(count)?;
            if device <= limit {
                return Ok(Ok(count));
            }
            min = min.min(device);
        }
        Ok(Err(min))
    }

    fn device_is_too_small(&self, min: u64, limit: u64, reserve: u64) -> BudgetError {
        let AutoPlacement { device_bytes, headroom, .. } = self.auto;
        // The headroom rounds down: a byte more makes up for it.
        let smallest = ((min + reserve) as f64 / (1.0 - headroom)).ceil() as u64 + 1;
        BudgetError::Device {
            rank: self.rank,
            min_bytes: min,
            budget_bytes: device_bytes,
            usable_bytes: limit,
            headroom_percent: (100.0 * headroom).round() as u64,
            smallest_bytes: smallest,
            other_bytes: None,
        }
    }

    fn host_is_too_small(&self, count: usize) -> Result<BudgetError, BudgetError> {
        let has_disk = self.auto.disk;
        let needed = self.host(count, if has_disk { count } else { 0 })?;
        Ok(BudgetError::Host {
            rank: self.rank,
            needed_bytes: needed,
            budget_bytes: self.auto.host_bytes.unwrap_or(0),
            smallest_bytes: needed,
            other_bytes: None,
            has_disk,
        })
    }

    fn host(&self, count: usize, on_disk: usize) -> Result<u64, BudgetError> {
        Ok(self.peaks(&self.away(count, on_disk))?[1])
    }

    /// The fewest moves to disk, of `count` that leave, with which host memory suffices; `None` if it never does.
    fn fewest_on_disk(&self, count: usize) -> Result<Option<usize>, BudgetError> {
        let Some(limit) = self.auto.host_bytes else { return Ok(Some(count)) };
        let fits = |on_disk| self.host(count, on_disk).map(|bytes| bytes <= limit);
        // Collectives may pass through host memory wherever chunks lie.
        if limit == u64::MAX || fits(0)? {
            return Ok(Some(0));
        }
        let all = if self.auto.disk { count } else { 0 };
        smallest((all, self.guessed_on_disk(count)), fits)
    }

    /// Brings parts back to the device that fit into what is left, the largest first.
    fn bring_back(&self, away: &mut Away, limit: u64) -> Result<(), BudgetError> {
        let mut device = self.peaks(away)?[0];
        let mut order: Vec<usize> = (0..away.len()).filter(|index| away[*index] != Memory::Device).collect();
        order.sort_by_key(|index| std::cmp::Reverse(self.moves[*index].bytes));
        let mut looks = 0;
        for index in order {
            if looks == RETURNS {
                break;
            }
            if device + self.moves[index].bytes > limit {
                continue;
            }
            looks += 1;
            let back = std::mem::replace(&mut away[index], Memory::Device);
            let [with, host] = self.peaks(away)?;
            if with <= limit && self.auto.host_bytes.is_none_or(|bytes| host <= bytes) {
                device = with;
            } else {
                away[index] = back;
            }
        }
        Ok(())
    }
}

/// For each chunk: how many uses after the peak it is used again. The uses of a step repeat.
fn next_uses(trace: &Trace, order: Vec<u32>, chunks: usize) -> Vec<usize> {
    let peak = uses_before_peak(trace, PhaseName::Step);
    let length = order.len();
    let lookahead = Lookahead::new([order.clone(), order].concat());
    let at = peak.saturating_sub(1);
    (0..chunks).map(|chunk| lookahead.next_use(chunk as u32, at).unwrap_or(at + length) - at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_first_few_of_a_sequence_are_spread_evenly() {
        for count in 0..40 {
            let order: Vec<usize> = evenly(count).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count));
            for few in 1..count {
                // The sequence is never further from its share than log2(n) / 3 + 1 (Béjian and Faure, 1977).
                let in_first_half = order[..few].iter().filter(|number| 2 * **number < count).count();
                let bound = (few as f64).log2() / 3.0 + 1.0;
                assert!((in_first_half as f64 - few as f64 / 2.0).abs() <= bound, "{order:?}");
            }
        }
    }

    #[test]
    fn fractions_are_those_of_bytes_up_to_half_a_chunk() {
        let elements = [100, 7, 3, 40, 40, 40, 1, 60, 9];
        for (tenths, trained) in (0..=10).flat_map(|tenths| [(tenths, elements.len()), (tenths, 6)]) {
            let fraction = f64::from(tenths) / 10.0;
            let fractions =
                Fractions { away: Memory::Host, sharded: fraction, parameters: 0.0, optimizer: fraction };
            let residence = of_fractions((&elements, trained), fractions, true);
            let is_away = |chunk: usize| residence.of(chunk).optimizer == Memory::Host;
            let total: u64 = elements[..trained].iter().sum();
            let away: u64 =
                (0..elements.len()).filter(|chunk| is_away(*chunk)).map(|chunk| elements[chunk]).sum();
            assert!((away as f64 - fraction * total as f64).abs() <= 50.0, "{fraction}: {away} of {total}");
            assert!(
                (0..elements.len()).all(|chunk| residence.is_whole(chunk) != is_away(chunk)) || trained == 6
            );
            assert!((trained..elements.len()).all(|chunk| !is_away(chunk)), "frozen chunks have no states");
            assert!(tenths > 0 || away == 0);
            assert!(tenths < 10 || away == total);
            assert!((0..elements.len()).all(|chunk| residence.of(chunk).parameters == Memory::Device));
        }
    }
}
