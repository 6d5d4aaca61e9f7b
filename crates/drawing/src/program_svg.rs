//! Draws the program of a phase as an SVG picture: its actions from left to right; above, block runs, collectives and copies in flight;
//! below, for each memory, the buffers that are there, and their bytes. Programs of several ranks stand below each other.

use std::collections::BTreeMap;

use phalanx_plan::program::{Action, Buffer, Op, Pass, Program, Role, Token, Work};
use phalanx_plan::trace::Memory;

use crate::report::{bytes, plural};
use crate::svg::{BOLD, Svg, fill};

const LEFT: f64 = 110.0;
const RIGHT: f64 = 24.0;
const HEADING: f64 = 64.0;
/// Pixels of an action, unless the picture would get wider than [`WIDEST`].
const UNIT: f64 = 6.0;
const WIDEST: f64 = 8_000.0;
/// Pixels from lane to lane, and of a bar.
const PITCH: f64 = 9.0;
const BAR: f64 = 7.0;
/// Pixels of the curve of a memory, and between parts of a picture.
const CURVE: f64 = 44.0;
const GAP: f64 = 14.0;
/// Largest number of lanes of a part; what finds no place in them is counted.
const LANES: usize = 60;

/// A span of actions in a lane: from its first action to behind its last one.
struct Bar {
    start: usize,
    end: usize,
    colour: &'static str,
    title: String,
}

/// Bars without overlap in each lane, and how many found no place.
struct Lanes {
    lanes: Vec<Vec<Bar>>,
    left_out: usize,
}

/// Draws the programs of a phase, each with the name of its rank.
pub fn draw_programs(programs: &[(String, &Program)]) -> String {
    let longest = programs.iter().map(|(_, program)| program.actions.len()).max().unwrap_or(0).max(1);
    let unit = UNIT.min(WIDEST / longest as f64);
    let pictures: Vec<Picture> = programs.iter().map(|(name, program)| Picture::of(name, program)).collect();
    let height = HEADING + pictures.iter().map(Picture::height).sum::<f64>() + GAP;
    let width = (LEFT + longest as f64 * unit + RIGHT).max(760.0);
    let mut svg = Svg::new([width, height]);
    let phase = programs.first().map_or("step", |(_, program)| program.phase.name());
    svg.title(&format!("{phase} of chunks"));
    svg.heading([12.0, 24.0], &format!("Chunks in a {phase}: actions from left to right"));
    legend(&mut svg);
    let mut top = HEADING;
    for picture in &pictures {
        picture.draw(&mut svg, top, unit);
        top += picture.height();
    }
    svg.finish()
}

/// The colours of buffers and works, with what they stand for.
const LEGEND: [(&str, &str); 9] = [
    ("#66a3e0", "forward, parameters"),
    ("#74be7a", "backward, gradients"),
    ("#eeaa4e", "input part of backward"),
    ("#ba94d6", "weight part of backward, optimizer"),
    ("#d9534f", "collective"),
    ("#9aa0a6", "copy"),
    ("#c9a227", "update"),
    ("#4aa8a0", "sum of gradients"),
    ("#d5d8dc", "other"),
];

fn legend(svg: &mut Svg) {
    let mut x = 12.0;
    for (colour, meaning) in LEGEND {
        svg.rect([x, 38.0, 11.0, 11.0], &fill(colour), "");
        svg.text([x + 15.0, 48.0], "start", " font-size=\"10\"", meaning);
        x += 27.0 + 5.6 * meaning.len() as f64;
    }
}

fn colour_of(role: Role) -> &'static str {
    match role {
        Role::Parameters | Role::Gathered | Role::Updated => LEGEND[0].0,
        Role::Gradient | Role::Rounded | Role::Partial(_) => LEGEND[1].0,
        Role::Sum | Role::Twin | Role::Summed | Role::Terms | Role::Tied => LEGEND[7].0,
        Role::State(_) | Role::Master => LEGEND[3].0,
        _ => LEGEND[8].0,
    }
}

