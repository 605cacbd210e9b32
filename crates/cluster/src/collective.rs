//! Collective operations of a group.
//!
//! Every operation sends all its messages before it waits, directly from rank to rank:
//! ```text
//! all_gather       each rank sends its part to all others: (n - 1) times the bytes of the part
//! reduce_scatter   each rank sends part j to rank j, which adds the terms in the order of a tree
//! all_reduce       a reduce_scatter, then an all_gather
//! ```
//! `start_*` returns before the messages have arrived, so that communication overlaps computation.

use std::ops::Range;

use crate::error::Result;
use crate::group::{Group, Receive};
use crate::traffic::Kind;
use crate::tree::tree_sum;

/// An all-gather in flight.
#[derive(Debug)]
#[must_use]
pub struct Gather {
    own: Option<Vec<u8>>,
    others: Vec<Option<Receive>>,
}

/// A reduce-scatter in flight.
#[derive(Debug)]
#[must_use]
pub struct ReduceScatter {
    own: Vec<f32>,
    others: Vec<Option<Receive>>,
    /// Number of consecutive ranks whose terms are added first.
    inner: usize,
}

/// Divides `len` elements into `parts` ranges of nearly equal length.
pub fn even_parts(len: usize, parts: usize) -> Vec<Range<usize>> {
    (0..parts).map(|i| i * len / parts..(i + 1) * len / parts).collect()
}

impl Group {
    /// Starts an all-gather of one part per rank; `lens` are the lengths of the parts in bytes.
    pub fn start_all_gather(&self, kind: Kind, own: Vec<u8>, lens: &[usize]) -> Result<Gather> {
        for to in self.others() {
            if !own.is_empty() {
                self.send(to, kind, own.clone())?;
            }
        }
        let receive = |from: usize| match from {
            _ if from == self.rank() || lens[from] == 0 => Ok(None),
            _ => self.receive(from, lens[from]).map(Some),
        };
        let others = (0..self.size()).map(receive).collect::<Result<_>>()?;
        Ok(Gather { own: Some(own), others })
    }

    /// Waits for an all-gather and returns the parts, by rank.
    pub fn finish_all_gather(&self, gather: Gather) -> Result<Vec<Vec<u8>>> {
        let Gather { mut own, others } = gather;
        let part = |(from, receive): (usize, Option<Receive>)| match receive {
            Some(receive) => self.wait(receive),
            None if from == self.rank() => Ok(own.take().unwrap_or_default()),
            None => Ok(Vec::new()),
        };
        others.into_iter().enumerate().map(part).collect()
    }

    /// Gathers a part from every rank; `lens` are the lengths of the parts in bytes.
    pub fn all_gather(&self, kind: Kind, own: Vec<u8>, lens: &[usize]) -> Result<Vec<Vec<u8>>> {
        let gather = self.start_all_gather(kind, own, lens)?;
        self.finish_all_gather(gather)
    }

    /// Gathers a part of unknown length from every rank.
    pub fn all_gather_any(&self, kind: Kind, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let length = (own.len() as u64).to_le_bytes().to_vec();
        let lens = self.all_gather(kind, length, &vec![8; self.size()])?;
        let lens: Vec<usize> = lens
            .iter()
            .map(|len| u64::from_le_bytes(len[..].try_into().unwrap_or_default()) as usize)
            .collect();
        self.all_gather(kind, own, &lens)
    }

    /// Starts to sum `values` over all ranks; rank j gets the sum of `parts[j]`. The terms of `inner` consecutive ranks
    /// are added first, as a tree, then those sums.
    pub fn start_reduce_scatter(
        &self,
        kind: Kind,
        values: &[f32],
        parts: &[Range<usize>],
        inner: usize,
    ) -> Result<ReduceScatter> {
        for to in self.others() {
            if !parts[to].is_empty() {
                self.send(to, kind, bytemuck::cast_slice(&values[parts[to].clone()]).to_vec())?;
            }
        }
        let own = parts[self.rank()].clone();
        let receive = |from: usize| match from {
            _ if from == self.rank() || own.is_empty() => Ok(None),
            _ => self.receive(from, 4 * own.len()).map(Some),
        };
        let others = (0..self.size()).map(receive).collect::<Result<_>>()?;
        Ok(ReduceScatter { own: values[own].to_vec(), others, inner: inner.max(1) })
    }

