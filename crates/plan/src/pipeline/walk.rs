//! Runs a schedule step by step; the only module that decides when a rank waits.
//!
//! A rank runs its steps in order. A channel of depth d has d receives posted ahead: the first d at the start, another
//! whenever one completes. A send does not wait for its receiver, but a channel has at most d sends in flight: before
//! another, the sender waits until the d-th last has met its receive. So a channel holds at most d messages that were
//! received but not used yet, and d in flight; then the sender blocks. A message arrives some time after it was sent; its
//! sender goes on meanwhile.
//!
//! Each rank is sequential and each channel a queue of bounded length with one reader and one writer, so
//! times and deadlocks do not depend on the order in which this program looks at the ranks (Kahn, "The
//! semantics of a simple language for parallel programming", 1974).

use std::collections::{HashMap, VecDeque};
use std::fmt;

use super::action::Action;
use super::lower::{Message, Step};
use super::timeline::Span;

/// A rank that cannot continue, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The rank.
    pub rank: usize,
    /// The cell of the action that it cannot begin, or whose result it cannot send.
    pub cell: usize,
    /// That action.
    pub action: Action,
    /// The step that cannot complete: a receive before the action or a send after it.
    pub step: Step,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stuck { rank, cell, action, step } = self;
        let what = |message: &Message| if message.forward { "activation" } else { "gradient" };
        match step {
            Step::Recv { from, message } => write!(
                f,
                "rank {rank}, cell {cell}: `{action}` waits for the {} of micro-batch {} from stage {} on \
                 rank {from}",
                what(message),
                message.micro_batch,
                message.stage_from,
            ),
            Step::Send { to, message } => write!(
                f,
                "rank {rank}, cell {cell}: the {} that `{action}` sends to stage {} waits until rank {to} \
                 has received the messages before it",
                what(message),
                message.stage_to,
            ),
            Step::Compute(_) => write!(f, "rank {rank}, cell {cell}: `{action}`"),
        }
    }
}

/// A channel's messages so far: when each arrived, and when its receive completed.
#[derive(Default)]
struct Queue {
    arrived: Vec<f64>,
    received: Vec<f64>,
}

impl Queue {
    /// When message `number` has met its receive; `None` if one of the two is missing. The receive of a message is posted
    /// when that of the message `depth` before it completes.
    fn met(&self, number: usize, depth: usize) -> Option<f64> {
        let posted = number.checked_sub(depth).map_or(Some(0.0), |before| self.received.get(before).copied());
        Some(posted?.max(*self.arrived.get(number)?))
    }
}

/// The progress of a rank.
#[derive(Default)]
struct RankProgress {
    /// Number of the next step.
    next: usize,
    clock: f64,
    spans: Vec<Span>,
}

struct Walk<'a, C> {
    steps: &'a [Vec<Step>],
    cost: C,
    latency: f64,
    depth: usize,
    rows: Vec<RankProgress>,
    /// Keyed by sending and receiving rank.
    queues: HashMap<(usize, usize), Queue>,
}

/// Runs every rank to its end: by rank, when each action ran. A message takes `latency`; channels have depth `depth`.
///
/// # Errors
/// The ranks that wait for each other; `cell` is then the number of the action among the rank's actions.
pub(super) fn walk(
    steps: &[Vec<Step>],
    cost: impl Fn(Action) -> f64,
    latency: f64,
    depth: usize,
) -> Result<Vec<Vec<Span>>, Vec<Stuck>> {
    let rows = steps.iter().map(|_| RankProgress::default()).collect();
    let mut walk = Walk { steps, cost, latency, depth, rows, queues: HashMap::new() };
    let mut ready: VecDeque<usize> = (0..steps.len()).collect();
    let mut is_ready = vec![true; steps.len()];
    while let Some(rank) = ready.pop_front() {
        is_ready[rank] = false;
        while let Some(step) = steps[rank].get(walk.rows[rank].next) {
            if !walk.take(rank, *step) {
                break;
            }
            walk.rows[rank].next += 1;
            if let Step::Recv { from: peer, .. } | Step::Send { to: peer, .. } = *step
                && !std::mem::replace(&mut is_ready[peer], true)
            {
                ready.push_back(peer);
            }
        }
    }
    let stuck: Vec<Stuck> = (0..steps.len()).filter_map(|rank| walk.stuck(rank)).collect();
    if stuck.is_empty() { Ok(walk.rows.into_iter().map(|row| row.spans).collect()) } else { Err(stuck) }
}

impl<C: Fn(Action) -> f64> Walk<'_, C> {
    /// Executes a step; false if it has to wait.
    fn take(&mut self, rank: usize, step: Step) -> bool {
        match step {
            Step::Compute(action) => {
                let row = &mut self.rows[rank];
                let span = Span { action, start: row.clock, end: row.clock + (self.cost)(action) };
                row.clock = span.end;
                row.spans.push(span);
                true
            }
            Step::Recv { from, .. } => self.receive(from, rank),
            Step::Send { to, .. } => self.send(rank, to),
        }
    }

    /// Completes the oldest posted receive of a channel.
    fn receive(&mut self, from: usize, to: usize) -> bool {
        let depth = self.depth;
        let queue = self.queues.entry((from, to)).or_default();
        let Some(met) = queue.met(queue.received.len(), depth) else { return false };
        let row = &mut self.rows[to];
        row.clock = row.clock.max(met);
        queue.received.push(row.clock);
        true
    }

    /// Sends, if the channel has room.
    fn send(&mut self, from: usize, to: usize) -> bool {
        let depth = self.depth;
        let queue = self.queues.entry((from, to)).or_default();
        let before = queue.arrived.len().checked_sub(depth);
        let Some(free) = before.map_or(Some(0.0), |before| queue.met(before, depth)) else { return false };
        let row = &mut self.rows[from];
        row.clock = row.clock.max(free);
        queue.arrived.push(row.clock + self.latency);
        true
    }

    /// The step at which a rank has stopped, and the action that it belongs to.
    fn stuck(&self, rank: usize) -> Option<Stuck> {
        let step = *self.steps[rank].get(self.rows[rank].next)?;
        let computed = self.rows[rank].spans.len();
        let mut actions = self.steps[rank].iter().filter_map(|step| match step {
            Step::Compute(action) => Some(*action),
            _ => None,
        });
        let cell = if let Step::Send { .. } = step { computed - 1 } else { computed };
        Some(Stuck { rank, cell, action: actions.nth(cell)?, step })
    }
}
