//! The arguments of `plan --size`.

use clap::Args;

use crate::arguments::byte_size::parse_bytes;
use crate::arguments::counts::{self, whole};

/// A published model and what it is trained on.
#[derive(Clone, Debug, Args)]
pub struct SizedArgs {
    /// Plan a published size, as llama3-8b, instead of CONFIG: bf16, and a sequence of 2,048 tokens for each rank
    #[arg(id = "model_size", long = "size", value_name = "NAME", conflicts_with_all = ["config", "schedule"])]
    pub size: Option<String>,
    /// With --size: adapters of this rank beside the frozen model (sets lora.rank)
    #[arg(id = "lora_rank", long = "lora", value_name = "RANK", requires = "model_size",
          value_parser = whole::<usize>(1..=counts::RANKS))]
    pub lora: Option<usize>,
    /// With --lora: how frozen linear weights are kept: compute, q8_0 or nf4 (sets lora.base)
    #[arg(long, value_name = "TYPE", requires = "lora_rank")]
    pub base: Option<String>,
    /// With --size: a rank on each of N GPUs with so much memory, as 2x80GiB, or of a machine, as 16xa100-80
    #[arg(long, value_name = "NxSIZE|NxMACHINE", requires = "model_size", conflicts_with_all = ["device_memory", "machine"],
          value_parser = parse_gpus)]
    pub gpus: Option<Gpus>,
}

/// GPUs that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// Number of them.
    pub count: usize,
    /// Each of them.
    pub each: Gpu,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gpu {
    /// With so many bytes of memory.
    Bytes(u64),
    /// That of a machine with a profile.
    Named(String),
}

impl Gpus {
    /// Bytes of each, where they are given.
    pub fn bytes(&self) -> Option<u64> {
        match self.each {
            Gpu::Bytes(bytes) => Some(bytes),
            Gpu::Named(_) => None,
        }
    }

    /// The machine, where one is named.
    pub fn machine(&self) -> Option<&str> {
        match &self.each {
            Gpu::Bytes(_) => None,
            Gpu::Named(name) => Some(name),
        }
    }
}

fn parse_gpus(text: &str) -> Result<Gpus, String> {
    let expected = || {
        "expected a number of GPUs and the memory of each, as 2x80GiB, or their machine, as 16xa100-80"
            .to_string()
    };
    let (count, each) = text.split_once('x').ok_or_else(expected)?;
    let is_possible = |count: &usize| (1..=counts::RANKS).contains(&(*count as u64));
    let count = count.parse().ok().filter(is_possible).ok_or_else(expected)?;
    let is_memory = each.starts_with(|first: char| first.is_ascii_digit());
    let each = if is_memory { Gpu::Bytes(parse_bytes(each)?) } else { Gpu::Named(each.to_string()) };
    if each == Gpu::Named(String::new()) { Err(expected()) } else { Ok(Gpus { count, each }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_a_number_and_a_memory() {
        assert_eq!(parse_gpus("2x80GiB"), Ok(Gpus { count: 2, each: Gpu::Bytes(80 << 30) }));
        assert_eq!(parse_gpus("2xrtx4090"), Ok(Gpus { count: 2, each: Gpu::Named("rtx4090".into()) }));
        for wrong in ["80GiB", "0x80GiB", "2x", "x80GiB", "2x80XB"] {
            assert!(parse_gpus(wrong).unwrap_err().contains("expected"), "{wrong}");
        }
    }
}
