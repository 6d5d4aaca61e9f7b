//! `device.kernels`: the instruction set and the tile registers with which the processor computes.
//!
//! Each set has its own bits, so a run records the one that it uses, and a resumed run uses it again.

use std::fmt;

use phalanx_simd::Isa;
use phalanx_simd::tiles::TileUnit;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An instruction set, with or without tile registers for matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSet {
    /// Instruction set.
    pub isa: Isa,
    /// Tile registers.
    pub tiles: Option<TileUnit>,
}

/// Every word that stands for kernels, with what it stands for.
const SETS: [(&str, Isa, Option<TileUnit>); 12] = {
    use TileUnit::{Amx, Model};
    [
        ("portable", Isa::Portable, None),
        ("avx2", Isa::Avx2, None),
        ("avx512", Isa::Avx512, None),
        ("avx512bf16", Isa::Avx512Bf16, None),
        ("portable+amx", Isa::Portable, Some(Amx)),
        ("avx2+amx", Isa::Avx2, Some(Amx)),
        ("avx512+amx", Isa::Avx512, Some(Amx)),
        ("avx512bf16+amx", Isa::Avx512Bf16, Some(Amx)),
        ("portable+amx-model", Isa::Portable, Some(Model)),
        ("avx2+amx-model", Isa::Avx2, Some(Model)),
        ("avx512+amx-model", Isa::Avx512, Some(Model)),
        ("avx512bf16+amx-model", Isa::Avx512Bf16, Some(Model)),
    ]
};

/// Value of the key in an undecided configuration.
const AUTO: &str = "auto";

/// All words of the key.
pub(super) const WORDS: [&str; SETS.len() + 1] = {
    let mut words = [AUTO; SETS.len() + 1];
    let mut i = 0;
    while i < SETS.len() {
        words[i + 1] = SETS[i].0;
        i += 1;
    }
    words
};

impl KernelSet {
    /// The name that users give and see, such as `avx2` or `avx512+amx`.
    pub fn name(self) -> &'static str {
        let own = SETS.iter().find(|(_, isa, tiles)| (*isa, *tiles) == (self.isa, self.tiles));
        own.map_or(AUTO, |(name, ..)| name)
    }

    /// Returns whether both compute the same bits. The software model of tile registers computes those of the registers.
    pub fn same_bits(self, other: KernelSet) -> bool {
        self.isa == other.isa && self.tiles.is_some() == other.tiles.is_some()
    }

    /// Kernels that both a processor with these and one with `other` have.
    #[must_use]
    pub fn that_both_have(self, other: KernelSet) -> KernelSet {
        let tiles = if self.tiles == other.tiles { self.tiles } else { None };
        KernelSet { isa: self.isa.min(other.isa), tiles }
    }
}

/// The value of `device.kernels`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KernelChoice {
    /// The program decides: the fastest that the processors of all ranks have, or what `PHALANX_ISA` names.
    #[default]
    Auto,
    /// These.
    Set(KernelSet),
}

impl KernelChoice {
    /// Returns whether it is not decided.
    pub fn is_auto(self) -> bool {
        self == KernelChoice::Auto
    }

    /// The kernels, if they are decided.
    pub fn set(self) -> Option<KernelSet> {
        match self {
            KernelChoice::Auto => None,
            KernelChoice::Set(set) => Some(set),
        }
    }

    /// Its name in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            KernelChoice::Auto => AUTO,
            KernelChoice::Set(set) => set.name(),
        }
    }

    /// The kernels with this name in a configuration.
    pub fn named(name: &str) -> Option<KernelChoice> {
        let set = SETS.iter().find(|(known, ..)| *known == name);
        let set = set.map(|(_, isa, tiles)| KernelChoice::Set(KernelSet { isa: *isa, tiles: *tiles }));
        set.or((name == AUTO).then_some(KernelChoice::Auto))
    }
}

impl From<KernelSet> for KernelChoice {
    fn from(set: KernelSet) -> KernelChoice {
        KernelChoice::Set(set)
    }
}

impl Serialize for KernelChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for KernelChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<KernelChoice, D::Error> {
        struct Word;
        impl Visitor<'_> for Word {
            type Value = KernelChoice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of kernels")
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<KernelChoice, E> {
                KernelChoice::named(word).ok_or_else(|| E::unknown_variant(word, &WORDS))
            }
        }
        deserializer.deserialize_str(Word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_as_it_is_written() {
        for word in WORDS {
            let kernels = KernelChoice::named(word).unwrap();
            assert_eq!(kernels.name(), word);
            let text = serde_json::to_string(&kernels).unwrap();
            assert_eq!(serde_json::from_str::<KernelChoice>(&text).unwrap(), kernels);
        }
        let refused = serde_json::from_str::<KernelChoice>("\"sse9\"").unwrap_err().to_string();
        assert!(refused.contains("sse9") && refused.contains("avx512bf16+amx"), "{refused}");
        let sets = SETS.map(|(_, isa, tiles)| KernelSet { isa, tiles });
        assert!(sets.iter().enumerate().all(|(i, set)| !sets[..i].contains(set)));
    }

    #[test]
    fn two_processors_compute_with_what_both_have() {
        let set = |word| match KernelChoice::named(word) {
            Some(KernelChoice::Set(set)) => set,
            _ => panic!("{word}"),
        };
        for (a, b, both) in [
            ("avx512bf16", "avx2", "avx2"),
            ("avx512+amx", "avx512bf16", "avx512"),
            ("avx512+amx", "avx512+amx", "avx512+amx"),
            ("avx512+amx", "avx2+amx-model", "avx2"),
        ] {
            assert_eq!([set(a).that_both_have(set(b)), set(b).that_both_have(set(a))], [set(both); 2]);
        }
        assert!(set("avx512+amx").same_bits(set("avx512+amx-model")));
        assert!(!set("avx512+amx").same_bits(set("avx512")));
        assert!(!set("avx512bf16").same_bits(set("avx512")));
    }
}
