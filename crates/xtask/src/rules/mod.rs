//! The rules, one file each.

pub mod circles;
pub mod files;
pub mod imports;
pub mod names;
pub mod paths;
pub mod reads;
pub mod rooms;
pub mod sizes;
pub mod story;
