//! Effects on files of interruptions, planted links, special files and other processes.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use phalanx_system::files::{
    AtomicFile, FolderLock, HeldFolder, LockError, added_name, append, create_folders, free_bytes, is_named,
    is_temporary, open_regular, read_bounded, read_text, remove_own, remove_temporary, scratch_file, write,
    write_output,
};

/// Names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_file_appears_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("new/deep/file");
    let mut file = AtomicFile::create(&target).unwrap();
    file.write_all(b"head and tail").unwrap();
    assert!(!target.exists(), "nothing is visible before the commit");
    file.rewrite_head(b"HEAD").unwrap();
    file.commit().unwrap();
    assert_eq!(fs::read(&target).unwrap(), b"HEAD and tail");

    let mut file = AtomicFile::create(&target).unwrap();
    file.write_all(b"given up").unwrap();
    drop(file);
    assert_eq!(fs::read(&target).unwrap(), b"HEAD and tail");

    write(&target, b"second").unwrap();
    assert_eq!(fs::read(&target).unwrap(), b"second");
    assert_eq!(names(target.parent().unwrap()), ["file"], "no temporary file is left");
}

#[test]
fn a_planted_link_is_replaced_and_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (victim, target) = (folder.path().join("victim"), folder.path().join("target"));
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, &target).unwrap();
    write(&target, "new").unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(fs::symlink_metadata(&target).unwrap().is_file());
}

#[test]
fn only_our_own_leftovers_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let leftover = ".phalanx-0123456789abcdef.tmp";
    let others = [".config.toml.tmp", ".phalanx-12.tmp", "notes.tmp"];
    for name in others.iter().chain([&leftover]) {
        fs::write(folder.path().join(name), "x").unwrap();
    }
    assert!(is_temporary(leftover) && !others.iter().any(|name| is_temporary(name)));
    remove_temporary(folder.path()).unwrap();
    assert_eq!(names(folder.path()), others);
}

#[test]
fn names_that_cannot_be_written_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path| AtomicFile::create(path).err().expect("refused").kind();
    assert_eq!(refused(Path::new("/")), ErrorKind::InvalidInput);
    assert_eq!(refused(folder.path()), ErrorKind::IsADirectory);
    fs::write(folder.path().join("file"), "x").unwrap();
    assert!(create_folders(&folder.path().join("file/below")).is_err());
    assert!(create_folders(&folder.path().join("file")).is_err());
}

#[test]
fn special_files_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let start = Instant::now();
    for (path, what) in
        [(fifo.as_path(), "FIFO"), (Path::new("/dev/zero"), "device"), (folder.path(), "folder")]
    {
        let refused = open_regular(path).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput);
        assert!(refused.to_string().contains(what), "{refused}");
    }
    assert!(start.elapsed() < Duration::from_secs(5), "opening a FIFO must not wait for a writer");
}

/// Neither is the file that is meant, and neither is "no file": both are refused with the way to the file.
#[test]
fn links_to_nothing_and_git_lfs_pointers_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let [link, pointer, quote, none] =
        ["link", "pointer", "quote", "none"].map(|name| folder.path().join(name));
    symlink("../blobs/0a1b", &link).unwrap();
    let text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n";
    fs::write(&pointer, text).unwrap();
    fs::write(&quote, format!("A pointer begins with: {text}")).unwrap();
    for (path, words) in [
        (&link, ["a link to ../blobs/0a1b, which does not exist", "download the file again"]),
        (&pointer, ["a git-lfs pointer to a file of 548105171 bytes", "git lfs pull"]),
    ] {
        let refused = read_text(path, 1 << 20).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput, "not the kind of a file that is not there");
        assert!(words.iter().all(|word| refused.to_string().contains(word)), "{refused}");
        assert!(is_named(path));
    }
    assert!(read_text(&quote, 1 << 20).unwrap().contains("version https"));
    assert_eq!(open_regular(&none).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(!is_named(&none));
}

#[test]
fn reads_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, b"12345").unwrap();
    assert_eq!(read_bounded(&path, 5).unwrap(), b"12345");
    assert_eq!(read_bounded(&path, 4).unwrap_err().kind(), ErrorKind::FileTooLarge);
    // A hole of 1 TiB is refused by its size, without being read.
    File::create(&path).unwrap().set_len(1 << 40).unwrap();
    assert_eq!(read_bounded(&path, 1 << 20).unwrap_err().kind(), ErrorKind::FileTooLarge);
    // /proc claims no bytes and has some.
    assert!(!read_bounded(Path::new("/proc/self/status"), 1 << 16).unwrap().is_empty());
    assert_eq!(read_bounded(Path::new("/proc/self/status"), 3).unwrap_err().kind(), ErrorKind::FileTooLarge);
    fs::write(&path, b"ab\xff").unwrap();
    let refused = read_text(&path, 10).unwrap_err();
    assert!(refused.kind() == ErrorKind::InvalidData && refused.to_string().contains("byte 2"), "{refused}");
}

#[test]
fn a_folder_has_one_holder() {
    let folder = tempfile::tempdir().unwrap();
    let acquire = |folder: &Path| FolderLock::acquire(folder, "the holder\n");
    let lock = acquire(folder.path()).unwrap();
    // A second open of the file conflicts also within one process.
    let refused = acquire(folder.path()).unwrap_err();
    assert!(matches!(&refused, LockError::Held { holder } if holder == "the holder\n"), "{refused:?}");
    drop(lock);
    acquire(folder.path()).unwrap().remove().unwrap();
    assert!(names(folder.path()).is_empty());
    // A planted link is not followed: the file it points to keeps its content.
    let victim = folder.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    let other = tempfile::tempdir().unwrap();
    symlink(&victim, other.path().join(phalanx_system::files::LOCK_FILE)).unwrap();
    assert!(matches!(acquire(other.path()), Err(LockError::Failed(_))));
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
}

