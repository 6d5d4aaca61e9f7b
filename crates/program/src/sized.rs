//! `phalanx plan --size NAME`: a published model in place of a configuration, so that whether it fits takes one line.
//!
//! What is asked becomes a configuration, which is printed, and which --set changes as any other.

use anyhow::{Context, Result};
use clap::Args;
use phalanx_models::{Arch, Keys};

use crate::byte_size::{exact, parse_bytes};
use crate::counts::{self, whole};
use crate::user_config::UserConfig;

/// Tokens of a sequence, if the model has as many positions.
const SEQ: usize = 2048;

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
    /// With --size: a rank on each of N GPUs with so much memory, as 2x80GiB
    #[arg(long, value_name = "NxSIZE", requires = "model_size", conflicts_with_all = ["device_memory", "machine"],
          value_parser = parse_gpus)]
    pub gpus: Option<Gpus>,
}

/// GPUs that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// Number of them.
    pub count: usize,
    /// Bytes of each.
    pub bytes: u64,
}

fn parse_gpus(text: &str) -> Result<Gpus, String> {
    let expected = || "expected a number of GPUs and the memory of each, as 2x80GiB".to_string();
    let (count, bytes) = text.split_once('x').ok_or_else(expected)?;
    let is_possible = |count: &usize| (1..=counts::RANKS).contains(&(*count as u64));
    let count = count.parse().ok().filter(is_possible).ok_or_else(expected)?;
    Ok(Gpus { count, bytes: parse_bytes(bytes)? })
}

impl SizedArgs {
    /// The configuration, if a size is asked for.
    ///
    /// # Errors
    /// A name that no published size has, a base that there is not.
    pub fn config(&self) -> Result<Option<UserConfig>> {
        let Some(size) = &self.size else { return Ok(None) };
        let keys = Keys::from([("size", size.as_str().into())]);
        let arch = Arch::all().find(|arch| (arch.vocab)(*arch, &keys).is_some()).with_context(|| {
            let names: Vec<&str> = Arch::all().map(|arch| arch.name).collect();
            format!(
                "--size {size}: no published size of {} has this name; a wrong model.size in a configuration lists those of its \
                 model.arch",
                names.join(", ")
            )
        })?;
        let longest = arch.model(&keys, 1, 1).ok().and_then(|model| model.longest());
        let (seq, ranks) =
            (longest.map_or(SEQ, |longest| longest.min(SEQ)), self.gpus.map_or(1, |gpus| gpus.count));
        let mut text = format!(
            "[model]\narch = \"{}\"\nsize = \"{size}\"\nseq = {seq}\n[precision]\ncompute = \"bf16\"\n[batch]\nglobal = {ranks}\n\
             [parallel]\nranks = {ranks}\n",
            arch.name
        );
        if let Some(rank) = self.lora {
            text += &format!("[lora]\nrank = {rank}\n");
            text += &self.base.as_ref().map_or(String::new(), |base| format!("base = \"{base}\"\n"));
        }
        if self.gpus.is_some() {
            text += "[device]\nkind = \"cuda\"\n";
        }
        UserConfig::parse(text, "--size").map(Some)
    }

    /// The words of the command.
    pub fn words(&self) -> Vec<String> {
        let SizedArgs { size, lora, base, gpus } = self;
        let gpus = gpus.map(|Gpus { count, bytes }| format!("{count}x{}", exact(bytes)));
        [
            ("--size", size.clone()),
            ("--lora", lora.map(|rank| rank.to_string())),
            ("--base", base.clone()),
            ("--gpus", gpus),
        ]
        .into_iter()
        .flat_map(|(option, value)| value.map(|value| [option.to_string(), value]))
        .flatten()
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_a_number_and_a_memory() {
        assert_eq!(parse_gpus("2x80GiB"), Ok(Gpus { count: 2, bytes: 80 << 30 }));
        for wrong in ["80GiB", "0x80GiB", "2x", "x80GiB", "2x80XB"] {
            assert!(parse_gpus(wrong).unwrap_err().contains("expected"), "{wrong}");
        }
    }
}
