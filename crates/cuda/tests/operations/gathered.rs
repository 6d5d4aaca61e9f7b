//! Calls that follow each other: how many launches they are.

use phalanx_cuda::checks::GROUPS;

use crate::bench::Bench;
use crate::check_group;

/// Number of kernels that the emulator has launched; None on a card.
fn launches() -> Option<usize> {
    // SAFETY: the emulator, which the tests have loaded as the driver; the function writes one number.
    unsafe {
        let library = libloading::Library::new("libcuda.so").ok()?;
        let count =
            library.get::<unsafe extern "C" fn(*mut usize) -> u32>(b"phalanxEmulatorLaunches").ok()?;
        let mut launches = 0;
        (count(&mut launches) == 0).then_some(launches)
    }
}

#[test]
fn hundreds_of_small_calls_are_few_launches() {
    let Some(bench) = Bench::new("calls in a row") else { return };
    let group = GROUPS.iter().find(|group| group.name == "steps and sums in a row").unwrap();
    let before = launches();
    check_group(group, &bench);
    // 130 sums of squares and 130 sums along trees, 120 a launch; a sum of those; 130 steps, 64 a launch; steps of the last three
    // ranges again.
    let expected = 2 + 2 + 1 + 3 + 1;
    let counted = launches().zip(before).map(|(after, before)| after - before);
    assert!(counted.is_none_or(|counted| counted == expected), "{counted:?}, not {expected}");
}
