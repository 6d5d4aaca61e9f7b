//! `[memory]`: chunks, activation checkpointing, limits, and what lies outside of device memory.

use phalanx_models::limits::MAX_LAYERS;
use phalanx_parallel::zero::ChunkResidence;
use phalanx_tensor::disk::DiskOptions;
use phalanx_tensor::{Memory, NORM_BLOCK};
use serde::{Deserialize, Serialize};

use super::bounds::{MAX_CHUNK_MIB, MAX_MIB};
use super::check::refuse;
use super::declare::Conversion::{Rule, Words};
use super::declare::{DEEPSPEED, FREE, GEMINI, HUGGING_FACE, Kind, MEGATRON, TORCHTITAN};
use super::key_types::KeyType;
use super::needs::{Need, SET, SYNCHRONOUS};
use super::{ConfigError, Paths, PlacementPolicy, PlacementRule, RunConfig};

const FOLDER: Need = Need::of(&["nvme"], &[("memory.nvme_path", SET)], "a folder on a local disk");
const STAGE_3: Need = Need::any(&[("parallel.zero", &["3"])], "also on one rank");
const OF_AUTO: Need = Need::is_for(&[("memory.placement", &["auto"])], "");
const OF_DISK: Need = Need::is_for(
    &[
        ("memory.placement", &["nvme", "auto"]),
        ("memory.optimizer", &["nvme"]),
        ("memory.gradients", &["nvme"]),
        ("memory.parameters", &["nvme"]),
        ("memory.activations", &["nvme"]),
    ],
    "nothing else lies on disk",
);

/// Parts of chunks that lie in device memory, or where one policy says.
const PARAMETERS_HERE: Need =
    Need::any(&[("memory.parameters", &["device"])], "this decides where all parts lie");
const GRADIENTS_HERE: Need =
    Need::any(&[("memory.gradients", &["device"])], "this decides where all parts lie");
const OPTIMIZER_HERE: Need =
    Need::any(&[("memory.optimizer", &["device"])], "this decides where all parts lie");
const NO_POLICY: Need = Need::any(
    &[("memory.placement", &["left out", "host", "nvme"])],
    "it is a fraction of what lies elsewhere",
);

