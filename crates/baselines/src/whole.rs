//! A model that one device holds whole: its parameters are one flat tensor, its gradients another.
//!
//! The flat space is the canonical one of `plan::chunks`, as one chunk: parameters in execution order, each at a
//! multiple of a norm's block. So norms and updates here have the bits of a synchronous run on one rank, and a part of
//! the space is a list of segments, as checkpoints want it.

use std::ops::Range;

use phalanx_layers::{
    Activation, AnySaved, Call, Context, Gradient, Head, Network, Parameter, ParameterSpec, Parameters,
};
use phalanx_optim::{Optimizer, Update};
use phalanx_plan::{ChunkError, ChunkLayout, ChunkSize, ParameterSize, Segment, lay_out};
use phalanx_tensor::{Category, Clip, DType, Device, Shape, Tensor, View, ViewMut};

/// A layer of one rank cannot fail, because it does not communicate.
pub(crate) const ALONE: &str = "a layer of one rank does not fail";

/// A model whose parameters are one flat tensor.
pub(crate) struct Whole {
    pub(crate) network: Network,
    layout: ChunkLayout,
    shapes: Vec<Shape>,
}

/// The flat gradient tensor while backward writes it, with a flag for each parameter that has been written.
pub(crate) struct Gradients<'a> {
    flat: &'a mut Tensor,
    written: Vec<bool>,
}

impl Whole {
    /// Lays out the parameters of `network` so that the flat space can be cut into `parts` of equal size.
    ///
    /// # Errors
    /// When a parameter has no elements, or there are too many.
    pub(crate) fn new(network: Network, parts: usize) -> Result<Whole, ChunkError> {
        let size = |p: &ParameterSpec| ParameterSize::new(&p.name, p.elements() as u64);
        let sizes: Vec<ParameterSize> = network.parameters.iter().map(size).collect();
        let layout = lay_out(&sizes, parts as u64, &ChunkSize::Elements(u64::MAX))?;
        assert_eq!(layout.chunks(), 1, "a chunk as large as the model holds all of it");
        let shapes = network.parameters.iter().map(|p| Shape::from(p.shape.as_slice())).collect();
        Ok(Whole { network, layout, shapes })
    }

    /// Elements of the flat space, padding included.
    pub(crate) fn elements(&self) -> usize {
        self.layout.padded_elements() as usize
    }

    /// Elements of one of the equal parts.
    pub(crate) fn part(&self, part: usize, parts: usize) -> Range<usize> {
        let range = self.layout.shard(0, part as u64, parts as u64);
        range.start as usize..range.end as usize
    }

    /// Elements of a parameter in the flat space.
    pub(crate) fn range(&self, parameter: usize) -> Range<usize> {
        let placed = &self.layout.placed[parameter];
        placed.offset as usize..(placed.offset + placed.elements) as usize
    }

    /// The parameter segments in a range of the flat space.
    pub(crate) fn segments(&self, range: Range<usize>) -> impl Iterator<Item = Segment> + '_ {
        self.layout.segments(0, range.start as u64..range.end as u64)
    }

    pub(crate) fn head(&self) -> &dyn Head {
        &**self.network.head.as_ref().expect("a whole model has a head")
    }

    /// The parameters of a block, in the order of its layer.
    pub(crate) fn parameters<'a>(&self, block: usize, flat: View<'a>) -> Vec<Parameter<'a>> {
        self.network.uses[block].iter().map(|p| Parameter::read(self.value(*p, flat), true)).collect()
    }

    fn value<'a>(&self, parameter: usize, flat: View<'a>) -> View<'a> {
        flat.range(self.range(parameter)).reshape(self.shapes[parameter])
    }

    /// The parameters of the head.
    pub(crate) fn head_parameters<'a>(&self, flat: View<'a>) -> Vec<Parameter<'a>> {
        self.parameters(self.network.head_index(), flat)
    }

    /// Slots for gradients in `flat`, none of which has been written yet.
    pub(crate) fn gradients<'a>(&self, flat: &'a mut Tensor) -> Gradients<'a> {
        Gradients { flat, written: vec![false; self.shapes.len()] }
    }

    /// tokens `[batch, seq]` u32 -> input of the head `[batch, seq, hidden]`, and the saved tensors of each block.
    pub(crate) fn forward(
        &self,
        cx: &Context,
        flat: View,
        tokens: Activation,
    ) -> (Activation, Vec<AnySaved>) {
        let mut x = tokens;
        let mut saved = Vec::with_capacity(self.network.blocks.len());
        for (i, block) in self.network.blocks.iter().enumerate() {
            let parameters = self.parameters(i, flat);
            let call = Call::new(Parameters::new(&parameters), x);
            let (y, kept) = block.layer.forward(cx, call).expect(ALONE);
            x = y;
            saved.push(kept);
        }
        (x, saved)
    }

    /// Backward from dx of the head, `[batch, seq, hidden]`. A parameter's first gradient overwrites its slot, later ones
    /// accumulate.
    pub(crate) fn backward(
        &self,
        cx: &Context,
        flat: View,
        gradients: &mut Gradients,
        mut saved: Vec<AnySaved>,
        dy: Activation,
    ) {
        let mut dy = dy;
        for (i, block) in self.network.blocks.iter().enumerate().rev() {
            let kept = saved.pop().expect("forward saved one entry per block");
            let parameters = gradients.of(self, i, flat);
            let dx = block.layer.backward(cx, kept, Call::new(Parameters::new(&parameters), dy));
            let Some(dx) = dx.expect(ALONE) else { return };
            dy = dx;
        }
    }

    /// Updates `range` of the flat space. `exact`, `gradient` and `states` hold that range, all but the gradient in f32;
    /// `rounded`, where given, becomes a copy of `exact` in its own type. `number` counts updates from 1.
    pub(crate) fn update(
        &self,
        device: &Device,
        (optimizer, number, lr): (&Optimizer, u64, f64),
        range: Range<usize>,
        (mut exact, mut rounded): (ViewMut, Option<ViewMut>),
        (gradient, factor): (View, View),
        states: &mut [Tensor],
    ) {
        for segment in self.segments(range.clone()) {
            let (start, end) = (segment.in_chunk.start as usize, segment.in_chunk.end as usize);
            let here = start - range.start..end - range.start;
            let states = states.iter_mut().map(|s| s.view_mut().range(here.clone())).collect();
            let decays = self.network.parameters[segment.parameter].kind.decays();
            let update = Update {
                number,
                lr: lr as f32,
                decays,
                parameters: exact.reborrow().range(here.clone()),
                rounded: rounded.as_mut().map(|r| r.reborrow().range(here.clone())),
                gradient: gradient.range(here),
                factor,
                states,
            };
            optimizer.apply(device, update);
        }
    }
}

