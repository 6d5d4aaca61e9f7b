//! Part of each parameter that the optimizer needs at a time, and the positions of the states that it keeps of it.
//!
//! Parameters begin at whole blocks of 4,096 elements, and shards and tiles are cut at such blocks: so they cut elements and blocks of
//! an optimizer nowhere else. A parameter that it updates as a whole lies in one shard (`ChunkLayout`), and tiles are not cut in it.

use std::ops::Range;
use std::sync::Arc;

use phalanx_layers::{Network, ParameterSpec};
use phalanx_optim::{Extent, KeptState, Optimizer, OwnRates, RatesByName, Spread, Update, UpdatedParameter};
use phalanx_plan::Segment;
use phalanx_tensor::{NORM_BLOCK, View, ViewMut};

use super::map::Map;

/// A parameter as the optimizer sees it.
pub fn updated(spec: &ParameterSpec) -> UpdatedParameter {
    UpdatedParameter { name: spec.name.clone(), kind: spec.kind, shape: spec.shape.clone() }
}

/// The optimizer's rule for one parameter: extent, rates and states.
struct Rule {
    parameter: Arc<UpdatedParameter>,
    extent: Extent,
    rates: OwnRates,
    /// Its states, in the optimizer's order: the number of the name, and the state. None of a frozen parameter.
    states: Vec<(usize, KeptState)>,
}

/// A parameter of the network, in which several may be joined.
struct Joined {
    /// The elements of each of them.
    members: Vec<Range<u64>>,
    /// The first of their rules.
    first: usize,
    /// True if each of them has a rule. Otherwise one rule is for all: our own optimizers update parameters of equal rates
    /// together.
    is_apart: bool,
}

/// The optimizer's rules for the parameters of a stage.
pub(super) struct Rules {
    /// Names of the states, each once.
    names: Vec<&'static str>,
    of: Vec<Rule>,
    joined: Vec<Joined>,
}

/// A part of a chunk that belongs to one rule.
pub(super) struct Piece {
    pub(super) rule: usize,
    /// Elements of the rule's parameter.
    in_parameter: Range<u64>,
    pub(super) in_chunk: Range<usize>,
}

/// The part of a segment that belongs to a parameter of files.
pub(super) struct Member {
    /// Its number among those that are joined.
    pub(super) number: usize,
    pub(super) rule: usize,
    pub(super) in_member: Range<u64>,
    pub(super) in_chunk: Range<usize>,
}

/// The tensors of an update: states with the numbers of their names.
pub(super) struct Tensors<'a> {
    pub(super) parameters: ViewMut<'a>,
    pub(super) rounded: Option<ViewMut<'a>>,
    pub(super) gradient: View<'a>,
    pub(super) factor: View<'a>,
    /// As long as the parameter where the rule is for all of it ([`Rules::scaled_elements`]).
    pub(super) scaled: Option<ViewMut<'a>>,
    pub(super) states: Vec<(usize, ViewMut<'a>)>,
}