table! {
    /// `[memory]`
    "memory" MemoryConfig {
        /// Chunk size: `auto` (searched), `none` (one tensor per chunk), or MiB.
        chunk: Chunk = Chunk::Word(ChunkWord::Auto), FREE.above(0.0, MAX_CHUNK_MIB)
            .foreign(&[
                (DEEPSPEED, "zero_optimization.reduce_bucket_size", Rule, "in MiB"),
                (DEEPSPEED, "zero_optimization.allgather_bucket_size", Rule, "in MiB"),
            ]);
        /// Width of the search above the minimum, in units of 2^20 elements (Gemini's `search_range_mb`).
        search_range_mb: f64 = 32.0, FREE.from(0.0, MAX_MIB).foreign(&[(GEMINI, "search_range_m", Rule, "")]);
        /// Smallest chunk that the search tries, in units of 2^20 elements (Gemini's `min_chunk_size_mb`);
        /// smaller models shrink it.
        min_chunk_size_mb: f64 = 32.0, FREE.from(0.0, MAX_MIB).foreign(&[(GEMINI, "min_chunk_size_m", Rule, "")]);
        /// Step of the search, in elements; the model's width when left out (Gemini's `hidden_dim`).
        hidden_dim: Option<u64> = None, FREE.from(1.0, (1u64 << 40) as f64);
        /// Chunks gathered ahead of their use under stage 3; 0 gathers at the use.
        prefetch: usize = 1, FREE.from(0.0, (1 << 20) as f64)
            .foreign(&[(DEEPSPEED, "zero_optimization.stage3_prefetch_bucket_size", Rule, "counted in chunks")]);
        /// Activations that backward recomputes instead of keeping them: `none`, `selective` (norms, attention, GELU), `block`
        /// (every Transformer block), or k (blocks 0, k, 2k, ...).
        checkpointing: Checkpointing = Checkpointing::Word(CheckpointingWord::None), FREE.from(1.0, MAX_LAYERS as f64)
            .foreign(&[
                (HUGGING_FACE, "gradient_checkpointing", Words(&[("true", "block"), ("false", "none")]), "\"block\" recomputes every block"),
                (TORCHTITAN, "activation_checkpoint.mode", Rule, ""),
                (MEGATRON, "recompute_granularity", Rule, "\"selective\" or \"block\""),
            ]);
        /// Memory of a rank's parameters between their uses (DeepSpeed's `offload_param.device`). For ZeRO stage 3, which divides
        /// parameters into shards and brings each chunk when a block uses it.
        parameters: Tier = Tier::Device, FREE
            .foreign(&[(DEEPSPEED, "zero_optimization.offload_param.device", Rule, "\"host\" for \"cpu\"")])
            .needs(&[SYNCHRONOUS, FOLDER, STAGE_3]);
        /// Memory of gradients from their reduction to the update, and between micro-batches. They are moved there while backward
        /// runs.
        gradients: Tier = Tier::Device, FREE
            .needs(&[SYNCHRONOUS, FOLDER]);
        /// Memory of optimizer states and master weights between updates (DeepSpeed's `offload_optimizer.device`).
        optimizer: Tier = Tier::Device, FREE
            .foreign(&[(DEEPSPEED, "zero_optimization.offload_optimizer.device", Rule, "\"host\" for \"cpu\"")])
            .needs(&[SYNCHRONOUS, FOLDER]);
        /// Side, host or device, that updates parameters whose optimizer states lie outside of device memory. On the processor, which
        /// addresses both memories, the choices are the same.
        update: UpdateOn = UpdateOn::Auto, FREE
            .needs(&[Need::of(
                &["host"],
                &[("memory.optimizer", &["host", "nvme"]), ("memory.placement", &["host", "nvme", "auto"]), ("memory.offload_optim_frac", SET)],
                "the host does not reach device memory",
            )]);
        /// Computes each update on the host during the next step, which runs without it (ZeRO-Offload's one-step delayed
        /// parameter update). For 16-bit parameters on the device, with gradients and optimizer states in host memory. A save
        /// waits for the update.
        delayed_update: bool = false, FREE
            .needs(&[
                Need::any(&[("precision.compute", &["bf16", "f16"])], "the host updates f32 master weights"),
                Need::any(&[("memory.update", &["host", "auto"])], ""),
            ]);
        /// Stores reduced gradients in the place of parameters in device memory until the update (Gemini's reuse of chunks): 14
        /// bytes per parameter under AdamW instead of 16. For 16-bit parameters and gradients of the same type, and one
        /// micro-batch. With a `placement`, it counts for chunks that lie in device memory with all their parts.
        gradients_in_place: bool = false, FREE
            .needs(&[
                SYNCHRONOUS,
                Need::any(&[("precision.compute", &["bf16", "f16"])], "with master weights; f32 parameters have no second copy"),
                Need::any(
                    &[("precision.accumulate", &["bf16", "f16"])],
                    "a gradient of f32 does not fit in the place of a parameter of 16 bits",
                ),
                Need::any(&[("memory.parameters", &["device"])], "gradients that leave take no place"),
                Need::any(&[("memory.gradients", &["device"])], "gradients that leave take no place"),
                Need::any(&[("memory.optimizer", &["device"])], "gradients leave with optimizer states, and take no place then"),
            ]);
        /// Updates each chunk within backward, as soon as its gradient is reduced (PyTorch's "optimizer step in backward").
        /// Gradients are not kept, and optimizer states elsewhere are read while backward computes. For one micro-batch and
        /// synchronous updates, without clipping or a loss scale. A gradient that is not finite ends the run in the middle of a
        /// step, whose state is not saved.
        update_in_backward: bool = false, FREE
            .needs(&[
                Need::any(&[("optimizer.clip", &["0"])], "the norm by which gradients are clipped is known behind backward only"),
                Need::any(
                    &[("precision.compute", &["f32", "bf16"])],
                    "f16 has a loss scale, and whether a step overflows is known behind backward only",
                ),
                SYNCHRONOUS,
                Need::any(
                    &[("parallel.sequence_parallel", &["false"])],
                    "it sums gradients of norms and biases over parallel.tensor behind backward",
                ),
                Need::any(&[("memory.delayed_update", &["false"])], "it updates in the next step"),
                Need::any(&[("memory.gradients_in_place", &["false"])], "no gradients are kept"),
                Need::any(&[("memory.gradients", &["device"])], "no gradients are kept that could lie elsewhere"),
            ]);
        /// Size of the buffers in which optimizer states, master weights and parameters that lie elsewhere visit the device in
        /// an update, in MiB of f32: larger chunks visit in pieces. An update has up to six such buffers for each of them;
        /// with `update_in_backward`, twice what the chunks of a block have, if that is more.
        buffer_mb: f64 = 16.0, FREE.above(0.0, f64::MAX)
            .foreign(&[(DEEPSPEED, "zero_optimization.sub_group_size", Rule, "in MiB of f32")]);
        /// Memory in which the inputs of Transformer blocks wait for backward. With `checkpointing = "block"` they are all that
        /// blocks save (DeepSpeed's `cpu_checkpointing`).
        activations: Tier = Tier::Device, FREE
            .foreign(&[
                (DEEPSPEED, "activation_checkpointing.cpu_checkpointing", Words(&[("true", "host"), ("false", "device")]), "\"host\" for true; memory.checkpointing says which blocks are recomputed"),
            ])
            .needs(&[FOLDER]);
        /// Divides the saved inputs of Transformer blocks over the tensor-parallel ranks, each of which otherwise keeps the whole
        /// (DeepSpeed's `partition_activations`). For tensor parallelism without `sequence_parallel`.
        partition_activations: bool = false, FREE
            .foreign(&[(DEEPSPEED, "activation_checkpointing.partition_activations", Rule, "")])
            .needs(&[
                Need::any(&[("parallel.tensor", &["2.."])], "a single rank has nothing to divide"),
                Need::any(&[("parallel.sequence_parallel", &["false"])], "with it, each rank has its own rows already"),
            ]);
        /// Policy that decides the memory of chunks between their uses (Gemini's `placement_policy`); without it `parameters` and
        /// `optimizer` decide.
        placement: Option<PlacementPolicy> = None, FREE
            .foreign(&[(GEMINI, "placement_policy", Rule, "\"device\" for \"cuda\", \"host\" for \"cpu\"")])
            .needs(&[
                PARAMETERS_HERE,
                GRADIENTS_HERE,
                OPTIMIZER_HERE,
                Need::of(&["host", "nvme", "auto"], &[("parallel.updates", &["synchronous"])], ""),
                FOLDER,
                Need::of(
                    &["auto"],
                    &[("device.kind", &["cuda", "simulated"]), ("memory.nvme_path", SET), ("memory.host_budget_mb", SET)],
                    "the processor computes in host memory, so what does not fit has nowhere to lie",
                ),
            ]);
        /// Under ZeRO stage 3, the fraction of parameters that are sharded; every rank has the others whole, as under stage 2
        /// (Gemini's `shard_param_frac`).
        shard_param_frac: Option<f64> = None, FREE.from(0.0, 1.0)
            .needs(&[NO_POLICY, PARAMETERS_HERE, GRADIENTS_HERE, OPTIMIZER_HERE, SYNCHRONOUS, STAGE_3]);
        /// The fraction of optimizer states and master weights outside of device memory (Gemini's `offload_optim_frac`).
        offload_optim_frac: Option<f64> = None, FREE.from(0.0, 1.0)
            .needs(&[NO_POLICY, PARAMETERS_HERE, GRADIENTS_HERE, OPTIMIZER_HERE, SYNCHRONOUS]);
        /// The fraction of parameters outside of device memory (Gemini's `offload_param_frac`).
        offload_param_frac: Option<f64> = None, FREE.from(0.0, 1.0)
            .needs(&[
                NO_POLICY,
                PARAMETERS_HERE,
                GRADIENTS_HERE,
                OPTIMIZER_HERE,
                SYNCHRONOUS,
                Need::of(&["above 0"], &[("parallel.zero", &["3"])], "also on one rank"),
                Need::of(
                    &["above 0"],
                    &[("memory.shard_param_frac", &["left out", "1"])],
                    "what every rank has whole stays on the device",
                ),
                Need::of(
                    &["above 0"],
                    &[("memory.offload_optim_frac", &["1"])],
                    "optimizer states leave first, since they are used once a step",
                ),
            ]);
        /// Device memory that `placement = "auto"` may fill, in MiB for each rank. When left out, the memory of a simulated
        /// device; else this rank's share of what the machine has available, or of `limit_mb`.
        device_budget_mb: Option<f64> = None, FREE.unset_by("device.kind").keeps().above(0.0, f64::MAX)
            .needs(&[OF_AUTO]);
        /// Host memory that `placement = "auto"` may fill, in MiB for each rank; what does not fit lies on disk.
        host_budget_mb: Option<f64> = None, FREE.unset_by("device.kind").keeps().above(0.0, f64::MAX)
            .needs(&[OF_AUTO]);
        /// The share of the device budget that `placement = "auto"` leaves free, for what the plan does not count.
        headroom: f64 = 0.02, FREE.from(0.0, 0.9).hint("a share of the budget that stays free")
            .foreign(&[(GEMINI, "steady_cuda_cap_ratio", Rule, "the share that stays free")]);
        /// The folder of the disk memory, or a list of folders on different disks, over which it is striped: one file without a
        /// name for each rank in each folder, which goes with its process.
        nvme_path: Option<Paths> = None, FREE
            .foreign(&[
                (DEEPSPEED, "zero_optimization.offload_optimizer.nvme_path", Rule, ""),
                (DEEPSPEED, "zero_optimization.offload_param.nvme_path", Rule, ""),
            ])
            .needs(&[OF_DISK]);
        /// Keeps a checksum of each block on disk in memory, and compares it whenever the block is read.
        nvme_checksums: bool = false, FREE
            .needs(&[OF_DISK]);
        /// Locks the pages of host memory (DeepSpeed's `pin_memory`). When left out: locked if a device copies from host memory by
        /// itself and the system allows it.
        pin_memory: Option<bool> = None, FREE
            .foreign(&[
                (DEEPSPEED, "zero_optimization.offload_optimizer.pin_memory", Rule, ""),
                (DEEPSPEED, "zero_optimization.offload_param.pin_memory", Rule, ""),
            ]);
        /// Memory limit of a rank, in MiB; this machine's memory over its ranks when left out.
        limit_mb: Option<f64> = None, FREE.from(0.0, MAX_MIB);
    }
}

