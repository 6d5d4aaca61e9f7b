//! Which of the processor's kernels ranks compute with: those that the environment asks for, that a run has recorded, and
//! that all hosts have.

use anyhow::{Result, bail};
use phalanx_cpu::ProductMethod;
use phalanx_simd::Isa;
use phalanx_simd::tiles::{self, NoAmx, TileUnit};
use phalanx_train::config::{DeviceConfig, KernelChoice, KernelSet, PrecisionConfig, Products};

use super::{Environment, ISA};
use crate::host::host_kernels::HostKernels;

impl Environment {
    /// Why the kernels `set` cannot be used, or not by the ranks of all hosts.
    pub fn why_not(self, set: KernelSet) -> Option<String> {
        // The model of tile registers starts runs on any processor, so it also continues them there.
        if set == self.uses {
            return None;
        }
        if set.isa > self.has.isa {
            let here = if self.has.isa < Isa::detect() { "a host of this job" } else { "this processor" };
            return Some(format!("{here} has at most {}", self.has.isa.name()));
        }
        if set.tiles.is_some() && Isa::detect() < Isa::Avx512Bf16 {
            let isa = Isa::Avx512Bf16.name();
            return Some(format!(
                "attention on tile registers needs {isa}, which this processor does not have"
            ));
        }
        let lacks_tiles = set.tiles == Some(TileUnit::Amx) && self.has.tiles != set.tiles;
        lacks_tiles.then(|| match tiles::amx() {
            Err(why) => why.to_string(),
            Ok(()) => "a host of this job has no tile registers (AMX)".to_string(),
        })
    }

    /// The same with the kernels of a configuration that the user gave; or as it is, where that leaves them open.
    ///
    /// # Errors
    /// Kernels that the processor has not, or others than the environment chooses.
    pub fn decide(self, device: &DeviceConfig) -> Result<Environment> {
        let decided = self.of_run(device)?;
        if self.is_chosen && decided.uses != self.uses {
            bail!(
                "{ISA} chooses the kernels {}, and device.kernels = \"{}\": leave one of them out",
                self.uses.name(),
                device.kernels.name()
            );
        }
        Ok(decided)
    }

    /// The same with the kernels that a run has decided on, whatever this process's environment says.
    ///
    /// # Errors
    /// Kernels that the processor has not.
    pub fn of_run(self, device: &DeviceConfig) -> Result<Environment> {
        let KernelChoice::Set(uses) = device.kernels else { return Ok(self) };
        match self.why_not(uses) {
            None => Ok(Environment { uses, ..self }),
            Some(why) => bail!(
                "device.kernels = \"{}\": {why}; leave it out, or set it to \"auto\" or \"{}\"",
                uses.name(),
                self.uses.name()
            ),
        }
    }

    /// Description of this host's kernels, which its launcher sends to that of host 0.
    pub fn to_host_kernels(self) -> HostKernels {
        HostKernels { uses: self.uses.into(), has: self.has.into(), is_chosen: self.is_chosen }
    }

    /// The same for a job of several hosts: with the fastest kernels that all of them have and nobody's environment excludes.
    pub fn on_hosts(self, hosts: impl Iterator<Item = HostKernels>) -> Environment {
        hosts.fold(self, |own, host| Environment {
            uses: host.uses.set().map_or(own.uses, |uses| own.uses.that_both_have(uses)),
            has: host.has.set().map_or(own.has, |has| own.has.that_both_have(has)),
            is_chosen: own.is_chosen || host.is_chosen,
        })
    }

    /// Note on tile registers that the processor has and matrix products do not use.
    pub fn unused_tiles(self) -> Option<String> {
        match (self.uses.tiles, tiles::amx()) {
            (None, Ok(())) => Some(format!(
                "by the kernels {}, because {}; those of bf16 would be faster on the tile registers (AMX)",
                self.uses.name(),
                match (self.has.tiles, self.is_chosen) {
                    (None, _) => "another host has no tile registers".to_string(),
                    (Some(_), true) => format!("{ISA} asks for them, here or on another host"),
                    (Some(_), false) => "the run keeps them".to_string(),
                }
            )),
            (None, Err(why)) if why != NoAmx::Processor => {
                Some(format!("{why}; matrix products use {} instead", self.uses.name()))
            }
            _ => None,
        }
    }

