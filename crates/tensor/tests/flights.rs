//! Arenas refuse ten mistakes while copies and collectives are in flight, in every kind of arena.
//!
//! `Device` and groups own the tensors of a transfer until it is over. The mistakes are those of a transfer that does not: it
//! declares what it reads and writes (`Tensor::in_flight`), and the tensor is used elsewhere meanwhile.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use phalanx_plan::plan_memory_of;
use phalanx_plan::trace::{PhaseName, Site};
use phalanx_tensor::operations::{Elementwise, Operation};
use phalanx_tensor::{
    Access, Arena, Category, DType, Device, DiskMemory, Immediate, InFlight, Kernels, Memory, Region, Tensor,
};

/// A processor that only copies f32.
struct Copies;

impl Kernels for Copies {
    fn name(&self) -> &'static str {
        "copies"
    }

    fn threads(&self) -> usize {
        1
    }

    fn execute(&self, operation: Operation) {
        let Operation::Elementwise(Elementwise::Copy(copy)) = operation else {
            panic!("no kernel for {}", operation.name())
        };
        copy.to.into_slice::<f32>().copy_from_slice(copy.from.as_slice());
    }
}

const ELEMENTS: usize = 100;
/// Ample for all tensors of a step.
const MEMORY_BYTES: usize = 1 << 16;
/// Call site of the first transfer.
const STARTED: Site = Site { file: "src/transfer.rs", line: 7 };

/// Use of the tensor of a transfer that was not waited for.
#[derive(Clone, Copy)]
enum Meanwhile {
    Freed,
    CopiedToHost,
    CopiedToDevice,
    CopiedToDisk,
    CopiedFromDisk,
}

/// A transfer, and what somebody does with its tensor before it is over.
struct PlantedFault {
    memory: Memory,
    transfer: &'static str,
    access: Access,
    meanwhile: Meanwhile,
    /// Words of the error, beside `STARTED` and the other call site.
    words: &'static str,
}

const PLANTED_FAULTS: [PlantedFault; 10] = [
    PlantedFault {
        memory: Memory::Device,
        transfer: "copy_to_host",
        access: Access::Read,
        meanwhile: Meanwhile::Freed,
        words: "was freed while copy_to_host started at src/transfer.rs:7 still reads it",
    },
    PlantedFault {
        memory: Memory::Host,
        transfer: "fetch",
        access: Access::Write,
        meanwhile: Meanwhile::Freed,
        words: "was freed while fetch started at src/transfer.rs:7 still writes it",
    },
    PlantedFault {
        memory: Memory::Host,
        transfer: "all_gather",
        access: Access::Write,
        meanwhile: Meanwhile::Freed,
        words: "was freed while all_gather started at src/transfer.rs:7 still writes it",
    },
    PlantedFault {
        memory: Memory::Device,
        transfer: "all_reduce",
        access: Access::Write,
        meanwhile: Meanwhile::CopiedToDevice,
        words: "would write device memory that all_reduce started at src/transfer.rs:7 still writes",
    },
    PlantedFault {
        memory: Memory::Host,
        transfer: "recv",
        access: Access::Write,
        meanwhile: Meanwhile::CopiedToDevice,
        words: "would read host memory that recv started at src/transfer.rs:7 still writes",
    },
    PlantedFault {
        memory: Memory::Host,
        transfer: "send",
        access: Access::Read,
        meanwhile: Meanwhile::CopiedToHost,
        words: "would write host memory that send started at src/transfer.rs:7 still reads",
    },
    PlantedFault {
        memory: Memory::Disk,
        transfer: "copy_to_disk",
        access: Access::Write,
        meanwhile: Meanwhile::Freed,
        words: "was freed while copy_to_disk started at src/transfer.rs:7 still writes it",
    },
    PlantedFault {
        memory: Memory::Disk,
        transfer: "copy_from_disk",
        access: Access::Read,
        meanwhile: Meanwhile::CopiedToDisk,
        words: "would write disk memory that copy_from_disk started at src/transfer.rs:7 still reads",
    },
    PlantedFault {
        memory: Memory::Disk,
        transfer: "copy_to_disk",
        access: Access::Write,
        meanwhile: Meanwhile::CopiedFromDisk,
        words: "would read disk memory that copy_to_disk started at src/transfer.rs:7 still writes",
    },
    PlantedFault {
        memory: Memory::Host,
        transfer: "copy_to_disk",
        access: Access::Read,
        meanwhile: Meanwhile::CopiedFromDisk,
        words: "would write host memory that copy_to_disk started at src/transfer.rs:7 still reads",
    },
];

