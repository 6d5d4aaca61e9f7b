//! The variables of other launchers, as lines of `NAME=value`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use phalanx_launch::{Variables, foreign_rank};

fuzz_target!(|text: &str| {
    let read = |name: &str| {
        let line = text.lines().find(|line| line.split_once('=').is_some_and(|(known, _)| known == name))?;
        line.split_once('=').map(|(_, value)| value.to_string())
    };
    let _ = foreign_rank(&Variables::new(&read));
});
