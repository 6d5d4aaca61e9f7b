//! Every kernel of `Cpu` against a naive f64 reference, every backward against central differences of that
//! reference's forward, and the same bits on 1, 2, 3 and 4 threads.

mod accumulation;
mod attention;
mod blocks;
mod cross_entropy;
mod differences;
mod dropout;
mod embedding;
mod gated;
mod goldens;
mod host;
mod images;
mod layer_norm;
mod linear;
mod magnitudes;
mod optimizers;
mod optional;
mod oracle;
mod pointwise;
mod pool;
mod rotary;
mod stored_logits;
mod tiles;