fn tensor(device: &Device, memory: Memory, name: &'static str) -> Tensor {
    match memory {
        Memory::Device => device.alloc(DType::F32, [ELEMENTS], Category::Activations, name),
        Memory::Host => device.alloc_host(DType::F32, [ELEMENTS], Category::Activations, name),
        Memory::Disk => device.alloc_disk(DType::F32, [ELEMENTS], Category::Activations, name),
    }
}

/// Starts a transfer, and uses its tensor: after the transfer is over, or before it when the fault is planted.
fn step(device: &Device, fault: &PlantedFault, is_planted: bool) {
    let PlantedFault { memory, transfer, access, meanwhile, .. } = *fault;
    let first = tensor(device, memory, "first");
    let other = match (memory, meanwhile) {
        (Memory::Host, Meanwhile::CopiedToDisk | Meanwhile::CopiedFromDisk) => Memory::Disk,
        (Memory::Host, _) => Memory::Device,
        (Memory::Device | Memory::Disk, _) => Memory::Host,
    };
    let other = tensor(device, other, "other");
    let mut flight: Option<InFlight> = Some(first.in_flight(access, transfer, STARTED));
    if !is_planted {
        flight = None;
    }
    let on_device = memory == Memory::Device;
    match meanwhile {
        Meanwhile::Freed => drop(first),
        Meanwhile::CopiedToHost => {
            let (from, to) = if on_device { (first, other) } else { (other, first) };
            drop(device.copy_to_host(from, to));
        }
        Meanwhile::CopiedToDevice => {
            let (from, to) = if on_device { (other, first) } else { (first, other) };
            drop(device.copy_to_device(from, to));
        }
        Meanwhile::CopiedToDisk => {
            let (from, to) = if memory == Memory::Disk { (other, first) } else { (first, other) };
            drop(device.copy_to_disk(from, to));
        }
        Meanwhile::CopiedFromDisk => {
            let (from, to) = if memory == Memory::Disk { (first, other) } else { (other, first) };
            drop(device.copy_from_disk(from, to));
        }
    }
    drop(tensor(device, memory, "next"));
    drop(flight);
}

/// The kinds of arenas.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ArenaKind {
    Recording,
    Heap,
    Unplanned,
    Replaying,
}

const KINDS: [ArenaKind; 4] =
    [ArenaKind::Recording, ArenaKind::Heap, ArenaKind::Unplanned, ArenaKind::Replaying];

/// A device whose memories are arenas of a kind (there is no heap on disk: unplanned there); a replaying one is planned for
/// the step without a fault.
fn device(kind: ArenaKind, fault: &PlantedFault) -> Device {
    if kind == ArenaKind::Recording {
        return Device::meta_of(1, false);
    }
    let region = || Region::anonymous(MEMORY_BYTES).unwrap();
    let plan = |memory| {
        let dry = Device::meta_of(1, false);
        dry.phase(PhaseName::Init, || {});
        dry.phase(PhaseName::Step, || step(&dry, fault, false));
        plan_memory_of(&dry.take_trace(0), memory).unwrap()
    };
    let [device, host] = [Memory::Device, Memory::Host].map(|memory| match kind {
        ArenaKind::Recording => unreachable!("returned above"),
        ArenaKind::Heap => Arena::heap_of(memory),
        ArenaKind::Unplanned => Arena::unplanned_in(memory, region()),
        ArenaKind::Replaying => Arena::replaying_in(memory, plan(memory), region()),
    });
    let file = DiskMemory::create(&std::env::temp_dir(), MEMORY_BYTES as u64).unwrap();
    let disk = match kind {
        ArenaKind::Replaying => Arena::replaying_on_disk(plan(Memory::Disk), file),
        _ => Arena::unplanned_on_disk(file),
    };
    let backend = Immediate::with_disk_stream(Arc::new(Copies)).unwrap();
    Device::with_memories(Arc::new(backend), device, host).with_disk(disk)
}

