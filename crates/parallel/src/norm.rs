//! The norm of all gradients of a model, over all ranks.
//!
//! Each parameter counts once: where several ranks have a copy, one of them counts it. A rank computes one number for
//! each parameter, or part of a parameter: the sum of squares, along a fixed tree. The ranks exchange these numbers
//! and add them along another fixed tree. So ZeRO stage, chunk size, schedule and the cut into stages do not change a
//! bit. Cost: 8 bytes for each parameter tensor and tensor-parallel rank.

use phalanx_collectives::{CollectiveError, Group};
use phalanx_plan::trace::{Placement, Placements};
use phalanx_tensor::{Category, Clip, DType, Device, Tensor, View};

use crate::stage::Stage;

/// The gradient norm, and the factor that clips gradients and removes the loss scale.
pub struct GradientNorm {
    /// `[parameters * slots]` f64
    sums: Option<Tensor>,
    slots: usize,
    norm: Tensor,
    factor: Tensor,
}

impl GradientNorm {
    /// Allocates memory for a model of `parameters` tensors, each split into at most `slots` parts.
    pub fn new(device: &Device, parameters: usize, slots: usize) -> GradientNorm {
        let sums =
            device.alloc(DType::F64, [parameters * slots], Category::Workspace, "norm.squares_of_parameters");
        let scalar = |name| device.alloc(DType::F32, [1], Category::Workspace, name);
        GradientNorm { sums: Some(sums), slots, norm: scalar("norm"), factor: scalar("norm.clip_factor") }
    }

    /// Computes norm and factor. They stay on the device and are the same on every rank of `world`. `slot` is this
    /// rank's number on the tensor axis.
    ///
    /// # Errors
    /// When an exchange fails.
    pub fn compute(
        &mut self,
        device: &Device,
        stages: &mut [Stage],
        slot: usize,
        world: &dyn Group,
        clip: Clip,
    ) -> Result<(), CollectiveError> {
        let mut sums = self.sums.take().expect("taken only here, and put back below");
        device.fill(sums.view_mut(), 0.0);
        for stage in stages {
            stage.zero.squares(&mut sums, self.slots, slot)?;
        }
        if world.world_size() > 1 {
            // Every rank has some of the sums, and zeros for the others.
            let axes = world.axes().iter();
            let placements = axes.fold(Placements::REPLICATED, |p, axis| p.with(*axis, Placement::Partial));
            device.place(sums.view(), placements);
        }
        let sums = world.all_reduce(sums).wait()?;
        device.norm(sums.view(), clip, self.norm.view_mut(), self.factor.view_mut());
        self.sums = Some(sums);
        Ok(())
    }

    /// The norm before clipping and without the loss scale, `[1]`.
    pub fn norm(&self) -> View<'_> {
        self.norm.view()
    }

    /// The factor by which the update multiplies gradients, `[1]`.
    pub fn factor(&self) -> View<'_> {
        self.factor.view()
    }
}
