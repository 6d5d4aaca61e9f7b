//! Adds the messages between ranks to a schedule: what each rank sends and receives around its actions, in which order.
//!
//! Two ranks are connected by one channel in each direction. The sender puts all activations and gradients for the
//! receiver's stages on it in the order in which it computes them, and the receiver takes them in that order, so both know
//! every message in advance. A message that arrives before it is needed is kept. Neighbouring stages on the same rank need
//! no message.

use std::collections::{BTreeMap, HashMap};

use super::action::{Action, Kind};
use super::schedule::PipelineSchedule;

/// A message between neighbouring stages: one micro-batch's activations or gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// The sending stage.
    pub stage_from: usize,
    /// The receiving stage, one above or below.
    pub stage_to: usize,
    /// Number of the micro-batch.
    pub micro_batch: usize,
    /// True for an activation, false for a gradient.
    pub forward: bool,
}

/// All messages from one rank to another in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channel {
    /// The sending rank.
    pub from: usize,
    /// The receiving rank.
    pub to: usize,
    /// In the order of sending, which is the order of receiving.
    pub messages: Vec<Message>,
}

/// A rank's next operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Waits for the channel's next message, keeps it, and posts the receive of the one after it.
    Recv {
        /// The sending rank.
        from: usize,
        /// The message.
        message: Message,
    },
    /// Computes.
    Compute(Action),
    /// Waits until the channel's message before this one has been received, then sends without waiting.
    Send {
        /// The receiving rank.
        to: usize,
        /// The message.
        message: Message,
    },
}

/// Every channel that is used, ordered by sending and then by receiving rank.
///
/// # Panics
/// If the placement does not fit the actions; [`super::check()`] finds that.
pub fn messages(schedule: &PipelineSchedule) -> Vec<Channel> {
    let mut channels = Vec::new();
    for from in 0..schedule.ranks.len() {
        let mut by_receiver = vec![Vec::new(); schedule.ranks.len()];
        for (to, message) in schedule.actions(from).filter_map(|action| made(schedule, action)) {
            by_receiver[to].push(message);
        }
        let used = (0..).zip(by_receiver).filter(|(_, messages)| !messages.is_empty());
        channels.extend(used.map(|(to, messages)| Channel { from, to, messages }));
    }
    channels
}

/// For each rank: its actions, with their receives before and their sends after them.
///
/// # Panics
/// If an action is missing or on the wrong rank; [`super::check()`] finds that.
pub fn lower(schedule: &PipelineSchedule) -> Vec<Vec<Step>> {
    let mut incoming: Vec<BTreeMap<usize, Vec<Message>>> = vec![BTreeMap::new(); schedule.ranks.len()];
    for Channel { from, to, messages } in messages(schedule) {
        incoming[to].insert(from, messages);
    }
    incoming.iter().enumerate().map(|(rank, incoming)| steps(schedule, rank, incoming)).collect()
}

/// The steps of one rank, as [`lower`] makes them for all.
///
/// # Panics
/// As [`lower`].
pub fn lower_rank(schedule: &PipelineSchedule, rank: usize) -> Vec<Step> {
    let near = schedule.stages_of(rank).flat_map(|stage| [stage.checked_sub(1), Some(stage + 1)]);
    let senders =
        near.flatten().filter_map(|stage| schedule.placement.get(stage)).filter(|from| **from != rank);
    let to_here = |from: usize| {
        let made = schedule.actions(from).filter_map(|action| made(schedule, action));
        made.filter(|(to, _)| *to == rank).map(|(_, message)| message).collect()
    };
    let incoming: BTreeMap<usize, Vec<Message>> = senders.map(|from| (*from, Vec::new())).collect();
    let incoming = incoming.into_keys().map(|from| (from, to_here(from))).collect();
    steps(schedule, rank, &incoming)
}

/// The actions of a rank with its receives, given the messages from each sending rank, and its sends.
fn steps(schedule: &PipelineSchedule, rank: usize, incoming: &BTreeMap<usize, Vec<Message>>) -> Vec<Step> {
    let numbers: HashMap<Message, usize> =
        incoming.values().flat_map(|messages| messages.iter().copied().zip(0..)).collect();
    let mut received: BTreeMap<usize, usize> = BTreeMap::new();
    let mut steps = Vec::new();
    for action in schedule.actions(rank) {
        if let Some((from, needed)) = needed(schedule, action) {
            let next = received.entry(from).or_default();
            let end = (*next).max(numbers[&needed] + 1);
            let taken = &incoming[&from][*next..end];
            steps.extend(taken.iter().map(|&message| Step::Recv { from, message }));
            *next = end;
        }
        steps.push(Step::Compute(action));
        steps.extend(made(schedule, action).map(|(to, message)| Step::Send { to, message }));
    }
    steps
}

/// The message that an action sends, and the rank that receives it.
fn made(schedule: &PipelineSchedule, action: Action) -> Option<(usize, Message)> {
    let Action { stage, kind, micro_batch } = action;
    let (stage_to, forward) = match kind {
        Kind::Forward => (stage + 1, true),
        Kind::Backward | Kind::Input => (stage.checked_sub(1)?, false),
        Kind::Weight => return None,
    };
    let to = *schedule.placement.get(stage_to)?;
    let message = Message { stage_from: stage, stage_to, micro_batch, forward };
    (to != schedule.placement[stage]).then_some((to, message))
}

/// The message that an action receives, and the rank that sends it.
fn needed(schedule: &PipelineSchedule, action: Action) -> Option<(usize, Message)> {
    let Action { stage, kind, micro_batch } = action;
    let (stage_from, forward) = match kind {
        Kind::Forward => (stage.checked_sub(1)?, true),
        Kind::Backward | Kind::Input => (stage + 1, false),
        Kind::Weight => return None,
    };
    let from = *schedule.placement.get(stage_from)?;
    let message = Message { stage_from, stage_to: stage, micro_batch, forward };
    (from != schedule.placement[stage]).then_some((from, message))
}
