//! Throughput of disk memory: reads and writes chunks with the engine's own disk memory and streams, in the order in
//! which an update accesses states on disk.
//!
//! First every chunk is written once, which is not timed, so that blocks are written again as in a run. Then, in each round:
//! all chunks are written, all are read, and each is read and written back while the next ones are read.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use phalanx_cpu::Cpu;
use phalanx_drawing::report::{Table, bytes};
use phalanx_tensor::{
    Arena, Category, DType, Device, DiskMemory, DiskOptions, Immediate, Memory, PendingCopy, Region, Tensor,
};
use serde::Serialize;

/// Bytes of a chunk: those of Gemini's smallest chunk in 16 bits.
pub const CHUNK: u64 = 64 << 20;

/// Chunks in memory at a time.
const WINDOW: usize = 5;

/// Chunks that are read ahead of the one that is written back.
const AHEAD: usize = 2;

/// Folders and sizes of a measurement.
#[derive(Clone, Debug)]
pub struct DiskTask {
    /// The folders, and how they are used.
    pub options: DiskOptions,
    /// Bytes that are written and read in each round; rounded to whole chunks.
    pub bytes: u64,
    /// Bytes of a chunk; less if there are fewer.
    pub chunk: u64,
    /// Rounds; the best of each rate counts.
    pub rounds: usize,
}

/// Results of a measurement. Rates are bytes per second, one for each round.
#[derive(Clone, Debug, Serialize)]
pub struct DiskFigures {
    /// The folders.
    pub folders: Vec<String>,
    /// Bytes of each pass.
    pub bytes: u64,
    /// Method of the transfers: `io_uring, direct`.
    pub how: String,
    /// Bytes of memory that were registered for them.
    pub registered_bytes: u64,
    /// All chunks written.
    pub write_bytes_per_s: Vec<f64>,
    /// All chunks read.
    pub read_bytes_per_s: Vec<f64>,
    /// Each chunk read and written back; both directions are counted.
    pub both_bytes_per_s: Vec<f64>,
}

/// A pass over all chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The first write, which is not timed.
    Fill,
    /// Writes alone.
    Write,
    /// Reads alone.
    Read,
    /// Each chunk is read and written back.
    Both,
}

impl Pass {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Fill => "filling",
            Pass::Write => "writing",
            Pass::Read => "reading",
            Pass::Both => "reading and writing",
        }
    }
}

/// Chunks on disk, and the buffers through which they pass.
struct Chunks {
    device: Device,
    stored: Vec<Option<Tensor>>,
    buffers: Vec<Tensor>,
}

impl DiskTask {
    /// Bytes of a chunk and how many there are.
    fn chunks(&self) -> (u64, usize) {
        let chunk = self.chunk.min(self.bytes / 4096 * 4096).max(4096);
        (chunk, (self.bytes / chunk).max(1) as usize)
    }

    /// Bytes of memory that a measurement takes.
    pub fn memory_bytes(&self) -> u64 {
        WINDOW as u64 * self.chunks().0
    }

    /// Measures. `progress` learns which pass runs and what part of it is done; `after_round` is called after each round, for
    /// measurements of others that take turns with these.
    ///
    /// # Errors
    /// Folders that cannot hold the bytes; I/O errors; no memory.
    pub fn measure(
        &self,
        progress: &mut dyn FnMut(Pass, f64),
        after_round: &mut dyn FnMut() -> Result<()>,
    ) -> Result<DiskFigures> {
        let (chunk, count) = self.chunks();
        ensure!(self.rounds > 0, "0 rounds: there is nothing to measure");
        let disk = DiskMemory::with_options(&self.options, chunk * count as u64)?;
        let mut chunks = Chunks::new(&disk, chunk, count)?;
        chunks.pass(Pass::Fill, progress)?;
        let mut figures = DiskFigures {
            folders: self.options.folders.iter().map(|folder| folder.display().to_string()).collect(),
            bytes: chunk * count as u64,
            how: disk.how().to_string(),
            registered_bytes: 0,
            write_bytes_per_s: Vec::new(),
            read_bytes_per_s: Vec::new(),
            both_bytes_per_s: Vec::new(),
        };
        let all = figures.bytes as f64;
        for _ in 0..self.rounds {
            figures.write_bytes_per_s.push(all / chunks.pass(Pass::Write, progress)?);
            figures.read_bytes_per_s.push(all / chunks.pass(Pass::Read, progress)?);
            figures.both_bytes_per_s.push(2.0 * all / chunks.pass(Pass::Both, progress)?);
            after_round()?;
        }
        figures.registered_bytes = disk.registered_bytes();
        Ok(figures)
    }
}

