//! Finds accesses to memory that nothing orders: vector clocks over the streams and the host.
//!
//! Every call is checked when it is issued, before anything runs, so what is found does not depend on delays. The clock
//! of a stream says, for each stream, how many of its calls are over before the stream's next call starts. A call
//! starts after the calls before it on its stream, after the events that its stream waited for, and after
//! everything that the host had waited for when it issued the call. Two accesses to overlapping bytes, at least one
//! of them a write, are a race when the clock of the later one does not include the earlier one (Lamport, 1978; as
//! in FastTrack, Flanagan and Freund, 2009, only the last write of a range and the reads since are remembered).

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use phalanx_plan::trace::{Site, Stream};
use phalanx_tensor::Access;

/// Number of streams.
pub(crate) const STREAMS: usize = 6;

/// The number of a stream, from 0.
pub(crate) fn index(stream: Stream) -> usize {
    stream as usize
}

/// The names of the streams, by their number.
pub(crate) const STREAM_NAMES: [&str; STREAMS] =
    ["compute", "communication", "to_device", "to_host", "disk", "host"];

/// For each stream: how many of its entries are over.
type Clock = [u64; STREAMS];

/// Segments that are remembered before those that nothing can race with any more are forgotten.
const MIN_SEGMENTS: usize = 1024;

/// A call, or an access by the host, as errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) call: &'static str,
    pub(crate) site: Site,
}

/// One access by a stream that later accesses must be ordered after.
#[derive(Clone, Copy, Debug)]
struct Past {
    stream: usize,
    /// The number of the call in its stream.
    number: u64,
    by: Caller,
}

/// Bytes up to `end` with the same history.
#[derive(Clone, Debug)]
struct Segment {
    end: usize,
    write: Option<Past>,
    /// Since that write; at most one for each stream, its last.
    reads: Vec<Past>,
}

/// Two accesses that nothing orders.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Race {
    past: Past,
    past_access: Access,
    access: Access,
}

impl std::fmt::Display for Race {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verb = |access| if access == Access::Read { "reads" } else { "writes" };
        let Past { stream, by: Caller { call, site }, .. } = self.past;
        write!(
            f,
            "data race: it {} memory that `{call}` at {site} {} on stream {}, and no event or wait orders the two",
            verb(self.access),
            verb(self.past_access),
            STREAM_NAMES[stream]
        )
    }
}

/// State of the race checker: clocks of all streams, and accesses to the memory that they used.
pub(crate) struct Races {
    streams: [Clock; STREAMS],
    host: Clock,
    /// For each stream: its events that the host has not waited for, and the clocks at them.
    events: [VecDeque<(u64, Clock)>; STREAMS],
    /// By first byte; none overlaps another.
    segments: BTreeMap<usize, Segment>,
    /// Number of segments at which old ones are forgotten.
    forget_at: usize,
}

impl Races {
    pub(crate) fn new() -> Races {
        Races {
            streams: [[0; STREAMS]; STREAMS],
            host: [0; STREAMS],
            events: Default::default(),
            segments: BTreeMap::new(),
            forget_at: MIN_SEGMENTS,
        }
    }

    /// The host issues entry `number` of `stream`, a call.
    pub(crate) fn issue(&mut self, stream: usize, number: u64) {
        let clock = &mut self.streams[stream];
        join(clock, &self.host);
        clock[stream] = number;
    }

    /// The call that was issued last to `stream` reads or writes `range`.
    pub(crate) fn access(
        &mut self,
        stream: usize,
        range: Range<usize>,
        access: Access,
        by: Caller,
    ) -> Option<Race> {
        if range.is_empty() {
            return None;
        }
        let clock = self.streams[stream];
        let race = self.conflict(&clock, &range, access);
        let now = Past { stream, number: clock[stream], by };
        self.cut(range.start);
        self.cut(range.end);
        match access {
            Access::Write => self.overwrite(range, now),
            Access::Read => self.read(range, now),
        }
        if self.segments.len() > self.forget_at {
            self.forget();
        }
        race
    }

    /// The host reads or writes `range`. What is issued later is ordered after it.
    pub(crate) fn host_access(&self, range: &Range<usize>, access: Access) -> Option<Race> {
        self.conflict(&self.host, range, access)
    }

    /// An event at entry `number` of `stream`, its last.
    pub(crate) fn record(&mut self, stream: usize, number: u64) {
        let events = &mut self.events[stream];
        let clock = self.streams[stream];
        match events.back_mut().filter(|(last, _)| *last == number) {
            Some(event) => event.1 = clock,
            None => events.push_back((number, clock)),
        }
    }

    /// Makes all later calls of `stream` start after event `number` of `of`.
    pub(crate) fn wait(&mut self, stream: usize, of: usize, number: u64) {
        let event = self.clock_of(of, number);
        join(&mut self.streams[stream], &event);
    }

