//! Whatever layout saved it, every layout loads it; and a save counts only when it is committed.

use crate::fixture;
use std::fs;

use crate::fixture::{LAYOUTS, Layout, TENSORS, assert_whole, bytes, elements, names, newest_step, save};
use phalanx_checkpoint::{
    Checkpoint, CheckpointError, READ_WINDOW_BYTES, TensorPiece, begin, commit, discard, newest, purge,
    write_rank,
};
use phalanx_plan::trace::DType;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::tempdir;

#[test]
fn any_layout_loads_into_any_other() {
    for saved in LAYOUTS {
        let folder = tempdir().unwrap();
        let checkpoint = Checkpoint::open(&save(folder.path(), 7, saved)).unwrap();
        assert_eq!((checkpoint.step(), checkpoint.ranks()), (7, saved.ranks));
        assert_eq!(checkpoint.tensors().len(), TENSORS.len());
        for loaded in LAYOUTS {
            // Opened again each time, so that every kind of read verifies pieces.
            let checkpoint = Checkpoint::open(checkpoint.dir()).unwrap();
            for (tensor, range) in (0..loaded.ranks).flat_map(|rank| loaded.owned(rank)) {
                let (state, name, _, dtype) = TENSORS[tensor];
                let mut out = vec![0; (range.end - range.start) as usize * dtype.bytes()];
                checkpoint.read(state, name, range.clone(), &mut out).unwrap();
                assert!(out == bytes(tensor, range.clone()), "{saved:?} {loaded:?} {state}/{name} {range:?}");
            }
        }
    }
}

#[test]
fn records_and_state_come_back() {
    let folder = tempdir().unwrap();
    let checkpoint = Checkpoint::open(&save(folder.path(), 3, LAYOUTS[2])).unwrap();
    assert_eq!(checkpoint.state()["cursor"], 12345678901234u64);
    // The bits must be equal, not only the values.
    assert_eq!(checkpoint.state()["lr"].as_f64().unwrap().to_bits(), (0.1f64 + 0.2).to_bits());
    for (state, name, shape, dtype) in TENSORS {
        let tensor = checkpoint.tensor(state, name).unwrap();
        assert_eq!((tensor.shape.as_slice(), tensor.dtype), (shape, dtype));
        assert_eq!(tensor.pieces.len() as u64, elements(shape).div_ceil(7));
    }
}

#[test]
fn rank_files_are_safetensors() {
    let folder = tempdir().unwrap();
    let layout = LAYOUTS[4];
    let checkpoint = save(folder.path(), 1, layout);
    for rank in 0..layout.ranks {
        let file = fs::read(checkpoint.join(format!("rank-{rank:05}.safetensors"))).unwrap();
        let read = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(read.len(), layout.owned(rank).len());
        for (tensor, range) in layout.owned(rank) {
            let (state, name, _, dtype) = TENSORS[tensor];
            let view = read.tensor(&format!("{state}/{name}@{}", range.start)).unwrap();
            assert_eq!(view.data(), bytes(tensor, range.clone()));
            assert_eq!(view.shape(), [(range.end - range.start) as usize]);
            assert_eq!(view.dtype().to_string().to_lowercase(), dtype.name());
        }
    }
}

#[test]
fn same_content_gives_same_bytes() {
    let folders = [tempdir().unwrap(), tempdir().unwrap()];
    let [first, second] = folders.each_ref().map(|folder| save(folder.path(), 9, LAYOUTS[3]));
    assert_eq!(names(&first), names(&second));
    assert_eq!(
        names(&first),
        ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors"]
    );
    for name in names(&first) {
        assert_eq!(fs::read(first.join(&name)).unwrap(), fs::read(second.join(&name)).unwrap(), "{name}");
    }
}

/// A piece of several read windows, read from both sides of each window's edge.
#[test]
fn large_pieces_stream() {
    let folder = tempdir().unwrap();
    let window = READ_WINDOW_BYTES as u64 / 4;
    let count = 3 * window + 5;
    let piece = TensorPiece {
        state: "momentum",
        name: "w".to_string(),
        shape: vec![count as usize],
        dtype: DType::U32,
        stripe: None,
        range: 0..count,
    };
    let tmp = begin(folder.path(), 1).unwrap();
    write_rank(&tmp, 0, &[piece], 1 << 18, &mut |_, range, out| {
        for (element, bytes) in range.zip(out.chunks_exact_mut(4)) {
            bytes.copy_from_slice(&(element as u32).wrapping_mul(2654435761).to_le_bytes());
        }
    })
    .unwrap();
    let dir = commit(&tmp, Value::Null, 1).unwrap();
    for range in [0..count, 0..1, window - 1..window + 1, window..2 * window, count - 1..count, 7..count - 7]
    {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        for _ in 0..2 {
            let mut out = vec![0; (range.end - range.start) as usize * 4];
            checkpoint.read("momentum", "w", range.clone(), &mut out).unwrap();
            for (element, &bytes) in range.clone().zip(out.as_chunks().0) {
                assert_eq!(u32::from_le_bytes(bytes), (element as u32).wrapping_mul(2654435761));
            }
        }
    }
}

