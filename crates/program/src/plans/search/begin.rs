//! The beginning of a search: what is tried, what a replica costs, and an estimate of every candidate.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use anyhow::{Result, anyhow};
use phalanx_models::Model;
use phalanx_plan::Machine;
use phalanx_train::appraisal::ReplicaWork;
use phalanx_train::planning::elements_as_kept;
use phalanx_train::{RunConfig, Spec};
use toml::Value;

use super::candidate::{Axes, Candidate};
use super::estimate::{Estimate, Filled, Numbers, Work};
use super::limits::Limits;
use super::lost::Class;
use super::queue::Multiples;
use super::shapes::Shapes;
use super::work::{in_parallel, spec_of};
use super::{Search, Settings, Subject, divisors};
use phalanx_drawing::report::plural;

/// Candidates of a search at most.
const MAX_CANDIDATES: usize = 1 << 21;

/// A replica of one sequence, on so many tensor ranks.
fn lone(tensor: usize, checkpointing: &str) -> Settings {
    let whole = |count: usize| Value::Integer(count as i64);
    let text = |text: &str| Value::String(text.to_string());
    vec![
        ("batch.global", whole(1)),
        ("batch.micro", whole(1)),
        ("parallel.pipeline", whole(1)),
        ("parallel.data", whole(1)),
        ("parallel.tensor", whole(tensor)),
        ("parallel.zero", whole(0)),
        ("memory.checkpointing", checkpointing.parse().map_or_else(|_| text(checkpointing), whole)),
        ("memory.optimizer", text("device")),
        ("memory.gradients", text("device")),
        ("memory.parameters", text("device")),
    ]
}

impl<'a> Search<'a> {
    /// Estimates all candidates and sorts those that may fit.
    pub(super) fn begin(
        subject: &dyn Subject,
        config: &RunConfig,
        (machine, ranks): (&'a Machine, usize),
        limits: &Limits,
    ) -> Result<Search<'a>> {
        let (first, _) = subject.resolved(&lone(1, "none"))?;
        // Evaluations do not count here.
        let own = spec_of(&first, 0)?;
        let blocks = own.model.whole().uses.len() + 1;
        let next = machine.links.first().and_then(|link| link.devices).unwrap_or(ranks).max(1);
        let near: Vec<usize> = divisors(ranks).into_iter().take_while(|tensor| *tensor <= next).collect();
        let (divisible, mut impossible) = divided(&first.model, &near);
        let axes_of = |limits: &Limits| {
            Axes::of(config, limits, divisible.clone(), blocks, !own.device.host_addressable)
        };
        let mut axes = axes_of(limits);
        let (kept, also_impossible) = divided(&first.model, &axes.tensor);
        impossible.extend(also_impossible);
        axes.tensor = kept;
        let mut numbers = numbers(subject, &mut axes, &own, machine)?;
        let mut search = Search {
            machine,
            ranks,
            axes,
            candidates: Vec::new(),
            outcomes: HashMap::new(),
            device_bytes: subject.device_bytes(&first.config, ranks),
            impossible,
            block: numbers.block,
            classes: BTreeMap::new(),
            failed: Vec::new(),
            bytes_needed: Multiples::default(),
            step_times: Multiples::default(),
            is_cut: false,
            found: Vec::new(),
            text: String::new(),
        };
        let shapes = Shapes { config, limits, axes: &search.axes.clone(), ranks, blocks };
        search.fill(subject, &shapes, &mut numbers);
        if search.enumerate(&shapes, &mut numbers) == 0 {
            return Err(nothing_possible(&shapes, &axes_of, &search.impossible));
        }
        search.candidates.sort_by(|(a, x), (b, y)| {
            let per_sequence =
                |of: &Candidate, estimate: &Estimate| estimate.parts.seconds() / of.global as f64;
            per_sequence(a, x).total_cmp(&per_sequence(b, y)).then(a.cmp(b))
        });
        Ok(search)
    }

    /// Simulates each schedule for each number of pipeline ranks, with the operations of the stages that it would have.
    fn fill(&self, subject: &dyn Subject, shapes: &Shapes, numbers: &mut Numbers) {
        for pipeline in shapes.pipelines().into_iter().filter(|ranks| *ranks > 1) {
            for (number, schedule) in self.axes.schedules.iter().enumerate().skip(1) {
                let Some(plan) = schedule.plan().filter(|plan| pipeline * plan.chunks() <= shapes.blocks)
                else {
                    continue;
                };
                let whole = |count: usize| Value::Integer(count as i64);
                let settings = [
                    ("batch.global", whole(2 * pipeline)),
                    ("batch.micro", whole(1)),
                    ("parallel.pipeline", whole(pipeline)),
                    ("parallel.data", whole(1)),
                    ("parallel.tensor", whole(1)),
                    ("parallel.zero", whole(0)),
                    ("parallel.sequence_parallel", Value::Boolean(false)),
                    ("parallel.schedule", Value::String(schedule.name.clone())),
                    ("parallel.chunks", whole(schedule.chunks)),
                ];
                let Ok((resolved, _)) = subject.resolved(&settings) else { continue };
                let Ok(spec) = spec_of(&resolved, 0) else { continue };
                if let Some(filled) = Filled::of(plan, pipeline, &spec.stage_costs()) {
                    numbers.filled.insert((pipeline, number), filled);
                }
            }
        }
    }

