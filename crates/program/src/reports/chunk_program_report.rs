//! `plan --chunk-program`: what a rank does with its chunks, phase by phase, as text (`plan::program::text`) or as JSON.

use phalanx_plan::program::Buffer;
use phalanx_plan::trace::Memory;
use phalanx_train::chunk_programs::ChunkPrograms;
use serde_json::{Value, json};

use phalanx_drawing::report::{bytes, plural};

/// For people: what is stored, and the actions of each phase.
pub fn to_text(of: &ChunkPrograms, ranks: usize) -> String {
    let ChunkPrograms { rank, programs, peaks } = of;
    let used = Memory::ALL.iter().zip(peaks.0).filter(|(_, peak)| *peak > 0);
    let peaks: Vec<String> =
        used.map(|(memory, peak)| format!("{} of {} memory", bytes(peak), memory.name())).collect();
    let mut text = format!("Chunks of rank {rank} of {ranks} take at most {}\n", peaks.join(", "));
    let storage = programs.first().map_or(Vec::new(), |program| program.storage());
    storage.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
    for program in programs {
        let count = program.actions.len();
        text.push_str(&format!("\n{}: {}\n{program}\n", program.phase, plural(count, "action")));
    }
    text
}

/// The actions of each phase as words, with the bytes of the buffers that are taken.
pub fn to_json(of: &ChunkPrograms) -> Value {
    let memories =
        Memory::ALL.iter().zip(of.peaks.0).map(|(memory, peak)| (memory.name().to_string(), json!(peak)));
    let phases = of.programs.iter().map(|program| {
        let buffers = (0..).zip(&program.buffers).map(|(number, spec)| {
            let name = program.name(Buffer(number));
            json!({ "name": name, "bytes": spec.bytes(), "memory": spec.memory.name(), "resident": spec.is_resident })
        });
        let actions: Vec<String> =
            program.actions.iter().map(|action| program.guarded_word(action)).collect();
        json!({ "phase": program.phase.name(), "buffers": buffers.collect::<Vec<Value>>(), "actions": actions })
    });
    json!({
        "rank": of.rank,
        "peak_bytes": memories.collect::<serde_json::Map<String, Value>>(),
        "phases": phases.collect::<Vec<Value>>(),
    })
}
