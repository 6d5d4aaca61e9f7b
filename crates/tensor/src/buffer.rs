//! Buffers, tensors and views.
//!
//! A [`Buffer`] owns one allocation of an arena and gives it back when dropped. A [`Tensor`] is a
//! buffer with a shape. Kernels take [`View`]s (shared, read) and [`ViewMut`]s (unique, written),
//! whose lifetimes are checked by the compiler like those of slices. On `Meta` a view has a shape and
//! no memory.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use phalanx_trace::{DType, Memory, Site};

use crate::access::Access;
use crate::arena::{Allocation, Arena};
use crate::flights::InFlight;
use crate::shape::Shape;

/// One allocation of an arena, owned.
pub struct Buffer {
    arena: Arc<Arena>,
    allocation: Allocation,
}

impl Buffer {
    pub(crate) fn new(arena: Arc<Arena>, allocation: Allocation) -> Buffer {
        Buffer { arena, allocation }
    }

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

impl Tensor {
    pub(crate) fn new(buffer: Buffer, dtype: DType, shape: Shape) -> Tensor {
        assert!(shape.elements() * dtype.bytes() <= buffer.bytes());
        Tensor { buffer, dtype, shape }
    }

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

    /// To read.
    pub fn view(&self) -> View<'_> {
        View {
            address: self.buffer.allocation.address,
            dtype: self.dtype,
            shape: self.shape,
            life: PhantomData,
        }
    }

    /// To write.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut {
            address: self.buffer.allocation.address,
            dtype: self.dtype,
            shape: self.shape,
            life: PhantomData,
        }
    }
}

/// Where memory is: an address that only its device may follow, an offset on disk, or on `Meta` which piece of what it
/// would be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address(pub(crate) Location);

/// What an [`Address`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Location {
    Memory(std::ptr::NonNull<u8>),
    /// Bytes from the start of the disk memory.
    Disk(u64),
    /// As in [`Spot`]; its fields, so that an address is two words.
    Nowhere {
        allocation: u32,
        offset: u64,
    },
}

const _: () = assert!(size_of::<Address>() == 16);

/// A place in memory that a dry run has not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Spot {
    /// Number of the allocation in the trace.
    pub(crate) allocation: u32,
    /// Bytes from its start.
    pub(crate) offset: u64,
}

// SAFETY: an address is a number; the views that carry it keep the borrow rules.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    pub(crate) fn memory(at: std::ptr::NonNull<u8>) -> Address {
        Address(Location::Memory(at))
    }

    pub(crate) fn nowhere(allocation: u32) -> Address {
        Address(Location::Nowhere { allocation, offset: 0 })
    }

    pub(crate) fn on_disk(offset: u64) -> Address {
        Address(Location::Disk(offset))
    }

    fn add(self, bytes: usize) -> Address {
        Address(match self.0 {
            // SAFETY: every caller checks that the offset stays inside the allocation.
            Location::Memory(p) => Location::Memory(unsafe { p.add(bytes) }),
            Location::Disk(offset) => Location::Disk(offset + bytes as u64),
            Location::Nowhere { allocation, offset } => {
                Location::Nowhere { allocation, offset: offset + bytes as u64 }
            }
        })
    }

    /// The real address; None on disk and on `Meta`.
    pub(crate) fn real(self) -> Option<std::ptr::NonNull<u8>> {
        match self.0 {
            Location::Memory(p) => Some(p),
            Location::Disk(_) | Location::Nowhere { .. } => None,
        }
    }

    /// The offset in the disk memory; None elsewhere.
    pub fn disk_offset(self) -> Option<u64> {
        match self.0 {
            Location::Disk(offset) => Some(offset),
            Location::Memory(_) | Location::Nowhere { .. } => None,
        }
    }

    /// The place in a dry run; None on a device with memory.
    pub(crate) fn spot(self) -> Option<Spot> {
        match self.0 {
            Location::Memory(_) | Location::Disk(_) => None,
            Location::Nowhere { allocation, offset } => Some(Spot { allocation, offset }),
        }
    }

    /// A number that orders addresses: two ranges of one rank overlap exactly if their numbers do. On a device with memory
    /// it has 64 bits.
    pub fn number(self) -> u128 {
        match self.0 {
            Location::Memory(p) => p.as_ptr().addr() as u128,
            // Above all addresses of a process.
            Location::Disk(offset) => (1 << 63) | u128::from(offset),
            Location::Nowhere { allocation, offset } => (u128::from(allocation) << 64) | u128::from(offset),
        }
    }

    /// The address so many bytes further on, or back, in another mapping of the same memory; unchanged on disk and on
    /// `Meta`.
    #[must_use]
    pub fn moved(self, bytes: isize) -> Address {
        match self.0 {
            Location::Memory(p) => {
                let moved = p.as_ptr().wrapping_offset(bytes);
                Address::memory(std::ptr::NonNull::new(moved).expect("a mapping is never at address zero"))
            }
            Location::Disk(_) | Location::Nowhere { .. } => self,
        }
    }

    /// As a raw pointer; null on disk and on `Meta`.
    pub fn as_ptr(self) -> *mut u8 {
        self.real().map_or(std::ptr::null_mut(), |p| p.as_ptr())
    }
}

/// Shared borrow of a contiguous tensor.
#[derive(Clone, Copy)]
pub struct View<'a> {
    address: Address,
    dtype: DType,
    shape: Shape,
    life: PhantomData<&'a [u8]>,
}

/// Unique borrow of a contiguous tensor.
pub struct ViewMut<'a> {
    address: Address,
    dtype: DType,
    shape: Shape,
    life: PhantomData<&'a mut [u8]>,
}

