//! The device that computes nothing.
//!
//! Its arena hands out no memory and its kernels do nothing: running a step on it records what a
//! real device would do. Everything that a kernel call must satisfy is checked before it gets here.

use crate::buffer::{View, ViewMut};
use crate::kernels::{
    AdamW, Clip, CrossEntropy, Dropout, Epilogue, Gelu, Heads, Kernels, Layout, Lookup, Positions, Sgd,
    Weight,
};

/// See the module's head. `threads` is the real device's, so that whatever depends on it is planned.
pub struct Meta {
    /// Threads of the device that is stood in for.
    pub threads: usize,
}

impl Kernels for Meta {
    fn name(&self) -> &'static str {
        "meta"
    }
    fn threads(&self) -> usize {
        self.threads
    }
    fn upload(&self, _: &[u8], _: ViewMut) {}
    fn download(&self, _: View, _: &mut [u8]) {}
    fn fill(&self, _: ViewMut, _: f32) {}
    fn copy(&self, _: View, _: ViewMut) {}
    fn convert(&self, _: View, _: ViewMut) {}
    fn add(&self, _: View, _: ViewMut) {}
    fn linear(&self, _: View, _: Weight, _: Epilogue, _: ViewMut) {}
    fn linear_gelu(&self, _: View, _: Weight, _: View, _: Gelu, _: ViewMut, _: ViewMut) {}
    fn linear_input_gradient(&self, _: View, _: Weight, _: ViewMut, _: bool) {}
    fn linear_weight_gradient(&self, _: View, _: View, _: ViewMut, _: Layout, _: bool) {}
    fn bias_gradient(&self, _: View, _: ViewMut, _: bool) {}
    fn layer_norm(&self, _: View, _: View, _: View, _: f32, _: ViewMut, _: ViewMut, _: ViewMut) {}
    fn layer_norm_backward(
        &self,
        _: View,
        _: View,
        _: View,
        _: View,
        _: View,
        _: ViewMut,
        _: bool,
        _: ViewMut,
        _: ViewMut,
        _: bool,
    ) {
    }
    fn gelu(&self, _: View, _: Gelu, _: ViewMut) {}
    fn gelu_backward(&self, _: View, _: Gelu, _: ViewMut, _: ViewMut, _: bool) {}
    fn dropout(&self, _: View, _: Dropout, _: Option<View>, _: ViewMut) {}
    fn attention(&self, _: View, _: Heads, _: Option<Dropout>, _: ViewMut, _: ViewMut) {}
    fn attention_backward(
        &self,
        _: View,
        _: View,
        _: View,
        _: View,
        _: Heads,
        _: Option<Dropout>,
        _: ViewMut,
    ) {
    }
    fn embedding(&self, _: View, _: Lookup, _: View, _: Option<Positions>, _: bool, _: ViewMut) {}
    fn add_positions(&self, _: Positions, _: ViewMut) {}
    fn embedding_backward(&self, _: View, _: Lookup, _: View, _: ViewMut, _: bool) {}
    fn position_gradient(&self, _: View, _: usize, _: usize, _: ViewMut, _: bool) {}
    fn vocabulary_statistics(
        &self,
        _: View,
        _: Weight,
        _: Option<View>,
        _: View,
        _: usize,
        _: Option<ViewMut>,
        _: ViewMut,
        _: ViewMut,
    ) {
    }
    fn logits_statistics(&self, _: ViewMut, _: View, _: usize, _: ViewMut, _: ViewMut) {}
    fn vocabulary_loss(
        &self,
        _: View,
        _: View,
        _: View,
        _: usize,
        _: usize,
        _: CrossEntropy,
        _: Option<ViewMut>,
        _: ViewMut,
        _: bool,
    ) {
    }
    fn scaled(&self, _: View, _: f32, _: ViewMut) {}
    fn adamw(&self, _: AdamW, _: ViewMut, _: View, _: ViewMut, _: ViewMut, _: View, _: Option<ViewMut>) {}
    fn sgd(&self, _: Sgd, _: ViewMut, _: View, _: ViewMut, _: View, _: Option<ViewMut>) {}
    fn block_squares(&self, _: View, _: ViewMut) {}
    fn tree_sum(&self, _: View, _: ViewMut) {}
    fn norm(&self, _: View, _: Clip, _: ViewMut, _: ViewMut) {}
    fn count_non_finite(&self, _: View, _: ViewMut) {}
}
