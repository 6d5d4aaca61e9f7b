//! Damage is found before it is used, named, and never spreads to older checkpoints.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;

use crate::fixture::{LAYOUTS, assert_whole, names, newest_step, save, write};
use phalanx_checkpoint::{Checkpoint, CheckpointError, begin, newest};
use tempfile::tempdir;

/// Flips one bit.
fn damage(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

fn cut(path: &Path, bytes: u64) {
    let file = File::options().write(true).open(path).unwrap();
    let long = file.metadata().unwrap().len();
    file.set_len(long - bytes).unwrap();
}

#[test]
fn a_flipped_bit_is_named() {
    let folder = tempdir().unwrap();
    let dir = save(folder.path(), 4, LAYOUTS[1]);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let tensor = checkpoint.tensor("parameters", "wte.weight").unwrap();
    let piece = &tensor.pieces[1];
    damage(&dir.join(&piece.file), piece.bytes(tensor.dtype).end - 1);

    // The intact piece can be read; the damaged one cannot, for any range in it.
    let mut out = [0; 16];
    checkpoint.read("parameters", "wte.weight", 10..14, &mut out).unwrap();
    for range in [296..300, 400..404, 588..592, 294..298] {
        let error = checkpoint.read("parameters", "wte.weight", range, &mut out).unwrap_err();
        let message = error.to_string();
        for word in ["parameters/wte.weight", "elements 296 to 592", "rank-00001.safetensors"] {
            assert!(message.contains(word), "{word:?} in {message}");
        }
    }
    checkpoint.read("parameters", "ln_f.bias", 0..4, &mut out).unwrap();

    let mut done = 0;
    let reports = checkpoint.verify_all(&mut |bytes| done += bytes).unwrap();
    let damaged: Vec<_> = reports.iter().filter(|report| !report.damage.is_empty()).collect();
    assert_eq!(damaged.len(), 1);
    assert_eq!((damaged[0].state.as_str(), damaged[0].name.as_str()), ("parameters", "wte.weight"));
    assert!(damaged[0].statistics.is_none() && damaged[0].damage.len() == 1);
    assert_eq!(done, 592 * (4 + 8 + 2) + 5 * (4 + 2) + 3 * 4);
}

#[test]
fn every_byte_of_the_data_and_of_the_manifest_counts() {
    let folder = tempdir().unwrap();
    let dir = save(folder.path(), 4, LAYOUTS[4]);
    let manifest = dir.join("manifest.json");
    for at in (0..fs::metadata(&manifest).unwrap().len() - 1).step_by(97) {
        damage(&manifest, at);
        let error = Checkpoint::open(&dir).unwrap_err();
        assert!(error.to_string().contains("manifest.json"), "byte {at}: {error}");
        damage(&manifest, at);
    }
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for tensor in checkpoint.tensors() {
        for piece in &tensor.pieces {
            let bytes = piece.bytes(tensor.dtype);
            for at in [bytes.start, (bytes.start + bytes.end) / 2, bytes.end - 1] {
                damage(&dir.join(&piece.file), at);
                let mut out = vec![0; tensor.elements() as usize * tensor.dtype.bytes()];
                let fresh = Checkpoint::open(&dir).unwrap();
                let error =
                    fresh.read(&tensor.state, &tensor.name, 0..tensor.elements(), &mut out).unwrap_err();
                assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
                damage(&dir.join(&piece.file), at);
            }
        }
    }
    assert_whole(&checkpoint);
}

#[test]
fn newest_skips_the_damaged_and_says_so() {
    let folder = tempdir().unwrap();
    for step in [1, 2, 3, 10] {
        save(folder.path(), step, LAYOUTS[1]);
    }
    fs::remove_file(folder.path().join("step-10/rank-00001.safetensors")).unwrap();
    damage(&folder.path().join("step-3/manifest.json"), 200);
    cut(&folder.path().join("step-2/rank-00000.safetensors"), 1);
    fs::write(folder.path().join("step-99"), "a file").unwrap();
    fs::create_dir(folder.path().join("notes")).unwrap();
    let found = newest(folder.path()).unwrap();
    assert_eq!(found.checkpoint.unwrap().step(), 1);
    let told: Vec<String> = found.skipped.iter().map(|skipped| skipped.reason.to_string()).collect();
    assert_eq!(told.len(), 4, "{told:?}");
    for (message, word) in told.iter().zip(["step-99", "has 0 bytes", "was edited", "bytes and"]) {
        assert!(message.contains(word), "{word:?} in {message}");
    }
}

#[test]
fn truncated_and_missing_files_tell_bytes() {
    let folder = tempdir().unwrap();
    let dir = save(folder.path(), 1, LAYOUTS[0]);
    let file = dir.join("rank-00000.safetensors");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let long = fs::metadata(&file).unwrap().len();
    cut(&file, 5);
    let mut out = [0; 12];
    let error = checkpoint.read("counts", "wte.weight", 0..3, &mut out).unwrap_err().to_string();
    for word in [&*format!("has {} bytes", long - 5), &*format!("{long} were expected"), "counts/wte.weight"]
    {
        assert!(error.contains(word), "{word:?} in {error}");
    }
    let reports = checkpoint.verify_all(&mut |_| ()).unwrap();
    assert_eq!(reports.iter().filter(|report| !report.damage.is_empty()).count(), 1);

    fs::remove_file(&file).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let error = checkpoint.read("counts", "wte.weight", 0..3, &mut out).unwrap_err().to_string();
    assert!(error.contains("has 0 bytes"), "{error}");
    let error = checkpoint.check_files().unwrap_err().to_string();
    assert!(error.contains("rank-00000.safetensors") && error.contains("has 0 bytes"), "{error}");
}

#[test]
fn unknown_tensors_and_ranges() {
    let folder = tempdir().unwrap();
    let dir = save(folder.path(), 1, LAYOUTS[0]);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let error = checkpoint.read("parameters", "wte.wieght", 0..1, &mut [0; 4]).unwrap_err().to_string();
    assert!(error.ends_with("nearest that it has is parameters/wte.weight"), "{error}");
    let error = checkpoint.tensor("momentum", "ln_f.bias").unwrap_err().to_string();
    assert!(error.contains("momentum/ln_f.bias"), "{error}");
    let error = checkpoint.read("parameters", "ln_f.bias", 4..6, &mut [0; 8]).unwrap_err().to_string();
    assert!(error.contains("[5]") && error.contains("another model"), "{error}");
    let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("give a step-N folder"), "{error}");
    let error = Checkpoint::open(&folder.path().join("step-2")).unwrap_err().to_string();
    assert!(error.contains("no such folder"), "{error}");
}

