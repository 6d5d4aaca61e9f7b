//! Memory plans against what they promise, for small traces drawn by hand and many random ones.

use crate::generator::Generator;
use phalanx_plan::packing::{Lifetime, live_peak, pack};
use phalanx_plan::trace::{Bytes, Category, Event, Memory, Phase, PhaseName, Site, Trace};
use phalanx_plan::{ALIGN, MemoryPlan, Peak, PeakMeter, plan_memory, plan_memory_of};

/// A trace under construction; numbers allocations like the `Meta` device.
struct Script {
    phases: Vec<Phase>,
    next: u32,
}

impl Script {
    fn new() -> Script {
        Script { phases: Vec::new(), next: 0 }
    }

    fn phase(&mut self, name: PhaseName) -> &mut Script {
        self.phases.push(Phase { name, events: Vec::new() });
        self
    }

    fn alloc(&mut self, bytes: u64, category: Category) -> u32 {
        let id = self.next;
        self.next += 1;
        let site = Site { file: "block.rs", line: id };
        self.event(Event::Alloc { id, memory: Memory::Device, bytes, category, name: "tensor", site });
        id
    }

    fn free(&mut self, id: u32) {
        self.event(Event::Free { id, memory: Memory::Device });
    }

    fn event(&mut self, event: Event) {
        self.phases.last_mut().unwrap().events.push(event);
    }

    fn trace(self) -> Trace {
        Trace { rank: 0, phases: self.phases, faults: Vec::new() }
    }
}

/// A trace with random lifetimes, in part stack-like.
fn random_trace(random: &mut Generator, later_phases: u64, allocations: u64) -> Trace {
    let mut script = Script::new();
    for number in 0..=later_phases {
        script.phase(if number == 0 { PhaseName::Init } else { PhaseName::Step });
        let mut live = Vec::new();
        for _ in 0..random.within(0, allocations) {
            while !live.is_empty() && random.within(0, 9) < 4 {
                let last = live.len() as u64 - 1;
                let position = if random.within(0, 1) == 0 { last } else { random.within(0, last) };
                script.free(live.remove(position as usize));
            }
            let category = Category::ALL[random.within(0, 5) as usize];
            let bytes = [random.within(0, 9), random.within(0, 999), 64 * random.within(1, 99)];
            live.push(script.alloc(bytes[random.within(0, 2) as usize], category));
        }
        let stay = if number == 0 { live.len() / 2 } else { 0 };
        for id in live.drain(stay..) {
            script.free(id);
        }
    }
    script.trace()
}

/// Checks the properties that hold for every plan. Returns the maximum of live bytes in the last phase.
fn check(trace: &Trace, plan: &MemoryPlan) -> u64 {
    let mut meter = PeakMeter::new(ALIGN);
    let mut live: Vec<(u32, u64, u64)> = Vec::new();
    let mut first_id = 0;
    let mut largest = Peak::default();
    let mut max_live = 0;
    assert_eq!(trace.phases.len(), plan.phases.len());
    for (number, (phase, planned)) in trace.phases.iter().zip(&plan.phases).enumerate() {
        assert_eq!(phase.name, planned.name);
        if number > 0 {
            let kept: u64 = live.iter().map(|(_, start, end)| end - start).sum();
            assert_eq!(kept, plan.persistent_bytes, "what stays has no gaps");
            assert!(live.iter().all(|(_, _, end)| *end <= plan.persistent_bytes));
            meter.start_phase();
        }
        max_live = meter.live().total();
        for event in &phase.events {
            match *event {
                Event::Alloc { id, bytes, .. } => {
                    let slot = planned.slots[(id - first_id) as usize];
                    assert_eq!((slot.bytes, slot.offset % ALIGN), (bytes, 0));
                    let (start, end) = (slot.offset, slot.end(ALIGN));
                    let free =
                        live.iter().all(|(_, s, e)| end <= *s || *e <= start || start == end || s == e);
                    assert!(free, "{slot:?} overlaps what is live");
                    live.push((id, start, end));
                    meter.alloc(&slot);
                    max_live = max_live.max(meter.live().total());
                }
                Event::Free { id, .. } => {
                    live.retain(|(other, ..)| *other != id);
                    meter.free(&planned.slots[(id - first_id) as usize]);
                }
                _ => {}
            }
        }
        first_id += planned.slots.len() as u32;
        assert_eq!(planned.peak, meter.phase_peak());
        assert_eq!(planned.peak.categories.total(), planned.peak.bytes);
        let ends = planned.slots.iter().map(|s| s.end(ALIGN)).max().unwrap_or(0);
        let floor = if number == 0 { 0 } else { plan.persistent_bytes };
        assert_eq!(planned.peak.bytes, ends.max(floor));
        assert!(planned.peak.bytes >= max_live);
        if planned.peak.is_above(&largest) {
            largest = planned.peak;
        }
    }
    assert_eq!(meter.peak(), plan.peak);
    assert_eq!(plan.peak, largest);
    assert_eq!(plan.arena_bytes, plan.peak.bytes);
    max_live
}

