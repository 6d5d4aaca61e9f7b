//! The rate of each family of kernels with the kernels in use, and with the best of the others that the processor has.
//!
//! One call of each family at a shape of a small step, so that all of them take less than a second.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use phalanx_cpu::{Cpu, Options, ProductMethod, peak};
use phalanx_plan::trace::PhaseName;
use phalanx_simd::Isa;
use phalanx_simd::tiles::TileUnit;
use phalanx_tensor::profile::Profile;
use phalanx_tensor::{Arena, DType, Device, Region};

use super::calls::Calls;
use super::{KernelBench, Measured, Setting};
use crate::kernel_table::Achieved;

/// Kernels that choose their instructions together, as one of them shows.
struct Family {
    name: &'static str,
    dtype: DType,
    /// The kernel, and a part of its size.
    kernel: (&'static str, &'static str),
    /// True for matrix products.
    is_product: bool,
}

const FAMILIES: [Family; 8] = {
    const fn family(name: &'static str, dtype: DType, kernel: (&'static str, &'static str)) -> Family {
        Family { name, dtype, kernel, is_product: false }
    }
    const fn product(name: &'static str, dtype: DType, kernel: (&'static str, &'static str)) -> Family {
        Family { name, dtype, kernel, is_product: true }
    }
    const LINEAR: (&str, &str) = ("linear", "x512 -> 1536");
    [
        product("products, f32", DType::F32, LINEAR),
        product("products, bf16", DType::BF16, LINEAR),
        product("products, f16", DType::F16, LINEAR),
        product("attention, f32", DType::F32, ("attention_backward", "")),
        product("attention, bf16", DType::BF16, ("attention_backward", "")),
        family("GELU", DType::F32, ("gelu", "x2048")),
        family("layer norm", DType::F32, ("layer_norm", "")),
        family("AdamW", DType::F32, ("adamw", "")),
    ]
};

/// Rates of one family.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilyRate {
    /// Its name, for people.
    pub name: &'static str,
    /// The kernels in use, as users name them.
    pub kernels: String,
    /// By one thread and by all.
    pub rates: [Achieved; 2],
    /// The fastest other kernels that the processor has, and their rate by one thread.
    pub other: Option<(String, Achieved)>,
}

impl FamilyRate {
    /// Speed of the kernels in use, by one thread, as a multiple of the others' speed.
    pub fn times_other(&self) -> Option<f64> {
        let (_, other) = self.other.as_ref()?;
        Some(self.rates[0].per_s() / other.per_s())
    }
}

/// The kernels of `options` that a family uses: families without pairs of bf16 have one kernel for all of AVX-512.
fn kernels_of(family: &Family, options: &Options) -> String {
    let Options { isa, tiles, products, .. } = options;
    let is_bf16 = family.dtype == DType::BF16;
    let is_linear = family.kernel.0 == "linear";
    match tiles.filter(|unit| family.is_product && unit.is_available()) {
        Some(unit) if is_bf16 => return unit.name().to_string(),
        Some(unit) if is_linear && *products != ProductMethod::Fma => {
            return format!("{}, in parts", unit.name());
        }
        _ => {}
    }
    let pairs = family.is_product && is_bf16;
    let isa = if pairs { *isa } else { isa.limit(Isa::Avx512) };
    isa.name().to_string()
}

/// The other kernels that this processor has. The portable ones are many times slower than any others, and so is the model of tile
/// registers.
fn others(chosen: &Options) -> Vec<Options> {
    let sets = Isa::ALL.into_iter().filter(|isa| (Isa::Avx2..=Isa::detect()).contains(isa));
    let mut others: Vec<Options> = sets.map(|isa| Options { isa, tiles: None, ..*chosen }).collect();
    if TileUnit::Amx.is_available() {
        let tiles = Some(TileUnit::Amx);
        let methods = [ProductMethod::Fma, ProductMethod::Split];
        others.extend(methods.map(|products| Options { isa: Isa::fastest(), tiles, products, ..*chosen }));
    }
    others
}

/// Measures every family with the kernels of `options` by one thread and by `threads`, and with the others by one.
///
/// # Errors
/// Memory or threads that the system does not give.
pub fn family_rates(options: Options, threads: usize) -> Result<Vec<FamilyRate>> {
    let one = Options { threads: 1, ..options };
    let mut rates: Vec<FamilyRate> = Vec::new();
    let [single, all] = [one, Options { threads, ..options }].map(|options| measure_all(&options, |_| true));
    for (family, rates_of) in FAMILIES.iter().zip(single?.into_iter().zip(all?)) {
        let (Some(single), Some(all)) = rates_of else {
            bail!("no kernel shows the rate of {}", family.name)
        };
        let kernels = kernels_of(family, &one);
        rates.push(FamilyRate { name: family.name, kernels, rates: [single, all], other: None });
    }
    let mut done: Vec<(usize, String)> = Vec::new();
    for other in others(&one) {
        let is_new = |family: &Family| {
            let index = FAMILIES.iter().position(|known| known.name == family.name).unwrap_or(0);
            let kernels = kernels_of(family, &other);
            kernels != kernels_of(family, &one) && !done.contains(&(index, kernels))
        };
        let measured = measure_all(&other, is_new)?;
        for (index, rate) in measured.into_iter().enumerate() {
            let Some(rate) = rate else { continue };
            let kernels = kernels_of(&FAMILIES[index], &other);
            done.push((index, kernels.clone()));
            let best = &mut rates[index].other;
            if best.as_ref().is_none_or(|(_, known)| known.per_s() < rate.per_s()) {
                *best = Some((kernels, rate));
            }
        }
    }
    Ok(rates)
}

