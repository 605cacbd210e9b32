//! Embedding: rows of a table, looked up by token id.
//!
//! ```text
//! y_t = scale W[id_t]          dW[v] += scale sum of dy_t over the t with id_t = v, in the order of t
//! ```
//! Backward sorts the tokens by id, and one task adds up all tokens of an id. So each row of dW has one
//! writer and a fixed order of summation.
//!
//! # Example
//! ```
//! use ballast_kernels::embedding::{
//!     embedding_backward, embedding_backward_workspace, embedding_forward,
//! };
//!
//! let (ids, w, width) = ([1, 0, 1], [1.0f32, 2.0, 3.0, 4.0], 2);
//! let mut y = [0.0f32; 6];
//! embedding_forward(&mut y, &ids, &w, 1.0, width)?;
//! assert_eq!(y, [3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
//!
//! let mut dw = [0.0; 4];
//! let mut workspace = vec![0.0; embedding_backward_workspace(ids.len())];
//! embedding_backward(&mut dw, &[1.0f32; 6], &ids, 1.0, width, &mut workspace)?;
//! assert_eq!(dw, [1.0, 1.0, 2.0, 2.0]);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

use rayon::prelude::*;

use crate::Element;
use crate::error::{Result, check, check_shape};
use crate::partition::task_rows;
use crate::scratch::check_workspace;
use crate::shared::Shared;
use crate::simd::simd_fn;

/// y [tokens, width] from ids \[tokens\] and w [vocabulary, width].
pub fn embedding_forward<T: Element, W: Element>(
    y: &mut [T],
    ids: &[u32],
    w: &[W],
    scale: f32,
    width: usize,
) -> Result {
    check_ids(ids, w, width)?;
    check_shape("y", y, [ids.len(), width])?;
    let rows = task_rows(width);
    y.par_chunks_mut(rows * width).zip(ids.par_chunks(rows)).for_each(|(y, ids)| {
        for (y, id) in y.chunks_mut(width).zip(ids) {
            scaled_row(y, &w[*id as usize * width..][..width], scale);
        }
    });
    Ok(())
}

/// Number of f32 of the workspace of [`embedding_backward`]: the tokens in the order of their ids, as u32.
pub fn embedding_backward_workspace(tokens: usize) -> usize {
    tokens
}

/// dw [vocabulary, width] (accumulated) from dy [tokens, width] and ids \[tokens\].
pub fn embedding_backward<T: Element>(
    dw: &mut [f32],
    dy: &[T],
    ids: &[u32],
    scale: f32,
    width: usize,
    workspace: &mut [f32],
) -> Result {
    check_ids(ids, dw, width)?;
    check_shape("dy", dy, [ids.len(), width])?;
    check(u32::try_from(ids.len()).is_ok(), || {
        format!("number of tokens must be below 2^32, got {}", ids.len())
    })?;
    check_workspace(workspace, embedding_backward_workspace(ids.len()))?;
    let order: &mut [u32] = bytemuck::cast_slice_mut(&mut workspace[..ids.len()]);
    order.iter_mut().zip(0..).for_each(|(slot, t)| *slot = t);
    // By id, then by token: no two keys are equal, so the order is unique.
    order.sort_unstable_by_key(|t| (ids[*t as usize], *t));
    let dw = Shared::new(dw);
    let id = |t: &u32| ids[*t as usize];
    order.par_chunk_by(|a, b| id(a) == id(b)).for_each(|run| {
        // SAFETY: all tokens of this id are in this run, so its row belongs to this task alone.
        let row = unsafe { dw.part(id(&run[0]) as usize * width, width) };
        for t in run {
            add_scaled_row(row, &dy[*t as usize * width..][..width], scale);
        }
    });
    Ok(())
}

fn check_ids<W>(ids: &[u32], w: &[W], width: usize) -> Result {
    check(width > 0 && w.len().is_multiple_of(width), || {
        format!("embedding table has {} elements, not a multiple of the width {width}", w.len())
    })?;
    let vocabulary = w.len() / width;
    match ids.iter().position(|id| *id as usize >= vocabulary) {
        None => Ok(()),
        Some(t) => check(false, || {
            format!("token {t} has id {}, but the vocabulary has {vocabulary} tokens", ids[t])
        }),
    }
}

simd_fn! {
    fn scaled_row<T: Element, W: Element>(y: &mut [T], w: &[W], scale: f32) {
        for (y, w) in y.iter_mut().zip(w) {
            *y = T::from_f32(w.to_f32() * scale);
        }
    }
}

simd_fn! {
    fn add_scaled_row<T: Element>(sum: &mut [f32], dy: &[T], scale: f32) {
        for (sum, dy) in sum.iter_mut().zip(dy) {
            *sum += dy.to_f32() * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Values, assert_close, cast, same_on_any_pool};

    fn check_one<T: Element, W: Element>(
        ids: &[u32],
        vocabulary: usize,
        width: usize,
        scale: f32,
        seed: u64,
    ) {
        let mut values = Values::new(seed);
        let (w, dy) = (values.take(vocabulary * width, 1.0), values.take(ids.len() * width, 1.0));
        let (mut y_expected, mut dw_expected) = (Vec::new(), vec![1.0; w.len()]);
        for (t, id) in ids.iter().enumerate() {
            for i in 0..width {
                y_expected.push(w[*id as usize * width + i] * scale as f64);
                dw_expected[*id as usize * width + i] += dy[t * width + i] * scale as f64;
            }
        }
        let (wt, dyt): (Vec<W>, Vec<T>) = (cast(&w), cast(&dy));
        let (mut y, mut dw) = (dyt.clone(), vec![1.0; w.len()]);
        embedding_forward(&mut y, ids, &wt, scale, width).unwrap();
        embedding_backward(&mut dw, &dyt, ids, scale, width, &mut vec![f32::NAN; ids.len()]).unwrap();
        assert_close("y", &y, &y_expected, 1e-7);
        assert_close("dw, on top of 1", &dw, &dw_expected, 1e-6);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn rows_are_picked_and_gradients_are_summed_by_id(
            ids in prop::collection::vec(0u32..7, 0..40), width in 1usize..40, scale in 0.1f32..40.0,
            seed in any::<u64>(),
        ) {
            check_one::<f32, f32>(&ids, 7, width, scale, seed);
            check_one::<bf16, f32>(&ids, 7, width, scale, seed);
            check_one::<bf16, bf16>(&ids, 7, width, scale, seed);
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let mut values = Values::new(3);
        let ids: Vec<u32> = (0..2000).map(|_| (values.next() % 50) as u32).collect();
        let dy: Vec<f32> = cast(&values.take(2000 * 9, 1.0));
        same_on_any_pool(|| {
            let mut dw = vec![0.0; 50 * 9];
            embedding_backward(&mut dw, &dy, &ids, 1.0, 9, &mut vec![0.0; ids.len()]).unwrap();
            let mut y = dy.clone();
            embedding_forward(&mut y, &ids, &dw, 0.3, 9).unwrap();
            (dw, y)
        });
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_named() {
        let mut y = [0.0f32; 4];
        let error = embedding_forward(&mut y, &[1, 3], &[0.0f32; 6], 1.0, 2).unwrap_err();
        assert_eq!(error.to_string(), "token 1 has id 3, but the vocabulary has 3 tokens");
        assert!(embedding_forward(&mut y, &[1], &[0.0f32; 6], 1.0, 2).is_err());
        assert!(embedding_forward(&mut y, &[], &[0.0f32; 6], 1.0, 0).is_err());
    }
}
