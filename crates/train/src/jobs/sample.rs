//! Continues text with a trained model, in f32 or in the 16 bits that the run computes in. Keys and values of earlier tokens are cached, so that each token is computed
//! once, until the context is longer than the model's positions. Positions are absolute: when the oldest token is
//! dropped, all others move, and the whole context is computed again.

use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use phalanx_checkpoint::Checkpoint;
use phalanx_data::Tokenizer;
use phalanx_layers::{Call, Context, KeyValueCache, Network, Parameter, ParameterSpec, Parameters};
use phalanx_models::Model;
use phalanx_plan::trace::PhaseName;
use phalanx_system::random::{GOLDEN, SplitMix64};
use phalanx_tensor::{Category, DType, Device, Element, Shape, Tensor, View};

use crate::engine::error::RunError;
use crate::engine::weights::Weights;
pub use crate::jobs::sampling::Sampling;

/// Tokens of a text that are computed at once in the time of one alone, about: fewer new ones behind a cache are computed one by one.
const ONE_BY_ONE: usize = 8;

/// A model with all parameters on one rank, for forward only.
pub struct Generator {
    pub(super) device: Device,
    /// The type of parameters, activations and the cache.
    pub(super) compute: DType,
    pub(super) network: Network,
    parameters: Vec<Tensor>,
    positions: usize,
    vocab: usize,
    /// Rows of the token table that are never drawn.
    undrawn: Vec<usize>,
}

impl Generator {
    /// Loads the parameters of a checkpoint, with what adapters add to them, rounded to `compute`, into `device`. Only ids of
    /// `tokenizer` are drawn.
    ///
    /// # Errors
    /// A damaged checkpoint or one of another shape.
    pub fn load(
        model: &dyn Model,
        from: &Checkpoint,
        tokenizer: &Tokenizer,
        device: Device,
        compute: DType,
    ) -> Result<Generator, RunError> {
        let weights = Weights::of(from, model)?;
        let generator = Generator::new(model, device, compute, |spec, values| {
            weights.read(spec, 0..values.len() as u64, values).map_err(RunError::from)
        })?;
        Ok(generator.drawing_only(|id| tokenizer.token(id).is_some()))
    }

    /// Draws only tokens that `is_id` accepts. Tables are padded, and ids may have holes: no text has trained these rows.
    #[must_use]
    pub fn drawing_only(self, is_id: impl Fn(u32) -> bool) -> Generator {
        let undrawn = (0..self.vocab).filter(|row| !is_id(*row as u32)).collect();
        Generator { undrawn, ..self }
    }

    /// Fills each parameter by `fill`, rounds it to `compute`, in `device`, whose memory is not planned, or by [`Generator::plans`]. All rows of the token
    /// table are drawn; see [`Generator::drawing_only`].
    ///
    /// # Errors
    /// The first of `fill`.
    pub fn new<E>(
        model: &dyn Model,
        device: Device,
        compute: DType,
        mut fill: impl FnMut(&ParameterSpec, &mut [f32]) -> Result<(), E>,
    ) -> Result<Generator, E> {
        let network = model.whole();
        let mut load = |spec: &ParameterSpec| {
            let shape = Shape::from(spec.shape.as_slice());
            let mut tensor = device.alloc(compute, shape, Category::Parameters, "generator.parameter");
            if device.is_meta() {
                return Ok(tensor);
            }
            let mut values = vec![0f32; spec.elements()];
            for (member, _, first) in spec.of_members(0..values.len() as u64) {
                fill(member, &mut values[first..][..member.elements()])?;
            }
            match compute {
                DType::BF16 => device.upload(&round(&values, bf16::from_f32), tensor.view_mut()),
                DType::F16 => device.upload(&round(&values, f16::from_f32), tensor.view_mut()),
                _ => device.upload(&values, tensor.view_mut()),
            }
            Ok(tensor)
        };
        let parameters =
            device.try_phase(PhaseName::Init, || network.parameters.iter().map(&mut load).collect())?;
        let (positions, vocab) = (model.longest().unwrap_or(usize::MAX), model.vocab());
        Ok(Generator { device, compute, network, parameters, positions, vocab, undrawn: Vec::new() })
    }

