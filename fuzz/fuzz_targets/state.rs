//! The state of a rank as another host's launcher sends it, taken over and reported.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use phalanx_collectives::{HostJob, Hosts};

fuzz_target!(|bytes: &[u8]| {
    static JOB: OnceLock<HostJob> = OnceLock::new();
    let job = JOB.get_or_init(|| HostJob::on_host(&Hosts::new(vec![1, 3]), 0).unwrap());
    job.mirror(2, bytes);
    assert!(job.last_activity(2).len() < 10_000);
    let _ = job.activity(2);
});
