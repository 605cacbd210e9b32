//! Options and helpers of the commands that run a model.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ballast_model::precision::PRESETS;
use ballast_model::{Model, Precision};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use super::open;
use crate::output::bytes;
use crate::warnings::Warnings;

/// The option `--precision`.
#[derive(Args)]
pub(crate) struct PrecisionArg {
    /// Precision preset [default: bf16 if most weights are stored in 16 bits, else f32].
    #[arg(long, value_name = "PRECISION", value_parser = presets())]
    precision: Option<String>,
}

fn presets() -> PossibleValuesParser {
    PRESETS.map(|(name, what)| PossibleValue::new(name).help(what)).into()
}

impl PrecisionArg {
    /// Returns the given preset, or the one that suits the checkpoint at `path`. Opens the checkpoint either
    /// way and warns of unknown keys in its config.json.
    pub(crate) fn name(&self, path: &Path, warnings: &Warnings) -> anyhow::Result<String> {
        let checkpoint = open(path)?;
        warnings.check_config(&checkpoint);
        Ok(self.precision.clone().unwrap_or_else(|| Precision::name_for(&checkpoint).into()))
    }
}

/// The option `--adapter`.
#[derive(Args)]
pub(crate) struct AdapterArg {
    /// Folder of LoRA adapters to apply: adapter_config.json and adapter_model.safetensors, from `ballast
    /// train` or PEFT.
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
}

/// Loads a model with its adapters. Returns it and the seconds it took.
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

/// Returns `n` per second.
pub(crate) fn rate(n: usize, time: Duration) -> f64 {
    n as f64 / time.as_secs_f64().max(1e-9)
}

/// Formats the peak memory of this process.
pub(crate) fn peak() -> String {
    ballast_model::memory::peak().map_or_else(|| "unknown".into(), bytes)
}
