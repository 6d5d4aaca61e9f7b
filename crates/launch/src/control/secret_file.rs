//! The secret of a job in a file that only its user can read: 64 hexadecimal digits and an end of line.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use phalanx_collectives::secure::Secret;
use rustix::fs::{Mode, OFlags, open};

/// Bytes of the file.
const BYTES: usize = 65;

/// The digits of a secret. They go into files of mode 0600 and pipes only.
pub fn to_digits(secret: &Secret) -> String {
    secret.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The secret with these digits.
pub fn from_digits(text: &str) -> Option<Secret> {
    let digits: &[u8; 64] = text.trim_end().as_bytes().try_into().ok()?;
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |digit: u8| char::from(digit).to_digit(16);
        *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
    }
    Some(Secret::from_bytes(bytes))
}

/// Reads the secret in `path`.
///
/// # Errors
/// `NotFound` while it is not there. A file of another user, one that others can read or write, one that is no regular file,
/// or that holds no secret.
pub fn read_secret(path: &Path) -> Result<Secret> {
    let refused =
        |text: String| Error::new(ErrorKind::PermissionDenied, format!("{} {text}", path.display()));
    // A FIFO must not hold the reader up.
    let file = open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
    let file = File::from(file);
    let metadata = file.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    if !metadata.is_file() {
        return Err(refused("is no regular file".into()));
    }
    if metadata.uid() != own {
        return Err(refused(format!("belongs to user {}, not to user {own}", metadata.uid())));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(refused(format!(
            "can be used by other users (mode {mode:03o}): chmod 600 it, or remove it"
        )));
    }
    let mut text = String::new();
    let read = file.take(BYTES as u64 + 1).read_to_string(&mut text);
    let secret = read.ok().and_then(|_| from_digits(&text));
    secret.ok_or_else(|| {
        let text = format!("{} holds no secret: expected 64 hexadecimal digits", path.display());
        Error::new(ErrorKind::InvalidData, text)
    })
}

/// Makes a new secret in `path`, which must not be there. Readers see it whole or not at all.
///
/// # Errors
/// `AlreadyExists`, and the system's.
pub fn create_secret(path: &Path) -> Result<Secret> {
    let secret = Secret::generate()?;
    let beside = path.with_extension(format!("new-{}", std::process::id()));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mut file = File::from(open(&beside, flags, Mode::from_raw_mode(0o600))?);
    let written =
        file.write_all(format!("{}\n", to_digits(&secret)).as_bytes()).and_then(|()| file.sync_all());
    let linked = written.and_then(|()| std::fs::hard_link(&beside, path));
    let _ = std::fs::remove_file(&beside);
    linked.map(|()| secret)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_is_read_from_a_file_of_this_user_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        assert_eq!(read_secret(&path).unwrap_err().kind(), ErrorKind::NotFound);
        let secret = create_secret(&path).unwrap();
        assert!(read_secret(&path).unwrap() == secret);
        assert_eq!(create_secret(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        for mode in [0o640, 0o604, 0o620, 0o602] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let error = read_secret(&path).unwrap_err().to_string();
            assert!(error.contains("other users") && error.contains("chmod 600"), "{error}");
        }
        assert!(read_secret(folder.path()).unwrap_err().to_string().contains("no regular file"));
    }

    #[test]
    fn what_is_no_secret_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        for text in ["", "abc", &"g".repeat(64), &"0".repeat(63), &"0".repeat(66), &"é".repeat(32)] {
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            let error = read_secret(&path).unwrap_err().to_string();
            assert!(error.contains("64 hexadecimal digits"), "{text:?}: {error}");
        }
    }
}