#[test]
fn a_step_is_planned_as_drawn() {
    let mut script = Script::new();
    script.phase(PhaseName::Init);
    let staging = script.alloc(1000, Category::Workspace);
    script.alloc(100, Category::Parameters);
    script.free(staging);
    script.alloc(64, Category::Optimizer);
    script.phase(PhaseName::Step);
    let saved = script.alloc(640, Category::Activations);
    let scratch = script.alloc(300, Category::Workspace);
    script.free(scratch);
    let gradient = script.alloc(128, Category::Gradients);
    script.free(saved);
    script.free(gradient);
    let trace = script.trace();
    let plan = plan_memory(&trace).unwrap();
    check(&trace, &plan);

    assert_eq!(plan.persistent_bytes, 128 + 64);
    let offsets =
        |phase: PhaseName| plan.phase(phase).unwrap().slots.iter().map(|s| s.offset).collect::<Vec<_>>();
    assert_eq!(offsets(PhaseName::Init), [192, 0, 128]);
    assert_eq!(offsets(PhaseName::Step), [192, 832, 832]);
    // 1000 bytes of staging end at 192 + 1024; most was live before the optimizer came.
    let init = Bytes { parameters: 100, workspace: 1116, ..Bytes::default() };
    let activations = init.activations;
    assert_eq!(plan.phases[0].peak, Peak { bytes: 1216, categories: init, activations, gaps: 116 });
    let step =
        Bytes { parameters: 100, optimizer: 64, activations: 640, workspace: 300 + 48, ..Bytes::default() };
    let activations = step.activations;
    assert_eq!(plan.phases[1].peak, Peak { bytes: 1152, categories: step, activations, gaps: 48 });
    assert_eq!(plan.peak, plan.phases[0].peak);
    assert_eq!(plan.arena_bytes, 1216);
}

#[test]
fn random_plans_hold_what_they_promise() {
    let mut random = Generator(3);
    for round in 0..600 {
        let trace = random_trace(&mut random, round % 4, 1 + round / 4);
        let plan = plan_memory(&trace).unwrap();
        check(&trace, &plan);
        assert_eq!(plan, plan_memory(&trace).unwrap(), "a plan is a function of its trace");
    }
}

#[test]
fn repeated_phases_do_not_change_the_peak() {
    let mut random = Generator(4);
    let trace = random_trace(&mut random, 1, 200);
    let plan = plan_memory(&trace).unwrap();
    let mut meter = PeakMeter::new(ALIGN);
    let mut play = |number: usize, first_id: u32| {
        for event in &trace.phases[number].events {
            match *event {
                Event::Alloc { id, .. } => meter.alloc(&plan.phases[number].slots[(id - first_id) as usize]),
                Event::Free { id, .. } => meter.free(&plan.phases[number].slots[(id - first_id) as usize]),
                _ => {}
            }
        }
        meter.start_phase();
        meter.peak()
    };
    play(0, 0);
    let taken_by_init = plan.phases[0].slots.len() as u32;
    for _ in 0..5 {
        assert_eq!(play(1, taken_by_init), plan.peak);
    }
}

