//! Specifications, and work on several threads.

use anyhow::Result;
use phalanx_train::Spec;

use crate::plans::planned;
use crate::plans::resolve::Resolved;

/// The specification of a resolved configuration.
pub(super) fn spec_of(resolved: &Resolved, evaluated: usize) -> Result<Spec> {
    planned::spec(&resolved.config, resolved.model.clone(), evaluated)
}

/// Applies `work` to each item, on the threads of this machine.
pub(super) fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len()).max(1);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let run = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, work(item)));
        }
    };
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let handles: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let mut all = run();
        handles
            .into_iter()
            .for_each(|handle| all.extend(handle.join().expect("a dry run that panicked has said why")));
        all
    });
    all.sort_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, result)| result).collect()
}
