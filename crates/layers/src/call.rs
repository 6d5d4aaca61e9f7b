//! The arguments of forward and backward.

use std::cell::{RefCell, RefMut};

use phalanx_tensor::{Device, Tensor, View, ViewMut};

use crate::activation::Activation;

/// The arguments of a layer's forward and backward. Whoever composes layers passes it on, a leaf takes it apart.
pub struct Call<'a> {
    /// The parameters of the layer, in the order in which it declares them; those that are joined are one.
    pub parameters: Parameters<'a>,
    /// The input; in backward dy.
    pub x: Activation,
    /// The result is added to it.
    pub sum: Option<Activation>,
    /// True if backward is, or will be, asked for dx.
    pub input_wanted: bool,
}

impl<'a> Call<'a> {
    /// A call whose result is added to nothing, and whose dx is wanted.
    pub fn new(parameters: Parameters<'a>, x: Activation) -> Call<'a> {
        Call { parameters, x, sum: None, input_wanted: true }
    }
}

/// The parameters of a layer, and in backward the memory of the gradients of those that are trained.
#[derive(Clone, Copy)]
pub struct Parameters<'a>(&'a [Parameter<'a>]);

/// A parameter, and the memory of its gradient.
pub struct Parameter<'a> {
    /// Number of declared parameters that are joined in it.
    members: usize,
    value: Option<View<'a>>,
    trained: bool,
    gradient: Option<RefCell<Gradient<'a>>>,
}

impl<'a> Parameter<'a> {
    /// A parameter that is read: in forward, and in the first of two parts of backward. `trained`: whether backward is asked for
    /// its gradient.
    pub fn read(value: View<'a>, trained: bool) -> Parameter<'a> {
        Parameter { members: 1, value: Some(value), trained, gradient: None }
    }

    /// A parameter in backward; its gradient is written where there is memory for it.
    pub fn with_gradient(value: View<'a>, gradient: Option<Gradient<'a>>) -> Parameter<'a> {
        Parameter { value: Some(value), ..Parameter::gradient(gradient) }
    }

    /// Parameters that are read, all of them trained.
    pub fn read_all(values: &'a [Tensor]) -> Vec<Parameter<'a>> {
        values.iter().map(|value| Parameter::read(value.view(), true)).collect()
    }

    /// Parameters and the memory of their gradients. `written` says of each whether it holds a gradient already.
    pub fn with_gradients(
        values: &'a [Tensor],
        gradients: &'a mut [Tensor],
        written: &'a mut [bool],
    ) -> Vec<Parameter<'a>> {
        let slots =
            gradients.iter_mut().zip(written).map(|(slot, flag)| Gradient::new(slot.view_mut(), flag));
        values
            .iter()
            .zip(slots)
            .map(|(value, slot)| Parameter::with_gradient(value.view(), Some(slot)))
            .collect()
    }

    /// The memory of a gradient alone, where it is wanted: in the second part of backward.
    pub fn gradient(gradient: Option<Gradient<'a>>) -> Parameter<'a> {
        let trained = gradient.is_some();
        Parameter { members: 1, value: None, trained, gradient: gradient.map(RefCell::new) }
    }

    /// The same, in which so many declared parameters are joined ([`crate::ParameterSpec::members`]).
    #[must_use]
    pub fn joining(self, members: usize) -> Parameter<'a> {
        Parameter { members, ..self }
    }
}

impl<'a> Parameters<'a> {
    /// The parameters of a layer, in its order.
    pub fn new(parameters: &'a [Parameter<'a>]) -> Parameters<'a> {
        Parameters(parameters)
    }

    /// Number of parameters, where joined ones are one.
    pub fn len(self) -> usize {
        self.0.len()
    }

    /// Returns whether there is none.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The first `count` declared parameters, and the others.
    ///
    /// # Panics
    /// If one is joined with the next.
    pub fn split_at(self, count: usize) -> (Parameters<'a>, Parameters<'a>) {
        let (mut at, mut declared) = (0, 0);
        while declared < count {
            declared += self.0[at].members;
            at += 1;
        }
        assert_eq!(declared, count, "parameters of two layers are joined");
        let (first, rest) = self.0.split_at(at);
        (Parameters(first), Parameters(rest))
    }

    /// For each, the number of declared parameters that are joined in it.
    pub fn members(self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|parameter| parameter.members)
    }

    /// The value of parameter `index`.
    #[track_caller]
    pub fn value(self, index: usize) -> View<'a> {
        self.0[index].value.expect("the second part of backward reads no parameter")
    }

    /// The value of parameter `index`, if there are as many.
    pub fn get(self, index: usize) -> Option<View<'a>> {
        (index < self.0.len()).then(|| self.value(index))
    }

    /// The values of all parameters.
    pub fn values(self) -> impl Iterator<Item = View<'a>> {
        (0..self.len()).map(move |index| self.value(index))
    }

    /// The memory of the gradient of parameter `index`; None where it is not wanted.
    #[track_caller]
    pub fn gradient(self, index: usize) -> Option<RefMut<'a, Gradient<'a>>> {
        self.0.get(index)?.gradient.as_ref().map(RefCell::borrow_mut)
    }

    /// Returns whether parameter `index` exists and is trained: if so, tensors that only its gradient reads must be saved.
    pub fn is_trained(self, index: usize) -> bool {
        self.0.get(index).is_some_and(|parameter| parameter.trained)
    }

    /// Returns whether any of them is trained.
    pub fn are_trained(self) -> bool {
        self.0.iter().any(|parameter| parameter.trained)
    }

    /// Returns whether there is memory for the gradient of any parameter.
    pub fn want_gradients(self) -> bool {
        self.0.iter().any(|parameter| parameter.gradient.is_some())
    }
}

/// The memory of a parameter's gradient. The first write may overwrite it; every later write adds to it.
pub struct Gradient<'a> {
    view: ViewMut<'a>,
    accumulate: &'a mut bool,
}

impl<'a> Gradient<'a> {
    /// A gradient in `view`. `accumulate` says whether `view` holds a gradient already; the first write sets it.
    pub fn new(view: ViewMut<'a>, accumulate: &'a mut bool) -> Gradient<'a> {
        Gradient { view, accumulate }
    }

    /// The memory, and whether to add to it (or to overwrite).
    pub fn write(&mut self) -> (ViewMut<'_>, bool) {
        let accumulate = std::mem::replace(self.accumulate, true);
        (self.view.reborrow(), accumulate)
    }

    /// Writes or adds `from`, which may have another type.
    pub fn add(&mut self, device: &Device, from: View) {
        let (to, accumulate) = self.write();
        match accumulate {
            true => device.add(from, to),
            false if from.dtype() == to.dtype() => device.copy(from, to),
            false => device.convert(from, to),
        }
    }
}