#[test]
fn stacks_are_packed_without_waste() {
    let mut random = Generator(5);
    for _ in 0..50 {
        let mut items: Vec<Lifetime> = Vec::new();
        let mut open = Vec::new();
        for now in 0..400 {
            if now < 200 && (open.is_empty() || random.within(0, 2) > 0) {
                open.push(items.len());
                items.push(Lifetime { start: now, end: usize::MAX, bytes: ALIGN * random.within(1, 50) });
            } else if let Some(item) = open.pop() {
                items[item].end = now;
            }
        }
        assert_eq!(pack(&items).arena_bytes, live_peak(&items));
    }
    assert_eq!(pack(&[]).arena_bytes, 0);
}

#[test]
fn faults_of_a_trace_are_named() {
    let planned = |write: fn(&mut Script)| {
        let mut script = Script::new();
        write(&mut script);
        plan_memory(&script.trace()).unwrap_err().to_string()
    };
    let kept = planned(|s| {
        s.phase(PhaseName::Init).alloc(5, Category::Parameters);
        s.phase(PhaseName::Step).alloc(7, Category::Activations);
    });
    assert!(kept.contains("phase `step` keeps `tensor` (7 bytes, allocated at block.rs:1)"), "{kept}");
    let twice = planned(|s| {
        let id = s.phase(PhaseName::Init).alloc(5, Category::Parameters);
        s.free(id);
        s.free(id);
    });
    assert!(twice.contains("frees allocation 0 (`tensor`, allocated at block.rs:0) twice"), "{twice}");
    let foreign = planned(|s| {
        let id = s.phase(PhaseName::Init).alloc(5, Category::Parameters);
        s.phase(PhaseName::Step).free(id);
    });
    assert!(foreign.contains("phase `step` frees allocation 0, which it did not allocate"), "{foreign}");
    let unknown = planned(|s| s.phase(PhaseName::Init).free(9));
    assert!(unknown.contains("frees allocation 9"), "{unknown}");
    let misnumbered = planned(|s| {
        s.phase(PhaseName::Init);
        s.next = 3;
        s.alloc(1, Category::Workspace);
    });
    assert!(misnumbered.contains("at block.rs:3 3; the next number is 0"), "{misnumbered}");
    let huge = planned(|s| {
        s.phase(PhaseName::Init).alloc(1 << 60, Category::Parameters);
        s.alloc(1, Category::Parameters);
    });
    assert!(huge.contains("exceed 2^60 bytes"), "{huge}");
    assert!(planned(|_| {}).contains("begins with nothing"));
    let no_init = planned(|s| {
        s.phase(PhaseName::Step);
    });
    assert!(no_init.contains("begins with `step`"), "{no_init}");
}

/// A training step: blocks keep activations for backward, use scratch, gather and reduce chunks.
fn training_trace(random: &mut Generator, blocks: u64, per_block: u64) -> Trace {
    let mut script = Script::new();
    script.phase(PhaseName::Init).alloc(1 << 30, Category::Parameters);
    script.phase(PhaseName::Step);
    let tensor = 1 << 20;
    let mut saved = Vec::new();
    let mut passed = script.alloc(tensor, Category::Activations);
    let bytes: Vec<u64> =
        (0..per_block).map(|_| tensor * random.within(1, 5) + random.within(0, 4096)).collect();
    for _ in 0..blocks {
        let gathered = script.alloc(12 * tensor, Category::Communication);
        for bytes in &bytes {
            let kept = script.alloc(*bytes, Category::Activations);
            let scratch = script.alloc(bytes / 3, Category::Workspace);
            script.free(scratch);
            saved.push(kept);
        }
        saved.push(passed);
        passed = script.alloc(tensor, Category::Activations);
        script.free(gathered);
    }
    for _ in 0..blocks {
        let gathered = script.alloc(12 * tensor, Category::Communication);
        let reduced = script.alloc(12 * tensor, Category::Communication);
        let next = script.alloc(tensor, Category::Activations);
        script.free(saved.pop().unwrap());
        for bytes in bytes.iter().rev() {
            let gradient = script.alloc(*bytes, Category::Activations);
            script.free(saved.pop().unwrap());
            script.free(gradient);
        }
        script.free(passed);
        passed = next;
        script.free(gathered);
        script.free(reduced);
    }
    script.free(passed);
    script.trace()
}

