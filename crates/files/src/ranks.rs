//! Folders of ranks, as Megatron names them: `mp_rank_TT`, or `mp_rank_TT_EEE` if the experts are divided too.
//!
//! TT is the tensor-parallel rank and EEE the expert-parallel one. A pipeline-parallel rank would stand between
//! them; such checkpoints number their layers by rank and are refused.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::folder::look_at;

const PREFIX: &str = "mp_rank_";

/// File with the number of a Megatron checkpoint's last iteration, or [`RELEASE`].
pub const TRACKER: &str = "latest_checkpointed_iteration.txt";

/// Iteration, and its folder, of weights that were converted, not saved by a run.
pub const RELEASE: &str = "release";

/// Returns true for the name of a rank's folder.
pub fn is_rank_folder(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Returns the name of the folder of a rank, with so many expert-parallel ranks for each tensor-parallel one.
pub fn rank_folder(rank: usize, expert_ranks: usize) -> String {
    let (tensor_rank, expert_rank) = (rank / expert_ranks, rank % expert_ranks);
    match expert_ranks {
        1 => format!("{PREFIX}{tensor_rank:02}"),
        _ => format!("{PREFIX}{tensor_rank:02}_{expert_rank:03}"),
    }
}

/// The folders of all ranks of a checkpoint.
pub struct RankFolders {
    /// Folders in the order of the ranks.
    pub folders: Vec<PathBuf>,
    /// Number of expert-parallel ranks for each tensor-parallel one.
    pub expert_ranks: usize,
}

impl RankFolders {
    /// Returns the rank folders in `folder`, or none if it has none.
    pub fn in_folder(folder: &Path) -> Result<Option<RankFolders>> {
        let entries = fs::read_dir(folder).map_err(Error::io(folder, "list"))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::io(folder, "list"))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_rank_folder(&name) && look_at(&entry.path())?.is_some_and(|found| found.is_dir()) {
                names.push(name);
            }
        }
        if names.is_empty() {
            return Ok(None);
        }
        let fail = |problem: String| Err(Error::NoCheckpoint { path: folder.into(), problem });
        let numbers = |name: &String| name[PREFIX.len()..].split('_').count();
        if let Some(name) = names.iter().find(|name| numbers(name) > 2) {
            return fail(format!("{name}: {PIPELINE}"));
        }
        let divided = names.iter().any(|name| numbers(name) > 1);
        let first = |name: &&String| name.starts_with(&format!("{}_", rank_folder(0, 1)));
        let expert_ranks = if divided { names.iter().filter(first).count().max(1) } else { 1 };
        let mut expected: Vec<String> =
            (0..names.len()).map(|rank| rank_folder(rank, expert_ranks)).collect();
        let folders = expected.iter().map(|name| folder.join(name)).collect();
        names.sort();
        expected.sort();
        if names != expected || !names.len().is_multiple_of(expert_ranks) {
            let missing = expected.iter().find(|name| !names.contains(name));
            return fail(format!(
                "{} {PREFIX}* folders, but they are not numbered {} to {}: is a rank missing?{}",
                names.len(),
                rank_folder(0, expert_ranks),
                rank_folder(names.len() - 1, expert_ranks),
                missing.map(|name| format!(" {name} is not there")).unwrap_or_default()
            ));
        }
        Ok(Some(RankFolders { folders, expert_ranks }))
    }
}

/// Why pipeline-parallel files are refused.
pub const PIPELINE: &str =
    "pipeline-parallel ranks are not supported; save with --ckpt-format torch_dist, which has no ranks";

#[cfg(test)]
mod tests {
    use super::*;

    fn found(names: &[&str]) -> std::result::Result<Option<(Vec<String>, usize)>, String> {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let ranks = RankFolders::in_folder(folder.path()).map_err(|e| e.to_string())?;
        let name = |path: PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
        Ok(ranks.map(|ranks| (ranks.folders.into_iter().map(name).collect(), ranks.expert_ranks)))
    }

    #[test]
    fn folders_are_found_in_the_order_of_the_ranks() {
        assert_eq!(found(&["other"]), Ok(None));
        for (names, expert_ranks) in [
            (&["mp_rank_00", "mp_rank_01"][..], 1),
            (&["mp_rank_00_000", "mp_rank_00_001"], 2),
            (&["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"], 2),
        ] {
            let mut shuffled = names.to_vec();
            shuffled.reverse();
            assert_eq!(
                found(&shuffled).unwrap().unwrap(),
                (names.iter().map(|n| n.to_string()).collect(), expert_ranks)
            );
        }
    }

    #[test]
    fn a_hundred_ranks_are_in_the_order_of_their_numbers() {
        let names: Vec<String> = (0..101).map(|rank| rank_folder(rank, 1)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(found(&names).unwrap().unwrap().0, names);
    }

    #[test]
    fn missing_and_pipeline_parallel_ranks_are_refused() {
        for (names, word) in [
            (&["mp_rank_00", "mp_rank_02"][..], "mp_rank_01 is not there"),
            (&["mp_rank_01"], "mp_rank_00 is not there"),
            (&["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000"], "is a rank missing?"),
            (
                &["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_002"],
                "mp_rank_01_001 is not there",
            ),
            (&["mp_rank_00", "mp_rank_00_001"], "is a rank missing?"),
            (&["mp_rank_00_000_000"], "pipeline-parallel ranks are not supported"),
        ] {
            let problem = found(names).unwrap_err();
            assert!(problem.contains(word), "{names:?}: {problem}");
        }
    }
}
