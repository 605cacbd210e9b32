//! Tie-breaking of equal scores.
//!
//! The default is the earliest key: the choice of a query then depends only on the keys it sees. The choice
//! of `torch.topk` on a CPU depends on all keys of the row, including masked ones, because it takes what its
//! partition leaves in front. Several scores of exactly 0 are not rare in a tiny model. To compare such a
//! model with transformers tensor by tensor, this module repeats the steps of the GNU C++ library that torch
//! calls: for rows of fewer than 64 topk keys nth_element (median of three, unguarded, insertion sort below
//! four), for others partial_sort (a heap of the first topk keys, in which each later key replaces the lowest
//! if it is above it).

use std::cmp::Ordering;

/// Tie-breaking rule for equal scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ties {
    /// The earliest keys.
    #[default]
    Earliest,
    /// The keys that torch.topk takes on a CPU.
    Torch,
}

/// Score type: f32, or f64 in references.
pub trait Score: Copy + PartialOrd {
    /// Score of a key that is not seen.
    const LOWEST: Self;

    /// Total order of the scores.
    fn order(&self, other: &Self) -> Ordering;
}

impl Score for f32 {
    const LOWEST: f32 = f32::NEG_INFINITY;

    fn order(&self, other: &f32) -> Ordering {
        self.total_cmp(other)
    }
}

impl Score for f64 {
    const LOWEST: f64 = f64::NEG_INFINITY;

    fn order(&self, other: &f64) -> Ordering {
        self.total_cmp(other)
    }
}

/// Writes the min(topk, len) keys with the highest scores to the front of `order`, in ascending order.
/// `scores` has the scores of the keys that are seen; the remaining keys of `order` come after them and count
/// as lower than any.
///
/// # Panics
/// If topk is 0, or `order` is shorter than `scores`.
pub fn choose<S: Score>(order: &mut [u32], scores: &[S], topk: usize, ties: Ties) {
    let seen = scores.len();
    if ties == Ties::Torch && topk < order.len() {
        order.iter_mut().zip(0..).for_each(|(slot, key)| *slot = key);
        let score = |key: u32| scores.get(key as usize).copied().unwrap_or(S::LOWEST);
        let before = |a, b| above(score(a), score(b));
        if topk.saturating_mul(64) <= order.len() {
            select_by_heap(order, topk, &before);
        } else {
            partition(order, topk - 1, before);
        }
        order[..topk].sort_unstable();
        return;
    }
    let order = &mut order[..seen];
    order.iter_mut().zip(0..).for_each(|(slot, key)| *slot = key);
    if topk < order.len() {
        // A total order: no two keys are equal, so the set is determined.
        order.select_nth_unstable_by(topk - 1, |a, b| {
            scores[*b as usize].order(&scores[*a as usize]).then(a.cmp(b))
        });
        order[..topk].sort_unstable();
    }
}

/// Returns true if torch puts the first score before the second: NaN counts as the highest.
#[allow(clippy::eq_op)] // only NaN is not itself
fn above<S: Score>(a: S, b: S) -> bool {
    (a != a && b == b) || a > b
}

/// Heap selection of partial_sort: moves the `count` elements that come first to the front, as a heap whose
/// root is the last of them.
fn select_by_heap(x: &mut [u32], count: usize, before: &impl Fn(u32, u32) -> bool) {
    let (heap, rest) = x.split_at_mut(count);
    for parent in (0..count / 2).rev() {
        sift(heap, parent, heap[parent], before);
    }
    for value in rest {
        if before(*value, heap[0]) {
            let taken = std::mem::replace(value, heap[0]);
            sift(heap, 0, taken, before);
        }
    }
}

/// Puts `value` into the hole at `top`: down to a leaf along the larger children, then up to its place.
fn sift(heap: &mut [u32], top: usize, value: u32, before: &impl Fn(u32, u32) -> bool) {
    let mut hole = top;
    while 2 * hole + 1 < heap.len() {
        let right = 2 * hole + 2;
        let lone = right == heap.len();
        let child = if lone || before(heap[right], heap[right - 1]) { right - 1 } else { right };
        heap[hole] = heap[child];
        hole = child;
    }
    while hole > top && before(heap[(hole - 1) / 2], value) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = value;
}

/// nth_element: afterwards no element before position `nth` belongs after it.
fn partition(x: &mut [u32], nth: usize, before: impl Fn(u32, u32) -> bool) {
    let (mut first, mut last) = (0, x.len());
    let mut depth = 2 * x.len().max(1).ilog2();
    while last - first > 3 {
        if depth == 0 {
            select_by_heap(&mut x[first..last], nth + 1 - first, &before);
            x.swap(first, nth);
            return;
        }
        depth -= 1;
        let middle = first + (last - first) / 2;
        median_to_first(x, first, [first + 1, middle, last - 1], &before);
        let cut = divide(x, first + 1, last, first, &before);
        if cut <= nth { first = cut } else { last = cut }
    }
    for i in first + 1..last {
        let value = x[i];
        let mut at = i;
        while at > first && before(value, x[at - 1]) {
            x[at] = x[at - 1];
            at -= 1;
        }
        x[at] = value;
    }
}

