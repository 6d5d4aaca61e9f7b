//! The arguments of `plan --schedule`, and the costs that they give.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use phalanx_plan::{Costs, PipelineSchedule, StageCost};
use serde::Deserialize;

use crate::arguments::counts::{self, real, whole};
use crate::arguments::limits::CONFIG_BYTES;

/// Arguments of `plan --schedule`.
#[derive(Debug, Args)]
pub struct DrawArgs {
    /// Draw a pipeline schedule: that of CONFIG, or this one
    #[arg(long, value_name = "NAME|FILE", num_args = 0..=1)]
    pub schedule: Option<Option<String>>,
    /// Pipeline ranks; when left out those of CONFIG, or 4
    #[arg(long, value_name = "P", requires = "schedule", value_parser = whole::<usize>(1..=counts::RANKS))]
    pub pipeline: Option<usize>,
    /// Micro-batches of a step; when left out those of CONFIG, or twice the ranks
    #[arg(long, value_name = "M", requires = "schedule", value_parser = whole::<usize>(1..=counts::PARTS))]
    pub micro_batches: Option<usize>,
    /// Compare the chunk sizes that CONFIG could have. With --schedule: stages of each rank under interleaved; when left
    /// out those of CONFIG, or 2
    #[arg(long, value_name = "V", num_args = 0..=1, value_parser = whole::<usize>(1..=counts::PARTS))]
    pub chunks: Option<Option<usize>>,
    #[command(flatten)]
    pub costs: CostArgs,
    /// Write the drawing as SVG: of --schedule, or of the step of --chunk-program
    #[arg(long, value_name = "FILE", requires = "drawn")]
    pub svg: Option<PathBuf>,
    /// Write the schedule in PyTorch's text form, which parallel.schedule = "FILE" runs
    #[arg(long, value_name = "FILE", requires = "schedule")]
    pub text: Option<PathBuf>,
}

/// The costs of a schedule, in any unit of time.
#[derive(Debug, Args)]
pub struct CostArgs {
    /// Time of a stage's forward (F); 1 when only other costs are given
    #[arg(long, value_name = "TIME", requires = "schedule", value_parser = real::<f64>(0.0..=counts::TIME))]
    pub forward: Option<f64>,
    /// Time of the gradient of a stage's input (I)
    #[arg(long, value_name = "TIME", requires = "schedule", value_parser = real::<f64>(0.0..=counts::TIME))]
    pub input: Option<f64>,
    /// Time of the gradients of a stage's weights (W); B takes I + W
    #[arg(long, value_name = "TIME", requires = "schedule", value_parser = real::<f64>(0.0..=counts::TIME))]
    pub weight: Option<f64>,
    /// Time until a message arrives, during which its sender computes; 0 when left out
    #[arg(long, value_name = "TIME", requires = "schedule", value_parser = real::<f64>(0.0..=counts::TIME))]
    pub message: Option<f64>,
    /// File (TOML) with forward, input, weight (a number, or a list with one for each stage) and message
    #[arg(long, value_name = "FILE", requires = "schedule")]
    pub costs: Option<PathBuf>,
}

/// A time for every stage, or one for each.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Times {
    All(f64),
    Each(Vec<f64>),
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CostFile {
    forward: Option<Times>,
    input: Option<Times>,
    weight: Option<Times>,
    message: Option<f64>,
}

impl CostArgs {
    /// The costs of the stages of a schedule, if any are given; options take the place of those in the file.
    ///
    /// # Errors
    /// A file that cannot be read, a time that is negative, or lists of other lengths than the stages.
    pub fn of(&self, schedule: &PipelineSchedule) -> Result<Option<Costs>> {
        let options = [self.forward, self.input, self.weight, self.message];
        if options.iter().all(Option::is_none) && self.costs.is_none() {
            return Ok(None);
        }
        let file = self.costs.as_deref().map(read).transpose()?.unwrap_or_default();
        let stages = schedule.stages();
        let times = |name: &str, option: Option<f64>, file: Option<Times>| -> Result<Vec<f64>> {
            let times = match option.map(Times::All).or(file).unwrap_or(Times::All(1.0)) {
                Times::All(time) => vec![time; stages],
                Times::Each(times) => times,
            };
            if times.len() != stages {
                bail!("`{name}` has {} times, and {} has {stages} stages", times.len(), schedule.name);
            }
            times.into_iter().map(|time| check(name, time)).collect()
        };
        let forward = times("forward", self.forward, file.forward)?;
        let input = times("input", self.input, file.input)?;
        let weight = times("weight", self.weight, file.weight)?;
        let message = check("message", self.message.or(file.message).unwrap_or(0.0))?;
        let cost =
            |stage: usize| StageCost { forward: forward[stage], input: input[stage], weight: weight[stage] };
        Ok(Some(Costs { stages: (0..stages).map(cost).collect(), message }))
    }
}

fn check(name: &str, time: f64) -> Result<f64> {
    match (0.0..=counts::TIME).contains(&time) {
        true => Ok(time),
        false => bail!("`{name}` is {time}: expected a time from 0 to 1e15, in any unit"),
    }
}

fn read(path: &Path) -> Result<CostFile> {
    let text =
        phalanx_system::files::read_text(path, CONFIG_BYTES).with_context(|| path.display().to_string())?;
    toml::from_str(&text).with_context(|| {
        format!("{}: expected forward, input, weight (numbers, or lists) and message", path.display())
    })
}

/// The same costs for a schedule of as many ranks that has another number of stages: their mean, so that a rank has
/// as much to do.
pub fn scaled_to(costs: &Costs, stages: usize) -> Costs {
    let (given, part) = (costs.stages.len() as f64, costs.stages.len() as f64 / stages as f64);
    let mean = |of: fn(&StageCost) -> f64| part * costs.stages.iter().map(of).sum::<f64>() / given;
    let cost = StageCost {
        forward: mean(|cost| cost.forward),
        input: mean(|cost| cost.input),
        weight: mean(|cost| cost.weight),
    };
    Costs { stages: vec![cost; stages], message: costs.message }
}
