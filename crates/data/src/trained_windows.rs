//! Which evaluation windows are among tokens on which a model was trained: their loss says nothing about other text.
//!
//! A window is found wherever it begins: samples are cut at offsets that differ from epoch to epoch. The hash of the
//! last `seq` tokens follows from that of the ones before (Karp and Rabin), so all tokens are read once.

use std::collections::HashMap;

use crate::{EvaluationWindows, Result, Tokens};

/// Tokens that are read at once.
const PIECE: usize = 1 << 16;

/// Odd, so that no token is lost from the hash.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl EvaluationWindows {
    /// The number of windows whose tokens `trained` has, in their order, one after the other.
    ///
    /// # Errors
    /// Those of [`Tokens::read`].
    pub fn count_within(&self, trained: &Tokens) -> Result<usize> {
        let seq = self.seq();
        let mut wanted: HashMap<u64, Vec<Vec<u32>>> = HashMap::new();
        let (mut window, mut targets) = (vec![0; seq], vec![0; seq]);
        for index in 0..self.len() {
            self.fill(index, &mut window, &mut targets)?;
            wanted.entry(hash(&window)).or_default().push(window.clone());
        }
        // Most hashes are unknown by their first bits, without a search.
        let first_bits = |hash: u64| (hash >> 48) as usize;
        let mut known = vec![false; 1 << 16];
        wanted.keys().for_each(|hash| known[first_bits(*hash)] = true);
        let leaving = (0..seq).fold(1u64, |power, _| power.wrapping_mul(FACTOR));
        let (mut rolling, mut found) = (0u64, 0);
        let (mut coming, mut going) = (vec![0; PIECE], vec![0; PIECE]);
        for start in (0..trained.len()).step_by(PIECE) {
            let coming = &mut coming[..PIECE.min(trained.len() - start)];
            trained.read(start, coming)?;
            // The tokens that are `seq` before these; none in front of the first.
            let none = seq.saturating_sub(start).min(coming.len());
            let going = &mut going[..coming.len()];
            going[..none].fill(0);
            if none < going.len() {
                trained.read(start + none - seq, &mut going[none..])?;
            }
            for (at, (token, gone)) in coming.iter().zip(going.iter()).enumerate() {
                let left = if at < none { 0 } else { value(*gone).wrapping_mul(leaving) };
                rolling = rolling.wrapping_mul(FACTOR).wrapping_add(value(*token)).wrapping_sub(left);
                let end = start + at + 1;
                if end < seq || !known[first_bits(rolling)] {
                    continue;
                }
                let Some(same) = wanted.get_mut(&rolling) else { continue };
                trained.read(end - seq, &mut window)?;
                let before = same.len();
                same.retain(|other| *other != window);
                found += before - same.len();
                if same.is_empty() {
                    wanted.remove(&rolling);
                }
            }
        }
        Ok(found)
    }
}

fn value(token: u32) -> u64 {
    u64::from(token) + 1
}

fn hash(window: &[u32]) -> u64 {
    window.iter().fold(0, |hash: u64, token| hash.wrapping_mul(FACTOR).wrapping_add(value(*token)))
}
