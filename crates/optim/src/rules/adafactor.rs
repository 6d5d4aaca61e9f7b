//! Adafactor (Shazeer and Stern, arXiv 1804.04235) with a rate that is given, as transformers' Trainer runs it: no first moment, neither a
//! relative step nor a scale by the parameter. A matrix keeps a number for each row and each column in place of one for each element.
//!
//! ```text
//! b = 1 - t^-0.8                       s = g^2 + 1e-30
//! R <- b R + (1 - b) mean of s over columns       C <- b C + (1 - b) mean of s over rows       (vectors: V <- b V + (1 - b) s)
//! u = g / sqrt(R C / mean(R))          (vectors: g / sqrt(V))
//! u <- u / max(1, rms(u))              p <- p (1 - lr wd) - lr u
//! ```

use crate::extent::{Extent, StateSpec, UpdatedParameter};
use crate::own::{UpdateRule, UpdateStep};

/// Added to squares of gradients.
const EPS: f32 = 1e-30;

/// Adafactor.
pub struct Adafactor {
    /// Weight decay of matrices; vectors have none.
    pub weight_decay: f32,
}

impl UpdateRule for Adafactor {
    /// Root mean squares are those of the whole parameter.
    fn extent(&self, _: &UpdatedParameter) -> Extent {
        Extent::Whole
    }

    /// transformers' names.
    fn states(&self, of: &UpdatedParameter) -> Vec<StateSpec> {
        match of.shape[..] {
            [rows, columns] => vec![
                StateSpec { name: "exp_avg_sq_row", shape: vec![rows] },
                StateSpec { name: "exp_avg_sq_col", shape: vec![columns] },
            ],
            _ => vec![StateSpec::like("exp_avg_sq", of)],
        }
    }

    fn update(&self, step: &UpdateStep, p: &mut [f32], g: &[f32], states: &mut [&mut [f32]]) {
        let kept = 1.0 - (step.number as f64).powf(-0.8) as f32;
        // A vector is one row, whose factor is 1.
        let (rows, columns): (&mut [f32], &mut [f32]) = match states {
            [rows, columns] => (rows, columns),
            [squares] => (&mut [], squares),
            _ => panic!("Adafactor has one state of a vector and two of a matrix"),
        };
        let width = columns.len();
        let share = (1.0 - kept) / (g.len() / width) as f32;
        columns.iter_mut().for_each(|column| *column *= kept);
        for (r, g) in g.chunks(width).enumerate() {
            columns.iter_mut().zip(g).for_each(|(column, g)| *column += share * (g * g + EPS));
            if let Some(row) = rows.get_mut(r) {
                *row =
                    kept * *row + (1.0 - kept) * (g.iter().map(|g| g * g + EPS).sum::<f32>() / width as f32);
            }
        }
        let mean = rows.iter().sum::<f32>() / rows.len() as f32;
        let of_row = |r: usize| rows.get(r).map_or(1.0, |row| (row / mean).sqrt().recip());
        let update = |of_row: f32, (g, column): (&f32, &f32)| g * of_row * column.sqrt().recip();
        let squares = g.chunks(width).enumerate().map(|(r, g)| {
            let of_row = of_row(r);
            g.iter().zip(&*columns).map(|of| f64::from(update(of_row, of)).powi(2)).sum::<f64>()
        });
        let rms = (squares.sum::<f64>() / g.len() as f64).sqrt().max(1.0) as f32;
        let decayed = 1.0 - step.lr * super::decay(step, self.weight_decay);
        for (r, (p, g)) in p.chunks_mut(width).zip(g.chunks(width)).enumerate() {
            let of_row = of_row(r);
            for (p, of) in p.iter_mut().zip(g.iter().zip(&*columns)) {
                *p = *p * decayed - step.lr * (update(of_row, of) / rms);
            }
        }
    }
}