impl std::fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "View({}, {:?})", self.dtype.name(), self.shape)
    }
}

impl std::fmt::Debug for ViewMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ViewMut({}, {:?})", self.dtype.name(), self.shape)
    }
}

/// Rust types whose bits a tensor can hold.
pub trait Element: bytemuck::Pod {
    /// The matching element type.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for f64 {
    const DTYPE: DType = DType::F64;
}
impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}

macro_rules! view_basics {
    ($view:ident) => {
        impl<'a> $view<'a> {
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

            /// Number of elements.
            pub fn elements(&self) -> usize {
                self.shape.elements()
            }

            /// Length in bytes.
            pub fn bytes(&self) -> usize {
                self.elements() * self.dtype.bytes()
            }

            /// Where it lies. Following it is up to the device.
            pub fn address(&self) -> Address {
                self.address
            }

            pub(crate) fn address_mut(&mut self) -> &mut Address {
                &mut self.address
            }

            /// The same memory with other extents.
            #[track_caller]
            pub fn reshape(mut self, shape: impl Into<Shape>) -> $view<'a> {
                let shape = shape.into();
                assert_eq!(shape.elements(), self.shape.elements(), "reshape {:?} to {shape:?}", self.shape);
                self.shape = shape;
                self
            }

            /// A flat piece: elements `range` of the row-major order.
            #[track_caller]
            pub fn range(self, range: Range<usize>) -> $view<'a> {
                assert!(range.start <= range.end && range.end <= self.elements(), "{range:?} of {self:?}");
                $view {
                    address: self.address.add(range.start * self.dtype.bytes()),
                    dtype: self.dtype,
                    shape: Shape::from([range.len()]),
                    life: PhantomData,
                }
            }
        }
    };
}
view_basics!(View);
view_basics!(ViewMut);

impl<'a> View<'a> {
    /// Host memory that is no tensor's, to copy from: whole elements of a type, aligned for it.
    pub fn over_bytes(bytes: &'a [u8], dtype: DType) -> View<'a> {
        let size = dtype.bytes();
        assert!(bytes.len().is_multiple_of(size) && bytes.as_ptr().addr().is_multiple_of(size));
        let address = Address::memory(std::ptr::NonNull::from(bytes).cast());
        View { address, dtype, shape: Shape::from([bytes.len() / size]), life: PhantomData }
    }

    /// The bytes of a tensor in memory that the host addresses.
    pub(crate) fn host_bytes(&self) -> Result<&'a [u8], String> {
        let address = self.address.real().ok_or("the host reads memory alone")?;
        // SAFETY: as in `as_slice`.
        Ok(unsafe { std::slice::from_raw_parts(address.as_ptr(), self.bytes()) })
    }

    /// The elements, on a device whose memory the host addresses.
    #[track_caller]
    pub fn as_slice<T: Element>(&self) -> &'a [T] {
        assert_eq!(T::DTYPE, self.dtype, "elements are {}", self.dtype.name());
        let address = self.address.real().expect("the host reads memory alone: not a disk, nor a dry run");
        // SAFETY: the address and length lie inside one live allocation (checked where the view was
        // made), aligned to 64 bytes plus whole elements; 'a borrows it shared, so nobody writes it.
        // Every bit pattern is a valid T (Pod).
        unsafe { std::slice::from_raw_parts(address.as_ptr().cast::<T>(), self.elements()) }
    }
}

impl<'a> ViewMut<'a> {
    /// Host memory that is no tensor's, to copy into.
    pub fn over<T: Element>(slice: &'a mut [T]) -> ViewMut<'a> {
        let shape = Shape::from([slice.len()]);
        let address = std::ptr::NonNull::from(slice).cast::<u8>();
        ViewMut { address: Address::memory(address), dtype: T::DTYPE, shape, life: PhantomData }
    }

    /// The same memory, shared for reading as long as this borrow lasts.
    pub fn as_view(&self) -> View<'_> {
        View { address: self.address, dtype: self.dtype, shape: self.shape, life: PhantomData }
    }

    /// The same memory, borrowed again for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { address: self.address, dtype: self.dtype, shape: self.shape, life: PhantomData }
    }

    /// The bytes of a tensor in memory that the host addresses.
    pub(crate) fn into_host_bytes(self) -> Result<&'a mut [u8], String> {
        let address = self.address.real().ok_or("the host writes memory alone")?;
        // SAFETY: as in `View::as_slice`; 'a borrows the memory uniquely.
        Ok(unsafe { std::slice::from_raw_parts_mut(address.as_ptr(), self.bytes()) })
    }

    /// The elements, on a device whose memory the host addresses.
    #[track_caller]
    pub fn into_slice<T: Element>(self) -> &'a mut [T] {
        assert_eq!(T::DTYPE, self.dtype, "elements are {}", self.dtype.name());
        let address = self.address.real().expect("the host writes memory alone: not a disk, nor a dry run");
        // SAFETY: as in View::as_slice; 'a borrows the memory uniquely.
        unsafe { std::slice::from_raw_parts_mut(address.as_ptr().cast::<T>(), self.elements()) }
    }

    /// Cuts flat pieces out of the memory: ranges of elements, ascending and disjoint.
    #[track_caller]
    pub fn into_pieces(self, pieces: impl IntoIterator<Item = (Range<usize>, Shape)>) -> Vec<ViewMut<'a>> {
        let mut end = 0;
        let mut out = Vec::new();
        for (range, shape) in pieces {
            assert!(range.start >= end, "pieces must ascend without overlap");
            end = range.end;
            let whole =
                ViewMut { address: self.address, dtype: self.dtype, shape: self.shape, life: PhantomData };
            out.push(whole.range(range).reshape(shape));
        }
        out
    }
}