impl MemoryConfig {
    /// Elements of the largest tile: whole blocks of the norm, at least one.
    pub(crate) fn buffer(&self) -> usize {
        let blocks = (self.buffer_mb * (1 << 20) as f64 / 4.0) as usize / NORM_BLOCK;
        blocks.max(1) * NORM_BLOCK
    }

    /// The memories of every chunk.
    pub(crate) fn residence(&self) -> ChunkResidence {
        ChunkResidence {
            parameters: self.parameters.memory(),
            gradients: self.gradients.memory(),
            optimizer: self.optimizer.memory(),
        }
    }
}

/// Chunk size as written: a word or a number of MiB.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Chunk {
    /// `auto` or `none`.
    Word(ChunkWord),
    /// MiB of f32 parameters.
    Mebibytes(f64),
}

impl KeyType for Chunk {
    const KIND: Kind = Kind::WordOrNumber("\"auto\", \"none\" or a number of MiB");

    fn number(&self) -> Option<f64> {
        match self {
            Chunk::Mebibytes(size) => Some(*size),
            Chunk::Word(_) => None,
        }
    }
}

words! {
    /// The words for a chunk size.
    ChunkWord {
        /// The size with the fewest chunks whose peak is within 1 % of the smallest, of a few that are planned.
        Auto = "auto",
        /// No chunks: one tensor each.
        None = "none",
    }
}

