//! The operations of a device, described once for all devices (see [`operation`](crate::operation)).
//!
//! One file holds one family. For each operation it has the struct of arguments, its checks, its price, its
//! placement rule, and the method of [`Device`](crate::Device) that callers use.
//!
//! Element types: activations and parameters of a call are all f32, all bf16 or all f16 (the *compute* type);
//! gradients of parameters (dw, db, ...) are f32 or the compute type; row statistics, losses and optimizer
//! states are f32. Kernels compute in f32 (a bf16 product may be exact in its pairs) and round once, when they
//! store. `accumulate = false` means that the old contents are never read.

mod activations;
mod attention;
mod elementwise;
mod embeddings;
mod family;
mod images;
mod magnitudes;
mod normalization;
mod optimizers;
mod own;
mod products;
mod reductions;
mod vocabulary;

use phalanx_plan::trace::DType;

pub use activations::*;
pub use attention::*;
pub use elementwise::*;
pub use embeddings::*;
pub use images::*;
pub use magnitudes::*;
pub use normalization::*;
pub use optimizers::*;
pub use own::*;
pub use products::*;
pub use reductions::*;
pub use vocabulary::*;

use crate::operation::{Operand, Operands};
use crate::view::{View, ViewMut};

macro_rules! operations {
    ($($family:ident,)*) => {
        /// One call of any operation.
        pub enum Operation<'a> {
            $(#[doc = concat!("One of [`", stringify!($family), "`].")] $family($family<'a>),)*
        }

        impl Operation<'_> {
            /// The operation's name.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Operation::$family(operation) => operation.name(),)*
                }
            }
        }

        impl Operands for Operation<'_> {
            fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
                match self {
                    $(Operation::$family(operation) => operation.visit(visit),)*
                }
            }
        }
    };
}
operations!(
    Elementwise,
    Products,
    Normalization,
    Activations,
    Attentions,
    Embeddings,
    Images,
    Magnitudes,
    Vocabulary,
    Optimizers,
    Reductions,
    Own,
);

impl<'a> Operation<'a> {
    /// The same call without the lifetimes of its tensors, to be queued.
    ///
    /// # Safety
    /// The memory of every operand stays valid until the call has run, and is used meanwhile only by calls that a
    /// stream or an event orders before or after it.
    pub unsafe fn detach(self) -> Operation<'static> {
        // SAFETY: only lifetimes change; the caller keeps the memory valid.
        unsafe { std::mem::transmute::<Operation<'a>, Operation<'static>>(self) }
    }
}

#[track_caller]
fn floats(dtypes: [DType; 2]) {
    let float = |d: &DType| matches!(d, DType::F32 | DType::BF16 | DType::F16);
    assert!(dtypes.iter().all(float), "expected f32, bf16 or f16, got {dtypes:?}");
}

#[track_caller]
fn same(dtypes: &[DType]) {
    assert!(dtypes.iter().all(|d| *d == dtypes[0]), "expected one element type, got {dtypes:?}");
}

/// Panics unless both have as many elements of one type.
#[track_caller]
fn alike(x: View, y: View) {
    assert_eq!(x.elements(), y.elements(), "{x:?}, {y:?}");
    same(&[x.dtype(), y.dtype()]);
}

/// A gradient of parameters has f32 elements, or those of the compute type.
#[track_caller]
fn gradient(dw: &ViewMut, compute: DType) {
    assert!([DType::F32, compute].contains(&dw.dtype()), "gradient {dw:?} of a computation in {compute:?}");
}
