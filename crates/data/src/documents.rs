//! The documents of a sample, where one does not see another: a token ends each.
//!
//! A sample begins within a document that began before it, as a rule: what there is of that counts as a document. The last token
//! of a document is not trained to predict the first one of the next, as in `transformers`, where the label of that is -100.

use crate::masking::NOT_PREDICTED;

/// Ends of documents in a sequence of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentEnds {
    /// The token that each ends with.
    pub end_token: u32,
}

impl DocumentEnds {
    /// Writes the position of each of `tokens` in its document, from 0.
    pub fn positions(&self, tokens: &[u32], to: &mut [u32]) {
        let mut next = 0;
        for (token, to) in tokens.iter().zip(to) {
            *to = next;
            next = if *token == self.end_token { 0 } else { next + 1 };
        }
    }

    /// Leaves out the targets of last tokens: [`NOT_PREDICTED`].
    pub fn part(&self, tokens: &[u32], targets: &mut [u32]) {
        for (token, target) in tokens.iter().zip(targets) {
            if *token == self.end_token {
                *target = NOT_PREDICTED;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_restart_behind_each_end_and_what_follows_it_is_no_target() {
        let documents = DocumentEnds { end_token: 9 };
        // The end of a document, a whole one, an empty one, the beginning of one.
        let tokens = [4, 9, 5, 6, 9, 9, 7, 8];
        let (mut positions, mut targets) = ([77; 8], [9, 5, 6, 9, 9, 7, 8, 3]);
        documents.positions(&tokens, &mut positions);
        documents.part(&tokens, &mut targets);
        assert_eq!(positions, [0, 1, 0, 1, 2, 0, 0, 1]);
        let none = NOT_PREDICTED;
        assert_eq!(targets, [9, none, 6, 9, none, none, 8, 3]);
    }
}
