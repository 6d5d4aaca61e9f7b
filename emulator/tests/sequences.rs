//! Sequences of the driver's calls: right ones give the right result under every seed, and planted faults in them are
//! reported under every seed.

use crate::driver::Argument::{Address, Integer};
use crate::driver::{Session, ok, reports, result};
use phalanx_cuda_emulator::driver::*;

const COUNT: usize = 100;

/// Orders of work that tests try: late, early, and random ones.
const SEEDS: std::ops::Range<u64> = 0..20;

/// A sequence; with `true` it has its fault.
type Sequence = fn(&Session, bool) -> Status;

/// Waits for all work, whose first finding becomes the status.
fn end(session: &Session) -> Status {
    session.synchronize()
}

fn kernel_after_kernel(session: &Session, fault: bool) -> Status {
    let (first, second) = (session.stream(), session.stream());
    let (a, b) = (session.zeros(COUNT), session.zeros(COUNT));
    session.fill(a, COUNT, 1.0, first);
    session.fill(b, COUNT, 2.0, second);
    if !fault {
        session.order(first, second);
    }
    session.add(b, a, COUNT, second);
    end(session)
}

fn kernel_after_upload(session: &Session, fault: bool) -> Status {
    let (copies, compute) = (session.stream(), session.stream());
    let a = session.zeros(COUNT);
    session.to_device(a, &[1.0; COUNT], copies);
    if !fault {
        session.order(copies, compute);
    }
    session.add(a, a, COUNT, compute);
    end(session)
}

fn download_after_kernel(session: &Session, fault: bool) -> Status {
    let (compute, copies) = (session.stream(), session.stream());
    let (a, out) = (session.zeros(COUNT), session.pinned(COUNT));
    session.fill(a, COUNT, 1.0, compute);
    if !fault {
        session.order(compute, copies);
    }
    session.to_host(out, a, COUNT, copies);
    end(session)
}

fn upload_over_what_is_read(session: &Session, fault: bool) -> Status {
    let (copies, compute) = (session.stream(), session.stream());
    let (a, out) = (session.zeros(COUNT), session.zeros(COUNT));
    session.to_device(a, &[1.0; COUNT], copies);
    session.order(copies, compute);
    session.fill(out, COUNT, 0.0, compute);
    session.add(out, a, COUNT, compute);
    if !fault {
        session.order(compute, copies);
    }
    session.to_device(a, &[2.0; COUNT], copies);
    end(session)
}

fn event_recorded_too_early(session: &Session, fault: bool) -> Status {
    let (first, second, event) = (session.stream(), session.stream(), session.event());
    let a = session.zeros(COUNT);
    if fault {
        session.record(event, first);
    }
    session.fill(a, COUNT, 1.0, first);
    if !fault {
        session.record(event, first);
    }
    session.wait(second, event);
    session.add(a, a, COUNT, second);
    end(session)
}

fn wait_before_record(session: &Session, fault: bool) -> Status {
    let (first, second, event) = (session.stream(), session.stream(), session.event());
    let a = session.zeros(COUNT);
    session.fill(a, COUNT, 1.0, first);
    if fault {
        session.wait(second, event);
    }
    session.record(event, first);
    if !fault {
        session.wait(second, event);
    }
    session.add(a, a, COUNT, second);
    end(session)
}

fn memset_in_another_stream(session: &Session, fault: bool) -> Status {
    let (first, second) = (session.stream(), session.stream());
    let a = session.allocate(COUNT);
    // SAFETY: no pointers.
    unsafe { cuMemsetD32Async(a, 0, COUNT, first) };
    if !fault {
        session.order(first, second);
    }
    session.fill(a, COUNT, 1.0, second);
    end(session)
}

fn free_in_another_stream(session: &Session, fault: bool) -> Status {
    let (first, second) = (session.stream(), session.stream());
    let a = session.allocate(COUNT);
    session.fill(a, COUNT, 1.0, first);
    if !fault {
        session.order(first, second);
    }
    // SAFETY: no pointers.
    unsafe { cuMemFreeAsync(a, second) };
    end(session)
}

fn kernel_after_free(session: &Session, fault: bool) -> Status {
    let stream = session.stream();
    let a = session.allocate(COUNT);
    if !fault {
        session.fill(a, COUNT, 1.0, stream);
    }
    // SAFETY: no pointers.
    unsafe { cuMemFreeAsync(a, stream) };
    if fault {
        session.fill(a, COUNT, 1.0, stream);
    }
    end(session)
}

