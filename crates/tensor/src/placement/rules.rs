//! Rules by which one operation carries placements from its operands to its results.
//!
//! Operands are written as in an einsum, a letter a dimension: linear is `ri, io -> ro`, plus a bias `o` and a
//! residual `ro`. The letter `r` in front stands for all leading dimensions, so that a view may be flattened.
//! Along each axis of the mesh, by itself:
//!
//! - a factor may not be a partial sum: it would be read before it is reduced. Only products may read one of which that was said
//!   ([`Device::sum_later`](crate::Device::sum_later)): their results are partial sums, too;
//! - at most one letter is sharded, and it is in every factor that has it;
//! - results that have the sharded letter are sharded in it, results without it are partial sums;
//! - addends must be placed as the result is; a vector without the sharded letter is replicated.
//!
//! After a fault the operation goes on as if it had been right, so that one mistake is one fault.

use phalanx_plan::trace::{Axis, Placement, Site};

use crate::arguments::Layout;
use crate::placement::in_words;
use crate::placement::table::Mark;
use crate::record::{Recorder, Tape};
use crate::view::{View, ViewMut};

/// Why a letter that an operation sums over may not be sharded.
pub(crate) const WHOLE_SUMS: &str =
    "its result would be a partial sum, which the function reads before it is reduced";

/// A tensor that an operation reads or writes.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    /// In the operation's documentation.
    pub(crate) name: &'static str,
    /// One letter for each dimension.
    pub(crate) letters: &'static str,
    pub(crate) view: View<'a>,
    /// True if the result is accumulated into its old contents.
    pub(crate) accumulates: bool,
    /// True if the operation is linear in it.
    pub(crate) is_linear: bool,
}

/// One call of an operation.
pub(crate) struct Rule<'a> {
    pub(crate) op: &'static str,
    /// Operands that are multiplied, or go through a function that is not linear.
    pub(crate) factors: &'a [Operand<'a>],
    /// Operands that are added to the first result.
    pub(crate) addends: &'a [Option<Operand<'a>>],
    pub(crate) results: &'a [Operand<'a>],
    /// Letters that may not be sharded, and why.
    pub(crate) whole: &'a [(char, &'static str)],
}

/// The letter that is sharded along an axis.
#[derive(Clone, Copy)]
struct Cut {
    letter: char,
    /// Its dimension and the tensor's dimensions where it was found; of rows, kept.
    dimension: u8,
    dimensions: usize,
    /// Name of the operand where it was found.
    owner: &'static str,
    /// True if results without the letter are sums over the ranks.
    sums: bool,
}

/// The letter that no operand has: that of a partial sum.
const NO_LETTER: char = '+';

impl<'a> Operand<'a> {
    /// The same, in which the operation is linear.
    pub(crate) fn linear(self) -> Operand<'a> {
        Operand { is_linear: true, ..self }
    }
}

impl<'a> Rule<'a> {
    /// The rule of an operation that adds nothing to its results and may be sharded in every letter.
    pub(crate) fn of(op: &'static str, factors: &'a [Operand<'a>], results: &'a [Operand<'a>]) -> Rule<'a> {
        Rule { op, factors, addends: &[], results, whole: &[] }
    }
}

impl Operand<'_> {
    fn has(&self, letter: char) -> bool {
        self.letters.contains(letter)
    }

    fn has_rows(&self) -> bool {
        self.letters.starts_with('r')
    }

    /// The letter of dimension `d` of a tensor with so many dimensions, seen as this operand.
    fn letter(&self, d: u8, dimensions: usize) -> char {
        let count = self.letters.len();
        let index = match () {
            _ if count <= 1 || dimensions <= 1 => 0,
            _ if d as usize == dimensions - 1 => count - 1,
            _ if self.has_rows() || dimensions != count => 0,
            _ => d as usize,
        };
        self.letters.chars().nth(index).unwrap_or('r')
    }

    /// Dimensions of a tensor that has all rows' dimensions and a last one, as which this operand is marked.
    fn full_dimensions(&self, dimensions: usize) -> usize {
        match (self.has_rows(), self.letters.len()) {
            (true, 1) => dimensions + 1,
            (true, _) => dimensions.max(2),
            _ => dimensions,
        }
    }
}

impl Recorder {
    /// Checks a call and marks its results.
    pub(crate) fn follow(&self, rule: &Rule, site: Site) {
        self.locked(|tape| tape.follow(rule, site));
    }

    /// A number that the host reads, to decide something, is the same on all ranks.
    pub(crate) fn follow_fetch(&self, from: View, site: Site) {
        self.check_pieces("the host", ("a number", from), site, |placement| {
            (placement == Placement::Partial).then_some("is a partial sum: an all_reduce")
        });
    }

    /// Records a fault along each axis along which `wrong` finds words for the placement of a piece of `x`.
    pub(crate) fn check_pieces(
        &self,
        op: &str,
        (name, x): (&str, View),
        site: Site,
        wrong: impl Fn(Placement) -> Option<&'static str>,
    ) {
        let marks = self.marks_in(x);
        for axis in Axis::ALL.into_iter().filter(|axis| self.is_checked(*axis)) {
            let mut placements = marks.iter().flatten().filter_map(|mark| mark.get(axis));
            if let Some(words) = placements.find_map(&wrong) {
                let axis_name = axis.name();
                let what = format!("{words} over `{axis_name}` is missing before {op} reads it as `{name}`");
                self.fault(x, axis, what, site);
            }
        }
    }
}

pub(crate) fn operand<'a>(name: &'static str, letters: &'static str, view: View<'a>) -> Operand<'a> {
    Operand { name, letters, view, accumulates: false, is_linear: false }
}