/// The text of the panic that stops `run`.
#[track_caller]
fn stopped<T>(run: impl FnOnce() -> T) -> String {
    let payload = catch_unwind(AssertUnwindSafe(run)).err().expect("nothing was refused");
    *payload.downcast::<String>().expect("a text")
}

fn each_case(test: impl Fn(&Device, &PlantedFault, &str)) {
    for fault in &PLANTED_FAULTS {
        for kind in KINDS {
            let device = device(kind, fault);
            device.phase(PhaseName::Init, || {});
            test(&device, fault, &format!("{kind:?}: {}", fault.words));
        }
    }
}

#[test]
fn a_transfer_that_is_over_leaves_its_tensor_to_others() {
    each_case(|device, fault, _| {
        for _ in 0..3 {
            device.phase(PhaseName::Step, || step(device, fault, false));
        }
    });
}

#[test]
fn each_planted_fault_stops_the_run_with_both_call_sites() {
    each_case(|device, fault, case| {
        let text = stopped(|| device.phase(PhaseName::Step, || step(device, fault, true)));
        assert!(text.contains(fault.words), "{case}: {text}");
        assert!(text.contains("tests/flights.rs:"), "{case}, the other call site: {text}");
    });
}

/// The error stays, for every thread and every event of the arena.
#[test]
fn nothing_goes_on_after_a_fault() {
    each_case(|device, fault, case| {
        stopped(|| device.phase(PhaseName::Step, || step(device, fault, true)));
        let arena = match fault.memory {
            Memory::Device => device.arena(),
            Memory::Host => device.host_arena(),
            Memory::Disk => device.disk_arena(),
        };
        let allocated = std::thread::scope(|scope| {
            let again = || stopped(|| tensor(device, fault.memory, "again"));
            scope.spawn(again).join().unwrap()
        });
        for text in [allocated, stopped(|| arena.begin(PhaseName::Step)), stopped(|| arena.end())] {
            assert!(text.contains(fault.words), "{case}: {text}");
        }
    });
}

/// Nothing is allocated after the free: the end of the phase finds it.
#[test]
fn a_fault_at_the_end_of_a_phase_is_found() {
    for memory in [Memory::Device, Memory::Host] {
        let device = Device::with_memories(
            Arc::new(Immediate::new(Arc::new(Copies))),
            Arena::heap(),
            Arena::heap_of(Memory::Host),
        );
        let mut flight = None;
        let text = stopped(|| {
            device.phase(PhaseName::Step, || {
                let tensor = tensor(&device, memory, "last");
                flight = Some(tensor.in_flight(Access::Read, "send", STARTED));
            });
        });
        assert!(text.contains("`last`, allocated at") && text.contains("src/transfer.rs:7"), "{text}");
    }
}

#[test]
fn two_transfers_may_read_one_tensor() {
    let device = Device::new(Arc::new(Copies), Arena::heap());
    let tensor = tensor(&device, Memory::Device, "read twice");
    let flights = ["send", "copy_to_host"].map(|by| tensor.in_flight(Access::Read, by, STARTED));
    drop(flights);
    drop(tensor);
    device.arena().end();
}

/// A pending copy owns its tensors: who drops it waits for it, and frees them then.
#[test]
fn a_copy_that_is_dropped_is_over() {
    let device = Device::new(Arc::new(Copies), Arena::heap());
    let [from, to] = [Memory::Device, Memory::Host].map(|memory| tensor(&device, memory, "copied"));
    drop(device.copy_to_host(from, to));
    let number = device.alloc(DType::F32, [1], Category::Activations, "number");
    drop(device.fetch_later(&[number.view()]));
    drop(number);
    device.arena().end();
    device.host_arena().end();
}