/// Whoever may open the file may lock it. What a crash or an earlier version has left in it is taken over; a file that is no lock
/// is not.
#[test]
fn a_lock_is_its_users_alone_and_no_other_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(phalanx_system::files::LOCK_FILE);
    for before in ["", "4711\n", "lock of", "\0\0\0", "lock of a Phalanx run\nprocess 1\n"] {
        fs::write(&path, before).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        drop(FolderLock::acquire(folder.path(), "me\n").unwrap());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600, "{before:?}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "lock of a Phalanx run\nme\n");
    }
    for other in [&b"# my lock\n"[..], b"12 34", &[0xff; 40], &[b'x'; 5000]] {
        fs::write(&path, other).unwrap();
        let refused = FolderLock::acquire(folder.path(), "me\n").unwrap_err();
        assert!(
            matches!(&refused, LockError::Failed(cause) if cause.to_string().contains("move it away")),
            "{refused:?}"
        );
        assert_eq!(fs::read(&path).unwrap(), other);
    }
}

#[test]
fn folders_go_without_what_others_have_put_there() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("a/b");
    assert_eq!(create_folders(&inner).unwrap(), [folder.path().join("a"), inner.clone()]);
    assert!(create_folders(&inner).unwrap().is_empty());
    let is_own = |name: &str| name.starts_with("own");
    for name in ["own-1", "own-2", "theirs"] {
        fs::write(inner.join(name), "").unwrap();
    }
    fs::create_dir(inner.join("own-empty")).unwrap();
    create_folders(&inner.join("own-full/x")).unwrap();
    assert_eq!(added_name(&inner, is_own).unwrap().unwrap(), "theirs");
    assert!(!remove_own(&inner, is_own).unwrap());
    assert_eq!(names(&inner), ["own-full", "theirs"]);
    fs::remove_file(inner.join("theirs")).unwrap();
    fs::remove_dir_all(inner.join("own-full")).unwrap();
    assert!(remove_own(&inner, is_own).unwrap() && !inner.exists());
    assert!(remove_own(&inner, is_own).unwrap() && added_name(&inner, is_own).unwrap().is_none());
    // A link stays, and so does what it leads to.
    symlink(folder.path().join("a"), &inner).unwrap();
    assert_eq!(remove_own(&inner, is_own).unwrap_err().kind(), ErrorKind::NotADirectory);
    assert_eq!(added_name(&inner, is_own).unwrap_err().kind(), ErrorKind::NotADirectory);
    assert!(is_named(&inner));
}

#[test]
fn devices_and_fifos_are_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    // A link to a device stands for the device itself, which a test must not risk.
    let device = folder.path().join("device");
    symlink("/dev/null", &device).unwrap();
    assert_eq!(write(&device, "x").unwrap_err().kind(), ErrorKind::InvalidInput);
    write_output(&device, "x").unwrap();
    assert!(fs::symlink_metadata(&device).unwrap().is_symlink());
    assert_eq!(names(folder.path()), ["device"]);
}

#[test]
fn output_goes_where_the_user_says_and_nowhere_else() {
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    fs::write(&file, "old").unwrap();
    symlink(&file, &link).unwrap();
    write_output(&link, "new").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "new");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(write_output(&folder.path().join("no/file"), "x").unwrap_err().kind(), ErrorKind::NotFound);
    assert!(!folder.path().join("no").exists());
}

#[test]
fn a_held_folder_notices_that_it_was_removed_replaced_or_emptied() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("run");
    let make = || {
        fs::create_dir(&path).unwrap();
        fs::write(path.join("config"), "").unwrap();
        HeldFolder::hold(&path, &["config", "tokens"]).unwrap()
    };
    let held = make();
    held.check().unwrap();
    fs::remove_file(path.join("config")).unwrap();
    assert!(held.check().unwrap_err().to_string().contains("config was removed"));
    fs::remove_dir(&path).unwrap();
    assert!(held.check().unwrap_err().to_string().contains("the folder was removed"));
    let again = make();
    assert!(held.check().unwrap_err().to_string().contains("another folder"));
    again.check().unwrap();
}

#[test]
fn a_log_grows_and_does_not_follow_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let (log, link) = (folder.path().join("log"), folder.path().join("link"));
    append(&log).unwrap().write_all(b"one\n").unwrap();
    append(&log).unwrap().write_all(b"two\n").unwrap();
    assert_eq!(fs::read_to_string(&log).unwrap(), "one\ntwo\n");
    symlink(&log, &link).unwrap();
    assert!(append(&link).is_err());
}

#[test]
fn a_scratch_file_has_its_bytes_and_no_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = scratch_file(folder.path(), 10_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 10_000);
    // In blocks of 512 bytes: all are there, so that no write finds the disk full.
    assert!(file.metadata().unwrap().blocks() * 512 >= 10_000);
    assert!(names(folder.path()).is_empty());
    assert_eq!(scratch_file(folder.path(), 0).unwrap().metadata().unwrap().len(), 0);
}

#[test]
fn a_scratch_file_that_does_not_fit_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    // Far more than other programs free meanwhile.
    let bytes = free_bytes(folder.path()).unwrap() + (1 << 50);
    let error = scratch_file(folder.path(), bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert!(error.to_string().starts_with(&format!("{bytes} bytes are needed, ")), "{error}");
    let missing = scratch_file(&folder.path().join("missing"), 1).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}
