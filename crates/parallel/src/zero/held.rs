//! What a rank stores of a stage, the parts that it updates and their tiles; and its description for chunk programs ([`StageChunks`]).

use std::ops::Range;

use phalanx_layers::{Network, Share};
use phalanx_plan::program::{ChunkSpec, GradientBuffering, Piece, Policies, StageChunks, Terms};

use super::map::Map;
use super::rules::{Places, Rules};
use super::{Arithmetic, Holding, Options};

/// Some elements of a gradient that is a term of a sum over the tensor axis.
#[derive(Clone)]
pub(super) struct Term {
    pub(super) parameter: usize,
    pub(super) chunk: usize,
    /// Elements of the chunk.
    pub(super) range: Range<usize>,
    /// Their place in the buffer in which terms are summed.
    pub(super) packed: Range<usize>,
    pub(super) share: Share,
}

/// The chunks of a stage on a rank.
pub(super) struct Held {
    pub(super) map: Map,
    pub(super) rules: Rules,
    /// For each chunk: its optimizer states, by the numbers of their names, and the positions of their numbers.
    pub(super) states: Vec<Vec<(usize, Places)>>,
    /// For each chunk: what this rank updates, in tiles of at most one buffer, or of one parameter that is not cut.
    pub(super) tiles: Vec<Vec<Range<usize>>>,
    /// Terms, chunk by chunk.
    pub(super) terms: Vec<Term>,
    /// For each parameter: whether a layer has written its gradient since it was last complete.
    pub(super) written: Vec<bool>,
}

impl Held {
    /// The chunks of a stage. `place`: this rank's number on the data axis, and that of its ranks.
    pub(super) fn new(
        network: &Network,
        held: &Holding,
        (options, arithmetic): (&Options, &Arithmetic),
        place: [usize; 2],
    ) -> Held {
        let map = Map::new(network, held, (options, arithmetic.precision.compute), place);
        let rules = Rules::new(arithmetic.optimizer, arithmetic.rates, network);
        let chunks = 0..map.layout.chunks();
        let uncut = |c: usize| rules.uncut(&map, c, &map.updated(c));
        let tiles = |c: usize| tiles_of(map.updated(c).len(), options.buffer, &uncut(c));
        let states = |c: usize| {
            let is_updated = c < map.trained && held.is_updated;
            let states = 0..if is_updated { rules.names().len() } else { 0 };
            let places = |state| Some((state, Places::of(&rules, &map, (c, &map.updated(c)), state)?));
            states.filter_map(places).collect()
        };
        let (states, tiles) = (chunks.clone().map(states).collect(), chunks.map(tiles).collect());
        let written = vec![false; map.shapes.len()];
        Held { terms: terms_of(&map), map, rules, states, tiles, written }
    }

    /// The description of the chunks, behind those of earlier stages.
    pub(super) fn describe(
        &self,
        network: &Network,
        held: &Holding,
        (buffer, policies): (usize, &Policies),
        before: &[StageChunks],
    ) -> StageChunks {
        let Held { map, terms, .. } = self;
        let first = |c| map.updated(c).start;
        let piece = |Term { chunk, range, .. }: &Term| Piece {
            chunk: *chunk,
            start: (range.start - first(*chunk)) as u64,
            elements: range.len() as u64,
        };
        let all = terms.iter().map(|term| (term.share.of * term.range.len()) as u64).sum();
        let counted = |of: fn(&ChunkSpec) -> usize| before.iter().flat_map(|s| &s.chunks).map(of).sum();
        let chunk = |c: usize| self.describe_chunk(c, held.is_updated, (buffer, policies));
        StageChunks {
            index: held.stage,
            first_block: network.first_block,
            first_chunk: counted(|_| 1),
            uses: map.chunks.clone(),
            has_head: network.head.is_some(),
            lowest: network.lowest(),
            chunks: (0..map.layout.chunks()).map(chunk).collect(),
            trained: map.trained,
            is_updated: held.is_updated,
            terms: Terms { pieces: terms.iter().map(piece).collect(), elements: all },
            first_tile: counted(|chunk| chunk.tiles.len()),
            squares: map.trained_blocks(),
        }
    }

