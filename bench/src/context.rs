//! Cost of context parallelism: sequences that several ranks share. Ranks are threads here; `bench/peers/cluster.py
//! --context` measures processes.
//!
//! ```text
//! cargo run --release -p ballast-bench --bin bench-context -- states --tokens 16384   # a chain of states or a scan
//! cargo run --release -p ballast-bench --bin bench-context -- errors                  # errors of both
//! cargo run --release -p ballast-bench --bin bench-context -- memory --tokens 32768   # plan of a rank
//! cargo run --release -p ballast-bench --bin bench-context -- step --tokens 8192      # two ranks, one process
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::too_many_arguments)] // outputs, then inputs, then sizes

use std::time::Instant;

use ballast_bench::measure::median;
use ballast_cluster::{Kind, threads};
use ballast_kernels::Scratch;
use ballast_kernels::gated_delta_rule as gdn;
use ballast_kernels::gated_delta_rule::reference::Reference;
use ballast_model::{Batch, LossOptions, Model, Plan, Precision, Recompute, Step};
use clap::{Parser, ValueEnum};

#[derive(Parser)]
struct Args {
    case: Case,
    /// Tokens of a sequence; of a rank for `states`
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Number of timed runs
    #[arg(long, default_value_t = 3)]
    repetitions: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum Case {
    States,
    Errors,
    Memory,
    Step,
}

fn main() -> anyhow::Result<()> {
    let Args { case, tokens, repetitions } = Args::parse();
    match case {
        Case::States => a_chain_of_states_against_a_scan_of_affine_maps(tokens, repetitions),
        Case::Errors => errors_of_the_chain_and_of_the_scan(),
        Case::Memory => memory_of_a_rank(tokens),
        Case::Step => a_step_on_two_ranks_against_one_process(tokens, repetitions),
    }
}

fn on_threads<R: Send>(threads: usize, work: impl FnOnce() -> anyhow::Result<R> + Send) -> anyhow::Result<R> {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build()?.install(work)
}

/// Numbers between -1 and 1.
fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) as f64 / (1u64 << 31) as f64 * 2.0 - 1.0) as f32
    };
    (0..n).map(|_| next()).collect()
}

/// Inputs of the delta rule.
struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
}

impl Inputs {
    /// `decay`: the largest -g.
    fn new(dims: gdn::Dims, tokens: usize, decay: f32) -> Inputs {
        let keys = tokens * dims.key_heads * dims.key_dim;
        let gates = |seed| values(seed, tokens * dims.value_heads);
        Inputs {
            q: values(1, keys),
            k: values(2, keys),
            v: values(3, tokens * dims.value_heads * dims.value_dim),
            g: gates(4).iter().map(|x| -decay * x.abs()).collect(),
            beta: gates(5).iter().map(|x| x.abs()).collect(),
        }
    }

    /// The state after `part` of the tokens; `o` takes the outputs.
    fn run(
        &self,
        o: &mut [f32],
        v: &[f32],
        h0: Option<&[f32]>,
        part: std::ops::Range<usize>,
        dims: gdn::Dims,
        heads: Option<(usize, usize)>,
        scratch: &Scratch,
    ) -> anyhow::Result<Vec<f32>> {
        let rows = |width: usize| part.start * width..part.end * width;
        let (keys, heads_v) = (dims.key_heads * dims.key_dim, dims.value_heads);
        let (q, k) = (&self.q[rows(keys)], &self.k[rows(keys)]);
        let gates = gdn::Gates::Given { g: &self.g[rows(heads_v)], beta: &self.beta[rows(heads_v)] };
        let cu_seqlens = [0, part.len()];
        let input = gdn::Input { q, k, v, gates, h0, cu_seqlens: &cu_seqlens };
        let mut ht = vec![0.0; heads_v * dims.state_len()];
        let options = gdn::Options { heads, ..gdn::Options::default() };
        let output = gdn::Output { o, ht: Some(&mut ht) };
        gdn::gated_delta_rule_forward(output, None, &input, dims, &options, scratch)?;
        Ok(ht)
    }
}

