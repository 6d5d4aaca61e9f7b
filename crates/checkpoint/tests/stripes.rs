//! Parts of tensor-parallel ranks: every cut loads into every other, and what is missing is named.
//!
//! The oracle is slicing: an element's bytes follow from its place in the whole tensor, and which elements
//! a rank holds is found by walking all of them.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::fixture::{byte, names};
use half::{bf16, f16};
use phalanx_checkpoint::{
    Checkpoint, CheckpointError, HuggingFaceDir, Result, TensorPiece, begin, commit, newest, write_rank,
};
use phalanx_plan::Stripe;
use phalanx_plan::trace::DType;
use phalanx_testing::sweeps;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::tempdir;

/// Name, shape and type: both dimensions divide by 4 ranks and 3 packed parts. The first has runs of a
/// few bytes; the last runs of 9 KiB (columns, packed) to 1.2 MiB (rows), and several read windows.
const TENSORS: [(&str, [usize; 2], DType); 4] = [
    ("c_attn.weight", [8, 24], DType::F32),
    ("c_proj.weight", [24, 12], DType::F64),
    ("halves", [12, 36], DType::BF16),
    ("wte.weight", [24, 24 * 2200], DType::F16),
];

/// Division of a tensor among ranks.
#[derive(Clone, Copy, Debug)]
enum Split {
    Whole,
    /// Along this dimension, in which `parts` equal tensors lie side by side.
    Dimension {
        dim: usize,
        parts: usize,
    },
}

impl Split {
    fn stripe(self, shape: &[usize], rank: usize, ranks: usize) -> Stripe {
        match self {
            Split::Dimension { dim, parts } if ranks > 1 => {
                let run = shape[dim] / parts / ranks * shape[dim + 1..].iter().product::<usize>();
                Stripe { run: run as u64, ranks: ranks as u64, rank: rank as u64 }
            }
            _ => Stripe::whole(elements(shape)),
        }
    }
}

/// A save: how tensors are split, over how many tensor ranks, each part in how many data shards.
#[derive(Clone, Copy, Debug)]
struct Layout {
    split: Split,
    ranks: usize,
    shards: u64,
}

/// Whole on 1, 2, 3 ranks; stripes over 2 and 4 ranks along each dimension, and packed; each sharded too.
fn layouts() -> Vec<Layout> {
    let whole = [1, 2, 3].map(|shards| Layout { split: Split::Whole, ranks: 1, shards });
    let splits = [(0, 1), (1, 1), (1, 3)].map(|(dim, parts)| Split::Dimension { dim, parts });
    let striped = splits.into_iter().flat_map(|split| {
        [(2, 1), (2, 3), (4, 1), (4, 2)].map(|(ranks, shards)| Layout { split, ranks, shards })
    });
    whole.into_iter().chain(striped).collect()
}

impl Layout {
    /// Parts of tensors that a shard of a rank holds: the tensor's number, the stripe, and a range of the stripe.
    fn held(self, rank: usize, shard: u64) -> Vec<(usize, Stripe, Range<u64>)> {
        let one = |(tensor, (_, shape, _)): (usize, &(&str, [usize; 2], DType))| {
            let stripe = self.split.stripe(shape, rank, self.ranks);
            let count = stripe.local_elements(elements(shape)).unwrap();
            let cut = |shard: u64| count * shard / self.shards;
            (tensor, stripe, cut(shard)..cut(shard + 1))
        };
        TENSORS.iter().enumerate().map(one).collect()
    }

    /// Tensor rank and shard of each world rank.
    fn world(self) -> impl Iterator<Item = (usize, u64)> {
        (0..self.shards).flat_map(move |shard| (0..self.ranks).map(move |rank| (rank, shard)))
    }

    /// The elements that a rank holds of a tensor, by walking all of them.
    fn sliced(self, shape: &[usize; 2], rank: usize) -> Vec<u64> {
        let owner = |element: usize| match self.split {
            Split::Whole => 0,
            Split::Dimension { dim: 0, .. } => element / shape[1] / (shape[0] / self.ranks),
            Split::Dimension { parts, .. } => {
                let part = shape[1] / parts;
                element % shape[1] % part / (part / self.ranks)
            }
        };
        let whole = shape[0] * shape[1];
        (0..whole).filter(|&element| owner(element) == rank).map(|element| element as u64).collect()
    }
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().product::<usize>() as u64
}