    /// Appends `count` tokens to `tokens` (not empty), and calls `seen` with each.
    ///
    /// # Errors
    /// The first error of `seen`, which ends the sampling.
    ///
    /// # Panics
    /// When no token is left to draw.
    pub fn extend<E>(
        &self,
        tokens: &mut Vec<u32>,
        count: usize,
        how: Sampling,
        seen: impl FnMut(u32) -> Result<(), E>,
    ) -> Result<(), E> {
        self.growing(tokens.len() + count, how.shift).extend(tokens, count, how, seen)
    }

    /// A text that grows by one token at a time up to `length` tokens; see [`Sampling::shift`].
    pub fn growing(&self, length: usize, shift: usize) -> Growing<'_> {
        let shift = shift.clamp(1, self.positions);
        Growing { generator: self, length, shift, start: 0, seen: Vec::new(), cached: None }
    }

    /// Logits of the token after `context`, `[vocab]`, by the definition: without a cache, from all rows of each block.
    pub fn logits(&self, context: &[u32]) -> Vec<f32> {
        self.forward(context, 0, None, self.network.blocks.len())
    }

    /// Logits of the token after `context`, whose first `past` tokens are in the cache. Only the last row of the last
    /// block that mixes rows is read, so that no other is computed from there on.
    fn next(&self, context: &[u32], past: usize, cache: Option<&KeyValueCache>) -> Vec<f32> {
        let mixing = self.network.blocks.iter().rposition(|block| !block.layer.is_row_wise());
        self.forward(context, past, cache, mixing.unwrap_or(0))
    }

    fn parameters(&self, uses: &[usize]) -> Vec<Parameter<'_>> {
        let read = |p: &usize| {
            let members = self.network.parameters[*p].members().len();
            Parameter::read(self.parameters[*p].view(), false).joining(members)
        };
        uses.iter().map(read).collect()
    }

    /// The same, with all rows of the first `all_rows` blocks, and the last row of the others.
    fn forward(
        &self,
        context: &[u32],
        past: usize,
        cache: Option<&KeyValueCache>,
        all_rows: usize,
    ) -> Vec<f32> {
        let cx = self.context(context.len(), past, cache);
        let x = self.blocks(&cx, &context[past..], all_rows);
        let [_, rows, _] = x.dims();
        self.head(&cx, &x, rows - 1)
    }

    /// The context of a text of `length` tokens, of which the first `past` are in the cache.
    fn context<'a>(&'a self, length: usize, past: usize, cache: Option<&'a KeyValueCache>) -> Context<'a> {
        let whole = Context::new(&self.device, self.compute, [1, length]);
        Context { keep: false, rows: whole.rows.from(past), cache, ..whole }
    }

    /// The rows behind the blocks, `[1, rows, hidden]`: all of the first `all_rows` blocks, and the last row of the others.
    pub(super) fn blocks(&self, cx: &Context, new: &[u32], all_rows: usize) -> Arc<Tensor> {
        let mut tokens =
            self.device.alloc(DType::U32, [1, new.len()], Category::Activations, "generator.tokens");
        self.device.upload(new, tokens.view_mut());
        let mut x = Arc::new(tokens);
        for (i, (block, uses)) in self.network.blocks.iter().zip(&self.network.uses).enumerate() {
            let own = self.parameters(uses);
            let call = Call { input_wanted: false, ..Call::new(Parameters::new(&own), x) };
            let y = match i < all_rows {
                true => block.layer.forward(cx, call).map(|(y, _)| y),
                false => block.layer.last_row(cx, call),
            };
            x = y.expect("a model on one rank does not fail");
        }
        x
    }

    /// Logits of a row behind the blocks, `[vocab]`.
    fn head(&self, cx: &Context, x: &Tensor, row: usize) -> Vec<f32> {
        let [_, _, hidden] = x.dims();
        let row = x.view().range(row * hidden..(row + 1) * hidden).reshape([1, hidden]);
        let own = self.head_parameters();
        let head = self.network.head.as_ref().expect("a whole model has a head");
        let logits = head.logits(cx, Parameters::new(&own), row);
        match self.compute {
            DType::BF16 => self.downloaded::<bf16>(logits.view()).to_f32_vec(),
            DType::F16 => self.downloaded::<f16>(logits.view()).to_f32_vec(),
            _ => self.downloaded(logits.view()),
        }
    }

    pub(super) fn head_parameters(&self) -> Vec<Parameter<'_>> {
        self.parameters(&self.network.uses[self.network.head_index()])
    }

    fn downloaded<T: Element + bytemuck::Zeroable>(&self, logits: View) -> Vec<T> {
        let mut out = vec![T::zeroed(); self.vocab];
        self.device.download(logits, &mut out).expect("kernels of the processor do not fail");
        out
    }
}

