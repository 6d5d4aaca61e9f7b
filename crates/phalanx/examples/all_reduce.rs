//! The sum of a tensor over three ranks, before and after: `cargo run --release -p phalanx --example all_reduce`.
//!
//! Each rank is a thread with a group; the tensor travels into the call and comes back from the wait, so nobody can
//! touch it on its way.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own, for a terminal")]

use phalanx::{Arena, Category, CollectiveError, Cpu, DType, Device, threads};

/// Prints what each rank has.
pub fn main() -> Result<(), CollectiveError> {
    let lines = std::thread::scope(|scope| {
        let ranks: Vec<_> = threads(3)
            .into_iter()
            .map(|endpoint| {
                scope.spawn(move || {
                    let device = Device::new(Cpu::new(1), Arena::heap());
                    let group = endpoint.group("world");
                    let rank = group.rank() as f32;

                    let mut x = device.alloc(DType::F32, [4], Category::Workspace, "x");
                    let before = [rank, 10.0 * rank, 1.0, 0.5];
                    device.upload(&before, x.view_mut());
                    let x = group.all_reduce(x).wait()?;

                    let mut after = [0f32; 4];
                    device.download(x.view(), &mut after)?;
                    Ok::<_, CollectiveError>(format!("rank {rank}: before {before:?}, after {after:?}"))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Result<Vec<_>, _>>()
    })?;
    lines.iter().for_each(|line| println!("{line}"));
    Ok(())
}