impl Rules {
    /// # Panics
    /// For a rule that contradicts itself.
    pub(super) fn new(optimizer: &Optimizer, rates: &RatesByName, network: &Network) -> Rules {
        let rates_of = |spec: &ParameterSpec| rates.get(&spec.name).copied().unwrap_or_default();
        let mut names: Vec<&'static str> = Vec::new();
        let mut number = |name: &'static str| {
            names.iter().position(|known| *known == name).unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            })
        };
        let mut rule = |spec: &ParameterSpec| {
            let parameter = updated(spec);
            let kept = if spec.trained { optimizer.kept(&parameter) } else { Ok(Vec::new()) };
            let kept = kept.expect("the rule was checked with the whole model");
            let states = kept.into_iter().map(|state| (number(state.spec.name), state)).collect();
            let extent = if spec.trained { optimizer.extent(&parameter) } else { Extent::Elements };
            Rule { parameter: Arc::new(parameter), extent, rates: rates_of(&spec.members()[0]), states }
        };
        let is_own = matches!(optimizer, Optimizer::Own(_));
        let (mut of, mut joined) = (Vec::new(), Vec::new());
        for spec in &network.parameters {
            let is_apart =
                is_own || spec.members().windows(2).any(|pair| rates_of(&pair[0]) != rates_of(&pair[1]));
            let all = spec.of_members(0..spec.elements() as u64);
            let members = all.map(|(_, own, first)| first as u64..first as u64 + own.end).collect();
            joined.push(Joined { members, first: of.len(), is_apart });
            let rules = if is_apart { spec.members() } else { std::slice::from_ref(spec) };
            of.extend(rules.iter().map(&mut rule));
        }
        Rules { names, of, joined }
    }

    /// Names of the states of all parameters, each once.
    pub(super) fn names(&self) -> &[&'static str] {
        &self.names
    }

    /// Relation of the numbers of state `state` to the elements of a rule's parameter; None when it has no such state.
    pub(super) fn spread(&self, rule: usize, state: usize) -> Option<Spread> {
        let found = self.of[rule].states.iter().find(|(number, _)| *number == state);
        found.map(|(_, kept)| kept.spread)
    }

    /// The parameters of files in a segment of a parameter of the network.
    pub(super) fn members(&self, segment: &Segment) -> Vec<Member> {
        let Joined { members, first, is_apart } = &self.joined[segment.parameter];
        let part = |(number, member): (usize, &Range<u64>)| {
            let both = segment.in_parameter.start.max(member.start)..segment.in_parameter.end.min(member.end);
            let in_chunk = |at: u64| (segment.in_chunk.start + at - segment.in_parameter.start) as usize;
            (!both.is_empty()).then(|| Member {
                number,
                rule: if *is_apart { first + number } else { *first },
                in_member: both.start - member.start..both.end - member.start,
                in_chunk: in_chunk(both.start)..in_chunk(both.end),
            })
        };
        members.iter().enumerate().filter_map(part).collect()
    }

    /// The parts of elements `range` of a chunk, each of one rule.
    pub(super) fn pieces(&self, map: &Map, chunk: usize, range: &Range<usize>) -> Vec<Piece> {
        let segments = map.layout.segments(chunk, range.start as u64..range.end as u64);
        let of_segment = |segment: Segment| {
            if self.joined[segment.parameter].is_apart {
                let members = self.members(&segment).into_iter();
                let piece = |Member { rule, in_member, in_chunk, .. }| Piece {
                    rule,
                    in_parameter: in_member,
                    in_chunk,
                };
                return members.map(piece).collect::<Vec<Piece>>();
            }
            let Segment { parameter, in_parameter, in_chunk } = segment;
            let in_chunk = in_chunk.start as usize..in_chunk.end as usize;
            vec![Piece { rule: self.joined[parameter].first, in_parameter, in_chunk }]
        };
        segments.flat_map(of_segment).collect()
    }

    /// The parameters in elements `part` of a chunk that no tile may cut, in elements of the part, each to the end of its last block.
    pub(super) fn uncut(&self, map: &Map, chunk: usize, part: &Range<usize>) -> Vec<Range<usize>> {
        let segments = map.layout.segments(chunk, part.start as u64..part.end as u64);
        let is_uncut = |segment: &Segment| {
            self.members(segment).iter().any(|member| self.of[member.rule].extent == Extent::Whole)
        };
        let uncut = segments.filter(is_uncut).map(|segment| {
            let elements = segment.in_parameter.end - segment.in_parameter.start;
            let all = map.layout.placed[segment.parameter].elements;
            assert_eq!(elements, all, "a parameter that is updated as a whole is cut by a shard");
            let start = segment.in_chunk.start as usize - part.start;
            start..start + (elements as usize).next_multiple_of(NORM_BLOCK)
        });
        uncut.collect()
    }

    /// The elements of a piece whose update needs memory for its scaled gradient: those of a parameter that is updated as a whole.
    pub(super) fn scaled_elements(&self, piece: &Piece) -> Option<usize> {
        (self.of[piece.rule].extent == Extent::Whole).then_some(piece.in_chunk.len())
    }

    /// The most elements of memory for a scaled gradient that pieces of elements `range` of a chunk need, one after the other.
    pub(super) fn scaled_elements_max(&self, map: &Map, chunk: usize, range: &Range<usize>) -> Option<usize> {
        self.pieces(map, chunk, range).iter().filter_map(|piece| self.scaled_elements(piece)).max()
    }

    /// The update of a range of a parameter.
    pub(super) fn update<'a>(
        &'a self,
        rule: usize,
        (number, lr): (u64, f32),
        tensors: Tensors<'a>,
    ) -> Update<'a> {
        let Rule { parameter: of, extent, rates: OwnRates { lr_factor, weight_decay }, states: kept } =
            &self.of[rule];
        let (lr, weight_decay) = ((f64::from(lr) * lr_factor) as f32, *weight_decay);
        let Tensors { parameters, rounded, gradient, factor, scaled, states } = tensors;
        let mut given: Vec<Option<(usize, ViewMut)>> = states.into_iter().map(Some).collect();
        let mut take = |wanted: usize| {
            let found =
                given.iter_mut().find(|state| state.as_ref().is_some_and(|(number, _)| *number == wanted));
            found.and_then(Option::take).expect("a state of each name is stored").1
        };
        let is_whole = *extent == Extent::Whole;
        let state = |(number, kept): &(usize, KeptState)| {
            let flat = take(*number);
            if is_whole { flat.reshape(kept.spec.shape.as_slice()) } else { flat }
        };
        let states = kept.iter().map(state).collect();
        let shape = of.shape.as_slice();
        let (parameters, rounded, gradient) = match is_whole {
            true => {
                (parameters.reshape(shape), rounded.map(|view| view.reshape(shape)), gradient.reshape(shape))
            }
            false => (parameters, rounded, gradient),
        };
        Update { number, lr, weight_decay, of, parameters, rounded, gradient, factor, scaled, states }
    }
}

