//! An operation that the caller brings: a kernel of its own, with operands that are described as every operation's are.
//!
//! The kernel is host code, which runs where a device computes with the host processor. In a dry run it does not run: the
//! description says what it costs and how its results are placed on the mesh.

use phalanx_plan::trace::Site;

use crate::device::Device;
use crate::operation::{Describe, Operand as Visited, Operands, Price};
use crate::operations::family::family;
use crate::placement::rules::{Operand, Rule};
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Operations that callers bring.
    Own { OwnOperation, }
}

/// Kernel of an own operation: it gets its operands in the order in which they were described.
type OwnKernel = dyn for<'b> FnOnce(Vec<View<'b>>, Vec<ViewMut<'b>>) + Send;

/// A call of a kernel of the caller's own.
///
/// Each operand has letters, one for each dimension, as in an einsum; `r` in front stands for all leading dimensions.
/// They say how results are placed when operands are sharded over an axis of the mesh: a result that has the sharded
/// letter is sharded in it, and one that does not have it is a partial sum over the ranks. For a scale per column:
///
/// ```
/// # use phalanx_tensor::{Device, OwnOperation, View, ViewMut};
/// fn scale(device: &Device, x: View, w: View, y: ViewMut) {
///     let call = OwnOperation::new("scale").read("x", "rh", x).read("w", "h", w).write("y", "rh", y);
///     call.run(device, |[x, w], [y]| {
///         let (x, w) = (x.as_slice::<f32>(), w.as_slice::<f32>());
///         y.into_slice::<f32>().iter_mut().enumerate().for_each(|(i, y)| *y = x[i] * w[i % w.len()]);
///     });
/// }
/// ```
pub struct OwnOperation<'a> {
    name: &'static str,
    reads: Vec<View<'a>>,
    writes: Vec<ViewMut<'a>>,
    placement: OwnPlacement,
    kernel: Option<Box<OwnKernel>>,
}

