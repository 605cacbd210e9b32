//! Memory of ranks that share a machine or a control group.

use std::collections::BTreeMap;

use ballast_cluster::Kind;
use ballast_format::bytes;
use ballast_model::memory::{self, Bound};
use serde::{Deserialize, Serialize};

use super::Ranks;
use super::machine::Machine;
use crate::error::Result;

/// Bytes that a rank needs, and that it may still allocate.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Need {
    machine: String,
    bytes: u64,
    /// Available bytes by whom they are shared with.
    available: Vec<(Option<String>, u64)>,
}

/// Ranks that have memory in common.
#[derive(Default)]
struct Sharers {
    machine: String,
    ranks: usize,
    /// Bytes of all of them, and of the one that needs most.
    needed: u64,
    most: u64,
    available: u64,
}

impl Ranks {
    /// Fails on all ranks if those that share a machine or a control group need more memory together than it has
    /// left. Every rank has measured before any returns, so none counts what another allocates next.
    pub(crate) fn check_memory(&self, what: &str, needed: u64) -> Result {
        if self.is_solo() {
            return Ok(memory::check(what, needed)?);
        }
        let available = memory::bounds().into_iter().map(|Bound { shared, available }| (shared, available));
        let own = Need { machine: Machine::here().name, bytes: needed, available: available.collect() };
        check(what, &self.exchange(Kind::Setup, &own)?)
    }
}

/// Fails if the ranks that share some memory need more than it has left.
fn check(what: &str, needs: &[Need]) -> Result {
    let mut all: BTreeMap<(Option<&str>, Option<usize>), Sharers> = BTreeMap::new();
    for (rank, need) in needs.iter().enumerate() {
        for (shared, available) in &need.available {
            let alone = shared.is_none().then_some(rank);
            let sharers = all.entry((shared.as_deref(), alone)).or_insert_with(|| Sharers {
                machine: need.machine.clone(),
                available: u64::MAX,
                ..Sharers::default()
            });
            sharers.available = sharers.available.min(*available);
            // A rank may have two limits of its own.
            if alone.is_none() || sharers.ranks == 0 {
                sharers.ranks += 1;
                sharers.needed = sharers.needed.saturating_add(need.bytes);
                sharers.most = sharers.most.max(need.bytes);
            }
        }
    }
    match all.into_values().find(|sharers| sharers.needed > sharers.available) {
        None => Ok(()),
        Some(Sharers { machine, ranks, needed, most, available }) => {
            let ranks = if ranks == 1 { "1 rank".to_string() } else { format!("{ranks} ranks") };
            let what = format!("{what}, {ranks} on {machine} with up to {} each", bytes(most));
            Err(ballast_model::Error::Memory { what, needed, available }.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn need(machine: &str, gib: u64, available: &[(Option<&str>, u64)]) -> Need {
        let bound = |(shared, gib): &(Option<&str>, u64)| (shared.map(String::from), gib * GIB);
        Need { machine: machine.into(), bytes: gib * GIB, available: available.iter().map(bound).collect() }
    }

    fn refusal(needs: &[Need]) -> Option<String> {
        check("this run", needs).err().map(|error| error.to_string())
    }

    #[test]
    fn ranks_of_one_machine_are_counted_together_and_those_of_others_are_not() {
        let a = need("a", 11, &[(Some("boot a"), 22)]);
        assert_eq!(refusal(&[a.clone(), a.clone()]), None);
        let b = need("b", 11, &[(Some("boot b"), 22)]);
        assert_eq!(refusal(&[a.clone(), b.clone(), a.clone(), b]), None);
        let text = refusal(&[a.clone(), a.clone(), a.clone(), a]).unwrap();
        for part in ["4 ranks on a with up to 11.0 GiB each", "44.0 GiB needed", "22.0 GiB available"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_rank_that_sees_least_counts_for_all_of_a_machine() {
        let (before, after) = (need("a", 4, &[(Some("boot"), 9)]), need("a", 4, &[(Some("boot"), 7)]));
        assert_eq!(refusal(&[before.clone(), before.clone()]), None);
        assert!(refusal(&[before, after]).is_some_and(|text| text.contains("7.0 GiB available")));
    }

    #[test]
    fn control_groups_with_room_for_each_rank_have_a_parent_without_room_for_all() {
        let of = |group| need("a", 8, &[(Some("boot"), 100), (Some(group), 10), (Some("boot job"), 20)]);
        assert_eq!(refusal(&[of("boot task 0"), of("boot task 1")]), None);
        let text = refusal(&[of("boot task 0"), of("boot task 1"), of("boot task 2")]).unwrap();
        assert!(text.contains("3 ranks on a") && text.contains("20.0 GiB available"), "{text}");
    }

    #[test]
    fn a_limit_of_one_process_counts_for_its_rank_alone() {
        let limited = need("a", 8, &[(Some("boot"), 100), (None, 9), (None, 12)]);
        assert_eq!(refusal(&[limited.clone(), limited.clone()]), None);
        let tight = need("a", 8, &[(Some("boot"), 100), (None, 12), (None, 7)]);
        assert!(refusal(&[limited, tight]).is_some_and(|text| text.contains("1 rank on a")));
    }
}
