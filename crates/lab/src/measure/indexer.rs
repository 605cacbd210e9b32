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
    }
}
