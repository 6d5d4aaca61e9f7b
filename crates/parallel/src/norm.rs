//! The norm of all gradients of a model, wherever they are.
//!
//! Each parameter is counted once: of replicas over data, tensor and pipeline one rank answers. A rank gives one number
//! a parameter (of a part of one: for each tensor-parallel rank), the sum of squares along a fixed tree; these
//! numbers are exchanged and added along a fixed tree again. So neither ZeRO stage, chunk size, schedule nor the cut
//! into stages changes a bit. Price: 8 bytes a parameter tensor and tensor-parallel rank.

use phalanx_collectives::{CollectiveError, Group};
use phalanx_tensor::{Category, Clip, DType, Device, Tensor, View};
use phalanx_trace::{Placement, Placements};

use crate::stage::Stage;

/// The norm, and what gradients are multiplied by.
pub struct GradientNorm {
    /// `[parameters * slots]` f64
    sums: Option<Tensor>,
    slots: usize,
    norm: Tensor,
    factor: Tensor,
}

impl GradientNorm {
    /// For a model of `parameters` tensors, each in at most `slots` parts.
    pub fn new(device: &Device, parameters: usize, slots: usize) -> GradientNorm {
        let sums =
            device.alloc(DType::F64, [parameters * slots], Category::Workspace, "norm.squares_of_parameters");
        let scalar = |name| device.alloc(DType::F32, [1], Category::Workspace, name);
        GradientNorm { sums: Some(sums), slots, norm: scalar("norm"), factor: scalar("norm.clip_factor") }
    }

    /// Computes both; they stay on the device, the same on every rank of `world`. `slot`: this rank's place on the
    /// tensor axis.
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
        let mut sums = self.sums.take().expect("only here and back below");
        device.fill(sums.view_mut(), 0.0);
        for stage in stages {
            stage.zero.squares(&mut sums, self.slots, slot)?;
        }
        if world.world_size() > 1 {
            // Every rank has its part of the numbers, and zeros for the rest.
            let axes = world.axes().iter();
            let placements = axes.fold(Placements::REPLICATED, |p, axis| p.with(*axis, Placement::Partial));
            device.place(sums.view(), placements);
        }
        let sums = world.all_reduce(sums).wait()?;
        device.norm(sums.view(), clip, self.norm.view_mut(), self.factor.view_mut());
        self.sums = Some(sums);
        Ok(())
    }

    /// Before clipping and without the loss scale, `[1]`.
    pub fn norm(&self) -> View<'_> {
        self.norm.view()
    }

    /// What gradients are multiplied by, `[1]`.
    pub fn factor(&self) -> View<'_> {
        self.factor.view()
    }
}
