//! A configuration file: read, completed and checked.
#![no_main]

use libfuzzer_sys::fuzz_target;
use phalanx_train::{ResolvedConfig, RunConfig};

fuzz_target!(|text: &str| {
    if let Ok(config) = toml::from_str::<RunConfig>(text) {
        let _ = ResolvedConfig::new(config);
    }
});