    /// Waits for the terms of a reduce-scatter and returns the sum of this rank's part.
    pub fn finish_reduce_scatter(&self, reduction: ReduceScatter) -> Result<Vec<f32>> {
        let ReduceScatter { own, others, inner } = reduction;
        if own.is_empty() {
            return Ok(own);
        }
        let mut own = Some(own);
        let mut terms = Vec::with_capacity(others.len());
        for receive in others {
            terms.push(match receive {
                Some(receive) => floats(&self.wait(receive)?),
                None => own.take().unwrap_or_default(),
            });
        }
        let mut sums = Vec::new();
        let mut terms = terms.into_iter().peekable();
        while terms.peek().is_some() {
            sums.extend(tree_sum(terms.by_ref().take(inner).collect()));
        }
        Ok(tree_sum(sums).unwrap_or_default())
    }

    /// Sums `values` over all ranks, in the order of a tree.
    pub fn all_reduce(&self, kind: Kind, values: &[f32]) -> Result<Vec<f32>> {
        self.all_reduce_in(kind, values, 1)
    }

    /// [`Group::all_reduce`] with the terms of `inner` consecutive ranks added first.
    pub(crate) fn all_reduce_in(&self, kind: Kind, values: &[f32], inner: usize) -> Result<Vec<f32>> {
        let parts = even_parts(values.len(), self.size());
        let reduction = self.start_reduce_scatter(kind, values, &parts, inner)?;
        let own = self.finish_reduce_scatter(reduction)?;
        let lens: Vec<usize> = parts.iter().map(|part| 4 * part.len()).collect();
        let all = self.all_gather(kind, bytemuck::cast_slice(&own).to_vec(), &lens)?;
        Ok(all.iter().flat_map(|part| floats(part)).collect())
    }

    /// Gathers f64 values from every rank; all ranks have the same number.
    pub fn all_gather_f64(&self, kind: Kind, own: &[f64]) -> Result<Vec<Vec<f64>>> {
        let bytes = bytemuck::cast_slice(own).to_vec();
        let all = self.all_gather(kind, bytes, &vec![8 * own.len(); self.size()])?;
        Ok(all.iter().map(|part| bytemuck::allocation::pod_collect_to_vec(part)).collect())
    }

    /// Sends bytes from one rank to all others.
    pub fn broadcast(&self, kind: Kind, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let own = if self.rank() == root { bytes } else { Vec::new() };
        let mut all = self.all_gather_any(kind, own)?;
        Ok(std::mem::take(&mut all[root]))
    }

    /// Waits until all ranks have reached this call.
    pub fn barrier(&self) -> Result {
        self.all_gather(Kind::Control, vec![0], &vec![1; self.size()])?;
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        // Start with the next rank, so that the ranks do not all send to the same one.
        let (rank, size) = (self.rank(), self.size());
        (1..size).map(move |step| (rank + step) % size)
    }
}

