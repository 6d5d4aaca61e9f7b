//! Every kernel in every element type against PyTorch, on every instruction set, on 1 and 3 threads and on the
//! simulated accelerator.
//!
//! The files in `tests/goldens` hold inputs, what PyTorch gives from them in f64, and by how much a right
//! kernel may miss that before it rounds its output. `tools/golden_kernels.py` makes them and says where the
//! tolerances come from.

mod attention;
mod case;
mod cross_entropy;
mod embedding;
mod images;
mod layer_norm;
mod linear;
mod optimizers;
mod pointwise;

use phalanx_tensor::DType;

/// One test per kernel and type.
macro_rules! in_every_type {
    ($($family:ident::$test:ident),+ $(,)?) => {
        in_every_type!(@ in_f32 F32 $($family::$test),+);
        in_every_type!(@ in_bf16 BF16 $($family::$test),+);
        in_every_type!(@ in_f16 F16 $($family::$test),+);
    };
    (@ $module:ident $dtype:ident $($family:ident::$test:ident),+) => {
        mod $module {
            $(#[test]
            fn $test() {
                super::$family::$test(super::DType::$dtype);
            })+
        }
    };
}

in_every_type!(
    linear::linear,
    linear::linear_gelu,
    linear::linear_input_gradient,
    linear::linear_weight_gradient,
    linear::bias_gradient,
    layer_norm::layer_norm,
    layer_norm::layer_norm_backward,
    pointwise::gelu,
    pointwise::gelu_backward,
    pointwise::convert,
    pointwise::add,
    attention::attention,
    attention::attention_backward,
    embedding::embedding,
    embedding::embedding_backward,
    images::convolution,
    images::convolution_backward,
    images::pooling,
    cross_entropy::loss,
    cross_entropy::loss_and_gradients,
    optimizers::adamw,
    optimizers::sgd,
    optimizers::norm,
    optimizers::count_non_finite,
);
