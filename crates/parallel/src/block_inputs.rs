//! The inputs of Transformer blocks between forward and backward.
//!
//! Under checkpointing, they are all that blocks save. They can wait in host memory or on disk (ZeRO-Infinity, arXiv
//! 2104.07857), and where every tensor-parallel rank has the same input, each can keep its part of it (ZeRO-R's
//! partitioned activations, arXiv 1910.02054). An input leaves when its block has computed, and the next ones compute
//! meanwhile; backward fetches each up to two blocks ahead.
//!
//! Cost for an input of S bytes: S to its place and back, S / t where t ranks keep parts, and then one all_gather of S
//! over the tensor axis in backward, which nothing overlaps.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group};
use phalanx_layers::{Activation, AnySaved, Block, BlockRole, Context};
use phalanx_plan::trace::{Axis, Placement, Placements};
use phalanx_tensor::{Category, DeviceError, Memory, Shape, Tensor};

use crate::tiles::{self, Arriving, Leaving};

/// Inputs that leave while later blocks compute. Those on the way to disk may have two halves of a way before them, each
/// during one block.
const BEHIND: usize = 2;

/// Inputs that arrive while backward of a later block computes.
const AHEAD: usize = 2;

/// Options of [`BlockInputs`].
#[derive(Clone, Copy, Debug)]
pub struct InputOptions {
    /// The memory in which inputs wait for backward.
    pub memory: Memory,
    /// True if each tensor-parallel rank keeps a part of the inputs that all of them have.
    pub partition: bool,
}

impl InputOptions {
    /// Inputs stay as their blocks save them.
    pub const ON_DEVICE: InputOptions = InputOptions { memory: Memory::Device, partition: false };
}

/// Memory of the inputs of Transformer blocks between forward and backward.
#[derive(Clone)]
pub struct BlockInputs {
    /// Their memory.
    memory: Memory,
    /// The group of the tensor axis, when each of its ranks keeps a part of every input.
    parts: Option<Arc<dyn Group>>,
}

/// The inputs of one micro-batch that are not where their block left them, by the number of the block in the stage.
#[derive(Default)]
pub(crate) struct Kept {
    inputs: BTreeMap<usize, Input>,
    /// The blocks whose inputs still leave, in order.
    leaving: VecDeque<usize>,
}

/// The input of a block.
struct Input {
    place: InputState,
    /// As the block received it.
    shape: Shape,
    placements: Placements,
}

enum InputState {
    Leaving(Leaving),
    There(Tensor),
    Arriving(Arriving),
    /// Placeholder while a function changes the state.
    Moving,
}

impl BlockInputs {
    /// The inputs of a rank with this group of the tensor axis.
    pub fn new(options: InputOptions, tensor: &Arc<dyn Group>) -> BlockInputs {
        let InputOptions { memory, partition } = options;
        BlockInputs { memory, parts: partition.then(|| Arc::clone(tensor)) }
    }

    fn is_at_home(&self) -> bool {
        self.memory == Memory::Device && self.parts.is_none()
    }

    /// Block `number` has computed: its input leaves, unless something else than the block holds it.
    pub(crate) fn leave(
        &self,
        cx: &Context,
        kept: &mut Kept,
        block: &Block,
        saved: &mut AnySaved,
        number: usize,
    ) -> Result<(), CollectiveError> {
        if self.is_at_home() || block.role != BlockRole::Transformer {
            return Ok(());
        }
        let Some(input) = take(block, saved) else { return Ok(()) };
        let (shape, placements) = (input.shape(), cx.device.placements(input.view()));
        let part = self.part(cx, input);
        let place = match self.store(cx, &part) {
            None => InputState::There(part),
            Some(stored) => {
                let all = 0..part.shape().elements();
                InputState::Leaving(tiles::send(cx.device, part, all, vec![stored], 0))
            }
        };
        for index in 0..kept.leaving.len() {
            kept.place(kept.leaving[index]).change(|place| match place {
                InputState::Leaving(leaving) => {
                    Ok(InputState::Leaving(tiles::continue_departure(cx.device, leaving)?))
                }
                other => Ok(other),
            })?;
        }
        kept.inputs.insert(number, Input { place, shape, placements });
        kept.leaving.push_back(number);
        self.settle(cx, kept, BEHIND)
    }

    /// Waits until at most `leaving` inputs are on their way out.
    pub(crate) fn settle(
        &self,
        cx: &Context,
        kept: &mut Kept,
        leaving: usize,
    ) -> Result<(), CollectiveError> {
        while kept.leaving.len() > leaving {
            let number = kept.leaving.pop_front().expect("not empty");
            kept.place(number).change(|place| match place {
                InputState::Leaving(leaving) => {
                    Ok(InputState::There(only(tiles::depart(cx.device, leaving)?)))
                }
                other => Ok(other),
            })?;
        }
        Ok(())
    }