/// The fixture asserts the bound at each call; here also that a window is used to its full width, that
/// order is kept, and that odd widths cut no element.
#[test]
fn fill_sees_bounded_aligned_windows() {
    for (window, widest) in [(8, 8), (13, 8), (64, 64), (4096, 2368), (1 << 20, 2368)] {
        let folder = tempdir().unwrap();
        let tmp = begin(folder.path(), 1).unwrap();
        let pieces = [fixture::piece(0, 0..592), fixture::piece(4, 10..11)];
        let (mut expected, mut seen) = ((0, 0), 0);
        write_rank(&tmp, 0, &pieces, window, &mut |piece, range, out| {
            assert!(out.len() <= window && out.as_ptr().addr() % 8 == 0);
            assert_eq!(out.len(), (range.end - range.start) as usize * pieces[piece].dtype.bytes());
            if piece != expected.0 {
                expected = (piece, 0);
            }
            assert_eq!((piece, range.start), expected);
            expected.1 = range.end;
            seen = seen.max(out.len());
        })
        .unwrap();
        assert_eq!((expected, seen), ((1, 1), widest), "window {window}");
    }
}

#[test]
fn empty_ranges_and_idle_ranks_are_fine() {
    let folder = tempdir().unwrap();
    let tmp = begin(folder.path(), 2).unwrap();
    let all: Vec<_> = (0..TENSORS.len()).map(|tensor| (tensor, 0..elements(TENSORS[tensor].2))).collect();
    fixture::write(&tmp, 0, &all, 1000).unwrap();
    fixture::write(&tmp, 1, &[(0, 0..0), (1, 5..5)], 1000).unwrap();
    fixture::write(&tmp, 2, &[], 1000).unwrap();
    let checkpoint = Checkpoint::open(&commit(&tmp, Value::Null, 3).unwrap()).unwrap();
    assert_whole(&checkpoint);
    let idle = fs::read(checkpoint.dir().join("rank-00002.safetensors")).unwrap();
    assert!(SafeTensors::deserialize(&idle).unwrap().is_empty());
}

#[test]
fn a_killed_save_is_ignored_and_cleaned() {
    let folder = tempdir().unwrap();
    assert_eq!(newest_step(folder.path()), None);
    assert_eq!(newest_step(&folder.path().join("nothing here")), None);
    save(folder.path(), 10, LAYOUTS[1]);
    // Killed after one of two ranks, and killed before that at an earlier step.
    for step in [20, 15] {
        let tmp = folder.path().join(format!("step-{step}.tmp"));
        fs::create_dir(&tmp).unwrap();
        fixture::write(&tmp, 0, &LAYOUTS[1].owned(0), 64).unwrap();
    }
    assert_eq!(newest_step(folder.path()), Some(10));
    let error = Checkpoint::open(&folder.path().join("step-20.tmp")).unwrap_err().to_string();
    assert!(error.contains("interrupted"), "{error}");
    let tmp = begin(folder.path(), 20).unwrap();
    assert_eq!(names(folder.path()), ["step-10", "step-20.tmp"]);
    assert!(names(&tmp).is_empty());
    discard(&tmp).unwrap();
    assert_eq!(names(folder.path()), ["step-10"]);
}

#[test]
fn a_step_saved_again_replaces_the_older() {
    let folder = tempdir().unwrap();
    save(folder.path(), 10, LAYOUTS[1]);
    save(folder.path(), 10, LAYOUTS[3]);
    assert_eq!(names(folder.path()), ["step-10"]);
    let checkpoint = newest(folder.path()).unwrap().checkpoint.unwrap();
    assert_eq!(checkpoint.ranks(), 3);
    assert_whole(&checkpoint);
}

/// After a crash between the two renames of a replacement, the older checkpoint is read, and gets its name back.
#[test]
fn a_replacement_cut_short_loses_nothing() {
    let folder = tempdir().unwrap();
    let replaced = save(folder.path(), 10, LAYOUTS[1]);
    fs::rename(&replaced, folder.path().join("step-10.replaced")).unwrap();
    fs::create_dir(folder.path().join("step-10.tmp")).unwrap();
    assert_eq!(newest_step(folder.path()), Some(10));
    begin(folder.path(), 11).unwrap();
    assert_eq!(names(folder.path()), ["step-10", "step-11.tmp"]);
    // A crash after both: the newer stays.
    fs::create_dir(folder.path().join("step-10.replaced")).unwrap();
    begin(folder.path(), 11).unwrap();
    assert_eq!(names(folder.path()), ["step-10", "step-11.tmp"]);
    // What is no checkpoint is not taken for one.
    fs::create_dir(folder.path().join("step-4.replaced")).unwrap();
    fs::write(folder.path().join("step-4.replaced/notes.txt"), "mine").unwrap();
    begin(folder.path(), 11).unwrap();
    assert_eq!(names(folder.path()), ["step-10", "step-11.tmp", "step-4.replaced"]);
}

