//! `ballast train --dry-run --ranks N`: the plan of a run on a cluster, made on one machine.

use ballast_format::{duration, estimate, percent};
use ballast_model::memory;
use ballast_train::plan::{Alternative, ClusterPlan, Rates, measured_flops};
use ballast_train::{TrainConfig, setup};
use clap::Args;
use serde_json::json;

use super::Global;
use crate::exit::{Outcome, Usage};
use crate::output::{self, bytes, count, plural, table};

/// Most ranks of a plan.
const MOST_RANKS: usize = 1 << 16;

#[derive(Args)]
pub(super) struct PlanArgs {
    /// With --dry-run: plan the run for this many ranks: memory, bytes sent and time of a step.
    #[arg(long, value_name = "N", requires = "dry_run")]
    pub(super) ranks: Option<usize>,
    /// Memory of a rank in GiB [default: that of this machine].
    #[arg(long, value_name = "GIB", requires = "ranks")]
    memory: Option<f64>,
    /// Rate of a rank in GFLOP/s [default: measured here].
    #[arg(long, value_name = "GFLOPS", requires = "ranks")]
    flops: Option<f64>,
    /// Network bandwidth of a rank in GB/s, each direction.
    #[arg(long, value_name = "GB", default_value_t = 12.5, requires = "ranks")]
    bandwidth: f64,
    /// Network latency in microseconds.
    #[arg(long, value_name = "US", default_value_t = 5.0, requires = "ranks")]
    latency: f64,
}

impl PlanArgs {
    /// Returns an error that names the first figure that is not positive.
    fn check(&self, ranks: usize) -> Result<(), Usage> {
        if ranks == 0 || ranks > MOST_RANKS {
            return Err(Usage(format!("--ranks must be 1 to {MOST_RANKS}, got {ranks}")));
        }
        let figures = [
            ("--memory", self.memory.unwrap_or(1.0)),
            ("--flops", self.flops.unwrap_or(1.0)),
            ("--bandwidth", self.bandwidth),
            ("--latency", self.latency),
        ];
        match figures.into_iter().find(|(_, value)| !(*value > 0.0 && value.is_finite())) {
            Some((flag, value)) => Err(Usage(format!("{flag} must be above 0, got {value}"))),
            None => Ok(()),
        }
    }
}

/// Shows the plan of a run on `ranks` ranks. Reads no tensors and writes nothing.
pub(super) fn run(
    config: &TrainConfig,
    args: &PlanArgs,
    ranks: usize,
    global: &Global,
) -> anyhow::Result<Outcome> {
    args.check(ranks)?;
    let model = setup::outline(config)?;
    global.warnings.add_all(&model.warnings);
    let storage = setup::precision(config, &model.config)?.params;
    let flops = match args.flops {
        Some(billions) => 1e9 * billions,
        None => measured_flops(storage)?,
    };
    let rates = Rates { flops, bandwidth: 1e9 * args.bandwidth, latency: 1e-6 * args.latency };
    let limit = args.memory.map(|gib| (gib * f64::from(1 << 30)) as u64).or_else(memory::available);
    let plan = ClusterPlan::new(config, &model, ranks, &rates)?;
    let fits = limit.is_none_or(|limit| plan.needed() <= limit);
    let others = match limit.filter(|_| !fits) {
        Some(limit) => Alternative::find(config, &model, ranks, &rates, limit)?,
        None => Vec::new(),
    };
    let parameters: usize = model.specs.all().map(|spec| spec.len()).sum();
    let measured = args.flops.is_none();
    if global.json {
        let rows = plan.memory.rows.iter().map(|(what, bytes)| json!({ "what": what, "bytes": bytes }));
        global.print_json(
            "train-plan",
            &json!({
                "model_type": model.config.model_type,
                "parameters": parameters,
                "ranks": ranks,
                "tokens_per_step": plan.tokens,
                "fullest_rank": plan.fullest_rank,
                "memory": rows.collect::<Vec<_>>(),
                "memory_total_bytes": plan.memory.total(),
                "memory_loading_bytes": plan.loading_bytes,
                "memory_limit_bytes": limit,
                "fits": fits,
                "sent": plan.sent,
                "time": plan.time,
                "rates": { "flops": rates.flops, "flops_measured": measured, "bandwidth": rates.bandwidth,
                           "latency": rates.latency },
                "alternatives": others,
            }),
        );
        return Ok(Outcome::Ok);
    }
    let mut text = format!(
        "{}: {} parameters, {}, {} tokens per step\n\n",
        model.config.model_type,
        count(parameters as u64),
        plural(ranks, "rank"),
        count(plan.tokens)
    );
    text += &format!("{}\n\n", memory_table(&plan));
    if !plan.sent.is_empty() {
        let mut rows = table(&["sent per step", ">by a rank, at most", ">by all ranks"]);
        for sent in &plan.sent {
            rows.add_row([sent.kind.to_string(), bytes(sent.rank_bytes), bytes(sent.all_bytes)]);
        }
        text += &format!("{rows}\n\n");
    }
    text += &time_text(&plan, &rates, measured, config.steps);
    text += &fits_text(&plan, limit, &others);
    output::print(&text);
    Ok(Outcome::Ok)
}

fn memory_table(plan: &ClusterPlan) -> String {
    let heading = format!("memory of rank {}, the fullest", plan.fullest_rank);
    let mut rows = table(&[&heading, ">size"]);
    for (what, size) in &plan.memory.rows {
        rows.add_row([what.clone(), bytes(*size)]);
    }
    rows.add_row(["total".to_string(), bytes(plan.memory.total())]);
    rows.add_row(["while the model is loaded, in f32".to_string(), bytes(plan.loading_bytes)]);
    rows.to_string()
}

fn time_text(plan: &ClusterPlan, rates: &Rates, measured: bool, steps: u64) -> String {
    let time = &plan.time;
    let mut text = format!(
        "a step takes {} ({} tokens/s); {} steps take about {}\n",
        duration(time.total),
        count((plan.tokens as f64 / time.total.max(1e-9)) as u64),
        steps,
        estimate(time.total * steps as f64)
    );
    text += &format!(
        "  computing {} ({:.1} TFLOP at {:.0} GFLOP/s per rank, {})\n",
        duration(time.compute),
        time.flops / 1e12,
        rates.flops / 1e9,
        if measured { "measured here" } else { "as given" }
    );
    if time.messages > 0.0 {
        text += &format!(
            "  messages {} ({} GB/s, {} us), {} hidden behind computing, waiting {}\n",
            duration(time.messages),
            rates.bandwidth / 1e9,
            (1e6 * rates.latency).round(),
            percent(1.0 - time.waiting / time.messages),
            duration(time.waiting)
        );
    }
    text
}

fn fits_text(plan: &ClusterPlan, limit: Option<u64>, others: &[Alternative]) -> String {
    let Some(limit) = limit else { return String::new() };
    if plan.needed() <= limit {
        return format!("memory per rank {}: the run fits\n", bytes(limit));
    }
    let mut text = format!("memory per rank {}: the run does NOT fit\n", bytes(limit));
    if others.is_empty() {
        return text + "no division, recomputation or number of ranks that was tried fits\n";
    }
    let mut rows = table(&[">ranks", "settings that fit", ">memory", ">step"]);
    for other in others {
        let settings = if other.settings.is_empty() { "as given".into() } else { other.settings.join(" ") };
        rows.add_row([other.ranks.to_string(), settings, bytes(other.bytes), duration(other.seconds)]);
    }
    text += &format!("{rows}\n");
    text
}