/// Identity matrices, one for each head.
fn identities(dims: gdn::Dims) -> Vec<f32> {
    let mut all = vec![0.0; dims.value_heads * dims.key_dim * dims.key_dim];
    for one in all.chunks_mut(dims.key_dim * dims.key_dim) {
        (0..dims.key_dim).for_each(|i| one[i * dims.key_dim + i] = 1.0);
    }
    all
}

fn a_chain_of_states_against_a_scan_of_affine_maps(tokens: usize, repetitions: usize) -> anyhow::Result<()> {
    for (name, key_heads, value_heads) in [("58 M hybrid", 8, 8), ("16 key and 32 value heads", 16, 32)] {
        let dims = gdn::Dims { key_heads, value_heads, key_dim: 128, value_dim: 128 };
        let inputs = Inputs::new(dims, tokens, 0.1);
        let scratch = Scratch::new(0);
        on_threads(1, || {
            let mut o = vec![0.0; inputs.v.len()];
            let h0 = values(9, value_heads * dims.state_len());
            let mut run = |v: &[f32], h0: &[f32], heads| {
                inputs.run(&mut o, v, Some(h0), 0..tokens, dims, heads, &scratch).map(drop)
            };
            let whole = median(repetitions, || run(&inputs.v, &h0, None))?;
            let by_head = median(repetitions, || {
                (0..key_heads).try_for_each(|head| run(&inputs.v, &h0, Some((head, 1))))
            })?;
            // The map S' = M S + B of the part: B from a state of zero, M from the identity without values.
            let (zero, none) = (vec![0.0; h0.len()], vec![0.0; inputs.v.len()]);
            let of_b = median(repetitions, || run(&inputs.v, &zero, None))?;
            let of_m = median(repetitions, || run(&none, &identities(dims), None))?;
            println!(
                "{name}, {tokens} tokens: forward {whole:.3} s, head by head {by_head:.3} s ({:.2}x); the affine map \
                 costs {:.3} s more ({:.2}x); a rank starts {:.3} s behind the one before",
                by_head / whole,
                of_b + of_m,
                (of_b + of_m + whole) / whole,
                by_head / key_heads as f64
            );
            Ok(())
        })?;
    }
    Ok(())
}

fn errors_of_the_chain_and_of_the_scan() -> anyhow::Result<()> {
    let dims = gdn::Dims { key_heads: 1, value_heads: 1, key_dim: 128, value_dim: 128 };
    let (tokens, parts) = (2048, 4);
    for decay in [0.0, 0.01, 0.3] {
        let inputs = Inputs::new(dims, tokens, decay);
        let wide = |x: &[f32]| x.iter().map(|x| *x as f64).collect::<Vec<f64>>();
        let reference = Reference {
            q: wide(&inputs.q),
            k: wide(&inputs.k),
            v: wide(&inputs.v),
            g: wide(&inputs.g),
            beta: wide(&inputs.beta),
            h0: vec![0.0; dims.state_len()],
            cu_seqlens: vec![0, tokens],
            scale: (dims.key_dim as f64).powf(-0.5),
            l2norm: true,
        };
        let exact = reference.run(dims, &vec![0.0; tokens * dims.value_dim], &vec![0.0; dims.state_len()]).ht;
        let error = |state: &[f32]| {
            let square = |(a, b): (&f32, &f64)| (*a as f64 - b) * (*a as f64 - b);
            let size: f64 = exact.iter().map(|b| b * b).sum();
            (state.iter().zip(&exact).map(square).sum::<f64>() / size).sqrt()
        };
        let scratch = Scratch::new(0);
        let part = tokens / parts;
        let mut o = vec![0.0; part * dims.value_dim];
        let mut pass = |v: &[f32], h0: &[f32], number: usize| {
            inputs.run(&mut o, v, Some(h0), number * part..(number + 1) * part, dims, None, &scratch)
        };
        let v_of =
            |number: usize| &inputs.v[number * part * dims.value_dim..(number + 1) * part * dims.value_dim];
        let (mut chain, mut scan) = (vec![0.0; dims.state_len()], vec![0.0; dims.state_len()]);
        for number in 0..parts {
            chain = pass(v_of(number), &chain, number)?;
            let b = pass(v_of(number), &vec![0.0; dims.state_len()], number)?;
            let m = pass(&vec![0.0; part * dims.value_dim], &identities(dims), number)?;
            let mut next = b;
            for (i, row) in next.chunks_mut(dims.value_dim).enumerate() {
                for (m, state) in
                    m[i * dims.key_dim..].iter().zip(scan.chunks(dims.value_dim)).take(dims.key_dim)
                {
                    row.iter_mut().zip(state).for_each(|(to, x)| *to += m * x);
                }
            }
            scan = next;
        }
        println!("decay up to {decay}: chain {:.1e}, scan {:.1e}", error(&chain), error(&scan));
    }
    Ok(())
}

