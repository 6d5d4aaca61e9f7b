//! Cost of the arena of a planned run: `cargo run --release -p phalanx-train --example arena`.
//!
//! Takes the memory plan of a step of examples/nanogpt_cpu.toml, replays a phase with as many allocations of the same
//! sizes, of which at least as many are live at once, and prints the time of an allocation with its free, and of all of
//! a step. A step of that model takes about 12 ms on two cores.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own, for a terminal")]

use std::hint::black_box;
use std::time::Instant;

use phalanx_cpu::Cpu;
use phalanx_models::Gpt2;
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{MemoryPlan, plan_memory};
use phalanx_tensor::{Arena, DType, Device, Region, Tensor};
use phalanx_train::{RunConfig, RunPlan, Spec};

const ROUNDS: usize = 2000;

/// An allocation of a phase, by its number, or the free of one.
#[derive(Clone, Copy)]
enum Event {
    Alloc(usize),
    Free(usize),
}

/// The plan of nanoGPT's setting for a CPU.
fn nanogpt() -> MemoryPlan {
    let mut config = RunConfig::default();
    (config.model.seq, config.batch.global) = (64, 12);
    let model = Gpt2 { layers: 4, hidden: 128, heads: 4, vocab: 65, positions: 64, ..Gpt2::default() };
    let spec = Spec::new(&config, model, 240, 2).expect("nanoGPT's setting");
    RunPlan::new(spec).expect("a plan").of(0).memory.clone()
}

/// Allocations in their order; each free as late as the places allow.
fn events(plan: &MemoryPlan) -> Vec<Event> {
    let slots = &plan.phase(PhaseName::Step).expect("a step").slots;
    let (mut live, mut events) = (Vec::<usize>::new(), Vec::new());
    for (number, slot) in slots.iter().enumerate() {
        live.retain(|other| {
            let apart =
                slots[*other].end(plan.align) <= slot.offset || slot.end(plan.align) <= slots[*other].offset;
            if !apart {
                events.push(Event::Free(*other));
            }
            apart
        });
        live.push(number);
        events.push(Event::Alloc(number));
    }
    events.extend(live.into_iter().map(Event::Free));
    events
}

fn alloc(device: &Device, plan: &MemoryPlan, phase: PhaseName, number: usize) -> Tensor {
    let slot = &plan.phase(phase).expect("a phase of the plan").slots[number];
    device.alloc(DType::F32, [slot.bytes.div_ceil(4) as usize], slot.category, slot.name)
}

fn init(device: &Device, plan: &MemoryPlan) -> Vec<Tensor> {
    let count = plan.phase(PhaseName::Init).expect("init").slots.len();
    device.phase(PhaseName::Init, || {
        (0..count).map(|number| alloc(device, plan, PhaseName::Init, number)).collect()
    })
}

fn step(device: &Device, plan: &MemoryPlan, events: &[Event], held: &mut [Option<Tensor>]) {
    device.phase(PhaseName::Step, || {
        for event in events {
            match *event {
                Event::Alloc(number) => held[number] = Some(alloc(device, plan, PhaseName::Step, number)),
                Event::Free(number) => held[number] = None,
            }
        }
    });
}

fn main() -> std::io::Result<()> {
    let plan = nanogpt();
    let events = events(&plan);
    let count = plan.phase(PhaseName::Step).expect("a step").slots.len();
    let mut held: Vec<Option<Tensor>> = (0..count).map(|_| None).collect();
    let meta = Device::meta(1);
    let _weights = init(&meta, &plan);
    step(&meta, &plan, &events, &mut held);
    let replayed = plan_memory(&meta.take_trace(0)).expect("the same sizes");
    let region = Region::anonymous(replayed.arena_bytes as usize)?;
    let device = Device::new(Cpu::new(1), Arena::replaying(replayed, region));
    let _weights = init(&device, &plan);
    let mut fastest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        step(black_box(&device), &plan, &events, &mut held);
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    println!(
        "{count} allocations a step: {:.0} ns each with its free, {:.1} us together ({:.3} % of 12 ms)",
        fastest / count as f64 * 1e9,
        fastest * 1e6,
        fastest / 12e-3 * 100.0
    );
    Ok(())
}