#[test]
fn another_version_is_refused_as_such() {
    let folder = tempdir().unwrap();
    let dir = save(folder.path(), 1, LAYOUTS[0]);
    let path = dir.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap().replace("\"version\": 1", "\"version\": 3");
    let rest = text.split_once("\",\n").unwrap().1.strip_suffix('\n').unwrap();
    let sealed = format!("{{\n  \"blake3\": \"{}\",\n{rest}\n", blake3::hash(rest.as_bytes()).to_hex());
    fs::write(&path, sealed).unwrap();
    let error = Checkpoint::open(&dir).unwrap_err().to_string();
    assert!(error.contains("version 3") && error.contains("newer"), "{error}");
}

#[test]
fn a_rank_that_cannot_write_leaves_nothing_and_spares_the_rest() {
    let folder = tempdir().unwrap();
    save(folder.path(), 1, LAYOUTS[0]);
    let tmp = begin(folder.path(), 2).unwrap();
    fs::create_dir(tmp.join("rank-00000.safetensors")).unwrap();
    let error = write(&tmp, 0, &LAYOUTS[0].owned(0), 64).unwrap_err();
    assert!(matches!(&error, CheckpointError::Write { .. }), "{error}");
    assert_eq!(names(&tmp), ["rank-00000.safetensors"], "no temporary file, no list of pieces");
    assert_eq!(newest_step(folder.path()), Some(1));

    let (path, cause) = (tmp.join("rank-00000.safetensors"), io::ErrorKind::StorageFull.into());
    let message = CheckpointError::Write { path, cause }.to_string();
    for word in ["rank-00000.safetensors", "free space", "what was there before is untouched"] {
        assert!(message.contains(word), "{word:?} in {message}");
    }
}

#[test]
fn a_planted_link_is_replaced_and_not_followed() {
    let folder = tempdir().unwrap();
    let victim = folder.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    let tmp = begin(&folder.path().join("checkpoints"), 2).unwrap();
    symlink(&victim, tmp.join("rank-00000.safetensors")).unwrap();
    write(&tmp, 0, &LAYOUTS[0].owned(0), 64).unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(fs::symlink_metadata(tmp.join("rank-00000.safetensors")).unwrap().is_file());
}

#[test]
fn folders_that_cannot_be_written() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("checkpoints");
    fs::write(&file, "").unwrap();
    let error = begin(&file, 1).unwrap_err().to_string();
    assert!(error.contains("a file is in the place of a folder"), "{error}");

    let locked = folder.path().join("locked");
    save(&locked, 1, LAYOUTS[1]);
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    // Root may write anywhere, so this cannot be tested as root.
    if File::create(locked.join("probe")).is_err() {
        let error = begin(&locked, 2).unwrap_err().to_string();
        assert!(error.contains("the right to write there"), "{error}");
    }
    assert_eq!(newest_step(&locked), Some(1));
    assert_whole(&newest(&locked).unwrap().checkpoint.unwrap());
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
}
