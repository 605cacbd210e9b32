//! `ballast inspect`

use std::path::PathBuf;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::inspect::{InspectReport, inspect};
use ballast_checkpoint::layout::{Form, Layout, Naming, Ranks};
use ballast_files::left_out;
use ballast_format::percent;
use clap::Args;

use super::{Global, PolicyArg, remote_text};
use crate::exit::Outcome;
use crate::output::{self, bytes, clean, count, table};

/// Show a checkpoint's architecture, layout, files, dtypes and protected tensors.
#[derive(Args)]
pub(crate) struct InspectArgs {
    /// Checkpoint: a folder, an index, a safetensors or GGUF file, hf://ORG/NAME[@REVISION] or a URL.
    path: PathBuf,
    /// List every tensor.
    #[arg(long)]
    tensors: bool,
    #[command(flatten)]
    policy: PolicyArg,
}

pub(crate) fn run(args: InspectArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (registry, policy) = args.policy.load(global)?;
    let checkpoint = Checkpoint::open(&args.path)?;
    global.warnings.check_config(&checkpoint);
    let mut report = inspect(&checkpoint, &registry, &policy)?;
    if global.json {
        if !args.tensors {
            report.tensors.clear();
        }
        global.print_json("inspect", &report);
    } else {
        output::print(&text(&report, args.tensors));
    }
    Ok(Outcome::Ok)
}

/// Describes a layout in a few words.
pub(super) fn layout_words(layout: &Layout) -> String {
    let form = |f| if f == Form::Fused { "fused" } else { "split" };
    match layout.naming {
        Naming::Megatron => match layout.ranks {
            Ranks { tensor: 1, expert: 1 } => "megatron, one rank".into(),
            Ranks { tensor, expert: 1 } => format!("megatron, {tensor} tensor-parallel ranks"),
            Ranks { tensor: 1, expert } => format!("megatron, {expert} expert-parallel ranks"),
            Ranks { tensor, expert } => {
                format!("megatron, {tensor} tensor-parallel x {expert} expert-parallel ranks")
            }
        },
        Naming::Gguf => "gguf".into(),
        naming => {
            let name = if naming == Naming::Hf { "hf" } else { "nemo" };
            let projections =
                layout.projections.map(|f| format!(", {} projections", form(f))).unwrap_or_default();
            let experts = layout.experts.map(|f| format!(", {} experts", form(f))).unwrap_or_default();
            format!("{name}{projections}{experts}")
        }
    }
}

fn text(report: &InspectReport, list_tensors: bool) -> String {
    let mut text = format!(
        "architecture  {} (by {})\nlayout        {}\ntensors       {}\nparameters    {}\nsize          {}\n",
        clean(report.architecture.name.as_deref().unwrap_or("unknown")),
        report.architecture.source,
        layout_words(&report.layout),
        count(report.total.tensors),
        count(report.total.parameters),
        bytes(report.total.bytes)
    );
    let mut files = table(&["file", ">tensors", ">size"]);
    for f in &report.files {
        files.add_row([clean(&f.file), count(f.tensors as u64), bytes(f.bytes)]);
    }
    let mut roles = table(&["role", "dtype", ">tensors", ">parameters", ">size", ">share"]);
    for (role, dtype, amount) in &report.by_role {
        let share = percent(amount.bytes as f64 / report.total.bytes.max(1) as f64);
        let cells = [count(amount.tensors), count(amount.parameters), bytes(amount.bytes), share];
        let [tensors, parameters, size, share] = cells;
        roles.add_row([role.to_string(), dtype.to_string(), tensors, parameters, size, share]);
    }
    for (dtype, amount) in &report.by_dtype {
        let [tensors, parameters, size] =
            [count(amount.tensors), count(amount.parameters), bytes(amount.bytes)];
        roles.add_row(["total".to_string(), dtype.to_string(), tensors, parameters, size, String::new()]);
    }
    for (dtype, amount) in &report.state {
        let [tensors, parameters, size] =
            [count(amount.tensors), count(amount.parameters), bytes(amount.bytes)];
        let role = "beside the model (optimizer)".to_string();
        roles.add_row([role, dtype.to_string(), tensors, parameters, size, String::new()]);
    }
    text += &format!("{files}\n{roles}\n");
    if report.protected.is_empty() {
        text += "the policy protects none of these tensors\n";
    } else {
        let mut protected = table(&["protected by", "stored as", "first tensor"]);
        for p in &report.protected {
            let stored: Vec<String> = p.stored.iter().map(|(dtype, n)| format!("{n} x {dtype}")).collect();
            protected.add_row([clean(&p.rule), stored.join(", "), clean(&p.first)]);
        }
        text += &format!("{protected}\n");
    }
    for issue in &report.issues {
        text += &format!("index: {}\n", clean(issue));
    }
    if let Some(line) = left_out::line(&report.left_out) {
        text += &format!("{}\n", clean(&line));
    }
    if list_tensors {
        let mut tensors = table(&["tensor", "dtype", "shape", ">size", "role", "protected by"]);
        for t in &report.tensors {
            let rule = t.rule.clone().unwrap_or_default();
            let cells = [clean(&t.name), t.dtype.to_string(), format!("{:?}", t.shape), bytes(t.bytes)];
            let [name, dtype, shape, size] = cells;
            tensors.add_row([name, dtype, shape, size, t.role.to_string(), rule]);
        }
        text += &format!("{tensors}\n");
    }
    text + &report.remote.as_ref().map(remote_text).unwrap_or_default()
}
