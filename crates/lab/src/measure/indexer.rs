//! Which keys an indexer chooses: the top-k of its scores, the earliest first where they are equal.

use crate::findings::IndexerError;

/// What becomes of the choice: scores of sequences, each [tokens, tokens], end to end.
pub fn compare(
    scores: &[f64],
    reference: &[f64],
    cu_seqlens: &[usize],
    topk: usize,
    layer: usize,
) -> IndexerError {
    let (mut begin, mut queries, mut same, mut shared) = (0, 0, 0, 0.0);
    for ends in cu_seqlens.windows(2) {
        let tokens = ends[1] - ends[0];
        for t in topk..tokens {
            let row = |scores: &[f64]| chosen(&scores[begin + t * tokens..][..t + 1], topk);
            let (own, exact) = (row(scores), row(reference));
            let both = exact.iter().filter(|key| own.binary_search(key).is_ok()).count();
            queries += 1;
            same += (both == topk) as usize;
            shared += both as f64 / topk.max(1) as f64;
        }
        begin += tokens * tokens;
    }
    let share = |count: f64| if queries == 0 { 1.0 } else { count / queries as f64 };
    IndexerError { layer, overlap: share(shared), same: share(same as f64), queries }
}

/// An indexer's scores of sequences, each [tokens, tokens], end to end, and how many keys it takes.
pub struct Scores<'s> {
    pub values: &'s [f64],
    pub cu_seqlens: &'s [usize],
    pub topk: usize,
}

impl Scores<'_> {
    /// The keys of query i of the sequence that begins at token `begin`, in their order.
    pub fn keys(&self, begin: usize, i: usize) -> Vec<usize> {
        let mut square = 0;
        for ends in self.cu_seqlens.windows(2) {
            let tokens = ends[1] - ends[0];
            // An empty sequence begins where the next one does.
            if ends[0] == begin && i < tokens {
                return chosen(&self.values[square + i * tokens..][..i + 1], self.topk);
            }
            square += tokens * tokens;
        }
        Vec::new()
    }
}

/// The chosen keys in their order.
fn chosen(row: &[f64], topk: usize) -> Vec<usize> {
    let mut keys: Vec<usize> = (0..row.len()).collect();
    keys.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
    keys.truncate(topk);
    keys.sort_unstable();
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_counts_queries_that_have_a_choice() {
        // Three tokens, one key each: query 0 has no choice.
        let exact = [9.0, 0.0, 0.0, 1.0, 2.0, 0.0, 5.0, 1.0, 0.0];
        let other = [9.0, 0.0, 0.0, 2.0, 1.0, 0.0, 5.0, 1.0, 0.0];
        let found = compare(&other, &exact, &[0, 3], 1, 0);
        assert_eq!((found.queries, found.overlap, found.same), (2, 0.5, 0.5));
        assert_eq!(chosen(&[1.0, 1.0, 1.0], 2), [0, 1]);
        // The same after a sequence of one token and an empty one.
        let values = [&[7.0][..], &other].concat();
        let scores = Scores { values: &values, cu_seqlens: &[0, 1, 1, 4], topk: 1 };
        assert_eq!([0, 1, 2].map(|i| scores.keys(1, i)), [vec![0], vec![0], vec![0]]);
        assert_eq!(Scores { values: &exact, cu_seqlens: &[0, 3], topk: 1 }.keys(0, 1), [1]);
    }
}