/// The bytes of all tensors.
fn contents() -> Vec<Vec<u8>> {
    let bytes = |(tensor, (_, shape, dtype)): (usize, &(&str, [usize; 2], DType))| {
        let size = elements(shape) * dtype.bytes() as u64;
        // Counting in 4 bytes would do for small tensors, for which the fixture uses hashes.
        if size < 1 << 16 {
            (0..size).map(|at| byte(tensor, at)).collect()
        } else {
            (0..size / 4).flat_map(|at| (at as u32).wrapping_mul(2654435761).to_le_bytes()).collect()
        }
    };
    TENSORS.iter().enumerate().map(bytes).collect()
}

/// The bytes of elements of a tensor, one after another.
fn gathered(content: &[u8], dtype: DType, elements: &[u64]) -> Vec<u8> {
    let size = dtype.bytes();
    elements.iter().flat_map(|&element| &content[element as usize * size..][..size]).copied().collect()
}

fn piece(tensor: usize, stripe: Stripe, range: Range<u64>) -> TensorPiece {
    let (name, shape, dtype) = TENSORS[tensor];
    let stripe = Some(stripe);
    TensorPiece { state: "parameters", name: name.to_string(), shape: shape.to_vec(), dtype, stripe, range }
}

/// One world rank's part.
fn write(tmp: &Path, rank: usize, held: &[(usize, Stripe, Range<u64>)], contents: &[Vec<u8>]) -> Result<()> {
    let pieces: Vec<TensorPiece> =
        held.iter().map(|(t, stripe, range)| piece(*t, *stripe, range.clone())).collect();
    write_rank(tmp, rank, &pieces, 1 << 16, &mut |index, range, out| {
        let (tensor, stripe, own) = &held[index];
        let global: Vec<u64> = range.map(|local| stripe.global(own.start + local)).collect();
        out.copy_from_slice(&gathered(&contents[*tensor], TENSORS[*tensor].2, &global));
    })
}

fn save(folder: &Path, layout: Layout, contents: &[Vec<u8>]) -> PathBuf {
    let tmp = begin(folder, 1).unwrap();
    let world: Vec<(usize, u64)> = layout.world().collect();
    for (number, &(rank, shard)) in world.iter().enumerate() {
        write(&tmp, number, &layout.held(rank, shard), contents).unwrap();
    }
    commit(&tmp, json!({}), world.len()).unwrap()
}

#[test]
fn every_cut_loads_into_every_other() {
    let contents = contents();
    let expected: Vec<Vec<Vec<Vec<u64>>>> = layouts()
        .into_iter()
        .map(|layout| {
            let rank = |rank| TENSORS.iter().map(|(_, shape, _)| layout.sliced(shape, rank)).collect();
            (0..layout.ranks).map(rank).collect()
        })
        .collect();
    let all: Vec<_> = layouts().into_iter().zip(&expected).collect();
    for (number, saved) in layouts().into_iter().enumerate() {
        let folder = tempdir().unwrap();
        let dir = save(folder.path(), saved, &contents);
        for (loaded, expected) in sweeps::share(&all, number, 3) {
            // Opened again, so that every kind of read verifies pieces; the second shard of a rank finds some of them
            // verified.
            let checkpoint = Checkpoint::open(&dir).unwrap();
            for (rank, shard) in loaded.world() {
                for (tensor, stripe, range) in loaded.held(rank, shard) {
                    let (name, _, dtype) = TENSORS[tensor];
                    let elements = &expected[rank][tensor][range.start as usize..range.end as usize];
                    let mut out = vec![0; elements.len() * dtype.bytes()];
                    checkpoint.read_stripe("parameters", name, &stripe, range.clone(), &mut out).unwrap();
                    let same = out == gathered(&contents[tensor], dtype, elements);
                    assert!(same, "{name}: {saved:?} read as {loaded:?}, {stripe}, {range:?}");
                }
            }
        }
    }
}

