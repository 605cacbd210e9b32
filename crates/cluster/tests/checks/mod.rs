//! Properties of a group on any transport. Every rank calls these in the same order.

use ballast_cluster::{Group, Kind, ReduceScatter, TreeSum, even_parts, fits_tree};

/// All checks.
pub fn all(group: &Group) {
    sums_have_the_bits_of_the_tree(group);
    parts_of_any_length_are_gathered(group);
    large_messages_arrive_whole(group);
    several_operations_can_be_under_way(group);
    subgroups_do_not_mix_their_messages(group);
    broadcasts_come_from_every_rank(group);
    messages_go_round_in_order(group);
}

/// A term whose sum with others depends on the order.
fn term(group: usize, len: usize) -> Vec<f32> {
    let value = |i: usize| ((group * 7919 + i * 104729) % 65537) as f32 * 10f32.powi((group % 5) as i32 - 2);
    (0..len).map(value).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn sums_have_the_bits_of_the_tree(group: &Group) {
    let mut compared = 0;
    for terms in (1..=8).filter(|terms| fits_tree(*terms, group.size())) {
        for len in [1, 5, 64, 1001, 300_000] {
            let mut alone = TreeSum::default();
            (0..terms).for_each(|i| alone.push(term(i, len)));
            let mut sum = TreeSum::default();
            for round in 0..terms / group.size() {
                let own = term(round * group.size() + group.rank(), len);
                sum.push(group.all_reduce(Kind::Gradients, &own).unwrap());
            }
            let (sum, alone) = (sum.finish().unwrap(), alone.finish().unwrap());
            assert_eq!(bits(&sum), bits(&alone), "{terms} terms of {len}");
            compared += 1;
        }
    }
    assert!(compared >= 5, "{compared} sums on {} ranks", group.size());
}

fn parts_of_any_length_are_gathered(group: &Group) {
    let before = group.traffic().sent().get(&Kind::Weights).copied().unwrap_or(0);
    let part = |rank: usize| vec![rank as u8; 70_000 * rank];
    let all = group.all_gather_any(Kind::Weights, part(group.rank())).unwrap();
    assert!(all.iter().enumerate().all(|(rank, bytes)| *bytes == part(rank)));
    let sent = group.traffic().sent()[&Kind::Weights] - before;
    assert_eq!(sent, (group.size() as u64 - 1) * (8 + 70_000 * group.rank() as u64));
}

/// With lengths around multiples of 64 KiB, to which the MPI test lowers the limit of a piece.
fn large_messages_arrive_whole(group: &Group) {
    let (next, before) = neighbors(group);
    let message = |rank: usize, len: usize| -> Vec<u8> { (0..len).map(|i| (i * 31 + rank) as u8).collect() };
    for len in [0, 1, 65_535, 65_536, 65_537, 131_072, 5_000_001] {
        group.send(next, Kind::Weights, message(group.rank(), len)).unwrap();
        let received = group.wait(group.receive(before, len).unwrap()).unwrap();
        assert!(received == message(before, len), "{len} bytes");
    }
}

fn several_operations_can_be_under_way(group: &Group) {
    let parts = even_parts(100_000, group.size());
    let start = |i: usize| -> ReduceScatter {
        let values = vec![(i * 10 + group.rank()) as f32; 100_000];
        group.start_reduce_scatter(Kind::Gradients, &values, &parts, 1).unwrap()
    };
    let started: Vec<ReduceScatter> = (0..10).map(start).collect();
    let ranks = group.size();
    // The last first: receives are matched in the order in which they were started.
    for (i, one) in started.into_iter().enumerate().rev() {
        let sum = group.finish_reduce_scatter(one).unwrap();
        let expected = (10 * i * ranks + ranks * (ranks - 1) / 2) as f32;
        assert!(sum.iter().all(|value| *value == expected), "{i}: {} for {expected}", sum[0]);
    }
}

fn subgroups_do_not_mix_their_messages(group: &Group) {
    if group.size() != 4 {
        return;
    }
    let (row, column) = (group.rank() / 2, group.rank() % 2);
    let rows = group.subgroup(&[2 * row, 2 * row + 1], 1);
    let columns = group.subgroup(&[column, column + 2], 2);
    let own = [group.rank() as f64];
    let sum = |all: Vec<Vec<f64>>| all.iter().map(|part| part[0]).sum::<f64>();
    assert_eq!(sum(rows.all_gather_f64(Kind::Scalars, &own).unwrap()), [1.0, 5.0][row]);
    assert_eq!(sum(columns.all_gather_f64(Kind::Scalars, &own).unwrap()), [2.0, 4.0][column]);
    assert_eq!((rows.rank(), columns.rank()), (column, row));
}

fn broadcasts_come_from_every_rank(group: &Group) {
    for root in 0..group.size() {
        let text = group.broadcast(Kind::Setup, root, format!("from {}", group.rank()).into_bytes()).unwrap();
        assert_eq!(text, format!("from {root}").into_bytes());
    }
}

fn messages_go_round_in_order(group: &Group) {
    let (next, before) = neighbors(group);
    for i in 0..2000u32 {
        group.send(next, Kind::States, i.to_le_bytes().to_vec()).unwrap();
    }
    for i in 0..2000u32 {
        assert_eq!(group.wait(group.receive(before, 4).unwrap()).unwrap(), i.to_le_bytes());
    }
    group.barrier().unwrap();
    group.flush().unwrap();
}

fn neighbors(group: &Group) -> (usize, usize) {
    let size = group.size();
    ((group.rank() + 1) % size, (group.rank() + size - 1) % size)
}
