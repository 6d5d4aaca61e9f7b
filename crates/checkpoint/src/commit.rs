//! Commits a checkpoint: syncs all files, writes the manifest last, and renames the folder.
//!
//! A crash before the rename leaves `step-N.tmp`, which no reader opens and the next [`begin`] removes; a crash after it
//! leaves a complete checkpoint. There is no pointer file that could disagree. Only rank 0 calls these functions, and a
//! run saves one checkpoint at a time.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::limits::MANIFEST_BYTES;
use crate::manifest::{MANIFEST, Manifest, PieceList};
use crate::read::Checkpoint;
use crate::steps::{self, SaveStage};
use crate::write::{data_file, is_own, list_file};
use crate::{CheckpointError, Result};

/// Makes the folder `step-N.tmp` under `checkpoints` (which is created) and returns its path. Removes the remains
/// of interrupted saves of any step; what others have put there stays.
///
/// # Errors
/// [`CheckpointError::Write`] or [`CheckpointError::Read`] when the folder cannot be used.
pub fn begin(checkpoints: &Path, step: u64) -> Result<PathBuf> {
    phalanx_system::files::create_folders(checkpoints).map_err(CheckpointError::writing(checkpoints))?;
    settle(checkpoints)?;
    let tmp = steps::unfinished(checkpoints, step);
    phalanx_system::files::create_folders(&tmp).map_err(CheckpointError::writing(&tmp))?;
    Ok(tmp)
}

/// Removes the remains of interrupted saves and purges under `checkpoints`, which need not exist. The caller must know
/// that no other process saves there.
///
/// # Errors
/// [`CheckpointError::Write`] or [`CheckpointError::Read`] when the folder cannot be used.
pub fn settle(checkpoints: &Path) -> Result<()> {
    for folder in steps::list(checkpoints)? {
        match folder.stage {
            SaveStage::Unfinished => remove_folder(&folder.path)?,
            SaveStage::Replaced => settle_replaced(checkpoints, folder.step)?,
            SaveStage::Committed => {}
        }
    }
    Ok(())
}

/// Turns `tmp`, as [`begin`] named it and into which `ranks` ranks have written, into the checkpoint
/// `step-N` beside it, replacing an older one of the same step, and returns its path. `state` is kept for
/// the caller: step, sampler cursor, configuration.
///
/// # Errors
/// [`CheckpointError::NotWhole`] when the pieces do not cover every tensor exactly once, or a rank wrote
/// nothing; [`CheckpointError::Write`], [`CheckpointError::Read`]. In every case `tmp` is removed and
/// older checkpoints are untouched.
///
/// # Panics
/// When `tmp` is not named `step-N.tmp`.
pub fn commit(tmp: &Path, state: Value, ranks: usize) -> Result<PathBuf> {
    let named = tmp.file_name().and_then(|name| name.to_str()).and_then(steps::parse);
    let Some((step, SaveStage::Unfinished)) = named else {
        panic!("{} was not made by begin", tmp.display());
    };
    let checkpoints = tmp.parent().expect("a path that ends in a name has a parent");
    let sealed = seal(tmp, step, state, ranks).and_then(|()| publish(checkpoints, tmp, step));
    if sealed.is_err() {
        // Best effort: the first error is reported, and the next `begin` tries again.
        let _ = remove_folder(tmp);
    }
    sealed
}

/// Removes a save that a rank could not finish.
///
/// # Errors
/// [`CheckpointError::Write`] when the folder cannot be removed.
pub fn discard(tmp: &Path) -> Result<()> {
    remove_folder(tmp)
}

/// Removes all but the newest `keep` (at least 1) whole checkpoints and those of the steps `kept`; returns the
/// removed folders. Call it only after [`commit`] of the last step, which is one of them. Damaged checkpoints are neither counted nor
/// touched, and those with something that no save has written ([`added`]) stay.
///
/// # Errors
/// [`CheckpointError::Read`] or [`CheckpointError::Write`].
///
/// # Panics
/// When `keep` is 0.
pub fn purge(checkpoints: &Path, keep: usize, kept: &[u64]) -> Result<Vec<PathBuf>> {
    assert!(keep >= 1, "at least one checkpoint must be kept");
    let whole = steps::list(checkpoints)?.into_iter().filter(|folder| {
        folder.stage == SaveStage::Committed
            && Checkpoint::open(&folder.path).and_then(|checkpoint| checkpoint.check_files()).is_ok()
    });
    let mut removed = Vec::new();
    for folder in whole.skip(keep).filter(|folder| !kept.contains(&folder.step)) {
        if added(&folder.path)?.is_some() {
            continue;
        }
        // A half-removed checkpoint must never be taken as the newest: it is renamed first or, where others have taken this
        // name, loses its manifest first.
        let renamed = steps::unfinished(checkpoints, folder.step);
        if phalanx_system::files::is_named(&renamed) {
            let manifest = folder.path.join(MANIFEST);
            fs::remove_file(&manifest).map_err(CheckpointError::writing(&manifest))?;
            remove_folder(&folder.path)?;
        } else {
            rename(&folder.path, &renamed)?;
            remove_folder(&renamed)?;
        }
        removed.push(folder.path);
    }
    Ok(removed)
}

