//! Blocks of 8 and 4 bits: bytes of gguf and bitsandbytes for the same numbers, and the numbers that come back, on every instruction set.

use std::path::Path;

use phalanx_tensor::blocks::{self, BLOCK, NF4, NF4_CODES, NF4_SCALED, nf4_scales};
use phalanx_tensor::{Category, DType, Device};
use safetensors::SafeTensors;

use crate::oracle::{self, KernelPath};

/// The bytes of a tensor of the golden file (`tools/golden_blocks.py`).
fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/blocks.safetensors");
    let bytes = std::fs::read(path).unwrap();
    SafeTensors::deserialize(&bytes).unwrap().tensor(name).unwrap().data().to_vec()
}

fn floats(name: &str) -> Vec<f32> {
    golden(name).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn quantised(dtype: DType, numbers: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; dtype.bytes_of(numbers.len())];
    blocks::quantise(dtype, numbers, &mut bytes);
    bytes
}

#[test]
fn groups_are_those_of_gguf() {
    assert!(quantised(DType::Q8_0, &floats("input")) == golden("q8_0"));
}

#[test]
fn codes_and_scales_are_those_of_bitsandbytes() {
    let (input, codes, scales) = (floats("input"), golden("nf4.codes"), floats("nf4.scales"));
    let bytes = quantised(DType::Nf4, &input);
    let mut squares = [0f64; 2];
    for (number, block) in bytes.chunks(DType::Nf4.bytes_of(BLOCK)).enumerate() {
        assert!(block[..NF4_CODES] == codes[number * NF4_CODES..][..NF4_CODES], "block {number}");
        let scales = &scales[number * BLOCK / NF4_SCALED..][..BLOCK / NF4_SCALED];
        let [low, high] = [f32::min, f32::max].map(|of| scales.iter().copied().reduce(of).unwrap());
        for (group, (scale, exact)) in nf4_scales(block).into_iter().zip(scales).enumerate() {
            // Half a step of 255, and the rounding of a product and a sum.
            let allowed = (high - low) / 510.0 + high * f32::EPSILON;
            assert!((scale - exact).abs() <= allowed, "block {number}, group {group}: {scale} for {exact}");
            for code in &block[group * NF4_SCALED / 2..][..NF4_SCALED / 2] {
                for code in [code >> 4, code & 15] {
                    squares[number] += f64::from(NF4[usize::from(code)] * (scale - exact)).powi(2);
                }
            }
        }
    }
    // Quantising the scales of numbers as weights are moves these less than it does in bitsandbytes.
    let (error, theirs) = ((squares[1] / BLOCK as f64).sqrt(), f64::from(floats("nf4.error")[0]));
    assert!(error < theirs, "{error:e} and {theirs:e}");
}

/// Every instruction set, number of threads and type of results gives the numbers of the definition, rounded once.
#[test]
fn numbers_come_back_alike_everywhere() {
    let input: Vec<f32> = floats("input").repeat(5);
    for dtype in [DType::Q8_0, DType::Nf4] {
        let words = blocks::quantised(dtype, &input);
        let expected = blocks::dequantised(dtype, &words);
        let on = |device: &Device, to: DType| -> Vec<f32> {
            let mut kept = device.alloc(dtype, [input.len()], Category::Parameters, "kept");
            device.upload(&words, kept.view_mut().typed(DType::U32));
            let mut numbers = device.alloc(to, [input.len()], Category::Workspace, "numbers");
            device.dequantise(kept.view(), numbers.view_mut());
            // Blocks from the second on.
            let mut rest = device.alloc(to, [input.len() - BLOCK], Category::Workspace, "rest");
            device.dequantise(kept.view().range(BLOCK..input.len()), rest.view_mut());
            let (numbers, rest) = (oracle::read_f32(device, &numbers), oracle::read_f32(device, &rest));
            assert_eq!(numbers[BLOCK..], rest);
            numbers
        };
        for to in [DType::F32, DType::BF16, DType::F16] {
            let expected = oracle::rounded(to, &expected);
            for path in KernelPath::all() {
                for device in [path.cpu(1), path.cpu(3), path.simulated()] {
                    assert!(on(&device, to) == expected, "{dtype:?} to {to:?}, {}", path.name());
                }
            }
        }
    }
}