/// Positions of a state's numbers, for the part of a chunk that a rank updates.
pub(super) enum Places {
    /// One for each element, with those between parameters.
    Like,
    /// Those of each parameter that has the state, one behind another.
    Packed(Vec<PackedState>),
}

/// The numbers of one parameter's state.
pub(super) struct PackedState {
    /// Elements of the chunk's part.
    elements: Range<usize>,
    spread: Spread,
    /// The first of its numbers.
    first: usize,
}

impl Places {
    /// Those of state `state` for elements `part` of a chunk; None when no parameter of the chunk has it.
    pub(super) fn of(
        rules: &Rules,
        map: &Map,
        (chunk, part): (usize, &Range<usize>),
        state: usize,
    ) -> Option<Places> {
        let all = rules.pieces(map, chunk, &map.whole(chunk));
        let spreads = || all.iter().map(|piece| rules.spread(piece.rule, state));
        if spreads().all(|spread| spread == Some(Spread::Elements)) {
            return Some(Places::Like);
        }
        if spreads().all(|spread| spread.is_none()) {
            return None;
        }
        let (mut places, mut first) = (Vec::new(), 0);
        for piece in rules.pieces(map, chunk, part) {
            let Some(spread) = rules.spread(piece.rule, state) else { continue };
            let elements = piece.in_chunk.start - part.start..piece.in_chunk.end - part.start;
            if let Spread::Blocks(block) = spread {
                let begins = piece.in_parameter.start.is_multiple_of(block as u64);
                assert!(begins, "a shard cuts a block of {block} elements");
            }
            let numbers = spread.numbers(elements.len());
            places.push(PackedState { elements, spread, first });
            first += numbers;
        }
        Some(Places::Packed(places))
    }

    /// Numbers of the elements before `element` of a part: a place where shards, tiles or parameters may be cut.
    pub(super) fn before(&self, element: usize) -> usize {
        let Places::Packed(places) = self else { return element };
        let behind = places.partition_point(|place| place.elements.start < element);
        let Some(place) = behind.checked_sub(1).map(|last| &places[last]) else { return 0 };
        place.first + place.spread.numbers(element.min(place.elements.end) - place.elements.start)
    }

    /// The numbers of some elements of one parameter; None when it has no such state.
    pub(super) fn numbers(&self, elements: &Range<usize>) -> Option<Range<usize>> {
        let Places::Packed(places) = self else { return Some(elements.clone()) };
        let at = places.partition_point(|place| place.elements.end <= elements.start);
        let has = places.get(at).is_some_and(|place| place.elements.start <= elements.start);
        has.then(|| {
            let PackedState { elements: all, spread, first } = &places[at];
            let start = if elements.start == all.start { *first } else { self.before(elements.start) };
            start..start + spread.numbers(elements.len())
        })
    }
}
