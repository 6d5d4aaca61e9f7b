//! Shows figures to people: numbers with units, tables, and drawings of pipeline schedules.
//!
//! [`report`] formats numbers and tables. [`svg`] writes pictures, [`chart`](mod@chart) lines over steps. [`schedule_terminal`] draws a
//! schedule as text, [`schedule_svg`] as a picture, [`program_svg`] the program of a phase, and [`streams`] what the streams of ranks do in a
//! step. Everything here turns plain data into a `String` or JSON; the caller prints or writes it.
#![forbid(unsafe_code)]

pub mod chart;
pub mod program_svg;
pub mod report;
pub mod schedule_svg;
pub mod schedule_terminal;
pub mod streams;
pub mod svg;

pub use program_svg::draw_programs;
pub use schedule_svg::draw_svg;
pub use schedule_terminal::draw_terminal;
pub use streams::{draw_streams_svg, draw_streams_terminal, stream_events};
