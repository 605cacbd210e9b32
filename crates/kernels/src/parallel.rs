//! Parallel loops over tasks.
//!
//! Rayon's splitting and joining is compiled anew for every type of iterator and closure, which was a quarter
//! of the code of the model crate. Here it is compiled once, and every task is a call through a pointer; a
//! task has thousands of elements, so the call costs nothing.

use rayon::prelude::*;

use crate::shared::Shared;

/// Runs `task` for every index below `count`, in parallel. Each index is a task of its own, for tasks of
/// unequal length.
pub(crate) fn for_each_index(count: usize, task: &(dyn Fn(usize) + Sync)) {
    run(count, 1, task);
}

/// `most` is the largest number of neighbors that are not split between threads.
#[inline(never)]
fn run(count: usize, most: usize, task: &(dyn Fn(usize) + Sync)) {
    match count {
        1 => task(0),
        _ => (0..count).into_par_iter().with_max_len(most).for_each(task),
    }
}

/// Parallel loops over the items of a sequential iterator, which are listed first.
pub(crate) trait Tasks: Iterator<Item: Send> + Sized {
    /// Runs `task` on every item; neighbors stay together as long as no thread is idle.
    fn for_each_parallel(self, task: impl Fn(Self::Item) + Sync) {
        run_items(self, usize::MAX, task);
    }

    /// Runs `task` on every item, each as a task of its own, for tasks of unequal length.
    fn for_each_unequal(self, task: impl Fn(Self::Item) + Sync) {
        run_items(self, 1, task);
    }
}

fn run_items<I: Iterator<Item: Send>>(items: I, most: usize, task: impl Fn(I::Item) + Sync) {
    let mut items: Vec<Option<I::Item>> = items.map(Some).collect();
    let count = items.len();
    let items = Shared::new(&mut items);
    run(count, most, &|i| {
        // SAFETY: every index is visited once.
        if let Some(item) = unsafe { items.part(i, 1) }[0].take() {
            task(item);
        }
    });
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
            visits.iter_mut().for_each_unequal(|visit| *visit *= 2);
            assert!(visits.iter().enumerate().all(|(i, visit)| *visit == 2 * (i + 1)), "{count}");
            let sum = AtomicUsize::new(0);
            for_each_index(count, &|i| {
                sum.fetch_add(i + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), count * (count + 1) / 2);
        }
    }
}