#[test]
fn ranges_of_the_whole_come_from_stripes() {
    let contents = contents();
    for saved in layouts() {
        let folder = tempdir().unwrap();
        let checkpoint = Checkpoint::open(&save(folder.path(), saved, &contents)).unwrap();
        for (tensor, (name, shape, dtype)) in TENSORS.into_iter().enumerate() {
            let whole = elements(&shape);
            for range in [0..0, 5..5, 0..1, 7..31, whole / 3..whole / 2 + 1, whole - 1..whole, 0..whole] {
                for _ in 0..2 {
                    let size = dtype.bytes() as u64;
                    let mut out = vec![0; ((range.end - range.start) * size) as usize];
                    checkpoint.read("parameters", name, range.clone(), &mut out).unwrap();
                    let bytes = (range.start * size) as usize..(range.end * size) as usize;
                    assert!(out == contents[tensor][bytes], "{name} {saved:?} {range:?}");
                }
            }
        }
        let mut done = 0;
        let reports = checkpoint.verify_all(&mut |bytes| done += bytes).unwrap();
        assert!(reports.iter().all(|report| report.damage.is_empty() && report.statistics.is_some()));
        assert_eq!(done, contents.iter().map(|content| content.len() as u64).sum::<u64>());
    }
}

const COLUMNS: Split = Split::Dimension { dim: 1, parts: 1 };

/// Whole tensors use the first manifest version; stripes use a version that older programs refuse. Files can be read by
/// the safetensors crate.
#[test]
fn what_is_on_disk() {
    let contents = contents();
    for (split, ranks, version) in [(Split::Whole, 1, 1), (COLUMNS, 1, 1), (COLUMNS, 2, 2)] {
        let folder = tempdir().unwrap();
        let dir = save(folder.path(), Layout { split, ranks, shards: 1 }, &contents);
        let manifest: Value = serde_json::from_slice(&fs::read(dir.join("manifest.json")).unwrap()).unwrap();
        assert_eq!(manifest["version"], version);
        let piece = &manifest["tensors"][0]["pieces"][ranks - 1];
        let expected = if ranks == 1 { Value::Null } else { json!({ "run": 12, "ranks": 2, "rank": 1 }) };
        assert_eq!(piece.get("stripe").unwrap_or(&Value::Null), &expected);
        let file = fs::read(dir.join("rank-00000.safetensors")).unwrap();
        assert_eq!(SafeTensors::deserialize(&file).unwrap().len(), TENSORS.len());
    }
}

/// One rank may hold several stripes of a tensor.
#[test]
fn two_stripes_in_one_file() {
    let contents = contents();
    let layout = Layout { split: COLUMNS, ranks: 2, shards: 1 };
    let folder = tempdir().unwrap();
    let tmp = begin(folder.path(), 1).unwrap();
    let held = [layout.held(1, 0), layout.held(0, 0)].concat();
    write(&tmp, 0, &held, &contents).unwrap();
    let dir = commit(&tmp, Value::Null, 1).unwrap();
    let file = fs::read(dir.join("rank-00000.safetensors")).unwrap();
    assert_eq!(SafeTensors::deserialize(&file).unwrap().len(), held.len());
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let mut out = vec![0; contents[0].len()];
    checkpoint.read("parameters", TENSORS[0].0, 0..elements(&TENSORS[0].1), &mut out).unwrap();
    assert_eq!(out, contents[0]);
}

