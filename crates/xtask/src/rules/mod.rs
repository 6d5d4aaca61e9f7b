//! The rules, one file each.

pub mod circles;
pub mod files;
pub mod floors;
pub mod imports;
pub mod layers;
pub mod names;
pub mod paths;
pub mod reads;
pub mod rooms;
pub mod sizes;
pub mod start;
pub mod story;
pub mod test_files;
pub mod waits;
pub mod wording;
