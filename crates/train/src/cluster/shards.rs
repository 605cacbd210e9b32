//! Division of the weights over the ranks.
//!
//! The weights of a part of the model lie end to end; each rank has one contiguous range of them, of nearly
//! equal length. A cut lies between two tensors, or at a multiple of a block inside one, where its update rule
//! allows it: then blocks of updates and norms are the same for any number of ranks. The ranges move on by
//! one rank from part to part, so that no rank gets the largest tensor of every layer.

use std::ops::Range;
use std::sync::Arc;

use ballast_cluster::Kind;
use ballast_kernels::adamw::BLOCK;
use ballast_model::params::{Grads, ParameterKind, Part, Spec, Specs};
use bytemuck::Pod;

use super::Ranks;
use crate::error::Result;

/// The ranges of every weight, by rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shards {
    rank: usize,
    ranks: usize,
    /// By weight and rank.
    weights: Arc<[Vec<Range<usize>>]>,
}

impl Shards {
    /// Divides the weights over `ranks`; `divisible` says whether a tensor may be cut inside.
    pub(crate) fn new(specs: &Specs, divisible: impl Fn(&Spec) -> bool, rank: usize, ranks: usize) -> Shards {
        let mut weights = vec![Vec::new(); specs.weights.len()];
        let mut parts: Vec<Part> = specs.weights.iter().map(|spec| spec.part).collect();
        parts.sort_unstable();
        parts.dedup();
        for (number, part) in parts.into_iter().enumerate() {
            let members: Vec<usize> =
                (0..specs.weights.len()).filter(|i| specs.weights[*i].part == part).collect();
            let tensors: Vec<(usize, bool)> =
                members.iter().map(|i| (specs.weights[*i].len(), divisible(&specs.weights[*i]))).collect();
            let cuts = cuts(&tensors, ranks);
            let mut begin = 0;
            for (i, (len, _)) in members.iter().zip(&tensors) {
                let within = |cut: usize| cut.clamp(begin, begin + len) - begin;
                weights[*i] = (0..ranks)
                    .map(|rank| {
                        let place = (rank + ranks - number % ranks) % ranks;
                        within(cuts[place])..within(cuts[place + 1])
                    })
                    .collect();
                begin += len;
            }
        }
        Shards { rank, ranks, weights: weights.into() }
    }

    /// Number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    /// The elements of a weight that a rank has.
    pub(crate) fn range(&self, weight: usize, rank: usize) -> Range<usize> {
        self.weights[weight][rank].clone()
    }

    /// The elements of a weight that this rank has.
    pub(crate) fn own(&self, weight: usize) -> Range<usize> {
        self.range(weight, self.rank)
    }

    /// Completes values that each rank has for the blocks of its elements, one per [`BLOCK`] elements, where `weight`
    /// says that they are those of a weight: then they are the values of the whole weight.
    pub(crate) fn gather_blocks<T: Pod>(
        &self,
        ranks: &Ranks,
        blocks: &mut [Vec<T>],
        weight: impl Fn(usize) -> Option<usize>,
    ) -> Result {
        let shared: Vec<(usize, usize)> =
            (0..blocks.len()).filter_map(|at| Some((at, weight(at)?))).collect();
        let count = |weight: usize, rank: usize| self.range(weight, rank).len().div_ceil(BLOCK);
        let len = |rank| shared.iter().map(|(_, weight)| size_of::<T>() * count(*weight, rank)).sum();
        let lens: Vec<usize> = (0..self.ranks).map(len).collect();
        let own: Vec<T> = shared.iter().flat_map(|(at, _)| &blocks[*at]).copied().collect();
        let all = ranks.world.all_gather(Kind::Scalars, bytemuck::cast_slice(&own).to_vec(), &lens)?;
        let all: Vec<Vec<T>> =
            all.iter().map(|bytes| bytemuck::allocation::pod_collect_to_vec(bytes)).collect();
        let mut at_rank = vec![0; self.ranks];
        for (at, weight) in shared {
            let mut pieces: Vec<(usize, &[T])> = Vec::new();
            for (rank, begin) in at_rank.iter_mut().enumerate() {
                let end = *begin + count(weight, rank);
                pieces.push((self.range(weight, rank).start, &all[rank][*begin..end]));
                *begin = end;
            }
            pieces.sort_by_key(|(start, _)| *start);
            blocks[at] = pieces.into_iter().flat_map(|(_, piece)| piece).copied().collect();
        }
        Ok(())
    }

