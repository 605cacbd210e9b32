//! Which of several equal scores are taken.
//!
//! Ours is the earliest key: the choice of a query then depends on the keys it sees and on nothing else. `torch.topk` on a
//! CPU takes what its partition happens to leave in front, which depends on all keys of the row, masked ones included; a
//! score that is exactly 0 for several keys is not rare in a tiny model. To compare such a model with transformers tensor
//! by tensor, that partition (nth_element of the GNU C++ library: median of three, unguarded, insertion sort below four) is
//! done here in the same steps.

use std::cmp::Ordering;

/// Which of several equal scores are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ties {
    /// The earliest keys.
    #[default]
    Earliest,
    /// Those that torch.topk takes on a CPU, for rows of fewer than 64 topk keys; else the earliest.
    Torch,
}

/// What keys are compared by: f32, or f64 in references.
pub trait Score: Copy + PartialOrd {
    /// Of a key that is not seen.
    const LOWEST: Self;

    /// A total order.
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

/// The front of `order` becomes the min(topk, len) keys of the highest score, ascending; `scores` has those of the keys
/// that are seen, the others of `order`, which come after them, count as lower than any.
///
/// # Panics
/// When topk is 0, or `order` is shorter than `scores`.
pub fn choose<S: Score>(order: &mut [u32], scores: &[S], topk: usize, ties: Ties) {
    let seen = scores.len();
    if ties == Ties::Torch && topk < order.len() && order.len() < 64 * topk {
        order.iter_mut().zip(0..).for_each(|(slot, key)| *slot = key);
        let score = |key: u32| scores.get(key as usize).copied().unwrap_or(S::LOWEST);
        partition(order, topk - 1, |a, b| score(a) > score(b));
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

/// nth_element: what comes before the element at `nth` is not after it.
fn partition(x: &mut [u32], nth: usize, before: impl Fn(u32, u32) -> bool) {
    let (mut first, mut last) = (0, x.len());
    let mut depth = 2 * x.len().max(1).ilog2();
    while last - first > 3 {
        if depth == 0 {
            // It would go on with a heap; so unlucky a row is sorted.
            x[first..last].sort_by(|a, b| before(*b, *a).cmp(&before(*a, *b)));
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

/// Divides by the element at `pivot`; where the second part begins.
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
            scores in prop::collection::vec(-3i8..4, 1..80), masked in 0usize..40, topk in 1usize..20,
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

    const TORCH_SCORES: [i8; 29] = [
        0, -2, -1, 1, -2, -2, -2, -1, -1, 1, 0, 1, -1, -1, 0, -1, 1, 0, -2, -2, -2, -1, 1, 0, -2, 0, -1, 0, 0,
    ];
    const TORCH_TAKEN: [u32; 8] = [0, 3, 9, 11, 16, 22, 27, 28];
}
