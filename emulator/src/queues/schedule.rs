//! Which work runs next.

use super::{Eagerness, Queues, Stream, StreamId, Work};

impl Queues {
    /// Runs what the seed lets run when something was queued.
    pub(super) fn advance(&mut self) {
        match self.eagerness {
            Eagerness::Late => {}
            Eagerness::Early => while self.run_any() {},
            Eagerness::Random => {
                let mut steps = self.pick(4);
                while steps > 0 && self.run_any() {
                    steps -= 1;
                }
            }
        }
    }

    /// Runs a random piece of work that can run now. Returns whether there was one.
    fn run_any(&mut self) -> bool {
        let streams: Vec<StreamId> = self.streams.keys().copied().collect();
        let ready: Vec<StreamId> = streams.into_iter().filter(|&stream| self.is_ready(stream)).collect();
        if ready.is_empty() {
            return false;
        }
        let stream = ready[self.pick(ready.len())];
        self.run_next(stream);
        true
    }

    /// Whether older work of another stream stands in front, in a queue that both share.
    fn is_behind(&self, stream: StreamId) -> bool {
        let front = |stream: &Stream| stream.queue.front().map(|queued| queued.number);
        let Some(own) = self.streams.get(&stream).filter(|own| own.connection.is_some()) else {
            return false;
        };
        let sharing = self.streams.values().filter(|other| other.connection == own.connection);
        sharing.filter_map(front).min() < front(own)
    }

    fn is_ready(&mut self, stream: StreamId) -> bool {
        if self.is_behind(stream) {
            return false;
        }
        match self.streams.get_mut(&stream).and_then(|stream| stream.queue.front_mut()) {
            None => false,
            Some(queued) => match &mut queued.work {
                Work::Wait(point) => point.is_reached(),
                Work::WaitValue(word) => word.is_reached(),
                Work::Exchange(exchange) => exchange.is_ready(),
                _ => true,
            },
        }
    }

    /// Runs one piece of work that a stream needs to go on: its own next, or that of one it waits for. False if it waits for another
    /// device or for the host, and no other stream has work either: the caller asks again later.
    fn run_needed(&mut self, stream: StreamId) -> bool {
        if self.eagerness == Eagerness::Random && self.pick(2) == 0 && self.run_any() {
            return true;
        }
        let mut stream = stream;
        // A chain of waits visits each stream at most once: points are recorded before they are waited for.
        for _ in 0..=self.streams.len() {
            let waits_for = match self.streams.get(&stream).and_then(|stream| stream.queue.front()) {
                Some(queued) => match &queued.work {
                    Work::Wait(point) if !point.is_reached() => Some(point.clone()),
                    _ => None,
                },
                None => return true,
            };
            let Some(point) = waits_for else { break };
            let recorder = self.streams.iter().find(|(_, other)| {
                other
                    .queue
                    .iter()
                    .any(|queued| matches!(&queued.work, Work::Record(found) if found.is(&point)))
            });
            match recorder {
                Some((&other, _)) => stream = other,
                // The stream that should have reached the point was destroyed, which ended its work.
                None => point.reach(Default::default()),
            }
        }
        // The other device may be one of this process, whose work stands in another stream.
        self.run_next(stream) || self.run_any()
    }

    /// Runs the next work of a stream; whether that changed anything.
    fn run_next(&mut self, stream: StreamId) -> bool {
        if self.is_behind(stream) {
            return false;
        }
        let Some(state) = self.streams.get_mut(&stream) else { return true };
        if let Some(Work::Exchange(_)) = state.queue.front().map(|queued| &queued.work) {
            return self.run_exchange(stream);
        }
        if let Some(Work::WaitValue(word)) = state.queue.front().map(|queued| &queued.work)
            && !word.is_reached()
        {
            return false;
        }
        let Some(queued) = state.queue.pop_front() else { return true };
        let (index, mut clock) = (state.index, state.clock.clone());
        clock.join(&queued.host);
        self.perform(queued.work, index, &mut clock);
        if let Some(state) = self.streams.get_mut(&stream) {
            state.clock = clock;
        }
        true
    }

    /// Runs all work of a stream.
    pub fn synchronize(&mut self, stream: StreamId) {
        while self.streams.get(&stream).is_some_and(|stream| !stream.queue.is_empty()) {
            if !self.run_needed(stream) {
                self.stuck = Some(stream);
                return;
            }
        }
        if let Some(stream) = self.streams.get(&stream) {
            self.host.join(&stream.clock);
        }
    }

    /// Runs all work of all streams.
    pub fn synchronize_all(&mut self) {
        let streams: Vec<StreamId> = self.streams.keys().copied().collect();
        streams.into_iter().for_each(|stream| self.synchronize(stream));
    }

    /// Runs work until a point is reached.
    pub fn wait_for(&mut self, point: &super::Point) {
        while !point.is_reached() {
            let recorder = self.streams.iter().find(|(_, stream)| {
                stream
                    .queue
                    .iter()
                    .any(|queued| matches!(&queued.work, Work::Record(found) if found.is(point)))
            });
            match recorder {
                Some((&stream, _)) => {
                    if !self.run_needed(stream) {
                        self.stuck = Some(stream);
                        return;
                    }
                }
                None => return,
            }
        }
        if let Some(clock) = point.clock() {
            self.host.join(&clock);
        }
    }

    /// Whether a stream has no work; one that is asked often enough goes on.
    pub fn query(&mut self, stream: StreamId) -> bool {
        let is_idle =
            |queues: &Self| queues.streams.get(&stream).is_none_or(|stream| stream.queue.is_empty());
        if is_idle(self) {
            self.synchronize(stream);
            return true;
        }
        self.run_needed(stream);
        false
    }

    /// Whether a point is reached; one that is asked for often enough will be.
    pub fn query_point(&mut self, point: &super::Point) -> bool {
        if let Some(clock) = point.clock() {
            self.host.join(&clock);
            return true;
        }
        let recorder = self.streams.iter().find(|(_, stream)| {
            stream.queue.iter().any(|queued| matches!(&queued.work, Work::Record(found) if found.is(point)))
        });
        if let Some((&stream, _)) = recorder {
            self.run_needed(stream);
        }
        false
    }

    /// Whether queued work uses host memory within a range.
    pub fn uses_host_memory(&self, start: usize, bytes: usize) -> bool {
        let queued = self.streams.values().flat_map(|stream| &stream.queue);
        queued.into_iter().any(|queued| match &queued.work {
            Work::Copy(copy) => copy.uses_host(start, bytes),
            Work::WaitValue(word) => (start..start + bytes).contains(&word.address),
            _ => false,
        })
    }
}
