//! Matrix products in f32: linear layers, their gradients, and what other kernels need.
//!
//! The smaller of the two operands (by its free dimension) is packed once, by all threads, into panels that
//! they share; the larger is cut along its free dimension into tasks, each of which packs its own block and
//! runs over the whole of the other (see [`microkernel`](super::microkernel)). So nothing is packed twice,
//! and a long inner dimension goes in pieces that fit the cache. How an element is summed does not depend
//! on any of this.

use std::ops::Range;

use super::Cpu;
use super::microkernel::{self, Across, DEPTH, Down, Panels, Target};
use super::packing::{Form, Piece, pack};
use super::scratch::with_thread_scratch;
use super::shards::Shards;
use super::simd::Isa;
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

    /// Rows and columns.
    pub(super) fn shape(self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Some of the rows.
    pub(super) fn rows(self, rows: Range<usize>) -> Matrix<'a> {
        assert!(rows.start < rows.end && rows.end <= self.rows);
        Matrix { data: &self.data[rows.start * self.row_stride..], rows: rows.len(), ..self }
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

    /// Rows `steps` and columns `lanes`, to be packed.
    pub(super) fn piece(&self, steps: Range<usize>, lanes: Range<usize>) -> Piece {
        assert!(steps.start <= steps.end && steps.end <= self.rows);
        assert!(lanes.start < lanes.end && lanes.end <= self.columns);
        let first = steps.start * self.row_stride + lanes.start * self.column_stride;
        Piece {
            from: self.data.as_ptr().wrapping_add(first),
            step_stride: self.row_stride,
            lane_stride: self.column_stride,
            depth: steps.len(),
            lanes: lanes.len(),
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
    let add = residual.map_or(Add::Nothing, |r| Add::Other(r.as_slice()));
    let bias = bias.map(|b| b.as_slice());
    product_onto(cpu, rows_of(&x), weight(&w), y.into_slice(), add, bias);
}

/// `dx (+)= dy · wᵀ`.
pub(super) fn linear_input_gradient(cpu: &Cpu, dy: View, w: Weight, dx: ViewMut, accumulate: bool) {
    product(cpu, rows_of(&dy), weight(&w).t(), dx.into_slice(), accumulate);
}

/// `dw (+)= xᵀ · dy`, in the layout given.
pub(super) fn linear_weight_gradient(
    cpu: &Cpu,
    x: View,
    dy: View,
    dw: ViewMut,
    layout: Layout,
    accumulate: bool,
) {
    let (x, dy) = (rows_of(&x), rows_of(&dy));
    match layout {
        Layout::InOut => product(cpu, x.t(), dy, dw.into_slice(), accumulate),
        Layout::OutIn => product(cpu, dy.t(), x, dw.into_slice(), accumulate),
    }
}

/// What a product is added to.
#[derive(Clone, Copy)]
pub(super) enum Add<'a> {
    /// The result is overwritten.
    Nothing,
    /// The result accumulates.
    Itself,
    /// The result is overwritten by this plus the product.
    Other(&'a [f32]),
}

/// `c (+)= a · b`; c row-major.
pub(super) fn product(cpu: &Cpu, a: Matrix, b: Matrix, c: &mut [f32], accumulate: bool) {
    product_onto(cpu, a, b, c, if accumulate { Add::Itself } else { Add::Nothing }, None);
}

/// Packed numbers that tasks share at a time: 8 MiB, so that they stay in the L3 cache.
const SHARED: usize = 2 << 20;

/// Panels of its own operand that a task takes at most: of rows, of columns; 256 KiB each.
const OWN_PANELS: [usize; 2] = [16, 8];

/// A task has at least this many operations, about 10 microseconds.
const TASK_FLOPS: usize = 2 << 20;

/// Tasks come in multiples of this where there is enough to do, so that 2, 3, 4, 6, 8 threads finish
/// together.
const EVEN: usize = 24;

/// Rows shorter than this are slow to read from memory strip by strip.
const NARROW: usize = 128;

/// One operand, as it is packed: steps of depth by lanes.
#[derive(Clone, Copy)]
struct Side<'a> {
    matrix: Matrix<'a>,
    /// Lanes of a panel.
    panel: usize,
    /// Numbers from one step of a panel to the next.
    width: usize,
}

impl Side<'_> {
    fn lanes(&self) -> usize {
        self.matrix.columns
    }

    fn panels(&self) -> usize {
        self.lanes().div_ceil(self.panel)
    }

    /// Packed numbers of one step of depth.
    fn packed(&self) -> usize {
        self.panels() * self.width
    }

    /// Packs the steps `depth`, by all threads: blocks of [`DEPTH`], each all panels one after another.
    fn pack_all(&self, cpu: &Cpu, depth: Range<usize>, packed: &mut [f32]) {
        // Rows that lie in order are read whole, a piece of the steps by a task; others panel by panel.
        let [steps, panels] = if self.matrix.column_stride == 1 {
            [(super::GRAIN / self.packed()).clamp(1, DEPTH), self.panels()]
        } else {
            [DEPTH, (super::GRAIN / (self.width * DEPTH)).max(1)]
        };
        let groups = self.panels().div_ceil(panels);
        let pieces = DEPTH.div_ceil(steps);
        let packed = Shards::new(packed);
        cpu.pool.run(depth.len().div_ceil(DEPTH) * pieces * groups, &|task| {
            let (block, piece, group) = (task / groups / pieces, task / groups % pieces, task % groups);
            let block = block * DEPTH..depth.len().min((block + 1) * DEPTH);
            let piece = block.start + piece * steps..block.end.min(block.start + (piece + 1) * steps);
            if piece.is_empty() {
                return;
            }
            let lanes = group * panels * self.panel..self.lanes().min((group + 1) * panels * self.panel);
            let form = Form { lanes: self.panel, width: self.width, stride: self.width * block.len() };
            let at = block.start * self.packed()
                + group * panels * form.stride
                + (piece.start - block.start) * self.width;
            assert!(at < packed.len());
            let piece = self.matrix.piece(depth.start + piece.start..depth.start + piece.end, lanes);
            // SAFETY: these steps of these panels are this task's alone, and inside the buffer, which holds
            // all panels of all blocks; `Matrix::piece` checked what is read.
            unsafe { pack(cpu.isa, piece, form, packed.base().add(at)) };
        });
    }
}