    /// Starts to bring back the last inputs before block `before`, in the order in which backward reads them.
    pub(crate) fn fetch(&self, cx: &Context, kept: &mut Kept, before: usize) -> Result<(), CollectiveError> {
        let next: Vec<usize> =
            kept.inputs.range(..before).rev().take(AHEAD).map(|(number, _)| *number).collect();
        for (distance, number) in next.into_iter().enumerate() {
            kept.place(number).change(|place| match place {
                InputState::There(stored) if stored.memory() != Memory::Device => {
                    let all = 0..stored.shape().elements();
                    let arriving = tiles::bring(cx.device, vec![stored], all, Category::Activations);
                    Ok(InputState::Arriving(arriving))
                }
                InputState::Arriving(arriving) if distance == 0 => {
                    Ok(InputState::Arriving(tiles::continue_arrival(cx.device, arriving)?))
                }
                other => Ok(other),
            })?;
        }
        Ok(())
    }

    /// Waits for the input of block `number`, puts it back into what the block saved, and starts to fetch the next.
    pub(crate) fn put_back(
        &self,
        cx: &Context,
        kept: &mut Kept,
        block: &Block,
        saved: &mut AnySaved,
        number: usize,
    ) -> Result<(), CollectiveError> {
        self.fetch(cx, kept, number + 1)?;
        let Some(Input { place, shape, placements }) = kept.inputs.remove(&number) else { return Ok(()) };
        let part = match place {
            InputState::There(part) => part,
            InputState::Arriving(arriving) => tiles::arrive(cx.device, arriving)?.1,
            InputState::Leaving(_) | InputState::Moving => unreachable!("forward waits for what leaves"),
        };
        let input = self.whole(cx, part, shape)?;
        cx.device.place(input.view(), placements);
        let input = Arc::new(input);
        block.layer.each_input(&mut saved.x, &mut saved.own, &mut |place| place.recall(&input));
        self.fetch(cx, kept, number)
    }

    /// This rank's part of an input.
    fn part(&self, cx: &Context, input: Tensor) -> Tensor {
        let Some(group) = &self.parts else { return input };
        let ranks = group.world_size();
        let elements = input.shape().elements() / ranks;
        assert_eq!(elements * ranks, input.shape().elements(), "{input:?} in {ranks} parts");
        let mut part = cx.activation([elements], "block_input.part");
        let start = group.rank() * elements;
        let flat = input.view().reshape([elements * ranks]);
        cx.device.copy(flat.range(start..start + elements), part.view_mut());
        part
    }

    /// The whole input from the parts of all ranks.
    fn whole(&self, cx: &Context, part: Tensor, shape: Shape) -> Result<Tensor, CollectiveError> {
        let Some(group) = &self.parts else { return Ok(part.reshape(shape)) };
        let cut = Placements::REPLICATED.with(Axis::Tensor, Placement::Shard(0));
        cx.device.place(part.view(), cut);
        let whole = cx.activation([shape.elements()], "block_input");
        let (_, whole) = group.all_gather(part, whole).wait()?;
        Ok(whole.reshape(shape))
    }

    /// Memory for a tensor where it stays; None on the device.
    fn store(&self, cx: &Context, part: &Tensor) -> Option<Tensor> {
        let (dtype, shape, category) = (part.dtype(), part.shape(), Category::Activations);
        match self.memory {
            Memory::Device => None,
            Memory::Host => Some(cx.device.alloc_host(dtype, shape, category, "block_input")),
            Memory::Disk => Some(cx.device.alloc_disk(dtype, shape, category, "block_input")),
        }
    }
}

impl Kept {
    fn place(&mut self, number: usize) -> &mut InputState {
        &mut self.inputs.get_mut(&number).expect("an input that is kept").place
    }
}

impl InputState {
    fn change(
        &mut self,
        change: impl FnOnce(InputState) -> Result<InputState, DeviceError>,
    ) -> Result<(), CollectiveError> {
        *self = change(std::mem::replace(self, InputState::Moving))?;
        Ok(())
    }
}

fn only(mut tensors: Vec<Tensor>) -> Tensor {
    tensors.pop().expect("one tensor")
}

/// Takes the input of a block out of what it saved, if only the block holds it.
fn take(block: &Block, saved: &mut AnySaved) -> Option<Tensor> {
    let mut input: Option<Activation> = None;
    block.layer.each_input(&mut saved.x, &mut saved.own, &mut |place| input = place.take().or(input.take()));
    Arc::try_unwrap(input?)
        .inspect_err(|shared| {
            block.layer.each_input(&mut saved.x, &mut saved.own, &mut |place| place.recall(shared));
        })
        .ok()
}
