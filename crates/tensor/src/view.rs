//! Views: borrowed tensors.
//!
//! Kernels take [`View`]s (shared, read) and [`ViewMut`]s (unique, written), whose lifetimes are checked by the compiler
//! like those of slices. On `Meta` a view has a shape and no memory.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_plan::trace::DType;

use crate::address::Address;
use crate::shape::Shape;

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

impl<'a> View<'a> {
    /// A view of the memory at `address`, which is valid for `'a`.
    pub(crate) fn at(address: Address, dtype: DType, shape: Shape) -> View<'a> {
        View { address, dtype, shape, life: PhantomData }
    }
}

impl<'a> ViewMut<'a> {
    /// A view of the memory at `address`, which is valid and not used otherwise for `'a`.
    pub(crate) fn at(address: Address, dtype: DType, shape: Shape) -> ViewMut<'a> {
        ViewMut { address, dtype, shape, life: PhantomData }
    }
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
                self.dtype.bytes_of(self.elements())
            }

            /// Its address. Only its device may follow it.
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

            /// The same memory, flat, as elements of another type: blocks as words, and words as blocks.
            #[track_caller]
            pub fn typed(self, dtype: DType) -> $view<'a> {
                if dtype == self.dtype {
                    return self;
                }
                let elements = self.bytes() / dtype.block_bytes() * dtype.block();
                assert_eq!(dtype.bytes_of(elements), self.bytes(), "{self:?} as {}", dtype.name());
                $view { address: self.address, dtype, shape: Shape::from([elements]), life: PhantomData }
            }

            /// A flat piece: elements `range` of the row-major order.
            #[track_caller]
            pub fn range(self, range: Range<usize>) -> $view<'a> {
                assert!(range.start <= range.end && range.end <= self.elements(), "{range:?} of {self:?}");
                $view {
                    address: self.address.add(self.dtype.bytes_of(range.start)),
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

/// Numbers that are computed with as f32.
trait Float: Element {
    fn to_f32(self) -> f32;
    fn of_f32(number: f32) -> Self;
}

macro_rules! float {
    ($($type:ty: $to:expr, $of:expr;)*) => {
        $(impl Float for $type {
            fn to_f32(self) -> f32 {
                $to(self)
            }

            fn of_f32(number: f32) -> $type {
                $of(number)
            }
        })*
    };
}
float! {
    f32: std::convert::identity, std::convert::identity;
    half::bf16: half::bf16::to_f32, half::bf16::from_f32;
    half::f16: half::f16::to_f32, half::f16::from_f32;
}

impl View<'_> {
    /// Copies as many elements as `out` has, from element `start` on, of f32, bf16 or f16: for kernels of host code.
    #[track_caller]
    pub fn read_f32(&self, start: usize, out: &mut [f32]) {
        fn each<T: Float>(from: &[T], out: &mut [f32]) {
            out.iter_mut().zip(from).for_each(|(out, from)| *out = from.to_f32());
        }
        let here = self.range(start..start + out.len());
        match self.dtype {
            DType::F32 => out.copy_from_slice(here.as_slice()),
            DType::BF16 => each(here.as_slice::<half::bf16>(), out),
            DType::F16 => each(here.as_slice::<half::f16>(), out),
            other => panic!("expected f32, bf16 or f16, got {}", other.name()),
        }
    }
}

impl ViewMut<'_> {
    /// Overwrites as many elements as `from` has, from element `start` on, of f32, bf16 or f16; rounds to nearest even.
    #[track_caller]
    pub fn write_f32(&mut self, start: usize, from: &[f32]) {
        fn each<T: Float>(to: &mut [T], from: &[f32]) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = T::of_f32(*from));
        }
        let dtype = self.dtype;
        let here = self.reborrow().range(start..start + from.len());
        match dtype {
            DType::F32 => here.into_slice::<f32>().copy_from_slice(from),
            DType::BF16 => each(here.into_slice::<half::bf16>(), from),
            DType::F16 => each(here.into_slice::<half::f16>(), from),
            other => panic!("expected f32, bf16 or f16, got {}", other.name()),
        }
    }
}