/// Placement rule of an own operation.
enum OwnPlacement {
    /// By the letters of its operands.
    Letters { reads: Vec<Named>, writes: Vec<(Named, bool)>, whole: Vec<(char, &'static str)> },
    /// The first written operand is updated from the first read one, element by element.
    Update,
}

/// Name and letters of an operand.
#[derive(Clone, Copy)]
struct Named {
    name: &'static str,
    letters: &'static str,
}

impl<'a> OwnOperation<'a> {
    /// An operation without operands; `name` appears in traces and errors.
    pub fn new(name: &'static str) -> OwnOperation<'a> {
        let placement = OwnPlacement::Letters { reads: Vec::new(), writes: Vec::new(), whole: Vec::new() };
        OwnOperation { name, reads: Vec::new(), writes: Vec::new(), placement, kernel: None }
    }

    /// An operation that updates `parameters` from `gradient`, element by element: an optimizer's. More operands may
    /// follow; they are not checked.
    pub fn update(name: &'static str, parameters: ViewMut<'a>, gradient: View<'a>) -> OwnOperation<'a> {
        let (reads, writes) = (vec![gradient], vec![parameters]);
        OwnOperation { name, reads, writes, placement: OwnPlacement::Update, kernel: None }
    }

    /// Reads `view`.
    #[must_use]
    pub fn read(mut self, name: &'static str, letters: &'static str, view: View<'a>) -> OwnOperation<'a> {
        self.reads.push(view);
        if let OwnPlacement::Letters { reads, .. } = &mut self.placement {
            reads.push(Named { name, letters });
        }
        self
    }

    /// Overwrites `view`.
    #[must_use]
    pub fn write(self, name: &'static str, letters: &'static str, view: ViewMut<'a>) -> OwnOperation<'a> {
        self.result(Named { name, letters }, false, view)
    }

    /// Adds to `view` where `accumulate` says so, and overwrites it otherwise: a parameter's gradient.
    #[must_use]
    pub fn gradient(
        self,
        name: &'static str,
        letters: &'static str,
        (view, accumulate): (ViewMut<'a>, bool),
    ) -> OwnOperation<'a> {
        self.result(Named { name, letters }, accumulate, view)
    }

    fn result(mut self, named: Named, accumulates: bool, view: ViewMut<'a>) -> OwnOperation<'a> {
        self.writes.push(view);
        if let OwnPlacement::Letters { writes, .. } = &mut self.placement {
            writes.push((named, accumulates));
        }
        self
    }

    /// The dimension with this letter may not be sharded: the kernel needs it whole. `why` completes "needs it whole".
    #[must_use]
    pub fn whole(mut self, letter: char, why: &'static str) -> OwnOperation<'a> {
        if let OwnPlacement::Letters { whole, .. } = &mut self.placement {
            whole.push((letter, why));
        }
        self
    }

    /// Checks that each operand has as many dimensions as letters, and that equal letters have equal extents.
    fn check_letters(&self) {
        let OwnPlacement::Letters { reads, writes, whole } = &self.placement else { return };
        let read = reads.iter().zip(self.reads.iter().map(View::shape));
        let written = writes.iter().map(|(named, _)| named).zip(self.writes.iter().map(ViewMut::shape));
        let mut extents: Vec<(char, usize, &str)> = Vec::new();
        for (Named { name: operand, letters }, shape) in read.chain(written) {
            let name = self.name;
            let dims: &[usize] = shape.as_slice();
            let own = letters.strip_prefix('r').unwrap_or(letters);
            let fits =
                if own.len() == letters.len() { dims.len() == own.len() } else { dims.len() >= own.len() };
            assert!(fits, "`{name}` describes `{operand}` of shape {shape:?} by the letters \"{letters}\"");
            let rows: usize = dims[..dims.len() - own.len()].iter().product();
            let leading = (own.len() < letters.len()).then_some(('r', rows));
            for (letter, extent) in
                leading.into_iter().chain(own.chars().zip(dims[dims.len() - own.len()..].iter().copied()))
            {
                match extents.iter().find(|(known, ..)| *known == letter) {
                    None => extents.push((letter, extent, operand)),
                    Some((_, other, first)) => assert_eq!(
                        extent, *other,
                        "`{name}`: the dimension `{letter}` of `{operand}` and of `{first}` must be equal"
                    ),
                }
            }
        }
        for (letter, _) in whole {
            let is_known = extents.iter().any(|(known, ..)| known == letter);
            assert!(is_known, "`{}` needs the dimension `{letter}` whole, but no operand has it", self.name);
        }
    }

    /// Runs `kernel` on the operands, read ones and written ones each in the order in which they were described.
    ///
    /// # Panics
    /// When the kernel takes another number of operands.
    #[track_caller]
    pub fn run<const R: usize, const W: usize>(
        self,
        device: &Device,
        kernel: impl for<'b> FnOnce([View<'b>; R], [ViewMut<'b>; W]) + Send + 'static,
    ) {
        let (name, given) = (self.name, (self.reads.len(), self.writes.len()));
        assert_eq!(given, (R, W), "operands (read, written) of `{name}`, and those of its kernel");
        self.run_on_all(device, move |reads, writes| {
            let wrong = "counted when the operation was issued";
            kernel(reads.try_into().expect(wrong), writes.try_into().expect(wrong));
        });
    }

    /// As [`OwnOperation::run`], for a number of operands that is not known in advance.
    #[track_caller]
    pub fn run_on_all(
        self,
        device: &Device,
        kernel: impl for<'b> FnOnce(Vec<View<'b>>, Vec<ViewMut<'b>>) + Send + 'static,
    ) {
        device.run(OwnOperation { kernel: Some(Box::new(kernel)), ..self });
    }

    /// Runs the kernel, on memory that the host can address: for devices that compute with the host processor.
    pub fn execute(self) {
        if let Some(kernel) = self.kernel {
            kernel(self.reads, self.writes);
        }
    }
}

impl Operands for OwnOperation<'_> {
    fn visit(&mut self, visit: &mut dyn FnMut(Visited<'_>)) {
        self.reads.iter_mut().for_each(|view| view.visit(visit));
        self.writes.iter_mut().for_each(|view| view.visit(visit));
    }
}

impl Describe for OwnOperation<'_> {
    const NAME: &'static str = "own";

    fn name(&self) -> &'static str {
        self.name
    }

    fn check(&self) {
        if let OwnPlacement::Update = self.placement {
            let (p, g) = (&self.writes[0], &self.reads[0]);
            assert_eq!(p.elements(), g.elements(), "`{}` updates {p:?} from {g:?}", self.name);
        }
        self.check_letters();
    }

    fn price(&self) -> Price {
        let read: usize = self.reads.iter().map(View::bytes).sum();
        Price::bytes(read + self.writes.iter().map(ViewMut::bytes).sum::<usize>())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        match &self.placement {
            OwnPlacement::Update => {
                recorder.follow_update(self.name, (&self.writes[0], self.reads[0], None), site);
            }
            OwnPlacement::Letters { reads, writes, whole } => {
                let factors: Vec<Operand> = (reads.iter().zip(&self.reads))
                    .map(|(Named { name, letters }, view)| Operand {
                        name,
                        letters,
                        view: *view,
                        accumulates: false,
                        is_linear: false,
                    })
                    .collect();
                let results: Vec<Operand> = (writes.iter().zip(&self.writes))
                    .map(|((Named { name, letters }, accumulates), view)| Operand {
                        name,
                        letters,
                        view: view.as_view(),
                        accumulates: *accumulates,
                        is_linear: false,
                    })
                    .collect();
                let rule = Rule { op: self.name, factors: &factors, addends: &[], results: &results, whole };
                recorder.follow(&rule, site);
            }
        }
    }
}