    /// The host waited for event `number` of `of`.
    pub(crate) fn synchronize(&mut self, of: usize, number: u64) {
        let event = self.clock_of(of, number);
        join(&mut self.host, &event);
        // The host knows all that these say.
        let events = &mut self.events[of];
        while events.front().is_some_and(|(known, _)| *known <= number) {
            events.pop_front();
        }
    }

    /// The clock at an event. An entry at which none was recorded orders what the last event before it does, and itself.
    fn clock_of(&self, stream: usize, number: u64) -> Clock {
        let events = &self.events[stream];
        let after = events.partition_point(|(known, _)| *known <= number);
        let mut clock = after.checked_sub(1).map_or([0; STREAMS], |last| events[last].1);
        clock[stream] = clock[stream].max(number);
        clock
    }

    /// The first access in `range` that `clock` does not include and that excludes `access`.
    fn conflict(&self, clock: &Clock, range: &Range<usize>, access: Access) -> Option<Race> {
        let before = self.segments.range(..range.start).next_back();
        let touched =
            before.into_iter().chain(self.segments.range(range.clone())).map(|(_, segment)| segment);
        let touched = touched.filter(|segment| segment.end > range.start);
        let is_open = |past: &&Past| clock[past.stream] < past.number;
        for segment in touched {
            let write = segment.write.iter().find(is_open).map(|past| (past, Access::Write));
            let read = || segment.reads.iter().find(is_open).map(|past| (past, Access::Read));
            let found = write.or_else(|| if access == Access::Write { read() } else { None });
            if let Some((past, past_access)) = found {
                return Some(Race { past: *past, past_access, access });
            }
        }
        None
    }

    /// Makes a segment begin at `at` where one goes across it.
    fn cut(&mut self, at: usize) {
        let Some((_, segment)) = self.segments.range_mut(..at).next_back() else { return };
        if segment.end > at {
            let upper = segment.clone();
            segment.end = at;
            self.segments.insert(at, upper);
        }
    }

    fn overwrite(&mut self, range: Range<usize>, now: Past) {
        let old: Vec<usize> = self.segments.range(range.clone()).map(|(start, _)| *start).collect();
        old.iter().for_each(|start| {
            self.segments.remove(start);
        });
        self.segments.insert(range.start, Segment { end: range.end, write: Some(now), reads: Vec::new() });
    }

