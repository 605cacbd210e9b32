//! Runs the gated delta rule forward and backward on tensors from a safetensors file.
//!
//!     cargo run -p ballast-kernels --example delta_rule -- fixtures/gdn/packed.safetensors
//!
//! Inputs, in f32: q, k [B, T, Hk, dk], v [B, T, Hv, dv], g, beta [B, T, Hv]; if present h0 [N, Hv, dk, dv],
//! do as v, dht as h0, and cu_seqlens [N + 1] in i32 or i64 (otherwise every batch row is a sequence). The
//! metadata may have `scale` (default dk^-1/2) and `l2norm` (default true). Without do and dht the gradient
//! of the sum of o is computed.
//!
//! Prints the shape and norm of every result. A result that is also in the file is compared with it.

use std::error::Error;

use ballast_kernels::Scratch;
use ballast_kernels::gated_delta_rule::{self as gdn, L2Norm};
use safetensors::{Dtype, SafeTensors};

/// Shape and values.
struct Tensor {
    shape: Vec<usize>,
    values: Vec<f32>,
}

fn read(file: &SafeTensors<'_>, name: &str) -> Result<Option<Tensor>, Box<dyn Error>> {
    let Ok(view) = file.tensor(name) else { return Ok(None) };
    if view.dtype() != Dtype::F32 {
        return Err(format!("{name} must be F32, got {:?}", view.dtype()).into());
    }
    let values = view.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    Ok(Some(Tensor { shape: view.shape().to_vec(), values }))
}

fn read_offsets(file: &SafeTensors<'_>) -> Result<Option<Vec<usize>>, Box<dyn Error>> {
    let Ok(view) = file.tensor("cu_seqlens") else { return Ok(None) };
    let data = view.data();
    let offsets: Vec<i64> = match view.dtype() {
        Dtype::I32 => data.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect(),
        Dtype::I64 => data.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        other => return Err(format!("cu_seqlens must be I32 or I64, got {other:?}").into()),
    };
    Ok(Some(offsets.into_iter().map(usize::try_from).collect::<Result<_, _>>()?))
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// Prints one result, and its error relative to the file's tensor of that name.
fn report(file: &SafeTensors<'_>, name: &str, shape: &[usize], values: &[f32]) -> Result<(), Box<dyn Error>> {
    let size = norm(values.iter().copied());
    let compared = match read(file, name)? {
        Some(expected) if expected.values.len() == values.len() => {
            let error = norm(expected.values.iter().zip(values).map(|(a, b)| a - b));
            format!("{:.1e}", error / norm(expected.values.iter().copied()).max(f64::MIN_POSITIVE))
        }
        Some(expected) => format!("shape in the file: {:?}", expected.shape),
        None => "not in the file".into(),
    };
    println!("{name:<6} {:<20} {size:<12.6} {compared}", format!("{shape:?}"));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: delta_rule FILE.safetensors")?;
    let bytes = std::fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let metadata = SafeTensors::read_metadata(&bytes)?.1.metadata().clone().unwrap_or_default();
    let need = |name: &str| -> Result<Tensor, Box<dyn Error>> {
        Ok(read(&file, name)?.ok_or_else(|| format!("{path}: tensor {name} not found"))?)
    };
    let (q, k, v, g, beta) = (need("q")?, need("k")?, need("v")?, need("g")?, need("beta")?);
    let (&[batch, length, key_heads, key_dim], &[_, _, value_heads, value_dim]) =
        (&q.shape[..], &v.shape[..])
    else {
        return Err(format!("q and v must have 4 dimensions, got {:?} and {:?}", q.shape, v.shape).into());
    };
    let dims = gdn::Dims { key_heads, value_heads, key_dim, value_dim };
    let scale = metadata.get("scale").map(|scale| scale.parse()).transpose()?;
    let l2norm = metadata.get("l2norm").is_none_or(|on| on.eq_ignore_ascii_case("true") || on == "1");
    let l2norm = if l2norm { L2Norm::Inside } else { L2Norm::Off };
    let options = gdn::Options { scale, l2norm, ..gdn::Options::default() };
    let equal = || (0..=batch).map(|row| row * length).collect();
    let cu_seqlens: Vec<usize> = read_offsets(&file)?.unwrap_or_else(equal);
    let sequences = cu_seqlens.len().saturating_sub(1);
    let (h0, dht) = (read(&file, "h0")?, read(&file, "dht")?);
    let d_o = read(&file, "do")?.map_or_else(|| vec![1.0; v.values.len()], |tensor| tensor.values);

    let input = gdn::Input {
        q: &q.values,
        k: &k.values,
        v: &v.values,
        gates: gdn::Gates::Given { g: &g.values, beta: &beta.values },
        h0: h0.as_ref().map(|tensor| &tensor.values[..]),
        cu_seqlens: &cu_seqlens,
    };
    let scratch = Scratch::new(
        gdn::gated_delta_rule_forward_scratch(dims, &options)
            .max(gdn::gated_delta_rule_backward_scratch(dims, &options)),
    );
    let states = sequences * value_heads * dims.state_len();
    let (mut o, mut ht) = (vec![0.0; v.values.len()], vec![0.0; states]);
    let mut saved = gdn::Saved::default();
    let output = gdn::Output { o: &mut o, ht: Some(&mut ht) };
    gdn::gated_delta_rule_forward(output, Some(&mut saved), &input, dims, &options, &scratch)?;

    let (mut dq, mut dk) = (vec![0.0; q.values.len()], vec![0.0; k.values.len()]);
    let mut dv = vec![0.0; v.values.len()];
    let (mut dg, mut dbeta, mut dh0) =
        (vec![0.0; g.values.len()], vec![0.0; beta.values.len()], vec![0.0; states]);
    let grads = gdn::Grads {
        dq: &mut dq,
        dk: &mut dk,
        dv: &mut dv,
        gates: gdn::GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta },
        dh0: Some(&mut dh0),
    };
    let dht = dht.as_ref().map(|tensor| &tensor.values[..]);
    gdn::gated_delta_rule_backward(grads, &d_o, dht, &input, &saved, dims, &options, &scratch)?;

    println!("{dims:?}, {sequences} sequences, {} bytes saved for backward", saved.bytes());
    println!("{:<6} {:<20} {:<12} relative error", "tensor", "shape", "norm");
    let state_shape = [sequences, value_heads, key_dim, value_dim];
    report(&file, "o", &v.shape, &o)?;
    report(&file, "ht", &state_shape, &ht)?;
    report(&file, "dq", &q.shape, &dq)?;
    report(&file, "dk", &k.shape, &dk)?;
    report(&file, "dv", &v.shape, &dv)?;
    report(&file, "dg", &g.shape, &dg)?;
    report(&file, "dbeta", &beta.shape, &dbeta)?;
    report(&file, "dh0", &state_shape, &dh0)
}