#[test]
fn training_steps_are_packed_tightly() {
    let mut random = Generator(6);
    for (blocks, per_block) in [(2, 5), (12, 12), (24, 20)] {
        let trace = training_trace(&mut random, blocks, per_block);
        let plan = plan_memory(&trace).unwrap();
        let max_live = check(&trace, &plan);
        // Stack-like lifetimes leave gaps only where a hole is reused by something smaller.
        assert!(plan.arena_bytes - max_live < max_live / 100, "{} for {max_live}", plan.arena_bytes);
    }
}

#[test]
fn each_memory_has_its_own_plan() {
    let site = Site { file: "block.rs", line: 1 };
    let (category, name) = (Category::Workspace, "tensor");
    let alloc = |id, memory, bytes| Event::Alloc { id, memory, bytes, category, name, site };
    let init = vec![alloc(0, Memory::Device, 100), alloc(1, Memory::Host, 10), alloc(2, Memory::Device, 300)];
    let step = vec![
        alloc(3, Memory::Host, 1000),
        alloc(4, Memory::Device, 50),
        Event::Free { id: 3, memory: Memory::Host },
        alloc(5, Memory::Host, 500),
        Event::Free { id: 5, memory: Memory::Host },
        Event::Free { id: 4, memory: Memory::Device },
    ];
    let phases =
        vec![Phase { name: PhaseName::Init, events: init }, Phase { name: PhaseName::Step, events: step }];
    let trace = Trace { rank: 0, phases, faults: Vec::new() };
    let offsets = |memory| {
        let plan = plan_memory_of(&trace, memory).unwrap();
        let slots = plan.phases.iter().map(|p| p.slots.iter().map(|s| (s.offset, s.bytes)).collect());
        (plan.arena_bytes, plan.persistent_bytes, slots.collect::<Vec<Vec<_>>>())
    };
    assert_eq!(offsets(Memory::Device), (512, 448, vec![vec![(0, 100), (128, 300)], vec![(448, 50)]]));
    assert_eq!(offsets(Memory::Host), (1088, 64, vec![vec![(0, 10)], vec![(64, 1000), (64, 500)]]));
    assert_eq!(offsets(Memory::Disk), (0, 0, vec![vec![], vec![]]));
}

#[test]
fn a_rank_with_disk_memory_aligns_everything_to_blocks_of_a_disk() {
    let site = Site { file: "block.rs", line: 1 };
    let (category, name) = (Category::Workspace, "tensor");
    let alloc = |id, memory, bytes| Event::Alloc { id, memory, bytes, category, name, site };
    let init = vec![alloc(0, Memory::Disk, 5000), alloc(1, Memory::Device, 100), alloc(2, Memory::Disk, 1)];
    let step = vec![
        alloc(3, Memory::Device, 4096),
        alloc(4, Memory::Host, 1),
        Event::Free { id: 4, memory: Memory::Host },
        Event::Free { id: 3, memory: Memory::Device },
    ];
    let phases =
        vec![Phase { name: PhaseName::Init, events: init }, Phase { name: PhaseName::Step, events: step }];
    let trace = Trace { rank: 0, phases, faults: Vec::new() };
    for (memory, bytes) in [(Memory::Disk, 3 * 4096), (Memory::Device, 2 * 4096), (Memory::Host, 4096)] {
        let plan = plan_memory_of(&trace, memory).unwrap();
        assert_eq!((plan.align, plan.arena_bytes, plan.peak.bytes), (4096, bytes, bytes), "{memory:?}");
        let slots = plan.phases.iter().flat_map(|phase| &phase.slots);
        assert!(slots.into_iter().all(|slot| slot.offset % 4096 == 0), "{memory:?}");
    }
}