fn default_stream_is_not_ordered_with_others(session: &Session, fault: bool) -> Status {
    // SAFETY: the pointer is to a local value.
    let stream = unsafe { result(|out| cuStreamCreate(out, u32::from(fault))) };
    let a = session.zeros(COUNT);
    session.fill(a, COUNT, 1.0, stream);
    session.add(a, a, COUNT, 0);
    session.add(a, a, COUNT, stream);
    end(session)
}

fn branches_of_a_graph(session: &Session, fault: bool) -> Status {
    let (first, second) = (session.stream(), session.stream());
    let (a, b) = (session.allocate(COUNT), session.allocate(COUNT));
    // SAFETY: pointers are to local values.
    unsafe {
        ok(cuStreamBeginCapture_v2(first, 0));
        session.order(first, second);
        session.fill(a, COUNT, 1.0, first);
        session.fill(if fault { a } else { b }, COUNT, 2.0, second);
        session.order(second, first);
        session.add(a, a, COUNT, first);
        let graph = result(|out| cuStreamEndCapture(first, out));
        let ready = result(|out| cuGraphInstantiateWithFlags(out, graph, 0));
        cuGraphLaunch(ready, first);
        cuGraphLaunch(ready, first);
    }
    end(session)
}

/// A graph that fills `a`, and its node.
fn filling_graph(session: &Session, a: u64, stream: usize) -> [usize; 2] {
    // SAFETY: pointers are to local values.
    unsafe {
        ok(cuStreamBeginCapture_v2(stream, 2));
        session.fill(a, COUNT, 1.0, stream);
        let node = session.last_node(stream);
        let graph = result(|out| cuStreamEndCapture(stream, out));
        [result(|out| cuGraphInstantiateWithFlags(out, graph, 0)), node]
    }
}

fn node_with_the_memory_of_another_stream(session: &Session, fault: bool) -> Status {
    let (first, second) = (session.stream(), session.stream());
    let [a, b, c] = [(); 3].map(|()| session.zeros(COUNT));
    let filling = filling_graph(session, a, first);
    session.fill(b, COUNT, 2.0, second);
    session.set_fill(filling, 128, if fault { b } else { c }, COUNT, 3.0);
    // SAFETY: no pointers.
    unsafe { cuGraphLaunch(filling[0], first) };
    end(session)
}

fn node_that_leaves_its_memory(session: &Session, fault: bool) -> Status {
    let (stream, a) = (session.stream(), session.zeros(COUNT));
    let filling = filling_graph(session, a, stream);
    session.set_fill(filling, 128, a, if fault { COUNT + 1 } else { COUNT }, 3.0);
    // SAFETY: no pointers.
    unsafe { cuGraphLaunch(filling[0], stream) };
    end(session)
}

/// A stream that waits for a word, which the host writes when another stream is done.
fn kernel_behind_a_word_of_the_host(session: &Session, fault: bool) -> Status {
    let (first, second, event) = (session.stream(), session.stream(), session.event());
    let (a, word) = (session.zeros(COUNT), session.pinned(1).cast::<u32>());
    // SAFETY: the word is pinned, and there as long as the session.
    let word = unsafe {
        word.write(6);
        std::sync::atomic::AtomicU32::from_ptr(word)
    };
    session.fill(a, COUNT, 1.0, first);
    session.record(event, first);
    if !fault {
        // SAFETY: as above.
        ok(unsafe { cuStreamWaitValue32_v2(second, word.as_ptr() as u64, 7, 0) });
    }
    session.add(a, a, COUNT, second);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            session.enter();
            // SAFETY: no pointers. After a fault the status is its own.
            let _ = unsafe { cuEventSynchronize(event) };
            word.store(7, std::sync::atomic::Ordering::Release);
        });
        end(session)
    })
}

fn pinned_memory_in_use(session: &Session, fault: bool) -> Status {
    let stream = session.stream();
    let (a, host) = (session.allocate(COUNT), session.pinned(COUNT));
    let event = session.event();
    // SAFETY: the memory is pinned and has this size.
    unsafe {
        std::slice::from_raw_parts_mut(host, COUNT).fill(1.0);
        // A copy that cannot run before the one that waits for a point which another stream has not reached.
        let other = session.stream();
        session.fill(a, COUNT, 0.0, other);
        session.record(event, other);
        session.wait(stream, event);
        ok(cuMemcpyHtoDAsync_v2(a, host.cast(), COUNT * 4, stream));
        if !fault {
            ok(session.synchronize());
        }
        cuMemFreeHost(host.cast());
    }
    end(session)
}

