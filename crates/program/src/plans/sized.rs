//! `phalanx plan --size NAME`: a published model in place of a configuration, so that whether it fits takes one line.
//!
//! The request becomes a configuration, which is printed, and which --set changes as any other.

use anyhow::{Context, Result};
use phalanx_models::{Arch, Keys};

use crate::arguments::byte_size::exact;
use crate::arguments::sized_args::{Gpu, Gpus, SizedArgs};
use crate::configuration::user_config::UserConfig;

/// Tokens of a sequence, if the model has as many positions.
const SEQ: usize = 2048;

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
        let (seq, ranks) = (
            longest.map_or(SEQ, |longest| longest.min(SEQ)),
            self.gpus.as_ref().map_or(1, |gpus| gpus.count),
        );
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
        let gpus = gpus.as_ref().map(|Gpus { count, each }| match each {
            Gpu::Bytes(bytes) => format!("{count}x{}", exact(*bytes)),
            Gpu::Named(name) => format!("{count}x{name}"),
        });
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
