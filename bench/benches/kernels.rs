//! Benchmark of every kernel at the size of a small model: `cargo bench -p ballast-bench [-- FILTER]`.

use ballast_bench::cases::{self, Pass, Product, Work};
use ballast_kernels::{attention, gated_delta_rule, indexer, linear, linear_cross_entropy, moe};
use criterion::Criterion;
use half::bf16;

fn run(c: &mut Criterion, name: &str, mut work: Work) {
    c.bench_function(name, |b| b.iter(|| work().expect("the shapes fit")));
}

fn sequences(c: &mut Criterion) {
    let rule = gated_delta_rule::Dims { key_heads: 16, value_heads: 16, key_dim: 128, value_dim: 128 };
    let options = gated_delta_rule::Options::default();
    let heads = attention::Dims { heads: 8, kv_heads: 2, head_dim: 256, value_dim: 256 };
    let plain = attention::Options::default();
    let dims = indexer::Dims { heads: 16, dim: 128 };
    for (pass, what) in [(Pass::Forward, "forward"), (Pass::Both, "forward+backward")] {
        let name = format!("gated_delta_rule/{what}");
        run(c, &name, cases::gated_delta_rule::<f32>(1024, rule, options, pass));
        run(c, &format!("attention/{what}"), cases::attention::<f32>(1024, heads, plain, pass));
        let name = format!("indexer/{}", if pass == Pass::Forward { "topk" } else { "loss" });
        run(c, &name, cases::indexer(1024, dims, 256, pass).expect("the shapes fit"));
        run(c, &format!("conv/{what}"), cases::convolution(1024, 6144, pass));
    }
    run(c, "rotary/forward", cases::rotary(1024, 16, 256).expect("the settings fit"));
}

fn products(c: &mut Criterion) {
    let dims = linear::Dims { inputs: 1024, outputs: 3584 };
    for product in [Product::Forward, Product::Input, Product::Weight] {
        let name = format!("linear/{product:?}").to_lowercase();
        run(c, &name, cases::linear::<f32, f32>(512, dims, product));
        run(c, &format!("{name}, bf16 weight"), cases::linear::<f32, bf16>(512, dims, product));
    }
    for tokens in [1, 8] {
        let name = format!("gemv/bf16, {tokens} tokens");
        run(c, &name, cases::linear::<bf16, bf16>(tokens, dims, Product::Forward));
    }
    let head = linear::Dims { inputs: 1024, outputs: 8192 };
    let options = linear_cross_entropy::Options::default();
    run(c, "linear_cross_entropy/loss and gradients", cases::cross_entropy::<f32>(512, head, options));
    let dims = moe::Dims { experts: 16, top_k: 4, hidden: 512, intermediate: 256 };
    for (pass, what) in [(Pass::Forward, "forward"), (Pass::Both, "forward+backward")] {
        run(c, &format!("moe/{what}"), cases::experts(512, dims, pass).expect("the shapes fit"));
    }
}

fn rows(c: &mut Criterion) {
    for (pass, what) in [(Pass::Forward, "forward"), (Pass::Both, "forward+backward")] {
        run(c, &format!("norms/rms {what}"), cases::rms_norm(2048, 1024, pass));
        run(c, &format!("glu/{what}"), cases::glu(1 << 20, pass));
    }
    run(c, "adamw/step", cases::adamw(1 << 20));
}

fn main() {
    let mut c = Criterion::default().sample_size(10).configure_from_args();
    sequences(&mut c);
    products(&mut c);
    rows(&mut c);
    c.final_summary();
}
