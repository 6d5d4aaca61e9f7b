//! Puts the repetitions of a pipeline's steady state back into the trace of an abridged dry run.
//!
//! A dry run of an abridged program ([`crate::pipeline::abridge()`]) records one period of the steady state a few times
//! instead of as often as a step has it. [`expand`] repeats that period: the result is the trace that a dry run of the
//! whole program would have written, event by event. What an event refers to (the allocation that it frees, the collective
//! that it waits for) is known by the step that made it and its number among what the step made alike, so in the n-th
//! copy it is what the same step made n periods later. Only what a receive makes, a buffer for a later message, belongs to the receive
//! of that message.
//!
//! This is right if the rank is in the same state before each period, up to the numbers of micro-batches. So the last
//! period before the gap is compared with the first behind it, and what is freed must be live and what it was in the dry
//! run. Where any of this fails there is no expanded trace, and the caller runs the whole program.

use std::collections::HashMap;

use crate::trace::{Event, Phase, PhaseName, Trace, later_tag};

use crate::pipeline::{Abridged, Step};

/// A phase that ran an abridged program.
#[derive(Clone, Copy, Debug)]
pub struct AbridgedPhase<'a> {
    /// Its name.
    pub name: PhaseName,
    /// The program that it ran.
    pub program: &'a Abridged,
    /// Messages that a channel of the schedule holds on each side: as many receives are posted ahead.
    pub depth: usize,
}

/// The trace of the whole programs, from a trace in which some phases ran abridged programs. `None` where the trace does
/// not repeat itself as the programs do.
pub fn expand(trace: &Trace, abridged: &[AbridgedPhase]) -> Option<Trace> {
    let mut numbers = Numbers::default();
    let mut phases = Vec::with_capacity(trace.phases.len());
    for phase in &trace.phases {
        let events = match abridged.iter().find(|abridged| abridged.name == phase.name) {
            None => numbers.renumbered(&phase.events)?,
            Some(abridged) => Expansion::new(phase, abridged, &mut numbers)?.events()?,
        };
        phases.push(Phase { name: phase.name, events });
    }
    Some(Trace { rank: trace.rank, phases, faults: trace.faults.clone() })
}

/// Kinds of objects that events number: allocations, collectives and stream events.
const NUMBERED: usize = 3;

/// New numbers by old ones, over the whole trace.
#[derive(Default)]
struct Numbers {
    new: [Vec<u32>; NUMBERED],
    /// Number of objects of each kind in the new trace.
    next: [u32; NUMBERED],
}

impl Numbers {
    /// The events with new numbers, each of them once.
    fn renumbered(&mut self, events: &[Event]) -> Option<Vec<Event>> {
        let mut renumbered = events.to_vec();
        for event in &mut renumbered {
            if let Some(kind) = makes(event) {
                self.new[kind].push(self.next[kind]);
                self.number(event, kind);
            } else if let Some((kind, number)) = refers(event) {
                *number = *self.new[kind].get(*number as usize)?;
            }
        }
        Some(renumbered)
    }

    /// Gives an event that makes something the next number.
    fn number(&mut self, event: &mut Event, kind: usize) -> u32 {
        let next = self.next[kind];
        self.next[kind] += 1;
        match event {
            Event::Alloc { id, .. } => *id = next,
            Event::Record { number, .. } => *number = next,
            _ => {}
        }
        next
    }
}

/// Kind of the numbered object that an event creates.
fn makes(event: &Event) -> Option<usize> {
    match event {
        Event::Alloc { .. } => Some(0),
        Event::Collective(_) => Some(1),
        Event::Record { .. } => Some(2),
        _ => None,
    }
}

/// Object that an event refers to: its kind and its number.
fn refers(event: &mut Event) -> Option<(usize, &mut u32)> {
    match event {
        Event::Free { id, .. } => Some((0, id)),
        Event::Wait { collective } => Some((1, collective)),
        Event::StreamWait { number, .. } | Event::HostWait { number } => Some((2, number)),
        _ => None,
    }
}