/// What is drawn of one program.
struct Picture {
    heading: String,
    /// Titles and bars above the memories.
    works: Vec<(&'static str, Lanes)>,
    memories: Vec<MemoryPicture>,
}

/// The buffers of one memory.
struct MemoryPicture {
    memory: Memory,
    lanes: Lanes,
    /// Bytes that are there from the beginning to the end.
    resident: u64,
    /// Bytes that are taken, behind each action.
    taken: Vec<u64>,
}

impl Lanes {
    fn of(mut bars: Vec<Bar>) -> Lanes {
        bars.sort_by_key(|bar| (bar.start, bar.end));
        let mut lanes: Vec<Vec<Bar>> = Vec::new();
        let mut left_out = 0;
        for bar in bars {
            let free = |lane: &&mut Vec<Bar>| lane.last().is_none_or(|last| last.end <= bar.start);
            if let Some(lane) = lanes.iter_mut().find(free) {
                lane.push(bar);
            } else if lanes.len() < LANES {
                lanes.push(vec![bar]);
            } else {
                left_out += 1;
            }
        }
        Lanes { lanes, left_out }
    }

    fn height(&self) -> f64 {
        PITCH * self.lanes.len() as f64 + if self.left_out > 0 { 12.0 } else { 0.0 }
    }

    fn draw(&self, svg: &mut Svg, top: f64, unit: f64) {
        for (number, lane) in self.lanes.iter().enumerate() {
            for Bar { start, end, colour, title } in lane {
                let (x, width) = (LEFT + *start as f64 * unit, ((end - start) as f64 * unit).max(0.8));
                svg.rect([x, top + PITCH * number as f64, width, BAR], &fill(colour), title);
            }
        }
        if self.left_out > 0 {
            let text = format!("and {} more at a time than fit here", plural(self.left_out, "bar"));
            svg.text([LEFT, top + self.height() - 2.0], "start", " font-size=\"9\"", &text);
        }
    }
}

impl Picture {
    fn of(name: &str, program: &Program) -> Picture {
        let ended = ends(program);
        let works = |wanted: fn(Work) -> bool, colour: &'static str| {
            let bar = |(at, action): (usize, &Action)| {
                let Op::Start { token, work } = action.op else { return None };
                let end = ended.get(&(token, at)).copied().unwrap_or(program.actions.len());
                let title = program.guarded_word(action);
                wanted(work).then_some(Bar { start: at, end: end.max(at + 1), colour, title })
            };
            Lanes::of(program.actions.iter().enumerate().filter_map(bar).collect())
        };
        let is_copy = |work| matches!(work, Work::FromTiles { .. } | Work::ToTiles { .. });
        let all = [
            ("blocks", Lanes::of(runs(program))),
            ("collectives", works(Work::is_collective, LEGEND[4].0)),
            ("copies", works(is_copy, LEGEND[5].0)),
            ("the host", works(|work| matches!(work, Work::HostUpdate { .. }), LEGEND[6].0)),
        ];
        let memories: Vec<MemoryPicture> =
            Memory::ALL.into_iter().filter_map(|memory| MemoryPicture::of(program, memory)).collect();
        let count = plural(program.actions.len(), "action");
        Picture {
            heading: format!("{name}: {count}"),
            works: all.into_iter().filter(|(_, lanes)| !lanes.lanes.is_empty()).collect(),
            memories,
        }
    }

    fn height(&self) -> f64 {
        let works: f64 = self.works.iter().map(|(_, lanes)| lanes.height() + GAP).sum();
        let memories: f64 = self.memories.iter().map(MemoryPicture::height).sum();
        22.0 + works + memories
    }

    fn draw(&self, svg: &mut Svg, top: f64, unit: f64) {
        svg.text([12.0, top + 12.0], "start", BOLD, &self.heading);
        let mut y = top + 22.0;
        for (title, lanes) in &self.works {
            svg.text([LEFT - 8.0, y + 8.0], "end", "", title);
            lanes.draw(svg, y, unit);
            y += lanes.height() + GAP;
        }
        for memory in &self.memories {
            memory.draw(svg, y, unit);
            y += memory.height();
        }
    }
}

