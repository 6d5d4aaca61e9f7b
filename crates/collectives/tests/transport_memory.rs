//! Memory that a rank of several hosts allocates for its transport: no more than was planned, and not much less.

use crate::support::{Layout, host, ranks_on, zeros};
use phalanx_collectives::{Connections, GroupSums, Hosts, Options, Wire, transport_bytes};
use phalanx_tensor::{DType, Tensor};
use phalanx_testing::hostile::peak_bytes;

/// The last rank connects to all others, so it allocates all that it has.
#[test]
fn transports_take_what_was_planned() {
    let layouts: [&[usize]; 5] = [&[1, 1], &[2, 2], &[1, 1, 1, 1], &[3, 2], &[1; 8]];
    for (sizes, elements) in
        layouts.into_iter().flat_map(|sizes| [64, 100_000, 3_000_000].map(|count| (sizes, count)))
    {
        let world: usize = sizes.iter().sum();
        let elements = elements / world * world;
        let took =
            ranks_on(Layout::Hosts(sizes), &Options { overlap: false, ..Options::default() }, |endpoint| {
                let device = host();
                let of = |count: usize| -> Tensor { zeros(&device, DType::F32, count) };
                let (mut whole, mut shard, mut small) = (of(elements), of(elements / world), of(1));
                let group = endpoint.group("data");
                let (_, bytes) = peak_bytes(|| {
                    for _ in 0..2 {
                        whole = group.all_reduce(std::mem::replace(&mut whole, of(0))).wait().unwrap();
                        small = group.all_reduce(std::mem::replace(&mut small, of(0))).wait().unwrap();
                        let parts =
                            (std::mem::replace(&mut whole, of(0)), std::mem::replace(&mut shard, of(0)));
                        (whole, shard) = group.reduce_scatter(parts.0, parts.1, false).wait().unwrap();
                        whole = group.reduce(std::mem::replace(&mut whole, of(0)), 0).wait().unwrap();
                    }
                });
                bytes as u64
            });
        let took = took.into_iter().last().expect("a rank").unwrap();
        let group = GroupSums { members: (0..world).collect(), dtype: DType::F32, elements };
        let connections = Connections { wire: Wire::Tcp, streams: 2, encrypted: true };
        let planned = transport_bytes(&Hosts::new(sizes.to_vec()), world - 1, &[group], connections);
        let what = format!("{sizes:?}, {elements} elements: took {took}, planned {planned}");
        // Calls take a few kilobytes of their own while they run.
        assert!(took <= planned + (16 << 10), "{what}");
        assert!(planned <= 2 * took + (1 << 20), "{what}");
    }
}
