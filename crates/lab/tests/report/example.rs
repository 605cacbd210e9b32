//! Synthetic findings with data for every section: a hybrid of twelve layers, every fourth with softmax
//! attention.

use ballast_lab::Findings;
use ballast_lab::findings::*;

const LAYERS: usize = 12;
const HEADS: usize = 16;

/// Name, description, kind, mean KL.
const RUNS: [(&str, &str, Kind, f64); 21] = [
    ("logits=f16", "attention logits in f16, everything else f32", Kind::Site, f64::NAN),
    ("hf-bf16", "a whole-model cast to bf16, as transformers runs it", Kind::Preset, 2.1e-2),
    ("other/<script>alert(1)</script>", "another checkpoint", Kind::Checkpoint, 1.4e-2),
    (
        "maxtext-default",
        "bf16 storage, strict contract; qk product and attention logits bf16",
        Kind::Preset,
        9.7e-3,
    ),
    ("nemo", "bf16 storage; A_log and dt_bias f32; a, b and the router's logits bf16", Kind::Preset, 6.2e-3),
    (
        "megatron",
        "bf16 storage; A_log and out_norm f32; a, b and the router's logits bf16",
        Kind::Preset,
        6.1e-3,
    ),
    ("A_log=bf16,qk_product=bf16", "as asked for", Kind::Several, 5.5e-3),
    ("bf16", "bf16 storage, strict contract, every site f32", Kind::Preset, 5.0e-3),
    ("norms", "the output of every norm in bf16", Kind::Site, 1.1e-3),
    ("qk_product", "q.k of softmax attention in bf16", Kind::Site, 8.0e-4),
    ("A_log", "A_log rounded to bf16", Kind::Tensor, 3.3e-4),
    ("logits", "attention logits in bf16", Kind::Site, 2.9e-4),
    ("dt_bias", "dt_bias rounded to bf16", Kind::Tensor, 1.9e-4),
    ("decay_gate", "g in bf16", Kind::Site, 1.5e-4),
    ("state", "the recurrent state in bf16", Kind::Site, 7.5e-5),
    ("l2norm", "normalized q and k in bf16", Kind::Site, 4.0e-5),
    ("beta", "sigmoid(b) in bf16", Kind::Site, 2.2e-5),
    ("loss", "output logits in bf16", Kind::Site, 1.7e-6),
    ("f32", "everything in f32", Kind::Preset, 2.4e-11),
    ("out_norm", "out_norm rounded to bf16", Kind::Tensor, 2.4e-11),
    ("router", "the router's logits in bf16", Kind::Site, 2.4e-11),
];

/// Findings with data for every section.
pub(super) fn findings() -> Findings {
    let runs: Vec<Run> = RUNS.iter().enumerate().map(|(index, case)| run(index, case)).collect();
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    Findings {
        model: "example/Hybrid-<b>0.8B</b>".into(),
        model_type: "qwen3_5".into(),
        parameters: 812_345_678,
        layers: LAYERS,
        input: Input {
            source: "the embedded text".into(),
            tokens: 8192,
            sequences: 4,
            longest: 2048,
            predicted: 8188,
        },
        reference: Reference { arithmetic: "f64".into(), loss: 2.413, perplexity: 2.413_f64.exp() },
        runs,
        protected: protected(),
        decays: linear_layers().flat_map(decays).collect(),
        attention: softmax_layers().map(logits).collect(),
        l2norm: [8192, 32768, 131_072]
            .map(|tokens| L2NormBytes {
                tokens,
                inside: tokens as u64 * 36_864,
                outside: tokens as u64 * 75_264,
            })
            .to_vec(),
        training: Some(training(&names)),
        decoding: decoding(&names),
        answers: answers(),
        notes: vec![
            "A site that is rounded inside a kernel shows first in what the kernel gives.".into(),
            "Text from outside: </p><script>alert(2)</script> & \u{202e}more.".into(),
        ],
        seconds: 312.4,
        peak_memory_bytes: Some(6_543_210_987),
    }
}

