//! What the commands that run a model share.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ballast_model::precision::PRESETS;
use ballast_model::{Model, Precision};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use super::open;
use crate::output::bytes;
use crate::warnings::Warnings;

/// `--precision`.
#[derive(Args)]
pub(crate) struct PrecisionArg {
    /// What is stored and computed in which type [default: bf16 when most weights are stored in 16 bits, else f32].
    #[arg(long, value_name = "PRECISION", value_parser = presets())]
    precision: Option<String>,
}

fn presets() -> PossibleValuesParser {
    PRESETS.map(|(name, what)| PossibleValue::new(name).help(what)).into()
}

impl PrecisionArg {
    /// The preset that was asked for, or that suits the checkpoint at `path`, which is looked at either way; warns of its
    /// config.json.
    pub(crate) fn name(&self, path: &Path, warnings: &Warnings) -> anyhow::Result<String> {
        let checkpoint = open(path)?;
        warnings.check_config(&checkpoint);
        Ok(self.precision.clone().unwrap_or_else(|| Precision::name_for(&checkpoint).into()))
    }
}

/// `--adapter`.
#[derive(Args)]
pub(crate) struct AdapterArg {
    /// Run with these adapters: a folder with adapter_config.json and adapter_model.safetensors, from `ballast train` or PEFT.
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
}

/// A model with its adapters, and the seconds that it took to read.
pub(crate) fn load(
    path: &Path,
    precision: &str,
    adapter: &AdapterArg,
    warnings: &Warnings,
) -> anyhow::Result<(Model, f64)> {
    let begun = Instant::now();
    let mut model = Model::load(path, |config| Precision::preset(precision, config))?;
    warnings.add_all(&model.warnings);
    if let Some(folder) = &adapter.adapter {
        model.read_adapters(folder)?;
    }
    Ok((model, begun.elapsed().as_secs_f64()))
}

/// `n` per second.
pub(crate) fn rate(n: usize, time: Duration) -> f64 {
    n as f64 / time.as_secs_f64().max(1e-9)
}

/// The peak of this process's memory in words.
pub(crate) fn peak() -> String {
    ballast_model::memory::peak().map_or_else(|| "unknown".into(), bytes)
}
