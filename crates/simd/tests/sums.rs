//! Sums along the tree that the module describes, element by element, with every instruction set of this machine, bit for
//! bit. Rounding is held against its definition, not against a conversion.

use std::sync::OnceLock;

use half::{bf16, f16};
use phalanx_simd::Isa;
use phalanx_simd::sums::{Element, Partial, SumTree, combine, sum};

/// An element type with its oracle.
trait Tested: Copy {
    const ELEMENT: Element;
    /// The type in which elements are summed.
    type In: Copy + std::ops::Add<Output = Self::In>;
    fn widen(self) -> Self::In;
    fn round(sum: Self::In) -> Self;
    /// A number near `x`.
    fn near(x: f64) -> Self;
    /// Any bits.
    fn of_bits(bits: u64) -> Self;
    /// The bits; all NaNs of f32 and f64 have the same.
    fn bits(self) -> u64;
}

macro_rules! tested {
    ($float:ident, $element:ident, $bits:ident) => {
        impl Tested for $float {
            const ELEMENT: Element = Element::$element;
            type In = $float;
            fn widen(self) -> $float {
                self
            }
            fn round(sum: $float) -> $float {
                sum
            }
            fn near(x: f64) -> $float {
                x as $float
            }
            fn of_bits(bits: u64) -> $float {
                $float::from_bits(bits as $bits)
            }
            fn bits(self) -> u64 {
                // The processor chooses which NaN an addition returns.
                if self.is_nan() { u64::MAX } else { self.to_bits().into() }
            }
        }
    };
    ($half:ident, $element:ident) => {
        impl Tested for $half {
            const ELEMENT: Element = Element::$element;
            type In = f32;
            fn widen(self) -> f32 {
                self.to_f32()
            }
            fn round(sum: f32) -> $half {
                static FINITE: OnceLock<Vec<f64>> = OnceLock::new();
                let bits = |b: u16| $half::from_bits(b);
                let finite = FINITE.get_or_init(|| {
                    (0..).map(bits).take_while(|x| x.is_finite()).map($half::to_f64).collect()
                });
                if sum.is_nan() { $half::NAN } else { bits(nearest(sum, finite)) }
            }
            fn near(x: f64) -> $half {
                $half::from_f64(x)
            }
            fn of_bits(bits: u64) -> $half {
                $half::from_bits(bits as u16)
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    };
}
tested!(f64, F64, u64);
tested!(f32, F32, u32);
tested!(bf16, Bf16);
tested!(f16, F16);

/// Rounding by its definition: the bits of the nearest finite number, with ties to even bits. `finite[bits]` is the
/// value of `bits`. Infinity counts as the number after the largest one.
fn nearest(x: f32, finite: &[f64]) -> u16 {
    let size = f64::from(x).abs();
    let last = finite.len() - 1;
    let next = 2.0 * finite[last] - finite[last - 1];
    let above = finite.partition_point(|y| *y <= size);
    let below = above - 1;
    let ends = finite[below] + finite.get(above).unwrap_or(&next);
    let up = 2.0 * size > ends || 2.0 * size == ends && below % 2 == 1;
    (if up { above } else { below }) as u16 | if x.is_sign_negative() { 1 << 15 } else { 0 }
}

/// The tree that the module describes.
fn tree_of<T: Tested>(x: &[T]) -> T::In {
    match x.len() {
        1 => x[0].widen(),
        n => {
            let (low, high) = x.split_at(n.next_power_of_two() / 2);
            tree_of(low) + tree_of(high)
        }
    }
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect())
}

fn hash(rank: usize, i: usize) -> u64 {
    ((rank * 7919 + i * 104_729 + 12_345) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 7
}

/// Values of very different sizes, so that any other order of additions and any additional rounding changes the bits.
fn sized<T: Tested>(rank: usize, i: usize) -> T {
    let h = hash(rank, i);
    T::near(((h >> 20 & 0xff_ffff) as f64 / 2f64.powi(24) - 0.5) * 10f64.powi((h % 9) as i32 - 4))
}

/// Extreme values of the type: infinity, NaN, the largest and smallest numbers, zeros of both signs.
fn at_the_ends<T: Tested>(rank: usize, i: usize) -> T {
    let ends = 1 << (size_of::<T>() * 8 - 2);
    let h = hash(rank, i);
    let sign = (h & 1) << (size_of::<T>() * 8 - 1);
    let exponent = match T::ELEMENT {
        Element::Bf16 => 7,
        Element::F16 => 10,
        Element::F32 => 23,
        _ => 52,
    };
    let infinity = (ends << 1) - (1 << exponent);
    let small = h >> 8 & 3;
    T::of_bits(
        sign | match h >> 3 & 31 {
            0 => infinity,
            1 if rank.is_multiple_of(3) => infinity + 1 + small,
            2..10 => infinity - 1 - small,
            10..14 => 0,
            14..20 => small,
            _ => h >> 12 & (ends - 1),
        },
    )
}

/// Checks sums of `world` sources, both into a separate target and into the source of the last rank.
fn agrees<T: Tested>(world: usize, elements: usize, value: fn(usize, usize) -> T) {
    let data: Vec<Vec<T>> = (0..world).map(|r| (0..elements).map(|i| value(r, i)).collect()).collect();
    let column = |i: usize| data.iter().map(|d| d[i]).collect::<Vec<T>>();
    for (isa, accumulate, in_place) in
        isas().flat_map(|isa| [(isa, false, false), (isa, true, false), (isa, false, true)])
    {
        let mut copies = data.clone();
        let mut out: Vec<T> = (0..elements).map(|i| value(99, i)).collect();
        let mut sources: Vec<*const u8> = copies.iter().map(|d| d.as_ptr().cast()).collect();
        let target = if in_place { copies[world - 1].as_mut_ptr() } else { out.as_mut_ptr() };
        if in_place {
            sources[world - 1] = target.cast_const().cast();
        }
        // SAFETY: local buffers of the same length; the processor has the instructions.
        unsafe { sum(isa, T::ELEMENT, &sources, target.cast(), elements, accumulate) };
        let got = if in_place { &copies[world - 1] } else { &out };
        for (i, got) in got.iter().enumerate() {
            let tree = tree_of(&column(i));
            let expected = T::round(if accumulate { value(99, i).widen() + tree } else { tree });
            assert_eq!(
                got.bits(),
                expected.bits(),
                "{} of {world} ranks, element {i} of {elements}, {isa:?}, accumulate {accumulate}, in place {in_place}",
                std::any::type_name::<T>(),
            );
        }
    }
}

fn agrees_everywhere<T: Tested>() {
    for world in (1..=17).chain([19, 33]) {
        for elements in [0, 1, 7, 15, 16, 17, 33, 1000, 1024, 2501] {
            agrees::<T>(world, elements, sized);
            agrees::<T>(world, elements, at_the_ends);
        }
    }
}

#[test]
fn sums_of_f64_follow_the_tree() {
    agrees_everywhere::<f64>();
}

#[test]
fn sums_of_f32_follow_the_tree() {
    agrees_everywhere::<f32>();
}

#[test]
fn sums_of_bf16_follow_the_tree_in_f32_and_are_rounded_once() {
    agrees_everywhere::<bf16>();
}

#[test]
fn sums_of_f16_follow_the_tree_in_f32_and_are_rounded_once() {
    agrees_everywhere::<f16>();
}

/// Above 256, bf16 holds only every second integer: a rounded intermediate sum would turn 257 into 256, and the 263 of
/// the first eight ranks into 264.
#[test]
fn nothing_is_rounded_in_between() {
    for (world, accumulate, expected) in
        [(3, false, 258.0), (11, false, 266.0), (2, true, 258.0), (10, true, 266.0)]
    {
        let data: Vec<bf16> = (0..world).map(|r| bf16::from_f32(if r == 0 { 256.0 } else { 1.0 })).collect();
        let sources: Vec<*const u8> = data.iter().map(|x| std::ptr::from_ref(x).cast()).collect();
        let mut target = [bf16::from_f32(1.0)];
        // SAFETY: one element each.
        unsafe { sum(Isa::detect(), Element::Bf16, &sources, target.as_mut_ptr().cast(), 1, accumulate) };
        assert_eq!(target[0].to_f32(), expected, "{world} ranks");
    }
}

/// Checks rounding alone, with numbers of every exponent at, below and above every kind of tie: each plus -0, which is itself.
fn rounds<T: Tested<In = f32>>(nan: T) {
    let ties =
        [0u32, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0x1_7fff, 0x1_8000];
    let ties =
        (0..512u32).flat_map(|e| ties.map(|low| e << 23 | low).into_iter().chain([(e << 23) + 0x7f_ffff]));
    let any = (0..1u32 << 20).map(|i| i.wrapping_mul(0x9E37_79B1));
    let x: Vec<f32> = ties.chain(any).map(f32::from_bits).collect();
    let zeros = vec![-0.0f32; x.len()];
    let tree = SumTree::Sum(Box::new(SumTree::Leaf(0)), Box::new(SumTree::Leaf(1)));
    for isa in isas() {
        let mut out = vec![nan; x.len()];
        let partials = [&x, &zeros].map(|values| Partial { address: values.as_ptr().cast(), is_wide: true });
        // SAFETY: local buffers of the same length; the processor has the instructions.
        unsafe { combine(isa, T::ELEMENT, &tree, &partials, out.as_mut_ptr().cast(), x.len(), false) };
        for (x, got) in x.iter().zip(out) {
            assert_eq!(got.bits(), T::round(*x).bits(), "{x:e} ({:#x}), {isa:?}", x.to_bits());
        }
    }
}

#[test]
fn rounding_is_to_nearest_even() {
    rounds(bf16::NAN);
    rounds(f16::NAN);
}
