//! Layers that read the same input and whose results are added: a residual path, or a linear layer and its adapters.

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::combinators::Parts;
use crate::failure::Result;
use crate::layer::{AnyLayer, Context, Layer, last_row_of};
use crate::parameter::ParameterSpec;
use crate::saved::{AnySaved, Deferred, Saved, Shared};

/// `y = (x +) f(x) + g(x) ..`. The last layer of each branch adds to the sum of those before it; in backward so does the first. A
/// branch that backward does not read, since dx is not wanted and nothing in it is trained, saves nothing.
pub struct Fork {
    /// True if x itself is added.
    identity: bool,
    branches: Parts,
}

impl Fork {
    /// `y = x + f(x)`
    pub fn residual(f: impl AnyLayer + 'static) -> Fork {
        Fork { identity: true, branches: Parts::new(vec![Box::new(f)]) }
    }

    /// `y = f(x) + g(x) ..`, of at least one layer.
    pub fn sum(branches: Vec<Box<dyn AnyLayer>>) -> Fork {
        Fork { identity: false, branches: Parts::new(branches) }
    }

    /// The sum to which the first branch adds, and the sum that is added at the end. One of the two takes the sum of the call.
    fn sums(&self, own: Option<Activation>, outer: Option<Activation>) -> [Option<Activation>; 2] {
        if self.identity { [own, outer] } else { [outer, None] }
    }

    /// Runs each branch with its parameters, its input and the sum so far; returns the sum.
    fn forward_by<'a>(
        &self,
        cx: &Context,
        call: Call<'a>,
        mut run: impl FnMut(&dyn AnyLayer, &Context, Call<'a>) -> Result<(Option<Activation>, AnySaved)>,
    ) -> Result<(Option<Activation>, Saved<SavedFork>)> {
        let Call { parameters, x, mut sum, input_wanted } = call;
        let mut x = Some(x);
        let mut saved = Saved::new(Vec::new());
        let all = self.branches.split(parameters);
        for (i, (part, parameters)) in self.branches.iter().zip(&all).enumerate() {
            let is_run_back = cx.keep && (input_wanted || parameters.are_trained());
            let x = if i + 1 == all.len() { x.take() } else { x.clone() }.expect("the last branch takes it");
            let call = Call { parameters: *parameters, x, sum: sum.take(), input_wanted };
            let (y, mut kept) = run(part, &Context { keep: is_run_back, ..*cx }, call)?;
            sum = y;
            if is_run_back && let Some(x) = kept.x.take() {
                saved.x = Shared::Held(x);
            }
            saved.own.push(is_run_back.then_some(kept));
        }
        Ok((sum, saved))
    }

    /// Runs backward of each branch that saved something with its number; returns dx.
    fn backward_by<'a>(
        &self,
        cx: &Context,
        saved: Saved<SavedFork>,
        call: Call<'a>,
        mut run: impl FnMut(&dyn AnyLayer, usize, AnySaved, Call<'a>) -> Result<Option<Activation>>,
    ) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, input_wanted } = call;
        let [mut sum, outer] = self.sums(Some(dy.clone()).filter(|_| input_wanted), sum);
        let (mut x, mut dy, all) = (saved.x, Some(dy), self.branches.split(parameters));
        let last = saved.own.iter().rposition(Option::is_some);
        for (i, kept) in saved.own.into_iter().enumerate() {
            let Some(mut kept) = kept else { continue };
            if let Shared::Held(x) = &x {
                kept.x.recall(x);
            }
            let dy = if Some(i) == last {
                x = Shared::Unread;
                dy.take()
            } else {
                dy.clone()
            };
            let x = dy.expect("the last branch takes it");
            let call = Call { parameters: all[i], x, sum: sum.take(), input_wanted };
            sum = run(self.branches.layer(i), i, kept, call)?;
        }
        Ok(sum.filter(|_| input_wanted).map(|dx| with_outer(cx, dx, outer)))
    }
}

/// For each branch what it saved beside the common input; None where backward does not run it.
pub type SavedFork = Vec<Option<AnySaved>>;

impl Layer for Fork {
    type Own = SavedFork;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.branches.parameters()
    }

    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedFork>)> {
        let Call { x, sum, .. } = call;
        let [sum, outer] = self.sums(Some(x.clone()), sum);
        let call = Call { x, sum, ..call };
        let (y, saved) = self.forward_by(cx, call, |layer, cx, call| {
            let (y, kept) = layer.forward(cx, call)?;
            Ok((Some(y), kept))
        })?;
        Ok((with_outer(cx, y.expect("there is a branch"), outer), saved))
    }

    fn backward(&self, cx: &Context, saved: Saved<SavedFork>, call: Call) -> Result<Option<Activation>> {
        self.backward_by(cx, saved, call, |layer, _, kept, call| layer.backward(cx, kept, call))
    }

    fn is_row_wise(&self) -> bool {
        self.branches.iter().all(AnyLayer::is_row_wise)
    }

    fn last_row(&self, cx: &Context, call: Call) -> Result<Activation> {
        let Call { parameters, x, sum, input_wanted } = call;
        let own = self.identity.then(|| last_row_of(cx, x.clone()));
        let [mut sum, outer] = self.sums(own, sum);
        for (part, parameters) in self.branches.iter().zip(self.branches.split(parameters)) {
            let call = Call { parameters, x: x.clone(), sum: sum.take(), input_wanted };
            sum = Some(part.last_row(cx, call)?);
        }
        Ok(with_outer(cx, sum.expect("there is a branch"), outer))
    }

    /// The additions save nothing.
    fn save(&self, cx: &Context, call: Call) -> Result<Saved<SavedFork>> {
        let call = Call { sum: None, ..call };
        Ok(self.forward_by(cx, call, |layer, cx, call| Ok((None, layer.save(cx, call)?)))?.1)
    }

    fn each_input(&self, x: &mut Shared, own: &mut SavedFork, see: &mut dyn FnMut(&mut Shared)) {
        see(x);
        for (part, kept) in self.branches.iter().zip(own) {
            if let Some(kept) = kept {
                // Its own place is that of the fork.
                part.each_input(&mut Shared::Unread, &mut kept.own, see);
            }
        }
    }

    fn backward_input(
        &self,
        cx: &Context,
        saved: Saved<SavedFork>,
        call: Call,
    ) -> Result<(Option<Activation>, Deferred)> {
        let mut deferred: Vec<(usize, Deferred)> = Vec::new();
        let dx = self.backward_by(cx, saved, call, |layer, i, kept, call| {
            let (dx, later) = layer.backward_input(cx, kept, call)?;
            deferred.push((i, later));
            Ok(dx)
        })?;
        Ok((dx, Deferred::new(deferred)))
    }

    fn backward_weight(&self, cx: &Context, parameters: Parameters, deferred: Deferred) -> Result<()> {
        let (all, deferred): (_, Vec<(usize, Deferred)>) =
            (self.branches.split(parameters), deferred.restore());
        deferred
            .into_iter()
            .try_for_each(|(i, later)| self.branches.layer(i).backward_weight(cx, all[i], later))
    }
}

/// Adds a second sum, for forks in forks.
fn with_outer(cx: &Context, y: Activation, outer: Option<Activation>) -> Activation {
    if outer.is_none() {
        return y;
    }
    let mut sum = cx.activation(y.shape(), "residual.outer");
    cx.device.copy(y.view(), sum.view_mut());
    cx.plus(sum, outer)
}