fn round<T>(values: &[f32], rounded: impl Fn(f32) -> T) -> Vec<T> {
    values.iter().map(|value| rounded(*value)).collect()
}

/// A text that grows by one token at a time: the part of it that the model sees, and the cache of that part.
pub struct Growing<'a> {
    generator: &'a Generator,
    /// Tokens of the text in the end.
    length: usize,
    /// Tokens that are dropped at once.
    shift: usize,
    /// First token that the model sees.
    start: usize,
    /// The tokens of the last call; the cache has those from `start` on.
    seen: Vec<u32>,
    /// The cache, and for how many tokens it has room.
    cached: Option<(KeyValueCache, usize)>,
}

impl Growing<'_> {
    /// As [`Generator::extend`], for a text that may begin as that of the last call did: what both begin with is not computed again.
    ///
    /// # Errors
    /// The first error of `seen`, which ends the sampling.
    ///
    /// # Panics
    /// When no token is left to draw.
    pub fn extend<E>(
        &mut self,
        tokens: &mut Vec<u32>,
        count: usize,
        how: Sampling,
        mut seen: impl FnMut(u32) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut random = SplitMix64::new(how.seed ^ GOLDEN);
        for _ in 0..count {
            let mut logits = self.logits(tokens);
            self.generator.undrawn.iter().for_each(|row| logits[*row] = f32::NEG_INFINITY);
            let next = how.draw(&logits, random.next_fraction());
            tokens.push(next);
            seen(next)?;
        }
        Ok(())
    }

    /// Logits of the token after `tokens`, `[vocab]`: those of [`Generator::logits`], bit for bit. Tokens that those of the last call begin
    /// with are in the cache.
    pub fn logits(&mut self, tokens: &[u32]) -> Vec<f32> {
        let positions = self.generator.positions;
        let same = self.seen.iter().zip(tokens).take_while(|(one, other)| one == other).count();
        self.seen.splice(same.., tokens[same..].iter().copied());
        if same < self.start || tokens.len() <= self.start {
            // Another text.
            (self.start, self.cached) = (0, None);
        }
        if tokens.len() - self.start > positions {
            self.start = (tokens.len() - positions + self.shift - 1).min(tokens.len() - 1);
            self.cached = None;
        }
        let context = &tokens[self.start..];
        if self.cached.as_ref().is_some_and(|(_, room)| *room < context.len()) {
            self.cached = None;
        }
        if self.cached.is_none() && context.len() == positions {
            // The next token moves all others: what a cache holds would be of no use.
            return self.generator.next(context, 0, None);
        }
        // Of a text that has grown beyond its length, room for as much again.
        let length = if self.length < tokens.len() { 2 * tokens.len() } else { self.length };
        let room = positions.min(length - self.start);
        let past = if self.cached.is_some() { same.min(tokens.len() - 1) - self.start } else { 0 };
        let past = if ONE_BY_ONE * (context.len() - past - 1) > context.len() { 0 } else { past };
        let (cache, _) =
            self.cached.get_or_insert_with(|| (KeyValueCache::new(&self.generator.device, room), room));
        if past == 0 {
            return self.generator.next(context, 0, Some(cache));
        }
        // Behind others, a cache takes one token at a time.
        for end in past + 1..context.len() {
            let cx = self.generator.context(end, end - 1, Some(cache));
            self.generator.blocks(&cx, &context[end - 1..end], usize::MAX);
        }
        self.generator.next(context, context.len() - 1, Some(cache))
    }
}
