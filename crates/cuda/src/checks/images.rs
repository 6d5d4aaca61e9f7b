//! ReLU, the patches of images, and max pooling.

use phalanx_tensor::Patches;
use phalanx_tensor::operations::{Fold, MaxPool, MaxPoolBackward, Relu, ReluBackward, Unfold};

use super::bench::{Bench, FLOATS, random, read};

/// Patches that overlap, with padding; that lie apart, and leave a rim; with extents of their own; and one of the whole image.
const PATCHES: [Patches; 4] = [
    Patches { image: [9, 7], kernel: [3, 3], stride: [1, 1], padding: [1, 1] },
    Patches { image: [9, 7], kernel: [2, 2], stride: [2, 2], padding: [0, 0] },
    Patches { image: [10, 33], kernel: [4, 3], stride: [3, 2], padding: [2, 0] },
    Patches { image: [5, 5], kernel: [5, 5], stride: [1, 1], padding: [0, 0] },
];

/// Sums have the processor's order.
pub(super) fn images_have_the_processors_bits(bench: &Bench) {
    for dtype in FLOATS {
        for (patches, channels) in PATCHES.into_iter().flat_map(|patches| [(patches, 1), (patches, 5)]) {
            let name = format!("{dtype:?} {:?} {:?} of {channels}", patches.image, patches.kernel);
            bench.compare(&name, 0.0, |device| {
                let image = [3, patches.pixels(), channels];
                let rows = [3, patches.count(), channels * patches.size()];
                let pooled = [3, patches.count(), channels];
                let mut x = random(device, dtype, &image, 1);
                device.run(Relu { x: x.view_mut() });
                let mut dx = random(device, dtype, &image, 2);
                device.run(ReluBackward { y: x.view(), dy: dx.view_mut() });
                let [mut y, dy] = [3, 4].map(|seed| random(device, dtype, &rows, seed));
                device.run(Unfold { x: x.view(), patches, y: y.view_mut() });
                let mut folded = random(device, dtype, &image, 5);
                device.run(Fold { x: dy.view(), patches, y: folded.view_mut() });
                let [mut max, dmax] = [6, 7].map(|seed| random(device, dtype, &pooled, seed));
                device.run(MaxPool { x: x.view(), patches, y: max.view_mut() });
                let mut back = random(device, dtype, &image, 8);
                let (x_view, dy) = (x.view(), dmax.view());
                device.run(MaxPoolBackward { x: x_view, patches, dy, dx: back.view_mut() });
                let all = [
                    ("ReLU", &x),
                    ("its gradient", &dx),
                    ("patches", &y),
                    ("their sums", &folded),
                    ("largest", &max),
                    ("their gradient", &back),
                ];
                all.map(|(name, x)| (name, read(device, x.view()))).into()
            });
        }
    }
}
