//! A profile counts the kernels of its device, except while it is paused.

use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_tensor::profile::Profile;
use phalanx_tensor::{Arena, Category, DType, Device};

#[test]
fn a_pause_counts_nothing() {
    let profile = Arc::new(Profile::default());
    let device = Device::new(Cpu::new(1), Arena::heap()).profiled(Arc::clone(&profile));
    let mut x = device.alloc(DType::F32, [8], Category::Workspace, "x");
    for paused in [false, true, false] {
        profile.pause(paused);
        device.fill(x.view_mut(), 1.0);
    }
    let times: Vec<_> =
        profile.take().into_iter().map(|(key, time)| (key.name, key.bytes, time.calls)).collect();
    assert_eq!(times, [("fill", 32, 2)]);
}
