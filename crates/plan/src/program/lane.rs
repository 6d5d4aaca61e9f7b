//! The only look-ahead: items in a known order of uses, of which some begin ahead of their use and some end behind it.

use std::collections::VecDeque;

use crate::order::Lookahead;

/// Items (chunks) with their order of uses. The order may be empty: then nothing begins ahead and nothing is kept.
pub(super) struct Lane {
    uses: Lookahead,
    position: usize,
    ahead: usize,
    behind: usize,
    leaving: VecDeque<usize>,
}

impl Lane {
    /// `ahead`: distinct items that begin before their use; `behind`: items that end while later ones are used.
    pub(super) fn new(order: Vec<u32>, ahead: usize, behind: usize) -> Lane {
        Lane { uses: Lookahead::new(order), position: 0, ahead, behind, leaving: VecDeque::new() }
    }

    /// The next use begins.
    pub(super) fn advance(&mut self) {
        self.position += 1;
    }

    /// The items that should have begun: the next distinct ones.
    pub(super) fn ahead(&self) -> Vec<usize> {
        self.uses.upcoming(self.position).take(self.ahead).map(|item| item as usize).collect()
    }

    /// Returns whether an item is used again so soon that it should stay.
    pub(super) fn keeps(&self, item: usize) -> bool {
        self.uses.upcoming(self.position).take(self.ahead.max(1)).any(|next| next as usize == item)
    }

    /// An item begins to end; returns the items that must have ended now, the first ones first.
    pub(super) fn leave(&mut self, item: usize) -> Vec<usize> {
        self.leaving.push_back(item);
        let over = self.leaving.len().saturating_sub(self.behind);
        self.leaving.iter().take(over).copied().collect()
    }

    /// The item that began to end first.
    pub(super) fn first_leaving(&self) -> Option<usize> {
        self.leaving.front().copied()
    }

    /// An item has ended.
    pub(super) fn end(&mut self, item: usize) {
        self.leaving.retain(|other| *other != item);
    }
}