impl Gradients<'_> {
    /// The parameters of a block, in the order of its layer, with the slots of their gradients.
    pub(crate) fn of<'a>(&'a mut self, whole: &Whole, block: usize, flat: View<'a>) -> Vec<Parameter<'a>> {
        let uses = &whole.network.uses[block];
        let mut order: Vec<usize> = (0..uses.len()).collect();
        order.sort_by_key(|i| whole.range(uses[*i]).start);
        let pieces = order.iter().map(|i| (whole.range(uses[*i]), whole.shapes[uses[*i]]));
        let mut views: Vec<_> = uses.iter().map(|_| None).collect();
        for (view, i) in self.flat.view_mut().into_pieces(pieces).into_iter().zip(&order) {
            views[*i] = Some(view);
        }
        let mut flags: Vec<Option<&mut bool>> = self.written.iter_mut().map(Some).collect();
        let slot = |(p, view): (&usize, Option<_>)| {
            let flag = flags[*p].take().expect("a block uses a parameter once");
            let slot = Gradient::new(view.expect("every parameter has a place"), flag);
            Parameter::with_gradient(whole.value(*p, flat), Some(slot))
        };
        uses.iter().zip(views).map(slot).collect()
    }
}

/// The gradient norm of a whole model and the clip factor, with the same bits as `parallel::GradientNorm`.
pub(crate) struct Norm {
    /// By block of the flat space, f64.
    squares: Tensor,
    /// By parameter, f64.
    sums: Tensor,
    norm: Tensor,
    factor: Tensor,
}

impl Norm {
    pub(crate) fn new(device: &Device, whole: &Whole) -> Norm {
        let alloc = |dtype, n: usize, name| device.alloc(dtype, [n], Category::Workspace, name);
        Norm {
            squares: alloc(DType::F64, whole.layout.blocks as usize, "norm.squares"),
            sums: alloc(DType::F64, whole.shapes.len(), "norm.squares_of_parameters"),
            norm: alloc(DType::F32, 1, "norm"),
            factor: alloc(DType::F32, 1, "norm.clip_factor"),
        }
    }

    /// Computes norm and clip factor of the flat `gradient`, `[1]` f32 each.
    pub(crate) fn compute(
        &mut self,
        device: &Device,
        whole: &Whole,
        gradient: View,
        clip: Clip,
    ) -> (View<'_>, View<'_>) {
        for p in 0..whole.shapes.len() {
            let blocks = whole.layout.blocks_of_parameter(p);
            let blocks = blocks.start as usize..blocks.end as usize;
            let squares = self.squares.view_mut().range(blocks.clone());
            device.block_squares(gradient.range(whole.range(p)), squares);
            device.tree_sum(self.squares.view().range(blocks), self.sums.view_mut().range(p..p + 1));
        }
        device.norm(self.sums.view(), clip, self.norm.view_mut(), self.factor.view_mut());
        (self.norm.view(), self.factor.view())
    }

    /// The last computed clip factor, `[1]`.
    pub(crate) fn factor(&self) -> View<'_> {
        self.factor.view()
    }
}
