//! Mutants of chunk programs: each action removed, swapped with the next one, moved to three other places, repeated, and without its guard.

use phalanx_plan::program::{Action, Guard};

/// A mutant.
pub struct Mutant {
    /// Its number in [`KINDS`].
    pub kind: usize,
    /// The action.
    pub action: Action,
    /// The actions that it crosses.
    pub crossed: Vec<Action>,
    /// The whole list.
    pub actions: Vec<Action>,
}

/// The kinds of mutants.
pub const KINDS: [&str; 5] = ["remove", "swap", "move", "repeat", "unguard"];

/// All mutants of a list that differ from it; `within(n)` is a random number below n.
pub fn mutants(actions: &[Action], within: &mut dyn FnMut(u64) -> u64) -> Vec<Mutant> {
    let mut mutants = Vec::new();
    for (at, action) in actions.iter().enumerate() {
        let mut add = |kind, crossed: &[Action], actions| {
            mutants.push(Mutant { kind, action: *action, crossed: crossed.to_vec(), actions });
        };
        let mut rest = actions.to_vec();
        rest.remove(at);
        let at_place = |place: usize| {
            let mut moved = rest.clone();
            moved.insert(place, *action);
            moved
        };
        add(0, &[], rest.clone());
        if at + 1 < actions.len() {
            add(1, &actions[at + 1..=at + 1], at_place(at + 1));
        }
        for _ in 0..3 {
            let place = within(actions.len() as u64) as usize;
            let crossed = if place < at { &actions[place..at] } else { &actions[at + 1..=place] };
            add(2, crossed, at_place(place));
        }
        let mut repeated = actions.to_vec();
        repeated.insert(at, *action);
        add(3, &[], repeated);
        if !action.when.is_open() {
            let mut unguarded = actions.to_vec();
            unguarded[at].when = Guard::default();
            add(4, &[], unguarded);
        }
    }
    mutants.retain(|mutant| mutant.actions != actions);
    mutants
}