#[test]
fn commit_names_what_is_missing_or_double() {
    let contents = contents();
    // Of c_attn.weight, 192 elements: stripes of 96 by 2 ranks, of 48 by 4.
    let part = |run, ranks, rank, range: Range<u64>| (0, Stripe { run, ranks, rank }, range);
    let whole = |range| part(192, 1, 0, range);
    let cases: [(&[_], &[_], &[&str]); 9] = [
        (
            &[part(12, 2, 0, 0..96)],
            &[],
            &["c_attn.weight (stripe 1 of 0..2, runs of 12) was saved by no rank"],
        ),
        (&[part(12, 2, 1, 0..96)], &[], &["(stripe 0 of 0..2, runs of 12) was saved by no rank"]),
        (
            &[part(6, 4, 0, 0..48), part(6, 4, 1, 0..48)],
            &[part(6, 4, 3, 0..48)],
            &["(stripe 2 of 0..4, runs of 6) was saved by no rank"],
        ),
        (
            &[part(12, 2, 0, 0..96), part(12, 2, 1, 0..40)],
            &[part(12, 2, 1, 50..96)],
            &["elements 40 to 50 of parameters/c_attn.weight (stripe 1 of 0..2", "saved by no rank"],
        ),
        (
            &[part(12, 2, 0, 0..96), part(12, 2, 1, 0..50)],
            &[part(12, 2, 1, 40..96)],
            &["elements 40 to 50 of", "(stripe 1 of 0..2, runs of 12) are saved twice, in rank-00000"],
        ),
        (
            &[part(12, 2, 0, 0..96), part(12, 2, 1, 0..90)],
            &[],
            &["elements 90 to 96 of", "(stripe 1 of 0..2, runs of 12) were saved by no rank"],
        ),
        (
            &[part(12, 2, 0, 0..96)],
            &[whole(0..192)],
            &["cut differently by two ranks", "whole in rank-00001", "runs of 12 over 2 ranks in rank-00000"],
        ),
        (
            &[part(12, 2, 1, 0..96)],
            &[part(4, 2, 0, 0..96)],
            &["cut differently by two ranks", "runs of 4 over 2 ranks", "runs of 12 over 2 ranks"],
        ),
        (
            // These add up, but no parallel layout cuts a tensor like this.
            &[part(96, 2, 0, 0..96)],
            &[whole(96..192)],
            &["cut differently by two ranks"],
        ),
    ];
    for (first, second, words) in cases {
        let folder = tempdir().unwrap();
        let tmp = begin(folder.path(), 1).unwrap();
        write(&tmp, 0, first, &contents).unwrap();
        write(&tmp, 1, second, &contents).unwrap();
        let error = commit(&tmp, Value::Null, 2).unwrap_err();
        assert!(matches!(error, CheckpointError::NotWhole { .. }));
        for word in words {
            assert!(error.to_string().contains(word), "{word:?} in {error}");
        }
        assert!(names(folder.path()).is_empty());
    }
}

/// Damage in one rank's stripe stops only the ranks that need it, and the error names it.
#[test]
fn a_damaged_stripe_is_named() {
    let contents = contents();
    let folder = tempdir().unwrap();
    let layout = Layout { split: COLUMNS, ranks: 2, shards: 2 };
    let dir = save(folder.path(), layout, &contents);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let tensor = checkpoint.tensor("parameters", "c_attn.weight").unwrap();
    let damaged = tensor.pieces.last().unwrap();
    assert_eq!((damaged.stripe.unwrap().rank, damaged.elements()), (1, 48..96));
    let file = File::options().write(true).open(dir.join(&damaged.file)).unwrap();
    file.write_all_at(&[!contents[0][contents[0].len() - 1]], damaged.bytes(DType::F32).end - 1).unwrap();

    let mut out = vec![0; 96 * 4];
    let mut read = |rank, range: Range<u64>| {
        let stripe = COLUMNS.stripe(&TENSORS[0].1, rank, 2);
        let out = &mut out[..(range.end - range.start) as usize * 4];
        checkpoint.read_stripe("parameters", "c_attn.weight", &stripe, range, out)
    };
    read(0, 0..96).unwrap();
    read(1, 0..48).unwrap();
    for range in [0..96, 48..49, 95..96] {
        let error = read(1, range).unwrap_err().to_string();
        let words =
            ["c_attn.weight (stripe 1 of 0..2, runs of 12) is damaged", "elements 48 to 96", &damaged.file];
        for word in words {
            assert!(error.contains(word), "{word:?} in {error}");
        }
    }
    // The upper four rows of the whole are in intact pieces, the lower rows are not.
    checkpoint.read("parameters", "c_attn.weight", 0..96, &mut [0; 96 * 4]).unwrap();
    checkpoint.read("parameters", "c_attn.weight", 96..192, &mut [0; 96 * 4]).unwrap_err();
    let reports = checkpoint.verify_all(&mut |_| ()).unwrap();
    let damage: Vec<&String> = reports.iter().flat_map(|report| &report.damage).collect();
    assert!(damage.len() == 1 && damage[0].contains("stripe 1 of 0..2"), "{damage:?}");

    fs::remove_file(dir.join(&damaged.file)).unwrap();
    let found = newest(folder.path()).unwrap();
    assert!(found.checkpoint.is_none() && found.skipped[0].reason.to_string().contains(&damaged.file));
}

