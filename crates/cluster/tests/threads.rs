//! The checks of a group on threads; tests/mpi.rs runs them on processes.

mod checks;

use ballast_cluster::threads;

#[test]
fn groups_of_threads_pass_all_checks() {
    for ranks in [2, 3, 4] {
        threads::run(ranks, |group| checks::all(&group));
    }
}
