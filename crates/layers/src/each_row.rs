//! Layers of functions that work on each row (token) by itself, written on plain slices.

use std::sync::Arc;

use phalanx_tensor::{OwnOperation, View, ViewMut};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::layer::{Context, Layer};
use crate::parameter::ParameterSpec;
use crate::saved::Saved;

/// A function of one row, `[hidden] -> [hidden]`, and its derivative. Numbers are f32 whatever type tensors have.
pub trait RowFunction: Send + Sync + 'static {
    /// Its parameters: vectors `[hidden]` that every rank has whole.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// Overwrites `y` with the function of the row `x`.
    fn forward(&self, parameters: &[&[f32]], x: &[f32], y: &mut [f32]);

    /// Overwrites `dx`, and adds to the gradient of each parameter.
    fn backward(
        &self,
        parameters: &[&[f32]],
        x: &[f32],
        dy: &[f32],
        dx: &mut [f32],
        gradients: &mut [&mut [f32]],
    );
}

/// The layer of a [`RowFunction`]: from the description of its operands follows how its results are placed on a mesh.
pub struct OnEachRow<F>(Arc<F>);

impl<F: RowFunction> OnEachRow<F> {
    /// The layer of `function`.
    pub fn new(function: F) -> OnEachRow<F> {
        OnEachRow(Arc::new(function))
    }
}

/// Why rows may not be sharded.
const WHOLE: &str = "the function reads whole rows";

impl<F: RowFunction> Layer for OnEachRow<F> {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.0.parameters()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, hidden]` -> y: the same
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { parameters, x, sum, .. } = call;
        let mut y = cx.activation(x.shape(), "on_each_row.y");
        let call = operation("on_each_row", x.view(), parameters).write("y", "rh", y.view_mut());
        let function = Arc::clone(&self.0);
        let [_, hidden] = x.shape().rows_cols();
        call.run_on_all(cx.device, move |reads, mut writes| {
            let parameters = whole(&reads[1..]);
            let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
            let (mut x, mut y) = (vec![0.0; hidden], vec![0.0; hidden]);
            for start in (0..reads[0].elements()).step_by(hidden) {
                reads[0].read_f32(start, &mut x);
                function.forward(&parameters, &x, &mut y);
                writes[0].write_f32(start, &y);
            }
        });
        Ok((cx.plus(y, sum), Saved::new(()).with_input(x)))
    }

    /// dx overwrites, or adds to the sum; gradients of parameters where they are wanted.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, .. } = call;
        let x = saved.x.into_held();
        let mut dx = cx.activation(x.shape(), "on_each_row.dx");
        let mut call = operation("on_each_row_backward", x.view(), parameters)
            .read("dy", "rh", dy.view())
            .write("dx", "rh", dx.view_mut());
        // For each parameter: whether its gradient is added to, where it is wanted.
        let mut accumulate = Vec::new();
        let mut slots: Vec<_> = (0..parameters.len()).map(|index| parameters.gradient(index)).collect();
        for slot in &mut slots {
            let slot = slot.as_mut().map(|slot| slot.write());
            accumulate.push(slot.as_ref().map(|(_, accumulates)| *accumulates));
            if let Some(slot) = slot {
                call = call.gradient("gradient", "h", slot);
            }
        }
        let function = Arc::clone(&self.0);
        let [_, hidden] = x.shape().rows_cols();
        call.run_on_all(cx.device, move |reads, mut writes| {
            let (dy, parameters) = (reads[reads.len() - 1], whole(&reads[1..reads.len() - 1]));
            let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
            let (dx, gradients) = writes.split_first_mut().expect("dx comes first");
            let mut sums = sums(gradients, &accumulate, hidden);
            let mut slices: Vec<&mut [f32]> = sums.iter_mut().map(Vec::as_mut_slice).collect();
            let [mut x_row, mut dy_row, mut dx_row] = [(); 3].map(|()| vec![0.0; hidden]);
            for start in (0..reads[0].elements()).step_by(hidden) {
                reads[0].read_f32(start, &mut x_row);
                dy.read_f32(start, &mut dy_row);
                function.backward(&parameters, &x_row, &dy_row, &mut dx_row, &mut slices);
                dx.write_f32(start, &dx_row);
            }
            let wanted = sums.iter().zip(&accumulate).filter(|(_, wanted)| wanted.is_some());
            gradients.iter_mut().zip(wanted).for_each(|(gradient, (sum, _))| gradient.write_f32(0, sum));
        });
        drop(slots);
        Ok(Some(cx.plus(dx, sum)))
    }
}

/// A call that reads rows and parameters.
fn operation<'a, 'p: 'a>(name: &'static str, x: View<'a>, parameters: Parameters<'p>) -> OwnOperation<'a> {
    let call = OwnOperation::new(name).read("x", "rh", x).whole('h', WHOLE);
    parameters.values().fold(call, |call, parameter| call.read("parameter", "h", parameter))
}

fn whole(views: &[View]) -> Vec<Vec<f32>> {
    let read = |view: &View| {
        let mut numbers = vec![0.0; view.elements()];
        view.read_f32(0, &mut numbers);
        numbers
    };
    views.iter().map(read).collect()
}

/// Initial values of sums for gradients of `hidden` elements: the old contents if they are accumulated into, else zeros.
/// `gradients` are those that are wanted.
fn sums(gradients: &[ViewMut], accumulate: &[Option<bool>], hidden: usize) -> Vec<Vec<f32>> {
    let mut wanted = gradients.iter();
    let begin = |accumulate: &Option<bool>| {
        let mut numbers = vec![0.0; hidden];
        let gradient = accumulate.and_then(|_| wanted.next());
        if let Some(gradient) = gradient.filter(|_| *accumulate == Some(true)) {
            gradient.as_view().read_f32(0, &mut numbers);
        }
        numbers
    };
    accumulate.iter().map(begin).collect()
}
