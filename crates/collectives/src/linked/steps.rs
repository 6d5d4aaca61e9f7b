//! The steps of each call on a link, which moves bytes and sums parts.
//!
//! | call | steps |
//! |---|---|
//! | all_gather, broadcast | the link's own |
//! | reduce_scatter | exchange of parts, sum |
//! | all_reduce | the same, then all_gather of the sums; a short one: exchange of whole buffers, sum |
//! | reduce | as reduce_scatter, then the sums go to the root |
//! | gather, scatter, all_to_all, send, recv | exchange |
//!
//! P ranks, S bytes: a reduce_scatter sends S(P-1)/P bytes from each rank in one exchange, as many as a ring in P - 1 steps, and all_reduce
//! twice as many. No ring adds, because that would change the order of additions: each rank receives the P - 1 parts that it sums. They go
//! through a buffer of at most [`SUMMANDS_BYTES`], or as many as a run says, piece by piece; an exchange of pieces and its sum follow each other.

use phalanx_plan::trace::{CollectiveOp, DType};
use phalanx_tensor::links::{LinkStep, Message, PartsSum, Span};

use crate::call::Call;
use crate::parts;

/// Bytes of the parts of other ranks that a rank holds at once, where a run does not say how many.
pub(crate) const SUMMANDS_BYTES: usize = 16 << 20;

/// All buffers of an all_reduce together: up to here, latency counts and not bytes.
const SHORT_BYTES: usize = 64 << 10;

/// Granularity of the pieces of a sum, in elements.
const GRAIN: usize = 256;

/// A call as its steps depend on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) op: CollectiveOp,
    pub(crate) dtype: DType,
    /// Elements of the whole buffer.
    pub(crate) count: usize,
    pub(crate) root: Option<usize>,
    pub(crate) accumulate: bool,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Bytes of the parts of other ranks that a rank holds at once, at most.
    pub(crate) piece_bytes: usize,
}

/// The buffers of a call: what it reads, what it writes, and room for parts of other ranks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Places {
    pub(crate) source: Option<Span>,
    pub(crate) target: Option<Span>,
    pub(crate) summands: Option<Span>,
}

impl Shape {
    pub(crate) fn of(call: &Call, [rank, ranks]: [usize; 2], piece_bytes: usize) -> Shape {
        let (op, dtype, count) = (call.op, call.dtype(), call.count(ranks));
        let (root, accumulate) = (call.root, call.accumulate);
        Shape { op, dtype, count, root, accumulate, rank, ranks, piece_bytes }
    }

    fn width(&self) -> usize {
        self.dtype.bytes()
    }

    /// An all_reduce in one exchange.
    fn is_short(&self) -> bool {
        self.op == CollectiveOp::AllReduce && self.count * self.width() * self.ranks <= SHORT_BYTES
    }

    /// The elements that a rank sums.
    fn part(&self, rank: usize) -> std::ops::Range<usize> {
        match self.op {
            CollectiveOp::AllReduce | CollectiveOp::Reduce => parts::uneven(self.count, self.ranks, rank),
            _ => parts::equal(self.count, self.ranks, rank),
        }
    }

    /// Elements of each part that are exchanged at once.
    fn piece(&self) -> usize {
        let max = self.piece_bytes / self.width() / (self.ranks - 1) / GRAIN * GRAIN;
        self.part(0).len().min(max.max(GRAIN))
    }

