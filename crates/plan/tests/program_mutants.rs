//! Mutants of programs: each action removed, swapped with the next one, moved to three other places, repeated, and without its guard. The
//! check refuses them, or they cross only actions with which they share nothing.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_plan::program::{Action, Op, PHASES, Program, RankChunks, Span, Token, Work, check};
use phalanx_testing::program_mutants::{KINDS, Mutant, mutants};

use crate::generator::Generator;
use crate::program::{programs, ranks};

/// Something that actions read or write.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Thing {
    Buffer(u32),
    Work(Token),
    /// The flags that say which gradients of a chunk are written.
    Written(usize),
    /// The order of block runs and pauses.
    Runs,
    /// The order of collectives.
    Collectives,
    Decision,
    /// The facts for which a rank changes nothing in the updates of a chunk.
    Masked(usize),
}

/// The buffers that an action reads, and those that it writes.
fn things(program: &Program, action: &Action) -> [BTreeSet<Thing>; 2] {
    let (mut reads, mut writes) = (BTreeSet::new(), BTreeSet::new());
    let mut pair = |from: u32, into: u32| {
        reads.insert(Thing::Buffer(from));
        writes.insert(Thing::Buffer(into));
    };
    match action.op {
        Op::Take(b) | Op::Free(b) => pair(b.0, b.0),
        Op::Convert { from, into }
        | Op::Add { from, into }
        | Op::CopyPart { from, into }
        | Op::Pack { from, into }
        | Op::Unpack { from, into }
        | Op::Restore { from, into }
        | Op::CountNotFinite { from, into }
        | Op::Total { from, into } => pair(from.0, into.0),
        // Each chunk has blocks of its own.
        Op::Count { from, into } => reads.extend([from, into].map(|b| Thing::Buffer(b.0))),
        Op::Clear(b) => {
            pair(b.0, b.0);
            writes.insert(Thing::Written(program.spec(b).of));
        }
        Op::Look(b) | Op::Factor(b) => pair(b.0, b.0),
        Op::Swap(one, other) => {
            pair(one.0, other.0);
            pair(other.0, one.0);
        }
        Op::Mask(b) => {
            pair(b.0, b.0);
            writes.insert(Thing::Masked(program.spec(b).of));
        }
        Op::Norm(b) => {
            pair(b.0, b.0);
            writes.insert(Thing::Decision);
        }
        Op::Pause => writes.extend([Thing::Runs, Thing::Decision]),
        Op::Fetch => drop(writes.insert(Thing::Decision)),
        Op::Update { gradient, parameters, states } => {
            pair(gradient.0, parameters.0);
            let (read, written) = program.operands(states);
            written.iter().for_each(|state| pair(gradient.0, state.0));
            reads.extend(read.iter().map(|b| Thing::Buffer(b.0)));
            reads.extend([Thing::Decision, Thing::Masked(program.spec(gradient).of)]);
        }
        Op::Run { operands, .. } => run_things(program, operands, &mut reads, &mut writes),
        Op::Start { token, work } => {
            work_things((program, work), &mut reads, &mut writes);
            writes.insert(Thing::Work(token));
            if work.is_collective() {
                writes.insert(Thing::Collectives);
            }
        }
        Op::Wait(token) | Op::Land(token) => {
            let started = program.actions.iter().find_map(|action| match action.op {
                Op::Start { token: own, work } if own == token => Some(work),
                _ => None,
            });
            started.into_iter().for_each(|work| {
                let (mut read, mut written) = (BTreeSet::new(), BTreeSet::new());
                work_things((program, work), &mut read, &mut written);
                reads.extend(read);
                writes.extend(written);
            });
            writes.insert(Thing::Work(token));
        }
    }
    if !action.when.is_open() {
        reads.insert(Thing::Decision);
    }
    [reads, writes]
}

fn run_things(program: &Program, operands: Span, reads: &mut BTreeSet<Thing>, writes: &mut BTreeSet<Thing>) {
    let (read, written) = program.operands(operands);
    reads.extend(read.iter().map(|b| Thing::Buffer(b.0)));
    writes.extend(written.iter().map(|b| Thing::Buffer(b.0)));
    writes.extend(written.iter().map(|b| Thing::Written(program.spec(*b).of)));
    writes.insert(Thing::Runs);
}

