//! Sums over the micro-batches of a step, by a binary tree over their numbers.
//!
//! Each micro-batch has a buffer of its own, and two sums that are neighbours in the tree are added. It is the tree in which collectives
//! add over ranks: neighbours are added in pairs, and one without a neighbour waits for the next level. So the tree over the replicas and
//! this one together are the tree over all micro-batches of a step, whatever the number of replicas, if that is a power of two.

/// A sum over the micro-batches from `index << level` on, `1 << level` of them.
#[derive(Clone, Copy)]
struct Node {
    level: u32,
    index: usize,
    /// True for the first buffer of a step: it has the whole sum in the end.
    is_first: bool,
}

/// The sums that are not added to others yet, with their buffers. One of these is at hand: the one that was used last.
pub struct PartialSums<T> {
    micro_batches: usize,
    /// Micro-batches that are in a sum.
    seen: usize,
    at_hand: Option<Node>,
    others: Vec<(Node, T)>,
}

impl<T> PartialSums<T> {
    /// No sums, at the beginning of a step.
    pub fn new(micro_batches: usize) -> PartialSums<T> {
        PartialSums { micro_batches, seen: 0, at_hand: None, others: Vec::new() }
    }

    /// A buffer that has no sum: the one at hand, or a new one if that has one.
    pub fn unused(&mut self, at_hand: T, new: impl FnOnce() -> T) -> T {
        match self.at_hand.take() {
            None => at_hand,
            Some(node) => {
                self.others.push((node, at_hand));
                new()
            }
        }
    }

    /// Notes that the buffer at hand, which was unused, has the sum of a micro-batch.
    pub fn written(&mut self, micro_batch: usize) {
        self.at_hand = Some(Node { level: 0, index: micro_batch, is_first: self.seen == 0 });
        self.seen += 1;
    }

    /// A buffer for the sum of a micro-batch, which is written to it, or added if the result is true: then it has the neighbour's.
    pub fn target(&mut self, micro_batch: usize, at_hand: T, new: impl FnOnce() -> T) -> (T, bool) {
        let is_neighbour = |node: &Node| node.level == 0 && node.index == micro_batch ^ 1;
        let found = self.others.iter().position(|(node, _)| is_neighbour(node));
        let at_hand = match (self.at_hand.filter(is_neighbour), found) {
            (Some(_), _) => at_hand,
            (None, Some(found)) => {
                let (node, buffer) = self.others.remove(found);
                self.others.extend(self.at_hand.replace(node).map(|node| (node, at_hand)));
                buffer
            }
            (None, None) => {
                let buffer = self.unused(at_hand, new);
                self.written(micro_batch);
                return (buffer, false);
            }
        };
        self.seen += 1;
        self.at_hand = self.at_hand.map(Node::parent);
        (at_hand, true)
    }

    /// Adds sums as long as the one at hand has a neighbour, and behind the last micro-batch all of them: `add` adds a buffer, which is
    /// then free, to another. Returns the buffer at hand.
    pub fn settle(&mut self, at_hand: T, mut add: impl FnMut(T, &mut T)) -> T {
        let Some(node) = self.at_hand else { return at_hand };
        let mut sum = (node, at_hand);
        let mut plus = |(node, buffer): (Node, T), (other, other_buffer): (Node, T)| {
            let parent = Node { is_first: node.is_first || other.is_first, ..node.parent() };
            let (from, mut into) =
                if node.is_first { (other_buffer, buffer) } else { (buffer, other_buffer) };
            add(from, &mut into);
            (parent, into)
        };
        while let Some(found) = self.others.iter().position(|(other, _)| other.is_beside(sum.0)) {
            sum = plus(sum, self.others.remove(found));
        }
        if self.seen == self.micro_batches {
            let mut all: Vec<_> = self.others.drain(..).chain([sum]).collect();
            all.sort_by_key(|(node, _)| node.level);
            sum = all.into_iter().reduce(|low, high| plus(high, low)).expect("at least the sum at hand");
        }
        self.at_hand = Some(sum.0);
        sum.1
    }
}

impl Node {
    fn parent(self) -> Node {
        Node { level: self.level + 1, index: self.index / 2, ..self }
    }

    fn is_beside(self, other: Node) -> bool {
        self.level == other.level && self.index == other.index ^ 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree over `micro_batches` leaves: pairs of neighbours, level by level.
    fn tree(micro_batches: usize) -> String {
        let mut level: Vec<String> = (0..micro_batches).map(|leaf| leaf.to_string()).collect();
        while level.len() > 1 {
            level = level.chunks(2).map(sum).collect();
        }
        level.remove(0)
    }

    /// The sum of terms, whose order is that of their first leaves.
    fn sum(terms: &[String]) -> String {
        let mut terms = terms.to_vec();
        let first = |term: &String| {
            term.trim_start_matches('(').split(['+', ')']).next().unwrap().parse::<usize>().unwrap()
        };
        terms.sort_by_key(first);
        if terms.len() == 1 { terms.remove(0) } else { format!("({})", terms.join("+")) }
    }

    /// Buffers: their number, and what they have.
    type Cell = (usize, String);

    /// The sum of micro-batches that come in an order, and the largest number of buffers.
    fn summed(order: &[usize], adds_to_neighbours: bool) -> (Cell, usize) {
        let mut sums = PartialSums::new(order.len());
        let (mut at_hand, mut buffers, mut live, mut max) = ((0, String::new()), 1, 1, 1);
        for micro_batch in order {
            let mut new = || {
                (buffers, live) = (buffers + 1, live + 1);
                max = max.max(live);
                (buffers - 1, String::new())
            };
            if adds_to_neighbours {
                let (buffer, adds) = sums.target(*micro_batch, at_hand, new);
                let leaf = micro_batch.to_string();
                at_hand = (buffer.0, if adds { sum(&[buffer.1, leaf]) } else { leaf });
            } else {
                at_hand = (sums.unused(at_hand, &mut new).0, micro_batch.to_string());
                sums.written(*micro_batch);
            }
            at_hand = sums.settle(at_hand, |from, into| {
                live -= 1;
                into.1 = sum(&[into.1.clone(), from.1]);
            });
        }
        (at_hand, max)
    }

    #[test]
    fn micro_batches_in_any_order_are_added_by_one_tree_into_the_first_buffer() {
        for count in 1..=17 {
            let rising: Vec<usize> = (0..count).collect();
            let falling: Vec<usize> = (0..count).rev().collect();
            let mixed: Vec<usize> = (0..count).map(|m| m * 7 % count).collect();
            let orders = if count % 7 == 0 { vec![rising, falling] } else { vec![rising, falling, mixed] };
            let levels = usize::BITS - (count - 1).leading_zeros();
            for (number, order) in orders.iter().enumerate() {
                for adds in [false, true] {
                    let ((buffer, sum), max) = summed(order, adds);
                    assert_eq!((buffer, sum), (0, tree(count)), "{order:?}");
                    assert!(
                        number > 0 || max <= 1 + levels as usize - usize::from(adds && count > 1),
                        "{order:?}: {max}"
                    );
                }
            }
        }
    }
}