/// Returns whether two events are the same but for numbers and micro-batches.
fn alike(one: &Event, other: &Event) -> bool {
    let plain = |event: &Event| {
        let mut event = event.clone();
        match &mut event {
            Event::Alloc { id, .. } | Event::Free { id, .. } => *id = 0,
            Event::Record { number, .. } | Event::Step { number } => *number = 0,
            Event::StreamWait { number, .. } | Event::HostWait { number } => *number = 0,
            Event::Wait { collective } => *collective = 0,
            Event::Collective(collective) => collective.tag = collective.tag.map(|_| 0),
            Event::Kernel { .. } | Event::Copy { .. } | Event::Counted { .. } | Event::Use { .. } => {}
        }
        event
    };
    std::mem::discriminant(one) == std::mem::discriminant(other) && plain(one) == plain(other)
}

/// Creator of an object in a phase.
#[derive(Clone, Copy)]
struct Maker {
    /// The step in which it was made.
    step: Option<usize>,
    /// Number among what the step made of the same kind.
    position: u32,
    /// Events with the same class are alike.
    class: u32,
    /// Number among what the step made of the same class.
    ordinal: u32,
    /// The event.
    event: usize,
}

/// Classes of alike events.
#[derive(Default)]
struct Classes<'a> {
    /// By what tells most of them apart: the first event of each class, and its number.
    known: HashMap<(u64, u32), Vec<(&'a Event, u32)>>,
    next: u32,
}

impl<'a> Classes<'a> {
    fn of(&mut self, event: &'a Event) -> u32 {
        let key = match event {
            Event::Alloc { bytes, site, .. } => (*bytes, site.line),
            Event::Collective(collective) => (collective.count, collective.site.line),
            _ => (0, 0),
        };
        let known = self.known.entry(key).or_default();
        if let Some((_, class)) = known.iter().find(|(other, _)| alike(event, other)) {
            return *class;
        }
        known.push((event, self.next));
        self.next += 1;
        self.next - 1
    }
}

/// Which part of the trace is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    /// As it was recorded.
    Before,
    /// A copy of the repeated period, so many micro-batches later.
    Copy(usize),
    /// As it was recorded, but for the micro-batches that were left out.
    Behind,
}

/// By step: itself, but for receives the one `depth` messages later on the same channel, if there is one.
fn owners(steps: &[Step], depth: usize) -> Vec<usize> {
    let mut owners: Vec<usize> = (0..steps.len()).collect();
    let mut receives: HashMap<usize, Vec<usize>> = HashMap::new();
    for (at, step) in steps.iter().enumerate() {
        if let Step::Recv { from, .. } = step {
            let before = receives.entry(*from).or_default();
            before.push(at);
            if let Some(posted_by) = before.len().checked_sub(depth + 1) {
                owners[before[posted_by]] = at;
            }
        }
    }
    owners
}

/// One phase that ran an abridged program.
struct Expansion<'a> {
    phase: &'a Phase,
    program: &'a Abridged,
    /// By step: the one to which belongs what it makes.
    owners: Vec<usize>,
    numbers: &'a mut Numbers,
    /// The event with which each step begins, and that after the last.
    begins: Vec<usize>,
    /// By kind: the number of the first that the phase made, and who made it and those after it.
    first: [usize; NUMBERED],
    makers: [Vec<Maker>; NUMBERED],
    /// By kind: the numbers of what each step of the whole program made first.
    made_by: [HashMap<Step, u32>; NUMBERED],
    /// By kind: the number that the phase begins with, and for it and those after it what they are copies of.
    origin_first: [u32; NUMBERED],
    origins: [Vec<usize>; NUMBERED],
    /// For each allocation: true while it is live.
    live: Vec<bool>,
    events: Vec<Event>,
    steps: u32,
}

