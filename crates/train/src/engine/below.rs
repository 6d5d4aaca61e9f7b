//! The weights below adapters as a run computes with them: rounded as the run has rounded them, or quantised and back; and the norms with
//! which magnitudes start.

use std::ops::Range;

use half::{bf16, f16};
use phalanx_layers::ParameterSpec;
use phalanx_models::Model;
use phalanx_tensor::{DType, Layout, blocks};

use crate::config::QuantisedBase;
use crate::engine::base::Base;
use crate::engine::error::RunError;
use crate::engine::principal::ReadElements;

/// The weights below adapters, and how the run keeps them.
pub(crate) struct Below {
    base: Base,
    /// The type to which they are rounded.
    compute: DType,
    /// Weights that are quantised before.
    quantised: Option<QuantisedBase>,
}

impl Below {
    /// A base that is rounded to the type of computing, some of whose weights are quantised before.
    pub(crate) fn new(base: Base, compute: DType, quantised: Option<QuantisedBase>) -> Below {
        Below { base, compute, quantised }
    }

    /// The weights before they are rounded.
    pub(crate) fn base(&self) -> &Base {
        &self.base
    }

    /// Reads elements of a whole parameter as the run has computed with them.
    pub(crate) fn read(
        &self,
        model: &dyn Model,
        spec: &ParameterSpec,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), RunError> {
        match self.quantised.as_ref().filter(|quantised| quantised.has(spec)) {
            None => self.base.read(model, spec, elements, out)?,
            Some(QuantisedBase { dtype, .. }) => {
                let block = dtype.block() as u64;
                let start = elements.start / block * block;
                let mut numbers = vec![0.0; (elements.end.next_multiple_of(block) - start) as usize];
                self.base.read(model, spec, start..start + numbers.len() as u64, &mut numbers)?;
                numbers = blocks::dequantised(*dtype, &blocks::quantised(*dtype, &numbers));
                out.copy_from_slice(&numbers[(elements.start - start) as usize..][..out.len()]);
            }
        }
        round(self.compute, out);
        Ok(())
    }

    /// Norms of the weights of some of all outputs of the layer with this weight: initial magnitudes.
    ///
    /// # Errors
    /// As [`Below::read`].
    pub(crate) fn norms(
        &self,
        model: &dyn Model,
        weight: &ParameterSpec,
        outputs: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), RunError> {
        let mut read = |elements: Range<u64>, out: &mut [f32]| self.read(model, weight, elements, out);
        let shape = [weight.shape[0], weight.shape[1]];
        let outputs = outputs.start as usize..outputs.end as usize;
        let squares = squares_of(model.linear_layout(), shape, outputs, &mut read)?;
        out.iter_mut().zip(squares).for_each(|(norm, square)| *norm = square.sqrt() as f32);
        Ok(())
    }
}

/// Elements of a weight that are read at once.
const WINDOW: usize = 1 << 20;

/// Sums of squares of the weights of some outputs, of a weight with these extents that `read` reads from element to element.
///
/// # Errors
/// Those of `read`.
pub(crate) fn squares_of<E>(
    layout: Layout,
    [rows, columns]: [usize; 2],
    outputs: Range<usize>,
    read: &mut ReadElements<E>,
) -> Result<Vec<f64>, E> {
    let mut squares = vec![0f64; outputs.len()];
    let rows = if layout == Layout::OutIn { outputs.clone() } else { 0..rows };
    let (together, end) = ((WINDOW / columns).max(1), rows.end);
    let mut window = vec![0.0; together.min(rows.len()) * columns];
    for start in rows.step_by(together) {
        let some = start..(start + together).min(end);
        let window = &mut window[..some.len() * columns];
        read((some.start * columns) as u64..(some.end * columns) as u64, window)?;
        for (row, numbers) in some.zip(window.chunks_exact(columns)) {
            match layout {
                Layout::OutIn => {
                    let sum: f64 = numbers.iter().map(|number| f64::from(*number).powi(2)).sum();
                    squares[row - outputs.start] = sum;
                }
                Layout::InOut => {
                    let sums = squares.iter_mut().zip(&numbers[outputs.clone()]);
                    sums.for_each(|(sum, number)| *sum += f64::from(*number).powi(2));
                }
            }
        }
    }
    Ok(squares)
}

/// Rounds numbers to a type of 16 bits, if it is one.
fn round(compute: DType, numbers: &mut [f32]) {
    match compute {
        DType::BF16 => numbers.iter_mut().for_each(|number| *number = bf16::from_f32(*number).to_f32()),
        DType::F16 => numbers.iter_mut().for_each(|number| *number = f16::from_f32(*number).to_f32()),
        _ => {}
    }
}
