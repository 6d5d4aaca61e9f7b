//! Doing one piece of work.

use crate::checks::Finding;
use crate::execute;

use super::{Clock, INSTRUCTION_LIMIT, Launch, Queues, Work};

impl Queues {
    /// Does the work of a place in clocks. A device that has failed fatally does nothing more.
    pub(super) fn perform(&mut self, work: Work, index: usize, clock: &mut Clock) {
        match work {
            Work::Record(point) => return point.reach(clock.clone()),
            Work::Wait(point) => {
                if let Some(reached) = point.clock() {
                    clock.join(&reached);
                }
                return;
            }
            // What the host has done and waited for before it wrote the word comes before what follows.
            Work::WaitValue(_) => return clock.join(&self.host),
            _ if self.failure.is_some_and(Finding::is_fatal) => return,
            Work::Graph(graph) => return self.run_graph(&graph, clock),
            Work::Call(call) => {
                // SAFETY: the caller of the driver keeps the function and its argument valid until it is called.
                return unsafe { (call.function)(call.argument as *mut _) };
            }
            _ => {}
        }
        let operation = self.operations.begin(index, clock);
        match work {
            Work::Launch(launch) => self.launch(&launch, operation, clock),
            Work::Copy(copy) => self.copy(&copy, operation, clock),
            Work::Fill(fill) => self.fill(&fill, operation, clock),
            Work::Product(product) => self.product(&product, (operation, clock)),
            Work::Free(address) => self.free(address, operation, clock),
            Work::BeginRegion(address, bytes, name) => {
                if let Err(fault) = self.memory.begin_region(address, bytes, name) {
                    self.report(fault.finding, "a region", Some(address), fault.detail);
                }
            }
            Work::EndRegion(address) => self.end_region(address, operation, clock),
            _ => {}
        }
    }

    fn launch(&mut self, launch: &Launch, operation: u32, clock: &Clock) {
        let before = self.reports.all().len();
        let operations = &self.operations;
        let order = |earlier: u32| operations.is_before(earlier, clock);
        let statistics = execute::run(
            &execute::Launch {
                kernel: &launch.kernel,
                grid: launch.grid,
                block: launch.block,
                parameters: &launch.parameters,
                dynamic_shared: launch.dynamic_shared,
                operands: &launch.operands,
                operation,
                order: &order,
                checks: self.checks,
                seed: self.seed,
                limit: INSTRUCTION_LIMIT,
            },
            &mut self.memory,
            &mut self.reports,
        );
        self.statistics.warp_instructions += statistics.warp_instructions;
        self.statistics.lane_instructions += statistics.lane_instructions;
        self.statistics.multiplies += statistics.multiplies;
        self.statistics.multiply_adds += statistics.multiply_adds;
        let found: Vec<Finding> = self.reports.all()[before..].iter().map(|report| report.finding).collect();
        found.into_iter().for_each(|finding| self.fail(finding));
    }

    /// Ends a region, which counts as a write: all uses must be ordered before it.
    fn end_region(&mut self, address: u64, operation: u32, clock: &Clock) {
        match self.memory.region(address) {
            Ok(bytes) => {
                self.range("the end of a region", address, bytes, true, (operation, clock));
                self.memory.end_region(address);
            }
            Err(fault) => self.report(fault.finding, "the end of a region", Some(address), fault.detail),
        }
    }

    /// Frees an allocation, which counts as a write: all uses must be ordered before it.
    fn free(&mut self, address: u64, operation: u32, clock: &Clock) {
        if let Some(bytes) = self.memory.range(address) {
            self.memory.forget_regions(address, bytes);
            self.range("a free", address, bytes, true, (operation, clock));
        }
        if let Err(what) = self.memory.free(address) {
            self.report(Finding::UseAfterFree, "a free", Some(address), what);
        }
    }
}
