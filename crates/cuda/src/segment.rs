//! Work of a stream that was not issued yet: launches, products of the library and copies, in their order.
//!
//! All work becomes steps of a segment first. The segment is then issued step by step, or as a graph (`graphs`). Its shape is all that
//! a graph has for good: kinds of steps, functions, grids and addresses. The other numbers of a launch, such as a learning rate, may
//! differ each time.

use std::ffi::c_void;
use std::ops::Range;

use cudarc::driver::sys::{self, CUstream};
use phalanx_plan::trace::Site;

use crate::blas::{Addresses, Blas, Problem};
use crate::bounds::Bounds;
use crate::driver::driver;
use crate::error::Error;
use crate::modules::{Launch, Modules};

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CopyEnd {
    Card(u64),
    Host(usize),
}

/// One launch, product or copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Kernel(Kernel),
    Product(Problem, Addresses),
    Copy { to: CopyEnd, from: CopyEnd, bytes: usize },
}

/// A launch without its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    function: sys::CUfunction,
    /// Blocks in x and y.
    grid: [u32; 2],
    threads: u32,
    shared_bytes: u32,
    /// Words of the table that is the first argument; 0 for none.
    table: usize,
    /// Words of the table and of the other arguments, of which each has one.
    words: usize,
}

/// The part of a segment that stays the same in the graph made of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) steps: Vec<Step>,
    /// For each argument of each kernel: the address that it is; 0 for what is no address.
    addresses: Vec<u64>,
}

/// Whoever asked for some steps.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) call: &'static str,
    pub(crate) site: Site,
    /// Address and bytes of every operand, where the bounds of kernels are checked.
    pub(crate) bounds: Vec<(u64, usize)>,
}

/// Steps that were not issued yet.
pub(crate) struct Segment {
    pub(crate) shape: Shape,
    /// The arguments of all kernels, one behind the other.
    pub(crate) words: Vec<u64>,
    callers: Vec<Caller>,
    /// The caller of each step.
    caller_of: Vec<usize>,
    /// The card's memory: arguments in these ranges are addresses.
    memory: [Range<u64>; 2],
}

// SAFETY: functions are handles of the driver, which may be used by any thread in which their context is current.
unsafe impl Send for Segment {}

/// With what steps are issued.
#[derive(Clone, Copy)]
pub(crate) struct Issuer<'a> {
    pub(crate) modules: &'a Modules,
    /// The library for products, if it is there.
    pub(crate) blas: Option<&'a Blas>,
    pub(crate) bounds: &'a Bounds,
    pub(crate) stream: CUstream,
}

