//! Updates that the host computes during the next step: the tokens of their tiles are carried over phases.
//!
//! At the end of a step, the update of the step before is over: its parameters go to the device. Then the update of this step starts.
//! Gradients have two places in host memory, and so has their factor: an update reads one of them while backward writes the other.

use crate::trace::Memory;

use super::action::{Buffer, Decision, Op, Token, Work};
use super::builder::Builder;
use super::gradients::GradientPass;
use super::host_updates::{bring_factor, host_operands, on_device};
use super::list::{BufferSpec, Role};
use super::order::optimizer_roles;
use super::parameters::publish;

/// The tiles of a stage's trained chunks, each with the token of its update.
fn tiles<'a>(gradients: &'a GradientPass) -> impl Iterator<Item = (usize, usize, Token)> + use<'a> {
    let GradientPass { stage, policies, .. } = gradients;
    let tiles = (0..stage.trained).flat_map(|c| {
        let count = stage.tiles(policies, c).map_or(1, <[u64]>::len);
        (0..count).map(move |tile| (c, tile))
    });
    let first = stage.first_tile;
    (first..).zip(tiles).map(|(number, (c, tile))| (c, tile, Token::updated(number)))
}

/// Finishes the update of a stage that runs, and starts that of this step.
pub(super) fn update(list: &mut Builder, gradients: &GradientPass) {
    let stage = gradients.stage;
    let factors = [0, 1].map(|number| list.buffer(Role::Factor(number + 1), stage.index));
    bring_factor(list, None, |_| factors[0]);
    finish(list, gradients);
    list.emit(Op::Swap(factors[0], factors[1]));
    for (c, tile, token) in tiles(gradients) {
        let of = stage.first_chunk + c;
        let twins = [Role::Sum, Role::Twin].map(|role| list.tile(role, of, tile));
        list.emit(Op::Swap(twins[0], twins[1]));
        let mut roles: Vec<Role> = optimizer_roles(gradients.policies, stage, c).collect();
        roles.extend([Role::Twin, Role::Updated]);
        roles.extend((stage.scaled(gradients.policies, c)[tile] > 0).then_some(Role::Scaled));
        let parts: Vec<(Role, Buffer)> =
            roles.into_iter().map(|role| (role, list.tile(role, of, tile))).collect();
        let operands = host_operands(list, parts.into_iter(), factors[1]);
        list.emit(Op::Start { token, work: Work::HostUpdate { operands } });
    }
}

/// Waits for the update of a stage that runs, if there is one; its parameters go to the device and to the other ranks. Device memory is
/// taken nevertheless, so that all steps are alike.
pub(super) fn finish(list: &mut Builder, gradients: &GradientPass) {
    let GradientPass { stage, policies, .. } = gradients;
    let mut last: Option<(Buffer, Token)> = None;
    let land = |list: &mut Builder, c: usize, (window, token): (Buffer, Token)| {
        let into = list.buffer(Role::Parameters, stage.first_chunk + c);
        list.only_if(Decision::Pending, true, |list| {
            list.emit(Op::Wait(token));
            list.emit(Op::CopyPart { from: window, into });
        });
        list.emit(Op::Free(window));
    };
    let all: Vec<_> = tiles(gradients).collect();
    for (at, (c, tile, update)) in all.iter().enumerate() {
        let from = list.tile(Role::Updated, stage.first_chunk + c, *tile);
        let spec = *list.spec(from);
        debug_assert_eq!(spec.memory, Memory::Host);
        let window = list.take_as(on_device(BufferSpec { role: Role::Parameters, ..spec }));
        let token = list.next_token();
        list.only_if(Decision::Pending, true, |list| {
            list.emit(Op::Wait(*update));
            list.emit(Op::Start { token, work: Work::FromTiles { tiles: 1, from, into: window } });
        });
        if let Some(before) = last.replace((window, token)) {
            land(list, *c, before);
        }
        if all.get(at + 1).is_none_or(|next| next.0 != *c) {
            last.take().into_iter().for_each(|tile| land(list, *c, tile));
            publish(list, policies, stage, *c);
        }
    }
}