/// Swaps the median of the three into the first place.
fn median_to_first(x: &mut [u32], first: usize, [a, b, c]: [usize; 3], before: &impl Fn(u32, u32) -> bool) {
    let median = if before(x[a], x[b]) {
        if before(x[b], x[c]) {
            b
        } else if before(x[a], x[c]) {
            c
        } else {
            a
        }
    } else if before(x[a], x[c]) {
        a
    } else if before(x[b], x[c]) {
        c
    } else {
        b
    };
    x.swap(first, median);
}

/// Partitions by the element at `pivot`; returns the start of the second part.
fn divide(
    x: &mut [u32],
    mut first: usize,
    mut last: usize,
    pivot: usize,
    before: &impl Fn(u32, u32) -> bool,
) -> usize {
    loop {
        while before(x[first], x[pivot]) {
            first += 1;
        }
        last -= 1;
        while before(x[pivot], x[last]) {
            last -= 1;
        }
        if first >= last {
            return first;
        }
        x.swap(first, last);
        first += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn both_orders_take_the_highest_scores(
            scores in prop::collection::vec(-3i8..4, 1..200), masked in 0usize..40, topk in 1usize..20,
        ) {
            let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
            for ties in [Ties::Earliest, Ties::Torch] {
                let mut order = vec![0; scores.len() + masked];
                choose(&mut order, &scores, topk, ties);
                let taken: Vec<u32> = order[..topk.min(order.len())].to_vec();
                let mut got: Vec<f32> =
                    taken.iter().filter_map(|key| scores.get(*key as usize)).copied().collect();
                got.sort_by(|a, b| b.total_cmp(a));
                let mut all = scores.clone();
                all.sort_by(|a, b| b.total_cmp(a));
                if scores.len() >= topk {
                    prop_assert_eq!(&got[..], &all[..topk.min(all.len())]);
                }
            }
        }
    }

    #[test]
    fn equal_scores_are_taken_as_torch_takes_them() {
        // torch.tensor(scores).topk(8).indices.sort() of torch 2.15 on a CPU
        let scores: Vec<f32> = TORCH_SCORES.iter().map(|x| *x as f32).collect();
        let mut order = vec![0; scores.len()];
        choose(&mut order, &scores, 8, Ties::Torch);
        assert_eq!(order[..8], TORCH_TAKEN);
        choose(&mut order, &scores, 8, Ties::Earliest);
        assert_ne!(order[..8], TORCH_TAKEN);
    }

    /// Pseudo-random whole scores below `below`.
    fn drawn(keys: usize, below: u64, seed: u64) -> Vec<f32> {
        let next = |x: &u64| Some((x * 1_103_515_245 + 12_345) % (1 << 31));
        std::iter::successors(next(&seed), next).take(keys).map(|x| ((x >> 16) % below) as f32).collect()
    }

    /// Scores on which the median of three finds the worst pivot again and again, in pairs of equal ones.
    fn unlucky(keys: usize) -> Vec<f32> {
        let half = keys / 2;
        let mut ranks = vec![0; keys];
        for i in 1..=half {
            if i % 2 == 1 {
                (ranks[i - 1], ranks[i]) = (i, half + i);
            }
            ranks[half + i - 1] = 2 * i;
        }
        ranks.into_iter().map(|rank| -((rank / 2) as f32)).collect()
    }

    #[test]
    fn equal_scores_of_long_and_of_unlucky_rows_are_taken_as_torch_takes_them() {
        // torch.tensor(scores).topk(k).indices.sort() of torch 2.15 on a CPU
        let cases: [(Vec<f32>, &[u32]); 8] = [
            (drawn(192, 50, 4), &[84, 127, 144]),
            (drawn(200, 400, 4), &[28, 98, 160]),
            (drawn(512, 50, 2), &[46, 55, 97, 176, 197, 236, 324, 410]),
            (drawn(511, 2, 1), &[209, 212, 217, 221, 407, 408, 410, 411]),
            (drawn(511, 400, 3), &[8, 95, 158, 198, 241, 315, 329, 509]),
            (drawn(512, 400, 3), &[8, 95, 158, 198, 241, 315, 329, 509]),
            (drawn(1000, 200, 1), &[127, 328, 455, 564, 677, 869, 907, 978]),
            (unlucky(40), &[0, 2, 4, 6, 8, 10, 20, 21, 22, 23, 24, 25]),
        ];
        for (scores, taken) in cases {
            let mut order = vec![0; scores.len()];
            choose(&mut order, &scores, taken.len(), Ties::Torch);
            assert_eq!(order[..taken.len()], *taken, "{} keys", scores.len());
            choose(&mut order, &scores, taken.len(), Ties::Earliest);
            assert_ne!(order[..taken.len()], *taken, "{} keys", scores.len());
        }
    }

    const TORCH_SCORES: [i8; 29] = [
        0, -2, -1, 1, -2, -2, -2, -1, -1, 1, 0, 1, -1, -1, 0, -1, 1, 0, -2, -2, -2, -1, 1, 0, -2, 0, -1, 0, 0,
    ];
    const TORCH_TAKEN: [u32; 8] = [0, 3, 9, 11, 16, 22, 27, 28];
}