pub(crate) fn result<'a>(
    name: &'static str,
    letters: &'static str,
    view: &'a ViewMut,
    accumulates: bool,
) -> Operand<'a> {
    Operand { name, letters, view: view.as_view(), accumulates, is_linear: false }
}

/// The letters of a weight matrix.
pub(crate) fn weight(layout: Layout) -> &'static str {
    match layout {
        Layout::InOut => "io",
        Layout::OutIn => "oi",
    }
}

impl Tape {
    fn follow(&mut self, rule: &Rule, site: Site) {
        let cuts = Axis::ALL.map(|axis| self.cut(rule, axis, site));
        let results: Vec<Mark> = rule.results.iter().map(|result| self.result(rule, result, cuts)).collect();
        for (result, mark) in rule.results.iter().zip(&results) {
            if result.accumulates {
                self.check_added(rule.op, result, result, *mark, cuts, site);
            }
        }
        for addend in rule.addends.iter().flatten() {
            self.check_added(rule.op, addend, &rule.results[0], results[0], cuts, site);
        }
        for (result, mark) in rule.results.iter().zip(results) {
            self.placed.set(result.view, Some(mark));
        }
    }

    fn along(&self, operand: &Operand, axis: Axis) -> Option<Placement> {
        self.placed.mark_of(operand.view).unwrap_or(Mark::REPLICATED).get(axis)
    }

    /// Checks the factors along one axis: the letter that is sharded, if one is.
    fn cut(&mut self, rule: &Rule, axis: Axis, site: Site) -> Option<Cut> {
        if !self.placed.is_checked(axis) {
            return None;
        }
        let (op, mut cut) = (rule.op, None::<Cut>);
        for factor in rule.factors {
            match self.along(factor, axis) {
                Some(Placement::Partial) if cut.is_none() && self.is_summed_later(factor) => {
                    let (letter, owner) = (NO_LETTER, factor.name);
                    cut = Some(Cut { letter, dimension: 0, dimensions: 0, owner, sums: true });
                }
                Some(Placement::Partial) => {
                    let what = read_early(op, factor.name, axis);
                    self.fault(factor.view, axis, what, site);
                }
                Some(Placement::Shard(d)) => {
                    let found = self.found(factor, d);
                    match cut {
                        None => cut = Some(self.whole(rule, factor, found, axis, site)),
                        Some(cut) if cut.letter != found.letter => {
                            let what = format!(
                                "is sharded in dimension {d}, while `{}` of the same {op} is sharded in another \
                                 that they do not share: only one can be cut over `{}`; gather one of the two",
                                cut.owner,
                                axis.name()
                            );
                            self.fault(factor.view, axis, what, site);
                        }
                        Some(_) => {}
                    }
                }
                Some(Placement::Replicated) | None => {}
            }
        }
        let cut = cut?;
        for factor in rule.factors.iter().filter(|factor| cut.sums && factor.has(cut.letter)) {
            if self.along(factor, axis) == Some(Placement::Replicated) {
                let what = format!(
                    "is replicated, while `{}` of the same {op} is sharded in the dimension that it shares with \
                     `{}`: expected both sharded; one is gathered too early, or never cut over `{}`",
                    cut.owner,
                    factor.name,
                    axis.name()
                );
                self.fault(factor.view, axis, what, site);
            }
        }
        Some(cut)
    }

    fn is_summed_later(&self, factor: &Operand) -> bool {
        factor.is_linear && self.placed.mark_of(factor.view).is_some_and(Mark::is_summed_later)
    }

    fn found(&self, factor: &Operand, dimension: u8) -> Cut {
        let dimensions = self.placed.mark_of(factor.view).map_or(0, Mark::dimensions);
        let letter = factor.letter(dimension, dimensions);
        Cut {
            letter,
            dimension,
            dimensions: factor.full_dimensions(dimensions),
            owner: factor.name,
            sums: true,
        }
    }

    /// Records a fault if the letter may not be sharded; then nothing is summed over it.
    fn whole(&mut self, rule: &Rule, factor: &Operand, cut: Cut, axis: Axis, site: Site) -> Cut {
        let Some((_, why)) = rule.whole.iter().find(|(letter, _)| *letter == cut.letter) else { return cut };
        let what = format!(
            "is sharded in dimension {}, but {} needs it whole ({why}): an all_gather over `{}` is missing, or \
             another collective was meant",
            cut.dimension,
            rule.op,
            axis.name()
        );
        self.fault(factor.view, axis, what, site);
        Cut { sums: false, ..cut }
    }

