//! `ballast oracle gdn`

use ballast_checkpoint::tensor_file::{Array, TensorFile};
use ballast_kernels::gated_delta_rule::{
    Dims, GateGrads, Gates, Grads, Input, L2Norm, Options, Output, Saved, gated_delta_rule_backward,
    gated_delta_rule_forward,
};
use ballast_kernels::{Element, Scratch};
use clap::{Args, ValueEnum};

use super::{
    Common, Results, Storage, check_memory, check_nonzero, expect, finish, metadata_number, optional,
    sequences,
};
use crate::commands::Global;
use crate::exit::Outcome;

#[derive(Args)]
pub(crate) struct GdnArgs {
    #[command(flatten)]
    common: Common,
    /// Number of tokens per chunk.
    #[arg(long, default_value_t = 32, value_name = "C", value_parser = clap::value_parser!(u16).range(1..=256))]
    chunk: u16,
    /// Normalize q and k inside or outside the kernel [default: inside if the file's `l2norm` is set, else
    /// not at all].
    #[arg(long)]
    l2norm: Option<L2NormArg>,
}

#[derive(Clone, Copy, ValueEnum)]
enum L2NormArg {
    Inside,
    Outside,
}

pub(super) fn run(args: GdnArgs, global: &Global) -> anyhow::Result<Outcome> {
    let file = TensorFile::open(&args.common.input)?;
    let problem = Problem::read(&file)?;
    let asked = matches!(file.metadata("l2norm"), Some("1" | "true" | "True"));
    let options = Options {
        scale: problem.scale,
        l2norm: match args.l2norm {
            Some(L2NormArg::Inside) => L2Norm::Inside,
            Some(L2NormArg::Outside) => L2Norm::Outside,
            None if asked => L2Norm::Inside,
            None => L2Norm::Off,
        },
        chunk: args.chunk as usize,
        ..Options::default()
    };
    let (results, saved_bytes) = match args.common.storage {
        Storage::F32 => problem.solve::<f32>(&options)?,
        Storage::Bf16 => problem.solve::<half::bf16>(&options)?,
    };
    finish(&args.common, &file, results, serde_json::json!({ "saved_bytes": saved_bytes }), global)
}

struct Problem {
    dims: Dims,
    /// B and T of the file.
    batch: [usize; 2],
    q: Array<f32>,
    k: Array<f32>,
    v: Array<f32>,
    g: Array<f32>,
    beta: Array<f32>,
    h0: Option<Array<f32>>,
    d_o: Option<Array<f32>>,
    dht: Option<Array<f32>>,
    cu_seqlens: Vec<usize>,
    scale: Option<f32>,
}

impl Problem {
    fn read(file: &TensorFile) -> anyhow::Result<Problem> {
        let (q, v) = (file.f32("q")?, file.f32("v")?);
        let (&[b, t, key_heads, key_dim], &[.., value_heads, value_dim]) = (&q.shape[..], &v.shape[..])
        else {
            let problem = format!(
                "shapes of q and v must be [B,T,Hk,dk] and [B,T,Hv,dv], got {:?} and {:?}",
                q.shape, v.shape
            );
            return Err(file.error("q", problem).into());
        };
        check_nonzero(file, "q", &q)?;
        check_nonzero(file, "v", &v)?;
        let dims = Dims { key_heads, value_heads, key_dim, value_dim };
        let cu_seqlens = sequences(file, b, t)?;
        let states = [cu_seqlens.len() - 1, value_heads, key_dim, value_dim];
        Ok(Problem {
            dims,
            batch: [b, t],
            k: expect(file, "k", &[b, t, key_heads, key_dim])?,
            v: expect(file, "v", &[b, t, value_heads, value_dim])?,
            g: expect(file, "g", &[b, t, value_heads])?,
            beta: expect(file, "beta", &[b, t, value_heads])?,
            h0: optional(file, "h0", &states)?,
            d_o: optional(file, "do", &[b, t, value_heads, value_dim])?,
            dht: optional(file, "dht", &states)?,
            q,
            cu_seqlens,
            scale: metadata_number(file, "scale")?,
        })
    }

    /// Returns the results, and the bytes that forward saved for backward.
    fn solve<T: Element>(&self, options: &Options) -> anyhow::Result<(Results, usize)> {
        let stored = |x: &Array<f32>| -> Vec<T> { x.values.iter().map(|x| T::from_f32(*x)).collect() };
        let Dims { key_heads, value_heads, key_dim, value_dim } = self.dims;
        let [b, t] = self.batch;
        let states = vec![self.cu_seqlens.len() - 1, value_heads, key_dim, value_dim];
        let saved_states = (b * t).div_ceil(options.chunk * options.states_every);
        check_memory(&[&[3 * states[0] + saved_states, value_heads, key_dim, value_dim]])?;
        let (q, k, v) = (stored(&self.q), stored(&self.k), stored(&self.v));
        let input = Input {
            q: &q,
            k: &k,
            v: &v,
            gates: Gates::Given { g: &self.g.values, beta: &self.beta.values },
            h0: self.h0.as_ref().map(|h0| h0.values.as_slice()),
            cu_seqlens: &self.cu_seqlens,
        };
        let state_len: usize = states.iter().product();
        // Grows as the kernels need it, after they have checked the sizes.
        let scratch = Scratch::new(0);
        let (mut o, mut ht) = (vec![T::default(); v.len()], vec![0.0; state_len]);
        let mut saved = Saved::default();
        let output = Output { o: &mut o, ht: Some(&mut ht) };
        gated_delta_rule_forward(output, Some(&mut saved), &input, self.dims, options, &scratch)?;
        let wide = |shape: &[usize], x: &[T]| Array {
            shape: shape.to_vec(),
            values: x.iter().map(|x| x.to_f32()).collect(),
        };
        let (keys, values, gates) =
            ([b, t, key_heads, key_dim], [b, t, value_heads, value_dim], vec![b, t, value_heads]);
        let mut results = vec![("o", wide(&values, &o)), ("ht", Array { shape: states.clone(), values: ht })];
        if self.d_o.is_some() || self.dht.is_some() {
            let d_o = self.d_o.as_ref().map_or(vec![T::default(); v.len()], stored);
            let (mut dq, mut dk, mut dv) =
                (vec![T::default(); q.len()], vec![T::default(); k.len()], vec![T::default(); v.len()]);
            let (mut dg, mut dbeta) = (vec![0.0; self.g.values.len()], vec![0.0; self.g.values.len()]);
            let mut dh0 = vec![0.0; state_len];
            let grads = Grads {
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
                gates: GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta },
                dh0: Some(&mut dh0),
            };
            let dht = self.dht.as_ref().map(|dht| dht.values.as_slice());
            gated_delta_rule_backward(grads, &d_o, dht, &input, &saved, self.dims, options, &scratch)?;
            results.extend([
                ("dq", wide(&keys, &dq)),
                ("dk", wide(&keys, &dk)),
                ("dv", wide(&values, &dv)),
                ("dg", Array { shape: gates.clone(), values: dg }),
                ("dbeta", Array { shape: gates, values: dbeta }),
                ("dh0", Array { shape: states, values: dh0 }),
            ]);
        }
        Ok((results, saved.bytes()))
    }
}
