//! `ballast repair`

use std::path::PathBuf;

use ballast_checkpoint::repair::{Outcome as Fate, RepairReport, repair};
use clap::Args;

use super::convert::verification_text;
use super::{Global, PolicyArg, open};
use crate::exit::Outcome;
use crate::output::{self, clean, count, plural, table};

#[derive(Args)]
pub(crate) struct RepairArgs {
    /// The checkpoint whose protected tensors were rounded.
    checkpoint: PathBuf,
    /// Folder to write, or a file ending in .safetensors.
    destination: PathBuf,
    /// The checkpoint that it came from, with the f32 bits.
    #[arg(long, value_name = "ORIG")]
    original: PathBuf,
    #[command(flatten)]
    policy: PolicyArg,
    /// Show what would be done, and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Replace an existing checkpoint at the destination.
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(args: RepairArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (checkpoint, original) = (open(&args.checkpoint)?, open(&args.original)?);
    let policy = args.policy.load_for(&checkpoint)?;
    let destination = (!args.dry_run).then_some(args.destination.as_path());
    let report = repair(&checkpoint, &original, destination, &policy, args.force, &global.progress())?;
    if global.json {
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

/// The fate of every protected tensor, grouped.
pub(super) fn text(report: &RepairReport) -> String {
    let mut rows = table(&["outcome", ">tensors", "first", "meaning"]);
    for (fate, word, meaning) in [
        (
            Fate::Restored,
            "restored",
            "exactly the bf16 rounding of the original: the original's f32 bits are back",
        ),
        (Fate::Intact, "intact", "already the original's bits"),
        (Fate::Trained, "kept, trained since", "not the rounding of the original: it was trained, and stays"),
        (Fate::NoOriginal, "kept, no original", "the original does not have it in F32"),
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
    if report.tensors.is_empty() {
        "no protected tensor here: nothing to repair\n".into()
    } else {
        format!("{protected}\n{rows}\n")
    }
}
