//! Operations: each declares its operands, checks, price and placement rule once.
//!
//! Each operation is a struct of its arguments, declared with `operation!` in one of the files of
//! [`operations`](crate::operations). [`Describe`] states the requirements of a call, its price and its placement rule. From that
//! follow the device (checks), the dry run (trace and placements), the profile (names and prices), and asynchronous execution: a
//! call is data, which can be queued. To add an operation, add it to a file of `operations` and add its kernel to each device
//! that computes.

use phalanx_plan::trace::{Memory, Rate, Site};

use crate::access::Access;
use crate::address::Address;
use crate::arguments::{
    AdamW, Clip, CrossEntropy, Dropout, Epilogue, Gate, Gelu, Heads, Layout, Lookup, Patches, Positions,
    RowNorm, RowPositions, Sgd, Weight, WholeSums,
};
use crate::preference::Preference;
use crate::record::Recorder;
use crate::rotary::Rotary;
use crate::view::{View, ViewMut};

/// Price of one call, on any device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Price {
    /// Floating-point operations of matrix products; 0 if only the bytes count.
    pub flops: u64,
    /// Bytes read and written at least.
    pub bytes: u64,
    /// The rate of the machine that limits the call.
    pub rate: Rate,
}

impl Price {
    /// A kernel that is limited by the bytes that it reads and writes.
    pub fn bytes(bytes: usize) -> Price {
        Price { flops: 0, bytes: bytes as u64, rate: Rate::Bandwidth }
    }

    /// A copy of `bytes` bytes from one memory to another.
    pub fn copy(memories: [Memory; 2], bytes: usize) -> Price {
        Price { rate: Rate::of_copy(memories), ..Price::bytes(bytes) }
    }

    /// A matrix product of elements of `dtype`.
    pub fn product(dtype: phalanx_plan::trace::DType, flops: usize, bytes: usize) -> Price {
        Price { flops: flops as u64, bytes: bytes as u64, rate: Rate::MatrixProduct(dtype) }
    }
}

/// One tensor that an operation reads or writes.
pub struct Operand<'a> {
    /// Access: read or written.
    pub access: Access,
    /// Its address. A device may replace it, to compute in another mapping of the same memory.
    pub address: &'a mut Address,
    /// Its length.
    pub bytes: usize,
}

/// Something that may hold operands: an argument of an operation, or a whole operation.
pub trait Operands {
    /// Shows every operand to `visit`, in the order of the arguments.
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>));
}

impl Operands for View<'_> {
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
        let bytes = self.bytes();
        visit(Operand { access: Access::Read, address: self.address_mut(), bytes });
    }
}

impl Operands for ViewMut<'_> {
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
        let bytes = self.bytes();
        visit(Operand { access: Access::Write, address: self.address_mut(), bytes });
    }
}

impl<T: Operands> Operands for Option<T> {
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
        if let Some(operands) = self {
            operands.visit(visit);
        }
    }
}

impl<T: Operands, const N: usize> Operands for [T; N] {
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
        self.iter_mut().for_each(|operands| operands.visit(visit));
    }
}

impl Operands for Weight<'_> {
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
        self.matrix.visit(visit);
    }
}

impl Operands for Epilogue<'_> {
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
        self.bias.visit(visit);
        self.residual.visit(visit);
    }
}

impl Operands for WholeSums<'_> {
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
        self.sums.visit(visit);
    }
}

impl Operands for Positions<'_> {
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
        self.table.visit(visit);
    }
}

impl Operands for RowPositions<'_> {
    fn visit(&mut self, visit: &mut dyn FnMut(Operand<'_>)) {
        match self {
            RowPositions::From(_) => {}
            RowPositions::Each(positions) => positions.visit(visit),
        }
    }
}

macro_rules! no_operands {
    ($($type:ty),*) => {
        $(impl Operands for $type {
            fn visit(&mut self, _: &mut dyn FnMut(Operand<'_>)) {}
        })*
    };
}
no_operands!(
    bool,
    f32,
    usize,
    AdamW,
    Clip,
    CrossEntropy,
    Dropout,
    Gate,
    Gelu,
    Heads,
    Layout,
    Lookup,
    Patches,
    Preference,
    Rotary,
    RowNorm,
    Sgd
);

/// Description of an operation, which a device needs before a kernel runs.
pub trait Describe: Operands {
    /// The operation's name, in traces, profiles and tables.
    const NAME: &'static str;

    /// The name of this call, if calls of one type have several.
    fn name(&self) -> &'static str {
        Self::NAME
    }

    /// Stops the program, at the caller, when shapes or element types do not fit: that is a programmer's error.
    #[track_caller]
    fn check(&self);

    /// Price of the call. Called after [`Describe::check`].
    fn price(&self) -> Price;

    /// Returns whether the operation writes zeros, which fit every placement: a dry run then follows it even before anything was
    /// placed.
    fn marks_zero(&self) -> bool {
        false
    }

    /// In a dry run whose tensors are placed on a mesh: checks how the operands are placed, and marks the results.
    fn follow(&self, recorder: &Recorder, site: Site);
}

/// Declares an operation: a struct of its arguments, whose operands can be visited.
macro_rules! operation {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        pub struct $name<'a> {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl $crate::operation::Operands for $name<'_> {
            fn visit(&mut self, visit: &mut dyn FnMut($crate::operation::Operand<'_>)) {
                $($crate::operation::Operands::visit(&mut self.$field, visit);)*
            }
        }
    };
}

pub(crate) use operation;
