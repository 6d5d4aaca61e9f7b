//! The rates of a machine: what kernels, copies and collectives take.
//!
//! A profile has documented or measured rates. Small transfers are slower than large ones, so a transfer has a latency
//! beside its rate, or a list of measured times by size; and so are small matrix products, so products may have a measured
//! rate by their operations ([`ProductRates`]). What joins devices is in [`crate::links`].

use std::collections::BTreeMap;

use crate::links::{Link, check_levels};
use crate::trace::{CollectiveOp, DType, Memory, Rate};
use crate::transfer::TransferRate;
use serde::{Deserialize, Serialize};

/// The time of a collective of a group of some ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveRate {
    /// The operation.
    pub op: CollectiveOp,
    /// Ranks of the group.
    pub ranks: usize,
    /// Its time by the bytes of the whole buffer.
    pub time: TransferRate,
}

/// Measured rates of matrix products of one element type, by class and size: pairs of 10^9 operations of one product and 10^12
/// operations per second, ascending in the first. Between two sizes the rate is interpolated along the logarithm of the size; beyond the
/// largest it stays; below the smallest the time stays.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductRates {
    /// Products with weights.
    pub linear: Vec<(f64, f64)>,
    /// Attention; as `linear` when left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attention: Vec<(f64, f64)>,
}

impl ProductRates {
    /// Seconds of a product of the kernel `name`.
    fn seconds(&self, name: &str, flops: u64) -> f64 {
        let is_attention = name.starts_with("attention") && !self.attention.is_empty();
        let rates = if is_attention { &self.attention } else { &self.linear };
        let giga = flops as f64 / 1e9;
        let above = rates.partition_point(|(known, _)| *known < giga);
        match (above.checked_sub(1).map(|below| rates[below]), rates.get(above)) {
            (Some((low, low_rate)), Some((high, high_rate))) => {
                let share = (giga / low).ln() / (high / low).ln();
                giga / (low_rate + (high_rate - low_rate) * share) * 1e-3
            }
            (Some((_, rate)), None) => giga / rate * 1e-3,
            (None, Some((smallest, rate))) => smallest / rate * 1e-3,
            (None, None) => 0.0,
        }
    }

    fn is_valid(&self) -> bool {
        let valid = |rates: &[(f64, f64)]| {
            rates.windows(2).all(|pair| pair[0].0 < pair[1].0)
                && rates.iter().all(|(size, rate)| is_positive(*size) && is_positive(*rate))
        };
        !self.linear.is_empty() && valid(&self.linear) && valid(&self.attention)
    }
}

fn is_positive(value: f64) -> bool {
    value > 0.0 && value.is_finite()
}

/// The rates of one rank's device, of its share of the host, and of what connects it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Name for people.
    pub name: String,
    /// Sources of the figures.
    #[serde(default)]
    pub sources: Vec<String>,
    /// Why Phalanx does not run on such devices, where it does not: its profile serves to plan and to compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned_only: Option<String>,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Bytes of host memory that a rank may use.
    pub host_bytes: u64,
    /// Cores of the host for each device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_cores: Option<f64>,
    /// True if the device is the host's processor. Then a call computes when it is made, so that a transfer begins after the
    /// kernels before it; and copies and collectives take cores from kernels. Only the disk works beside them.
    #[serde(default)]
    pub computes_on_host: bool,
    /// 10^12 operations per second of matrix products at most, by element type.
    pub tflops: BTreeMap<DType, f64>,
    /// Measured rates of matrix products by their size, by element type; without them products run at `tflops`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub products: BTreeMap<DType, ProductRates>,
    /// Microseconds from the end of a kernel to the beginning of the next.
    #[serde(default)]
    pub launch_us: f64,
    /// 10^9 bytes per second that kernels read and write in device memory.
    pub memory_gb_per_s: f64,
    /// 10^9 bytes per second that the host's processor reads and writes in host memory for a rank.
    pub host_gb_per_s: f64,
    /// Copies between the memories of host and device, in each direction.
    pub copy: TransferRate,
    /// Reads of the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_read: Option<TransferRate>,
    /// Writes to the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_write: Option<TransferRate>,
    /// Devices of a host. Ranks beyond them are on further hosts; left out, all ranks are on one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices_per_host: Option<usize>,
    /// What joins devices, from the nearest to the farthest.
    #[serde(default)]
    pub links: Vec<Link>,
    /// Collectives whose time is known as a whole; others follow from `links`.
    #[serde(default)]
    pub collectives: Vec<CollectiveRate>,
    /// Watts of a device and its share of the host under load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// Price of an hour of a device and its share of the host, in USD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usd_per_hour: Option<f64>,
}

