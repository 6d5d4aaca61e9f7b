//! Fills the disk at a chosen byte: while a run starts, writes metrics or saves.
//!
//! The run ends with an error that names a file or the folder; what it saved before resumes to the same bits when there is
//! space again. The disk is a `tmpfs` of a few pages where mounting is permitted; otherwise `ulimit -f` bounds every file,
//! which strikes only files that are larger.

use std::ffi::CString;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};

use crate::hostile::Random;
use crate::reliability::mesh::{MESHES, Mesh};
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Meshes of one and two ranks.
const SMALL: usize = 9;

/// Bytes of the unit of a `tmpfs`.
const PAGE: u64 = 4096;

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let mesh = &MESHES[number % SMALL];
    let (name, result) = match world.case() {
        Ok(case) => match Disk::mounted(&case.path("disk")) {
            Ok(disk) => ("a tmpfs that is full", on_small_disk(&case, disk, mesh, random)),
            Err(_) => ("files that may not grow (ulimit -f)", with_small_files(&case, mesh, random)),
        },
        Err(error) => ("preparation", Err(error)),
    };
    Trial::new(name, format!("{name}, {}", mesh.name), result)
}

fn on_small_disk(case: &Case<'_>, disk: Disk, mesh: &Mesh, random: &mut Random) -> Result<(), String> {
    let reference = case.world.reference(mesh)?;
    // The largest moment of a run holds one checkpoint more than its end.
    let pages = 2 * reference.bytes / PAGE + 16;
    disk.resize(PAGE * (1 + random.below(pages as usize) as u64))?;
    let run = disk.path.join("r");
    let at = |words: Vec<String>| {
        let place = |word: String| if word == "r" { "disk/r".to_string() } else { word };
        words.into_iter().map(place).collect::<Vec<_>>()
    };
    let ended = case.phalanx(at(mesh.train(&["--quiet"]))).run()?;
    ended.orderly()?;
    match ended.code {
        Some(0) => {}
        Some(1) if ended.stderr.contains("disk") => {}
        _ => {
            return ended
                .wrong(&format!("ended with {:?} on a full disk and named no file on it", ended.code));
        }
    }
    disk.resize(1 << 26)?;
    case.phalanx(at(mesh.resume())).run()?.success()?;
    reference.is_equal(&run)
}

fn with_small_files(case: &Case<'_>, mesh: &Mesh, random: &mut Random) -> Result<(), String> {
    let reference = case.world.reference(mesh)?;
    let limit = format!("ulimit -f {}; exec", 1 + random.below(300));
    let ended = case.phalanx(mesh.train(&["--quiet"])).in_shell(&limit, "").run()?;
    ended.orderly()?;
    case.phalanx(mesh.resume()).run()?.success()?;
    reference.is_equal(&case.path("r"))
}

/// A mounted `tmpfs`, unmounted when it is dropped.
struct Disk {
    path: PathBuf,
}

impl Disk {
    fn mounted(path: &Path) -> Result<Disk, String> {
        std::fs::create_dir(path).map_err(|error| error.to_string())?;
        let options = CString::new("size=4096").expect("no zero byte");
        mount("tmpfs", path, "tmpfs", MountFlags::empty(), &*options).map_err(|error| error.to_string())?;
        Ok(Disk { path: path.to_path_buf() })
    }

    fn resize(&self, bytes: u64) -> Result<(), String> {
        let options = CString::new(format!("size={bytes}")).expect("no zero byte");
        mount_remount(&self.path, MountFlags::empty(), &*options)
            .map_err(|error| format!("a tmpfs of {bytes} bytes: {error}"))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A disk in use goes when its last user does.
        let _ = unmount(&self.path, UnmountFlags::DETACH);
    }
}