/// The f32 values of a message, copied because its bytes may have any alignment.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytemuck::allocation::pod_collect_to_vec(bytes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::Error;
    use crate::threads;
    use crate::tree::{TreeSum, fits_tree};

    /// Gradients of a group whose sum depends on the order.
    fn term(group: usize, len: usize) -> Vec<f32> {
        let value =
            |i: usize| ((group * 7919 + i * 104729) % 65537) as f32 * 10f32.powi((group % 5) as i32 - 2);
        (0..len).map(value).collect()
    }

    #[test]
    fn a_sum_has_the_same_bits_on_any_number_of_ranks() {
        for groups in [1, 2, 3, 4, 6, 8] {
            for len in [1, 5, 64, 1001] {
                let mut alone = TreeSum::default();
                (0..groups).for_each(|group| alone.push(term(group, len)));
                let alone = alone.finish().unwrap();
                for ranks in (1..=groups).filter(|ranks| fits_tree(groups, *ranks)) {
                    let sums = threads::run(ranks, |cluster| {
                        let mut sum = TreeSum::default();
                        for round in 0..groups / ranks {
                            let own = term(round * ranks + cluster.rank(), len);
                            sum.push(cluster.all_reduce(Kind::Gradients, &own).unwrap());
                        }
                        sum.finish().unwrap()
                    });
                    assert!(sums.iter().all(|sum| *sum == alone), "{groups} groups on {ranks} ranks, {len}");
                }
            }
        }
    }

    #[test]
    fn terms_of_consecutive_ranks_are_added_first() {
        let sums =
            threads::run(6, |group| group.all_reduce_in(Kind::Gradients, &term(group.rank(), 9), 3).unwrap());
        let pair: Vec<Vec<f32>> =
            [0, 3].map(|first| tree_sum((first..first + 3).map(|i| term(i, 9)).collect()).unwrap()).to_vec();
        assert_eq!(sums[0], tree_sum(pair).unwrap());
    }

    #[test]
    fn parts_of_any_length_are_gathered_and_counted() {
        let results = threads::run(3, |group| {
            let own = vec![group.rank() as u8; 5 * group.rank()];
            let all = group.all_gather_any(Kind::Weights, own).unwrap();
            (all, group.traffic().sent()[&Kind::Weights])
        });
        for (rank, (all, sent)) in results.iter().enumerate() {
            assert_eq!(*all, [vec![], vec![1; 5], vec![2; 10]]);
            assert_eq!(*sent, 2 * (8 + 5 * rank as u64));
        }
    }

    #[test]
    fn several_operations_can_be_under_way() {
        let results = threads::run(4, |group| {
            let parts = even_parts(100, 4);
            let started: Vec<ReduceScatter> = (0..10)
                .map(|i| {
                    let values = vec![(i * 10 + group.rank()) as f32; 100];
                    group.start_reduce_scatter(Kind::Gradients, &values, &parts, 1).unwrap()
                })
                .collect();
            started.into_iter().map(|one| group.finish_reduce_scatter(one).unwrap()[0]).collect::<Vec<f32>>()
        });
        let expected: Vec<f32> = (0..10).map(|i| (40 * i + 6) as f32).collect();
        assert!(results.iter().all(|result| *result == expected));
    }

    #[test]
    fn subgroups_do_not_mix_their_messages() {
        let results = threads::run(4, |world| {
            let (row, column) = (world.rank() / 2, world.rank() % 2);
            let rows = world.subgroup(&[2 * row, 2 * row + 1], 1);
            let columns = world.subgroup(&[column, column + 2], 2);
            let own = [world.rank() as f64];
            let sum = |all: Vec<Vec<f64>>| all.iter().map(|part| part[0]).sum::<f64>();
            let in_row = sum(rows.all_gather_f64(Kind::Scalars, &own).unwrap());
            (in_row, sum(columns.all_gather_f64(Kind::Scalars, &own).unwrap()), rows.rank(), columns.rank())
        });
        assert_eq!(results, [(1.0, 2.0, 0, 0), (1.0, 4.0, 1, 0), (5.0, 2.0, 0, 1), (5.0, 4.0, 1, 1)]);
    }

    #[test]
    fn a_broadcast_and_point_to_point_messages_arrive() {
        let results = threads::run(3, |group| {
            let text =
                group.broadcast(Kind::Setup, 1, format!("from {}", group.rank()).into_bytes()).unwrap();
            let (next, before) = ((group.rank() + 1) % 3, (group.rank() + 2) % 3);
            group.send(next, Kind::States, vec![group.rank() as u8]).unwrap();
            let received = group.wait(group.receive(before, 1).unwrap()).unwrap();
            group.barrier().unwrap();
            (String::from_utf8(text).unwrap(), received[0])
        });
        assert_eq!(results, [("from 1".into(), 2), ("from 1".into(), 0), ("from 1".into(), 1)]);
    }

    #[test]
    fn a_rank_that_stopped_is_named_by_all_others() {
        let results = threads::run_with_timeout(4, Duration::from_secs(2), |group| {
            if group.rank() == 2 {
                // Sends only to rank 3, like a rank that stops in the middle of an operation.
                group.send(3, Kind::Control, vec![0]).unwrap();
                std::thread::sleep(Duration::from_secs(4));
                return Ok(());
            }
            group.barrier()?;
            group.barrier()
        });
        let silent = Err(Error::Silent { rank: 2, seconds: 2 });
        assert_eq!(results, [silent.clone(), silent.clone(), Ok(()), silent]);
        assert!(results[0].as_ref().unwrap_err().to_string().contains("rank 2 has not answered for 2 s"));
    }

    #[test]
    fn a_rank_that_waited_before_it_stopped_is_named() {
        let results = threads::run_with_timeout(3, Duration::from_secs(2), |group| {
            // Rank 1 reports that it waits for rank 2.
            if group.rank() == 2 {
                std::thread::sleep(Duration::from_millis(800));
            }
            group.barrier()?;
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_secs(3));
                return Ok(());
            }
            group.barrier()
        });
        let silent = Err(Error::Silent { rank: 1, seconds: 2 });
        assert_eq!(results, [silent.clone(), Ok(()), silent]);
    }

    #[test]
    fn a_busy_rank_is_waited_for_beyond_the_time_limit() {
        let results = threads::run_with_timeout(3, Duration::from_secs(1), |group| {
            if group.rank() == 1 {
                let _pulse = group.pulse().unwrap();
                std::thread::sleep(Duration::from_secs(3));
            }
            group.barrier()
        });
        assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn a_rank_that_was_busy_before_it_stopped_is_named() {
        let results = threads::run_with_timeout(3, Duration::from_secs(1), |group| {
            if group.rank() == 1 {
                let pulse = group.pulse().unwrap();
                std::thread::sleep(Duration::from_secs(2));
                drop(pulse);
                std::thread::sleep(Duration::from_secs(3));
                return Ok(());
            }
            group.barrier()
        });
        let silent = Err(Error::Silent { rank: 1, seconds: 1 });
        assert_eq!(results, [silent.clone(), Ok(()), silent]);
    }

    #[test]
    fn a_panic_ends_busy_work() {
        let caught = std::panic::catch_unwind(|| {
            threads::run(2, |group| {
                let _pulse = group.pulse().unwrap();
                panic!("in the work of {}", group.rank())
            })
        });
        assert!(caught.is_err());
    }

    #[test]
    fn ranks_that_compute_and_wait_in_turn_are_waited_for_beyond_the_time_limit() {
        let results = threads::run_with_timeout(3, Duration::from_secs(1), |group| -> Result {
            let _pulse = group.pulse().unwrap();
            for late in [1, 2, 1] {
                if group.rank() == late {
                    std::thread::sleep(Duration::from_secs(4));
                }
                group.barrier()?;
            }
            Ok(())
        });
        assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
    }

    /// After rank 1 has computed for a long time, each rank waits for the next one, because the message from rank 2 to
    /// rank 1 is slow.
    #[test]
    fn ranks_that_wait_for_a_message_on_its_way_are_not_taken_for_stopped() {
        let on_its_way = |seconds: u64| std::thread::sleep(Duration::from_secs(seconds));
        let results = threads::run_with_timeout(3, Duration::from_secs(3), |group| {
            let _pulse = group.pulse().unwrap();
            let (from, to) = ((group.rank() + 1) % 3, (group.rank() + 2) % 3);
            std::thread::scope(|scope| {
                match group.rank() {
                    1 => on_its_way(6),
                    2 => drop(scope.spawn(|| {
                        on_its_way(8);
                        group.send(1, Kind::States, vec![2])
                    })),
                    _ => {}
                }
                group.wait(group.receive(from, 1)?)?;
                if group.rank() < 2 { group.send(to, Kind::States, vec![0]) } else { Ok(()) }
            })
        });
        assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn a_group_of_one_sends_nothing() {
        let group = Group::solo();
        assert_eq!(group.all_reduce(Kind::Gradients, &[1.0, 2.0]).unwrap(), [1.0, 2.0]);
        assert_eq!(group.broadcast(Kind::Setup, 0, vec![7]).unwrap(), [7]);
        group.barrier().unwrap();
        assert!(group.traffic().sent().is_empty());
    }
}