/// An error of a step, with its caller.
pub(crate) type StepError = (Error, &'static str, Site);

impl Segment {
    /// An empty one, for a card with these ranges of memory.
    pub(crate) fn new(memory: [Range<u64>; 2]) -> Segment {
        let (shape, words, callers, caller_of) = (Shape::default(), Vec::new(), Vec::new(), Vec::new());
        Segment { shape, words, callers, caller_of, memory }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.shape.steps.is_empty()
    }

    /// Number of steps.
    pub(crate) fn len(&self) -> usize {
        self.shape.steps.len()
    }

    /// Returns whether the segment can be a graph, which cannot copy to or from host memory.
    pub(crate) fn is_within_card(&self) -> bool {
        let is_within = |step: &Step| match step {
            Step::Copy { to, from, .. } => [to, from].into_iter().all(|end| matches!(end, CopyEnd::Card(_))),
            Step::Kernel(_) | Step::Product(..) => true,
        };
        self.shape.steps.iter().all(is_within)
    }

    /// Returns whether capturing it loads no kernel.
    pub(crate) fn is_loaded(&self, blas: Option<&Blas>) -> bool {
        let is_loaded = |step: &Step| match step {
            Step::Product(problem, _) => blas.is_some_and(|blas| blas.has_computed(problem)),
            Step::Kernel(_) | Step::Copy { .. } => true,
        };
        self.shape.steps.iter().all(is_loaded)
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.shape.steps.clear();
        self.shape.addresses.clear();
        self.words.clear();
        self.callers.clear();
        self.caller_of.clear();
    }

    /// Says who asks for the steps that follow.
    pub(crate) fn begin(&mut self, caller: Caller) {
        self.callers.push(caller);
    }

    /// The caller of the first step.
    pub(crate) fn first_caller(&self) -> Option<&Caller> {
        self.caller_of.first().map(|caller| &self.callers[*caller])
    }

    pub(crate) fn push(&mut self, step: Step) {
        self.shape.steps.push(step);
        self.caller_of.push(self.callers.len().checked_sub(1).expect("each step has a caller"));
    }

    /// Adds a launch. `table` is the kernel's first argument, unless it is empty; `arguments` are the others, each in the lower bytes
    /// of a number.
    pub(crate) fn push_kernel(
        &mut self,
        function: sys::CUfunction,
        launch: &Launch,
        [table, arguments]: [&[u64]; 2],
    ) -> Result<(), Error> {
        let kernel = Kernel::new(function, launch, [table.len(), arguments.len()])?;
        let Segment { shape, words, memory, .. } = self;
        for &word in table.iter().chain(arguments) {
            let is_address = memory.iter().any(|range| range.contains(&word));
            shape.addresses.push(if is_address { word } else { 0 });
            words.push(word);
        }
        self.push(Step::Kernel(kernel));
        Ok(())
    }

    /// Steps with the caller and the arguments of each.
    pub(crate) fn steps(&mut self) -> impl Iterator<Item = (usize, Step, &Caller, &mut [u64])> {
        let Segment { shape, words, callers, caller_of, .. } = self;
        let (callers, mut rest) = (&*callers, &mut words[..]);
        shape.steps.iter().zip(&*caller_of).enumerate().map(move |(number, (step, caller))| {
            let words = if let Step::Kernel(kernel) = step { kernel.words } else { 0 };
            let (own, others) = std::mem::take(&mut rest).split_at_mut(words);
            rest = others;
            (number, *step, &callers[*caller], own)
        })
    }

    /// Issues all steps, one by one. `done` is called behind each.
    ///
    /// # Safety
    /// The context is current, the stream is of it; operands stay valid and ordered until the stream has run the steps.
    pub(crate) unsafe fn issue(
        &mut self,
        issuer: Issuer,
        mut done: impl FnMut(&Step) -> Result<(), Error>,
    ) -> Result<(), StepError> {
        for (_, step, caller, words) in self.steps() {
            // SAFETY: the caller's promise.
            let issue = || unsafe { step.issue(issuer, words) };
            let issued = issuer.bounds.within(&caller.bounds, issue).and_then(|()| done(&step));
            issued.map_err(|error| (error, caller.call, caller.site))?;
        }
        Ok(())
    }
}

impl Step {
    /// # Safety
    /// As for [`Segment::issue`]; the words are those of the step.
    unsafe fn issue(&self, issuer: Issuer, words: &mut [u64]) -> Result<(), Error> {
        let Issuer { modules, blas, stream, .. } = issuer;
        match *self {
            // SAFETY: the caller's promise.
            Step::Kernel(kernel) => unsafe { kernel.issue(stream, words) },
            Step::Product(problem, addresses) => {
                let blas = blas.expect("products are asked for where there is the library");
                // SAFETY: the caller's promise; the workspace is used by one step after the other.
                let multiply = || unsafe { blas.multiply(&problem, addresses, stream) };
                // The first product of a kind may load a kernel.
                if blas.has_computed(&problem) { multiply() } else { modules.gate().load(multiply) }
            }
            Step::Copy { to, from, bytes } => {
                let of_host = |address: usize| std::ptr::with_exposed_provenance_mut::<c_void>(address);
                // SAFETY: the caller's promise.
                unsafe {
                    match (to, from) {
                        (CopyEnd::Card(to), CopyEnd::Card(from)) => {
                            driver!(cuMemcpyDtoDAsync_v2(to, from, bytes, stream))
                        }
                        (CopyEnd::Host(to), CopyEnd::Card(from)) => {
                            driver!(cuMemcpyDtoHAsync_v2(of_host(to), from, bytes, stream))
                        }
                        (CopyEnd::Card(to), CopyEnd::Host(from)) => {
                            driver!(cuMemcpyHtoDAsync_v2(to, of_host(from), bytes, stream))
                        }
                        (CopyEnd::Host(_), CopyEnd::Host(_)) => {
                            Err(Error::Unsupported("a copy within host memory".to_string()))
                        }
                    }
                }
            }
        }
    }
}

/// Launches a kernel without a table at once.
///
/// # Safety
/// As for [`Segment::issue`]; the arguments are those of the kernel, each in the lower bytes of a number.
pub(crate) unsafe fn launch_function(
    function: sys::CUfunction,
    stream: CUstream,
    launch: &Launch,
    arguments: &mut [u64],
) -> Result<(), Error> {
    let kernel = Kernel::new(function, launch, [0, arguments.len()])?;
    // SAFETY: the caller's promise.
    unsafe { kernel.issue(stream, arguments) }
}

impl Kernel {
    /// A launch, with the words of its table and of its other arguments.
    fn new(
        function: sys::CUfunction,
        launch: &Launch,
        [table, arguments]: [usize; 2],
    ) -> Result<Kernel, Error> {
        let Launch { threads, shared_bytes, .. } = *launch;
        Ok(Kernel {
            function,
            grid: launch.blocks()?,
            threads,
            shared_bytes,
            table,
            words: table + arguments,
        })
    }

    /// Calls `with` with what the driver is told of a launch.
    fn with_parameters<T>(
        &self,
        words: &mut [u64],
        with: impl FnOnce(&sys::CUDA_KERNEL_NODE_PARAMS) -> T,
    ) -> T {
        let (table, arguments) = words.split_at_mut(self.table);
        let first = (!table.is_empty()).then(|| table.as_mut_ptr().cast());
        let others = arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast());
        let mut places: Vec<*mut c_void> = first.into_iter().chain(others).collect();
        let ([grid_x, grid_y], threads) = (self.grid, self.threads);
        with(&sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.function,
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            kernelParams: places.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        })
    }

    /// Launches it.
    ///
    /// # Safety
    /// As for [`Segment::issue`]; the words are the kernel's.
    unsafe fn issue(&self, stream: CUstream, words: &mut [u64]) -> Result<(), Error> {
        self.with_parameters(words, |p| {
            // SAFETY: the caller's promise. The driver reads the arguments before it returns.
            unsafe {
                driver!(cuLaunchKernel(
                    p.func,
                    p.gridDimX,
                    p.gridDimY,
                    p.gridDimZ,
                    p.blockDimX,
                    p.blockDimY,
                    p.blockDimZ,
                    p.sharedMemBytes,
                    stream,
                    p.kernelParams,
                    p.extra,
                ))
            }
        })
    }

    /// Gives a node of a graph that is not launched meanwhile these arguments.
    ///
    /// # Safety
    /// As for [`Segment::issue`]; the node was made of a launch of the same kernel.
    pub(crate) unsafe fn update(
        &self,
        exec: sys::CUgraphExec,
        node: sys::CUgraphNode,
        words: &mut [u64],
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise. The driver reads the arguments before it returns.
        self.with_parameters(words, |p| unsafe { driver!(cuGraphExecKernelNodeSetParams_v2(exec, node, p)) })
    }
}
