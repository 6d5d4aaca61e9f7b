//! Regions of an arena and operands of launches, which a program announces: planted faults that bounds of allocations do not
//! show, and the same without.

use crate::driver::{Session, ok, reports, result};
use phalanx_cuda_emulator::driver::*;

/// Floats of a tensor.
const COUNT: usize = 100;

/// Floats of the arena.
const ARENA: usize = 1000;

/// Two tensors in an arena, one behind the other.
struct Tensors<'a> {
    session: &'a Session,
    stream: usize,
    arena: u64,
    a: u64,
    b: u64,
}

impl<'a> Tensors<'a> {
    fn new(session: &'a Session) -> Self {
        let arena = session.allocate(ARENA);
        let tensors = Self {
            session,
            stream: session.stream(),
            arena,
            a: arena + 64,
            b: arena + 64 + COUNT as u64 * 4,
        };
        tensors.begin(tensors.a, COUNT, c"a");
        tensors.begin(tensors.b, COUNT, c"b");
        tensors
    }

    fn begin(&self, address: u64, floats: usize, name: &std::ffi::CStr) {
        // SAFETY: the name is a text with its end.
        unsafe { phalanxEmulatorRegion(address, floats * 4, name.as_ptr(), self.stream) };
    }

    fn end(&self, address: u64, stream: usize) {
        // SAFETY: no pointers.
        unsafe { phalanxEmulatorRegionEnd(address, stream) };
    }

    fn fill(&self, address: u64, floats: usize) {
        self.session.fill(address, floats, 1.0, self.stream);
    }

    fn add(&self, to: u64, from: u64) {
        self.session.add(to, from, COUNT, self.stream);
    }
}

/// What the next launches may use; nothing for everything.
fn operands(ranges: &[(u64, usize)]) -> Status {
    let (addresses, sizes): (Vec<u64>, Vec<usize>) =
        ranges.iter().map(|&(address, floats)| (address, floats * 4)).unzip();
    // SAFETY: both have as many elements as are given.
    unsafe { phalanxEmulatorOperands(addresses.as_ptr(), sizes.as_ptr(), ranges.len()) }
}

/// What a report begins with, what it contains, and the sequence; with `true` it has its fault.
type Fault = (&'static str, &'static str, fn(&Tensors, bool));

const FAULTS: [Fault; 9] = [
    ("access out of bounds in fill", "0 past the end of `b` of 400 bytes", |t, fault| {
        t.fill(t.b, COUNT + usize::from(fault));
    }),
    ("access out of bounds in fill", "before the first region", |t, fault| {
        t.fill(if fault { t.a - 4 } else { t.a }, COUNT);
    }),
    ("access out of bounds in a copy to the device", "", |t, fault| {
        t.session.to_device(t.b, &[1.0; COUNT + 1][usize::from(!fault)..], t.stream);
    }),
    ("use after free in fill", "of `a` of 400 bytes, which was released", |t, fault| {
        t.end(t.a, t.stream);
        t.fill(if fault { t.a } else { t.b }, COUNT);
    }),
    ("read of memory that was never written in add", "", |t, fault| {
        // A tensor in the place of another does not have its numbers.
        t.fill(t.a, COUNT);
        t.fill(t.b, COUNT);
        t.end(t.a, t.stream);
        t.begin(t.a, COUNT, c"c");
        if !fault {
            t.fill(t.a, COUNT);
        }
        t.add(t.b, t.a);
    }),
    ("operations without an order in the end of a region", "", |t, fault| {
        t.fill(t.a, COUNT);
        let other = t.session.stream();
        if !fault {
            t.session.order(t.stream, other);
        }
        t.end(t.a, other);
    }),
    ("access out of bounds in a region", "overlaps the live region `b`", |t, fault| {
        t.end(t.a, t.stream);
        t.begin(t.a, COUNT + usize::from(fault), c"c");
    }),
    ("access out of bounds in fill", "past the end of an operand of 400 bytes", |t, fault| {
        // The next tensor is there, but the launch has nothing to do with it.
        assert_eq!(operands(&[(t.a, COUNT)]), Status::SUCCESS);
        t.fill(t.a, COUNT + usize::from(fault));
        operands(&[]);
        t.fill(t.a, COUNT + 1);
    }),
    ("access out of bounds in add", "bytes before all operands", |t, fault| {
        t.fill(t.a, COUNT);
        t.fill(t.b, COUNT);
        let outside = t.session.zeros(COUNT);
        // Of other allocations, launches may use everything.
        operands(&[(t.b, COUNT)]);
        t.add(t.b, outside);
        t.add(t.b, if fault { t.a } else { t.b });
        operands(&[]);
    }),
];

#[test]
fn planted_faults_are_reported_under_every_seed() {
    for (index, (begins, contains, run)) in FAULTS.into_iter().enumerate() {
        for (seed, fault) in (0..8).flat_map(|seed| [(seed, false), (seed, true)]) {
            let session = Session::new(seed);
            run(&Tensors::new(&session), fault);
            let status = session.synchronize();
            operands(&[]);
            let found = reports();
            if fault {
                let is_it = |report: &String| report.starts_with(begins) && report.contains(contains);
                assert!(found.iter().any(is_it) && status != Status::SUCCESS, "{index}, {seed}: {found:?}");
            } else {
                assert_eq!((found, status), (Vec::new(), Status::SUCCESS), "{index}, seed {seed}");
            }
        }
    }
}

#[test]
fn an_arena_that_is_freed_has_no_regions() {
    let session = Session::new(1);
    let tensors = Tensors::new(&session);
    ok(session.synchronize());
    // SAFETY: pointers are to local values.
    unsafe {
        ok(cuMemFree_v2(tensors.arena));
        let mut total = 0;
        let free: usize = result(|out| cuMemGetInfo_v2(out, &mut total));
        assert_eq!(free, total);
    }
    let other = session.allocate(ARENA);
    ok(session.fill(other, ARENA, 1.0, tensors.stream));
    ok(session.synchronize());
    assert_eq!(operands(&[(other, ARENA + 1)]), Status::INVALID_VALUE, "operands lie in allocations");
}