#[test]
fn purge_keeps_the_newest_whole_ones() {
    let folder = tempdir().unwrap();
    for step in [5, 10, 100, 20] {
        save(folder.path(), step, LAYOUTS[1]);
    }
    fs::write(folder.path().join("step-100/manifest.json"), "{}").unwrap();
    let removed = purge(folder.path(), 2, &[0]).unwrap();
    assert_eq!(removed, [folder.path().join("step-5")]);
    assert_eq!(names(folder.path()), ["step-10", "step-100", "step-20"]);
    assert!(purge(folder.path(), 5, &[0]).unwrap().is_empty());
}

#[test]
fn commit_refuses_what_is_not_whole() {
    // The parts of two ranks, and what the message must name.
    let cases: [(&[_], &[_], &[&str]); 5] = [
        (&[(1, 0..3)], &[(1, 4..5)], &["parameters/ln_f.bias", "elements 3 to 4", "no rank"]),
        (&[(1, 0..3)], &[(1, 2..5)], &["elements 2 to 3", "twice", "rank-00000", "rank-00001"]),
        (&[(1, 0..5)], &[(1, 0..5)], &["elements 0 to 5", "twice"]),
        (&[(1, 0..2)], &[(1, 2..4)], &["elements 4 to 5", "no rank"]),
        (&[(1, 1..5)], &[], &["elements 0 to 1", "no rank"]),
    ];
    for (first, second, words) in cases {
        let folder = tempdir().unwrap();
        save(folder.path(), 1, LAYOUTS[0]);
        let tmp = begin(folder.path(), 2).unwrap();
        fixture::write(&tmp, 0, first, 64).unwrap();
        fixture::write(&tmp, 1, second, 64).unwrap();
        let error = commit(&tmp, Value::Null, 2).unwrap_err();
        assert!(matches!(error, CheckpointError::NotWhole { .. }));
        for word in words {
            assert!(error.to_string().contains(word), "{word:?} in {error}");
        }
        assert_eq!(names(folder.path()), ["step-1"]);
        assert_eq!(newest_step(folder.path()), Some(1));
    }
}

#[test]
fn commit_refuses_ranks_that_disagree_or_are_absent() {
    let folder = tempdir().unwrap();
    let tmp = begin(folder.path(), 2).unwrap();
    fixture::write(&tmp, 0, &[(1, 0..3)], 64).unwrap();
    let mut other = fixture::piece(1, 3..5);
    other.dtype = DType::BF16;
    write_rank(&tmp, 1, &[other], 64, &mut |_, _, _| ()).unwrap();
    let error = commit(&tmp, Value::Null, 2).unwrap_err().to_string();
    assert!(error.contains("ln_f.bias is f32") && error.contains("bf16"), "{error}");

    let tmp = begin(folder.path(), 2).unwrap();
    fixture::write(&tmp, 0, &[(1, 0..5)], 64).unwrap();
    let error = commit(&tmp, json!({}), 2).unwrap_err().to_string();
    assert!(error.contains("rank 1 has written nothing"), "{error}");

    let tmp = begin(folder.path(), 2).unwrap();
    fixture::write(&tmp, 0, &[(1, 0..5)], 64).unwrap();
    let data = tmp.join("rank-00000.safetensors");
    let long = fs::metadata(&data).unwrap().len();
    fs::File::options().write(true).open(&data).unwrap().set_len(long - 1).unwrap();
    let error = commit(&tmp, json!({}), 1).unwrap_err();
    assert!(matches!(error, CheckpointError::WrongSize { expected, found, .. } if expected == found + 1));
    assert!(names(folder.path()).is_empty());
}

#[test]
#[should_panic(expected = "outside shape")]
fn a_piece_outside_its_tensor_is_a_bug() {
    let folder = tempdir().unwrap();
    let _ = fixture::write(folder.path(), 0, &[(1, 0..6)], 64);
}

/// Layouts tile every tensor: the fixture's own oracle.
#[test]
fn layouts_cover() {
    for layout in LAYOUTS {
        let Layout { ranks, .. } = layout;
        let owned: u64 = (0..ranks).flat_map(|rank| layout.owned(rank)).map(|(_, r)| r.end - r.start).sum();
        assert_eq!(owned, TENSORS.iter().map(|(_, _, shape, _)| elements(shape)).sum::<u64>());
    }
}
