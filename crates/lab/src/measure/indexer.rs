//! Keys chosen by an indexer: the top-k of its scores.

use ballast_kernels::indexer::choose;
use ballast_model::Ties;

use crate::findings::IndexerError;

/// Scores of an indexer, [tokens, tokens] per sequence, concatenated, and how keys are chosen from them.
pub struct Scores<'s> {
    pub values: &'s [f64],
    pub cu_seqlens: &'s [usize],
    /// Number of chosen keys, at least 1.
    pub topk: usize,
    pub ties: Ties,
}

impl Scores<'_> {
    /// Offset of the scores of each sequence, and its tokens.
    fn squares(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
        let mut end = 0;
        self.cu_seqlens.windows(2).map(move |ends| {
            let square = end;
            end += (ends[1] - ends[0]).pow(2);
            (square, ends[0]..ends[1])
        })
    }

    /// Keys of query i of a sequence of `tokens` tokens, ascending.
    fn chosen(&self, square: usize, tokens: usize, i: usize) -> Vec<u32> {
        let mut keys = vec![0; tokens];
        choose(&mut keys, &self.values[square + i * tokens..][..i + 1], self.topk, self.ties);
        keys.truncate(self.topk.min(i + 1));
        keys
    }

    /// Keys of query i of the sequence that begins at token `begin`, ascending.
    pub fn keys(&self, begin: usize, i: usize) -> Vec<u32> {
        // An empty sequence has the same begin as the next one.
        let found = self.squares().find(|(_, tokens)| tokens.start == begin && i < tokens.len());
        found.map_or(Vec::new(), |(square, tokens)| self.chosen(square, tokens.len(), i))
    }

    /// Compares the chosen keys with the reference's.
    pub fn compare(&self, reference: &Scores<'_>, layer: usize) -> IndexerError {
        let (mut queries, mut same, mut shared) = (0, 0, 0.0);
        for (square, tokens) in self.squares() {
            for i in self.topk..tokens.len() {
                let [own, exact] = [self, reference].map(|of| of.chosen(square, tokens.len(), i));
                let both = exact.iter().filter(|key| own.binary_search(key).is_ok()).count();
                queries += 1;
                same += (both == self.topk) as usize;
                shared += both as f64 / self.topk as f64;
            }
        }
        let share = |count: f64| if queries == 0 { 1.0 } else { count / queries as f64 };
        IndexerError { layer, overlap: share(shared), same: share(same as f64), queries }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_counts_queries_that_have_a_choice() {
        // Three tokens, one key each: query 0 has no choice.
        let exact = [9.0, 0.0, 0.0, 1.0, 2.0, 0.0, 5.0, 1.0, 0.0];
        let other = [9.0, 0.0, 0.0, 2.0, 1.0, 0.0, 5.0, 1.0, 0.0];
        let of = |values, cu_seqlens, topk| Scores { values, cu_seqlens, topk, ties: Ties::Earliest };
        let found = of(&other, &[0, 3], 1).compare(&of(&exact, &[0, 3], 1), 0);
        assert_eq!((found.queries, found.overlap, found.same), (2, 0.5, 0.5));
        assert_eq!(of(&[1.0; 9], &[0, 3], 2).keys(0, 2), [0, 1]);
        // The same after a sequence of one token and an empty one.
        let values = [&[7.0][..], &other].concat();
        let scores = of(&values, &[0, 1, 1, 4], 1);
        assert_eq!([0, 1, 2].map(|i| scores.keys(1, i)), [vec![0], vec![0], vec![0]]);
        assert_eq!(of(&exact, &[0, 3], 1).keys(0, 1), [1]);
    }
}
