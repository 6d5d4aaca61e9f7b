//! The rates of a machine: what kernels, copies and collectives take at least.
//!
//! A profile has documented or measured rates. Small transfers are slower than large ones, so a transfer has a latency
//! beside its rate, or a list of measured times by size.

use std::collections::BTreeMap;

use crate::trace::{Collective, CollectiveOp, DType, Memory, Rate};
use serde::{Deserialize, Serialize};

/// The time of a transfer by its size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TransferRate {
    /// A latency, and bytes per second beyond it.
    Line {
        /// Microseconds of the smallest transfer.
        latency_us: f64,
        /// 10^9 bytes per second.
        gb_per_s: f64,
    },
    /// Measured: bytes of a transfer and its microseconds, ascending. Between two sizes the time is interpolated; beyond the
    /// largest, and below the smallest, the rate stays.
    Measured {
        /// Pairs of bytes and microseconds.
        bytes_us: Vec<(u64, f64)>,
    },
}

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

/// The rates of one rank's device and of what connects it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Name for people.
    pub name: String,
    /// Sources of the figures.
    #[serde(default)]
    pub sources: Vec<String>,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Bytes of host memory that a rank may use.
    pub host_bytes: u64,
    /// True if the device is the host's processor. Then a call computes when it is made, so that a transfer begins after the
    /// kernels before it; and copies and collectives take cores from kernels. Only the disk works beside them.
    #[serde(default)]
    pub computes_on_host: bool,
    /// 10^12 operations per second of matrix products, by element type.
    pub tflops: BTreeMap<DType, f64>,
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
    /// Rate at which the transport of collectives sends from one rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<TransferRate>,
    /// Devices of a host. Ranks beyond them are on further hosts; left out, all ranks are on one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices_per_host: Option<usize>,
    /// Rate at which the network sends from one device to other hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<TransferRate>,
    /// Collectives whose time is known as a whole; others follow from `transport` and `network`.
    #[serde(default)]
    pub collectives: Vec<CollectiveRate>,
}

impl TransferRate {
    /// Seconds of one transfer.
    pub fn seconds(&self, bytes: u64) -> f64 {
        let size = bytes as f64;
        match self {
            TransferRate::Line { latency_us, gb_per_s } => latency_us * 1e-6 + size / (gb_per_s * 1e9),
            TransferRate::Measured { bytes_us } => {
                let above = bytes_us.partition_point(|(known, _)| *known < bytes);
                let us = match (above.checked_sub(1).map(|below| bytes_us[below]), bytes_us.get(above)) {
                    (Some((low, low_us)), Some((high, high_us))) => {
                        low_us + (high_us - low_us) * (size - low as f64) / (high - low) as f64
                    }
                    (Some((known, us)), None) | (None, Some(&(known, us))) => us * size / known.max(1) as f64,
                    (None, None) => 0.0,
                };
                us * 1e-6
            }
        }
    }

    /// Bytes per second at one size.
    pub fn bytes_per_s(&self, bytes: u64) -> f64 {
        bytes as f64 / self.seconds(bytes)
    }

    fn is_valid(&self) -> bool {
        match self {
            TransferRate::Line { latency_us, gb_per_s } => {
                *latency_us >= 0.0 && latency_us.is_finite() && *gb_per_s > 0.0 && gb_per_s.is_finite()
            }
            TransferRate::Measured { bytes_us } => {
                let ascend = bytes_us.windows(2).all(|pair| pair[0].0 < pair[1].0);
                let positive = bytes_us.iter().all(|(bytes, us)| *bytes > 0 && us.is_finite() && *us > 0.0);
                !bytes_us.is_empty() && ascend && positive
            }
        }
    }
}

impl Machine {
    /// Checks the rates of a profile that someone has written. The error names the key and what is expected.
    ///
    /// # Errors
    /// A rate that is not positive, sizes that do not ascend.
    pub fn check(&self) -> Result<(), String> {
        let rates = [
            ("copy", Some(&self.copy)),
            ("disk_read", self.disk_read.as_ref()),
            ("disk_write", self.disk_write.as_ref()),
            ("transport", self.transport.as_ref()),
            ("network", self.network.as_ref()),
        ];
        let collectives = self.collectives.iter().map(|collective| ("collectives", Some(&collective.time)));
        for (key, rate) in rates.into_iter().chain(collectives) {
            if rate.is_some_and(|rate| !rate.is_valid()) {
                return Err(format!(
                    "{key}: expected latency_us (0 or more) with gb_per_s (more than 0), or bytes_us with ascending sizes"
                ));
            }
        }
        let positive = |value: f64| value > 0.0 && value.is_finite();
        if let Some((dtype, tflops)) = self.tflops.iter().find(|(_, tflops)| !positive(**tflops)) {
            return Err(format!("tflops.{} = {tflops}: expected more than 0", dtype.name()));
        }
        for (key, rate) in [("memory_gb_per_s", self.memory_gb_per_s), ("host_gb_per_s", self.host_gb_per_s)]
        {
            if !positive(rate) {
                return Err(format!("{key} = {rate}: expected more than 0"));
            }
        }
        if self.memory_bytes == 0 || self.host_bytes == 0 {
            return Err("memory_bytes and host_bytes: expected at least 1".to_string());
        }
        if self.devices_per_host == Some(0) {
            return Err("devices_per_host = 0: expected at least 1".to_string());
        }
        Ok(())
    }

    /// Operations per second of products of `dtype`; where the profile has none, those of the next wider type.
    pub fn flops_per_s(&self, dtype: DType) -> Option<f64> {
        let wider = [DType::F32, DType::F64].into_iter().filter(|wider| wider.bytes() > dtype.bytes());
        let known = std::iter::once(dtype).chain(wider).find_map(|dtype| self.tflops.get(&dtype));
        known.map(|tflops| tflops * 1e12)
    }