/// Activation checkpointing as written: a word or k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Checkpointing {
    /// `none`, `selective` or `block`.
    Word(CheckpointingWord),
    /// Every k-th block.
    Every(usize),
}

impl KeyType for Checkpointing {
    const KIND: Kind = Kind::WordOrNumber("\"none\", \"selective\", \"block\", or k for every k-th block");

    fn number(&self) -> Option<f64> {
        match self {
            Checkpointing::Every(every) => Some(*every as f64),
            Checkpointing::Word(_) => None,
        }
    }
}

words! {
    /// Side that computes updates, host or device.
    UpdateOn {
        /// The host, where optimizer states lie in its memory or on disk: then only gradients and parameters cross to and from a
        /// device with a memory of its own. The device otherwise.
        Auto = "auto",
        /// The device, which states visit.
        Device = "device",
        /// The host (ZeRO-Offload).
        Host = "host",
    }
}

words! {
    /// The words for activation checkpointing.
    CheckpointingWord {
        /// All activations are kept.
        None = "none",
        /// Everything that needs no matrix product with weights is recomputed.
        Selective = "selective",
        /// Every block is recomputed.
        Block = "block",
    }
}

words! {
    /// Memories in which a part of a rank's state can lie, with DeepSpeed's word for the disk.
    Tier {
        /// The memory of the device.
        Device = "device",
        /// The memory of the host. With `device.kind = "cpu"` it is the same memory, and copies within it gain nothing.
        Host = "host",
        /// A file under `memory.nvme_path`.
        Nvme = "nvme",
    }
}

