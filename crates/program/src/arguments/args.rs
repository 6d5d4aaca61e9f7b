//! The command line: what each command takes, and its help with examples.
//!
//! Arguments are read here and nowhere else; each command turns them into what its room needs.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use phalanx_data::TokenType;
use phalanx_models::Arch;
use serde::Deserialize;
use serde::de::IntoDeserializer;

use crate::arguments::bench_args::BenchArgs;
use crate::arguments::byte_size::parse_bytes;
use crate::arguments::counts::{self, real, whole};
use crate::arguments::draw_args::DrawArgs;
use crate::arguments::launch_args::LaunchArgs;
use crate::arguments::overrides::Overrides;
use crate::arguments::report_args::ReportArgs;
use crate::arguments::sample_args::{ChatArgs, EvalArgs, SampleArgs};
use crate::arguments::search_args::SearchArgs;
use crate::arguments::sized_args::SizedArgs;
use crate::arguments::train_args::TrainArgs;

/// The version, and a number of the sources of this build.
pub const BUILD: &str = env!("PHALANX_BUILD");

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "phalanx",
    version = BUILD,
    about = "Trains Transformer language models on many ranks with little memory",
    long_about = "Trains Transformer language models on many ranks with little memory (ZeRO 0 to 3).\n\
                  Before the first step it knows every byte that every rank will hold, and shows it.",
    after_help = "Start here:\n  \
                  phalanx plan examples/quickstart.toml     what every rank will hold\n  \
                  phalanx train examples/quickstart.toml    train it on this repository's text\n  \
                  phalanx COMMAND --help                    examples for each command\n\n\
                  Environment:\n  \
                  PHALANX_ISA=portable|avx2|avx512|avx512bf16|amx   instruction set of the kernels, instead of\n  \
                  \u{20}                                                 the best that the processor has; all but\n  \
                  \u{20}                                                 amx (and amx-model, its model for tests)\n  \
                  \u{20}                                                 do without tile registers",
    infer_long_args = true
)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    Plan(Box<PlanArgs>),
    Train(TrainArgs),
    Launch(LaunchArgs),
    Sample(SampleArgs),
    Chat(ChatArgs),
    Eval(EvalArgs),
    Tokenize(TokenizeArgs),
    Import(ImportArgs),
    ImportConfig(ImportConfigArgs),
    Export(ExportArgs),
    Inspect(InspectArgs),
    Report(ReportArgs),
    Keys(KeysArgs),
    Bench(BenchArgs),
    Doctor(DoctorArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    /// One rank of a job; started by the launcher, never by users.
    #[command(hide = true)]
    Rank(RankArgs),
}