#[test]
fn stripes_and_ranges_that_do_not_exist() {
    let contents = contents();
    let folder = tempdir().unwrap();
    let dir = save(folder.path(), Layout { split: COLUMNS, ranks: 2, shards: 1 }, &contents);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let read = |name, run, ranks, rank, range: Range<u64>| {
        let mut out = vec![0; (range.end - range.start) as usize * 4];
        let stripe = Stripe { run, ranks, rank };
        checkpoint.read_stripe("parameters", name, &stripe, range, &mut out).unwrap_err().to_string()
    };
    let error = read("c_attn.weight", 12, 2, 1, 90..97);
    assert!(
        error.contains("(stripe 1 of 0..2, runs of 12)") && error.contains("elements 90 to 97"),
        "{error}"
    );
    for (run, ranks, rank) in [(12, 5, 0), (0, 2, 0), (12, 2, 2), (u64::MAX, 3, 0)] {
        let error = read("c_attn.weight", run, ranks, rank, 0..1);
        assert!(error.contains("has shape [8, 24]") && error.contains("another model"), "{error}");
    }
    let error = read("c_atn.weight", 12, 2, 1, 0..1);
    assert!(error.ends_with("nearest that it has is parameters/c_attn.weight"), "{error}");
}

#[test]
#[should_panic(expected = "outside shape")]
fn a_piece_outside_its_stripe_is_a_bug() {
    let folder = tempdir().unwrap();
    let held = [(0, Stripe { run: 12, ranks: 2, rank: 0 }, 0..97)];
    let _ = write(folder.path(), 0, &held, &contents());
}

#[test]
fn hugging_face_folders_by_stripe() {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    // Runs of a few elements and of some ten thousand, in every type that can be read.
    let shapes = [[8, 24], [12, 24 * 2200]];
    let value = |at: u64| (at % 251) as f32 - 100.0;
    type ToBytes = fn(f32) -> Vec<u8>;
    let types: [(Dtype, ToBytes); 3] = [
        (Dtype::F32, |x| x.to_le_bytes().to_vec()),
        (Dtype::F16, |x| f16::from_f32(x).to_le_bytes().to_vec()),
        (Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes().to_vec()),
    ];
    let mut tensors = Vec::new();
    for (dtype, bytes) in types {
        for shape in shapes {
            let data: Vec<u8> = (0..elements(&shape)).flat_map(|at| bytes(value(at))).collect();
            tensors.push((format!("{dtype}{}", shape[1]), dtype, shape, data));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    let model = HuggingFaceDir::open(folder.path()).unwrap();
    for layout in layouts() {
        for (name, _, shape, _) in &tensors {
            for rank in 0..layout.ranks {
                let expected: Vec<f32> = layout.sliced(shape, rank).into_iter().map(value).collect();
                let stripe = layout.split.stripe(shape, rank, layout.ranks);
                for range in [0..expected.len(), 5..expected.len() - 7, 3..3] {
                    let mut out = vec![0.0; range.len()];
                    let local = range.start as u64..range.end as u64;
                    model.read_stripe_f32(name, &stripe, local, &mut out).unwrap();
                    assert!(out == expected[range.clone()], "{name} {layout:?} {rank} {range:?}");
                }
            }
        }
    }
    let stripe = Stripe { run: 12, ranks: 2, rank: 1 };
    let error = model.read_stripe_f32("F3224", &stripe, 90..97, &mut [0.0; 7]).unwrap_err().to_string();
    assert!(error.contains("F3224 (stripe 1 of 0..2, runs of 12)") && error.contains("[8, 24]"), "{error}");
    let stripe = Stripe { run: 5, ..stripe };
    let error = model.read_stripe_f32("F3224", &stripe, 0..1, &mut [0.0]).unwrap_err().to_string();
    assert!(error.contains("F3224") && error.contains("runs of 5"), "{error}");
}
