//! The state of a rank as another host's launcher sends it, taken over and reported.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use phalanx_collectives::{HostJob, Hosts};

fuzz_target!(|bytes: &[u8]| {
    static JOB: OnceLock<HostJob> = OnceLock::new();
    let job = JOB.get_or_init(|| HostJob::on_host(&Hosts::new(vec![1, 3]), 0).unwrap());
    let rank = 1 + usize::from(bytes.first().copied().unwrap_or(0)) % 3;
    job.mirror(rank, bytes);
    (0..4).for_each(|rank| assert!(job.last_activity(rank).len() < 10_000));
    // What this host says of its own rank does not depend on it.
    assert!(job.activity(0).len() < 10_000);
});