/// Shows what every rank will hold, compute and send
///
/// Runs every rank of the configuration on a device that only records, and prints from that record the
/// bytes by rank and category, the operations and bytes sent in a step, the chunks of parameters, and the
/// textbook formulas beside them; for a mesh also the coordinates of each rank, and the stages of a pipeline
/// with its bubble. Then says for each rank whether it fits the memory of its device (--device-memory, else that of
/// --machine, else its share of a card here, else this machine's memory for all ranks; and memory.limit_mb), and if not,
/// which commands would make it fit, each of them planned. The answer is printed with exit code 0 in either case; only
/// `train` refuses a run that does not fit.
///
/// With --chunks: compares the chunk sizes that the run could have instead: padding, the peak of each memory, and what a
/// step moves at each message size, with its time on --machine (measured here when left out).
///
/// With --search: compares the meshes, ZeRO stages, schedules, micro-batches, checkpointing, placements and types on the wire that
/// CONFIG could have on the devices of --machine and --hosts (or --nproc, or one host), within --keep and --only. Prints the configuration
/// with the fastest predicted step that fits (--write FILE writes it), the next nine, and why others lost.
///
/// With --placement: lists the memory of each chunk's parts as memory.placement has decided it.
///
/// With --schedule: draws a pipeline schedule instead, prints it in PyTorch's text form, and reports its idle time and
/// memory. NAME is model, gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v; FILE is your own schedule in that text form, which
/// is checked. With CONFIG the time of an action follows from the operations of its stage; without it each action takes
/// 1; --forward, --input, --weight and --message, or --costs FILE, give other times. Only the files of --svg and --text are written.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("drawn").args(["schedule", "chunk_program"]).multiple(true)))]
#[command(after_help = "Examples:\n  \
    phalanx plan examples/quickstart.toml\n  \
    phalanx plan examples/quickstart.toml --nproc 4 --set parallel.zero=3\n  \
    phalanx plan examples/gpt2_124m.toml --json | jq '.ranks[0].device'\n  \
    phalanx plan examples/gpt2_124m.toml --deepspeed ds_config.json --nproc 8\n  \
    phalanx plan examples/gpt2_124m.toml --nproc 8 --device-memory 80GiB\n  \
    phalanx plan examples/gpt2_124m.toml --device-memory 2GiB --json | jq .verdict\n  \
    phalanx plan --size llama3-8b --lora 16 --base nf4 --gpus 1x24GiB\n  \
    phalanx plan examples/quickstart.toml --chunks\n  \
    phalanx plan examples/gpt2_124m.toml --nproc 8 --set parallel.zero=3 --machine h200\n  \
    phalanx plan examples/gpt3_13b_h200.toml --placement\n  \
    phalanx plan examples/gpt2_124m.toml --search --machine h100x8 --hosts 2 --write best.toml\n  \
    phalanx plan --size llama3-8b --gpus 8xa100-80 --set batch.global=64 --search --keep parallel.tensor=1\n  \
    phalanx plan examples/mesh_2x2x2.toml --schedule\n  \
    phalanx plan --schedule zb-v --pipeline 4 --micro-batches 8 --svg zb-v.svg --text zb-v.csv\n  \
    phalanx plan --schedule zb-v.csv\n  \
    phalanx plan examples/quickstart.toml --nproc 2 --set parallel.zero=3 --chunk-program 0,1 --svg step.svg\n  \
    phalanx plan --schedule zb-h1 --pipeline 8 --forward 18.5 --input 18.1 --weight 9.3 --message 0.6")]
pub struct PlanArgs {
    /// Configuration (TOML); may be left out with --size and --schedule
    #[arg(required_unless_present_any = ["schedule", "model_size"])]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub sized: SizedArgs,
    #[command(flatten)]
    pub overrides: Overrides,
    /// Text files, JSON files or folders, instead of data.text
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// Memory of each rank's device, as 80GiB; when left out that of --machine, or this machine's
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "schedule")]
    pub device_memory: Option<u64>,
    /// Show where each chunk lies, what a step moves for it, and the memories side by side
    #[arg(long, conflicts_with_all = ["schedule", "chunks"])]
    pub placement: bool,
    /// Print what a rank (0 when left out) does with its chunks in each phase, action by action; of several, as 0,3. With --svg,
    /// draw its step: actions from left to right, with works in flight, and buffers by memory
    #[arg(long, value_name = "RANK", num_args = 0..=1, default_missing_value = "0", value_delimiter = ',',
          conflicts_with_all = ["schedule", "chunks", "placement", "machine"],
          value_parser = whole::<usize>(0..=counts::RANKS - 1))]
    pub chunk_program: Vec<usize>,
    /// Plan for a machine and predict the time of a step, with its devices, memory and links: v100-32, a100-40, a100-80, h100, h200, b200,
    /// gh200, mi300x, rtx4090, laptop, one of these with the devices of a host, as h100x4, or a profile file (TOML); or here (measured now)
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "schedule")]
    pub machine: Option<String>,
    /// Print figures as JSON, bytes exact
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub search: SearchArgs,
    #[command(flatten)]
    pub draw: DrawArgs,
}

