//! `ballast convert`

use std::path::{Path, PathBuf};

use ballast_checkpoint::DEFAULT_SHARD_BYTES;
use ballast_checkpoint::FileFormat;
use ballast_checkpoint::Verification;
use ballast_checkpoint::convert::{ConvertOptions, ConvertPlan, ConvertReport, execute, plan};
use ballast_checkpoint::fp8;
use ballast_checkpoint::gguf::{AdapterOptions, convert_adapter};
use ballast_checkpoint::layout::{Form, LayoutRequest, Naming};
use ballast_contract::Dtype;
use ballast_model::AdapterSettings;
use bytesize::ByteSize;
use clap::{Args, ValueEnum};

use super::inspect::layout_words;
use super::{Global, PolicyArg, open_whole};
use crate::exit::Outcome;
use crate::output::{self, bytes, clean, count, patterns, plural, table};

/// Convert a checkpoint's layout, dtype or shards; protected tensors stay or become F32.
#[derive(Args)]
pub(crate) struct ConvertArgs {
    /// Checkpoint: a folder, an index, a safetensors file, hf://ORG/NAME[@REVISION] or a URL; with --base, the
    /// folder of a LoRA adapter.
    source: PathBuf,
    /// Output folder, or a file ending in .safetensors or .gguf (for llama.cpp).
    destination: PathBuf,
    /// Base model of a LoRA adapter that is written as GGUF.
    #[arg(long, value_name = "CKPT")]
    base: Option<PathBuf>,
    /// Layout to write [default: the source's].
    #[arg(long, value_name = "LAYOUT")]
    layout: Option<LayoutArg>,
    /// dtype of float tensors that are not protected; protected ones are always F32. FP8 weights are
    /// dequantized by bf16, f16 and f32; fp8 quantizes the weights that releases quantize, with a scale per
    /// block of 128 x 128, and makes the others BF16. q8_0 is for GGUF
    /// only.
    #[arg(long, default_value = "keep")]
    dtype: DtypeArg,
    #[command(flatten)]
    policy: PolicyArg,
    /// Form of the linear-attention input projections: split (Qwen3.5) or fused (Qwen3-Next) [default: the
    /// source's].
    #[arg(long)]
    projections: Option<FormArg>,
    /// Form of the experts: one tensor each, or one for all [default: the source's].
    #[arg(long)]
    experts: Option<FormArg>,
    /// Number of tensor-parallel ranks to write (megatron only).
    #[arg(long, value_name = "N")]
    tp: Option<usize>,
    /// Number of expert-parallel ranks to write (megatron only): each has a part of the experts.
    #[arg(long, value_name = "N")]
    ep: Option<usize>,
    /// Store Megatron's out_norm minus one [default: as the source says, else true].
    #[arg(long, value_name = "BOOL")]
    zero_centered_gamma: Option<bool>,
    /// File format: safetensors; Megatron's torch_dist or legacy torch (with --layout megatron); dcp, for
    /// torch.distributed.checkpoint and FSDP2.
    #[arg(long, default_value = "safetensors")]
    format: FormatArg,
    /// Largest size of a shard, such as 500MB, 5GB or 2GiB [default: 5GB].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_shard_size: Option<u64>,
    /// Allow protected F64 tensors to become F32.
    #[arg(long)]
    narrow_f64: bool,
    /// Show the plan and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Replace an existing checkpoint at the destination.
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum LayoutArg {
    Hf,
    Nemo,
    Megatron,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormatArg {
    Safetensors,
    #[value(name = "torch_dist")]
    TorchDist,
    Torch,
    Dcp,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormArg {
    Split,
    Fused,
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    Keep,
    Bf16,
    F16,
    F32,
    Fp8,
    #[value(name = "q8_0")]
    Q8,
}

impl DtypeArg {
    fn dtype(self) -> Option<Dtype> {
        match self {
            DtypeArg::Keep => None,
            // Weights that releases do not quantize are BF16 there.
            DtypeArg::Bf16 | DtypeArg::Fp8 => Some(Dtype::Bf16),
            DtypeArg::F16 => Some(Dtype::F16),
            DtypeArg::F32 => Some(Dtype::F32),
            DtypeArg::Q8 => Some(Dtype::Q8_0),
        }
    }
}

/// Parses a size such as `5GB`, `512MiB` or `1000000`.
fn parse_size(text: &str) -> Result<u64, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("a shard must have at least one byte".into()),
        Ok(ByteSize(bytes)) => Ok(bytes),
        Err(_) => Err("must be a number with a unit (B, KB, MB, GB, KiB, MiB or GiB), such as 5GB".into()),
    }
}

pub(crate) fn run(args: ConvertArgs, global: &Global) -> anyhow::Result<Outcome> {
    if let Some(base) = &args.base {
        return run_adapter(&args, base, global);
    }
    let is_gguf = args.destination.extension().is_some_and(|e| e == ballast_gguf::EXTENSION);
    if is_gguf {
        refuse_layout_options(&args)?;
    }
    let stored = open_whole(&args.source, global)?;
    let policy = args.policy.load_for(&stored, global)?;
    let source = match args.dtype {
        DtypeArg::Keep if !is_gguf => stored.clone(),
        DtypeArg::Fp8 => fp8::quantized(&stored, &policy)?,
        _ => fp8::dequantized(&stored)?,
    };
    let form = |f: FormArg| match f {
        FormArg::Split => Form::Split,
        FormArg::Fused => Form::Fused,
    };
    let options = ConvertOptions {
        layout: LayoutRequest {
            naming: match args.layout {
                _ if is_gguf => Some(Naming::Gguf),
                Some(LayoutArg::Hf) => Some(Naming::Hf),
                Some(LayoutArg::Nemo) => Some(Naming::Nemo),
                Some(LayoutArg::Megatron) => Some(Naming::Megatron),
                None => None,
            },
            projections: args.projections.map(form),
            experts: args.experts.map(form),
            ranks: args.tp,
            expert_ranks: args.ep,
            zero_centered_gamma: args.zero_centered_gamma,
        },
        dtype: args.dtype.dtype(),
        narrow_f64: args.narrow_f64,
        format: match args.format {
            FormatArg::Safetensors => FileFormat::Safetensors,
            FormatArg::TorchDist => FileFormat::TorchDist,
            FormatArg::Torch => FileFormat::Torch,
            FormatArg::Dcp => FileFormat::Dcp,
        },
        max_shard_bytes: args.max_shard_size.unwrap_or(DEFAULT_SHARD_BYTES),
        force: args.force,
        ..ConvertOptions::new(policy)
    };
    let mut plan = plan(&source, &options)?;
    plan.notes.extend(fp8::note(&stored, &source));
    if args.dry_run {
        if global.json {
            global.print_json("convert-plan", &plan);
        } else {
            output::print(&plan_text(&plan));
            output::print("dry run: nothing was written\n");
        }
        return Ok(Outcome::Ok);
    }
    if !global.json {
        output::print(&plan_text(&plan));
    }
    let report = execute(&source, plan, &args.destination, &options, &global.progress())?;
    if global.json {
        global.print_json("convert", &report);
    } else {
        output::print(&report_text(&report, options.format, &args.destination.display().to_string()));
    }
    Ok(Outcome::Ok)
}

/// Returns an error for options that a GGUF file has no choice in.
fn refuse_layout_options(args: &ConvertArgs) -> anyhow::Result<()> {
    let options = [
        ("--layout", args.layout.is_some()),
        ("--projections", args.projections.is_some()),
        ("--experts", args.experts.is_some()),
        ("--tp", args.tp.is_some()),
        ("--ep", args.ep.is_some()),
        ("--format", !matches!(args.format, FormatArg::Safetensors)),
        ("--max-shard-size", args.max_shard_size.is_some()),
        ("--dtype fp8", matches!(args.dtype, DtypeArg::Fp8)),
    ];
    match options.iter().find(|(_, is_set)| *is_set) {
        Some((option, _)) => {
            let problem =
                format!("{option} does not apply to a GGUF file, which llama.cpp reads in one form");
            Err(ballast_files::Error::Refused(problem).into())
        }
        None => Ok(()),
    }
}

/// Converts a LoRA adapter for llama.cpp.
fn run_adapter(args: &ConvertArgs, base: &Path, global: &Global) -> anyhow::Result<Outcome> {
    if args.dry_run {
        let problem = "--dry-run does not apply to an adapter";
        return Err(ballast_files::Error::Refused(problem.into()).into());
    }
    refuse_layout_options(args)?;
    let settings = AdapterSettings::read(&args.source)?;
    let (adapter, base) = (open_whole(&args.source, global)?, open_whole(base, global)?);
    let options = AdapterOptions {
        rank: settings.rank as u64,
        scale: settings.scale,
        dtype: args.dtype.dtype(),
        force: args.force,
    };
    let report = convert_adapter(&adapter, &base, &options, &args.destination, &global.progress())?;
    if global.json {
        global.print_json("convert-adapter", &report);
    } else {
        output::print(&format!(
            "wrote    {} of {} adapted modules ({}) to {}\n{}",
            bytes(report.bytes),
            count(report.modules as u64),
            report.architecture,
            clean(&args.destination.display().to_string()),
            verification_text(&report.verification)
        ));
    }
    Ok(Outcome::Ok)
}

pub(super) fn plan_text(plan: &ConvertPlan) -> String {
    let mut text = format!(
        "layout   {} -> {}\ntensors  {}, {}; {} protected\n",
        layout_words(&plan.from),
        layout_words(&plan.to),
        count(plan.tensors as u64),
        bytes(plan.bytes),
        count(plan.protected.len() as u64)
    );
    if plan.dtype_changes.is_empty() {
        text += "dtypes   unchanged\n";
    } else {
        let mut changes = table(&["from", "to", ">count", "tensors", "reason"]);
        for change in &plan.dtype_changes {
            let loss = if change.lossy { " (rounds)" } else { "" };
            for (pattern, n) in patterns(&change.tensors) {
                changes.add_row([
                    change.from.to_string(),
                    format!("{}{loss}", change.to),
                    count(n as u64),
                    pattern,
                    clean(&change.reason),
                ]);
            }
        }
        text += &format!("{changes}\n");
    }
    for (why, names) in &plan.left_alone {
        text += &format!("unchanged ({why}): {}\n", listed(names));
    }
    if !plan.carried.is_empty() {
        text += &format!("copied under their own names: {}\n", listed(&plan.carried));
    }
    if !plan.shifted.is_empty() {
        text += &format!("shifted by one in f32 (zero-centered gamma): {}\n", listed(&plan.shifted));
    }
    for note in &plan.notes {
        text += &format!("note: {}\n", clean(note));
    }
    text
}

fn listed(names: &[String]) -> String {
    let patterns = patterns(names);
    let shown: Vec<String> =
        patterns.iter().take(4).map(|(p, n)| if *n > 1 { format!("{p} x{n}") } else { p.clone() }).collect();
    let more =
        if patterns.len() > 4 { format!(", and {} more kinds", patterns.len() - 4) } else { String::new() };
    format!("{} ({}{more})", plural(names.len(), "tensor"), shown.join(", "))
}

pub(super) fn report_text(report: &ConvertReport, format: FileFormat, destination: &str) -> String {
    format!(
        "wrote    {} in {} and {}, to {}\n{}",
        bytes(report.plan.bytes),
        match report.plan.to.naming {
            Naming::Gguf => "one GGUF file".to_string(),
            _ if format == FileFormat::Safetensors => plural(report.files, "safetensors file"),
            _ => plural(report.files, "file of torch"),
        },
        plural(report.sidecars, "other file"),
        clean(destination),
        verification_text(&report.verification)
    )
}

/// Formats the result of the verification.
pub(super) fn verification_text(v: &Verification) -> String {
    let mut parts = vec![format!("{} with the same bits", plural(v.same_bits, "tensor"))];
    if v.same_values > 0 {
        parts.push(format!("{} with the same values in a wider dtype", count(v.same_values as u64)));
    }
    if v.rounded > 0 {
        parts.push(format!("{} rounded as planned", count(v.rounded as u64)));
    }
    if !v.moved.is_empty() {
        parts.push(format!("{} changed by the shift of gamma", count(v.moved.len() as u64)));
    }
    let mut text = format!("verified against the source by reading back: {}\n", parts.join(", "));
    for m in &v.moved {
        text += &format!(
            "  {}: {} of {} values, by at most {:e}\n",
            clean(&m.tensor),
            m.values,
            m.elements,
            m.max_abs
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes_are_parsed_with_their_units() {
        assert_eq!(parse_size("5GB"), Ok(5_000_000_000));
        assert_eq!(parse_size("1.5 MiB"), Ok(3 << 19));
        assert_eq!(parse_size("100"), Ok(100));
        assert!(parse_size("0").is_err() && parse_size("5 parsecs").is_err() && parse_size("GB").is_err());
    }
}
