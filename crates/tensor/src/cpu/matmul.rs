//! Matrix products in f32: linear layers, their gradients, and what other kernels need.
//!
//! The smaller of the two operands (by its free dimension) is packed once, by all threads, into panels that
//! they share; the larger is cut along its free dimension into tasks, each of which packs its own block and runs over
//! the whole of the other (see [`microkernel`](super::microkernel)). So nothing is packed twice, and a long inner dimension goes
//! in pieces that fit the cache. How an element is summed does not depend on any of this.

use super::Cpu;
use super::microkernel::{self, DEPTH, Panels, Target};
use super::packing::{Piece, pack};
use super::pool::Shards;
use super::scratch::with_packing_scratch;
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
    fn piece(&self, steps: std::ops::Range<usize>, lanes: std::ops::Range<usize>) -> Piece {
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
pub(super) fn linear_weight_gradient(cpu: &Cpu, x: View, dy: View, dw: ViewMut, layout: Layout, accumulate: bool) {
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

/// Numbers of the shared operand that are packed at a time: 8 MiB, so that they stay in the L3 cache.
const SHARED: usize = 2 << 20;

/// Panels of its own operand that a task packs at most: of rows (256 KiB), of columns (256 KiB).
const OWN_PANELS: [usize; 2] = [16, 8];

/// A task has at least this many operations, about 10 microseconds.
const TASK_FLOPS: usize = 2 << 20;

/// Tasks come in multiples of this where there is enough to do, so that 2, 3, 4, 6, 8 threads finish together.
const EVEN: usize = 24;

/// Everything that the tasks of a product know.
struct Plan<'a> {
    isa: Isa,
    a: Matrix<'a>,
    b: Matrix<'a>,
    panels: Panels,
    /// Whether `a` is cut and `b` shared; else the other way round.
    cut_rows: bool,
}

/// `c = a · b (+ add) (+ bias by row)`; c row-major.
pub(super) fn product_onto(cpu: &Cpu, a: Matrix, b: Matrix, c: &mut [f32], add: Add, bias: Option<&[f32]>) {
    let [m, n, k] = [a.rows, b.columns, a.columns];
    assert_eq!((k, m * n), (b.rows, c.len()));
    assert!(bias.is_none_or(|bias| bias.len() == n));
    if m * n == 0 {
        return;
    }
    let panels = microkernel::panels(cpu.isa);
    let plan = Plan { isa: cpu.isa, a, b, panels, cut_rows: m >= n };
    let own_panels = plan.own_lanes().div_ceil(plan.own_panel());
    let most = OWN_PANELS[usize::from(!plan.cut_rows)];
    let tasks = own_panels.div_ceil(most).next_multiple_of(EVEN).min(own_panels);
    let tasks = tasks.min((2 * m * n * k / TASK_FLOPS).max(own_panels.div_ceil(most)));
    let span = (SHARED / plan.shared_width()).max(DEPTH) / DEPTH * DEPTH;
    let c = Shards::new(c);
    let add = match add {
        Add::Nothing => std::ptr::null(),
        Add::Itself => c.base().cast_const(),
        Add::Other(other) => {
            assert_eq!(other.len(), m * n);
            other.as_ptr()
        }
    };
    let whole = Target { to: c.base(), stride: n, add, add_stride: n, bias: bias.map_or(std::ptr::null(), |b| b.as_ptr()) };
    let whole = Whole(whole);
    cpu.scratch.with(|buffer| {
        let shared = buffer.slice::<f32>(plan.shared_width() * span.min(k));
        for start in (0..k.max(1)).step_by(span) {
            let depth = start..k.min(start + span);
            plan.pack_shared(cpu, depth.clone(), shared);
            let shared = &*shared;
            cpu.pool.run(tasks, &|task| {
                let edge = |i: usize| (i * own_panels / tasks * plan.own_panel()).min(plan.own_lanes());
                // SAFETY: the tasks' ranges of rows or columns are disjoint, and each is a block of c, which `whole`
                // covers as asserted above.
                unsafe { plan.run_task(edge(task)..edge(task + 1), depth.clone(), shared, &whole) };
            });
        }
    });
}

/// A target that tasks share: each writes its own block of it.
struct Whole(Target);

// SAFETY: the pointers are to slices borrowed for the whole product, and tasks touch disjoint blocks of
// what is written.
unsafe impl Sync for Whole {}

impl Plan<'_> {
    /// Rows of `a` or columns of `b`, whichever is cut.
    fn own_lanes(&self) -> usize {
        if self.cut_rows { self.a.rows } else { self.b.columns }
    }

    fn own_panel(&self) -> usize {
        if self.cut_rows { self.panels.rows } else { self.panels.columns }
    }

    /// Lanes of a panel of the shared operand, and numbers from step to step in it.
    fn shared_panel(&self) -> [usize; 2] {
        if self.cut_rows {
            [self.panels.columns, self.panels.columns]
        } else {
            [self.panels.rows, self.panels.row_width]
        }
    }

    fn shared_lanes(&self) -> usize {
        if self.cut_rows { self.b.columns } else { self.a.rows }
    }

    /// Packed numbers of the shared operand for one step of depth.
    fn shared_width(&self) -> usize {
        let [panel, width] = self.shared_panel();
        self.shared_lanes().div_ceil(panel) * width
    }

    /// Packs the steps `depth` of the shared operand: blocks of [`DEPTH`], each all panels one after another.
    fn pack_shared(&self, cpu: &Cpu, depth: std::ops::Range<usize>, shared: &mut [f32]) {
        let [panel, width] = self.shared_panel();
        let lanes = self.shared_lanes();
        let operand = if self.cut_rows { self.b } else { self.a.t() };
        // About 64 KiB a task.
        let group = (super::GRAIN / (width * DEPTH)).max(1) * panel;
        let groups = lanes.div_ceil(group);
        let blocks = depth.len().div_ceil(DEPTH);
        let shared = Shards::new(shared);
        cpu.pool.run(groups * blocks, &|task| {
            let (block, group_index) = (task / groups, task % groups);
            let steps = block * DEPTH..depth.len().min((block + 1) * DEPTH);
            let first = group_index * group;
            let count = group.min(lanes - first);
            let at = steps.start * self.shared_width() + first / panel * width * steps.len();
            let piece = operand.piece(depth.start + steps.start..depth.start + steps.end, first..first + count);
            // SAFETY: groups of panels are disjoint, and `piece` checked what is read.
            unsafe {
                let to = shared.piece(at..at + count.div_ceil(panel) * width * steps.len());
                pack(self.isa, piece, panel, width, to.as_mut_ptr());
            }
        });
    }

    /// The rows or columns `own` of the result, over the steps `depth`.
    ///
    /// # Safety
    /// Nobody else touches these rows or columns of the target, which is valid for the whole result.
    unsafe fn run_task(&self, own: std::ops::Range<usize>, depth: std::ops::Range<usize>, shared: &[f32], whole: &Whole) {
        let Panels { rows, row_width, columns } = self.panels;
        let own_width = if self.cut_rows { own.len().div_ceil(rows) * row_width } else { own.len().next_multiple_of(columns) };
        let operand = if self.cut_rows { self.a.t() } else { self.b };
        let width = if self.cut_rows { row_width } else { columns };
        with_packing_scratch(own_width * DEPTH, |packed| {
            for start in (depth.start..depth.end.max(depth.start + 1)).step_by(DEPTH) {
                let steps = start..depth.end.min(start + DEPTH);
                let count = steps.len();
                let shared = &shared[(start - depth.start) * self.shared_width()..][..count * self.shared_width()];
                let target = if start == 0 { whole.0 } else { Target { add: whole.0.to, bias: std::ptr::null(), ..whole.0 } };
                // SAFETY: the scratch holds the panels; `piece` checked what is read; the target is the caller's
                // promise.
                unsafe {
                    pack(self.isa, operand.piece(steps, own.clone()), self.own_panel(), width, packed.as_mut_ptr());
                    if self.cut_rows {
                        let target = target.at(own.start, 0);
                        microkernel::block(self.isa, [own.len(), self.b.columns, count], packed.as_ptr(), shared.as_ptr(), target);
                    } else {
                        // Rows in pieces that stay in L2 while the panels of columns pass.
                        let piece = OWN_PANELS[0] * rows;
                        for top in (0..self.a.rows).step_by(piece) {
                            let a = shared.as_ptr().add(top / rows * row_width * count);
                            let size = [piece.min(self.a.rows - top), own.len(), count];
                            microkernel::block(self.isa, size, a, packed.as_ptr(), target.at(top, own.start));
                        }
                    }
                }
            }
        });
    }
}