/// Everything that the tasks of a product know.
struct Plan<'a> {
    isa: Isa,
    a: Side<'a>,
    b: Side<'a>,
    /// Whether tasks cut `a`; else they cut `b`.
    cut_rows: bool,
    /// Whether a task packs what it cuts off; else both operands are packed before.
    packs_own: bool,
    tasks: usize,
}

/// `c = a · b (+ add) (+ bias by row)`; c row-major.
pub(super) fn product_onto(cpu: &Cpu, a: Matrix, b: Matrix, c: &mut [f32], add: Add, bias: Option<&[f32]>) {
    let [m, n, k] = [a.rows, b.columns, a.columns];
    assert_eq!((k, m * n), (b.rows, c.len()));
    assert!(bias.is_none_or(|bias| bias.len() == n));
    if m * n == 0 {
        return;
    }
    let plan = Plan::new(cpu.isa, a, b);
    let c = Shards::new(c);
    let add = match add {
        Add::Nothing => std::ptr::null(),
        Add::Itself => c.base().cast_const(),
        Add::Other(other) => {
            assert_eq!(other.len(), m * n);
            other.as_ptr()
        }
    };
    let bias = bias.map_or(std::ptr::null(), |b| b.as_ptr());
    let whole = Whole(Target { to: c.base(), stride: n, add, add_stride: n, bias });
    let (own, other) = plan.sides();
    let shared = other.packed() + if plan.packs_own { 0 } else { own.packed() };
    let span = (SHARED / shared).max(DEPTH) / DEPTH * DEPTH;
    cpu.scratch.with(|buffer| {
        let buffer = buffer.slice::<f32>(shared * span.min(k));
        let (other_packed, own_packed) = buffer.split_at_mut(other.packed() * span.min(k));
        for start in (0..k.max(1)).step_by(span) {
            let depth = start..k.min(start + span);
            other.pack_all(cpu, depth.clone(), other_packed);
            if !plan.packs_own {
                own.pack_all(cpu, depth.clone(), own_packed);
            }
            let packed = [&*own_packed, &*other_packed];
            cpu.pool.run(plan.tasks, &|task| {
                // SAFETY: the tasks' rows or columns are disjoint, and `whole` covers c, as asserted above.
                unsafe { plan.run_task(task, depth.clone(), packed, &whole) };
            });
        }
    });
}

/// A target that tasks share: each writes its own block of it.
struct Whole(Target);

