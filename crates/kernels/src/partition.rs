//! How work is divided: by the shape alone, never by the number of threads.
//!
//! A sum over rows that becomes a parameter gradient is taken block by block, each block into a partial sum of its
//! own, and the partial sums are added in the order of the blocks.

use rayon::prelude::*;

/// Partial sums that a parameter gradient has at most: bounds their memory.
const MAX_BLOCKS: usize = 64;

/// Fewest rows in a block.
const MIN_ROWS: usize = 16;

/// Elements that one task of an element-wise operation works on.
pub(crate) const ELEMENTS: usize = 1 << 14;

/// Rows in one block.
pub(crate) fn block_rows(rows: usize) -> usize {
    rows.div_ceil(MAX_BLOCKS).max(MIN_ROWS)
}

/// Blocks that `rows` rows make.
pub(crate) fn blocks(rows: usize) -> usize {
    rows.div_ceil(block_rows(rows))
}

/// Rows that one task of a row-wise operation without sums works on, for rows of `width` elements.
pub(crate) fn task_rows(width: usize) -> usize {
    (ELEMENTS / width.max(1)).max(1)
}

/// `total` [width] += partial sums [blocks, width], in the order of the blocks.
pub(crate) fn add_partials(total: &mut [f32], partials: &[f32]) {
    if total.is_empty() {
        return;
    }
    let width = total.len();
    total.par_chunks_mut(1024).enumerate().for_each(|(i, part)| {
        for partial in partials.chunks(width) {
            crate::simd::axpy(part, 1.0, &partial[i * 1024..][..part.len()]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_rows_and_stay_few() {
        for rows in [0, 1, 15, 16, 17, 1000, 1024, 1025, 131_072, 1_000_003] {
            let (each, count) = (block_rows(rows), blocks(rows));
            assert!(each * count >= rows && count <= MAX_BLOCKS, "{rows}");
            assert!(count == 0 || each * (count - 1) < rows, "{rows}: an empty block");
        }
    }
}