/// `c (+)= a · b` on this thread; rows of c are `stride` apart.
pub(super) fn small_product(isa: Isa, a: Matrix, b: Matrix, c: &mut [f32], stride: usize, accumulate: bool) {
    let [m, n, k] = [a.rows, b.columns, a.columns];
    assert_eq!(k, b.rows);
    if m * n == 0 {
        return;
    }
    assert!((m - 1) * stride + n <= c.len() && n <= stride);
    let Panels { rows, row_width, columns } = microkernel::panels(isa);
    let (a_width, b_width) = (m.div_ceil(rows) * row_width, n.next_multiple_of(columns));
    with_packing_scratch((a_width + b_width) * DEPTH.min(k), |packed| {
        let (packed_a, packed_b) = packed.split_at_mut(a_width * DEPTH.min(k));
        for start in (0..k.max(1)).step_by(DEPTH) {
            let steps = start..k.min(start + DEPTH);
            let to = c.as_mut_ptr();
            let add = if accumulate || start > 0 { to.cast_const() } else { std::ptr::null() };
            let target = Target { to, stride, add, add_stride: stride, bias: std::ptr::null() };
            let size = [m, n, steps.len()];
            // SAFETY: the scratch holds the panels; `piece` checked what is read; c was checked above.
            unsafe {
                pack(isa, a.t().piece(steps.clone(), 0..m), rows, row_width, packed_a.as_mut_ptr());
                pack(isa, b.piece(steps, 0..n), columns, columns, packed_b.as_mut_ptr());
                microkernel::block(isa, size, packed_a.as_ptr(), packed_b.as_ptr(), target);
            }
        }
    });
}
