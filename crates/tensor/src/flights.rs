//! Ranges of a memory that work in flight reads or writes.
//!
//! Copies and collectives run beside the computation. The types make them own or borrow their tensors until they
//! are done; this is the check that they really do. Whatever is in flight registers its ranges with the arena
//! ([`Tensor::in_flight`](crate::Tensor::in_flight)). A tensor that is freed meanwhile, an allocation that would lie over such a range,
//! or a second transfer that writes where another one reads or writes, stops the run and names both call
//! sites. A free cannot panic: its fault is kept, and the next event of the arena reports it.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_plan::trace::{Memory, Site};

use crate::access::Access;

/// The transfers of one memory that are in flight.
#[derive(Default)]
pub(crate) struct Flights {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    flying: Vec<Flying>,
    fault: Option<String>,
}

/// One range that a transfer reads or writes.
struct Flying {
    id: u64,
    range: Range<u128>,
    access: Access,
    by: &'static str,
    site: Site,
}

/// A range that is in flight; it has landed when this is dropped.
#[must_use = "the range counts as landed when this is dropped"]
pub struct InFlight {
    flights: Arc<Flights>,
    id: u64,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.flights.lock().flying.retain(|flying| flying.id != self.id);
    }
}

impl Flights {
    /// A transfer starts to read or write `range`. `Err` when another one may not share the range with it.
    pub(crate) fn start(
        self: &Arc<Self>,
        memory: Memory,
        range: Range<u128>,
        access: Access,
        (by, site): (&'static str, Site),
    ) -> Result<InFlight, String> {
        let mut state = self.lock();
        state.check()?;
        let excludes = |other: &&Flying| {
            overlap(&other.range, &range) && (access == Access::Write || other.access == Access::Write)
        };
        if let Some(other) = state.flying.iter().find(excludes) {
            let text = format!(
                "{by} at {site} would {} {} memory that {other} still {}: wait for the first transfer before the \
                 second starts",
                if access == Access::Write { "write" } else { "read" },
                memory.name(),
                other.verb(),
            );
            return state.refuse(text);
        }
        let id = state.next;
        state.next += 1;
        state.flying.push(Flying { id, range, access, by, site });
        Ok(InFlight { flights: Arc::clone(self), id })
    }

    /// An allocation (`name`, at `site`) takes `range`. `Err` when a transfer still uses it.
    pub(crate) fn check_alloc(&self, range: &Range<u128>, name: &str, site: Site) -> Result<(), String> {
        let mut state = self.lock();
        state.check()?;
        match state.flying.iter().find(|flying| overlap(&flying.range, range)) {
            None => Ok(()),
            Some(flying) => {
                let text = format!(
                    "`{name}`, allocated at {site}, would lie over memory that {flying} still {}: wait for the \
                     transfer before its tensor is freed",
                    flying.verb()
                );
                state.refuse(text)
            }
        }
    }

    /// A tensor (`name`, allocated at `site`) is freed. When a transfer still uses it, the next event reports it.
    pub(crate) fn note_free(&self, range: &Range<u128>, name: &str, site: Site) {
        let mut state = self.lock();
        let found = state.flying.iter().find(|flying| overlap(&flying.range, range));
        let text = found.map(|flying| {
            format!(
                "`{name}`, allocated at {site}, was freed while {flying} still {} it: a tensor in flight belongs to \
                 the transfer until it is done",
                flying.verb()
            )
        });
        if let Some(text) = text {
            state.fault.get_or_insert(text);
        }
    }

    /// The first fault, if there was one.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.lock().check()
    }

    /// Nothing panics under this lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn check(&self) -> Result<(), String> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    fn refuse<T>(&mut self, text: String) -> Result<T, String> {
        self.fault.get_or_insert_with(|| text.clone());
        Err(text)
    }
}

impl Flying {
    fn verb(&self) -> &'static str {
        match self.access {
            Access::Read => "reads",
            Access::Write => "writes",
        }
    }
}

impl std::fmt::Display for Flying {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} started at {}", self.by, self.site)
    }
}

fn overlap(a: &Range<u128>, b: &Range<u128>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}
