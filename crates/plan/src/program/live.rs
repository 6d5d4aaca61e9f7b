//! Bytes of a program's buffers over its block runs.

use crate::trace::Memory;

use super::action::Op;
use super::check::MemoryPeaks;
use super::list::Program;

impl Program {
    /// Largest numbers of bytes that its buffers have at a time in each memory: before the first block run that reads parameters, and from
    /// what the passes put before each of these runs on to the next.
    pub fn live(&self) -> Vec<MemoryPeaks> {
        let mut live = [0; Memory::ALL.len()];
        for spec in self.buffers.iter().filter(|spec| spec.is_resident) {
            live[spec.memory as usize] += spec.bytes();
        }
        let mut peaks = vec![MemoryPeaks(live)];
        for part in self.actions.split_inclusive(|action| action.op == Op::Pause) {
            let run = part.iter().find_map(|action| action.op.block_run());
            if run.is_some_and(|run| run.pass.reads_parameters()) {
                peaks.push(MemoryPeaks(live));
            }
            let peak = &mut peaks.last_mut().expect("the one before the first run").0;
            for action in part {
                match action.op {
                    Op::Take(buffer) => {
                        let (memory, bytes) = (self.spec(buffer).memory as usize, self.spec(buffer).bytes());
                        live[memory] += bytes;
                        peak[memory] = peak[memory].max(live[memory]);
                    }
                    Op::Free(buffer) => live[self.spec(buffer).memory as usize] -= self.spec(buffer).bytes(),
                    _ => {}
                }
            }
        }
        peaks
    }
}
