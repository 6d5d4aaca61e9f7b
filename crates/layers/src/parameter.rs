//! Parameters as layers declare them: whole ones or parts, alone or joined.

use std::ops::Range;

use phalanx_plan::Stripe;
use phalanx_tensor::DType;
pub use phalanx_tensor::Kind;

use crate::failure::Result;
use crate::init::Init;
use crate::share::{CannotCut, Pieces, Share};

/// A parameter as a layer declares it.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// Full name, as in Hugging Face checkpoints of the model. Parameters of equal names are one parameter (tied).
    pub name: String,
    /// Its role in the layer.
    pub kind: Kind,
    /// Shape of this rank's part.
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
    /// The part of the whole parameter that this is; None for the whole.
    pub part: Option<Part>,
    /// True if it lies directly behind the layer's previous parameter when both are trained or both frozen, so that one product
    /// reads both. Both have the same kind and, but for the first, the same extents.
    pub joins: bool,
    /// The parameters that lie one behind another in this one, along dimension 0, if there are several ([`ParameterSpec::members`]).
    pub joined: Vec<ParameterSpec>,
    /// True if it is trained. A frozen one has no gradient, optimizer state or master weights, and tensors that only its gradient
    /// would read are not saved. Layers say true; the run decides ([`crate::Network::freezing`]).
    pub trained: bool,
    /// The type in which it is kept while it is frozen, if not that of computing. Layers say None; the run decides
    /// ([`crate::Network::keeping`]).
    pub kept: Option<DType>,
    /// True if the gradient that the layer writes is one term of a sum over the ranks that hold other rows of its activations.
    /// The terms are summed before the update.
    pub partial: bool,
}

/// A part of a parameter; other ranks have the other parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Shape of the whole parameter.
    pub whole: Vec<usize>,
    /// The dimension that is split.
    pub dim: usize,
    /// Which elements of the whole the part has.
    pub stripe: Stripe,
    /// Number of ranks that hold the same part, each with a term of its gradient.
    pub copies: usize,
}

impl ParameterSpec {
    /// A whole parameter.
    pub fn new(
        name: impl Into<String>,
        kind: Kind,
        shape: impl Into<Vec<usize>>,
        init: Init,
    ) -> ParameterSpec {
        ParameterSpec {
            name: name.into(),
            kind,
            shape: shape.into(),
            init,
            part: None,
            joins: false,
            joined: Vec::new(),
            trained: true,
            kept: None,
            partial: false,
        }
    }

    /// The parameters of files and patterns: this one, or those that are joined in it, in order.
    pub fn members(&self) -> &[ParameterSpec] {
        if self.joined.is_empty() { std::slice::from_ref(self) } else { &self.joined }
    }

    /// The elements `range` of this one as elements of its members, each with the number of its first one within `range`.
    pub fn of_members(&self, range: Range<u64>) -> impl Iterator<Item = (&ParameterSpec, Range<u64>, usize)> {
        let mut start = 0;
        self.members().iter().filter_map(move |member| {
            let own = start..start + member.elements() as u64;
            start = own.end;
            let both = range.start.max(own.start)..range.end.min(own.end);
            let first = both.start.checked_sub(range.start)? as usize;
            (!both.is_empty()).then(|| (member, both.start - own.start..both.end - own.start, first))
        })
    }

    /// The elements `range` of this one as consecutive elements of whole members: each run with its member, its elements counted from
    /// the first of `range`, and its first element in the whole.
    pub fn runs(&self, range: Range<u64>) -> impl Iterator<Item = (&ParameterSpec, Range<usize>, u64)> {
        self.of_members(range).flat_map(|(member, own, first)| {
            let place = move |at: u64| first + (at - own.start) as usize;
            let runs = member.stripe().runs(own.start..own.end);
            runs.map(move |(here, whole)| (member, place(here.start)..place(here.end), whole.start))
        })
    }

    /// Several parameters of a layer, which are alike, as one: `a.{q,k}.weight` for `a.q.weight` and `a.k.weight`.
    pub(crate) fn join(members: Vec<ParameterSpec>) -> ParameterSpec {
        let first = members[0].clone();
        if members.len() == 1 {
            return first;
        }
        let segment = |index: usize| {
            let names = members.iter().map(|member| member.name.split('.').nth(index).unwrap_or_default());
            let all: Vec<&str> = names.collect();
            let is_same = all.iter().all(|name| *name == all[0]);
            if is_same { all[0].to_string() } else { format!("{{{}}}", all.join(",")) }
        };
        let name: Vec<String> = (0..first.name.split('.').count()).map(segment).collect();
        let rows = members.iter().map(|member| member.shape[0]).sum();
        let shape = [&[rows], &first.shape[1..]].concat();
        ParameterSpec { name: name.join("."), shape, part: None, joins: false, joined: members, ..first }
    }

    /// Shape of the whole parameter.
    pub fn whole_shape(&self) -> &[usize] {
        self.assert_alone();
        self.part.as_ref().map_or(&self.shape, |part| &part.whole)
    }

    /// Which elements of the whole parameter this part has.
    pub fn stripe(&self) -> Stripe {
        self.assert_alone();
        self.part.as_ref().map_or(Stripe::whole(self.elements() as u64), |part| part.stripe)
    }

    /// Which part of its gradient the ranks of the tensor axis sum that have a term of it: all of it, one of several parts of which
    /// ranks hold copies, or None where each rank has the gradient of its part.
    pub fn terms(&self) -> Option<Share> {
        match &self.members()[0].part {
            _ if self.partial => Some(Share::WHOLE),
            Some(Part { stripe, copies, .. }) if *copies > 1 => {
                let (index, of) = stripe.part();
                Some(Share { index: index as usize, of: of as usize })
            }
            _ => None,
        }
    }

    fn assert_alone(&self) {
        assert!(
            self.joined.is_empty(),
            "{} is several parameters, each of which is a part of a whole",
            self.name
        );
    }

    /// Number of elements of this part.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The part that `share` has of this whole parameter, of which dimension `dim` is divided.
    ///
    /// # Errors
    /// When the pieces cannot be dealt out evenly.
    pub fn cut(self, dim: usize, pieces: Pieces, share: Share) -> Result<ParameterSpec, CannotCut> {
        let (_, own) = share.of(&self.name, pieces)?;
        let Pieces { packed, count, .. } = pieces;
        let size = self.shape[dim] / packed / count * own;
        Ok(self.part(dim, size, packed, share, count / own))
    }

    /// The rows that `share` has of this whole parameter; where they cannot be dealt out evenly, the last shares have fewer.
    #[must_use]
    pub fn rows_of(self, share: Share) -> ParameterSpec {
        let each = self.shape[0].div_ceil(share.of);
        let part = self.part(0, each, 1, share, share.of);
        let whole = part.whole_shape()[0];
        let shape = [&[whole.saturating_sub(share.index * each).min(each)], &part.shape[1..]].concat();
        ParameterSpec { shape, ..part }
    }

    /// One of `parts` different parts, `packed` times `size` elements of dimension `dim`.
    fn part(mut self, dim: usize, size: usize, packed: usize, share: Share, parts: usize) -> ParameterSpec {
        if share.of == 1 {
            return self;
        }
        let copies = share.of / parts;
        let run = (size * self.shape[dim + 1..].iter().product::<usize>()) as u64;
        let stripe = Stripe::new(run, parts as u64, (share.index / copies) as u64);
        let whole = self.shape.clone();
        self.shape[dim] = size * packed;
        ParameterSpec { part: Some(Part { whole, dim, stripe, copies }), ..self }
    }
}
