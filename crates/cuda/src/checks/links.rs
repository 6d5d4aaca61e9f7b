//! A link of one rank: what NCCL does for the engine, tried on one card. That several cards find each other, one card cannot show.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_tensor::links::{LinkId, LinkStep, Message, PartsSum, Span};
use phalanx_tensor::{DType, Device, DeviceError, Kernels, Links, Tensor};

use super::bench::{numbers, random, read, tensor};
use crate::driver::Made;
use crate::error::Error;
use crate::factory::{Options, unplanned_counting};

/// Bytes of the card's memory for tensors.
const BYTES: u64 = 64 << 20;

/// Time after which a call counts as one that does not end.
const PATIENCE: Duration = Duration::from_secs(60);

/// Elements of a tensor: no whole number of groups of four.
const ELEMENTS: usize = 70_001;

/// Tries what the engine asks of NCCL with a communicator of one rank; the version of the library and the bytes of the card that it takes
/// for the communicator, or None where there is no library. `host` computes operations on host memory.
///
/// # Errors
/// A missing part, or a failure.
pub fn link_of_one_rank(options: &Options, host: Arc<dyn Kernels>) -> Result<Option<(i32, u64)>, Error> {
    let Some((version, _)) = options.find_nccl()? else { return Ok(None) };
    let options = Options { communicators: vec![1], ..options.clone() };
    let made = Arc::<Made>::default();
    let device = unplanned_counting(&options, 0, BYTES, host, &made)?;
    tried(&device).map_err(|error| Error::NotConnected(format!("NCCL {version}: {error}")))?;
    Ok(Some((version, made.linked_bytes())))
}

fn tried(device: &Device) -> Result<(), String> {
    let text = |error: DeviceError| error.to_string();
    let links = device.links().ok_or("the device has no links")?;
    let join = || -> Result<LinkId, String> {
        let link = links.join(&links.invite().map_err(text)?, 0, 1).map_err(text)?;
        settle(links, link)?;
        Ok(link)
    };
    let link = join()?;
    check_copies(device, links, link)?;
    links.warmed().map_err(text)?;
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for ranks in [1, 2, 3, 5, 8, 13] {
            check_sum(device, links, link, dtype, ranks)?;
        }
    }
    // A second communicator beside it, which ends as after a failure.
    links.abandon(join()?);
    check_copies(device, links, link)?;
    links.leave(link);
    Ok(())
}

fn settle(links: &dyn Links, link: LinkId) -> Result<(), String> {
    let since = Instant::now();
    while !links.is_over(link).map_err(|error| error.to_string())? {
        if since.elapsed() > PATIENCE {
            links.abandon(link);
            return Err(format!("a call has not ended within {PATIENCE:?}"));
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

fn run(links: &dyn Links, link: LinkId, steps: Vec<LinkStep>) -> Result<(), String> {
    let after = links.mark(link).map_err(|error| error.to_string())?;
    // SAFETY: the callers keep the tensors of the steps until this returns: the call is over then, or was abandoned.
    unsafe { links.start(link, steps, after) }.map_err(|error| error.to_string())?;
    settle(links, link)
}

fn span(tensor: &mut Tensor) -> Span {
    let view = tensor.view_mut();
    Span { address: view.address().as_ptr().expose_provenance(), bytes: view.bytes() }
}

fn numbers_of(device: &Device, tensor: &Tensor) -> Result<Vec<f64>, String> {
    read(device, tensor.view()).map_err(|error| error.to_string())
}

/// Through every way in which bytes move, numbers stay what they are.
fn check_copies(device: &Device, links: &dyn Links, link: LinkId) -> Result<(), String> {
    let of = |seed| random(device, DType::F32, &[ELEMENTS], seed);
    let (mut x, mut whole, mut received, mut copy) = (of(1), of(2), of(3), of(4));
    let (whole_span, to) = (span(&mut whole), span(&mut received));
    let message = |is_sent, buffer| Message { peer: 0, is_sent, buffer };
    let steps = vec![
        LinkStep::AllGather { part: span(&mut x), whole: whole_span },
        LinkStep::Broadcast { buffer: whole_span, root: 0 },
        LinkStep::Exchange(vec![message(true, whole_span), message(false, to)]),
        LinkStep::Copy { from: to, to: span(&mut copy) },
    ];
    run(links, link, steps)?;
    let is_same = numbers_of(device, &copy)? == numbers_of(device, &x)?;
    if is_same { Ok(()) } else { Err("numbers have changed on their way".to_string()) }
}

/// A sum of parts of so many ranks has the bits of the tree over ranks.
fn check_sum(
    device: &Device,
    links: &dyn Links,
    link: LinkId,
    dtype: DType,
    ranks: usize,
) -> Result<(), String> {
    let rank = ranks / 2;
    // Of very different sizes, so that any other order of additions changes the bits.
    let wide = |seed: u64, n: usize| -> Vec<f32> {
        numbers(seed, n).into_iter().enumerate().map(|(i, x)| x * 10f32.powi((i % 9) as i32 - 4)).collect()
    };
    let of = |seed, n| tensor(device, dtype, &[n], &wide(seed, n));
    for accumulate in [false, true] {
        let (mut own, mut target) = (of(5, ELEMENTS), of(6, ELEMENTS));
        let mut others = of(7, ELEMENTS * (ranks - 1).max(1));
        let [a, b, before] = [&own, &others, &target].map(|tensor| numbers_of(device, tensor));
        let (a, b, before) = (a?, b?, before?);
        let all = span(&mut others);
        let sum = PartsSum {
            dtype,
            elements: ELEMENTS,
            place: rank,
            places: ranks,
            own: span(&mut own),
            others: all.range(0, all.bytes / (ranks - 1).max(1) * (ranks - 1)),
            target: span(&mut target),
            accumulate,
        };
        run(links, link, vec![LinkStep::Sum(sum)])?;
        let found = numbers_of(device, &target)?;
        for (i, found) in found.iter().enumerate() {
            let part = |r: usize| match r.cmp(&rank) {
                std::cmp::Ordering::Less => b[r * ELEMENTS + i],
                std::cmp::Ordering::Equal => a[i],
                std::cmp::Ordering::Greater => b[(r - 1) * ELEMENTS + i],
            };
            let parts: Vec<f64> = (0..ranks).map(part).collect();
            let expected = expected(dtype, &parts, accumulate.then_some(before[i]));
            if *found != expected {
                let name = dtype.name();
                return Err(format!("element {i} of a sum of {ranks} in {name} is {found}, not {expected}"));
            }
        }
    }
    Ok(())
}

fn expected(dtype: DType, parts: &[f64], before: Option<f64>) -> f64 {
    if dtype == DType::F64 {
        let sum = tree(parts, |a, b| a + b);
        return before.map_or(sum, |before| before + sum);
    }
    let add = |a: f64, b: f64| f64::from(a as f32 + b as f32);
    let sum = tree(parts, add);
    let sum = before.map_or(sum, |before| add(before, sum)) as f32;
    match dtype {
        DType::BF16 => half::bf16::from_f32(sum).to_f64(),
        DType::F16 => half::f16::from_f32(sum).to_f64(),
        _ => f64::from(sum),
    }
}

/// `sum(lo..hi) = sum(lo..mid) + sum(mid..hi)` with `mid = lo + next_power_of_two(hi - lo) / 2`
fn tree(parts: &[f64], add: impl Fn(f64, f64) -> f64 + Copy) -> f64 {
    match parts {
        [one] => *one,
        _ => {
            let (low, high) = parts.split_at(parts.len().next_power_of_two() / 2);
            add(tree(low, add), tree(high, add))
        }
    }
}
