//! `plan --chunks`: the chunk sizes that a run could have, as a table and as JSON.

use phalanx_plan::trace::Axis;
use phalanx_plan::{Machine, Movement, Search, Traffic};
use phalanx_train::chunk_alternatives::{ChunkAlternative, Origin};
use phalanx_train::config::{Chunk, ChunkWord, MemoryConfig};
use serde_json::{Value, json};

use crate::plans::planned::Planned;
use phalanx_drawing::report::{Table, bytes, seconds};

/// The alternatives of a plan, largest chunks last, with the machine that moves them.
pub struct ChunkReport<'a> {
    planned: &'a Planned,
    search: Search,
    all: &'a [ChunkAlternative],
    machine: &'a Machine,
}

impl<'a> ChunkReport<'a> {
    /// A report of `all`, whose messages move at the rates of `machine`.
    pub fn new(planned: &'a Planned, all: &'a [ChunkAlternative], machine: &'a Machine) -> ChunkReport<'a> {
        ChunkReport { planned, search: search(planned), all, machine }
    }

    /// The world ranks of the data axis of rank 0.
    fn data_ranks(&self) -> Vec<usize> {
        self.planned.plan.spec.mesh.axes.members(Axis::Data, 0)
    }

    /// Seconds of what a size moves, one message after another; `None` where a rate is unknown.
    fn seconds(&self, alternative: &ChunkAlternative) -> Option<f64> {
        let each = alternative.traffic.iter().map(|moved| moved.seconds(self.machine, &self.data_ranks()));
        each.sum()
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let memory = &self.planned.config.memory;
        format!(
            "{}\n{}\nWhat a step moves, on {}; GB/s are of whole messages\n{}\n{}\n",
            self.knobs(),
            self.sizes(),
            self.machine.name,
            self.moves(),
            reason(memory, self.all)
        )
    }

    fn knobs(&self) -> String {
        let Search { search_range_mb, hidden_dim, min_chunk_size_mb } = self.search;
        let searched = &self.planned.plan.spec.mesh.layout.searched;
        let tried = match (searched.first(), searched.last()) {
            (Some(first), Some(last)) => format!(
                "; {} sizes from {} to {} elements were packed",
                searched.len(),
                first.chunk_elements,
                last.chunk_elements
            ),
            _ => String::new(),
        };
        format!(
            "Gemini's search: min_chunk_size_mb = {min_chunk_size_mb}, search_range_mb = {search_range_mb}, hidden_dim = {}{tried}",
            hidden_dim.unwrap_or(0)
        )
    }

    fn sizes(&self) -> Table {
        let peak = |bytes_or_none: u64| if bytes_or_none == 0 { "-".into() } else { bytes(bytes_or_none) };
        let padding = |a: &ChunkAlternative| 100.0 * a.waste_bytes as f64 / a.padded_bytes as f64;
        Table::of(
            self.all,
            &[
                ("size", &|a| origin(a.origin).to_string()),
                ("chunks", &|a| a.chunks.to_string()),
                ("largest", &|a| bytes(a.largest_bytes)),
                ("padding", &|a| format!("{} ({:.2}%)", bytes(a.waste_bytes), padding(a))),
                ("device", &|a| peak(a.peaks[0])),
                ("host", &|a| peak(a.peaks[1])),
                ("disk", &|a| peak(a.peaks[2])),
                ("gathered", &|a| bytes(a.gathered_bytes)),
                ("moving", &|a| self.seconds(a).map_or("-".to_string(), seconds)),
                ("", &|a| if a.chosen { "chosen".to_string() } else { String::new() }),
            ],
        )
    }

    /// For each size: a row for each kind of message.
    fn moves(&self) -> Table {
        let kinds = |a: &ChunkAlternative| {
            by_movement(&a.traffic).into_iter().map(|kind| (a.chunks, kind)).collect::<Vec<_>>()
        };
        let time = |moved: &[Traffic]| -> Option<f64> {
            moved.iter().map(|part| part.seconds(self.machine, &self.data_ranks())).sum()
        };
        let calls = |moved: &[Traffic]| moved.iter().map(|part| part.calls).sum::<u64>();
        let whole = |moved: &[Traffic]| moved.iter().map(|part| part.calls * part.message_bytes).sum::<u64>();
        let rate = |moved: &[Traffic]| Some(format!("{:.2}", whole(moved) as f64 / time(moved)? / 1e9));
        Table::of(
            self.all.iter().flat_map(kinds),
            &[
                ("chunks", &|(chunks, _)| chunks.to_string()),
                ("", &|(_, moved)| movement(moved[0].movement)),
                ("calls", &|(_, moved)| calls(moved).to_string()),
                ("largest message", &|(_, moved)| bytes(moved[0].message_bytes)),
                ("mean message", &|(_, moved)| bytes(whole(moved) / calls(moved))),
                ("sent or copied", &|(_, moved)| bytes(moved.iter().map(|part| part.bytes).sum())),
                ("GB/s", &|(_, moved)| rate(moved).unwrap_or("-".to_string())),
                ("time", &|(_, moved)| time(moved).map_or("-".to_string(), seconds)),
            ],
        )
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        let traffic = |moved: &Traffic| {
            let seconds = moved.seconds(self.machine, &self.data_ranks());
            json!({
                "movement": movement(moved.movement), "message_bytes": moved.message_bytes, "calls": moved.calls,
                "bytes": moved.bytes, "seconds": seconds,
            })
        };
        let alternative = |a: &ChunkAlternative| {
            let [device, host, disk] = a.peaks;
            json!({
                "origin": a.origin, "chosen": a.chosen, "chunks": a.chunks, "largest_bytes": a.largest_bytes,
                "bytes": a.padded_bytes, "waste_bytes": a.waste_bytes,
                "device_peak_bytes": device, "host_peak_bytes": host, "disk_peak_bytes": disk,
                "gathered_peak_bytes": a.gathered_bytes, "moving_s": self.seconds(a),
                "traffic": a.traffic.iter().map(traffic).collect::<Vec<_>>(),
            })
        };
        json!({
            "search": self.search, "machine": self.machine.name,
            "reason": reason(&self.planned.config.memory, self.all),
            "alternatives": self.all.iter().map(alternative).collect::<Vec<_>>(),
        })
    }
}

/// The sizes of all messages of some alternatives, each once.
pub fn message_sizes(all: &[ChunkAlternative]) -> Vec<u64> {
    let collectives = all.iter().flat_map(|alternative| &alternative.traffic);
    let collectives = collectives.filter(|moved| matches!(moved.movement, Movement::Collective(_)));
    // Of each alternative, most messages have the size of a chunk: the largest few sizes stand for all.
    let mut sizes: Vec<u64> = collectives.map(|moved| moved.message_bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let stride = sizes.len().div_ceil(MEASURED).max(1);
    sizes.into_iter().rev().step_by(stride).collect()
}

/// Largest number of message sizes that are measured; times of sizes between them are interpolated.
const MEASURED: usize = 16;

/// The knobs of Gemini's search.
pub fn search(planned: &Planned) -> Search {
    let MemoryConfig { search_range_mb, min_chunk_size_mb, hidden_dim, .. } = planned.config.memory;
    let hidden = planned.plan.spec.model.whole().width() as u64;
    Search { search_range_mb, min_chunk_size_mb, hidden_dim: Some(hidden_dim.unwrap_or(hidden)) }
}

/// The messages of each kind, largest first.
fn by_movement(traffic: &[Traffic]) -> Vec<Vec<Traffic>> {
    let mut kinds: Vec<Vec<Traffic>> = Vec::new();
    for moved in traffic {
        match kinds.iter_mut().find(|kind| kind[0].movement == moved.movement) {
            Some(kind) => kind.push(*moved),
            None => kinds.push(vec![*moved]),
        }
    }
    kinds
}

fn movement(movement: Movement) -> String {
    match movement {
        Movement::Collective(op) => op.name().to_string(),
        Movement::Copy(from, to) => format!("{} to {}", from.name(), to.name()),
    }
}

fn origin(origin: Origin) -> &'static str {
    match origin {
        Origin::None => "one tensor each",
        Origin::Search => "Gemini's search",
        Origin::Range => "least padding of a range",
        Origin::Fixed => "memory.chunk",
    }
}

/// Why the chosen size is the chosen one.
fn reason(memory: &MemoryConfig, all: &[ChunkAlternative]) -> String {
    let Some(chosen) = all.iter().find(|alternative| alternative.chosen) else { return String::new() };
    match memory.chunk {
        Chunk::Word(ChunkWord::Auto) => format!(
            "chosen: {} chunks, the fewest of the sizes whose peak of device and host memory is within 1% of the smallest",
            chosen.chunks
        ),
        Chunk::Word(ChunkWord::None) => "chosen: memory.chunk = \"none\", one tensor per chunk".to_string(),
        Chunk::Mebibytes(size) => {
            format!("chosen: memory.chunk = {size}, {} chunks; leave it out for \"auto\"", chosen.chunks)
        }
    }
}