impl RunConfig {
    pub(super) fn check_memory(&self) -> Result<(), ConfigError> {
        if self.memory.delayed_update {
            self.check_delayed_update()?;
        }
        self.check_micro_batches_of_memory()?;
        let Some(given) = &self.memory.nvme_path else { return Ok(()) };
        let folders = given.paths();
        let expected = match () {
            () if folders.iter().any(|folder| folder.as_os_str().is_empty()) => "has a folder without a name",
            () if (1..folders.len()).any(|at| folders[..at].contains(&folders[at])) => {
                "names a folder twice: several folders are for several disks"
            }
            () => return Ok(()),
        };
        Err(refuse("memory.nvme_path", given.shown(), expected))
    }

    fn check_delayed_update(&self) -> Result<(), ConfigError> {
        let refused = |expected: &str, others: &[&'static str]| {
            Err(refuse("memory.delayed_update", true, expected).with(others))
        };
        let Ok(PlacementRule::Uniform(lies)) = self.placement_rule() else {
            return refused(
                "needs all gradients and optimizer states in host memory: set memory.placement = \"host\", and leave out \
                 fractions, or say so by memory.gradients and memory.optimizer",
                &[
                    "memory.shard_param_frac",
                    "memory.offload_optim_frac",
                    "memory.offload_param_frac",
                    "memory.placement",
                ],
            );
        };
        if [lies.gradients, lies.optimizer] != [Memory::Host; 2] {
            return refused(
                "needs memory.gradients = \"host\" and memory.optimizer = \"host\", or memory.placement = \"host\"",
                &[],
            );
        }
        if lies.parameters != Memory::Device {
            return refused(
                "needs parameters in device memory: the host writes new ones beside those in use; leave out memory.parameters, \
                 or with memory.placement = \"host\" set parallel.zero to 2 or less",
                &["memory.parameters"],
            );
        }
        Ok(())
    }

