//! The time of a phase: events of a trace, played on a machine.

use std::sync::Arc;

use phalanx_plan::trace::{
    Collective, CollectiveOp, DType, Event, Memory, Phase, PhaseName, Placements, Rate, Site, Stream, Trace,
};
use phalanx_plan::{LANES, Link, Machine, PhaseTime, TransferRate, lanes_of, phase_stretches, phase_time};

/// A second for 10^9 bytes of a kernel, of a copy, and 2 s on disk.
fn machine() -> Machine {
    let rate = |gb_per_s| TransferRate::Line { latency_us: 0.0, gb_per_s };
    let rates = serde_json::json!({
        "name": "test", "memory_bytes": 1, "host_bytes": 1, "memory_gb_per_s": 1.0, "host_gb_per_s": 0.25,
        "copy": rate(1.0), "disk_read": rate(0.5), "tflops": {},
    });
    serde_json::from_value(rates).unwrap()
}

const GB: u64 = 1_000_000_000;

fn kernel(gb: u64) -> Event {
    Event::Kernel { name: "k", flops: 0, bytes: gb * GB, rate: Rate::Bandwidth, again: false }
}

fn copy(from: Memory, to: Memory, gb: u64, stream: Stream) -> Event {
    Event::Copy { name: "c", from, to, bytes: gb * GB, rate: Rate::of_copy([from, to]), stream }
}

fn time(events: Vec<Event>) -> Option<PhaseTime> {
    time_on(events, &machine())
}

fn time_on(events: Vec<Event>, machine: &Machine) -> Option<PhaseTime> {
    let phases = vec![Phase { name: PhaseName::Step, events }];
    phase_time(&Trace { rank: 0, phases, faults: Vec::new() }, PhaseName::Step, machine)
}

#[test]
fn a_copy_runs_beside_kernels_and_is_waited_for_where_they_need_it() {
    let stream = Stream::ToDevice;
    let events = vec![
        copy(Memory::Host, Memory::Device, 5, stream),
        Event::Record { number: 0, stream },
        kernel(3),
        Event::StreamWait { number: 0, stream: Stream::Compute },
        kernel(1),
    ];
    let time = time(events).unwrap();
    assert_eq!([time.seconds, time.compute_s, time.to_device_s, time.exposed_copy_s], [6.0, 4.0, 5.0, 2.0]);
    assert_eq!((time.floor_s(), time.limit()), (5.0, "copies to the device"));
}

#[test]
fn lanes_show_when_each_stream_works() {
    let stream = Stream::ToDevice;
    let events = vec![
        copy(Memory::Host, Memory::Device, 5, stream),
        Event::Record { number: 0, stream },
        kernel(1),
        kernel(2),
        Event::StreamWait { number: 0, stream: Stream::Compute },
        kernel(1),
    ];
    let phases = vec![Phase { name: PhaseName::Step, events }];
    let trace = Trace { rank: 0, phases, faults: Vec::new() };
    let all = phase_stretches(&[&trace], PhaseName::Step, &machine()).unwrap();
    let names: Vec<&str> = all[0].iter().map(|one| one.name).collect();
    assert_eq!(names, ["c", "k", "k", "k"]);
    let lanes = lanes_of(&all[0], 0.0);
    let of = |stream: Stream| &lanes[LANES.iter().position(|lane| *lane == stream).unwrap()][..];
    assert_eq!(of(Stream::Compute), [(0.0, 3.0), (5.0, 6.0)]);
    assert_eq!((of(stream), of(Stream::Disk)), (&[(0.0, 5.0)][..], &[][..]));
}

#[test]
fn what_the_host_waits_for_delays_all_later_calls() {
    let (disk, up) = (Stream::Disk, Stream::ToDevice);
    let events = vec![
        copy(Memory::Disk, Memory::Host, 1, disk),
        Event::Record { number: 7, stream: disk },
        kernel(1),
        Event::HostWait { number: 7 },
        copy(Memory::Host, Memory::Device, 1, up),
        kernel(1),
    ];
    let time = time(events).unwrap();
    // 2 s of the disk; then the copy and the kernel side by side.
    assert_eq!([time.seconds, time.exposed_copy_s, time.disk_s], [3.0, 1.0, 2.0]);
}

#[test]
fn the_host_computes_beside_the_device() {
    let update = Event::Kernel { name: "u", flops: 0, bytes: GB, rate: Rate::Host, again: false };
    let events = vec![
        update,
        Event::Record { number: 0, stream: Stream::Host },
        kernel(3),
        Event::HostWait { number: 0 },
    ];
    let time = time(events).unwrap();
    assert_eq!([time.seconds, time.compute_s, time.host_s, time.exposed_host_s], [4.0, 3.0, 4.0, 1.0]);
    assert_eq!(time.limit(), "the host's processor");
    // A copy behind the update waits for it, and so does a kernel that needs the copy.
    let up = Stream::ToDevice;
    let update = Event::Kernel { name: "u", flops: 0, bytes: GB, rate: Rate::Host, again: false };
    let events = vec![
        update,
        Event::Record { number: 0, stream: Stream::Host },
        Event::StreamWait { number: 0, stream: up },
        copy(Memory::Host, Memory::Device, 1, up),
        Event::Record { number: 1, stream: up },
        Event::StreamWait { number: 1, stream: Stream::Compute },
        kernel(1),
    ];
    let behind = self::time(events).unwrap();
    assert_eq!([behind.seconds, behind.exposed_host_s, behind.exposed_copy_s], [6.0, 5.0, 0.0]);
}