impl<'a> Expansion<'a> {
    fn new(
        phase: &'a Phase,
        AbridgedPhase { program, depth, .. }: &AbridgedPhase<'a>,
        numbers: &'a mut Numbers,
    ) -> Option<Expansion<'a>> {
        let first = numbers.new.each_ref().map(Vec::len);
        let mut makers: [Vec<Maker>; NUMBERED] = Default::default();
        let (mut begins, mut positions) = (Vec::new(), [0; NUMBERED]);
        let (mut classes, mut ordinals) = (Classes::default(), HashMap::new());
        let mut step = None;
        for (event, recorded) in phase.events.iter().enumerate() {
            if let Event::Step { number } = recorded {
                if *number as usize != begins.len() {
                    return None;
                }
                step = (begins.len() < program.steps.len()).then_some(begins.len());
                begins.push(event);
                positions = [0; NUMBERED];
                ordinals.clear();
            } else if let Some(kind) = makes(recorded) {
                let class = classes.of(recorded);
                let ordinal = ordinals.entry(class).or_insert(0);
                makers[kind].push(Maker { step, position: positions[kind], class, ordinal: *ordinal, event });
                *ordinal += 1;
                positions[kind] += 1;
            }
        }
        if begins.len() != program.steps.len() + 1 {
            return None;
        }
        let origin_first = numbers.next;
        let expansion = Expansion {
            phase,
            program,
            owners: owners(&program.steps, *depth),
            numbers,
            begins,
            first,
            makers,
            made_by: Default::default(),
            origin_first,
            origins: Default::default(),
            live: Vec::new(),
            events: Vec::new(),
            steps: 0,
        };
        expansion.repeats().then_some(expansion)
    }

    /// The step to which belongs what a step makes.
    fn owner(&self, step: usize) -> Step {
        self.program.steps[self.owners[step]]
    }

    fn maker(&self, kind: usize, number: u32) -> Option<&Maker> {
        self.makers[kind].get((number as usize).checked_sub(self.first[kind])?)
    }

    /// Returns whether the period after the gap repeats the one before it.
    fn repeats(&self) -> bool {
        let omitted = self.program.omitted;
        let [start, middle, end] =
            [omitted.at - omitted.steps, omitted.at, omitted.at + omitted.steps].map(|at| self.begins[at]);
        let (before, behind) = (&self.phase.events[start..middle], &self.phase.events[middle..end]);
        before.len() == behind.len()
            && before.iter().zip(behind).all(|(one, other)| self.is_later(one, other))
    }

    /// Returns whether `other` is `one`, a period later.
    fn is_later(&self, one: &Event, other: &Event) -> bool {
        let by = self.program.omitted.micro_batches;
        if let (Event::Collective(one), Event::Collective(other)) = (one, other)
            && one.tag.map(|tag| later_tag(tag, by)) != other.tag
        {
            return false;
        }
        let target = |event: &Event| {
            refers(&mut event.clone()).map(|(kind, number)| (*number, self.maker(kind, *number).copied()))
        };
        let same_target = match (target(one), target(other)) {
            (Some((_, Some(one))), Some((_, Some(other)))) if one.step.is_some() && other.step.is_some() => {
                let step = |maker: &Maker| maker.step.map(|step| self.owner(step));
                let place = |maker: &Maker| (maker.class, maker.ordinal);
                place(&one) == place(&other) && step(&one).map(|step| step.later(by)) == step(&other)
            }
            (one, other) => one.map(|(number, _)| number) == other.map(|(number, _)| number),
        };
        alike(one, other) && same_target
    }

    /// The events of the whole program.
    fn events(mut self) -> Option<Vec<Event>> {
        let omitted = self.program.omitted;
        let period = self.begins[omitted.at - omitted.steps]..self.begins[omitted.at];
        self.events.reserve(self.phase.events.len() + omitted.periods * period.len());
        self.write(0..period.end, Section::Before)?;
        for copy in 1..=omitted.periods {
            self.write(period.clone(), Section::Copy(copy * omitted.micro_batches))?;
        }
        self.write(period.end..self.phase.events.len(), Section::Behind)?;
        Some(self.events)
    }

    fn write(&mut self, range: std::ops::Range<usize>, part: Section) -> Option<()> {
        let mut step = self.begins.partition_point(|begin| *begin < range.start);
        let phase = self.phase;
        for (at, recorded) in range.clone().zip(&phase.events[range]) {
            let mut event = recorded.clone();
            if let Event::Step { number } = &mut event {
                *number = self.steps;
                self.steps += 1;
                self.begin(step, part);
                step += 1;
            } else if let Some(kind) = makes(&event) {
                self.make(&mut event, kind, at, part)?;
            } else if let Some((kind, number)) = refers(&mut event) {
                let inside = step > 0 && step <= self.program.steps.len();
                *number = self.target(kind, *number, if inside { part } else { Section::Before })?;
                if kind == 0 {
                    *self.live.get_mut((*number).checked_sub(self.origin_first[0])? as usize)? = false;
                }
            }
            self.events.push(event);
        }
        Some(())
    }

    /// Number of micro-batches by which a part comes later than it was recorded.
    fn later(&self, part: Section) -> usize {
        match part {
            Section::Before => 0,
            Section::Copy(by) => by,
            Section::Behind => self.program.omitted.all_micro_batches(),
        }
    }

    /// A step of the whole program begins: what it makes is known by it.
    fn begin(&mut self, step: usize, part: Section) {
        if step < self.program.steps.len() {
            let whole = self.owner(step).later(self.later(part));
            for (made_by, next) in self.made_by.iter_mut().zip(self.numbers.next) {
                made_by.insert(whole, next);
            }
        }
    }

    fn make(&mut self, event: &mut Event, kind: usize, at: usize, part: Section) -> Option<()> {
        if let Event::Collective(collective) = event
            && self.is_inside(at)
        {
            collective.tag = collective.tag.map(|tag| later_tag(tag, self.later(part)));
        }
        let new = self.numbers.number(event, kind);
        let index = self.makers[kind].binary_search_by_key(&at, |maker| maker.event).ok()?;
        self.origins[kind].push(index);
        if kind == 0 {
            self.live.push(true);
        }
        if !matches!(part, Section::Copy(_)) {
            self.numbers.new[kind].push(new);
        }
        Some(())
    }

    /// Returns whether an event lies between the begin of the first and the end of the last step.
    fn is_inside(&self, at: usize) -> bool {
        at >= self.begins[0] && self.begins.last().is_some_and(|end| at < *end)
    }

    /// The new number of what a recorded event refers to.
    fn target(&self, kind: usize, number: u32, part: Section) -> Option<u32> {
        let recorded = || self.numbers.new[kind].get(number as usize).copied();
        let Some(maker) = self.maker(kind, number) else { return recorded() };
        let Some(step) = maker.step.filter(|_| part != Section::Before) else { return recorded() };
        if part == Section::Behind && step >= self.program.omitted.at {
            return recorded();
        }
        let whole = self.owner(step).later(self.later(part));
        let later = self.made_by[kind].get(&whole).and_then(|first| self.find(kind, *first, maker));
        let recorded = || recorded().filter(|new| part == Section::Behind && self.fits(kind, *new, maker));
        later.or_else(recorded)
    }

    /// The object that the copied step, whose first object is `first`, created where the recorded step created `maker`.
    fn find(&self, kind: usize, first: u32, maker: &Maker) -> Option<u32> {
        let is_it = |new: &u32| {
            let same = self.origin(kind, *new).is_some_and(|origin| origin.ordinal == maker.ordinal);
            same && self.fits(kind, *new, maker)
        };
        let likely = Some(first + maker.position).filter(is_it);
        let of_step = || {
            let in_step = |(position, new): &(u32, u32)| {
                self.origin(kind, *new).is_some_and(|origin| origin.position == *position)
            };
            (0..).zip(first..).take_while(in_step).map(|(_, new)| new).find(is_it)
        };
        likely.or_else(of_step)
    }

    /// The recorded creator of object `new`.
    fn origin(&self, kind: usize, new: u32) -> Option<&Maker> {
        let index = new.checked_sub(self.origin_first[kind])?;
        self.origins[kind].get(index as usize).map(|origin| &self.makers[kind][*origin])
    }

    /// Returns whether object `new` is alike to the one that `maker` created, and live if it is memory.
    fn fits(&self, kind: usize, new: u32, maker: &Maker) -> bool {
        let is_live = || self.live[(new - self.origin_first[0]) as usize];
        self.origin(kind, new).is_some_and(|origin| origin.class == maker.class && (kind != 0 || is_live()))
    }
}
