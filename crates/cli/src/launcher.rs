//! Start by mpirun or srun: which process this is, from the environment, before MPI is started.

use std::sync::OnceLock;

/// Variables of rank, number of processes, and processes on this machine.
///
/// An sbatch script has SLURM_PROCID and SLURM_NTASKS too; SLURM_STEP_NUM_TASKS counts what srun started.
const VARIABLES: [[&str; 3]; 3] = [
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"],
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"],
];

/// Programs that start ranks, as the kernel names them.
const PROGRAMS: [&str; 8] =
    ["mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy", "slurmstepd"];

/// Most ancestors of a rank that are looked at: shells and wrappers between it and its launcher.
const MOST_ANCESTORS: usize = 16;

/// One of several processes that were started together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// Number of ranks on this machine.
    local_size: usize,
}

/// Returns this process among those that were started together; `None` if it is alone.
pub(crate) fn launch() -> Option<Launch> {
    static LAUNCH: OnceLock<Option<Launch>> = OnceLock::new();
    *LAUNCH.get_or_init(|| Launch::from_variables(|name| std::env::var(name).ok()))
}

/// Returns the rank of this process; 0 if it is alone.
pub(crate) fn rank() -> usize {
    launch().map_or(0, |launch| launch.rank)
}

impl Launch {
    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Option<Launch> {
        // Slurm writes `4(x2),3` for two machines with four ranks and one with three.
        let number = |name: &str| -> Option<usize> {
            let value = variable(name)?;
            value.split(['(', ',']).next()?.trim().parse().ok()
        };
        VARIABLES.iter().find_map(|[rank, size, local]| {
            let (rank, size) = (number(rank)?, number(size)?);
            let local_size = number(local).unwrap_or(1).clamp(1, size.max(1));
            (size > 1).then_some(Launch { rank, size, local_size })
        })
    }

    /// Number of threads for this rank: one for each core that is its own, else its share of the machine.
    pub(crate) fn threads(&self) -> usize {
        let cores = cores();
        if is_bound() { cores } else { (cores / self.local_size).max(1) }
    }
}

/// Number of cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

/// Returns true if a program that starts ranks is among the ancestors of this process.
pub(crate) fn has_launcher() -> bool {
    Status::of_launcher().is_some()
}

/// Returns true if the program that started this rank gave it fewer cores than it has itself.
fn is_bound() -> bool {
    let launcher = Status::of_launcher();
    launcher.zip(Status::read("self")).is_some_and(|(launcher, own)| launcher.cores != own.cores)
}

/// Parts of a process's status in /proc; there is none outside Linux.
struct Status {
    name: String,
    parent: String,
    cores: String,
}

impl Status {
    /// The launcher among the ancestors of this process.
    fn of_launcher() -> Option<Status> {
        let parent = |status: &Status| Status::read(&status.parent);
        let ancestors = std::iter::successors(Status::read("self"), parent).skip(1).take(MOST_ANCESTORS);
        ancestors.into_iter().find(|status| PROGRAMS.contains(&status.name.as_str()))
    }

    fn read(process: &str) -> Option<Status> {
        let text = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(|value| value.trim().to_string())
        };
        Some(Status { name: field("Name")?, parent: field("PPid")?, cores: field("Cpus_allowed_list")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Option<Launch> {
        let value = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, v)| v.to_string());
        Launch::from_variables(value)
    }

    #[test]
    fn every_launcher_is_recognized() {
        let expected = Some(Launch { rank: 3, size: 8, local_size: 4 });
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        let mpich = [("PMI_RANK", "3"), ("PMI_SIZE", "8"), ("MPI_LOCALNRANKS", "4")];
        let slurm =
            [("SLURM_PROCID", "3"), ("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_STEP_TASKS_PER_NODE", "4(x2)")];
        assert_eq!([&open_mpi, &mpich, &slurm].map(|variables| launch(variables)), [expected; 3]);
    }

    #[test]
    fn a_process_that_is_alone_is_not_launched() {
        assert_eq!(launch(&[]), None);
        assert_eq!(launch(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]), None);
        // A batch script, and a shell that srun started.
        assert_eq!(launch(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), None);
        let shell = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_STEP_NUM_TASKS", "1")];
        assert_eq!(launch(&shell), None);
        // mpirun in a batch script.
        let mpirun = [("SLURM_PROCID", "0"), ("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        assert_eq!(launch(&mpirun), Some(Launch { rank: 1, size: 2, local_size: 1 }));
    }
}