    /// Elements of the buffer for parts of other ranks; 0 for calls that sum nothing.
    pub(crate) fn summands(&self) -> usize {
        match self.op {
            _ if self.is_short() => self.count * (self.ranks - 1),
            CollectiveOp::AllReduce | CollectiveOp::Reduce | CollectiveOp::ReduceScatter => {
                self.piece() * (self.ranks - 1)
            }
            _ => 0,
        }
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank, self.ranks);
        (0..ranks).filter(move |q| *q != rank)
    }

    /// The bytes of elements of a buffer.
    fn span(&self, of: Span, elements: std::ops::Range<usize>) -> Span {
        of.range(elements.start * self.width(), elements.len() * self.width())
    }

    /// Part r of a buffer of equal parts.
    fn equal(&self, of: Span, rank: usize) -> Span {
        self.span(of, parts::equal(self.count, self.ranks, rank))
    }

    /// The steps of the call.
    pub(crate) fn steps(&self, places: Places) -> Vec<LinkStep> {
        use CollectiveOp::*;
        if self.count == 0 {
            return Vec::new();
        }
        let source = || places.source.expect("Call::check has checked the buffers");
        let target = || places.target.expect("Call::check has checked the buffers");
        let root = || self.root.expect("Call::check has checked the root");
        let own = self.rank;
        match self.op {
            Barrier => Vec::new(),
            AllGather => {
                let part = places.source.unwrap_or_else(|| self.equal(target(), own));
                vec![LinkStep::AllGather { part, whole: target() }]
            }
            Broadcast => vec![LinkStep::Broadcast { buffer: source(), root: root() }],
            Send => vec![LinkStep::Exchange(vec![sent(root(), source())])],
            Recv => vec![LinkStep::Exchange(vec![received(root(), target())])],
            AllToAll => {
                let (from, to) = (source(), target());
                let both = |q| [sent(q, self.equal(from, q)), received(q, self.equal(to, q))];
                let copy = LinkStep::Copy { from: self.equal(from, own), to: self.equal(to, own) };
                vec![LinkStep::Exchange(self.peers().flat_map(both).collect()), copy]
            }
            Gather if root() == own => {
                let whole = target();
                let all = self.peers().map(|q| received(q, self.equal(whole, q))).collect();
                vec![LinkStep::Exchange(all), LinkStep::Copy { from: source(), to: self.equal(whole, own) }]
            }
            Gather => vec![LinkStep::Exchange(vec![sent(root(), source())])],
            Scatter if root() == own => {
                let whole = source();
                let all = self.peers().map(|q| sent(q, self.equal(whole, q))).collect();
                vec![LinkStep::Exchange(all), LinkStep::Copy { from: self.equal(whole, own), to: target() }]
            }
            Scatter => vec![LinkStep::Exchange(vec![received(root(), target())])],
            ReduceScatter | AllReduce | Reduce => self.reduction(places),
        }
    }

    fn reduction(&self, places: Places) -> Vec<LinkStep> {
        let whole = places.source.expect("Call::check has checked the buffers");
        let summands = places.summands.expect("what sums has room for parts");
        let own = self.span(whole, self.part(self.rank));
        if self.is_short() {
            let slot = |at: usize| summands.range(at * whole.bytes, whole.bytes);
            let both = |(at, q)| [sent(q, whole), received(q, slot(at))];
            let all = self.peers().enumerate().flat_map(both).collect();
            return vec![LinkStep::Exchange(all), self.sum(self.count, whole, summands, whole)];
        }
        let mut steps = self.reduce_parts(whole, summands, places.target.unwrap_or(own));
        match self.op {
            CollectiveOp::AllReduce if self.part(0).len() * self.ranks == self.count => {
                steps.push(LinkStep::AllGather { part: own, whole });
            }
            CollectiveOp::AllReduce => {
                let both = |q| [sent(q, own), received(q, self.span(whole, self.part(q)))];
                steps.extend(exchange(self.peers().flat_map(both)));
            }
            CollectiveOp::Reduce if self.root == Some(self.rank) => {
                steps.extend(exchange(self.peers().map(|q| received(q, self.span(whole, self.part(q))))));
            }
            CollectiveOp::Reduce => steps.extend(exchange(self.root.map(|root| sent(root, own)))),
            _ => {}
        }
        steps
    }

    /// Each rank's part of the sum goes to `target`, piece by piece.
    fn reduce_parts(&self, whole: Span, summands: Span, target: Span) -> Vec<LinkStep> {
        let mut steps = Vec::new();
        let piece = self.piece();
        for start in (0..self.part(0).len()).step_by(piece) {
            // A short part may have less of this piece, or nothing.
            let of = |rank: usize| {
                let part = self.part(rank);
                (part.start + start).min(part.end)..(part.start + start + piece).min(part.end)
            };
            let mine = of(self.rank);
            let room = |at: usize| self.span(summands, at * mine.len()..(at + 1) * mine.len());
            let both = |(at, q)| [sent(q, self.span(whole, of(q))), received(q, room(at))];
            steps.extend(exchange(self.peers().enumerate().flat_map(both)));
            if !mine.is_empty() {
                let to = self.span(target, start..start + mine.len());
                let others = self.span(summands, 0..mine.len() * (self.ranks - 1));
                steps.push(self.sum(mine.len(), self.span(whole, mine), others, to));
            }
        }
        steps
    }

    fn sum(&self, elements: usize, own: Span, others: Span, target: Span) -> LinkStep {
        let Shape { dtype, accumulate, rank, ranks, .. } = *self;
        LinkStep::Sum(PartsSum {
            dtype,
            elements,
            place: rank,
            places: ranks,
            own,
            others,
            target,
            accumulate,
        })
    }
}

fn sent(peer: usize, buffer: Span) -> Message {
    Message { peer, is_sent: true, buffer }
}

fn received(peer: usize, buffer: Span) -> Message {
    Message { peer, is_sent: false, buffer }
}

/// An exchange of the messages that are not empty, if there are any.
fn exchange(messages: impl IntoIterator<Item = Message>) -> Option<LinkStep> {
    let messages: Vec<Message> = messages.into_iter().filter(|message| message.buffer.bytes > 0).collect();
    (!messages.is_empty()).then_some(LinkStep::Exchange(messages))
}
