//! A hostfile, and what `--include` and `--exclude` choose from it: the lines before the first empty one, and the two
//! after it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use phalanx_launch::{filter_hosts, parse_hostfile};

fuzz_target!(|text: &str| {
    let (hosts, filters) = text.split_once("\n\n").unwrap_or((text, ""));
    let (include, exclude) = filters.split_once('\n').unwrap_or((filters, ""));
    if let Ok(hosts) = parse_hostfile(hosts) {
        if let Ok(left) = filter_hosts(hosts.clone(), include, exclude) {
            assert!(!left.is_empty() && left.len() <= hosts.len());
        }
    }
});
