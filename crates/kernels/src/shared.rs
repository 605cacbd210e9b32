//! A mutable slice whose disjoint parts are written by several threads.
//!
//! Heads are the unit of parallelism, and the rows of one head are scattered over a tensor [tokens, heads,
//! width]. `chunks_mut` cannot express that, so the caller guarantees that the parts are disjoint.

use std::marker::PhantomData;

/// A mutable slice that several threads can write parts of.
pub(crate) struct Shared<'a, T> {
    data: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `part`, whose contract forbids overlapping parts; `T: Send` lets them be
// written from other threads.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Shared<'a, T> {
        Shared { data: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// Elements `begin..begin + len`.
    ///
    /// # Safety
    /// No two parts that are alive at the same time may overlap.
    #[allow(clippy::mut_from_ref)] // the caller guarantees exclusive access
    pub(crate) unsafe fn part(&self, begin: usize, len: usize) -> &mut [T] {
        // SAFETY: in bounds as `pointer` checks, exclusive by the caller's guarantee, valid as long as the
        // borrow.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(begin, len), len) }
    }

    /// Pointer to elements `begin..begin + len`, for tiles whose rows interleave with those of other tiles.
    pub(crate) fn pointer(&self, begin: usize, len: usize) -> *mut T {
        assert!(
            begin <= self.len && len <= self.len - begin,
            "part {begin}+{len} is outside a slice of {}",
            self.len
        );
        // SAFETY: in bounds by the line above.
        unsafe { self.data.add(begin) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_write_interleaved_parts() {
        let mut data = vec![0; 64];
        let shared = Shared::new(&mut data);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let shared = &shared;
                scope.spawn(move || {
                    for row in 0..8 {
                        // SAFETY: rows of different threads are disjoint.
                        unsafe { shared.part((row * 4 + thread) * 2, 2) }.fill(thread + 1);
                    }
                });
            }
        });
        assert!(data.chunks(2).enumerate().all(|(i, pair)| pair == [i % 4 + 1; 2]));
    }

    #[test]
    #[should_panic(expected = "part 3+2 is outside a slice of 4")]
    fn a_part_outside_the_slice_is_refused() {
        let mut data = [0; 4];
        // SAFETY: one part only.
        unsafe { Shared::new(&mut data).part(3, 2) };
    }
}
