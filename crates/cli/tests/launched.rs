//! The binary as one of several processes of mpirun or srun.

use crate::common::{ballast, run};

#[cfg(not(feature = "mpi"))]
mod without_mpi {
    use super::*;

    #[test]
    fn every_command_is_refused_by_the_first_rank_alone() {
        let launchers = [
            ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
            ["PMI_RANK", "PMI_SIZE"],
            ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
        ];
        for [rank, size] in launchers {
            for command in [&["train"][..], &["audit", "x"], &["demo"]] {
                let first = run(ballast(command).env(rank, "0").env(size, "2")).exits(2);
                assert!(first.says(&["2 processes", "no MPI", "--features mpi"]).stdout.is_empty());
                let second = run(ballast(command).env(rank, "1").env(size, "2")).exits(2);
                assert_eq!((second.stdout.as_str(), second.stderr.as_str()), ("", ""));
            }
        }
    }

    /// The first rank of a job may be another build, which waits for the others inside MPI and says nothing.
    #[test]
    fn a_rank_that_its_launcher_does_not_end_says_it_too() {
        let scratch = crate::common::Scratch::new();
        // The kernel names a process after its script: this is a launcher that ends no rank.
        let launcher = scratch.path("mpirun");
        scratch.put("mpirun", "#!/bin/sh\n\"$@\"\n");
        std::fs::set_permissions(&launcher, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let rank = ballast(["train"]);
        let mut job = std::process::Command::new(launcher);
        job.arg(rank.get_program()).args(rank.get_args());
        let job = run(job.env("OMPI_COMM_WORLD_RANK", "1").env("OMPI_COMM_WORLD_SIZE", "2")).exits(2);
        job.says(&["ballast: rank 1: started as one of 2 processes", "no MPI", "--features mpi"]);
    }

    #[test]
    fn one_process_of_a_launcher_runs() {
        run(ballast(["demo"]).env("OMPI_COMM_WORLD_RANK", "0").env("OMPI_COMM_WORLD_SIZE", "1")).exits(0);
    }

    #[test]
    fn a_mistake_in_the_arguments_is_named_once() {
        let command = |rank: &str| {
            let mut command = ballast(["demo", "--nonsense"]);
            command.env("PMI_RANK", rank).env("PMI_SIZE", "4");
            run(&mut command).exits(2)
        };
        assert!(command("0").stderr.contains("--nonsense"));
        assert!(command("3").stderr.is_empty());
    }
}

#[cfg(feature = "mpi")]
mod with_mpi {
    use std::process::Command;

    use super::*;

    fn mpirun(ranks: &str, args: &[&str]) -> Command {
        let mut command = Command::new("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "-n", ranks]);
        let rank = ballast(args);
        command.arg(rank.get_program()).args(rank.get_args()).stdin(std::process::Stdio::null());
        command
    }

    #[test]
    fn a_command_for_one_rank_runs_once() {
        let alone = run(&mut ballast(["train", "--keys"])).exits(0);
        let together = run(&mut mpirun("3", &["train", "--keys"])).exits(0);
        assert_eq!(together.stdout.replace('\r', ""), alone.stdout);
        assert_eq!(together.stderr, "this command runs on one rank; the other 2 have exited\n");
    }

    #[test]
    fn its_exit_code_is_that_of_the_job() {
        let together = run(&mut mpirun("3", &["inspect", "/nonexistent"])).exits(3);
        assert_eq!(together.stderr.matches("ballast: ").count(), 1, "{}", together.stderr);
    }

    #[test]
    fn more_threads_than_cores_are_warned_of_once() {
        let mut command = mpirun("2", &["--threads", "9", "train", "--keys"]);
        let job = run(command.env("OMPI_MCA_hwloc_base_binding_policy", "core")).exits(0);
        assert_eq!(job.stderr.matches("warning: 9 threads on ").count(), 1, "{}", job.stderr);
    }
}