/// Kernels, then an update that reads its states from disk and writes them back.
fn update_behind_kernels() -> Vec<Event> {
    let stream = Stream::Disk;
    vec![
        kernel(3),
        copy(Memory::Disk, Memory::Device, 1, stream),
        Event::Record { number: 0, stream },
        Event::StreamWait { number: 0, stream: Stream::Compute },
        kernel(1),
        copy(Memory::Disk, Memory::Device, 1, stream),
        kernel(3),
    ]
}

/// A device computes what was issued while the disk reads ahead; the processor issues a read when it has computed what comes before.
#[test]
fn on_the_processor_a_transfer_begins_behind_the_kernels_before_it() {
    let device = time(update_behind_kernels()).unwrap();
    assert_eq!([device.seconds, device.exposed_copy_s, device.disk_s], [7.0, 0.0, 4.0]);
    let processor = Machine { computes_on_host: true, ..machine() };
    // 3 s, the read of 2 s, 1 s, and the second read beside the last 3 s.
    let time = time_on(update_behind_kernels(), &processor).unwrap();
    assert_eq!([time.seconds, time.compute_s, time.exposed_copy_s], [9.0, 7.0, 2.0]);
    assert_eq!((time.floor_s(), time.cores_s, device.cores_s), (7.0, 7.0, 0.0));
}

/// Copies between memories, updates of the host and collectives run on the cores that compute.
#[test]
fn on_the_processor_other_work_takes_the_time_of_kernels() {
    let processor = Machine { computes_on_host: true, ..machine() };
    let (up, host) = (Stream::ToDevice, Stream::Host);
    let update = Event::Kernel { name: "u", flops: 0, bytes: GB, rate: Rate::Host, again: false };
    let events = vec![
        copy(Memory::Host, Memory::Device, 2, up),
        Event::Record { number: 0, stream: up },
        update,
        Event::Record { number: 1, stream: host },
        kernel(5),
        Event::StreamWait { number: 0, stream: Stream::Compute },
        Event::HostWait { number: 1 },
        kernel(1),
    ];
    // A device of its own does 4 s of the update and 2 s of the copy beside the kernels.
    assert_eq!(time(events.clone()).unwrap().seconds, 6.0);
    let shared = time_on(events, &processor).unwrap();
    assert_eq!([shared.seconds, shared.compute_s, shared.cores_s], [12.0, 6.0, 12.0]);
    assert_eq!([shared.exposed_copy_s, shared.exposed_host_s], [2.0, 4.0]);
    assert_eq!(shared.limit(), "the cores that compute and communicate");
    // What compute waits for anyway is not counted twice.
    let waited = vec![
        copy(Memory::Host, Memory::Device, 2, up),
        Event::Record { number: 0, stream: up },
        Event::StreamWait { number: 0, stream: Stream::Compute },
        kernel(1),
    ];
    let waited = time_on(waited, &processor).unwrap();
    assert_eq!([waited.seconds, waited.exposed_copy_s], [3.0, 2.0]);
}

#[test]
fn copies_behind_the_last_kernel_are_exposed_and_unknown_rates_give_no_time() {
    let down = |gb| copy(Memory::Device, Memory::Host, gb, Stream::ToHost);
    let ended = time(vec![kernel(1), down(3)]).unwrap();
    assert_eq!([ended.seconds, ended.exposed_copy_s], [3.0, 2.0]);
    assert_eq!(time(vec![copy(Memory::Host, Memory::Disk, 1, Stream::Disk)]), None);
}

fn gather(group: &'static str, members: &[usize], gb: u64) -> Event {
    Event::Collective(Box::new(Collective {
        group,
        members: Arc::from(members),
        world_size: members.len(),
        op: CollectiveOp::AllGather,
        dtype: DType::F32,
        count: gb * GB / 4,
        root: None,
        tag: None,
        placements: Placements::default(),
        sent_bytes: gb * GB,
        site: Site::caller(),
    }))
}

/// Two groups have queues of their own, but one link: what is issued second has what the first leaves. Over another level it does not wait.
#[test]
fn collectives_that_run_at_once_share_their_links() {
    let link = |devices, gb_per_s| Link {
        name: "link".into(),
        devices,
        shared_by: 1,
        time: TransferRate::Line { latency_us: 0.0, gb_per_s },
        step_us: 0.0,
    };
    let machine = Machine { links: vec![link(Some(2), 8.0), link(None, 1.0)], ..machine() };
    let seconds = |events: Vec<Event>| time_on(events, &machine).unwrap().seconds;
    let (far, other, near) =
        (gather("data", &[0, 2], 4), gather("pipeline", &[0, 4], 2), gather("tensor", &[0, 1], 16));
    assert_eq!([&far, &other, &near].map(|one| seconds(vec![one.clone()])), [4.0, 2.0, 2.0]);
    assert_eq!(seconds(vec![far.clone(), other.clone()]), 6.0);
    // The near link carries what the far one does, too, for half a second.
    assert_eq!(seconds(vec![far.clone(), near.clone()]), 4.0);
    assert_eq!(seconds(vec![near, far, other]), 6.0);
}
