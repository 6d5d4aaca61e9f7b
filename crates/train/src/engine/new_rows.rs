//! Rows of the token table and the output projection for tokens that a folder's tables lack: drawn as transformers draws them, from a normal
//! distribution with the mean of the old rows and their covariance times 1e-9.
//!
//! `mean + sum over old rows of g_v (x_v - mean) * sqrt(1e-9 / V)`, with normal numbers g_v, has that distribution: one pass over the old rows,
//! and no matrix of covariances. Numbers depend on the rows alone, so all ranks draw the same.

use std::ops::Range;

use phalanx_checkpoint::HuggingFaceDir;
use phalanx_layers::{Init, Kind, ParameterSpec, table_of_added};
use phalanx_models::Model;
use phalanx_plan::Stripe;
use serde_json::Value;

use crate::engine::error::RunError;

/// Factor of the covariance.
const SHARE: f64 = 1e-9;

/// Elements that are read at once.
const WINDOW: usize = 1 << 20;

/// A table of which a parameter has some rows, and a folder others.
pub(crate) struct Table<'a> {
    dir: &'a HuggingFaceDir,
    name: &'a str,
    /// Rows in the folder, and columns.
    rows: usize,
    columns: usize,
    /// The parameter's first row.
    first: usize,
    /// Rows of the model's table.
    all: usize,
}

impl<'a> Table<'a> {
    /// The table with this name and shape in the folder, where `spec` has other rows of it, as its `config.json` has it; None for any
    /// other difference.
    pub(crate) fn of(
        dir: &'a HuggingFaceDir,
        model: &dyn Model,
        spec: &ParameterSpec,
        (name, given): (&'a str, &[usize]),
    ) -> Option<Table<'a>> {
        let (&[rows, columns], &[own, own_columns]) = (given, spec.whole_shape()) else { return None };
        let config = dir.config();
        let written = [config.get("vocab_size"), config.pointer("/text_config/vocab_size")];
        let written = written.into_iter().flatten().find_map(Value::as_u64);
        let all = model.vocab();
        let first = if table_of_added(&spec.name).is_some() { all.checked_sub(own)? } else { 0 };
        let is_table = matches!(spec.kind, Kind::Table | Kind::Head) && columns == own_columns;
        let fits = is_table && written == Some(rows as u64) && rows <= all && first + own <= all;
        fits.then_some(Table { dir, name, rows, columns, first, all })
    }

    /// Reads elements of this rank's part of the parameter: those of the folder, and behind them drawn ones.
    pub(crate) fn read(
        &self,
        stripe: &Stripe,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), RunError> {
        let (first, known) = ((self.first * self.columns) as u64, (self.rows * self.columns) as u64);
        let mut drawn: Option<Vec<f32>> = None;
        for (here, there) in stripe.runs(elements.clone()) {
            let out = &mut out[(here.start - elements.start) as usize..(here.end - elements.start) as usize];
            let there = first + there.start..first + there.end;
            let old = known.clamp(there.start, there.end) - there.start;
            let (of_folder, new) = out.split_at_mut(old as usize);
            if !of_folder.is_empty() {
                let whole = Stripe::whole(known);
                self.dir.read_weights(self.name, &whole, there.start..there.start + old, of_folder)?;
            }
            if !new.is_empty() {
                let start = (there.start + old - known) as usize;
                if drawn.is_none() {
                    drawn = Some(self.draw()?);
                }
                let rows = drawn.as_ref().expect("they were drawn");
                new.copy_from_slice(&rows[start..start + new.len()]);
            }
        }
        Ok(())
    }

    /// The rows that the folder lacks.
    fn draw(&self) -> Result<Vec<f32>, RunError> {
        let (count, columns) = (self.all - self.rows, self.columns);
        let (mut mean, mut sums) = (vec![0f64; columns], vec![0f64; count * columns]);
        let mut totals = vec![0f64; count];
        let together = (WINDOW / columns).max(1);
        let whole = Stripe::whole((self.rows * columns) as u64);
        for start in (0..self.rows).step_by(together) {
            let rows = start..(start + together).min(self.rows);
            let mut window = vec![0.0; rows.len() * columns];
            let elements = (rows.start * columns) as u64..(rows.end * columns) as u64;
            self.dir.read_weights(self.name, &whole, elements, &mut window)?;
            for (row, numbers) in rows.zip(window.chunks_exact(columns)) {
                mean.iter_mut().zip(numbers).for_each(|(sum, x)| *sum += f64::from(*x));
                for (new, (sums, total)) in sums.chunks_exact_mut(columns).zip(&mut totals).enumerate() {
                    let mut normal = [0f32];
                    Init::Normal(1.0).fill(0, "new rows", (new * self.rows + row) as u64, &mut normal);
                    let factor = f64::from(normal[0]);
                    *total += factor;
                    sums.iter_mut().zip(numbers).for_each(|(sum, x)| *sum += factor * f64::from(*x));
                }
            }
        }
        let rows = self.rows as f64;
        mean.iter_mut().for_each(|sum| *sum /= rows);
        let share = (SHARE / rows).sqrt();
        let new = sums.chunks_exact(columns).zip(&totals);
        let row = |(sums, total): (&[f64], &f64)| {
            sums.iter()
                .zip(&mean)
                .map(|(sum, mean)| (mean + share * (sum - total * mean)) as f32)
                .collect::<Vec<_>>()
        };
        Ok(new.flat_map(row).collect())
    }
}