impl MemoryPicture {
    fn of(program: &Program, memory: Memory) -> Option<MemoryPicture> {
        let resident = program.buffers.iter().filter(|spec| spec.is_resident && spec.memory == memory);
        let resident = resident.map(|spec| spec.bytes()).sum();
        let (mut open, mut bars, mut live, mut taken) = (BTreeMap::new(), Vec::new(), 0, Vec::new());
        for (at, action) in program.actions.iter().enumerate() {
            match action.op {
                Op::Take(buffer) if program.spec(buffer).memory == memory => {
                    live += program.spec(buffer).bytes();
                    open.insert(buffer, at);
                }
                Op::Free(buffer) if program.spec(buffer).memory == memory => {
                    live -= program.spec(buffer).bytes();
                    let start = open.remove(&buffer).unwrap_or(0);
                    bars.push(bar(program, buffer, start..at));
                }
                _ => {}
            }
            taken.push(live);
        }
        let lanes = Lanes::of(bars);
        (resident > 0 || !lanes.lanes.is_empty()).then_some(MemoryPicture { memory, lanes, resident, taken })
    }

    fn peak(&self) -> u64 {
        self.taken.iter().copied().max().unwrap_or(0)
    }

    fn height(&self) -> f64 {
        if self.peak() > 0 { self.lanes.height() + CURVE + 2.0 * GAP } else { 2.0 * GAP }
    }

    fn draw(&self, svg: &mut Svg, top: f64, unit: f64) {
        let peak = self.peak();
        let title = format!("{} memory", self.memory.name());
        svg.text([LEFT - 8.0, top + 8.0], "end", BOLD, &title);
        let taken =
            if peak > 0 { format!("; at most {} more are taken", bytes(peak)) } else { String::new() };
        let text = format!("{} stay{taken}", bytes(self.resident));
        svg.text([LEFT, top + 8.0], "start", " font-size=\"10\"", &text);
        if peak == 0 {
            return;
        }
        let (low, scale) = (top + GAP + CURVE, CURVE / peak as f64);
        let mut points = vec![[LEFT, low]];
        let mut last = 0;
        for (at, live) in self.taken.iter().enumerate() {
            if *live != last {
                let x = LEFT + at as f64 * unit;
                points.extend([[x, low - last as f64 * scale], [x, low - *live as f64 * scale]]);
                last = *live;
            }
        }
        points.push([LEFT + self.taken.len() as f64 * unit, low - last as f64 * scale]);
        svg.polyline(&points, "#333", " stroke-width=\"1\"");
        self.lanes.draw(svg, low + 4.0, unit);
    }
}

/// The bar of a buffer that is taken during some actions.
fn bar(program: &Program, buffer: Buffer, during: std::ops::Range<usize>) -> Bar {
    let spec = program.spec(buffer);
    let title = format!("{}: {}, {}", program.name(buffer), spec.name, bytes(spec.bytes()));
    Bar { start: during.start, end: during.end.max(during.start + 1), colour: colour_of(spec.role), title }
}

/// The block runs and updates of a program.
fn runs(program: &Program) -> Vec<Bar> {
    let of = |(at, action): (usize, &Action)| {
        let colour = match action.op {
            Op::Run { pass: Pass::Forward | Pass::Loss, .. } => LEGEND[0].0,
            Op::Run { pass: Pass::Backward, .. } => LEGEND[1].0,
            Op::Run { pass: Pass::Input, .. } => LEGEND[2].0,
            Op::Run { pass: Pass::Weight, .. } => LEGEND[3].0,
            Op::Update { .. } => LEGEND[6].0,
            _ => return None,
        };
        Some(Bar { start: at, end: at + 1, colour, title: program.guarded_word(action) })
    };
    program.actions.iter().enumerate().filter_map(of).collect()
}

/// For each start of a work: the action that waits for it.
fn ends(program: &Program) -> BTreeMap<(Token, usize), usize> {
    let (mut open, mut ends) = (BTreeMap::new(), BTreeMap::new());
    for (at, action) in program.actions.iter().enumerate() {
        match action.op {
            Op::Start { token, .. } => drop(open.insert(token, at)),
            Op::Wait(token) | Op::Land(token) => {
                if let Some(start) = open.remove(&token) {
                    ends.insert((token, start), at);
                }
            }
            _ => {}
        }
    }
    ends
}