    fn read(&mut self, range: Range<usize>, now: Past) {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for (start, segment) in self.segments.range_mut(range.clone()) {
            if at < *start {
                gaps.push(at..*start);
            }
            segment.reads.retain(|past| past.stream != now.stream);
            segment.reads.push(now);
            at = segment.end;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        for gap in gaps {
            self.segments.insert(gap.start, Segment { end: gap.end, write: None, reads: vec![now] });
        }
    }

    /// Drops the accesses that the host has waited for: all that is issued from now on is ordered after them.
    fn forget(&mut self) {
        let host = self.host;
        let is_open = |past: &Past| host[past.stream] < past.number;
        for segment in self.segments.values_mut() {
            segment.write = segment.write.filter(is_open);
            segment.reads.retain(is_open);
        }
        self.segments.retain(|_, segment| segment.write.is_some() || !segment.reads.is_empty());
        self.forget_at = MIN_SEGMENTS.max(2 * self.segments.len());
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}

#[cfg(test)]
mod tests {
    use super::*;
    use Access::{Read, Write};

    const COMPUTE: usize = 0;
    const TO_DEVICE: usize = 2;
    const TO_HOST: usize = 3;

    /// Issues calls and counts them.
    struct Bench {
        races: Races,
        issued: [u64; STREAMS],
    }

    impl Bench {
        fn new() -> Bench {
            Bench { races: Races::new(), issued: [0; STREAMS] }
        }

        /// Returns whether a call with one operand races with an earlier one.
        #[track_caller]
        fn call(&mut self, stream: usize, range: Range<usize>, access: Access) -> bool {
            self.issued[stream] += 1;
            self.races.issue(stream, self.issued[stream]);
            let by = Caller { call: "call", site: Site::caller() };
            self.races.access(stream, range, access, by).is_some()
        }

        fn record(&mut self, stream: usize) -> (usize, u64) {
            self.races.record(stream, self.issued[stream]);
            (stream, self.issued[stream])
        }

        fn wait(&mut self, stream: usize, (of, number): (usize, u64)) {
            self.races.wait(stream, of, number);
        }

        fn synchronize(&mut self, (of, number): (usize, u64)) {
            self.races.synchronize(of, number);
        }
    }

    #[test]
    fn one_of_two_accesses_must_write() {
        for (first, second, is_race) in
            [(Read, Read, false), (Read, Write, true), (Write, Read, true), (Write, Write, true)]
        {
            let mut bench = Bench::new();
            assert!(!bench.call(COMPUTE, 0..64, first));
            assert_eq!(bench.call(TO_HOST, 0..64, second), is_race, "{first:?} {second:?}");
            // Calls of one stream are in order.
            let mut bench = Bench::new();
            assert!(!bench.call(COMPUTE, 0..64, first));
            assert!(!bench.call(COMPUTE, 0..64, second));
        }
    }

    #[test]
    fn ranges_must_overlap() {
        for (range, is_race) in
            [(0..64, false), (128..192, false), (127..130, true), (0..65, true), (80..90, true)]
        {
            let mut bench = Bench::new();
            assert!(!bench.call(COMPUTE, 64..128, Write));
            assert_eq!(bench.call(TO_HOST, range.clone(), Read), is_race, "{range:?}");
        }
        let mut bench = Bench::new();
        assert!(!bench.call(COMPUTE, 64..128, Write));
        assert!(!bench.call(TO_HOST, 70..70, Read), "no bytes");
    }

    #[test]
    fn an_event_orders_what_came_before_it() {
        let mut bench = Bench::new();
        bench.call(COMPUTE, 0..64, Write);
        let event = bench.record(COMPUTE);
        bench.call(COMPUTE, 64..128, Write);
        bench.wait(TO_HOST, event);
        assert!(!bench.call(TO_HOST, 0..64, Read));
        assert!(bench.call(TO_HOST, 64..128, Read), "written after the event");
    }

    #[test]
    fn order_passes_through_a_third_stream_and_through_the_host() {
        let mut bench = Bench::new();
        bench.call(TO_DEVICE, 0..64, Write);
        let uploaded = bench.record(TO_DEVICE);
        bench.wait(COMPUTE, uploaded);
        let computed = bench.record(COMPUTE);
        bench.wait(TO_HOST, computed);
        assert!(!bench.call(TO_HOST, 0..64, Read), "with no call between the wait and the event");
        let read = bench.record(TO_HOST);
        bench.synchronize(read);
        assert!(!bench.call(TO_DEVICE, 0..64, Write), "the host waited for the reader");
        assert!(bench.call(COMPUTE, 0..64, Read), "but nobody for the second write");
    }

    #[test]
    fn the_host_must_wait_for_what_it_touches() {
        let mut bench = Bench::new();
        bench.call(TO_HOST, 0..64, Write);
        let first = bench.record(TO_HOST);
        bench.call(TO_HOST, 64..128, Write);
        bench.synchronize(first);
        assert!(bench.races.host_access(&(0..64), Read).is_none());
        assert!(bench.races.host_access(&(0..65), Read).is_some());
        let second = bench.record(TO_HOST);
        bench.synchronize(second);
        assert!(bench.races.host_access(&(0..128), Write).is_none());
        bench.call(TO_DEVICE, 0..64, Read);
        assert!(bench.races.host_access(&(0..64), Read).is_none(), "both only read");
        assert!(bench.races.host_access(&(0..64), Write).is_some());
    }

    #[test]
    fn a_write_must_follow_every_reader() {
        let mut bench = Bench::new();
        bench.call(TO_DEVICE, 0..64, Write);
        let written = bench.record(TO_DEVICE);
        bench.wait(COMPUTE, written);
        bench.wait(TO_HOST, written);
        assert!(!bench.call(COMPUTE, 0..32, Read));
        assert!(!bench.call(TO_HOST, 16..64, Read));
        let computed = bench.record(COMPUTE);
        bench.wait(TO_DEVICE, computed);
        assert!(!bench.call(TO_DEVICE, 0..16, Write));
        assert!(bench.call(TO_DEVICE, 16..20, Write), "the copy to the host still reads it");
    }

    #[test]
    fn an_event_that_the_host_waited_for_still_orders_itself() {
        let mut bench = Bench::new();
        bench.call(COMPUTE, 0..64, Write);
        let event = bench.record(COMPUTE);
        bench.synchronize(event);
        bench.call(COMPUTE, 64..128, Write);
        bench.wait(TO_HOST, event);
        assert!(!bench.call(TO_HOST, 0..64, Read));
        assert!(bench.call(TO_HOST, 64..128, Read));
    }

    #[test]
    fn what_the_host_waited_for_is_forgotten() {
        let mut bench = Bench::new();
        for round in 0..8 {
            for i in 0..MIN_SEGMENTS {
                let start = (round * MIN_SEGMENTS + i) * 64;
                bench.call(COMPUTE, start..start + 32, Write);
            }
            let event = bench.record(COMPUTE);
            bench.synchronize(event);
        }
        assert!(bench.races.segments.len() <= 2 * MIN_SEGMENTS + 1, "{}", bench.races.segments.len());
        assert!(bench.races.events.iter().all(VecDeque::is_empty));
    }
}