impl Chunks {
    fn new(disk: &Arc<DiskMemory>, chunk: u64, count: usize) -> Result<Chunks> {
        let backend =
            Arc::new(Immediate::with_disk_stream(Cpu::with_options(phalanx_cpu::Options::new(1))?)?);
        let region = Region::anonymous(WINDOW * chunk as usize)?;
        let host = Arena::unplanned_in(Memory::Host, region);
        let device = Device::with_memories(backend, Arena::heap(), host);
        let device = device.with_disk(Arena::unplanned_on_disk(Arc::clone(disk)));
        let elements = chunk as usize / 4;
        let stored =
            (0..count).map(|_| Some(device.alloc_disk(DType::F32, [elements], Category::Optimizer, "chunk")));
        let stored = stored.collect();
        let buffer = |number: usize| {
            let mut buffer = device.alloc_host(DType::F32, [elements], Category::Optimizer, "buffer");
            // Numbers that differ, so that no disk can keep them in less room.
            for (index, element) in buffer.host_slice_mut::<f32>().iter_mut().enumerate() {
                *element = f32::from_bits(((number * elements + index) as u32).wrapping_mul(0x9e37_79b9));
            }
            buffer
        };
        let buffers = (0..WINDOW).map(buffer).collect();
        Ok(Chunks { device, stored, buffers })
    }

    /// Seconds of a pass over all chunks.
    fn pass(&mut self, pass: Pass, progress: &mut dyn FnMut(Pass, f64)) -> Result<f64> {
        let count = self.stored.len();
        let (mut reads, mut writes) = (VecDeque::new(), VecDeque::new());
        let start = Instant::now();
        for chunk in 0..count {
            progress(pass, chunk as f64 / count as f64);
            match pass {
                Pass::Fill | Pass::Write => {
                    let buffer = self.buffer(&mut reads, &mut writes)?;
                    self.write(chunk, buffer, &mut writes);
                }
                Pass::Read => {
                    let buffer = self.buffer(&mut reads, &mut writes)?;
                    self.read(chunk, buffer, &mut reads);
                }
                Pass::Both => {
                    for ahead in chunk + reads.len()..count.min(chunk + AHEAD + 1) {
                        let buffer = self.buffer(&mut reads, &mut writes)?;
                        self.read(ahead, buffer, &mut reads);
                    }
                    let buffer = self.arrive(&mut reads)?;
                    self.write(chunk, buffer, &mut writes);
                }
            }
        }
        while !reads.is_empty() {
            let buffer = self.arrive(&mut reads)?;
            self.buffers.push(buffer);
        }
        while !writes.is_empty() {
            self.returned(&mut writes)?;
        }
        progress(pass, 1.0);
        Ok(start.elapsed().as_secs_f64())
    }

    /// A buffer that nothing uses, after a wait for the oldest transfer if there is none.
    fn buffer(&mut self, reads: &mut Pending, writes: &mut Pending) -> Result<Tensor> {
        match self.buffers.pop() {
            Some(buffer) => Ok(buffer),
            None if writes.is_empty() => self.arrive(reads),
            None => {
                self.returned(writes)?;
                Ok(self.buffers.pop().expect("a write has given its buffer back"))
            }
        }
    }

    fn write(&mut self, chunk: usize, buffer: Tensor, writes: &mut Pending) {
        let stored = self.stored[chunk].take().expect("the chunk is on disk");
        writes.push_back((chunk, self.device.copy_to_disk(buffer, stored)));
    }

    fn read(&mut self, chunk: usize, buffer: Tensor, reads: &mut Pending) {
        let stored = self.stored[chunk].take().expect("the chunk is on disk");
        reads.push_back((chunk, self.device.copy_from_disk(stored, buffer)));
    }