fn work_things((program, work): (&Program, Work), reads: &mut BTreeSet<Thing>, writes: &mut BTreeSet<Thing>) {
    reads.extend(program.reads(work).iter().map(|b| Thing::Buffer(b.0)));
    writes.extend(program.writes(work).iter().map(|b| Thing::Buffer(b.0)));
}

/// Returns whether data, a token, a decision or the order of runs or collectives says which of two actions comes first.
fn depend(program: &Program, one: &Action, other: &Action) -> bool {
    let ([reads, writes], [other_reads, other_writes]) = (things(program, one), things(program, other));
    let meets = |a: &BTreeSet<Thing>, b: &BTreeSet<Thing>| !a.is_disjoint(b);
    meets(&writes, &other_writes) || meets(&writes, &other_reads) || meets(&reads, &other_writes)
}

/// Counts of mutants of one kind: all, refused, and accepted ones that cross only actions with which they share nothing.
#[derive(Default, Debug, PartialEq, Eq)]
struct Counts([usize; 3]);

/// Counts the mutants of a rank's programs, and by kind and operation the accepted ones that share something with what they cross.
fn count(rank: &RankChunks, counts: &mut [Counts; 5], others: &mut BTreeMap<String, usize>) {
    let originals = programs(rank);
    let peaks = check(rank, &originals, None).unwrap();
    let mut random = Generator(7);
    for (number, _) in PHASES.iter().enumerate() {
        let original = &originals[number];
        for Mutant { kind, action, crossed, actions } in
            mutants(&original.actions, &mut |below| random.within(0, below - 1))
        {
            let mut changed = originals.clone();
            changed[number].actions = actions;
            let Counts([all, refused, free]) = &mut counts[kind];
            *all += 1;
            let is_refused = check(rank, &changed, Some(peaks)).is_err()
                || phalanx_plan::program::check::agree(original, &changed[number]).is_err();
            let is_free =
                !crossed.is_empty() && !crossed.iter().any(|other| depend(original, &action, other));
            match (is_refused, is_free) {
                (true, _) => *refused += 1,
                (false, true) => *free += 1,
                (false, false) => {
                    let op = format!("{:?}", action.op);
                    let op = op.split([' ', '(']).next().unwrap_or_default();
                    *others.entry(format!("{} {op}", KINDS[kind])).or_default() += 1;
                }
            }
        }
    }
}

#[test]
fn mutants_are_refused_or_change_nothing() {
    let (mut counts, mut others) = (<[Counts; 5]>::default(), BTreeMap::new());
    for (_, rank) in ranks() {
        count(&rank, &mut counts, &mut others);
    }
    let counts: Vec<_> = KINDS.iter().zip(&counts).map(|(kind, Counts(counts))| (*kind, *counts)).collect();
    let expected: Vec<_> = OTHERS.iter().map(|(what, count, _)| (what.to_string(), *count)).collect();
    assert_eq!((counts, others.into_iter().collect::<Vec<_>>()), (COUNTS.to_vec(), expected));
}

/// For each kind: all mutants, the refused ones, and the accepted ones that cross only actions with which they share nothing.
const COUNTS: [(&str, [usize; 3]); 5] = [
    ("remove", [9947, 9947, 0]),
    ("swap", [9803, 5354, 4445]),
    ("move", [29424, 26560, 2800]),
    ("repeat", [9947, 9308, 0]),
    ("unguard", [1739, 1739, 0]),
];

/// The other accepted mutants: how many, and why they change no bit.
const OTHERS: [(&str, usize, &str); 14] = [
    ("move Land", 13, "to behind the publication, which then ends in its phase"),
    ("move Pause", 47, "another pause takes its place, or nothing is read between both places"),
    ("move Restore", 4, "over the updates, which no step executes beside it"),
    ("repeat Convert", 114, "it writes the same again"),
    ("repeat CopyPart", 103, "it writes the same again"),
    ("repeat CountNotFinite", 8, "it writes the same again"),
    ("repeat Factor", 8, "it writes the same again"),
    ("repeat Land", 179, "nothing is in flight any more"),
    ("repeat Look", 145, "it reads alone"),
    ("repeat Mask", 8, "it reads alone"),
    ("repeat Norm", 44, "it writes the same again"),
    ("repeat Restore", 18, "it writes the same again"),
    ("repeat Unpack", 12, "it writes the same again"),
    ("swap Pause", 4, "with another pause"),
];
