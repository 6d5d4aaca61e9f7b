//! `plan --placement`: where every chunk lies, and the memories side by side.

use phalanx_parallel::zero::Residence;
use phalanx_plan::trace::{Category, Memory};
use phalanx_train::RankPlan;
use phalanx_train::config::PlacementRule;
use phalanx_train::placement_table::PlacedChunk;
use serde_json::{Value, json};

use crate::plans::planned::Planned;
use phalanx_drawing::report::{Table, bytes, plural};

/// The placement of a plan: how it was decided, the memories of the rank that needs most, and its chunks.
pub struct PlacementReport<'a> {
    planned: &'a Planned,
    rank: &'a RankPlan,
    chunks: Vec<PlacedChunk>,
}

impl<'a> PlacementReport<'a> {
    /// The placement on the rank with the most device memory.
    pub fn new(planned: &'a Planned) -> PlacementReport<'a> {
        let plan = &planned.plan;
        let largest = plan.ranks.iter().max_by_key(|rank| rank.memory.arena_bytes);
        let rank = largest.unwrap_or_else(|| plan.of(0));
        PlacementReport { planned, rank, chunks: plan.placed_chunks(rank.rank) }
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let moved: u64 = self.chunks.iter().map(|chunk| chunk.moved_bytes).sum();
        format!(
            "{}\nMemories of rank {}\n{}\nChunks of rank {}: a step moves {} for them\n{}",
            rule(self.planned.plan.spec.placement, &self.planned.plan.spec.zero.residence),
            self.rank.rank,
            self.memories(),
            self.rank.rank,
            bytes(moved),
            self.table()
        )
    }

    fn memories(&self) -> Table {
        let mut table = Table::new(&["at the peak", "device", "host", "disk"]);
        let peaks = Memory::ALL.map(|memory| self.rank.peak_of(memory));
        let cell = |value: u64| if value == 0 { "-".to_string() } else { bytes(value) };
        for category in Category::ALL {
            let cells = peaks.map(|peak| cell(peak.categories.get(category)));
            table.row([category.name().to_string()].into_iter().chain(cells));
        }
        table.row(["sum".to_string()].into_iter().chain(peaks.map(|peak| cell(peak.bytes))));
        let arenas = [&self.rank.memory, &self.rank.host, &self.rank.disk].map(|plan| cell(plan.arena_bytes));
        table.row(["arena".to_string()].into_iter().chain(arenas));
        if let PlacementRule::Auto(auto) = self.planned.plan.spec.placement {
            let host = auto.host_bytes.filter(|bytes| *bytes < u64::MAX).map_or("-".to_string(), bytes);
            table.row(["budget".to_string(), bytes(auto.device_bytes), host, "-".to_string()]);
        }
        table
    }

    /// A row for neighbouring chunks that lie in the same memories.
    fn table(&self) -> Table {
        let mut table = Table::new(&[
            "chunks",
            "parameters",
            "elements",
            "parameters",
            "gradients",
            "optimizer",
            "moved",
        ]);
        let has_stages = self.chunks.iter().any(|chunk| chunk.stage != self.chunks[0].stage);
        let kind = |chunk: &PlacedChunk| (chunk.stage, chunk.lies, chunk.trained);
        for alike in self.chunks.chunk_by(|a, b| kind(a) == kind(b)) {
            let (first, last) = (&alike[0], &alike[alike.len() - 1]);
            let number = if alike.len() > 1 {
                format!("{} .. {}", first.chunk, last.chunk)
            } else {
                first.chunk.to_string()
            };
            let of_trained = |memory: Memory| if first.trained { memory.name() } else { "-" }.to_string();
            let moved: u64 = alike.iter().map(|chunk| chunk.moved_bytes).sum();
            table.row([
                if has_stages { format!("{}/{number}", first.stage) } else { number },
                if first.first == last.last {
                    first.first.clone()
                } else {
                    format!("{} .. {}", first.first, last.last)
                },
                alike.iter().map(|chunk| chunk.elements).sum::<u64>().to_string(),
                first.lies.parameters.name().to_string(),
                of_trained(first.lies.gradients),
                of_trained(first.lies.optimizer),
                if moved == 0 { "-".to_string() } else { bytes(moved) },
            ]);
        }
        table
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        let peaks = Memory::ALL.map(|memory| (memory.name(), self.rank.peak_of(memory)));
        let peaks = peaks.map(|(name, peak)| {
            (name.to_string(), json!({ "peak_bytes": peak.bytes, "categories": peak.categories }))
        });
        json!({
            "rule": rule_json(self.planned.plan.spec.placement),
            "rank": self.rank.rank,
            "memories": serde_json::Map::from_iter(peaks),
            "moved_bytes_per_step": self.chunks.iter().map(|chunk| chunk.moved_bytes).sum::<u64>(),
            "chunks": self.chunks,
        })
    }
}

/// Number of chunks of all stages with a part elsewhere, and of all chunks that are described.
fn away(residence: &[Residence]) -> [usize; 2] {
    let described = residence.iter().flat_map(Residence::described);
    let is_away = |memory: Memory| memory != Memory::Device;
    described.fold([0, 0], |[parameters, optimizer], chunk| {
        [
            parameters + usize::from(is_away(chunk.parameters)),
            optimizer + usize::from(is_away(chunk.optimizer)),
        ]
    })
}

/// Describes the rule by which the memories were decided.
fn rule(rule: PlacementRule, residence: &[Residence]) -> String {
    let [parameters, optimizer] = away(residence);
    match rule {
        PlacementRule::Uniform(chunk) => format!(
            "Placement: parameters in {} memory, optimizer states in {} memory, all chunks alike",
            chunk.parameters.name(),
            chunk.optimizer.name()
        ),
        PlacementRule::Fractions(fractions) => format!(
            "Placement: {:.1}% of the optimizer states and {:.1}% of the parameters in {} memory",
            100.0 * fractions.optimizer,
            100.0 * fractions.parameters,
            fractions.away.name()
        ),
        PlacementRule::Auto(auto) => format!(
            "Placement: auto, with {} of device memory ({} less a headroom of {:.1}%); elsewhere lie the optimizer states of {} \
             and the parameters of {}",
            bytes(auto.usable_bytes()),
            bytes(auto.device_bytes),
            100.0 * auto.headroom,
            plural(optimizer, "chunk"),
            plural(parameters, "chunk")
        ),
    }
}

fn rule_json(rule: PlacementRule) -> Value {
    match rule {
        PlacementRule::Uniform(chunk) => json!({ "kind": "uniform", "chunk": chunk }),
        PlacementRule::Fractions(fractions) => json!({
            "kind": "fractions", "away": fractions.away, "offload_optim_frac": fractions.optimizer,
            "offload_param_frac": fractions.parameters,
        }),
        PlacementRule::Auto(auto) => json!({
            "kind": "auto", "device_bytes": auto.device_bytes, "headroom": auto.headroom,
            "usable_bytes": auto.usable_bytes(), "host_bytes": auto.host_bytes.filter(|bytes| *bytes < u64::MAX),
        }),
    }
}
