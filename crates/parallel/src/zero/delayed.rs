//! Updates that the host computes during the next step (ZeRO-Offload's one-step delayed parameter update, arXiv 2101.06840).
//!
//! At the end of step t, the update of step t - 1 is over: its parameters go to the device. Then the update of step t starts,
//! and runs beside forward and backward of step t + 1, which so compute with parameters that lack one update. Gradients have
//! two places in host memory: the update reads one of them while backward writes the other.
//!
//! The first step has no pending update, but allocates and sends what every other step does. The dry run finishes each update in its
//! own step, which records the same.

use phalanx_collectives::CollectiveError;
use phalanx_plan::ZeroStage;
use phalanx_tensor::{Category, DType, Device, Memory, PendingCopy, PendingHostWork, Tensor, View};

use super::host_update::{TilePart, scaled_on_host};
use super::rules::Rules;
use super::states::{Role, Slot, States};
use super::update::Step;
use super::visits::Tile;
use super::{Map, Zero};

/// Memory of delayed updates beside the states, and the update that runs.
pub(super) struct Delayed {
    /// For each chunk: the gradients of the update that runs, or memory for those of the next step.
    gradients: Vec<Slot>,
    /// For each chunk: the rounded parameters, in host memory.
    parameters: Vec<Slot>,
    /// For each tile of each chunk: memory for the scaled gradient, where the update needs any.
    scaled: Vec<Vec<Option<Tensor>>>,
    /// The tiles of the update that runs, in order. They read a factor, so they are dropped before it.
    running: Vec<PendingHostWork>,
    /// The factors of gradients in host memory, `[1]`: of the update that starts next, and of the one that runs.
    factors: [Option<Tensor>; 2],
}

/// Memory on the device for the parameters of a tile.
enum Window {
    /// They come from host memory.
    Arriving(Box<PendingCopy>),
    /// No update was running. The memory is taken nevertheless, so that all steps are alike.
    Unused(Tensor),
}

impl Delayed {
    /// For the chunks of trained parameters.
    ///
    /// # Panics
    /// When a chunk's gradients or optimizer states lie elsewhere than in host memory, or its parameters outside of device
    /// memory.
    pub(super) fn new(
        device: &Device,
        map: &Map,
        (rules, states): (&Rules, &States),
        (stage, compute): (ZeroStage, DType),
    ) -> Delayed {
        let (mut gradients, mut parameters, mut scaled) = (Vec::new(), Vec::new(), Vec::new());
        for (c, chunk) in states.chunks[..map.trained].iter().enumerate() {
            let of_tile = |tile| scaled_on_host(device, (map, rules), stage, (c, tile));
            scaled.push(states.tiles(c).iter().map(of_tile).collect());
            let in_host = chunk.slots.iter().all(|slot| slot.memory == Memory::Host);
            let roles = [Role::Master, Role::Gradients, Role::Parameters].map(|role| chunk.position(role));
            let [Some(_), Some(stored), None] = roles.map(|role| role.filter(|_| in_host)) else {
                panic!("a delayed update needs master weights and gradients in host memory");
            };
            gradients.push(chunk.slots[stored].twin(device));
            parameters.push(states.in_host_memory(chunk, compute));
        }
        let factor = || Some(device.alloc_host(DType::F32, [1], Category::Workspace, "update.factor"));
        Delayed { gradients, parameters, scaled, factors: [factor(), factor()], running: Vec::new() }
    }
}

impl Zero {
    /// Finishes the update that runs, and starts that of this step.
    pub(super) fn update_delayed(&mut self, step: Step, factor: View) -> Result<(), CollectiveError> {
        let delayed = self.delayed.as_mut().expect("updates are delayed");
        let mut here = self.device.alloc(DType::F32, [1], Category::Workspace, "update.factor");
        self.device.copy(factor, here.view_mut());
        let there = delayed.factors[0].take().expect("put back below");
        let (_, factor) = self.device.copy_to_host(here, there).wait()?;
        delayed.factors[0] = Some(factor);
        if self.device.is_meta() {
            self.begin_delayed(step);
            return self.finish_delayed();
        }
        self.finish_delayed()?;
        self.begin_delayed(step);
        Ok(())
    }

