//! Which operation is ordered before which: vector clocks over streams.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Up to which operation of each stream something is ordered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(Vec<u32>);

impl Clock {
    /// Also orders after all that another clock has.
    pub fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            *own = (*own).max(*other);
        }
    }

    fn set(&mut self, stream: usize, number: u32) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = number;
    }

    fn has(&self, stream: usize, number: u32) -> bool {
        self.0.get(stream).is_some_and(|known| *known >= number)
    }
}

/// All operations that have begun: their streams and places therein.
#[derive(Debug, Default)]
pub struct Operations {
    /// By number of the operation, which begins with 1.
    places: Vec<(usize, u32)>,
    /// How many each stream has.
    counts: Vec<u32>,
}

impl Operations {
    /// A new place in clocks.
    pub fn add_stream(&mut self) -> usize {
        self.counts.push(0);
        self.counts.len() - 1
    }

    /// Begins an operation of a stream: its number. It is in the clock from now on.
    pub fn begin(&mut self, stream: usize, clock: &mut Clock) -> u32 {
        self.counts[stream] += 1;
        self.places.push((stream, self.counts[stream]));
        clock.set(stream, self.counts[stream]);
        self.places.len() as u32
    }

    /// Whether an operation is ordered before whatever has the clock.
    pub fn is_before(&self, operation: u32, clock: &Clock) -> bool {
        let place = (operation as usize).checked_sub(1).and_then(|index| self.places.get(index));
        place.is_none_or(|&(stream, number)| clock.has(stream, number))
    }
}

/// A point in a stream, which events name. It is reached when the work before it has ended.
#[derive(Clone, Debug, Default)]
pub struct Point(Arc<Mutex<Option<(Clock, Instant)>>>);

impl Point {
    /// Says that the point is reached.
    pub fn reach(&self, clock: Clock) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((clock, Instant::now()));
    }

    /// The clock of the point, if it is reached.
    pub fn clock(&self) -> Option<Clock> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.as_ref().map(|(clock, _)| clock.clone())
    }

    /// When the point was reached.
    pub fn time(&self) -> Option<Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|(_, time)| *time)
    }

    /// Whether the point is reached.
    pub fn is_reached(&self) -> bool {
        self.time().is_some()
    }

    /// Whether both are the same point.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