fn download_of_unwritten(session: &Session, fault: bool) -> Status {
    let stream = session.stream();
    let a = session.allocate(COUNT);
    session.fill(a, if fault { COUNT - 1 } else { COUNT }, 1.0, stream);
    let mut out = vec![0f32; COUNT];
    session.to_host(out.as_mut_ptr(), a, COUNT, stream)
}

fn copy_out_of_bounds(session: &Session, fault: bool) -> Status {
    let a = session.allocate(COUNT);
    session.to_device(a, &[1.0; COUNT + 1][usize::from(!fault)..], session.stream());
    end(session)
}

fn host_pointer_in_place_of_device_pointer(session: &Session, fault: bool) -> Status {
    let a = session.allocate(COUNT);
    let host = vec![0f32; COUNT];
    session.fill(if fault { host.as_ptr() as u64 } else { a }, COUNT, 1.0, session.stream());
    end(session)
}

/// Sequences with what the report of their fault begins with. A pinned buffer that is freed too early is only in use
/// where work runs late.
const SEQUENCES: [(&str, Sequence, &str); 18] = [
    ("kernel after kernel", kernel_after_kernel, "operations without an order in add"),
    ("kernel after upload", kernel_after_upload, "operations without an order in "),
    ("download after kernel", download_after_kernel, "operations without an order in "),
    ("upload over what is read", upload_over_what_is_read, "operations without an order in "),
    ("event recorded too early", event_recorded_too_early, "operations without an order in "),
    ("wait before record", wait_before_record, "operations without an order in "),
    ("memset in another stream", memset_in_another_stream, "operations without an order in "),
    ("free in another stream", free_in_another_stream, ""),
    ("kernel after free", kernel_after_free, "use after free in fill"),
    ("default stream", default_stream_is_not_ordered_with_others, "operations without an order in "),
    ("branches of a graph", branches_of_a_graph, "operations without an order in "),
    ("node of a graph", node_with_the_memory_of_another_stream, "operations without an order in fill"),
    ("node out of bounds", node_that_leaves_its_memory, "access out of bounds in fill"),
    (
        "download of unwritten",
        download_of_unwritten,
        "read of memory that was never written in a copy to the host",
    ),
    ("copy out of bounds", copy_out_of_bounds, "access out of bounds in a copy to the device"),
    ("host pointer", host_pointer_in_place_of_device_pointer, "access out of bounds in fill"),
    ("word of the host", kernel_behind_a_word_of_the_host, "operations without an order in "),
    ("pinned memory in use", pinned_memory_in_use, "use after free in cuMemFreeHost"),
];

#[test]
fn planted_faults_are_reported_under_every_seed() {
    for (name, sequence, expected) in SEQUENCES {
        for seed in SEEDS {
            let session = Session::new(seed);
            let status = sequence(&session, true);
            if name == "pinned memory in use" && seed % 4 != 0 {
                continue;
            }
            let found = reports();
            assert!(
                found.iter().any(|report| report.starts_with(expected)),
                "{name}, seed {seed}: {found:?}"
            );
            assert_ne!(status, Status::SUCCESS, "{name}, seed {seed}");
            assert_eq!(session.synchronize(), session.synchronize(), "the device stays failed");
        }
    }
}

#[test]
fn right_sequences_run_without_a_report_under_every_seed() {
    for (name, sequence, _) in SEQUENCES {
        for seed in SEEDS {
            let session = Session::new(seed);
            assert_eq!(
                (sequence(&session, false), reports()),
                (Status::SUCCESS, Vec::new()),
                "{name}, seed {seed}"
            );
        }
    }
}

#[test]
fn results_are_right_under_every_seed() {
    for seed in SEEDS {
        let session = Session::new(seed);
        let (compute, copies) = (session.stream(), session.stream());
        let (a, b) = (session.allocate(COUNT), session.allocate(COUNT));
        session.fill(b, COUNT, 0.0, compute);
        for step in 0..5 {
            // The copies of the next step run beside the kernel of this one, as far as events allow.
            session.to_device(a, &[step as f32; COUNT], copies);
            session.order(copies, compute);
            ok(session.add(b, a, COUNT, compute));
            session.order(compute, copies);
        }
        assert_eq!(session.read(b, COUNT), [10.0; COUNT], "seed {seed}");
    }
}

