//! Buffers and tensors.
//!
//! A [`Buffer`] owns one allocation of an arena and gives it back when dropped. A [`Tensor`] is a
//! buffer with a shape; [`View`] and [`ViewMut`] borrow it.

use std::sync::Arc;

use phalanx_plan::trace::{Category, DType, Memory, Site};

use crate::access::Access;
use crate::arena::{Allocation, Arena};
use crate::flights::InFlight;
use crate::shape::Shape;
use crate::view::{View, ViewMut};

/// One allocation of an arena, owned.
pub struct Buffer {
    arena: Arc<Arena>,
    allocation: Allocation,
}

impl Buffer {
    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.allocation.bytes
    }

    /// The memory in which it lies.
    pub fn memory(&self) -> Memory {
        self.arena.memory()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.arena.free(&self.allocation);
    }
}

/// A contiguous, row-major tensor that owns its memory.
pub struct Tensor {
    buffer: Buffer,
    dtype: DType,
    shape: Shape,
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({}, {:?})", self.dtype.name(), self.shape)
    }
}

impl Arena {
    /// Takes memory for a tensor.
    pub(crate) fn alloc(
        self: &Arc<Self>,
        dtype: DType,
        shape: Shape,
        category: Category,
        name: &'static str,
        site: Site,
    ) -> Tensor {
        let allocation = self.take(dtype.bytes_of(shape.elements()), category, name, site);
        Tensor { buffer: Buffer { arena: Arc::clone(self), allocation }, dtype, shape }
    }
}

impl Tensor {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Extents as an array of exactly `N`.
    #[track_caller]
    pub fn dims<const N: usize>(&self) -> [usize; N] {
        self.shape.dims()
    }

    /// The same memory with other extents; the number of elements must not change.
    #[track_caller]
    pub fn reshape(mut self, shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        assert_eq!(shape.elements(), self.shape.elements(), "reshape {:?} to {shape:?}", self.shape);
        self.shape = shape;
        self
    }

    /// The same memory, flat, as the elements that copies and messages have ([`DType::moved`]).
    pub fn moved(self) -> Tensor {
        let view = self.view().typed(self.dtype.moved());
        let (dtype, shape) = (view.dtype(), view.shape());
        Tensor { dtype, shape, ..self }
    }

    /// The memory in which it lies.
    pub fn memory(&self) -> Memory {
        self.buffer.memory()
    }

    /// Says that work in flight (a copy, a collective) reads or writes the tensor, until what is returned is
    /// dropped: freeing it before that, or allocating over it, stops the run and names both call sites.
    pub fn in_flight(&self, access: Access, by: &'static str, site: Site) -> InFlight {
        let view = self.view();
        self.buffer.arena.in_flight(view.address(), view.bytes(), access, by, site)
    }

    /// A shared view, for operations that read the tensor.
    pub fn view(&self) -> View<'_> {
        View::at(self.buffer.allocation.address, self.dtype, self.shape)
    }

    /// A unique view, for operations that write the tensor.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut::at(self.buffer.allocation.address, self.dtype, self.shape)
    }
}