    /// Placement of a result.
    fn result(&self, rule: &Rule, result: &Operand, cuts: [Option<Cut>; 3]) -> Mark {
        let rows = cuts.iter().flatten().filter(|cut| cut.letter == 'r').map(|cut| cut.dimensions).max();
        let dimensions = match (result.has_rows(), result.letters.len()) {
            (true, 2..) => result.view.shape().as_slice().len().max(rows.unwrap_or(0)),
            _ => result.letters.len(),
        };
        let old = self.placed.mark_of(result.view).map(|old| old.of_dimensions(dimensions));
        let mut mark = Mark::new(Default::default(), dimensions);
        for (axis, cut) in Axis::ALL.into_iter().zip(cuts) {
            let placement = match cut {
                _ if !self.placed.is_checked(axis) => None,
                Some(cut) if result.has(cut.letter) => {
                    Some(Placement::Shard(dimension(result, cut, dimensions)))
                }
                Some(Cut { sums: true, .. }) => Some(Placement::Partial),
                _ => Some(kept(rule, result, old, axis)),
            };
            mark = mark.with(axis, placement);
        }
        mark
    }

    /// Checks what is added to `result`, which is marked `mark`: along each axis it must be placed likewise.
    fn check_added(
        &mut self,
        op: &'static str,
        added: &Operand,
        result: &Operand,
        mark: Mark,
        cuts: [Option<Cut>; 3],
        site: Site,
    ) {
        let found = self.placed.mark_of(added.view).unwrap_or(Mark::REPLICATED);
        for (axis, cut) in Axis::ALL.into_iter().zip(cuts) {
            let Some(placement) = found.get(axis).filter(|_| self.placed.is_checked(axis)) else { continue };
            let letter = |p, operand: &Operand, dimensions| match p {
                Placement::Shard(d) => Some(operand.letter(d, dimensions)),
                _ => None,
            };
            let own = mark.get(axis).unwrap_or_default();
            let cut_letter = cut.map(|cut| cut.letter).or(letter(own, result, mark.dimensions()));
            let expected = match own {
                Placement::Shard(_) if !cut_letter.is_some_and(|l| added.has(l)) => Placement::Replicated,
                own => own,
            };
            let same = match (placement, expected) {
                (Placement::Shard(_), Placement::Shard(_)) => {
                    letter(placement, added, found.dimensions()) == cut_letter
                }
                (placement, expected) => placement == expected,
            };
            if !same {
                self.fault(added.view, axis, adds(op, added.name, placement, expected, axis), site);
            }
        }
    }
}

/// The dimension of a result of so many dimensions in which it is sharded.
fn dimension(result: &Operand, cut: Cut, dimensions: usize) -> u8 {
    let last = result.letters.len() - 1;
    match result.letters.find(cut.letter).unwrap_or(last) {
        0 if result.has_rows() && last > 0 => cut.dimension.min(dimensions.saturating_sub(2) as u8),
        index if index == last => dimensions.saturating_sub(1) as u8,
        index => index as u8,
    }
}

/// The placement of a result along an axis where no factor is cut: replicated, or sharded in a dimension that is
/// the result's alone (rows of a table that are chosen by index), if that was said of it before.
fn kept(rule: &Rule, result: &Operand, old: Option<Mark>, axis: Axis) -> Placement {
    let Some((mark, Placement::Shard(d))) = old.and_then(|mark| Some((mark, mark.get(axis)?))) else {
        return Placement::Replicated;
    };
    let letter = result.letter(d, mark.dimensions());
    let alone = result.has(letter) && rule.factors.iter().all(|factor| !factor.has(letter));
    if alone { Placement::Shard(d) } else { Placement::Replicated }
}

/// Fault text for a partial sum as a factor.
fn read_early(op: &str, name: &str, axis: Axis) -> String {
    format!(
        "is a partial sum that {op} reads as `{name}` before it is reduced: expected it replicated or sharded; an \
         all_reduce or reduce_scatter over `{}` is missing",
        axis.name()
    )
}

/// Fault text for an addend that is placed as `found` while the sum is `expected`.
pub(crate) fn adds(op: &str, name: &str, found: Placement, expected: Placement, axis: Axis) -> String {
    let axis = axis.name();
    let advice = match (found, expected) {
        (Placement::Partial, _) => format!("an all_reduce or reduce_scatter over `{axis}` is missing before"),
        (_, Placement::Partial) => format!(
            "every rank along `{axis}` would add it once; reduce the sum over `{axis}` first and add it then"
        ),
        (Placement::Shard(_), _) => {
            format!("an all_gather over `{axis}` is missing, or one operand is not cut")
        }
        (Placement::Replicated, _) => {
            format!("it is to be cut over `{axis}` too, or the other to be gathered")
        }
    };
    let (found, expected) = (in_words(found), in_words(expected));
    format!("is {found}, but {op} adds it as `{name}` to what is {expected}: {advice}")
}
