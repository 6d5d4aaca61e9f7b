//! The system below the project: files, the host and its processes, random numbers.
#![forbid(unsafe_code)]

pub mod files;
pub mod host;
pub mod random;