    /// Waits for the oldest read; its buffer.
    fn arrive(&mut self, reads: &mut Pending) -> Result<Tensor> {
        let (chunk, pending) = reads.pop_front().expect("a read in flight");
        let (stored, buffer) = pending.wait()?;
        self.stored[chunk] = Some(stored);
        Ok(buffer)
    }

    /// Waits for the oldest write.
    fn returned(&mut self, writes: &mut Pending) -> Result<()> {
        let (chunk, pending) = writes.pop_front().expect("a write in flight");
        let (buffer, stored) = pending.wait()?;
        self.stored[chunk] = Some(stored);
        self.buffers.push(buffer);
        Ok(())
    }
}

/// Transfers in flight, with the chunk of each.
type Pending = VecDeque<(usize, PendingCopy)>;

/// The largest of some rates.
pub fn best(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(0.0, f64::max)
}

/// Rates that fio measured with the same requests on the same folders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct FioFigures {
    /// Sequential writes.
    pub write_bytes_per_s: f64,
    /// Sequential reads.
    pub read_bytes_per_s: f64,
}

/// The figures of several sets of folders, for people.
pub fn to_text(figures: &[(DiskFigures, Option<FioFigures>)]) -> String {
    let mut table = Table::new(&["folders", "pass", "GB/s", "fio GB/s", "share"]);
    for (own, fio) in figures {
        let mut row = |pass: &str, rates: &[f64], fio: Option<f64>| {
            let rate = best(rates);
            let (other, share) = match fio {
                Some(fio) => (format!("{:.2}", fio / 1e9), format!("{:.0}%", 100.0 * rate / fio)),
                None => (String::new(), String::new()),
            };
            table.row([
                own.folders.join(" + "),
                pass.to_string(),
                format!("{:.2}", rate / 1e9),
                other,
                share,
            ]);
        };
        row("write", &own.write_bytes_per_s, fio.map(|fio| fio.write_bytes_per_s));
        row("read", &own.read_bytes_per_s, fio.map(|fio| fio.read_bytes_per_s));
        row("read and write", &own.both_bytes_per_s, None);
    }
    let (first, _) = &figures[0];
    let rounds = first.write_bytes_per_s.len();
    format!(
        "{} in chunks, {}, {} of memory registered; the best of {rounds} rounds; 10^9 bytes a second\n{table}",
        bytes(first.bytes),
        first.how,
        bytes(first.registered_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_moves_all_bytes_in_every_pass() {
        let folder = tempfile::tempdir().unwrap();
        let options = DiskOptions::new(vec![folder.path().to_path_buf()]);
        for bytes in [1, 4096, 3 * 65536] {
            let task = DiskTask { options: options.clone(), bytes, chunk: CHUNK, rounds: 2 };
            let mut passes = Vec::new();
            let figures =
                task.measure(&mut |pass, share| passes.push((pass, share)), &mut || Ok(())).unwrap();
            assert_eq!(figures.bytes, bytes.max(4096));
            for rates in [&figures.write_bytes_per_s, &figures.read_bytes_per_s, &figures.both_bytes_per_s] {
                assert!(rates.len() == 2 && best(rates) > 0.0, "{figures:?}");
            }
            let ended: Vec<Pass> =
                passes.iter().filter(|(_, share)| *share == 1.0).map(|(pass, _)| *pass).collect();
            let round = [Pass::Write, Pass::Read, Pass::Both];
            assert_eq!(ended, [&[Pass::Fill][..], &round, &round].concat());
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_table_has_a_share_of_fio_where_there_is_one() {
        let figures = DiskFigures {
            folders: vec!["/a".into(), "/b".into()],
            bytes: 1 << 30,
            how: "io_uring, direct".into(),
            registered_bytes: 1 << 20,
            write_bytes_per_s: vec![1e9, 1.9e9],
            read_bytes_per_s: vec![2e9],
            both_bytes_per_s: vec![3e9],
        };
        let fio = FioFigures { write_bytes_per_s: 2e9, read_bytes_per_s: 2.5e9 };
        let with = to_text(&[(figures.clone(), Some(fio))]);
        assert!(with.contains("/a + /b") && with.contains("95%") && with.contains("80%"), "{with}");
        assert!(!to_text(&[(figures, None)]).contains('%'));
    }
}
