//! The integration tests of this crate, as one program.

mod arena;
mod disk;
mod disk_files;
mod flights;
mod placement;
mod profile;