/// A hybrid with the widths of the 58 M model, without its vocabulary.
fn hybrid(layers: usize, full_every: usize) -> anyhow::Result<Model> {
    let text = serde_json::json!({
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 512,
        "hidden_size": 512, "num_hidden_layers": layers, "intermediate_size": 1792,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": true,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "full_attention_interval": full_every,
        "rope_parameters": { "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25 },
    });
    Ok(Model::init(&text, |_| Ok(Precision::f32()), 7)?)
}

fn memory_of_a_rank(tokens: usize) -> anyhow::Result<()> {
    let (mib, model) = (1048576.0, hybrid(8, 4)?);
    let cu_seqlens = [0, tokens];
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let plan = |part| {
            let step = Step { part, ..Step::new(&cu_seqlens, recompute) };
            Plan::new(&model.config, model.precision(), &step)
        };
        let whole = plan(None)?;
        for of in [2, 4] {
            let all: Vec<Plan> = (0..of).map(|index| plan(Some((index, of)))).collect::<Result<_, _>>()?;
            let Some(part) = all.iter().max_by_key(|plan| plan.total()) else { continue };
            println!(
                "{} tokens, {recompute:?}: {:.0} MiB ({:.0} kept) on one rank, {:.0} ({:.0}) at most on {of}: {:.2}x",
                cu_seqlens[1],
                whole.total() as f64 / mib,
                whole.kept() as f64 / mib,
                part.total() as f64 / mib,
                part.kept() as f64 / mib,
                part.total() as f64 / whole.total() as f64
            );
        }
    }
    Ok(())
}

fn a_step_on_two_ranks_against_one_process(tokens: usize, repetitions: usize) -> anyhow::Result<()> {
    let ids: Vec<u32> = (0..tokens as u32).map(|i| i * 7919 % 512).collect();
    let batch = Batch::packed(ids, vec![0, tokens])?;
    for (what, layers, full_every) in
        [("3 linear layers", 3, 9), ("3 linear layers and full attention", 4, 4)]
    {
        let step = |model: &Model, batch: &Batch| {
            let (mut grads, options) = (model.grads(), LossOptions::default());
            median(repetitions, || {
                grads.clear();
                model.forward_backward(&mut grads, batch, &options, Recompute::Selective, None)?;
                Ok(())
            })
        };
        let one = on_threads(2, || step(&hybrid(layers, full_every)?, &batch))?;
        let ranks = threads::run(2, |group| {
            on_threads(1, || {
                let mut model = hybrid(layers, full_every)?;
                model.set_context(Some(group.clone()));
                let part = batch.part(group.rank(), 2)?;
                group.barrier()?;
                let (waited, started) = (group.traffic().waited(), Instant::now());
                let seconds = step(&model, &part)?;
                let waiting =
                    (group.traffic().waited() - waited).as_secs_f64() / started.elapsed().as_secs_f64();
                let sent = group.traffic().sent();
                let mib = [Kind::States, Kind::Attention].map(|kind| {
                    sent.get(&kind).copied().unwrap_or(0) as f64 / (1048576 * repetitions) as f64
                });
                Ok((seconds, waiting, mib))
            })
        });
        let ranks: Vec<_> = ranks.into_iter().collect::<anyhow::Result<_>>()?;
        let two = ranks.iter().map(|rank| rank.0).fold(0.0, f64::max);
        println!("{what}, {tokens} tokens: one process {one:.2} s, two ranks {two:.2} s ({:.2}x)", two / one);
        for (rank, (_, waiting, [states, attention])) in ranks.iter().enumerate() {
            println!(
                "  rank {rank}: waited for {:.1} % of a step, sent {states:.2} MiB of states and {attention:.2} MiB for attention",
                100.0 * waiting
            );
        }
    }
    Ok(())
}
