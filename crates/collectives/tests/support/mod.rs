//! Support of the tests of groups: tensors with known values, ranks as threads, the naive oracle.

mod post;
pub mod table;

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use half::{bf16, f16};
use phalanx_collectives::pretended::{NoKernels, carried_hosts_of_threads, hosts_of_threads};
use phalanx_collectives::{Endpoint, Group, Options, threads};
use phalanx_tensor::Element;
use phalanx_tensor::{Arena, Category, DType, Device, Tensor};

/// Host memory without a plan; no kernel is run.
pub fn host() -> Device {
    Device::new(Arc::new(NoKernels), Arena::heap())
}

pub fn tensor<T: Element>(device: &Device, values: &[T]) -> Tensor {
    let mut tensor = device.alloc(T::DTYPE, [values.len()], Category::Communication, "test");
    tensor.view_mut().into_slice::<T>().copy_from_slice(values);
    tensor
}

pub fn values<T: Element>(tensor: &Tensor) -> Vec<T> {
    tensor.view().as_slice::<T>().to_vec()
}

pub fn zeros(device: &Device, dtype: DType, elements: usize) -> Tensor {
    device.alloc(dtype, [elements], Category::Communication, "zeros")
}

/// Element `i` of rank `rank`, with very different sizes, so that any other order of additions changes the bits.
pub fn value(rank: usize, i: usize) -> f64 {
    let h = ((rank * 7919 + i * 104_729 + 12_345) as u32).wrapping_mul(2_654_435_761);
    (f64::from(h) / f64::from(u32::MAX) - 0.5) * 10f64.powi((h % 9) as i32 - 4)
}

/// Element type of the oracle.
pub trait Sample: Element + PartialEq + Send + std::fmt::Debug {
    /// Type in which elements are added.
    type Sum: Copy + std::ops::Add<Output = Self::Sum>;
    fn sample(rank: usize, i: usize) -> Self;
    fn widen(self) -> Self::Sum;
    fn round(sum: Self::Sum) -> Self;
}

/// Types that are added in a wider one, or in themselves.
macro_rules! samples {
    ($type:ty, $sum:ty, $sample:expr, $widen:expr, $round:expr) => {
        impl Sample for $type {
            type Sum = $sum;
            fn sample(rank: usize, i: usize) -> $type {
                let sample: fn(usize, usize) -> $type = $sample;
                sample(rank, i)
            }
            fn widen(self) -> $sum {
                $widen(self)
            }
            fn round(sum: $sum) -> $type {
                $round(sum)
            }
        }
    };
}
samples!(f32, f32, |rank, i| value(rank, i) as f32, |x| x, |x| x);
samples!(f64, f64, |rank, i| value(rank, i) / 3.0, |x| x, |x| x);
samples!(bf16, f32, |rank, i| bf16::from_f64(value(rank, i)), bf16::to_f32, bf16::from_f32);
samples!(f16, f32, |rank, i| f16::from_f64(value(rank, i)), f16::to_f32, f16::from_f32);
samples!(u32, u32, |rank, i| (rank * 1_000_003 + i * 17) as u32, |x| x, |x| x);

/// The values of one rank.
pub fn sample<T: Sample>(rank: usize, elements: usize) -> Vec<T> {
    first("sample", rank, elements, |i| T::sample(rank, i))
}

/// Name and number of a series, and the type of its values.
type Series = (&'static str, usize, TypeId);

/// The values of each series as far as one was asked for: all ranks, and most tests, ask for the same ones.
static KNOWN: Mutex<BTreeMap<Series, Box<dyn Any + Send>>> = Mutex::new(BTreeMap::new());

/// The first `elements` values of a series.
fn first<T: Sample>(name: &'static str, of: usize, elements: usize, value: impl Fn(usize) -> T) -> Vec<T> {
    let mut known = KNOWN.lock().unwrap();
    let series = known.entry((name, of, TypeId::of::<T>())).or_insert_with(|| Box::new(Vec::<T>::new()));
    let values: &mut Vec<T> = series.downcast_mut().unwrap();
    values.extend((values.len()..elements).map(value));
    values[..elements].to_vec()
}

/// The oracle: the sum in the documented order, before rounding.
pub fn tree<T: Sample>(x: &[T]) -> T::Sum {
    match x.len() {
        1 => x[0].widen(),
        n => {
            let (low, high) = x.split_at(n.next_power_of_two() / 2);
            tree(low) + tree(high)
        }
    }
}

/// The sum over `world` ranks of their samples.
pub fn summed<T: Sample>(world: usize, elements: usize) -> Vec<T> {
    summed_from(0, world, elements)
}

/// The sum over the samples of `world` ranks from number `start` on.
pub fn summed_from<T: Sample>(start: usize, world: usize, elements: usize) -> Vec<T> {
    let value = |i: usize| tree(&(start..start + world).map(|r| T::sample(r, i)).collect::<Vec<T>>());
    first("sum", (start << 32) + world, elements, |i| T::round(value(i)))
}

/// The same, added to the initial shard of every rank: the first `part` samples of `seed`.
pub fn accumulated<T: Sample>(seed: usize, world: usize, part: usize) -> Vec<T> {
    let sum = |i: usize| T::sample(seed, i % part).widen() + tree_at::<T>(world, i);
    (0..part * world).map(|i| T::round(sum(i))).collect()
}

fn tree_at<T: Sample>(world: usize, i: usize) -> T::Sum {
    tree(&(0..world).map(|r| T::sample(r, i)).collect::<Vec<T>>())
}

#[track_caller]
pub fn same_bits<T: Sample>(got: &[T], expected: &[T], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    // At once, which is much faster than one by one.
    if bytemuck::cast_slice::<T, u8>(got) == bytemuck::cast_slice::<T, u8>(expected) {
        return;
    }
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!(bytemuck::bytes_of(a) == bytemuck::bytes_of(b), "{what}: element {i} is {a:?}, not {b:?}");
    }
}

