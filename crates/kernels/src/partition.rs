//! Division of work by shape alone, never by the number of threads.
//!
//! The sum over rows of a parameter gradient is computed in blocks of rows, each with its own partial sum;
//! the partial sums are added in the order of the blocks.

use rayon::prelude::*;

/// Most partial sums of a parameter gradient; bounds their memory.
const MAX_BLOCKS: usize = 64;

/// Fewest rows in a block.
const MIN_ROWS: usize = 16;

/// Elements per task of an element-wise operation.
pub(crate) const ELEMENTS: usize = 1 << 14;

/// Rows per block.
pub(crate) fn block_rows(rows: usize) -> usize {
    rows.div_ceil(MAX_BLOCKS).max(MIN_ROWS)
}

/// Number of blocks of `rows` rows.
pub(crate) fn blocks(rows: usize) -> usize {
    rows.div_ceil(block_rows(rows))
}

/// Rows per task of a row-wise operation without sums, for rows of `width` elements.
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
