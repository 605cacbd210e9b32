//! `ballast oracle attention`

use ballast_checkpoint::tensor_file::{Array, TensorFile};
use ballast_kernels::attention::{
    Dims, Grads, Input, Options, Saved, attention_backward, attention_backward_workspace, attention_forward,
};
use ballast_kernels::{Element, Scratch};
use clap::Args;

use super::{
    Common, Results, Site, Storage, check_memory, check_nonzero, expect, finish, metadata_number, optional,
    sequences,
};
use crate::commands::Global;
use crate::exit::Outcome;

#[derive(Args)]
pub(crate) struct AttentionArgs {
    #[command(flatten)]
    common: Common,
    /// Number of keys that a query sees, itself included [default: the file's `window`, else all].
    #[arg(long, value_name = "W")]
    window: Option<usize>,
    /// Soft cap of the logits [default: the file's `cap`, else none].
    #[arg(long, value_name = "X")]
    cap: Option<f32>,
    /// Rounding of the product of query and key.
    #[arg(long, default_value = "f32")]
    qk_product: Site,
    /// Rounding of the logits before the softmax.
    #[arg(long, default_value = "f32")]
    logits: Site,
    /// Rounding of the probabilities as they are multiplied by v.
    #[arg(long, default_value = "f32")]
    probabilities: Site,
    /// Rounding of probabilities and gradients of logits as backward multiplies them.
    #[arg(long, default_value = "f32")]
    gradient: Site,
}

pub(super) fn run(args: AttentionArgs, global: &Global) -> anyhow::Result<Outcome> {
    let file = TensorFile::open(&args.common.input)?;
    let (q, v) = (file.f32("q")?, file.f32("v")?);
    let (&[b, t, heads, head_dim], &[.., kv_heads, value_dim]) = (&q.shape[..], &v.shape[..]) else {
        let problem = format!(
            "shapes of q and v must be [B,T,heads,hd] and [B,T,kv,vd], got {:?} and {:?}",
            q.shape, v.shape
        );
        return Err(file.error("q", problem).into());
    };
    check_nonzero(&file, "q", &q)?;
    check_nonzero(&file, "v", &v)?;
    let dims = Dims { heads, kv_heads, head_dim, value_dim };
    let problem = Problem {
        dims,
        batch: [b, t],
        k: expect(&file, "k", &[b, t, kv_heads, head_dim])?,
        v: expect(&file, "v", &[b, t, kv_heads, value_dim])?,
        sinks: optional(&file, "sinks", &[heads])?,
        d_o: optional(&file, "do", &[b, t, heads, value_dim])?,
        cu_seqlens: sequences(&file, b, t)?,
        q,
    };
    let options = Options {
        scale: metadata_number(&file, "scale")?,
        window: args.window.map_or_else(|| metadata_number(&file, "window"), |w| Ok(Some(w)))?,
        soft_cap: args.cap.map_or_else(|| metadata_number(&file, "cap"), |c| Ok(Some(c)))?,
        qk_product: args.qk_product.into(),
        logits: args.logits.into(),
        probabilities: args.probabilities.into(),
        gradient: args.gradient.into(),
    };
    let (results, saved_bytes) = match args.common.storage {
        Storage::F32 => problem.solve::<f32>(&options)?,
        Storage::Bf16 => problem.solve::<half::bf16>(&options)?,
    };
    finish(&args.common, &file, results, serde_json::json!({ "saved_bytes": saved_bytes }), global)
}

struct Problem {
    dims: Dims,
    /// B and T as the file has them
    batch: [usize; 2],
    q: Array<f32>,
    k: Array<f32>,
    v: Array<f32>,
    sinks: Option<Array<f32>>,
    d_o: Option<Array<f32>>,
    cu_seqlens: Vec<usize>,
}

impl Problem {
    /// All results, and the bytes that forward kept for backward.
    fn solve<T: Element>(&self, options: &Options) -> anyhow::Result<(Results, usize)> {
        let stored = |x: &Array<f32>| -> Vec<T> { x.values.iter().map(|x| T::from_f32(*x)).collect() };
        let wide = |shape: &[usize], x: &[T]| Array {
            shape: shape.to_vec(),
            values: x.iter().map(|x| x.to_f32()).collect(),
        };
        let Dims { heads, value_dim, .. } = self.dims;
        let [b, t] = self.batch;
        let (q, k, v) = (stored(&self.q), stored(&self.k), stored(&self.v));
        let sinks = self.sinks.as_ref().map(|s| s.values.as_slice());
        let input =
            Input { q: &q, k: &k, v: &v, sinks, selected: None, before: 0, cu_seqlens: &self.cu_seqlens };
        // The kernels check the sizes, then take what they need.
        let scratch = Scratch::new(0);
        check_memory(&[&[2, b, t, heads, value_dim]])?;
        let mut o = vec![T::default(); b * t * heads * value_dim];
        let mut saved = Saved::default();
        attention_forward(&mut o, Some(&mut saved), &input, self.dims, options, &scratch)?;
        let mut results = vec![("o", wide(&[b, t, heads, value_dim], &o))];
        if let Some(d_o) = &self.d_o {
            let d_o = stored(d_o);
            let (mut dq, mut dk, mut dv) =
                (vec![T::default(); q.len()], vec![T::default(); k.len()], vec![T::default(); v.len()]);
            let mut dsinks = sinks.map(|s| vec![0.0; s.len()]);
            let mut workspace = vec![0.0; attention_backward_workspace::<T>(self.dims, b * t)];
            let grads = Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, dsinks: dsinks.as_deref_mut() };
            attention_backward(
                grads,
                &d_o,
                &o,
                &input,
                &saved,
                self.dims,
                options,
                &mut workspace,
                &scratch,
            )?;
            results.extend([
                ("dq", wide(&self.q.shape, &dq)),
                ("dk", wide(&self.k.shape, &dk)),
                ("dv", wide(&self.v.shape, &dv)),
            ]);
            results.extend(dsinks.map(|values| ("dsinks", Array { shape: vec![heads], values })));
        }
        Ok((results, saved.bytes()))
    }
}