    /// Waits for an update that runs, if updates are delayed, and starts to send its parameters to the other ranks. Those of the
    /// update before it may still be on their way, if nothing has used them since the step: they arrive first.
    ///
    /// # Errors
    /// As for [`Zero::update`].
    pub fn finish_update(&mut self) -> Result<(), CollectiveError> {
        if self.delayed.is_none() {
            return Ok(());
        }
        self.settle()?;
        if self.device.is_meta() {
            self.begin_delayed(Step { number: 1, lr: 0.0, applies: true });
        }
        self.finish_delayed()
    }

    /// Starts an update, which runs until it is finished.
    fn begin_delayed(&mut self, step: Step) {
        let mut delayed = self.delayed.take().expect("updates are delayed");
        delayed.factors.reverse();
        let factor = delayed.factors[1].as_ref().expect("both factors are in their places");
        let keeps_gradients = self.device.is_meta();
        for c in 0..self.map.trained {
            for (t, range) in self.states.tiles(c).into_iter().enumerate() {
                let (mut parts, mut tensors) = (Vec::new(), Vec::new());
                for (number, slot) in self.states.chunks[c].slots.iter_mut().enumerate() {
                    let next = match slot.role {
                        Role::Gradients if !keeps_gradients => delayed.gradients[c].tiles[t].take(),
                        _ => None,
                    };
                    let tensor = std::mem::replace(&mut slot.tiles[t], next);
                    tensors.push(tensor.expect("the last update is over"));
                    parts.push((TilePart::Slot(number), None));
                }
                tensors.push(delayed.parameters[c].tiles[t].take().expect("the last update is over"));
                parts.push((TilePart::Parameters, None));
                if let Some(scaled) = delayed.scaled[c][t].take() {
                    tensors.push(scaled);
                    parts.push((TilePart::Scaled, None));
                }
                delayed.running.push(self.device.run_on_host("delayed_update", tensors, |host, tensors| {
                    self.issue_on_host(host, ((c, t), &range), (&parts, tensors), (step, factor.view()));
                }));
            }
        }
        self.delayed = Some(delayed);
    }

    /// Waits for the update that runs, if there is one; its parameters go to the device and to the other ranks.
    fn finish_delayed(&mut self) -> Result<(), CollectiveError> {
        let mut delayed = self.delayed.take().expect("updates are delayed");
        let mut running = std::mem::take(&mut delayed.running).into_iter();
        for c in 0..self.map.trained {
            let mut last: Option<(Tile, Window)> = None;
            for (t, range) in self.states.tiles(c).into_iter().enumerate() {
                let (compute, elements) = (self.precision.compute, range.len());
                let window = self.device.alloc(compute, [elements], Category::Workspace, "update.window");
                let window = match running.next() {
                    None => Window::Unused(window),
                    Some(work) => {
                        let rounded = self.take_back(&mut delayed, (c, t), work.wait()?);
                        Window::Arriving(Box::new(self.device.copy_to_device(rounded, window)))
                    }
                };
                if let Some((tile, window)) = last.replace(((c, t), window)) {
                    self.land(&mut delayed, tile, window)?;
                }
            }
            if let Some((tile, window)) = last {
                self.land(&mut delayed, tile, window)?;
            }
            self.publish_updated(c)?;
        }
        self.delayed = Some(delayed);
        Ok(())
    }

    /// Puts the tensors of an update back into their places; returns the rounded parameters.
    fn take_back(&mut self, delayed: &mut Delayed, (c, t): Tile, tensors: Vec<Tensor>) -> Tensor {
        let keeps_gradients = self.device.is_meta();
        let mut tensors = tensors.into_iter();
        for slot in &mut self.states.chunks[c].slots {
            let place = match slot.role {
                Role::Gradients if !keeps_gradients => &mut delayed.gradients[c].tiles[t],
                _ => &mut slot.tiles[t],
            };
            *place = tensors.next();
        }
        let parameters = tensors.next().expect("the parameters come behind the slots");
        delayed.scaled[c][t] = tensors.next();
        parameters
    }

    /// Waits for the parameters of a tile, and writes them over those of the device.
    fn land(&mut self, delayed: &mut Delayed, (c, t): Tile, window: Window) -> Result<(), CollectiveError> {
        let (rounded, window) = match window {
            Window::Arriving(pending) => pending.wait()?,
            Window::Unused(memory) => {
                drop(memory);
                return Ok(());
            }
        };
        delayed.parameters[c].tiles[t] = Some(rounded);
        let range = self.states.tiles(c).swap_remove(t);
        self.overwrite_parameters(c, &range, &window);
        Ok(())
    }
}
