//! Parallel loops over tasks.
//!
//! Rayon's splitting and joining is compiled anew for every type of iterator and closure, which was a quarter
//! of the code of the model crate. Here it is compiled once, and every task is a call through a pointer; a
//! task has thousands of elements, so the call costs nothing.

use rayon::prelude::*;

use crate::shared::Shared;

/// Runs `task` for every index below `count`, in parallel.
#[inline(never)]
pub(crate) fn for_each_index(count: usize, task: &(dyn Fn(usize) + Sync)) {
    match count {
        1 => task(0),
        _ => (0..count).into_par_iter().with_max_len(1).for_each(task),
    }
}

/// Parallel loop over the items of a sequential iterator.
pub(crate) trait Tasks: Iterator<Item: Send> + Sized {
    /// Runs `task` on every item, in parallel. Items should be large: they are listed first.
    fn for_each_parallel(self, task: impl Fn(Self::Item) + Sync) {
        let mut items: Vec<Option<Self::Item>> = self.map(Some).collect();
        let count = items.len();
        let items = Shared::new(&mut items);
        for_each_index(count, &|i| {
            // SAFETY: every index is visited once.
            if let Some(item) = unsafe { items.part(i, 1) }[0].take() {
                task(item);
            }
        });
    }
}

impl<I: Iterator<Item: Send>> Tasks for I {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_item_is_visited_once() {
        for count in [0, 1, 2, 1000] {
            let mut visits = vec![0; count];
            visits.iter_mut().enumerate().for_each_parallel(|(i, visit)| *visit += i + 1);
            assert!(visits.iter().enumerate().all(|(i, visit)| *visit == i + 1), "{count}");
            let sum = AtomicUsize::new(0);
            for_each_index(count, &|i| {
                sum.fetch_add(i + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), count * (count + 1) / 2);
        }
    }
}