/// A pseudo-random number in 0..1 from its arguments.
fn noise(a: usize, b: usize) -> f64 {
    let mut mixed = (a as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (b as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    for _ in 0..3 {
        mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
    }
    (mixed >> 40) as f64 / (1_u64 << 24) as f64
}

fn is_softmax(layer: usize) -> bool {
    layer % 4 == 3
}

fn linear_layers() -> impl Iterator<Item = usize> {
    (0..LAYERS).filter(|layer| !is_softmax(*layer))
}

fn softmax_layers() -> impl Iterator<Item = usize> {
    (0..LAYERS).filter(|layer| is_softmax(*layer))
}

fn run(index: usize, (name, what, kind, kl): &(&str, &str, Kind, f64)) -> Run {
    let is_floor = *kl < 1e-10;
    let broken = kl.is_nan();
    let error = if broken { 3e-3 } else { kl.sqrt() };
    let rounded_rate = ["A_log", "hf-bf16"].contains(name) || name.starts_with("A_log=");
    Run {
        name: name.to_string(),
        what: what.to_string(),
        kind: *kind,
        loss: 2.413 + 0.3 * kl,
        perplexity: (2.413 + 0.3 * kl).exp(),
        loss_difference: if *name == "norms" { -2e-5 } else { 0.3 * kl },
        kl: Spread { mean: *kl, p99: 9.0 * kl, max: 140.0 * kl },
        top1_agreement: if is_floor { 1.0 } else { 1.0 - (0.9 * error).min(0.4) },
        first_difference: match (is_floor, kind) {
            (true, _) => None,
            (_, Kind::Tensor) => Some(format!("param.layers.0.linear_attn.{name}")),
            (_, Kind::Site) => Some(format!("layers.3.self_attn.{name}")),
            _ => Some("embed".into()),
        },
        not_finite: broken.then(|| NotFinite {
            site: "layers.7.self_attn.logits".into(),
            count: 1234,
            dtype: "f16".into(),
        }),
        by_layer: (0..LAYERS)
            .map(|layer| LayerError { layer, error: layer_error(index, layer, error, is_floor, broken) })
            .collect(),
        sites: sites(index, error, is_floor, broken),
        by_position: by_position(index, *kl, error, rounded_rate),
        decay: linear_layers().flat_map(|layer| decay_errors(layer, rounded_rate, error)).collect(),
        attention: softmax_layers().map(|layer| attention_error(layer, error, is_floor)).collect(),
        indexer: softmax_layers().map(|layer| indexer_error(layer, error, is_floor)).collect(),
        gradients: gradients(index, error, broken),
        gradient_error: Some(match (broken, is_floor) {
            (true, _) => f64::INFINITY,
            (_, true) => 2.7 * error,
            _ => 2.7 * error * (0.8 + noise(index, 4)),
        }),
        indexer_gradient_error: Some(if broken { f64::NAN } else { 5.0 * error * (0.5 + noise(index, 5)) }),
    }
}

fn layer_error(index: usize, layer: usize, error: f64, is_floor: bool, broken: bool) -> f64 {
    match layer {
        _ if is_floor => 2e-7 * (1.0 + layer as f64),
        7.. if broken => f64::NAN,
        _ => error * (0.2 + 0.1 * layer as f64) * (0.8 + 0.4 * noise(index, layer)),
    }
}

fn sites(index: usize, error: f64, is_floor: bool, broken: bool) -> Vec<SiteError> {
    let site = |site: String, place: usize| SiteError {
        site,
        dtype: if is_floor { "f32" } else { "bf16" }.into(),
        error: layer_error(index, place, error, is_floor, broken),
        max_abs: 30.0 * layer_error(index, place, error, is_floor, broken),
        largest: 30.0,
    };
    let mut sites = vec![site("embed".into(), 0)];
    for layer in 0..LAYERS {
        let names: &[&str] = match is_softmax(layer) {
            true => &["self_attn.q", "self_attn.k", "self_attn.logits", "self_attn.o"],
            false => &["linear_attn.g", "linear_attn.beta", "linear_attn.o"],
        };
        for name in ["input_layernorm"].iter().chain(names).chain(&["mlp.out", "out"]) {
            sites.push(site(format!("layers.{layer}.{name}"), layer));
        }
    }
    sites.push(site("logits".into(), LAYERS));
    sites
}

fn by_position(index: usize, kl: f64, error: f64, grows: bool) -> Vec<PositionError> {
    let edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];
    (edges.windows(2).enumerate())
        .map(|(bucket, edge)| {
            let lift = if grows { 1.0 + 0.3 * bucket as f64 } else { 1.0 + 0.3 * noise(index, bucket) };
            PositionError {
                from: edge[0],
                to: edge[1],
                hidden: error * lift,
                recurrence: Some(0.6 * error * lift),
                kl: kl * lift * (0.6 + 0.8 * noise(bucket, index)),
            }
        })
        .collect()
}

fn half_life(layer: usize, head: usize) -> f64 {
    if (layer, head) == (4, 3) { f64::INFINITY } else { 10f64.powf(-0.5 + 4.0 * noise(layer, head)) }
}

fn decays(layer: usize) -> impl Iterator<Item = Decay> {
    (0..HEADS).map(move |head| {
        let half_life = half_life(layer, head);
        Decay { layer, head, rate: 1.0 + 15.0 * noise(head, layer), per_token: 0.693 / half_life, half_life }
    })
}

fn decay_errors(layer: usize, rounded: bool, error: f64) -> impl Iterator<Item = DecayError> {
    (0..HEADS).map(move |head| {
        let rate_error = if rounded { 0.008 * (noise(head, layer + 99) - 0.5) } else { 3e-8 };
        let per_token_error = rate_error + 0.01 * error * (noise(layer, head) - 0.5);
        DecayError {
            layer,
            head,
            rate_error,
            per_token_error,
            half_life: half_life(layer, head) / (1.0 + per_token_error),
        }
    })
}

fn logits(layer: usize) -> LogitRange {
    let (min, max) = (-30.0 - 20.0 * layer as f64, 20.0 + 26.0 * layer as f64);
    let bins = 64;
    let width = (max - min) / bins as f64;
    let histogram = (0..bins).map(|bin| {
        let from = min + bin as f64 * width;
        (
            from,
            (2e6 * (-(from / (8.0 + 5.0 * layer as f64)).powi(2)).exp()) as u64 + u64::from(bin == bins - 1),
        )
    });
    LogitRange {
        layer,
        min,
        max,
        largest: max.max(-min),
        bf16_ulp: 2f64.powf(max.max(-min).log2().floor() - 7.0),
        f16_ulp: Some(2f64.powf(max.max(-min).log2().floor() - 10.0)),
        histogram: histogram.collect(),
        rows: 65_536,
    }
}

fn attention_error(layer: usize, error: f64, is_floor: bool) -> AttentionError {
    let share = if is_floor || error < 0.01 { 0.0 } else { 0.2 * error * (1.0 + layer as f64) };
    AttentionError { layer, largest: 300.0, max_abs: 40.0 * error, top_key_changed: share, ties: 0.4 * share }
}

fn indexer_error(layer: usize, error: f64, is_floor: bool) -> IndexerError {
    let overlap = if is_floor { 1.0 } else { 1.0 - 0.5 * error * (1.0 + 0.1 * layer as f64) };
    IndexerError { layer, overlap, same: overlap.powi(12), queries: 6144 }
}

fn gradients(index: usize, error: f64, broken: bool) -> Vec<GradientError> {
    (0..LAYERS)
        .flat_map(|layer| ["mlp.down_proj.weight", "input_layernorm.weight"].map(|name| (layer, name)))
        .map(|(layer, name)| {
            let error = if broken { f64::NAN } else { 3.0 * error * noise(index + name.len(), layer) };
            GradientError {
                tensor: format!("layers.{layer}.{name}"),
                error,
                cosine: 1.0 - error * error / 2.0,
            }
        })
        .collect()
}

fn protected() -> Vec<ProtectedTensor> {
    linear_layers()
        .flat_map(|layer| ["A_log", "dt_bias", "norm.weight"].map(|name| (layer, name)))
        .map(|(layer, name)| {
            let short = name == "norm.weight";
            ProtectedTensor {
                name: format!("model.layers.{layer}.linear_attn.{name}"),
                dtype: if short { "BF16" } else { "F32" }.into(),
                elements: if short { 128 } else { HEADS as u64 },
                beyond_bf16: if short { 0 } else { HEADS as u64 - layer as u64 % 3 },
                bf16_error: if short { 0.0 } else { 0.0039 * noise(layer, name.len()) },
            }
        })
        .collect()
}

fn training(names: &[String]) -> Training {
    let steps = 20;
    let reference: Vec<f64> =
        (0..steps).map(|step| 2.4 - 0.02 * step as f64 + 0.01 * noise(step, 1)).collect();
    let run = |(index, name): (usize, &String)| {
        let broken = index == 0;
        let losses = reference.iter().enumerate().take(if broken { 5 } else { steps }).map(|(step, loss)| {
            if broken && step == 4 {
                f64::NAN
            } else {
                loss + 1e-4 * (1 + step) as f64 * noise(index, step) / index.max(1) as f64
            }
        });
        TrainingRun {
            name: name.clone(),
            losses: losses.collect(),
            drift: if broken { f64::NAN } else { 0.3 / (1 + index) as f64 },
            protected_drift: Some(if broken { f64::NAN } else { 0.5 / (1 + index) as f64 }),
            not_finite: broken.then_some(5),
        }
    };
    Training { steps, learning_rate: 1e-4, runs: names.iter().enumerate().map(run).collect(), reference }
}

fn answers() -> Vec<Answer> {
    let answer = |question: &str, short: &str, text: &str| Answer {
        question: question.into(),
        short: short.into(),
        text: text.into(),
    };
    vec![
        answer(
            "Does the recurrence compound the rounding of A_log?",
            "Yes",
            "Rounded to bf16, `A_log` moves rates by up to 0.4 %; the error of the recurrence at tokens 1,025 to 2,048 is \
             3.1 times that at tokens 1 to 8.",
        ),
        answer(
            "Do bf16 attention logits change which key wins?",
            "Not here.",
            "No query of 65,536 has <another> top key.",
        ),
    ]
}

fn decoding(names: &[String]) -> Vec<DecodingRun> {
    let run = |(index, name): (usize, &String)| {
        let level = if index == 0 { f64::NAN } else { 1e-4 / (1 + index * index) as f64 };
        let place = |bucket: usize| PositionDivergence {
            from: (1 << bucket) >> 1,
            to: 1 << bucket,
            kl: level * (1.0 + bucket as f64 * noise(index, bucket)),
        };
        DecodingRun {
            name: name.clone(),
            kl: Spread { mean: level, p99: 9.0 * level, max: 50.0 * level },
            top1_agreement: 1.0 - 0.01 / (1 + index) as f64,
            by_position: (0..9).map(place).collect(),
        }
    };
    names.iter().enumerate().map(run).collect()
}