/// Something in a folder of a checkpoint that no save has written: the first such name, or the folder itself if it is a link.
/// It is never removed.
///
/// # Errors
/// [`CheckpointError::Read`].
pub fn added(folder: &Path) -> Result<Option<PathBuf>> {
    if folder.is_symlink() {
        return Ok(Some(folder.to_path_buf()));
    }
    let added =
        phalanx_system::files::added_name(folder, is_own).map_err(CheckpointError::reading(folder))?;
    Ok(added.map(|name| folder.join(name)))
}

/// Returns whether `folder` holds a manifest and files of ranks, whole or damaged.
pub fn is_checkpoint(folder: &Path) -> bool {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let has_ranks =
        || names.into_iter().any(|name| name.to_str().is_some_and(|name| name != MANIFEST && is_own(name)));
    folder.join(MANIFEST).is_file() && has_ranks()
}

/// Checks what the ranks wrote, writes the manifest, removes the piece lists; all synced.
fn seal(tmp: &Path, step: u64, state: Value, ranks: usize) -> Result<()> {
    let lists = (0..ranks)
        .map(|rank| Ok((data_file(rank), piece_list(tmp, rank)?)))
        .collect::<Result<Vec<(String, PieceList)>>>()?;
    let manifest =
        Manifest::merge(step, state, lists).map_err(|reason| CheckpointError::NotWhole { reason })?;
    let path = tmp.join(MANIFEST);
    let bytes = manifest.encode().map_err(|reason| CheckpointError::NotWhole { reason })?;
    phalanx_system::files::write(&path, bytes).map_err(CheckpointError::writing(&path))?;
    for rank in 0..ranks {
        let list = tmp.join(list_file(rank));
        fs::remove_file(&list).map_err(CheckpointError::writing(&list))?;
    }
    phalanx_system::files::sync_folder(tmp).map_err(CheckpointError::writing(tmp))
}

/// The piece list of `rank`; checks that its data file has the stated length.
fn piece_list(tmp: &Path, rank: usize) -> Result<PieceList> {
    let path = tmp.join(list_file(rank));
    let bytes = match phalanx_system::files::read_bounded(&path, MANIFEST_BYTES) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            return Err(CheckpointError::NotWhole {
                reason: format!("rank {rank} has written nothing to {}", tmp.display()),
            });
        }
        other => other.map_err(CheckpointError::reading(&path))?,
    };
    let list: PieceList = serde_json::from_slice(&bytes).map_err(|cause| CheckpointError::NotWhole {
        reason: format!("the piece list {} is damaged: {cause}", path.display()),
    })?;
    let data = tmp.join(data_file(rank));
    let found = fs::metadata(&data).map_err(CheckpointError::reading(&data))?.len();
    if found != list.file_bytes {
        return Err(CheckpointError::WrongSize {
            path: data,
            expected: list.file_bytes,
            found,
            tensor: None,
        });
    }
    Ok(list)
}

/// Renames a sealed folder to its final name. An older checkpoint of the same step is renamed first, and renamed back
/// if this rename fails; a crash between the two renames leaves it readable as `step-N.replaced`.
fn publish(checkpoints: &Path, tmp: &Path, step: u64) -> Result<PathBuf> {
    let target = steps::committed(checkpoints, step);
    let aside = steps::replaced(checkpoints, step);
    let replaces = target.symlink_metadata().is_ok();
    if replaces {
        remove_folder(&aside)?;
        rename(&target, &aside)?;
    }
    if let Err(error) = rename(tmp, &target) {
        if replaces {
            let _ = rename(&aside, &target);
        }
        return Err(error);
    }
    if replaces {
        remove_folder(&aside)?;
    }
    Ok(target)
}

/// Cleans up after a crash in [`publish`]: removes the older checkpoint if the newer one has its final name, else
/// renames the older one back. What is no checkpoint stays as it is: somebody has put it there.
fn settle_replaced(checkpoints: &Path, step: u64) -> Result<()> {
    let target = steps::committed(checkpoints, step);
    let aside = steps::replaced(checkpoints, step);
    match (target.symlink_metadata().is_ok(), phalanx_system::files::is_named(&aside.join(MANIFEST))) {
        (true, _) => remove_folder(&aside),
        (false, true) => rename(&aside, &target),
        (false, false) => Ok(()),
    }
}

/// Renames a folder durably.
fn rename(from: &Path, to: &Path) -> Result<()> {
    phalanx_system::files::rename(from, to).map_err(CheckpointError::writing(to))
}

/// Removes what a save has written in a folder, and the folder if nothing else is in it; of a link, only the link.
fn remove_folder(folder: &Path) -> Result<()> {
    let removed = match folder.is_symlink() {
        true => fs::remove_file(folder),
        false => phalanx_system::files::remove_own(folder, is_own).map(drop),
    };
    removed.map_err(CheckpointError::writing(folder))
}