    /// Chooses the method of the products that `precision` asks for: never [`Products::Auto`].
    ///
    /// # Errors
    /// When this processor cannot compute them that way.
    pub fn choose(self, precision: &PrecisionConfig) -> Result<Products> {
        match (precision.products, self.uses.tiles) {
            (Products::Split, None) => bail!(
                "precision.products = \"split\": there are no tile registers for it ({}); give \"fma\" or leave it out",
                match tiles::amx() {
                    Err(why) => why.to_string(),
                    Ok(()) => format!("the kernels are {}", self.uses.name()),
                }
            ),
            _ => Ok(match self.options(1).with_products(precision.product_method())?.products {
                ProductMethod::Split => Products::Split,
                ProductMethod::Fma => Products::Fma,
                ProductMethod::Tf32 => Products::Tf32,
            }),
        }
    }
}

/// The instruction set called `name`, with tile registers if it names some; for an empty name the `fastest` of the
/// processor, whose best is `best`, with its tile registers.
pub(super) fn instruction_set(
    name: &str,
    [fastest, best]: [Isa; 2],
    amx: Result<(), NoAmx>,
) -> Result<KernelSet> {
    let set = |isa, tiles| Ok(KernelSet { isa, tiles });
    if name.is_empty() {
        return set(fastest, amx.is_ok().then_some(TileUnit::Amx));
    }
    if let Some(unit) = TileUnit::ALL.into_iter().find(|unit| unit.name() == name) {
        return match (unit, amx) {
            (TileUnit::Amx, Err(why)) => {
                bail!("{ISA}={name}: {why}; give {} or a weaker one, or amx-model for tests", best.name())
            }
            _ => set(fastest, Some(unit)),
        };
    }
    let Some(isa) = Isa::ALL.into_iter().find(|isa| isa.name() == name) else {
        let known = Isa::ALL.map(Isa::name).join(", ");
        let units = TileUnit::ALL.map(TileUnit::name).join(", ");
        bail!("{ISA}={name}: there is no such instruction set; known are {known}, {units}");
    };
    if isa > best {
        bail!("{ISA}={name}: this processor has at most {}; give that or a weaker one", best.name());
    }
    set(isa, None)
}

#[cfg(test)]
mod tests {
    use phalanx_train::config::Float;

    use super::*;

    fn pair(set: KernelSet) -> (Isa, Option<TileUnit>) {
        (set.isa, set.tiles)
    }

    #[test]
    fn names_are_taken_up_to_what_the_processor_has() {
        let none = Err(NoAmx::Processor);
        let taken = |name, sets| pair(instruction_set(name, sets, none).unwrap());
        assert_eq!(taken("", [Isa::Avx2; 2]), (Isa::Avx2, None));
        assert_eq!(taken("portable", [Isa::Avx2; 2]), (Isa::Portable, None));
        let slow_pairs = [Isa::Avx512, Isa::Avx512Bf16];
        assert_eq!(taken("", slow_pairs), (Isa::Avx512, None));
        assert_eq!(taken("avx512bf16", slow_pairs), (Isa::Avx512Bf16, None));
        let refused = |name, best| instruction_set(name, [best; 2], none).unwrap_err().to_string();
        let unknown = refused("sse9", Isa::Avx512);
        assert!(
            unknown.contains("sse9")
                && unknown.contains("portable, avx2, avx512, avx512bf16, amx, amx-model"),
            "{unknown}"
        );
        let above = refused("avx512", Isa::Avx2);
        assert!(above.contains("PHALANX_ISA=avx512") && above.contains("at most avx2"), "{above}");
    }

    #[test]
    fn tile_registers_are_used_where_there_are_some_and_refused_elsewhere() {
        let sets = [Isa::Avx512, Isa::Avx512Bf16];
        let amx = Some(TileUnit::Amx);
        assert_eq!(pair(instruction_set("", sets, Ok(())).unwrap()), (Isa::Avx512, amx));
        assert_eq!(pair(instruction_set("avx512", sets, Ok(())).unwrap()), (Isa::Avx512, None));
        assert_eq!(pair(instruction_set("amx", sets, Ok(())).unwrap()), (Isa::Avx512, amx));
        assert_eq!(pair(instruction_set("avx512bf16", sets, Ok(())).unwrap()), (Isa::Avx512Bf16, None));
        for why in [NoAmx::Processor, NoAmx::System, NoAmx::Refused(22)] {
            assert_eq!(pair(instruction_set("", sets, Err(why)).unwrap()), (Isa::Avx512, None));
            let model = pair(instruction_set("amx-model", sets, Err(why)).unwrap());
            assert_eq!(model, (Isa::Avx512, Some(TileUnit::Model)));
            let refused = instruction_set("amx", sets, Err(why)).unwrap_err().to_string();
            assert!(refused.contains("PHALANX_ISA=amx: ") && refused.contains(&why.to_string()), "{refused}");
        }
    }