    /// Seconds of a kernel at least. Operations of an unknown rate take no time.
    pub fn kernel_s(&self, flops: u64, bytes: u64, rate: Rate) -> f64 {
        let gb_per_s = if rate == Rate::Host { self.host_gb_per_s } else { self.memory_gb_per_s };
        let moved = bytes as f64 / (gb_per_s * 1e9);
        let computed = match rate {
            Rate::MatrixProduct(dtype) => {
                self.flops_per_s(dtype).map_or(0.0, |flops_per_s| flops as f64 / flops_per_s)
            }
            _ => 0.0,
        };
        moved.max(computed)
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

    /// Seconds of a collective; `None` where the profile does not know the transport. Among one rank nothing is sent.
    pub fn collective_s(&self, collective: &Collective) -> Option<f64> {
        let Collective { op, members, world_size, count, dtype, sent_bytes, .. } = collective;
        let all: Vec<usize> = (0..*world_size).collect();
        // The group of all ranks does not list them.
        let members = if members.is_empty() { &all[..] } else { members };
        self.collective_of_bytes_s(*op, members, count * dtype.bytes() as u64, *sent_bytes)
    }

    /// The same for an operation among the world ranks `members`, by the bytes of the whole buffer and those that a rank sends.
    pub fn collective_of_bytes_s(
        &self,
        op: CollectiveOp,
        members: &[usize],
        message_bytes: u64,
        sent_bytes: u64,
    ) -> Option<f64> {
        let ranks = members.len();
        if ranks == 1 {
            return Some(0.0);
        }
        let known = self.collectives.iter().find(|known| known.op == op && known.ranks == ranks);
        match known {
            Some(known) => Some(known.time.seconds(message_bytes)),
            None => self.links_s(op, members, sent_bytes),
        }
    }

    /// Seconds in which a rank of a group sends so many bytes. What crosses hosts goes through the network of all members of a host
    /// together, as in NCCL's rings; a message, through that of its sender.
    fn links_s(&self, op: CollectiveOp, members: &[usize], sent_bytes: u64) -> Option<f64> {
        let inside = self.transport.as_ref()?.seconds(sent_bytes);
        let Some(devices) = self.devices_per_host else { return Some(inside) };
        let host_of = |rank: &usize| rank / devices;
        let of_host = |host| members.iter().filter(|rank| host_of(rank) == host).count();
        let together = members.iter().map(|rank| of_host(host_of(rank))).min().unwrap_or(1);
        let senders = match op {
            _ if together == members.len() => return Some(inside),
            CollectiveOp::Send | CollectiveOp::Recv => 1,
            _ => together as u64,
        };
        Some(inside.max(self.network.as_ref()?.seconds(sent_bytes.div_ceil(senders))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_line_or_between_the_measured_ones() {
        let line = TransferRate::Line { latency_us: 10.0, gb_per_s: 1.0 };
        assert!((line.seconds(1_000_000) - 1.01e-3).abs() < 1e-12);
        let measured = TransferRate::Measured { bytes_us: vec![(1000, 10.0), (3000, 20.0)] };
        for (bytes, us) in [(500, 5.0), (1000, 10.0), (2000, 15.0), (3000, 20.0), (6000, 40.0)] {
            assert!((measured.seconds(bytes) - us * 1e-6).abs() < 1e-15, "{bytes}");
        }
        assert!((measured.bytes_per_s(3000) - 1.5e8).abs() < 1.0);
    }

    #[test]
    fn groups_of_several_hosts_use_the_network_of_their_devices() {
        let rate = |gb_per_s| TransferRate::Line { latency_us: 0.0, gb_per_s };
        let machine = Machine {
            name: "hosts of four".into(),
            sources: Vec::new(),
            memory_bytes: 1,
            host_bytes: 1,
            computes_on_host: false,
            tflops: BTreeMap::new(),
            memory_gb_per_s: 1.0,
            host_gb_per_s: 1.0,
            copy: rate(1.0),
            disk_read: None,
            disk_write: None,
            transport: Some(rate(8.0)),
            devices_per_host: Some(4),
            network: Some(rate(1.0)),
            collectives: Vec::new(),
        };
        machine.check().unwrap();
        let seconds = |members: &[usize]| {
            machine.collective_of_bytes_s(CollectiveOp::AllGather, members, 9, 8_000_000_000)
        };
        for (members, expected) in [
            (&[0][..], 0.0),
            (&[0, 1, 2, 3], 1.0),
            (&[4, 7], 1.0),
            // One, two and four devices of each host send to the other.
            (&[0, 4], 8.0),
            (&[0, 1, 4, 5], 4.0),
            (&[0, 1, 2, 3, 4, 5, 6, 7], 2.0),
            // A host with one of them is the slowest.
            (&[0, 1, 2, 3, 4], 8.0),
        ] {
            assert_eq!(seconds(members), Some(expected), "{members:?}");
        }
        let message = machine.collective_of_bytes_s(CollectiveOp::Send, &[0, 1, 4, 5], 9, 1_000_000_000);
        assert_eq!(message, Some(1.0), "a message has one sender");
        assert_eq!([1, 4, 5, 9].map(|ranks| machine.hosts_of(ranks)), [1, 1, 2, 3]);
        let alone = Machine { network: None, ..machine.clone() };
        let among = |members| alone.collective_of_bytes_s(CollectiveOp::AllGather, members, 9, 9);
        assert_eq!((among(&[3, 4]), among(&[2, 3]).is_some()), (None, true));
    }
}
