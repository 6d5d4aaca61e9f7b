//! An arena that replays a plan refuses wrong use: each rule is broken on purpose, on the rank's thread and on another.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{MemoryPlan, plan_memory};
use phalanx_tensor::{Arena, Category, DType, Device, Region, Tensor};

const NAMES: [&str; 3] = ["first", "second", "third"];

fn tensor(device: &Device, name: &'static str) -> Tensor {
    device.alloc(DType::F32, [100], Category::Activations, name)
}

fn weights(device: &Device) -> Tensor {
    device.phase(PhaseName::Init, || device.alloc(DType::F32, [100], Category::Parameters, "weights"))
}

/// Three tensors, one after the other: each takes the place of the one before. `keep` gets each in turn.
fn step(device: &Device, mut keep: impl FnMut(Tensor)) {
    for name in NAMES {
        keep(tensor(device, name));
    }
}

fn plan() -> MemoryPlan {
    let device = Device::meta(1);
    let _weights = weights(&device);
    device.phase(PhaseName::Step, || step(&device, drop));
    plan_memory(&device.take_trace(0)).unwrap()
}

fn replaying() -> Device {
    let plan = plan();
    assert_eq!(plan.arena_bytes, 2 * 448, "weights, and one tensor at a time");
    let region = Region::anonymous(plan.arena_bytes as usize).unwrap();
    Device::new(Cpu::new(1), Arena::replaying(plan, region))
}

#[test]
fn a_heap_that_keeps_gives_freed_memory_of_the_same_size_again() {
    let device = Device::new(Cpu::new(1), Arena::heap_that_keeps());
    let alloc = |elements: usize| device.alloc(DType::F32, [elements], Category::Activations, "x");
    let mut first = alloc(3);
    device.upload(&[1.0f32, 2.0, 3.0], first.view_mut());
    let place = first.view().as_slice::<f32>().as_ptr();
    drop(first);
    let (other_size, again, next) = (alloc(4), alloc(3), alloc(3));
    assert_eq!(again.view().as_slice::<f32>(), [1.0, 2.0, 3.0], "what lay there");
    assert_eq!(again.view().as_slice::<f32>().as_ptr(), place);
    assert_eq!(other_size.view().as_slice::<f32>(), [0.0; 4]);
    assert_eq!(next.view().as_slice::<f32>(), [0.0; 3], "the memory of `again` is in use");
}

/// The text of the panic that stops `run`.
#[track_caller]
fn stopped<T>(run: impl FnOnce() -> T) -> String {
    let payload = catch_unwind(AssertUnwindSafe(run)).err().expect("nothing was refused");
    *payload.downcast::<String>().expect("a text")
}

#[track_caller]
fn assert_words(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}

/// Words of every error that stops an allocation of `second` over `first`.
const OVERLAP: [&str; 4] = [
    "`second` (allocation 1 of phase step, 400 bytes at offset 448, allocated at",
    "would overwrite `first` (allocation 0 of phase step",
    "tests/arena.rs:",
    "still live",
];

#[test]
fn what_is_freed_in_time_is_replayed_in_every_step() {
    let device = replaying();
    let weights = weights(&device);
    for _ in 0..3 {
        device.phase(PhaseName::Step, || step(&device, drop));
    }
    drop(weights);
}

#[test]
fn an_allocation_over_a_live_tensor_is_refused_until_the_end() {
    let device = replaying();
    let _weights = weights(&device);
    let mut kept = Vec::new();
    assert_words(
        &stopped(|| device.phase(PhaseName::Step, || step(&device, |tensor| kept.push(tensor)))),
        &OVERLAP,
    );
    // The tensor goes, the error stays: the phase cannot be ended as if nothing had been.
    kept.clear();
    assert_words(&stopped(|| tensor(&device, "second")), &OVERLAP);
    assert_words(&stopped(|| device.arena().end()), &OVERLAP);
    assert_words(&stopped(|| device.arena().begin(PhaseName::Step)), &OVERLAP);
}

/// Who holds it, and where it is dropped later, does not matter.
#[test]
fn a_tensor_on_another_thread_is_live_until_it_is_dropped() {
    let device = replaying();
    let _weights = weights(&device);
    let (sender, receiver) = std::sync::mpsc::channel::<Tensor>();
    let (drop_now, told) = std::sync::mpsc::channel::<()>();
    let holder = std::thread::spawn(move || {
        let held = receiver.recv().unwrap();
        told.recv().unwrap();
        drop(held);
    });
    let mut sender = Some(sender);
    let text = stopped(|| {
        device.phase(PhaseName::Step, || {
            step(&device, |tensor| {
                if let Some(sender) = sender.take() {
                    sender.send(tensor).unwrap();
                }
            });
        })
    });
    assert_words(&text, &OVERLAP);
    drop_now.send(()).unwrap();
    holder.join().unwrap();
}

#[test]
fn a_tensor_that_is_never_dropped_is_live() {
    let device = replaying();
    let _weights = weights(&device);
    let text = stopped(|| device.phase(PhaseName::Step, || step(&device, std::mem::forget)));
    assert_words(&text, &OVERLAP);
}

#[test]
fn what_outlives_its_phase_is_named() {
    let device = replaying();
    let _weights = weights(&device);
    let mut third = None;
    let mut number = 0;
    let text = stopped(|| {
        device.phase(PhaseName::Step, || {
            step(&device, |tensor| {
                number += 1;
                third = (number == 3).then_some(tensor);
            });
        })
    });
    assert_words(&text, &["`third` (allocation 2 of phase step", "still live at the end of phase step"]);
}

/// A drop does not panic, on whatever thread it is: the next event of the rank does.
#[test]
fn freeing_what_init_keeps_stops_the_step_that_did_it() {
    let words = [
        "phase step freed `weights` (allocation 0 of phase init",
        "tests/arena.rs:",
        "stays for the whole run",
    ];
    for elsewhere in [false, true] {
        for during in [0, 2] {
            let device = replaying();
            let mut weights = Some(weights(&device));
            let mut number = 0;
            let text = stopped(|| {
                device.phase(PhaseName::Step, || {
                    step(&device, |tensor| {
                        drop(tensor);
                        match weights.take_if(|_| number == during) {
                            Some(weights) if elsewhere => {
                                std::thread::spawn(|| drop(weights)).join().unwrap()
                            }
                            Some(weights) => drop(weights),
                            None => {}
                        }
                        number += 1;
                    });
                })
            });
            assert_words(&text, &words);
            // In the last place no allocation followed: the end of the phase found it.
            assert_eq!(number, during + 1);
        }
    }
}

/// A rank that panics for another reason drops what it has in any order, and says its own reason.
#[test]
fn a_rank_that_unwinds_says_its_own_reason() {
    let device = replaying();
    let weights = weights(&device);
    let text = stopped(|| {
        let _weights = weights;
        device.phase(PhaseName::Step, || step(&device, |_| panic!("{}", String::from("its own reason"))))
    });
    assert_eq!(text, "its own reason");
}

/// The same of a step that fails: none follows, and its tensors go in any order.
#[test]
fn a_step_that_fails_is_not_held_against_its_plan() {
    let device = replaying();
    let weights = weights(&device);
    let failed = device.try_phase(PhaseName::Step, || {
        let first = tensor(&device, "first");
        drop(first);
        Err::<(), &str>("a peer died")
    });
    assert_eq!(failed, Err("a peer died"));
    drop(weights);
    let arena: &Arc<Arena> = device.arena();
    assert!(arena.peak().is_some());
}