    /// The range of a gradient bucket that each rank has. Buckets of other kinds than weights are divided evenly.
    pub(crate) fn bucket_parts(&self, grads: &Grads) -> Vec<Vec<Range<usize>>> {
        let mut parts: Vec<Vec<Range<usize>>> = grads
            .layout()
            .map(|(_, kind, len)| match kind {
                ParameterKind::Weights => vec![0..0; self.ranks],
                _ => ballast_cluster::even_parts(len, self.ranks),
            })
            .collect();
        for weight in 0..self.weights.len() {
            let Some((bucket, place)) = grads.weight_place(weight) else { continue };
            for (rank, part) in parts[bucket].iter_mut().enumerate() {
                let Range { start, end } = self.range(weight, rank);
                let (start, end) = (place.start + start, place.start + end);
                match part.start == part.end {
                    _ if start == end => {}
                    true => *part = start..end,
                    false => *part = part.start.min(start)..part.end.max(end),
                }
            }
        }
        parts
    }
}

/// The cuts between the ranges of `ranks` ranks over tensors that lie end to end: each as near to an equal
/// division as the tensors allow. Returns ranks + 1 positions.
fn cuts(tensors: &[(usize, bool)], ranks: usize) -> Vec<usize> {
    let total: usize = tensors.iter().map(|(len, _)| len).sum();
    let nearest = |target: usize| -> usize {
        let mut begin = 0;
        for (len, divisible) in tensors {
            if target < begin + len {
                let block = if *divisible { BLOCK } else { *len };
                let below = begin + (target - begin) / block * block;
                let above = (below + block).min(begin + len);
                return if target - below <= above - target { below } else { above };
            }
            begin += len;
        }
        total
    };
    let mut cuts: Vec<usize> = (0..ranks).map(|rank| nearest(rank * total / ranks)).collect();
    cuts.push(total);
    cuts
}

#[cfg(test)]
mod tests {
    use ballast_model::params::Init;

    use super::*;

    fn specs() -> Specs {
        let mut specs = Specs::default();
        specs.weight("embed".into(), &[1000, 64], Init::Normal);
        for layer in 0..3 {
            specs.begin(Part::Layer(layer));
            specs.weight(format!("{layer}.a"), &[300, 300], Init::Normal);
            specs.weight(format!("{layer}.b"), &[7], Init::Normal);
            specs.protected(format!("{layer}.c"), &[3], Init::Ones);
            specs.weight(format!("{layer}.d"), &[500, 300], Init::Normal);
        }
        specs
    }

    #[test]
    fn ranges_cover_every_weight_once_in_whole_blocks() {
        let specs = specs();
        for ranks in [1, 2, 3, 4, 8, 64] {
            for whole in [false, true] {
                let shards = Shards::new(&specs, |spec| !(whole && spec.shape.len() > 1), 0, ranks);
                for (i, spec) in specs.weights.iter().enumerate() {
                    let mut ranges: Vec<_> = (0..ranks).map(|rank| shards.range(i, rank)).collect();
                    ranges.retain(|range| !range.is_empty());
                    ranges.sort_by_key(|range| range.start);
                    let mut end = 0;
                    for range in ranges {
                        assert_eq!(range.start, end, "{ranks} {}", spec.name);
                        assert!(
                            range.start % BLOCK == 0 && (!whole || range.start == 0 || spec.shape.len() == 1)
                        );
                        end = range.end;
                    }
                    assert_eq!(end, spec.len());
                }
            }
        }
    }

    #[test]
    fn large_parts_are_divided_evenly() {
        let specs = specs();
        let shards = Shards::new(&specs, |_| true, 0, 4);
        for rank in 0..4 {
            let all: usize = (0..specs.weights.len()).map(|i| shards.range(i, rank).len()).sum();
            let even = specs.weights.iter().map(Spec::len).sum::<usize>() / 4;
            assert!(all.abs_diff(even) < 3 * BLOCK, "{rank}: {all} of {even}");
        }
    }
}