/// Turns text into a token file
///
/// The file holds the tokens and their tokenizer; `data.tokens = "FILE"` trains on it. A file that exists is
/// replaced with --force only, and only once the new one is whole.
///
/// Each text file is one document. In JSON files, each line or record is one, as {"text": "..."}. What a file holds is
/// told by its content; what cannot be read is skipped inside of folders, and said. Between documents goes the
/// tokenizer's end-of-text token, if it has one.
///
/// With --show: reads files of chats, as data.chat, and prints the first of them as they are trained on, with special tokens;
/// what is trained is in colour, or, without colours, between [[ and ]]. Nothing is written.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx tokenize --tokenizer gpt2 --out books.bin books/\n  \
    phalanx tokenize chats.jsonl --tokenizer qwen3/ --show 3\n  \
    phalanx tokenize --out code.bin --extension rs --extension md crates docs\n  \
    phalanx tokenize --tokenizer gpt2 --out web.bin --text-key content web.jsonl")]
pub struct TokenizeArgs {
    /// Text files or folders
    #[arg(required = true, value_name = "TEXT")]
    pub text: Vec<PathBuf>,
    /// byte, char, gpt2, or the path of a Hugging Face tokenizer.json or folder
    #[arg(long, default_value = "byte", value_name = "NAME")]
    pub tokenizer: String,
    /// Read only files with this extension from folders; may be repeated
    #[arg(long, value_name = "EXT")]
    pub extension: Vec<String>,
    /// In JSON files: the key of the text in each line or record
    #[arg(long, default_value = "text", value_name = "KEY")]
    pub text_key: String,
    /// Read files with this extension as plain text, whatever they hold (such as json, csv); may be repeated
    #[arg(long, value_name = "EXT")]
    pub plain: Vec<String>,
    /// Fraction of lines, and of the bytes of files, that may be skipped; by default 1 % of the lines and half of the bytes
    #[arg(long, value_name = "FRACTION", value_parser = real::<f64>(0.0..=1.0))]
    pub max_skipped: Option<f64>,
    /// Token file to write
    #[arg(long, value_name = "FILE", required_unless_present = "show")]
    pub out: Option<PathBuf>,
    /// Print the first N chats of TEXT, with what of them is trained
    #[arg(long, value_name = "N", conflicts_with_all = ["out", "force"], value_parser = whole::<usize>(1..=counts::TOKENS))]
    pub show: Option<usize>,
    /// For --show: another value of a key of chats, such as data.template=chatml, data.train_on=last-answer or data.format=alpaca; may be
    /// repeated
    #[arg(long, value_name = "KEY=VALUE", requires = "show")]
    pub set: Vec<String>,
    /// Replace the token file if it exists, once the new one is whole; no other file is replaced
    #[arg(long)]
    pub force: bool,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}

fn token_type(text: &str) -> Result<TokenType, serde::de::value::Error> {
    TokenType::deserialize(text.into_deserializer())
}

/// The families of models that `import` takes.
fn families() -> String {
    let families: Vec<String> =
        Arch::all().map(|arch| format!("{} (model_type {:?})", arch.title, arch.name)).collect();
    families.join(" or ")
}

fn import_about() -> String {
    format!("Makes a run folder from a Hugging Face folder: {}", families())
}

fn import_long_about() -> String {
    format!(
        "{}\n\nReads config.json, the safetensors files and the tokenizer's files of a folder, and writes a \
         run folder with a checkpoint of step 0, from which export, train --resume and, for a model that continues \
         text, sample work.",
        import_about()
    )
}

/// Makes a run folder from a Hugging Face folder
#[derive(Debug, Args)]
#[command(about = import_about(), long_about = import_long_about(), after_help = "Examples:\n  \
    phalanx import gpt2-folder\n  \
    phalanx import bert-folder --run runs/bert\n  \
    phalanx train my.toml --run runs/gpt2 --resume --data my-texts/\n\n\
    Training an imported model without a checkpoint of its own: [model] init = \"gpt2-folder\".")]
