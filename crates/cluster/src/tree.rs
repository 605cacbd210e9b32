//! Sums in the order of a binary tree.
//!
//! ```text
//! n terms:  sum(n) = sum(first p) + sum(other n - p),    p = the largest power of two below n
//! 6 terms:  ((a + b) + (c + d)) + (e + f)
//! ```
//! A block of 2^k terms that begins at a multiple of 2^k is a subtree. So a sum over G groups has the same
//! bits whether one process adds all terms, or 2^k processes first add their own.

/// A sum of vectors that arrive in the order of the tree's leaves. Keeps at most log2(n) + 1 vectors.
#[derive(Debug, Default)]
pub struct TreeSum {
    /// Sums of complete subtrees, each smaller than the previous one.
    subtrees: Vec<Vec<f32>>,
    count: u64,
}

impl TreeSum {
    /// Adds the next term. All terms have the same length.
    pub fn push(&mut self, term: Vec<f32>) {
        self.subtrees.push(term);
        self.count += 1;
        for _ in 0..self.count.trailing_zeros() {
            self.merge();
        }
    }

    /// Returns the sum of all terms; `None` if there are none.
    pub fn finish(mut self) -> Option<Vec<f32>> {
        while self.subtrees.len() > 1 {
            self.merge();
        }
        self.subtrees.pop()
    }

    /// Returns the largest number of vectors that a sum of `terms` terms keeps at once, including the new term.
    pub fn most_kept(terms: usize) -> usize {
        // Before the merge after an even term, there is a subtree for each bit of the count of terms.
        (1..=terms as u64).map(|count| (count - 1).count_ones() as usize + 1).max().unwrap_or(0)
    }

    fn merge(&mut self) {
        if let (Some(right), Some(left)) = (self.subtrees.pop(), self.subtrees.last_mut()) {
            add(left, &right);
        }
    }
}

/// Returns the sum of all terms in the order of the tree; `None` if there are none.
pub(crate) fn tree_sum(terms: Vec<Vec<f32>>) -> Option<Vec<f32>> {
    let mut sum = TreeSum::default();
    terms.into_iter().for_each(|term| sum.push(term));
    sum.finish()
}

fn add(sum: &mut [f32], term: &[f32]) {
    sum.iter_mut().zip(term).for_each(|(sum, term)| *sum += term);
}

/// Returns true if every block of `block` terms is a subtree of a sum over `terms` terms, so that blocks can be
/// summed first without a change of bits: a power of two that divides `terms`, or all of them.
pub fn fits_tree(terms: usize, block: usize) -> bool {
    block > 0 && terms.is_multiple_of(block) && (block.is_power_of_two() || block == terms)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values whose sum depends on the order.
    fn terms(count: usize) -> Vec<Vec<f32>> {
        let value = |i: usize| ((i * 2654435761) % 1000003) as f32 * 10f32.powi((i % 7) as i32 - 3);
        (0..count).map(|i| (0..5).map(|j| value(7 * i + j)).collect()).collect()
    }

    fn recursive(terms: &[Vec<f32>]) -> Vec<f32> {
        if terms.len() == 1 {
            return terms[0].clone();
        }
        let half = terms.len().next_power_of_two() / 2;
        let (left, right) = (recursive(&terms[..half]), recursive(&terms[half..]));
        left.iter().zip(&right).map(|(a, b)| a + b).collect()
    }

    #[test]
    fn a_sum_in_passing_is_the_recursive_sum() {
        for count in 1..40 {
            assert_eq!(tree_sum(terms(count)).unwrap(), recursive(&terms(count)), "{count}");
        }
        assert_eq!(tree_sum(Vec::new()), None);
    }

    #[test]
    fn blocks_that_fit_may_be_summed_first() {
        let mut orders = 0;
        for count in 1..33 {
            for block in (1..=count).filter(|block| fits_tree(count, *block)) {
                let sums =
                    terms(count).chunks(block).map(|block| tree_sum(block.to_vec()).unwrap()).collect();
                assert_eq!(tree_sum(sums), tree_sum(terms(count)), "{count} in blocks of {block}");
                orders += 1;
            }
        }
        assert!(orders == 89 && !fits_tree(6, 3) && !fits_tree(6, 4) && !fits_tree(4, 0));
    }

    #[test]
    fn few_vectors_are_kept() {
        for count in 1..100 {
            let (mut sum, mut most) = (TreeSum::default(), 0);
            for term in terms(count) {
                most = most.max(sum.subtrees.len() + 1);
                sum.push(term);
            }
            assert_eq!(most, TreeSum::most_kept(count), "{count}");
        }
        assert_eq!([1, 2, 4, 8].map(TreeSum::most_kept), [1, 2, 3, 4]);
    }
}