impl Machine {
    /// Checks the rates of a profile that someone has written.
    ///
    /// # Errors
    /// The key of a rate that is not positive, or of sizes that do not ascend, with what is expected.
    pub fn check(&self) -> Result<(), WrongRate> {
        let wrong = |key: &str, expected: String| Err(WrongRate { key: key.to_string(), expected });
        let rates = [
            ("copy", Some(&self.copy)),
            ("disk_read", self.disk_read.as_ref()),
            ("disk_write", self.disk_write.as_ref()),
        ];
        let collectives = self.collectives.iter().map(|collective| ("collectives", Some(&collective.time)));
        let expected = "latency_us (0 or more) with gb_per_s (more than 0), or bytes_us with ascending sizes";
        for (key, rate) in rates.into_iter().chain(collectives) {
            if rate.is_some_and(|rate| !rate.is_valid()) {
                return wrong(key, expected.to_string());
            }
        }
        if let Some(link) = self.links.iter().find(|link| !link.time.is_valid()) {
            return wrong("links", format!("as time of {:?} {expected}", link.name));
        }
        if let Some((dtype, tflops)) = self.tflops.iter().find(|(_, tflops)| !is_positive(**tflops)) {
            return wrong(&format!("tflops.{}", dtype.name()), format!("more than 0, and not {tflops}"));
        }
        if let Some((dtype, _)) = self.products.iter().find(|(_, rates)| !rates.is_valid()) {
            let expected = "pairs of 10^9 operations and 10^12 per second, above 0, ascending in the first";
            return wrong(&format!("products.{}", dtype.name()), expected.to_string());
        }
        let some = |value: Option<f64>| value.unwrap_or(1.0);
        for (key, rate) in [
            ("memory_gb_per_s", self.memory_gb_per_s),
            ("host_gb_per_s", self.host_gb_per_s),
            ("host_cores", some(self.host_cores)),
            ("power_w", some(self.power_w)),
            ("usd_per_hour", some(self.usd_per_hour)),
            // 0 is a rate, too: nothing is launched.
            ("launch_us", if self.launch_us == 0.0 { 1.0 } else { self.launch_us }),
        ] {
            if !is_positive(rate) {
                return wrong(key, format!("more than 0, and not {rate}"));
            }
        }
        for (key, count) in [
            ("memory_bytes", self.memory_bytes),
            ("host_bytes", self.host_bytes),
            ("devices_per_host", self.devices_per_host.unwrap_or(1) as u64),
        ] {
            if count == 0 {
                return wrong(key, "at least 1".to_string());
            }
        }
        check_levels(&self.links).or_else(|expected| wrong("links", expected))
    }

    /// Operations per second of products of `dtype`; where the profile has none, those of the next wider type.
    pub fn flops_per_s(&self, dtype: DType) -> Option<f64> {
        let wider = [DType::F32, DType::F64].into_iter().filter(|wider| wider.bytes() > dtype.bytes());
        let known = std::iter::once(dtype).chain(wider).find_map(|dtype| self.tflops.get(&dtype));
        known.map(|tflops| tflops * 1e12)
    }

    /// Seconds of the kernel `name`. Operations of an unknown rate take no time.
    pub fn kernel_s(&self, name: &str, flops: u64, bytes: u64, rate: Rate) -> f64 {
        if rate == Rate::Host {
            return bytes as f64 / (self.host_gb_per_s * 1e9);
        }
        let moved = bytes as f64 / (self.memory_gb_per_s * 1e9);
        let computed = match rate {
            Rate::MatrixProduct(dtype) => self.product_s(name, dtype, flops),
            _ => 0.0,
        };
        moved.max(computed) + self.launch_us * 1e-6
    }

    fn product_s(&self, name: &str, dtype: DType, flops: u64) -> f64 {
        match self.products.get(&dtype) {
            Some(rates) => rates.seconds(name, flops),
            None => self.flops_per_s(dtype).map_or(0.0, |flops_per_s| flops as f64 / flops_per_s),
        }
    }

    /// Seconds of a copy between memories; `None` where the profile does not know the disk.
    pub fn copy_s(&self, [from, to]: [Memory; 2], bytes: u64) -> Option<f64> {
        let rate = match [from, to] {
            [Memory::Disk, _] => self.disk_read.as_ref()?,
            [_, Memory::Disk] => self.disk_write.as_ref()?,
            _ => &self.copy,
        };
        Some(rate.seconds(bytes))
    }

    /// Hosts over which so many ranks lie.
    pub fn hosts_of(&self, ranks: usize) -> usize {
        self.devices_per_host.map_or(1, |devices| ranks.div_ceil(devices))
    }
}

/// A key of a profile with a value that no machine has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: expected {expected}")]
pub struct WrongRate {
    /// The key; of a table in it `table.key`.
    pub key: String,
    /// What is expected of its value.
    pub expected: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates in the middle of two sizes, beyond the largest, and the time of the smallest; attention has its own.
    #[test]
    fn products_have_the_rate_of_their_size_and_class() {
        let rates = ProductRates { linear: vec![(1.0, 100.0), (100.0, 300.0)], attention: vec![(1.0, 50.0)] };
        assert!(rates.is_valid());
        for (name, giga, us) in [
            ("linear", 0.1, 10.0),
            ("linear", 1.0, 10.0),
            ("linear", 10.0, 50.0),
            ("linear", 100.0, 1000.0 / 3.0),
            ("linear", 600.0, 2000.0),
            ("attention_backward", 10.0, 200.0),
        ] {
            let seconds = rates.seconds(name, (giga * 1e9) as u64);
            assert!((seconds - us * 1e-6).abs() < 1e-12, "{name} {giga}: {seconds}");
        }
        for wrong in [vec![], vec![(1.0, 0.0)], vec![(2.0, 1.0), (1.0, 1.0)], vec![(f64::NAN, 1.0)]] {
            assert!(!ProductRates { linear: wrong, attention: Vec::new() }.is_valid());
        }
    }
}
