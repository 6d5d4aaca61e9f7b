//! Memory of graphs on a card: makes as many as a device keeps, of small launches.

use libloading::Library;
use phalanx_tensor::{Category, DType, Device};

use crate::checks::bench::Bench;
use crate::error::Error;
use crate::graphs::{NODES_MAX, STEPS_FULL};

/// Results of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphFigures {
    /// Graphs that a device keeps at most, when they are full.
    pub graphs: usize,
    /// Their nodes.
    pub nodes: usize,
    /// Bytes of the card that they take.
    pub bytes: u64,
}

/// Elements of a launch, and bytes of the tensor that all fill.
const ELEMENTS: usize = 64;

/// Makes as many graphs as a device keeps, and measures them. It made none before, or few.
///
/// # Errors
/// The driver's, the device's failure, and a device that makes fewer graphs.
pub fn measure(bench: &Bench) -> Result<GraphFigures, Error> {
    let graphs = NODES_MAX / STEPS_FULL;
    let before = bench.other_bytes()?;
    for value in [1.0, 2.0] {
        fill_in_pieces(bench.card(), graphs, value)?;
    }
    let bytes = bench.other_bytes()?.saturating_sub(before);
    let launched = bench.launches().graphs;
    fill_in_pieces(bench.card(), graphs, 3.0)?;
    let launched = bench.launches().graphs - launched;
    // Checks that ran before may have left some.
    if launched < graphs as u64 / 2 {
        return Err(Error::Unsupported(format!(
            "{launched} of {graphs} segments of launches were graphs: the driver makes none of them"
        )));
    }
    Ok(GraphFigures { graphs, nodes: graphs * STEPS_FULL, bytes })
}

/// On the emulator of the driver, lets the next captures fail when they have so many nodes and are given another one; false on a card.
pub fn fail_captures(captures: usize, nodes: usize) -> bool {
    /// The emulator's function.
    type Fail = unsafe extern "C" fn(usize, usize) -> u32;
    // SAFETY: the driver's initialisers have run; the type is that of the emulator's function.
    let result = unsafe {
        let Ok(library) = Library::new("libcuda.so") else { return false };
        library.get::<Fail>(b"phalanxEmulatorFailCaptures").map(|fail| fail(captures, nodes))
    };
    result.is_ok_and(|status| status == 0)
}

/// Fills the parts of a tensor one by one, in so many segments of launches; all elements are `value` then.
///
/// # Errors
/// The device's failure, and an element that is another.
pub fn fill_in_pieces(card: &Device, segments: usize, value: f32) -> Result<(), Error> {
    let launches = segments * STEPS_FULL;
    let mut tensor = card.alloc(DType::F32, [launches * ELEMENTS], Category::Workspace, "filled");
    for launch in 0..launches {
        let start = launch * ELEMENTS;
        card.fill(tensor.view_mut().range(start..start + ELEMENTS), value);
    }
    let mut found = vec![0f32; launches * ELEMENTS];
    let failed = |text: String| Error::Unsupported(text);
    card.download(tensor.view(), &mut found).map_err(|error| failed(error.to_string()))?;
    match found.iter().position(|x| *x != value) {
        None => Ok(()),
        Some(at) => Err(failed(format!("a graph has left {} at {at}, not {value}", found[at]))),
    }
}
