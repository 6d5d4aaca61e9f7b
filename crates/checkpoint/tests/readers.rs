//! Whoever reads a checkpoint while its run saves and removes others sees whole checkpoints only.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::fixture::{LAYOUTS, assert_whole, names, save};
use phalanx_checkpoint::{Checkpoint, newest, purge};
use tempfile::tempdir;

/// Steps that are saved while others read.
const STEPS: u64 = 40;

#[test]
fn an_open_checkpoint_stays_readable_after_it_was_removed_or_replaced() {
    let folder = tempdir().unwrap();
    let first = Checkpoint::open(&save(folder.path(), 1, LAYOUTS[1])).unwrap();
    save(folder.path(), 2, LAYOUTS[0]);
    assert_eq!(purge(folder.path(), 1, &[2]).unwrap().len(), 1);
    assert!(!first.dir().exists());
    assert_whole(&first);

    let replaced = Checkpoint::open(&folder.path().join("step-2")).unwrap();
    save(folder.path(), 2, LAYOUTS[3]);
    replaced.check_files().unwrap();
    assert_whole(&replaced);
}

#[test]
fn readers_beside_a_run_that_purges_never_see_damage() {
    let folder = tempdir().unwrap();
    let path = folder.path();
    save(path, 1, LAYOUTS[1]);
    let saving = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let read = || {
            let mut seen = 0;
            while saving.load(Ordering::Relaxed) {
                let found = newest(path).unwrap();
                assert!(found.skipped.is_empty(), "{:?}", found.skipped);
                let checkpoint = found.checkpoint.expect("there is always one");
                assert!(checkpoint.step() >= seen, "the newest is never older than before");
                seen = checkpoint.step();
                assert_whole(&checkpoint);
            }
        };
        let readers = [scope.spawn(read), scope.spawn(read)];
        for step in 2..=STEPS {
            save(path, step, LAYOUTS[step as usize % 2]);
            purge(path, 1, &[step]).unwrap();
            // The same step again, as a run that was resumed from an older one saves it.
            save(path, step, LAYOUTS[1]);
        }
        saving.store(false, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    assert_eq!(names(path), [format!("step-{STEPS}")]);
}

#[test]
fn what_was_just_saved_is_never_removed() {
    let folder = tempdir().unwrap();
    for step in [100, 90, 4] {
        save(folder.path(), step, LAYOUTS[0]);
    }
    assert_eq!(purge(folder.path(), 1, &[4]).unwrap(), [folder.path().join("step-90")]);
    assert_eq!(names(folder.path()), ["step-100", "step-4"]);
}

#[test]
fn every_byte_of_a_header_counts() {
    let folder = tempdir().unwrap();
    save(folder.path(), 1, LAYOUTS[0]);
    let dir = save(folder.path(), 2, LAYOUTS[1]);
    let file = dir.join("rank-00001.safetensors");
    let whole = fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in 0..header {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(&file, damaged).unwrap();
        let error = Checkpoint::open(&dir).unwrap().check_files().unwrap_err().to_string();
        assert!(error.contains("rank-00001.safetensors") && error.contains("header"), "byte {at}: {error}");
    }
    let found = newest(folder.path()).unwrap();
    assert_eq!((found.checkpoint.unwrap().step(), found.skipped.len()), (1, 1));
    fs::write(&file, whole).unwrap();
    Checkpoint::open(&dir).unwrap().check_files().unwrap();
}
