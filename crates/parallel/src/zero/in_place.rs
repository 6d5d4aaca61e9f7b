//! Gradients in the place of parameters: what an update does with them, and what undoes them when it is skipped.

use std::ops::Range;

use phalanx_tensor::{Category, Tensor};

use super::Zero;
use super::states::Role;
use super::update::stepped;

impl Zero {
    /// The elements of this rank's part of a chunk that an update works on at a time. Where gradients lie in the place of
    /// parameters, a buffer holds those of a tile.
    pub(super) fn update_tiles(&self, c: usize) -> Vec<Range<usize>> {
        match self.gradients.is_in_parameters(c) {
            true => self.states.chunks[c].tiles.clone(),
            false => self.states.tiles(c),
        }
    }

    /// A copy of elements `range` of a chunk's gradients that lie in the place of its parameters, which the update
    /// overwrites; None for gradients that have memory of their own.
    pub(super) fn gradients_from_place(&self, c: usize, range: &Range<usize>) -> Option<Tensor> {
        if !self.gradients.is_in_parameters(c) {
            return None;
        }
        let (dtype, name) = (self.gradients.accumulate(), "gradient_window");
        let mut window = self.device.alloc(dtype, [range.len()], Category::Workspace, name);
        self.device.copy(self.parameters.part(&self.map, c, range), window.view_mut());
        Some(window)
    }

    /// Writes the parameters back that gradients have overwritten, from the master weights: after a step that is not
    /// applied.
    pub fn restore_parameters(&mut self) {
        for c in (0..self.map.trained).filter(|c| self.gradients.is_in_parameters(*c)) {
            let stepped = stepped(&self.map, self.options.stage, c);
            let stored = &self.states.chunks[c];
            let master = &stored.slots[stored.position(Role::Master).expect("parameters of 16 bits")];
            let master = master.tiles[0].as_ref().expect("master weights in device memory never travel");
            self.device.convert(master.view(), self.parameters.part_mut(&self.map, c, &stepped));
        }
    }
}