pub struct ImportArgs {
    /// Folder with config.json and model.safetensors
    pub dir: PathBuf,
    /// Run folder to make; runs/NAME-of-the-folder when left out
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// Translates another program's configuration into one of ours
///
/// Reads DeepSpeed's JSON, nanoGPT's config/*.py (its assignments; nothing is executed), torchtitan's TOML, and the YAML of axolotl
/// and LLaMA-Factory. Writes TOML to standard output, and to standard error a table of each of its keys: what it is here,
/// whether it means the same, and why. A key that is unknown or has a wrong value is an error, and so is one that is not here,
/// with what to use instead: nothing is written then.
///
/// "auto" becomes what Hugging Face's Trainer fills in by default. To train with CONFIG and DeepSpeed's configuration side by side:
/// phalanx train CONFIG --deepspeed FILE.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx import-config ds_config.json > mine.toml\n  \
    phalanx import-config ds_config.json --nproc 8 > mine.toml\n  \
    phalanx import-config config/train_shakespeare_char.py > shakespeare.toml\n  \
    phalanx import-config llama3_8b.toml --partial > mine.toml          torchtitan's\n  \
    phalanx import-config ds_config.json --json | jq '.rows[] | select(.outcome == \"differs\")'")]
pub struct ImportConfigArgs {
    /// The configuration
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Whose configuration it is; by the name of the file when left out
    #[arg(long, value_enum, value_name = "PROGRAM")]
    pub from: Option<ConfigFormat>,
    /// Number of ranks; when left out, what the batch of the configuration says, else 1
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=counts::RANKS))]
    pub nproc: Option<usize>,
    /// Leave out what is refused, with a comment for each, instead of ending
    #[arg(long)]
    pub partial: bool,
    /// Print the table as JSON instead, with the TOML in it
    #[arg(long)]
    pub json: bool,
}

/// Programs whose configurations are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConfigFormat {
    /// JSON
    Deepspeed,
    /// Python
    Nanogpt,
    /// TOML
    Torchtitan,
    /// YAML
    Axolotl,
    /// YAML
    LlamaFactory,
}

/// Writes a checkpoint as a Hugging Face folder, or as a GGUF file
///
/// The folder has model.safetensors, config.json, and if the run has a tokenizer: its files as they were read, and tokenizer.json,
/// tokenizer_config.json and, for a model that continues text, generation_config.json. transformers' AutoTokenizer then gives the ids of the run's
/// tokenizer. A GGUF file has model and tokenizer, for llama.cpp and programs that build on it. Of a run with adapters the folder has these
/// alone, as PEFT writes them; --merge adds them to the weights. The same parameters give the same bytes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx export runs/quickstart --out quickstart-hf\n  \
    phalanx export runs/quickstart --step 500 --out step-500-hf --dtype bf16\n  \
    phalanx export runs/quickstart --out quickstart.gguf --format gguf --dtype q8_0\n  \
    phalanx export runs/tuned --out tuned-hf --merge")]
pub struct ExportArgs {
    /// Run folder
    pub run: PathBuf,
    /// Checkpoint; the newest when left out
    #[arg(long, value_name = "N", value_parser = whole::<u64>(0..=u64::MAX))]
    pub step: Option<u64>,
    /// Folder to write; with --format gguf, the file
    #[arg(long, value_name = "PATH")]
    pub out: PathBuf,
    /// What to write
    #[arg(long, value_enum, default_value_t = ExportFormat::Hf)]
    pub format: ExportFormat,
    /// How numbers are stored. The run has f32; other types round
    #[arg(long, value_enum, default_value_t = ExportType::F32)]
    pub dtype: ExportType,
    /// The whole model of a run with adapters, with what they add to its weights (in f32), and not the adapter alone
    #[arg(long)]
    pub merge: bool,
    /// Replace the model that is there. Of a folder: its weights, configuration and tokenizer; other files stay
    #[arg(long)]
    pub force: bool,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// Format that `export` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// A folder for Hugging Face's programs
    Hf,
    /// A file for llama.cpp
    Gguf,
}

/// Storage type of the numbers of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum ExportType {
    /// As the run has them
    F32,
    /// 8 bits of precision
    Bf16,
    /// 11 bits of precision, up to 65,504
    F16,
    /// 8 bits each, and a scale for 32 of them; GGUF only
    #[value(name = "q8_0")]
    Q8_0,
}

impl ExportType {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            ExportType::F32 => "f32",
            ExportType::Bf16 => "bf16",
            ExportType::F16 => "f16",
            ExportType::Q8_0 => "q8_0",
        }
    }
}

