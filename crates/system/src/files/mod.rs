//! File system access of Phalanx: every durable write, every lock and every read of a file that another program may have
//! made goes through this crate.
//!
//! - [`AtomicFile`], [`write()`] and [`write_output`]: a reader sees the old file or the new one, also after a crash.
//! - [`append`]: a file that grows, as a log.
//! - [`create_folders`], [`rename`], [`sync_folder`]: changes of names that survive a power cut.
//! - [`remove_own`], [`added_name`]: a folder goes without what others have put there.
//! - [`FolderLock`]: one process at a time changes a folder; another learns who holds it.
//! - [`HeldFolder`]: whether a folder is still the one that it was.
//! - [`scratch_file`]: a file without a name, of a size that the disk has.
//! - [`open_regular`], [`read_bounded`], [`read_text`]: a FIFO does not hang the reader, `/dev/zero` does
//!   not fill its memory, and a link to nothing or a git-lfs pointer is called that; [`is_named`] finds all of these.
//!
//! Functions fail with [`std::io::Error`]; callers add the path and the advice.

mod append;
mod folder;
mod held;
mod lock;
mod read;
mod scratch;
mod write;

pub use append::append;
pub use folder::{added_name, create_folders, parent_of, remove_own, rename, sync_folder};
pub use held::HeldFolder;
pub use lock::{FolderLock, LOCK_FILE, LockError};
pub use read::{is_named, open_regular, read_bounded, read_text};
pub use scratch::{file_system_of, free_bytes, is_in_memory, scratch_file, set_buffered, set_direct};
pub use write::{AtomicFile, is_temporary, remove_temporary, write, write_output};
