//! The driver, cards and compiler of kernels that a machine has for this device.

use std::fmt;
use std::sync::{Arc, OnceLock};

use phalanx_plan::trace::DType;

use crate::compiler::Compiler;
use crate::driver::{Card, Context, usable_cards, version};
use crate::error::Error;
use crate::factory::Options;
use crate::launch::attention_shared_bytes;
use crate::modules::Modules;

/// A driver with cards that can be used, and a compiler.
#[derive(Clone, Debug)]
pub struct Found {
    /// The driver's version, as it gives it: 12040 for CUDA 12.4.
    pub driver: i32,
    /// The cards that are new enough, by their numbers.
    pub cards: Vec<Card>,
    /// NVRTC's version.
    pub nvrtc: (i32, i32),
    /// The version of cuBLASLt, as it gives it, if there is one: 120800 for CUDA 12.8.
    pub cublas: Option<usize>,
    /// The version of NCCL, as it gives it, if there is one: 22705 for 2.27.5; or what is wrong with the one that was named. Few runs need it.
    pub nccl: Result<Option<i32>, String>,
}

impl Found {
    /// Looks for all of it.
    ///
    /// # Errors
    /// A part that is missing or too old, with the package or setting that helps.
    pub fn look(options: &Options) -> Result<Found, Error> {
        let cards = usable_cards()?;
        let nvrtc = check_compiler(&cards, options)?;
        let cublas = options.find_blas()?.map(|(version, _)| version);
        let nccl = options.find_nccl().map_err(|error| error.to_string());
        let nccl = nccl.map(|found| found.map(|(version, _)| version));
        Ok(Found { driver: version()?, cards, nvrtc, cublas, nccl })
    }

    /// The card of a rank: ranks share cards where there are more ranks than cards.
    pub fn card_of(&self, rank: usize) -> &Card {
        &self.cards[rank % self.cards.len()]
    }

    /// Ranks on the card that has most of `ranks`.
    pub fn ranks_per_card(&self, ranks: usize) -> usize {
        ranks.div_ceil(self.cards.len()).max(1)
    }

    /// Number of ranks, of `ranks`, that compute on the card of rank `rank`.
    pub fn ranks_on_card_of(&self, rank: usize, ranks: usize) -> usize {
        let (cards, first) = (self.cards.len(), rank % self.cards.len());
        ranks.saturating_sub(first).div_ceil(cards).max(1)
    }

    /// Why some card does not compute attention with heads of `size` elements, if it does not.
    pub fn why_no_heads(&self, size: usize, element: DType) -> Option<String> {
        let needed = attention_shared_bytes(size, element)?;
        let card = self.cards.iter().find(|card| card.shared_bytes < needed)?;
        Some(format!(
            "heads of {size} elements in {} (model.hidden / model.heads) need {needed} bytes of shared memory, and a block of {} may have {}: \
             give more heads, or precision.compute = \"bf16\"",
            element.name(),
            card.name,
            card.shared_bytes
        ))
    }

    /// Bytes of the card that each of `ranks` may take at most.
    pub fn share_bytes(&self, ranks: usize) -> u64 {
        let smallest = self.cards.iter().map(|card| card.memory_bytes).min().unwrap_or(0);
        smallest / self.ranks_per_card(ranks) as u64
    }
}

/// The version of the first NVRTC that compiles for the cards, and that makes what the first of them takes. That is tried once in a
/// process, because it takes a context.
fn check_compiler(cards: &[Card], options: &Options) -> Result<(i32, i32), Error> {
    static IS_TRIED: OnceLock<()> = OnceLock::new();
    Compiler::first(options.nvrtc.as_deref(), &options.folders, |compiler| {
        cards.iter().try_for_each(|card| compiler.check_compiles_for(card.capability))?;
        let version = compiler.version();
        // A card that is full or in use: whoever makes a device on it says so, and tries it again.
        let context = if IS_TRIED.get().is_none() {
            Context::new(cards[0].clone(), &Arc::default()).ok()
        } else {
            None
        };
        if let Some(context) = context.map(Arc::new) {
            match Modules::new(&context, compiler, options.cache.as_ref()).check() {
                Err(
                    error @ (Error::CompilerTooNew { .. }
                    | Error::Compile { .. }
                    | Error::UnusableCompiler { .. }),
                ) => return Err(error),
                Err(_) => {}
                Ok(()) => drop(IS_TRIED.set(())),
            }
        }
        Ok(version)
    })
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Found { driver, cards, nvrtc, cublas, .. } = self;
        let first = &cards[0];
        let count =
            if cards.len() == 1 { String::new() } else { format!("{} cards, the first ", cards.len()) };
        write!(
            f,
            "{count}{} (compute capability {}.{}, {:.1} GiB), driver of CUDA {}.{}, NVRTC {}.{}",
            first.name,
            first.capability.0,
            first.capability.1,
            first.memory_bytes as f64 / f64::from(1 << 30),
            driver / 1000,
            driver % 1000 / 10,
            nvrtc.0,
            nvrtc.1
        )?;
        match cublas {
            Some(version) => {
                write!(f, ", products by cuBLASLt {}.{}", version / 10_000, version % 10_000 / 100)
            }
            None => f.write_str(", products by its own kernels (no cuBLASLt)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_cards_in_turn() {
        let card = |index| Card {
            index,
            name: "a card".to_string(),
            capability: (9, 0),
            multiprocessors: 1,
            memory_bytes: 900,
            shared_bytes: 0,
            clocks: None,
            device: 0,
        };
        let found = Found {
            driver: 12080,
            cards: vec![card(0), card(1)],
            nvrtc: (12, 8),
            cublas: None,
            nccl: Ok(None),
        };
        assert_eq!((found.share_bytes(1), found.share_bytes(2), found.share_bytes(3)), (900, 900, 450));
        for (ranks, expected) in [(1, [1, 1]), (2, [1, 1]), (3, [2, 1]), (5, [3, 2])] {
            assert_eq!([0, 1].map(|rank| found.ranks_on_card_of(rank, ranks)), expected, "{ranks} ranks");
        }
        assert_eq!(found.ranks_on_card_of(4, 5), 3);
    }
}
