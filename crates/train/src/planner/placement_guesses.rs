//! Peaks of memory with chunks elsewhere, from chunk programs in place of dry runs; and the search that begins with a guess.

use std::cell::RefCell;
use std::collections::HashMap;

use phalanx_parallel::zero::Residence;
use phalanx_plan::live_over_uses;
use phalanx_plan::program::RankChunks;
use phalanx_plan::trace::{Memory, PhaseName, Site, Trace};

/// Peaks of device and host memory in a step of a rank, without a dry run for each placement.
pub(crate) struct Guesses {
    chunks: RankChunks,
    /// Bytes in each memory beside chunks while each block runs.
    beside: Vec<[u64; Memory::ALL.len()]>,
    /// By numbers of parts that are away, and on disk.
    known: RefCell<HashMap<[usize; 2], [u64; 2]>>,
}

impl Guesses {
    /// From the chunks of a rank and a dry run of it.
    pub(crate) fn new(chunks: &RankChunks, trace: &Trace) -> Guesses {
        let beside = live_over_uses(trace, PhaseName::Step, is_of_chunks);
        Guesses { chunks: chunks.clone(), beside, known: RefCell::default() }
    }

    /// The peaks of device and host memory with this residence of the chunks of each stage; `away` are its numbers of parts that are away,
    /// and on disk.
    pub(crate) fn peaks(&self, away: [usize; 2], residence: &[(usize, Residence)]) -> [u64; 2] {
        if let Some(peaks) = self.known.borrow().get(&away) {
            return *peaks;
        }
        let mut chunks = self.chunks.clone();
        for (index, residence) in residence {
            let stage =
                chunks.stages.iter_mut().find(|stage| stage.index == *index).expect("a stage of the rank");
            for (c, chunk) in stage.chunks.iter_mut().enumerate() {
                let lies = residence.of(c);
                (chunk.parameters, chunk.gradients, chunk.optimizer) =
                    (lies.parameters, lies.gradients, lies.optimizer);
            }
        }
        let live = chunks.lower(PhaseName::Step).live();
        let peak = |memory: Memory| {
            let both = live.iter().zip(&self.beside);
            both.map(|(own, beside)| own.0[memory as usize] + beside[memory as usize]).max().unwrap_or(0)
        };
        let peaks = [peak(Memory::Device), peak(Memory::Host)];
        self.known.borrow_mut().insert(away, peaks);
        peaks
    }
}

/// The smallest number up to `max` for which `fits` holds, if it holds for all behind the first; sought from a guess on.
///
/// # Errors
/// Those of `fits`.
pub(crate) fn smallest<E>(
    (max, guess): (usize, usize),
    fits: impl Fn(usize) -> Result<bool, E>,
) -> Result<Option<usize>, E> {
    // The first number that may fit, and the first that is known to.
    let (mut first, mut enough) = (0, guess.min(max));
    let mut step = 1;
    if fits(enough)? {
        while first < enough {
            let next = enough.saturating_sub(step).max(first);
            if !fits(next)? {
                first = next + 1;
                break;
            }
            (enough, step) = (next, 2 * step);
        }
    } else {
        loop {
            first = enough + 1;
            if first > max {
                return Ok(None);
            }
            enough = (enough + step).min(max);
            step *= 2;
            if fits(enough)? {
                break;
            }
        }
    }
    while first < enough {
        let middle = first.midpoint(enough - 1);
        if fits(middle)? { enough = middle } else { first = middle + 1 }
    }
    Ok(Some(enough))
}

/// Returns whether a place allocates buffers of chunk programs.
fn is_of_chunks(site: Site) -> bool {
    site.file.contains("plan/src/program/") || site.file.contains("parallel/src/zero/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_number_is_found_from_any_guess() {
        for (max, first) in (0..12).flat_map(|max| (0..=max + 1).map(move |first| (max, first))) {
            for guess in 0..=max {
                let found = smallest::<()>((max, guess), |number| Ok(number >= first));
                assert_eq!(found, Ok((first <= max).then_some(first)), "{first} of {max} from {guess}");
            }
        }
    }
}