/// Describes a checkpoint, run folder, token file, Hugging Face folder or flight record
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx inspect runs/quickstart\n  \
    phalanx inspect runs/quickstart/flight            what each rank did before the run failed\n  \
    phalanx inspect runs/quickstart/checkpoints/step-500 --verify\n  \
    phalanx inspect train.bin --json\n  \
    phalanx inspect ids.bin --token-type u32")]
pub struct InspectArgs {
    /// A step-N folder, a run folder, a token file, a Hugging Face folder, or the folder `flight` of a run
    pub path: PathBuf,
    /// How ids are stored in a token file without a header, as data.token_type: u8, u16, u32 or i64
    #[arg(long, value_name = "TYPE", default_value = "auto", hide_default_value = true, value_parser = token_type)]
    pub token_type: TokenType,
    /// Read everything: compare checksums, give statistics of every tensor
    #[arg(long)]
    pub verify: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Shows the keys of a configuration: what each says, its values and its default
///
/// With the name of a key, everything that is known of it, the meaning of each of its words among it; with that of a table, its keys.
/// With --schema, a JSON schema of configurations, with which editors check and complete them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx keys                            a line each\n  \
    phalanx keys memory\n  \
    phalanx keys memory.checkpointing\n  \
    phalanx keys --schema > phalanx.schema.json")]
pub struct KeysArgs {
    /// A table or a key, as memory or train.steps
    #[arg(value_name = "TABLE or TABLE.KEY")]
    pub name: Option<String>,
    /// Print a JSON schema instead
    #[arg(long, conflicts_with_all = ["name", "markdown"])]
    pub schema: bool,
    /// Print all that is known of all keys, in Markdown (docs/configuration.md)
    #[arg(long, conflicts_with = "name")]
    pub markdown: bool,
}

/// Measures this machine and checks its limits
///
/// Cores and instruction sets, the rates of multiply-adds in f32 and of products of bf16, memory bandwidth,
/// memory available, and the limits of the system that matter to a run; NVIDIA's driver, GPUs and libraries, and which
/// package has what is missing. Gives no advice where other programs keep the machine busy meanwhile.
///
/// With --kernels: compares every kernel of the first GPU with the processor's instead, and prints rates of the most important
/// ones beside what the GPU can do at most by published figures of its architecture. Takes about a minute, or two where kernels must be compiled first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  phalanx doctor\n  phalanx doctor --json\n  phalanx doctor --kernels")]
pub struct DoctorArgs {
    /// Check the kernels of the GPU instead
    #[arg(long)]
    pub kernels: bool,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// Prints a script that completes the command line in a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx completions bash > ~/.local/share/bash-completion/completions/phalanx\n  \
    phalanx completions zsh > ~/.zfunc/_phalanx        (with fpath+=~/.zfunc before compinit)\n  \
    phalanx completions fish > ~/.config/fish/completions/phalanx.fish")]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// Writes the manual pages of the program and of each command
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  phalanx man ~/.local/share/man/man1 && man phalanx-train")]
pub struct ManArgs {
    /// Folder for the pages; it is made if it is not there
    pub dir: PathBuf,
}

/// Arguments that the launcher gives to a rank.
#[derive(Debug, Args)]
pub struct RankArgs {
    /// Number of this rank
    pub rank: usize,
    /// Descriptors: the control block, then the arena of each rank
    #[arg(long, value_delimiter = ',')]
    pub fds: Vec<i32>,
    /// Process that must be alive
    #[arg(long)]
    pub launcher: i32,
    /// Descriptor of the memory file with the work, as JSON
    #[arg(long)]
    pub task_fd: i32,
    /// Descriptor of the memory file that says how to reach the ranks of other hosts
    #[arg(long, requires = "listener_fd")]
    pub network_fd: Option<i32>,
    /// Descriptor of the socket at which ranks of other hosts reach this one
    #[arg(long)]
    pub listener_fd: Option<i32>,
    /// Cores to which the rank is bound
    #[arg(long, value_delimiter = ',')]
    pub cores: Vec<usize>,
}
