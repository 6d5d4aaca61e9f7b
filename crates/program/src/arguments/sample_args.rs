//! Arguments of `sample` and `chat`.

use std::path::PathBuf;

use clap::Args;

use crate::arguments::counts::{self, real, whole};

/// Continues a text with a trained model
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx sample runs/quickstart --prompt 'pub fn '\n  \
    phalanx sample runs/quickstart --prompt '//! ' --tokens 400 --temperature 0.7 --top-k 20 --seed 7\n  \
    phalanx sample runs/quickstart --prompt 'fn main' --tokens 2000 --top-p 0.9 --shift 128\n  \
    phalanx sample runs/quickstart --prompts prompts.jsonl --json > texts.jsonl")]
pub struct SampleArgs {
    /// Run folder
    pub run: PathBuf,
    /// Text to continue
    #[arg(long, value_name = "TEXT", required_unless_present = "prompts", conflicts_with = "prompts")]
    pub prompt: Option<String>,
    /// A file with a text to continue in each line; in a .jsonl file, each line is a text in quotes, or an object with one under
    /// "prompt". Each is continued as if it were the only one
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Tokens to add
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = whole::<usize>(0..=counts::TOKENS))]
    pub tokens: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Print one JSON object at the end instead of text as it is made; of --prompts one in each line
    #[arg(long)]
    pub json: bool,
}

/// How the next token is drawn, by which checkpoint
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Divides the logits; 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8, value_name = "T", value_parser = real::<f32>(0.0..=counts::TEMPERATURE))]
    pub temperature: f32,
    /// Draw from the K most likely tokens only; 0 for all
    #[arg(long, default_value_t = 0, value_name = "K", value_parser = whole::<usize>(0..=counts::TOKENS))]
    pub top_k: usize,
    /// Draw from the most likely tokens that together have this probability; 1 for all. Applies after --temperature
    /// and --top-k
    #[arg(long, default_value_t = 1.0, value_name = "P", value_parser = real::<f32>(0.0..=1.0))]
    pub top_p: f32,
    /// When the text is longer than model.seq, forget the N oldest tokens at once. 1 computes the last model.seq
    /// tokens again for every token; more is faster, and the model sees less text after each shift
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = whole::<usize>(1..=counts::TOKENS))]
    pub shift: usize,
    /// The same seed gives the same text
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = whole::<u64>(0..=u64::MAX))]
    pub seed: u64,
    /// Checkpoint; the newest when left out
    #[arg(long, value_name = "N", value_parser = whole::<u64>(0..=u64::MAX))]
    pub step: Option<u64>,
    /// Type in which the model computes; that of the run (precision.compute) when left out. 16 bits are read twice as fast
    #[arg(long, value_parser = ["f32", "bf16", "f16"])]
    pub dtype: Option<String>,
}

/// Answers as a trained model: a line of standard input is a question
///
/// The text of the chat is made by the chat template that the run was trained with, or that of its tokenizer; an answer ends where the model ends it, or after
/// --tokens. Each question is answered with all that was said before; an empty line begins another chat.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx chat runs/assistant\n  \
    phalanx chat runs/assistant --system 'Be brief.' --temperature 0\n  \
    echo 'What is 2 + 2?' | phalanx chat runs/assistant")]
pub struct ChatArgs {
    /// Run folder
    pub run: PathBuf,
    /// What a system turn before the first question says
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Chat template: chatml, llama3, or a file; the run's own when left out
    #[arg(long, value_name = "NAME|FILE")]
    pub template: Option<String>,
    /// Longest answer
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = whole::<usize>(1..=counts::TOKENS))]
    pub tokens: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Measures the loss of a trained model on data of your own
///
/// Chats (of a run on chats, or with --template) count as they are trained on: the tokens of answers, each predicted from its own chat. Of text, each token is
/// predicted from those before it in its window of model.seq tokens. The model computes as one rank, on the device of
/// the run.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    phalanx eval runs/assistant --data test.jsonl\n  \
    phalanx eval runs/quickstart --data docs --json | jq .perplexity")]
pub struct EvalArgs {
    /// Run folder
    pub run: PathBuf,
    /// Files of chats, or text files and folders
    #[arg(long, required = true, value_name = "PATH", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// Chat template: chatml, llama3, or a file; the run's own when left out
    #[arg(long, value_name = "NAME|FILE")]
    pub template: Option<String>,
    /// Tokens of a window, at which chats are cut; the run's model.seq when left out
    #[arg(long, value_name = "N", value_parser = whole::<usize>(2..=counts::TOKENS))]
    pub seq: Option<usize>,
    /// Checkpoint; the newest when left out
    #[arg(long, value_name = "N", value_parser = whole::<u64>(0..=u64::MAX))]
    pub step: Option<u64>,
    /// Type in which the model computes; that of the run (precision.compute) when left out
    #[arg(long, value_parser = ["f32", "bf16", "f16"])]
    pub dtype: Option<String>,
    /// Device that computes: auto, cpu, cuda or simulated; that of the run when left out
    #[arg(long, value_parser = ["auto", "cpu", "cuda", "simulated"])]
    pub device: Option<String>,
    /// Print figures as JSON
    #[arg(long)]
    pub json: bool,
}