#[test]
fn work_runs_as_late_and_as_early_as_it_may() {
    let changed_source = |seed| {
        let session = Session::new(seed);
        let (a, host, stream) = (session.allocate(1), session.pinned(1), session.stream());
        // SAFETY: the memory is pinned and has room for a float.
        unsafe {
            host.write(1.0);
            ok(cuMemcpyHtoDAsync_v2(a, host.cast(), 4, stream));
            // A fault: the copy may not have read it.
            host.write(2.0);
        }
        session.read(a, 1)[0]
    };
    assert_eq!((changed_source(0), changed_source(1)), (2.0, 1.0));
}

#[test]
fn graphs_repeat_what_was_captured() {
    for seed in SEEDS {
        let session = Session::new(seed);
        let (a, b, stream) = (session.allocate(COUNT), session.allocate(COUNT), session.stream());
        ok(session.fill(a, COUNT, 1.0, stream));
        ok(session.fill(b, COUNT, 0.0, stream));
        // SAFETY: pointers are to local values.
        unsafe {
            ok(cuStreamBeginCapture_v2(stream, 0));
            ok(session.add(b, a, COUNT, stream));
            ok(session.add(a, a, COUNT, stream));
            assert_eq!(cuStreamSynchronize(stream), Status::STREAM_CAPTURE_UNSUPPORTED);
            let graph = result(|out| cuStreamEndCapture(stream, out));
            assert_eq!(result::<usize>(|out| cuGraphGetNodes(graph, std::ptr::null_mut(), out)), 2);
            let ready = result(|out| cuGraphInstantiateWithFlags(out, graph, 0));
            for _ in 0..3 {
                ok(cuGraphLaunch(ready, stream));
            }
        }
        // b sums a, which doubles: 1 + 2 + 4.
        assert_eq!((session.read(b, COUNT), session.read(a, COUNT)), (vec![7.0; COUNT], vec![8.0; COUNT]));
    }
}

#[test]
fn a_node_has_a_new_launch_from_the_next_launch_of_its_graph_on() {
    for seed in SEEDS {
        let session = Session::new(seed);
        let (a, sum, stream) = (session.zeros(COUNT), session.zeros(COUNT), session.stream());
        let filling = filling_graph(&session, a, stream);
        for value in [1.0, 2.0, 4.0] {
            ok(session.set_fill(filling, 128, a, COUNT, value));
            // SAFETY: no pointers.
            ok(unsafe { cuGraphLaunch(filling[0], stream) });
            ok(session.add(sum, a, COUNT, stream));
        }
        assert_eq!(session.read(sum, COUNT), [7.0; COUNT]);
        let counted: usize = result(|out| {
            // SAFETY: the pointer is to a local value.
            unsafe { phalanxEmulatorGraphLaunches(out) }
        });
        assert_eq!(counted, 3);
    }
}

#[test]
fn nodes_are_checked_as_launches_are() {
    let session = Session::new(0);
    let (a, stream) = (session.zeros(COUNT), session.stream());
    // SAFETY: pointers are to local values.
    unsafe {
        ok(cuStreamBeginCapture_v2(stream, 2));
        ok(session.fill(a, COUNT, 1.0, stream));
        let node = session.last_node(stream);
        let graph = result(|out| cuStreamEndCapture(stream, out));
        let ready = result(|out| cuGraphInstantiateWithFlags(out, graph, 0));
        let set = |node, threads| session.set_fill([ready, node], threads, a, COUNT, 2.0);
        ok(set(node, 128));
        assert_eq!(set(node, 2000), Status::INVALID_VALUE, "threads");
        assert_eq!(set(node + 1, 128), Status::INVALID_VALUE, "another node");
        ok(cuGraphDestroy(graph));
        assert_eq!(set(node, 128), Status::INVALID_VALUE, "the graph that had the node has ended");
        let (mut status, none) = (1, std::ptr::null_mut());
        ok(cuStreamGetCaptureInfo_v2(
            stream,
            &mut status,
            std::ptr::null_mut(),
            none,
            std::ptr::null_mut(),
            none,
        ));
        assert_eq!(status, 0, "no capture");
    }
}

#[test]
fn captures_that_are_not_joined_are_refused() {
    let session = Session::new(0);
    let (first, second, outside) = (session.stream(), session.stream(), session.stream());
    let a = session.allocate(COUNT);
    // SAFETY: pointers are to local values.
    unsafe {
        ok(cuStreamBeginCapture_v2(first, 0));
        assert_eq!(cuStreamBeginCapture_v2(first, 0), Status::ILLEGAL_STATE);
        session.order(first, second);
        ok(session.fill(a, COUNT, 1.0, second));
        let event = session.event();
        session.record(event, outside);
        assert_eq!(cuStreamWaitEvent(first, event, 0), Status::STREAM_CAPTURE_ISOLATION);
        assert_eq!(cuStreamEndCapture(second, &mut 0), Status::STREAM_CAPTURE_UNMATCHED);
        assert_eq!(cuStreamEndCapture(first, &mut 0), Status::STREAM_CAPTURE_UNJOINED);
        assert_eq!(result::<i32>(|out| cuStreamIsCapturing(first, out)), 0);
    }
}