    /// Refuses several micro-batches where a step's gradients are not kept for them.
    fn check_micro_batches_of_memory(&self) -> Result<(), ConfigError> {
        let (memory, micro_batches) = (&self.memory, self.micro_batches());
        for (key, is_set, why) in [
            ("memory.gradients_in_place", memory.gradients_in_place, "the next one uses the parameters"),
            (
                "memory.update_in_backward",
                memory.update_in_backward,
                "gradients are complete after the last one",
            ),
        ] {
            if is_set && micro_batches > 1 {
                let expected = format!(
                    "needs one micro-batch per step, but each rank has {micro_batches}, and {why}: raise batch.micro, or lower \
                     batch.global"
                );
                return Err(refuse(key, true, expected));
            }
        }
        if memory.gradients_in_place && memory.all_optimizer_states_leave() {
            let expected =
                "needs optimizer states in device memory: gradients that leave take no place there";
            let others = ["memory.placement", "memory.offload_optim_frac"];
            return Err(refuse("memory.gradients_in_place", true, expected).with(&others));
        }
        Ok(())
    }

    /// Options of disk memory, if there is any.
    pub fn disk(&self) -> Option<DiskOptions> {
        let folders = self.memory.nvme_path.as_ref()?.paths();
        Some(DiskOptions { checksums: self.memory.nvme_checksums, ..DiskOptions::new(folders) })
    }
}

impl Tier {
    /// The memory of a rank that it names.
    pub fn memory(self) -> Memory {
        match self {
            Tier::Device => Memory::Device,
            Tier::Host => Memory::Host,
            Tier::Nvme => Memory::Disk,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Updates;

    #[test]
    fn tiers_need_their_folder_and_a_folder_its_tier() {
        let with = |optimizer, path: Option<&str>| {
            let memory = MemoryConfig {
                optimizer,
                nvme_path: path.map(|path| Paths::One(path.into())),
                ..MemoryConfig::default()
            };
            RunConfig { memory, ..RunConfig::default() }
        };
        let refusal = |config: RunConfig| config.check().unwrap_err().to_string();
        assert!(refusal(with(Tier::Nvme, None)).contains("needs memory.nvme_path"));
        assert!(refusal(with(Tier::Host, Some("/scratch"))).contains("memory.nvme_path = /scratch"));
        with(Tier::Nvme, Some("/scratch")).check().unwrap();
        with(Tier::Host, None).check().unwrap();
        for (folders, words) in [
            (vec![], "memory.optimizer = \"nvme\": needs memory.nvme_path"),
            (vec!["/a", ""], "without a name"),
            (vec!["/a", "/b", "/a"], "memory.nvme_path = /a, /b, /a: names a folder twice"),
        ] {
            let mut several = with(Tier::Nvme, None);
            several.memory.nvme_path =
                Some(Paths::Several(folders.iter().map(|name| name.to_string()).collect()));
            let text = refusal(several);
            assert!(text.contains(words), "{text}");
        }
        let mut checked = with(Tier::Host, None);
        checked.memory.nvme_checksums = true;
        assert!(refusal(checked).contains("memory.nvme_checksums = true"));
        let mut sharded = with(Tier::Device, Some("/scratch"));
        sharded.memory.parameters = Tier::Nvme;
        assert!(refusal(sharded.clone()).contains("needs parallel.zero = 3"));
        sharded.parallel.zero = 3;
        sharded.check().unwrap();
        let mut asynchronous = with(Tier::Host, None);
        asynchronous.parallel.updates = Updates::Asynchronous;
        assert!(
            refusal(asynchronous)
                .contains("memory.optimizer = \"host\": needs parallel.updates = \"synchronous\"")
        );
    }
}