// SAFETY: the pointers are to slices borrowed for the whole product, and tasks touch disjoint blocks of
// what is written.
unsafe impl Sync for Whole {}

impl<'a> Plan<'a> {
    fn new(isa: Isa, a: Matrix<'a>, b: Matrix<'a>) -> Plan<'a> {
        let [m, n, k] = [a.rows, b.columns, a.columns];
        let Panels { rows, row_width, columns } = microkernel::panels(isa);
        let a = Side { matrix: a.t(), panel: rows, width: row_width };
        let b = Side { matrix: b, panel: columns, width: columns };
        let cut_rows = m >= n;
        let own = if cut_rows { a } else { b };
        let least = own.panels().div_ceil(OWN_PANELS[usize::from(!cut_rows)]);
        let tasks =
            least.next_multiple_of(EVEN).min(own.panels()).min((2 * m * n * k / TASK_FLOPS).max(least));
        let narrow = own.matrix.column_stride == 1 && own.lanes() / tasks < NARROW && own.lanes() > NARROW;
        Plan { isa, a, b, cut_rows, packs_own: !narrow, tasks }
    }

    /// What is cut, and the other.
    fn sides(&self) -> (Side<'a>, Side<'a>) {
        if self.cut_rows { (self.a, self.b) } else { (self.b, self.a) }
    }

    /// One task's rows or columns of the result, over the steps `depth`; `packed` holds the operands that
    /// were packed before, own and other.
    ///
    /// # Safety
    /// Nobody else touches these rows or columns of the target, which is valid for the whole result.
    unsafe fn run_task(&self, task: usize, depth: Range<usize>, packed: [&[f32]; 2], whole: &Whole) {
        let (own, other) = self.sides();
        let edge = |task: usize| task * own.panels() / self.tasks;
        let panels = edge(task)..edge(task + 1);
        let lanes = panels.start * own.panel..own.lanes().min(panels.end * own.panel);
        let length = if self.packs_own { panels.len() * own.width * DEPTH } else { 0 };
        with_thread_scratch(length, |scratch| {
            for start in (depth.start..depth.end.max(depth.start + 1)).step_by(DEPTH) {
                let steps = start..depth.end.min(start + DEPTH);
                let count = steps.len();
                let at = start - depth.start;
                let other_packed = &packed[1][at * other.packed()..][..count * other.packed()];
                let own_packed = if self.packs_own {
                    let form = Form { lanes: own.panel, width: own.width, stride: own.width * count };
                    // SAFETY: the scratch holds the panels; `Matrix::piece` checked what is read.
                    unsafe {
                        pack(self.isa, own.matrix.piece(steps, lanes.clone()), form, scratch.as_mut_ptr())
                    };
                    &*scratch
                } else {
                    &packed[0][at * own.packed() + panels.start * own.width * count..]
                        [..panels.len() * own.width * count]
                };
                let target = if start == 0 {
                    whole.0
                } else {
                    Target { add: whole.0.to, bias: std::ptr::null(), ..whole.0 }
                };
                // SAFETY: the panels are packed; the target is the caller's promise.
                unsafe { self.multiply(lanes.clone(), count, [own_packed, other_packed], target) };
            }
        });
    }

    /// One block of depth for a task.
    ///
    /// # Safety
    /// As [`Plan::run_task`]; the slices hold the packed panels of `depth` steps, own and other.
    unsafe fn multiply(&self, lanes: Range<usize>, depth: usize, [own, other]: [&[f32]; 2], target: Target) {
        let down = |from: *const f32| Down { from, step: self.a.width, panel: self.a.width * depth };
        let across = |from: *const f32| Across { from, panel: self.b.width * depth };
        // SAFETY: the caller's promise.
        unsafe {
            if self.cut_rows {
                let size = [lanes.len(), self.b.lanes(), depth];
                let target = target.at(lanes.start, 0);
                microkernel::block(self.isa, size, down(own.as_ptr()), across(other.as_ptr()), target);
                return;
            }
            // Rows in pieces that stay in L2 while the panels of columns pass.
            let piece = OWN_PANELS[0] * self.a.panel;
            for top in (0..self.a.lanes()).step_by(piece) {
                let a = other.as_ptr().add(top / self.a.panel * self.a.width * depth);
                let size = [piece.min(self.a.lanes() - top), lanes.len(), depth];
                microkernel::block(
                    self.isa,
                    size,
                    down(a),
                    across(own.as_ptr()),
                    target.at(top, lanes.start),
                );
            }
        }
    }
}