#[test]
fn variables_and_dynamic_shared_memory() {
    let session = Session::new(1);
    let (a, b) = (session.allocate(32), session.allocate(32));
    ok(session.launch("look_up", 32, 0, &[Address(a)]));
    let arguments = [Address(b), Address(a), Integer(32)];
    session.launch("reverse", 32, 0, &arguments);
    assert_eq!(session.synchronize(), Status::ILLEGAL_ADDRESS, "shared memory of no bytes");
    drop(session);
    let session = Session::new(1);
    let (a, b) = (session.allocate(32), session.allocate(32));
    ok(session.launch("look_up", 32, 0, &[Address(a)]));
    ok(session.launch_shared("reverse", 32, 0, &[Address(b), Address(a), Integer(32)], 128));
    let expected: Vec<f32> = (0..32).rev().map(|i| (i % 4 + 1) as f32).collect();
    assert_eq!(session.read(b, 32), expected);
    // More than 48 KiB must be asked for.
    let function = session.function("reverse");
    assert_eq!(session.launch_shared("reverse", 32, 0, &arguments, 100_000), Status::INVALID_VALUE);
    // SAFETY: no pointers.
    unsafe { ok(cuFuncSetAttribute(function, 8, 100_000)) };
    ok(session.launch_shared("reverse", 32, 0, &[Address(b), Address(a), Integer(32)], 100_000));
    ok(session.synchronize());
}

#[test]
fn wrong_calls_have_their_status() {
    let session = Session::new(0);
    // SAFETY: pointers are to local values.
    unsafe {
        assert_eq!(cuMemAlloc_v2(&mut 0, 0), Status::INVALID_VALUE);
        assert_eq!(cuMemAlloc_v2(&mut 0, 1 << 40), Status::OUT_OF_MEMORY);
        assert_eq!(cuMemFree_v2(12345), Status::INVALID_VALUE);
        assert_eq!(cuStreamSynchronize(12345), Status::INVALID_HANDLE);
        let name = c"no_such_kernel";
        assert_eq!(cuModuleGetFunction(&mut 0, session.module, name.as_ptr()), Status::NOT_FOUND);
        assert_eq!(cuModuleLoadData(&mut 0, c"\x7fELF".as_ptr().cast()), Status::INVALID_IMAGE);
        let bad = c".version 8.0\n.target sm_80\n.visible .entry k() { frobnicate; }";
        assert_eq!(cuModuleLoadData(&mut 0, bad.as_ptr().cast()), Status::INVALID_PTX);
        assert_eq!(session.launch("look_up", 2000, 0, &[Address(0)]), Status::INVALID_VALUE);
        let (free, total) = (&mut 0, &mut 0);
        ok(cuMemGetInfo_v2(free, total));
        let a = session.allocate(COUNT);
        let left: usize = result(|out| cuMemGetInfo_v2(out, &mut 0));
        assert_eq!(*free - left, COUNT * 4);
        ok(cuMemFree_v2(a));
        assert_eq!(result::<usize>(|out| cuMemGetInfo_v2(out, &mut 0)), *free);
        let mut pointer = std::ptr::null();
        ok(cuGetProcAddress_v2(c"cuMemAlloc".as_ptr(), &mut pointer, 12080, 0, &mut 0));
        assert_eq!(pointer as usize, cuMemAlloc_v2 as *const () as usize);
        assert_eq!(
            cuGetProcAddress_v2(c"cuNothing".as_ptr(), &mut pointer, 12080, 0, &mut 0),
            Status::NOT_FOUND
        );
        let mut name = std::ptr::null();
        ok(cuGetErrorName(700, &mut name));
        assert_eq!(std::ffi::CStr::from_ptr(name), c"CUDA_ERROR_ILLEGAL_ADDRESS");
    }
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            // SAFETY: the pointer is to a local value.
            unsafe { cuMemAlloc_v2(&mut 0, 16) }
        });
        assert_eq!(other.join().unwrap(), Status::INVALID_CONTEXT, "a thread without a context");
    });
}
