//! `ballast repair`

use std::path::PathBuf;

use ballast_checkpoint::repair::{Outcome as Fate, RepairReport, repair};
use clap::Args;

use super::convert::verification_text;
use super::{Global, PolicyArg, open, open_whole, remote_text};
use crate::exit::Outcome;
use crate::output::{self, clean, count, plural, table};

/// Restore the f32 bits of rounded protected tensors from the original checkpoint.
#[derive(Args)]
pub(crate) struct RepairArgs {
    /// Checkpoint whose protected tensors were rounded.
    checkpoint: PathBuf,
    /// Output folder, or a file ending in .safetensors.
    destination: PathBuf,
    /// Original checkpoint with the f32 bits, in its model or in its optimizer's fp32 master weights; on a hub,
    /// only its protected tensors are read.
    #[arg(long, value_name = "ORIG")]
    original: PathBuf,
    #[command(flatten)]
    policy: PolicyArg,
    /// Show the plan and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Replace an existing checkpoint at the destination.
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(args: RepairArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (checkpoint, original) = (open_whole(&args.checkpoint, global)?, open(&args.original)?);
    let policy = args.policy.load_for(&checkpoint, global)?;
    let destination = (!args.dry_run).then_some(args.destination.as_path());
    let report = repair(&checkpoint, &original, destination, &policy, args.force, &global.progress())?;
    if global.json {
        // A program may not look at the list in the document.
        global.warnings.add_all(&report.warnings);
        global.print_json("repair", &report);
    } else {
        output::print(&text(&report));
        output::print(&if args.dry_run {
            "dry run: nothing was written\n".to_string()
        } else {
            format!(
                "wrote {}\n{}",
                clean(&args.destination.display().to_string()),
                verification_text(&report.verification)
            )
        });
    }
    Ok(Outcome::Ok)
}

/// Formats the outcomes of the protected tensors, grouped.
pub(super) fn text(report: &RepairReport) -> String {
    let mut rows = table(&["outcome", ">tensors", "first", "meaning"]);
    for (fate, word, meaning) in [
        (
            Fate::Restored,
            "restored",
            "was the bf16 rounding of the original; has the original's f32 bits again",
        ),
        (
            Fate::RestoredFromMaster,
            "restored from master",
            "was the bf16 rounding of the original's fp32 master weights (optimizer state); has their bits",
        ),
        (Fate::Intact, "intact", "already has the original's bits"),
        (
            Fate::Trained,
            "kept, trained since",
            "not a rounding of the original: trained since then, so left unchanged",
        ),
        (Fate::NoOriginal, "kept, no original", "the original has no F32 tensor of this name"),
    ] {
        let of: Vec<_> = report.tensors.iter().filter(|t| t.outcome == fate).collect();
        if let Some(first) = of.first() {
            rows.add_row([
                word.to_string(),
                count(of.len() as u64),
                clean(&first.tensor),
                meaning.to_string(),
            ]);
        }
    }
    let protected = plural(report.tensors.len(), "protected tensor");
    let mut text = match report.tensors.is_empty() {
        true => "nothing to repair: no protected tensors\n".to_string(),
        false => format!("{protected}\n{rows}\n"),
    };
    text.extend(report.warnings.iter().map(|warning| format!("WARNING: {}\n", clean(warning))));
    text.extend(report.remote.as_ref().map(remote_text));
    text
}
