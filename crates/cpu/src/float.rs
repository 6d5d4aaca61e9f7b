//! The element types that kernels compute with: f32, bf16 and f16, each read and written as f32.

use phalanx_simd::Number;
use phalanx_tensor::Element;

/// An element type of tensors that vectors load and store as f32.
pub(crate) trait Float: Number + Element {}

impl<T: Number + Element> Float for T {}

/// Runs `body` with `T` the Rust type of a float `dtype`: `by_float!(x.dtype(), T => f::<T>(..))`.
macro_rules! by_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            phalanx_plan::trace::DType::F32 => {
                type $T = f32;
                $body
            }
            phalanx_plan::trace::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            phalanx_plan::trace::DType::F16 => {
                type $T = half::f16;
                $body
            }
            other => panic!("kernels compute with f32, bf16 and f16, not with {}", other.name()),
        }
    };
}
pub(crate) use by_float;