    fn describe_chunk(
        &self,
        c: usize,
        is_updated: bool,
        (buffer, policies): (usize, &Policies),
    ) -> ChunkSpec {
        let Held { map, rules, states, tiles, .. } = self;
        let (lies, own, shard) = (map.residence.of(c), map.updated(c), map.shard(c));
        let lengths =
            |tiles: Vec<Range<usize>>| -> Vec<u64> { tiles.into_iter().map(|t| t.len() as u64).collect() };
        let numbers = |(_, places): &(usize, Places)| {
            let of_tile = |tile: &Range<usize>| places.before(tile.start)..places.before(tile.end);
            lengths(tiles[c].iter().map(of_tile).collect())
        };
        let accumulates_whole = policies.buffering() == GradientBuffering::InPlace
            && policies.micro_batches > 1
            && !policies.has_tree();
        let gradients = match (c < map.trained && is_updated, accumulates_whole) {
            (false, _) => 0,
            (true, true) => map.whole(c).len(),
            (true, false) => own.len(),
        };
        let scaled = |tile: &Range<usize>| {
            let range = own.start + tile.start..own.start + tile.end;
            rules.scaled_elements_max(map, c, &range).unwrap_or(0) as u64
        };
        ChunkSpec {
            elements: map.whole(c).len() as u64,
            is_whole: map.residence.is_whole(c),
            dtype: map.types[c],
            parameters: lies.parameters,
            gradients: lies.gradients,
            optimizer: lies.optimizer,
            tiles: lengths(tiles[c].clone()),
            gradient_tiles: lengths(tiles_of(gradients, buffer, &rules.uncut(map, c, &own))),
            states: states[c].iter().map(numbers).collect(),
            scaled: tiles[c].iter().map(scaled).collect(),
            counted: (shard.start - own.start) as u64..(shard.end - own.start) as u64,
            parameter_count: map.layout.parameters(c).len() as u64,
            is_summed_over_data_alone: map.is_summed_over_data_alone(c),
        }
    }

    /// This rank's part of a parameter, if it updates some of it: its elements of its chunk.
    pub(super) fn part_of(&self, parameter: usize) -> Option<Range<usize>> {
        let chunk = self.map.layout.placed[parameter].chunk;
        let own = if chunk < self.map.trained { self.map.updated(chunk) } else { 0..0 };
        self.map.parameters_in(chunk, &own).find(|(p, _)| *p == parameter).map(|(_, range)| range)
    }
}

/// The gradients of a stage that are terms of sums over the tensor axis.
fn terms_of(map: &Map) -> Vec<Term> {
    let (mut terms, mut elements) = (Vec::new(), 0);
    for chunk in 0..map.trained {
        for (parameter, range) in map.parameters_in(chunk, &map.updated(chunk)) {
            let Some(share) = map.terms[parameter] else { continue };
            let own = elements + share.index * range.len();
            elements += share.of * range.len();
            terms.push(Term { parameter, chunk, packed: own..own + range.len(), range, share });
        }
    }
    terms
}

/// Elements cut into pieces of at most `buffer`, but not within the ranges that are not cut: one that is larger is a piece.
fn tiles_of(elements: usize, buffer: usize, uncut: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut start = 0usize;
    let next = || {
        let fits = start..start.saturating_add(buffer).min(elements);
        let cut = uncut.iter().find(|uncut| uncut.start < fits.end && fits.end < uncut.end);
        let end = match cut {
            Some(uncut) if uncut.start > start => uncut.start,
            Some(uncut) => uncut.end.min(elements),
            None => fits.end,
        };
        let tile = std::mem::replace(&mut start, end)..end;
        (!tile.is_empty()).then_some(tile)
    };
    std::iter::from_fn(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_their_elements_once() {
        assert_eq!(tiles_of(10, 4, &[]), [0..4, 4..8, 8..10]);
        assert_eq!(tiles_of(8, 4, &[]), [0..4, 4..8]);
        assert!(tiles_of(0, 8, &[]).is_empty());
        assert_eq!(tiles_of(20, 4, &[6..12, 12..14, 15..16]), [0..4, 4..6, 6..12, 12..16, 16..20]);
    }
}