/// The rates of the families that are `wanted`.
fn measure_all(options: &Options, wanted: impl Fn(&Family) -> bool) -> Result<Vec<Option<Achieved>>> {
    let mut rates: Vec<Option<Achieved>> = vec![None; FAMILIES.len()];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let families = || FAMILIES.iter().enumerate().filter(|(_, family)| family.dtype == dtype);
        let indices: Vec<usize> =
            families().filter(|(_, family)| wanted(family)).map(|(index, _)| index).collect();
        if !indices.is_empty() {
            measure_type(options, dtype, &indices, &mut rates)?;
        }
    }
    Ok(rates)
}

/// Measures the families of one element type.
fn measure_type(
    options: &Options,
    dtype: DType,
    indices: &[usize],
    rates: &mut [Option<Achieved>],
) -> Result<()> {
    // AdamW reads and writes more than caches hold.
    let vocab = if dtype == DType::F32 { 8192 } else { 256 };
    let setting = Setting { batch: 1, seq: 256, hidden: 512, heads: 8, vocab };
    const SLICE: usize = 16;
    let bench = KernelBench {
        setting,
        dtype,
        threads: vec![options.threads],
        only: &[],
        time: Duration::from_millis(8),
        options: &|_| *options,
        check_memory: &|_| Ok(()),
    };
    let cpu = Cpu::with_options(*options)?;
    if options.threads > 1 {
        // The system spreads the threads over the cores meanwhile.
        peak::flops_per_s(&cpu, dtype);
    }
    let plan = bench.memory(options.threads, SLICE)?;
    let region = Region::anonymous(plan.arena_bytes as usize).context("memory to measure kernels with")?;
    cpu.populate(&region)?;
    let profile = Arc::new(Profile::default());
    let device = Device::new(cpu, Arena::replaying(plan, region)).profiled(Arc::clone(&profile));
    device.phase(PhaseName::Init, || {
        Calls::new(&device, setting, dtype, SLICE).each(&mut |name, size, call| {
            let is_asked = |index: &&usize| {
                let family = &FAMILIES[**index];
                family.kernel.0 == name && size.contains(family.kernel.1) && rates[**index].is_none()
            };
            if let Some(index) = indices.iter().find(is_asked) {
                let Measured { price, min_s, .. } = bench.measure(&profile, name, size, call);
                rates[*index] = Some(Achieved::of(price, min_s));
            }
        });
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_kernels_by_type_and_a_rate_each() {
        let options = Options { isa: Isa::detect(), tiles: None, ..Options::new(1) };
        let rates = family_rates(options, 2).unwrap();
        assert_eq!(
            rates.iter().map(|rate| rate.name).collect::<Vec<_>>(),
            FAMILIES.map(|family| family.name)
        );
        for rate in &rates {
            assert!(rate.rates.iter().all(|rate| rate.per_s() > 1e6), "{rate:?}");
            let other = rate.other.as_ref().map(|(kernels, _)| kernels.as_str());
            assert_ne!(other, Some(rate.kernels.as_str()));
            assert_eq!(rate.times_other().is_some(), Isa::detect() > Isa::Avx2, "{rate:?}");
        }
    }

    #[test]
    fn kernels_of_a_family_have_the_name_of_what_it_uses() {
        let options = |isa, tiles, products| Options { isa, tiles, products, ..Options::new(1) };
        let pairs = options(Isa::Avx512Bf16, None, ProductMethod::Fma);
        let model = options(Isa::Avx512, Some(TileUnit::Model), ProductMethod::Split);
        for (index, (of_pairs, of_model)) in [
            ("avx512", "amx-model, in parts"),
            ("avx512bf16", "amx-model"),
            ("avx512", "amx-model, in parts"),
            ("avx512", "avx512"),
            ("avx512bf16", "amx-model"),
            ("avx512", "avx512"),
            ("avx512", "avx512"),
            ("avx512", "avx512"),
        ]
        .into_iter()
        .enumerate()
        {
            let family = &FAMILIES[index];
            assert_eq!(kernels_of(family, &pairs), of_pairs, "{}", family.name);
            assert_eq!(kernels_of(family, &model), of_model, "{}", family.name);
        }
    }
}
