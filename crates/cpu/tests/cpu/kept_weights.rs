//! Products with weights that were packed before them: the bits of products that pack by themselves, on every instruction set
//! and on the model of tile registers. The matrix beside the panels holds other numbers, so a product that packs it is seen.

use phalanx_cpu::{Cpu, Options, ProductMethod};
use phalanx_simd::Isa;
use phalanx_simd::tiles::TileUnit;
use phalanx_tensor::operations::{InputGradient, PackWeight};
use phalanx_tensor::{
    Arena, DType, Device, Epilogue, Gelu, Layout, PackedFor, Tensor, VocabularyStatistics, Weight,
    WeightPanels, logits_stride, vocabulary_blocks,
};

use crate::oracle::{FLOATS, indices, numbers, poisoned, poisoned_as, read_f32, tensor_as, tokens};

/// (rows, in, out): whole panels and tails; few rows and many; several blocks of the inner dimension in each direction, with
/// and without scratch for their sums.
const SHAPES: [[usize; 3]; 8] = [
    [64, 64, 96],
    [47, 33, 49],
    [1, 100, 130],
    [130, 100, 1],
    [5, 1, 7],
    [40, 600, 70],
    [20, 2100, 36],
    [130, 70, 2200],
];

/// An inner dimension in several spans of what tasks share, with weights that all tasks share, and that they divide.
const LARGE: [[usize; 3]; 2] = [[1030, 2100, 1030], [33, 1100, 2100]];

/// The options of all paths that this machine can take.
fn paths() -> Vec<Options> {
    let plain = Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect()).map(|isa| Options {
        isa,
        tiles: None,
        products: ProductMethod::Fma,
        ..Options::new(2)
    });
    let tiled = [ProductMethod::Fma, ProductMethod::Split, ProductMethod::Split2].map(|products| Options {
        isa: Isa::detect(),
        tiles: Some(TileUnit::Model),
        products,
        ..Options::new(2)
    });
    plain.chain(tiled).collect()
}

/// A weight, another of its shape, and its panels.
struct Packed {
    w: Tensor,
    other: Tensor,
    panels: [Tensor; 3],
    layout: Layout,
}

const PRODUCTS: [PackedFor; 3] = [PackedFor::Forward, PackedFor::Logits, PackedFor::InputGradient];

impl Packed {
    fn new(device: &Device, dtype: DType, layout: Layout, in_out: [usize; 2]) -> Packed {
        let sizes = device.panels(dtype).expect("processors pack weights");
        let [inner, out] = in_out;
        let shape = if layout == Layout::InOut { [inner, out] } else { [out, inner] };
        let w = tensor_as(device, dtype, shape, &numbers(3, inner * out));
        let other = tensor_as(device, dtype, shape, &vec![7.0; inner * out]);
        let panels = PRODUCTS.map(|product| {
            let mut to = poisoned(device, [sizes.elements(product, in_out)]);
            device.run(PackWeight { w: Weight::new(w.view(), layout), product, to: to.view_mut() });
            to
        });
        Packed { w, other, panels, layout }
    }

    fn plain(&self) -> Weight<'_> {
        Weight::new(self.w.view(), self.layout)
    }

    fn kept(&self, product: PackedFor) -> Weight<'_> {
        let at = PRODUCTS.iter().position(|p| *p == product).unwrap();
        Weight::new(self.other.view(), self.layout).with_panels(self.panels[at].view())
    }
}

/// The results of every product with a weight, with panels or without.
fn products<'w>(
    device: &Device,
    dtype: DType,
    [rows, inner, out]: [usize; 3],
    w: &dyn Fn(PackedFor) -> Weight<'w>,
) -> Vec<Vec<u32>> {
    let of = |seed, shape: [usize; 2]| tensor_as(device, dtype, shape, &numbers(seed, shape[0] * shape[1]));
    let (x, dy, residual) = (of(1, [rows, inner]), of(2, [rows, out]), of(4, [rows, out]));
    let bias = tensor_as(device, dtype, [out], &numbers(5, out));
    let mut results = Vec::new();
    let mut bits = |x: &Tensor| results.push(read_f32(device, x).into_iter().map(f32::to_bits).collect());
    for epilogue in
        [Epilogue::default(), Epilogue { bias: Some(bias.view()), residual: Some(residual.view()) }]
    {
        let mut y = poisoned_as(device, dtype, [rows, out]);
        device.linear(x.view(), w(PackedFor::Forward), epilogue, y.view_mut());
        bits(&y);
    }
    let [mut pre, mut y] = [(); 2].map(|()| poisoned_as(device, dtype, [rows, out]));
    let forward = w(PackedFor::Forward);
    device.linear_gelu(x.view(), forward, bias.view(), Gelu::Tanh, pre.view_mut(), y.view_mut());
    bits(&pre);
    bits(&y);
    for accumulate in [false, true] {
        let mut dx = of(6, [rows, inner]);
        let (w, dy) = (w(PackedFor::InputGradient), dy.view());
        device.run(InputGradient { dy, padded: false, w, dx: dx.view_mut(), accumulate });
        bits(&dx);
    }
    let targets = tokens(device, [rows], &indices(7, rows, out));
    let mut exponentials = poisoned_as(device, dtype, [rows, logits_stride(out)]);
    let mut blocks = poisoned(device, [rows, 4 * vocabulary_blocks(out)]);
    let mut statistics = poisoned(device, [rows, 4]);
    device.run(VocabularyStatistics {
        x: x.view(),
        w: w(PackedFor::Logits),
        bias: None,
        targets: targets.view(),
        first: 0,
        exponentials: Some(exponentials.view_mut()),
        blocks: blocks.view_mut(),
        statistics: statistics.view_mut(),
    });
    bits(&exponentials);
    bits(&statistics);
    results
}

#[test]
fn products_with_packed_weights_have_the_bits_of_those_without() {
    for options in paths() {
        let device = Device::new(Cpu::with_options(options).unwrap(), Arena::heap());
        for dtype in FLOATS {
            let fastest = options.isa == Isa::detect() && options.tiles.is_none();
            for shape in SHAPES.into_iter().chain(LARGE.into_iter().filter(|_| fastest)) {
                for layout in [Layout::InOut, Layout::OutIn] {
                    let packed = Packed::new(&device, dtype, layout, [shape[1], shape[2]]);
                    let expected = products(&device, dtype, shape, &|_| packed.plain());
                    let kept = products(&device, dtype, shape, &|product| packed.kept(product));
                    assert!(expected == kept, "{options:?}, {dtype:?}, {shape:?}, {layout:?}");
                }
            }
        }
    }
}

#[test]
fn packed_weights_fit_the_sizes_that_a_plan_knows() {
    for options in paths() {
        let cpu = Cpu::with_options(options).unwrap();
        let device = Device::new(cpu, Arena::heap());
        for dtype in FLOATS {
            assert_eq!(device.panels(dtype), Some(options.panels(dtype)), "{options:?}, {dtype:?}");
        }
    }
    let f32_of_avx512 = WeightPanels { lanes: 32, steps: 1, width: 32, block: 512, gap: 16 };
    assert_eq!(f32_of_avx512.elements(PackedFor::Forward, [512, 64]), 2 * (32 * 512 + 16));
    assert_eq!(f32_of_avx512.elements(PackedFor::InputGradient, [512, 65]), 16 * (32 * 65 + 16));
}
