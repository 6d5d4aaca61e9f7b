//! `phalanx plan --chunk-program`: what ranks do with their chunks, as text, as JSON or as a picture.

use anyhow::{Context, Result, bail};
use phalanx_drawing::draw_programs;
use phalanx_drawing::report::plural;
use phalanx_plan::program::Program;
use phalanx_plan::trace::PhaseName;
use phalanx_train::chunk_programs::ChunkPrograms;

use crate::arguments::args::PlanArgs;
use crate::folders::ownership::{check_output, is_drawing};
use crate::host::output;
use crate::plans::planned::Planned;
use crate::reports::chunk_program_report::{to_json, to_text};

/// Shows the programs of the ranks that are asked for.
///
/// # Errors
/// A rank that the run has not; a picture that cannot be written.
pub fn show(args: &PlanArgs, planned: &Planned) -> Result<()> {
    let (spec, svg) = (&planned.plan.spec, &args.draw.svg);
    let ranks = spec.world_size();
    if let Some(rank) = args.chunk_program.iter().find(|rank| **rank >= ranks) {
        bail!("--chunk-program {rank}: the run has {}, counted from 0", plural(ranks, "rank"));
    }
    if let Some(path) = svg {
        check_output(path, "--svg", is_drawing)?;
    }
    let of = |rank: &usize| spec.chunk_programs(*rank).context("--chunk-program");
    let all = args.chunk_program.iter().map(of).collect::<Result<Vec<ChunkPrograms>>>()?;
    if let Some(path) = svg {
        let is_step = |program: &&Program| program.phase == PhaseName::Step;
        let step = |of: &ChunkPrograms| of.programs.iter().find(is_step).cloned();
        let steps: Vec<Program> = all.iter().filter_map(step).collect();
        let named = all.iter().zip(&steps).map(|(of, step)| (format!("rank {}", of.rank), step));
        phalanx_system::files::write_output(path, draw_programs(&named.collect::<Vec<_>>()))
            .with_context(|| format!("cannot write {}; choose another file", path.display()))?;
    }
    if args.json {
        let all: Vec<_> = all.iter().map(to_json).collect();
        return output::print_json(&match &all[..] {
            [one] => one.clone(),
            several => several.into(),
        });
    }
    let all: Vec<String> = all.iter().map(|of| to_text(of, ranks)).collect();
    Ok(output::print(&all.join("\n"))?)
}
