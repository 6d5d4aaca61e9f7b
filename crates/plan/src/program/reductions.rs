//! Reductions of gradients over the data axis: their start, and what becomes of the sum when it has arrived.
//!
//! Where gradients are communicated in another type, a rounded copy is reduced, and its sum is written or added in the type in which
//! gradients accumulate. This happens on one rank too, so that the result depends on the types and not on the number of ranks.

use crate::trace::{Category, Memory};
use crate::zero::ZeroStage;

use super::action::{Buffer, Op, SumGroup, Work};
use super::builder::Builder;
use super::chunks::{GradientBuffering, GradientPlace};
use super::gradients::{GradientPass, Held, Reduction};
use super::list::{BufferSpec, Extent, Role, Stop};
use super::visits::arrive;

impl GradientPass<'_> {
    /// Starts the reduction of a chunk in a micro-batch.
    pub(super) fn start(&mut self, list: &mut Builder, c: usize, micro_batch: usize) {
        let gradient = self.written(c);
        let is_in_place = self.buffering == GradientBuffering::InPlace;
        let sum = match self.chunks[c].sum {
            Held::Nothing if self.is_stored(c) && !is_in_place => Some(self.window(list, c)),
            Held::Nothing => None,
            Held::Coming(moving) => Some(arrive(list, moving)),
            Held::Here(sum) => Some(sum),
        };
        let chunk = &mut self.chunks[c];
        let mut accumulates = !is_in_place && chunk.done > 1;
        let sum = sum.map(|sum| match chunk.tree.is_some() {
            true => {
                let (sum, adds) =
                    chunk.of_tree(list, sum, |sums, sum, new| sums.target(micro_batch, sum, new));
                accumulates = adds;
                sum
            }
            false => sum,
        });
        chunk.sum = sum.map_or(Held::Nothing, Held::Here);
        let copy = self.policies.rounds().then(|| self.round(list, c));
        let from = copy.unwrap_or(gradient);
        let work = match sum {
            Some(into) if copy.is_none() => Work::ReduceScatter { from, into, accumulates },
            None if self.policies.stage == ZeroStage::Zero => {
                Work::AllReduce { group: SumGroup::Data, buffer: from }
            }
            _ => Work::ReduceScatter { from, into: from, accumulates: false },
        };
        let token = list.start(work);
        self.chunks[c].reducing = Some(Reduction { token, copy, accumulates });
        let is_over = match sum {
            Some(_) => self.is_transient(c),
            None => self.chunks[c].place == GradientPlace::Parameters,
        };
        if copy.is_some() && is_over {
            self.close(list, c);
        }
    }

    /// Frees the whole buffer of a chunk.
    pub(super) fn close(&mut self, list: &mut Builder, c: usize) {
        list.emit(Op::Free(self.written(c)));
        self.chunks[c].whole = Held::Nothing;
    }

    /// Device memory for the sum of a chunk that stays elsewhere.
    fn window(&self, list: &mut Builder, c: usize) -> Buffer {
        let of = self.stage.first_chunk + c;
        list.take_as(BufferSpec {
            role: Role::Sum,
            of,
            extent: Extent::Part,
            stop: Stop::Device,
            start: 0,
            elements: self.stage.chunks[c].elements / self.policies.data_ranks,
            memory: Memory::Device,
            dtype: self.policies.precision.accumulate,
            category: Category::Workspace,
            name: "visitor",
            is_resident: false,
        })
    }

    /// Takes a copy in the type in which gradients are communicated.
    fn round(&self, list: &mut Builder, c: usize) -> Buffer {
        let (of, elements) = (self.stage.first_chunk + c, self.stage.chunks[c].elements);
        let named = (self.policies.precision.communicate, "gradient_copy");
        let copy = list.take(Role::Rounded, of, elements, named);
        list.emit(Op::Convert { from: self.written(c), into: copy });
        copy
    }

    /// Waits for the reduction of a chunk, if it runs. A transient buffer is freed, and what stays elsewhere leaves.
    pub(super) fn arrive(&mut self, list: &mut Builder, c: usize) {
        let Some(Reduction { token, copy, accumulates }) = self.chunks[c].reducing.take() else { return };
        list.emit(Op::Wait(token));
        self.lane.end(c);
        let place = self.chunks[c].place;
        let parameters = || list.buffer(Role::Parameters, self.stage.first_chunk + c);
        match (copy, self.chunks[c].sum) {
            (Some(from), sum) => {
                let into = match sum {
                    Held::Here(sum) => sum,
                    _ if place == GradientPlace::Parameters => parameters(),
                    _ => self.written(c),
                };
                list.emit(if accumulates { Op::Add { from, into } } else { Op::Convert { from, into } });
                list.emit(Op::Free(from));
            }
            (None, Held::Here(_)) if self.is_transient(c) => self.close(list, c),
            (None, _) if place == GradientPlace::Parameters => {
                let into = parameters();
                list.emit(Op::CopyPart { from: self.written(c), into });
                self.close(list, c);
            }
            _ => {}
        }
        let chunk = &mut self.chunks[c];
        if let (Held::Here(sum), Some(tree)) = (&mut chunk.sum, &mut chunk.tree) {
            *sum = tree.settle(list, *sum);
        }
        let stays = chunk.tree.is_some() && chunk.done < self.policies.micro_batches;
        match place {
            GradientPlace::Elsewhere if !stays => self.put_away(list, c),
            GradientPlace::Update => self.reduced.push_back(c),
            _ => {}
        }
    }

    /// Gradients that were reduced leave for the memory in which they stay. The last ones of a step are counted in the norm before, if
    /// nothing is added to them later.
    fn put_away(&mut self, list: &mut Builder, c: usize) {
        let is_last = self.chunks[c].done == self.policies.micro_batches;
        let (buffer, is_part) = match self.chunks[c].sum {
            Held::Here(sum) if is_last && self.policies.stage == ZeroStage::Zero => {
                let whole = self.bucket(list, c);
                self.gather(list, sum, whole);
                list.emit(Op::Free(sum));
                (whole, false)
            }
            Held::Here(sum) => (sum, false),
            _ => (self.written(c), self.policies.stage != ZeroStage::Zero),
        };
        if is_last && self.stage.chunks[c].is_summed_over_data_alone {
            let into = list.buffer(Role::Squares, self.stage.index);
            list.count(buffer, into);
            self.chunks[c].is_counted = true;
        }
        (self.chunks[c].whole, self.chunks[c].sum) = (Held::Nothing, Held::Nothing);
        self.leaving.send((list, self.policies, self.stage), (c, buffer), is_part);
    }
}