    #[test]
    fn products_are_chosen_by_what_the_processor_has() {
        let precision = |compute, products| PrecisionConfig { compute, products, ..Default::default() };
        let with = |tiles| {
            let uses = KernelSet { isa: Isa::Portable, tiles };
            Environment { uses, has: uses, is_chosen: true }
        };
        let [without, tiled] = [None, Some(TileUnit::Model)].map(with);
        for compute in [Float::F32, Float::F16] {
            let chosen = |of: Environment, products| of.choose(&precision(compute, products));
            assert_eq!(chosen(without, Products::Auto).unwrap(), Products::Fma);
            assert_eq!(chosen(tiled, Products::Auto).unwrap(), Products::Split);
            assert_eq!(chosen(tiled, Products::Fma).unwrap(), Products::Fma);
            assert_eq!(chosen(tiled, Products::Split).unwrap(), Products::Split);
            let refused = chosen(without, Products::Split).unwrap_err().to_string();
            assert!(
                refused.contains("precision.products = \"split\"") && refused.contains("fma"),
                "{refused}"
            );
        }
        assert_eq!(tiled.choose(&precision(Float::Bf16, Products::Auto)).unwrap(), Products::Fma);
    }

    fn set(isa: Isa, tiles: Option<TileUnit>) -> KernelSet {
        KernelSet { isa, tiles }
    }

    #[test]
    fn the_ranks_of_all_hosts_compute_with_kernels_that_all_have() {
        let amx = Some(TileUnit::Amx);
        let of = |uses, has| Environment { uses, has, is_chosen: false };
        let zen = of(set(Isa::Avx512Bf16, None), set(Isa::Avx512Bf16, None));
        let xeon = of(set(Isa::Avx512, amx), set(Isa::Avx512Bf16, amx));
        let desktop = of(set(Isa::Avx2, None), set(Isa::Avx2, None));
        let on = |own: Environment, hosts: &[Environment]| {
            own.on_hosts(hosts.iter().map(|host| host.to_host_kernels()))
        };
        assert_eq!(on(zen, &[]), zen);
        assert_eq!(on(xeon, &[xeon, xeon]), xeon);
        assert_eq!(on(xeon, &[zen]).kernels(), set(Isa::Avx512, None));
        let all = on(xeon, &[zen, desktop]);
        assert_eq!(all, on(desktop, &[xeon, zen]));
        assert_eq!((all.kernels(), all.has), (desktop.uses, desktop.has));
        assert_eq!(all.why_not(set(Isa::Portable, None)), None);
        // Attention on tile registers, and on their model, needs what this processor may not have.
        let attends = Isa::detect() >= Isa::Avx512Bf16;
        assert_eq!(all.why_not(set(Isa::Avx2, Some(TileUnit::Model))).is_none(), attends);
        assert!(all.why_not(set(Isa::Avx512, None)).is_some() && all.why_not(set(Isa::Avx2, amx)).is_some());
        assert_eq!(xeon.why_not(set(Isa::Avx512Bf16, amx)).is_none(), attends);
    }

    #[test]
    fn kernels_of_a_configuration_are_used_or_refused() {
        let device =
            |word| DeviceConfig { kernels: KernelChoice::named(word).unwrap(), ..DeviceConfig::default() };
        let own = set(Isa::Avx512, None);
        let free = Environment { uses: own, has: set(Isa::Avx512Bf16, None), is_chosen: false };
        let chosen = Environment { is_chosen: true, ..free };
        assert_eq!(free.decide(&device("auto")).unwrap(), free);
        assert_eq!(free.decide(&device("avx2")).unwrap().kernels(), set(Isa::Avx2, None));
        assert_eq!(free.decide(&device("avx512bf16")).unwrap().isa(), Isa::Avx512Bf16);
        assert_eq!(chosen.decide(&device("avx512")).unwrap(), chosen);
        assert_eq!(chosen.of_run(&device("avx2")).unwrap().kernels(), set(Isa::Avx2, None));
        let refused = chosen.decide(&device("avx2")).unwrap_err().to_string();
        let words = ["PHALANX_ISA chooses the kernels avx512", "device.kernels = \"avx2\""];
        assert!(words.iter().all(|word| refused.contains(word)), "{refused}");
        let refused = free.decide(&device("avx512+amx")).unwrap_err().to_string();
        assert!(refused.contains("device.kernels = \"avx512+amx\"") && refused.contains("auto"), "{refused}");
    }
}
