//! Matrix products, in f32.

use gemm::Parallelism;

use super::Cpu;
use super::pool::Shards;
use crate::buffer::{View, ViewMut};
use crate::kernels::{Layout, Weight};

/// A matrix to read: any strides.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of `columns` numbers, `stride` apart.
    pub(super) fn new(data: &'a [f32], [rows, columns]: [usize; 2], stride: usize) -> Matrix<'a> {
        assert!(rows == 0 || columns == 0 || (rows - 1) * stride + columns <= data.len());
        Matrix { data, rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// Transposed.
    pub(super) fn t(self) -> Matrix<'a> {
        Matrix {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

pub(super) fn weight<'a>(w: &Weight<'a>) -> Matrix<'a> {
    let [rows, columns] = w.matrix.dims();
    let matrix = Matrix::new(w.matrix.as_slice(), [rows, columns], columns);
    match w.layout {
        Layout::InOut => matrix,
        Layout::OutIn => matrix.t(),
    }
}

fn rows_of<'a>(x: &View<'a>) -> Matrix<'a> {
    let [rows, columns] = x.shape().rows_cols();
    Matrix::new(x.as_slice(), [rows, columns], columns)
}

/// `y = x · w (+ bias) (+ residual)`.
pub(super) fn linear(cpu: &Cpu, x: View, w: Weight, bias: Option<View>, residual: Option<View>, y: ViewMut) {
    let [_, out] = y.shape().rows_cols();
    let y = y.into_slice::<f32>();
    let bias = bias.map(|b| b.as_slice::<f32>());
    let residual = residual.map(|r| r.as_slice::<f32>());
    if bias.is_some() || residual.is_some() {
        cpu.over_mut(y, super::row_grain(out) * out, |range, y| {
            match residual {
                Some(r) => y.copy_from_slice(&r[range]),
                None => y.fill(0.0),
            }
            if let Some(bias) = bias {
                for y in y.chunks_exact_mut(out) {
                    y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
                }
            }
        });
    }
    product(cpu, rows_of(&x), weight(&w), y, bias.is_some() || residual.is_some());
}

/// `dx (+)= dy · wᵀ`.
pub(super) fn linear_input_gradient(cpu: &Cpu, dy: View, w: Weight, dx: ViewMut, accumulate: bool) {
    product(cpu, rows_of(&dy), weight(&w).t(), dx.into_slice(), accumulate);
}

/// `dw (+)= xᵀ · dy`, in the layout given.
pub(super) fn linear_weight_gradient(cpu: &Cpu, x: View, dy: View, dw: ViewMut, layout: Layout, accumulate: bool) {
    let (x, dy) = (rows_of(&x), rows_of(&dy));
    match layout {
        Layout::InOut => product(cpu, x.t(), dy, dw.into_slice(), accumulate),
        Layout::OutIn => product(cpu, dy.t(), x, dw.into_slice(), accumulate),
    }
}

/// `c (+)= a · b`; c row-major.
pub(super) fn product(cpu: &Cpu, a: Matrix, b: Matrix, c: &mut [f32], accumulate: bool) {
    let (m, n) = (a.rows, b.columns);
    assert_eq!((a.columns, m * n), (b.rows, c.len()));
    let [row_grain, column_grain] = [512.min(m.next_multiple_of(8)), 2048];
    let down = m.div_ceil(row_grain.max(1));
    let c = Shards::new(c);
    cpu.pool.run(down * n.div_ceil(column_grain), &|i| {
        let (top, left) = (i % down * row_grain, i / down * column_grain);
        let (rows, columns) = (row_grain.min(m - top), column_grain.min(n - left));
        // SAFETY: the block lies inside all three matrices (asserted above and in `Matrix::new`), and this
        // task alone touches this block of c.
        unsafe {
            gemm_block(
                [rows, columns, a.columns],
                a.data.as_ptr().add(top * a.row_stride),
                [a.row_stride, a.column_stride],
                b.data.as_ptr().add(left * b.column_stride),
                [b.row_stride, b.column_stride],
                c.base().add(top * n + left),
                n,
                accumulate,
            );
        }
    });
}

/// `c (+)= a · b` on this thread; rows of c are `stride` apart.
pub(super) fn small_product(a: Matrix, b: Matrix, c: &mut [f32], stride: usize, accumulate: bool) {
    assert_eq!(a.columns, b.rows);
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    assert!((a.rows - 1) * stride + b.columns <= c.len() && b.columns <= stride);
    // SAFETY: all three lie inside their slices (asserted above and in `Matrix::new`).
    unsafe {
        gemm_block(
            [a.rows, b.columns, a.columns],
            a.data.as_ptr(),
            [a.row_stride, a.column_stride],
            b.data.as_ptr(),
            [b.row_stride, b.column_stride],
            c.as_mut_ptr(),
            stride,
            accumulate,
        );
    }
}

/// # Safety
/// a, b and c are matrices of [m, k], [k, n] and [m, n] with these strides; c is not aliased.
unsafe fn gemm_block(
    [m, n, k]: [usize; 3],
    a: *const f32,
    a_strides: [usize; 2],
    b: *const f32,
    b_strides: [usize; 2],
    c: *mut f32,
    c_stride: usize,
    accumulate: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c,
            1,
            c_stride as isize,
            accumulate,
            a,
            a_strides[1] as isize,
            a_strides[0] as isize,
            b,
            b_strides[1] as isize,
            b_strides[0] as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
