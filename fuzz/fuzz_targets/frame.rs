//! The call that a rank of another host sends before the bytes: described in errors, whatever it is.
#![no_main]

use libfuzzer_sys::fuzz_target;
use phalanx_collectives::describe_frame;

fuzz_target!(|bytes: &[u8]| {
    assert!(describe_frame(bytes).is_none_or(|text| text.len() < 10_000));
});