    /// Estimates all candidates, keeps those that may fit, and returns the number of all.
    fn enumerate(&mut self, shapes: &Shapes, numbers: &mut Numbers) -> usize {
        let mut all = 0;
        let axes = self.axes.clone();
        shapes.each(&mut |candidate| {
            let Some(estimate) = numbers.estimate(&axes, &candidate) else { return true };
            all += 1;
            let fits = estimate.bytes <= self.device_bytes;
            let slowness = estimate.parts.seconds() / candidate.global as f64;
            for class in Class::all_of(&candidate) {
                let of = self.classes.entry(class).or_default();
                if !fits {
                    let excess = estimate.bytes - self.device_bytes;
                    of.min_excess = Some(of.min_excess.map_or(excess, |min| min.min(excess)));
                } else if of.best.is_none_or(|(best, _)| slowness < best) {
                    of.best = Some((slowness, candidate));
                }
            }
            if fits {
                self.candidates.push((candidate, estimate));
            }
            all < MAX_CANDIDATES
        });
        self.is_cut |= all >= MAX_CANDIDATES;
        all
    }
}

/// The numbers of tensor ranks that can divide a model, and why others cannot.
fn divided(model: &Arc<dyn Model>, tensor: &[usize]) -> (Vec<usize>, Vec<(Candidate, String)>) {
    let (mut divisible, mut impossible) = (Vec::new(), Vec::new());
    for tensor in tensor.iter().copied() {
        match model.check_cut(tensor) {
            Ok(()) => divisible.push(tensor),
            Err(error) => impossible.push((Candidate { tensor, ..Candidate::NONE }, error.to_string())),
        }
    }
    (divisible, impossible)
}

/// Numbers for estimates, from a dry run of a replica for each number of tensor ranks and each way of checkpointing.
fn numbers<'a>(
    subject: &dyn Subject,
    axes: &mut Axes,
    own: &Spec,
    machine: &'a Machine,
) -> Result<Numbers<'a>> {
    let mut specs = Vec::new();
    for tensor in axes.tensor.clone() {
        for (number, word) in axes.checkpointing.clone().iter().enumerate() {
            let mut settings = lone(tensor, word);
            settings.push(("parallel.sequence_parallel", Value::Boolean(tensor > 1)));
            let (resolved, _) = match subject.resolved(&settings) {
                Ok(resolved) => resolved,
                Err(_) => {
                    settings.pop();
                    *axes = axes.clone().without_sequence_parallelism();
                    subject.resolved(&settings)?
                }
            };
            specs.push(((tensor, number), spec_of(&resolved, 0)?));
        }
    }
    let whole = own.model.whole();
    let trained = whole.members().filter(|p| p.trained).map(|p| p.elements() as u64).sum();
    let works = in_parallel(&specs, |(key, spec)| (*key, ReplicaWork::of(spec)));
    let states = works.first().map_or(2, |(_, work)| work.states);
    let types = own.precision.types;
    let message = (whole.width() * own.batch.seq * types.compute.bytes()) as u64;
    let all = whole.parameters.iter().map(|p| elements_as_kept(p, types.compute)).sum();
    let parameters = ([all, trained], block_elements(own));
    let mut numbers = Numbers::new(machine, parameters, (types, states), message);
    numbers.has_card = own.device.beside_plan.is_some();
    let timed = works.into_iter().filter_map(|(key, work)| Some((key, Work::of(&work, machine)?)));
    numbers.work = timed.collect();
    Ok(numbers)
}

/// The error of limits that no candidate meets: the limit without which most are possible.
fn nothing_possible(
    shapes: &Shapes,
    axes_of: &dyn Fn(&Limits) -> Axes,
    impossible: &[(Candidate, String)],
) -> anyhow::Error {
    let options = shapes.limits.options();
    let without = |option: usize| {
        let limits = shapes.limits.without(option);
        Shapes { limits: &limits, axes: &axes_of(&limits), ..*shapes }.count()
    };
    let best = (0..options.len()).map(|option| (without(option), option)).max();
    let reason = impossible.first().map_or(String::new(), |(_, why)| format!("; {why}"));
    match best {
        Some((count, option)) if count > 0 => anyhow!(
            "no configuration of {} meets the limits: {} excludes most ({count} without it){reason}",
            plural(shapes.ranks, "device"),
            options[option]
        ),
        _ => anyhow!(
            "no configuration divides batch.global = {} sequences and {} blocks among {}{}{reason}: change batch.global or the number of \
             devices (batches near it that replicas divide: {})",
            shapes.config.batch.global,
            shapes.blocks,
            plural(shapes.ranks, "device"),
            if options.is_empty() { "" } else { " within the limits" },
            nearest_divisors_of_batch(shapes)
        ),
    }
}

fn nearest_divisors_of_batch(shapes: &Shapes) -> String {
    let (global, ranks) = (shapes.config.batch.global, shapes.ranks);
    let below = global / ranks * ranks;
    [below, below + ranks]
        .iter()
        .filter(|size| **size > 0)
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// Elements of the largest block but the first and the head.
fn block_elements(spec: &Spec) -> u64 {
    let whole = spec.model.whole();
    let of = |p: &usize| elements_as_kept(&whole.parameters[*p], spec.precision.types.compute);
    let elements = |uses: &[usize]| uses.iter().map(of).sum::<u64>();
    let inner = whole.uses.get(1..whole.uses.len().saturating_sub(1)).unwrap_or(&[]);
    inner.iter().map(|uses| elements(uses)).max().unwrap_or_else(|| whole.elements() as u64).max(1)
}
