//! Checks that all ranks run the same thing.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use ballast_cluster::Kind;
use ballast_kernels::simd;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::Ranks;
use crate::config::TrainConfig;
use crate::error::{Error, Result};

/// Properties that all ranks must have in common, as pairs of a name and a value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fingerprint(Vec<(String, String)>);

impl Fingerprint {
    /// The program, the instruction set, and the configuration key by key.
    fn of_program(config: &TrainConfig) -> Result<Fingerprint> {
        let mut all = Fingerprint::default();
        all.add("version", env!("CARGO_PKG_VERSION"));
        let program = std::env::current_exe().and_then(|path| file_checksum(&path));
        // Where a system does not show the program's file, the version has to do.
        all.add("program file", program.map_or(String::new(), |sum| format!("checksum {sum:016x}")));
        all.add("instruction set (BALLAST_SIMD)", format!("{:?}", simd::level()));
        all.add_table(&config.to_table()?, "");
        Ok(all)
    }

    /// Adds a value.
    pub(crate) fn add(&mut self, name: &str, value: impl ToString) {
        self.0.push((name.into(), value.to_string()));
    }

    fn add_table(&mut self, table: &toml::Table, above: &str) {
        for (key, value) in table {
            let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
            match value {
                toml::Value::Table(inner) => self.add_table(inner, &path),
                value => self.add(&format!("`{path}`"), value),
            }
        }
    }
}

/// Checksum of a file, which is read piece by piece: whole, a large program would be the peak memory of a small run.
fn file_checksum(path: &Path) -> io::Result<u64> {
    let (mut file, mut sum) = (File::open(path)?, Xxh3::new());
    let mut piece = vec![0; 1 << 16];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(sum.digest()),
            read => sum.update(&piece[..read]),
        }
    }
}

/// Returns an error unless all ranks run the same program with the same configuration.
pub(crate) fn check_same_program(ranks: &Ranks, config: &TrainConfig) -> Result {
    match ranks.is_solo() {
        true => Ok(()),
        false => check_agreement(ranks, &Fingerprint::of_program(config)?),
    }
}

/// Returns an error that names the first difference between rank 0 and another rank.
pub(crate) fn check_agreement(ranks: &Ranks, own: &Fingerprint) -> Result {
    let all = ranks.exchange(Kind::Setup, own)?;
    let Some(first) = all.first() else { return Ok(()) };
    for (rank, other) in all.iter().enumerate() {
        let value = |from: &Fingerprint, name: &str| {
            from.0.iter().find(|(key, _)| key == name).map_or("nothing".into(), |(_, value)| value.clone())
        };
        let names = first.0.iter().chain(&other.0).map(|(name, _)| name.as_str());
        for name in names {
            let (here, there) = (value(first, name), value(other, name));
            if here != there {
                return Err(Error::Ranks(format!(
                    "rank {rank} differs from rank 0 in {name}: {there}, but {here} on rank 0; start all ranks with the \
                     same program, configuration and data"
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_read_in_pieces_has_the_checksum_of_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..(1 << 16) + 777).map(|i| (i % 251) as u8).collect();
        let path = folder.path().join("program");
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(file_checksum(&path).unwrap(), xxhash_rust::xxh3::xxh3_64(&bytes));
    }
}