/// Hosts of the ranks of a test.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    /// On one host, in shared memory.
    Shared(usize),
    /// On hosts with these numbers of ranks, which speak TCP to each other.
    Hosts(&'static [usize]),
    /// The same, but something else than TCP carries messages between the hosts.
    Carried(&'static [usize]),
}

impl Layout {
    pub fn world(self) -> usize {
        match self {
            Layout::Shared(world) => world,
            Layout::Hosts(sizes) | Layout::Carried(sizes) => sizes.iter().sum(),
        }
    }
}

/// Hosts of one rank, of several, and of different numbers.
pub const HOSTS: [Layout; 9] = [
    Layout::Hosts(&[1, 1]),
    Layout::Hosts(&[1, 1, 1]),
    Layout::Hosts(&[2, 1]),
    Layout::Hosts(&[2, 2]),
    Layout::Hosts(&[3, 2]),
    Layout::Hosts(&[1, 4, 3]),
    Layout::Carried(&[1, 1]),
    Layout::Carried(&[2, 2]),
    Layout::Carried(&[3, 1, 2]),
];

/// Runs `body` once per rank on its own thread with an endpoint; results by rank. A panic is returned.
pub fn ranks<R: Send>(
    world: usize,
    options: &Options,
    body: impl Fn(Endpoint) -> R + Sync,
) -> Vec<std::thread::Result<R>> {
    ranks_on(Layout::Shared(world), options, body)
}

/// The same anywhere. Between hosts, traffic is encrypted unless calls overlap.
pub fn ranks_on<R: Send>(
    layout: Layout,
    options: &Options,
    body: impl Fn(Endpoint) -> R + Sync,
) -> Vec<std::thread::Result<R>> {
    let (endpoints, _launchers) = match layout {
        Layout::Shared(world) => (threads(world), None),
        Layout::Hosts(sizes) => {
            let (endpoints, launchers) = hosts_of_threads(sizes, options.overlap, 2).unwrap();
            (endpoints, Some(launchers))
        }
        Layout::Carried(sizes) => {
            let carriers = post::Post::carriers(layout.world());
            let (endpoints, launchers) = carried_hosts_of_threads(sizes, carriers).unwrap();
            (endpoints, Some(launchers))
        }
    };
    std::thread::scope(|scope| {
        let run = |endpoint: Endpoint| {
            let (body, options) = (&body, options.clone());
            let name = format!("rank-{}", endpoint.rank());
            let builder = std::thread::Builder::new().name(name);
            builder.spawn_scoped(scope, move || body(endpoint.with_options(options))).unwrap()
        };
        let handles: Vec<_> = endpoints.into_iter().map(run).collect();
        handles.into_iter().map(|h| h.join()).collect()
    })
}

/// The same for ranks that must not panic, given a group of all.
pub fn groups<R: Send>(world: usize, overlap: bool, body: impl Fn(&dyn Group) -> R + Sync) -> Vec<R> {
    groups_on(Layout::Shared(world), overlap, body)
}

/// The same anywhere.
pub fn groups_on<R: Send>(layout: Layout, overlap: bool, body: impl Fn(&dyn Group) -> R + Sync) -> Vec<R> {
    let options = Options { overlap, ..Options::default() };
    let results = ranks_on(layout, &options, |endpoint| body(&*endpoint.group("data")));
    results.into_iter().map(|r| r.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
}

/// Runs `attempt`, which returns a duration, until it is below a second, since other work on the machine only adds
/// time. Fails after five attempts.
#[track_caller]
pub fn within_a_second(what: &str, mut attempt: impl FnMut() -> Duration) {
    let mut took = Vec::new();
    while took.len() < 5 {
        let time = attempt();
        if time < Duration::from_secs(1) {
            return;
        }
        took.push(time);
    }
    panic!("{what} took {took:?}");
}
