//! Working memory that the caller owns.
//!
//! A kernel allocates only what it returns or saves, and lists of a few values per token. All other memory
//! comes from two arguments, always the last ones, in this order:
//!
//! | argument | memory | size |
//! |---|---|---|
//! | `workspace: &mut [f32]` | one buffer that all threads of the call share | `<function>_workspace(...)` |
//! | `scratch: &Scratch` | one slot per thread | `<function>_scratch(...)`: number of f32 of one slot |
//!
//! Both functions stand beside the kernel. Where several kernels need the same, the name is what their names
//! have in common: `linear_scratch` serves `linear_forward` and `linear_backward_weight`.
//!
//! A model makes one [`Scratch`] of the largest slot that it needs and passes it to every call. A workspace
//! that is too short is an error, a slot that is too short grows. The content of both is unspecified before
//! and after a call.

use std::sync::{Mutex, PoisonError};

use crate::error::{KernelError, Result, check};

/// Per-thread working memory: one buffer of f32 for each thread of a rayon pool.
#[derive(Debug)]
pub struct Scratch {
    slots: Vec<Mutex<Vec<f32>>>,
}

impl Scratch {
    /// Allocates a slot of `len` f32 for every thread of the current rayon pool.
    pub fn new(len: usize) -> Scratch {
        let threads = rayon::current_num_threads().max(1);
        Scratch { slots: (0..threads).map(|_| Mutex::new(vec![0.0; len])).collect() }
    }

    /// Size of all slots in bytes.
    pub fn bytes(&self) -> usize {
        self.slots.iter().map(|slot| slot.lock().unwrap_or_else(PoisonError::into_inner).len() * 4).sum()
    }

    /// Runs `work` with a slot of `len` f32 of unspecified content. A slot that is too short grows, so a
    /// wrong size costs memory and not correctness; [`Scratch::bytes`] shows it.
    pub fn with<R>(&self, len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
        // The thread's own slot is free unless the pool is another one or a kernel runs inside a kernel. Then
        // any free slot will do.
        let own = rayon::current_thread_index().unwrap_or(0);
        for i in 0..self.slots.len() {
            if let Ok(mut slot) = self.slots[(own + i) % self.slots.len()].try_lock() {
                if slot.len() < len {
                    slot.resize(len, 0.0);
                }
                return work(&mut slot[..len]);
            }
        }
        work(&mut vec![0.0; len])
    }
}

/// Allocates a workspace of `len` zeros; an error if memory does not hold them.
pub fn workspace(len: usize) -> Result<Vec<f32>> {
    bytemuck::allocation::try_zeroed_vec(len)
        .map_err(|()| KernelError::Shape(format!("cannot allocate a workspace of {len} f32")))
}

/// Checks that a workspace has at least `len` f32.
pub(crate) fn check_workspace(workspace: &[f32], len: usize) -> Result {
    check(workspace.len() >= len, || format!("workspace must have {len} f32, got {}", workspace.len()))
}

/// Takes `len` f32 off the front of a slot or a workspace.
pub(crate) fn take<'a>(slot: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (head, tail) = std::mem::take(slot).split_at_mut(len);
    *slot = tail;
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_the_length_asked_for_and_the_bytes_are_counted() {
        let scratch = Scratch::new(10);
        let threads = rayon::current_num_threads();
        assert_eq!(scratch.bytes(), threads * 40);
        scratch.with(7, |slot| assert_eq!(slot.len(), 7));
        scratch.with(20, |slot| assert_eq!(slot.len(), 20));
        assert_eq!(scratch.bytes(), threads * 40 + 40);
    }

    #[test]
    fn a_workspace_that_does_not_fit_in_memory_is_an_error() {
        assert_eq!(workspace(3), Ok(vec![0.0; 3]));
        for len in [1 << 50, usize::MAX] {
            assert!(workspace(len).unwrap_err().to_string().contains("cannot allocate a workspace"));
        }
    }

    #[test]
    fn a_kernel_inside_a_kernel_gets_other_memory() {
        let scratch = Scratch::new(4);
        scratch.with(4, |outer| {
            outer.fill(1.0);
            scratch.with(4, |inner| inner.fill(2.0));
            assert_eq!(outer, [1.0; 4]);
        });
    }
}
