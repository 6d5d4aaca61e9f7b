//! The recording group writes what a real one would do, for any rank of any world.

mod support;

use std::sync::Arc;

use phalanx_collectives::{CollectiveOp, Group, MetaGroup};
use phalanx_tensor::{Category, DType, Device};
use phalanx_trace::Event;

#[test]
fn collectives_and_waits_are_recorded_in_order() {
    let device = Device::meta(1);
    let recorder = Arc::clone(device.recorder().unwrap());
    let group: Box<dyn Group> = Box::new(MetaGroup::new("data", 3, 1024, Arc::clone(&recorder)));
    device.arena().begin("step");
    let alloc = |n: usize| device.alloc(DType::F32, [n], Category::Communication, "x");
    let x = group.all_reduce(alloc(1 << 20));
    let line = line!() + 1;
    let (whole, shard) = group.reduce_scatter(alloc(2048), alloc(2), true).wait().unwrap();
    drop((whole, shard));
    x.wait().unwrap();
    drop(group.barrier());

    let trace = recorder.take(3);
    let events: Vec<&Event> = trace.phases[0]
        .events
        .iter()
        .filter(|e| matches!(e, Event::Collective(_) | Event::Wait { .. }))
        .collect();
    let waits: Vec<u32> = events
        .iter()
        .filter_map(|e| match e {
            Event::Wait { collective } => Some(*collective),
            _ => None,
        })
        .collect();
    assert_eq!(waits, [1, 0, 2]);
    let Event::Collective(c) = events[1] else { panic!("{events:?}") };
    assert_eq!(
        (c.group, c.world_size, c.op, c.dtype, c.count),
        ("data", 1024, CollectiveOp::ReduceScatter, DType::F32, 2048)
    );
    assert_eq!((c.root, c.sent_bytes, c.site.line), (None, 1023 * 8, line));
    assert!(c.site.file.ends_with("tests/meta.rs"));
    assert_eq!(group.take_statistics().calls, 3);
}
