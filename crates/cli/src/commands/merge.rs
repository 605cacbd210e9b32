//! `ballast merge`

use std::path::PathBuf;

use ballast_model::{Model, Precision};
use clap::Args;
use serde_json::json;

use super::Global;
use super::model::PrecisionArg;
use crate::exit::Outcome;
use crate::output::{self, clean, plural};

/// Merge LoRA adapters into the weights: W + scale B A, computed in f32, stored in the dtype of the weights.
#[derive(Args)]
pub(crate) struct MergeArgs {
    /// Base model of the adapters: a folder, a file, or hf://ORG/NAME.
    model: PathBuf,
    /// Folder with adapter_config.json and adapter_model.safetensors, from `ballast train` or PEFT.
    adapter: PathBuf,
    /// Output folder of the merged model.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Replace an existing checkpoint at the output folder.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    precision: PrecisionArg,
}

pub(crate) fn run(mut args: MergeArgs, global: &Global) -> anyhow::Result<Outcome> {
    args.model = super::local(&args.model, global)?;
    let progress = global.progress();
    let precision = args.precision.name(&args.model, &global.warnings)?;
    let mut model = Model::load(&args.model, |config| Precision::preset(&precision, config))?;
    global.warnings.add_all(&model.warnings);
    model.read_adapters(&args.adapter)?;
    let merged = model.merge_adapters()?;
    let report = model.save(&args.out, args.force, &progress)?;
    drop(progress);
    let out = args.out.display().to_string();
    if global.json {
        global.print_json(
            "merge",
            &json!({ "adapters": merged, "precision": precision, "out": out, "written": report }),
        );
    } else {
        output::print(&format!("{} merged into {}, {precision}\n", plural(merged, "adapter"), clean(&out)));
    }
    Ok(Outcome::Ok)
}
