//! FP8 weights with a scale per block, as in the releases of DeepSeek-V3.2 and Qwen3.5-FP8.
//!
//! `X.weight` in F8_E4M3 or F8_E5M2, shape [.., R, C], goes with `X.weight_scale_inv`, shape
//! [.., ceil(R / 128), ceil(C / 128)]: value = fp8 * scale of its block, a product in f32. The block's size
//! is `quantization_config.weight_block_size`.
//!
//! [`dequantized`] and [`quantized`] return a checkpoint whose tensors are computed while they are read, so
//! that every command works on them as on stored ones, and memory stays flat.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use ballast_contract::{Dtype, Policy, Role};
use ballast_files::cast::{self, Buffer};
use ballast_files::jobs::{CHUNK_BYTES, pieces};
use ballast_files::{Error, Result, ShardFile, Source};
use serde_json::{Value, json};

use crate::layout::{Layout, Naming};
use crate::open::{Checkpoint, StoredTensor};
use crate::view::View;

/// Rows and columns of a block where config.json does not state them, and of the blocks that are written.
const BLOCK: [u64; 2] = [128, 128];

/// Largest finite value of F8_E4M3.
const LARGEST: f32 = 448.0;

/// Key of config.json.
const SETTINGS: &str = "quantization_config";

/// Returns the name of the scales of a tensor.
pub fn scale_name(name: &str) -> String {
    format!("{name}_scale_inv")
}

/// Returns true for the types of weights that [`dequantized`] reads.
fn is_code(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F8E4M3 | Dtype::F8E5M2)
}

/// Returns true for types whose values are codes that need a scale beside them.
fn is_quantized(dtype: Dtype) -> bool {
    dtype.is_scaled_float() && !matches!(dtype, Dtype::F8E8M0 | Dtype::Q8_0)
}

/// Returns the weight that a tensor has scales for, by its name.
fn weight_of_scale(name: &str) -> Option<String> {
    if let Some(weight) = name.strip_suffix("_scale_inv") {
        return Some(weight.into());
    }
    let (module, last) = name.rsplit_once('.')?;
    matches!(last, "weight_scale" | "input_scale" | "activation_scale").then(|| format!("{module}.weight"))
}

/// Returns the value of an F8_E5M2 code: the upper half of an f16.
fn decode_e5m2(code: u8) -> f32 {
    half::f16::from_bits((code as u16) << 8).to_f32()
}

/// Returns the value of an F8_E4M3 code.
pub fn decode(code: u8) -> f32 {
    let (exponent, fraction) = ((code >> 3) & 15, (code & 7) as f32);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-9),
        _ => (8.0 + fraction) * 2f32.powi(exponent as i32 - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Rounds to F8_E4M3, to nearest even; values beyond 448 become 448, and a NaN stays one.
pub fn encode(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    if x.is_nan() {
        return sign | 0x7f;
    }
    let magnitude = x.abs().min(LARGEST);
    // Below 2^-6 the codes are 2^-9 apart; a sum with 2^14 leaves steps of 2^-9 in f32.
    if magnitude < 0.015625 {
        return sign | ((magnitude + 16384.0).to_bits() & 0xff) as u8;
    }
    // Three bits of fraction are kept; the exponent's offset changes from 127 to 7.
    let bits = magnitude.to_bits();
    let rounded = bits + 0x7_ffff + ((bits >> 20) & 1);
    sign | ((rounded >> 20) - (120 << 3)) as u8
}

/// The blocks of a tensor, which is a sequence of matrices [rows, columns].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    matrices: u64,
    rows: u64,
    columns: u64,
    block: [u64; 2],
}

impl Blocks {
    fn new(shape: &[u64], block: [u64; 2]) -> Option<Blocks> {
        let (rows, columns) = match shape {
            [.., rows, columns] => (*rows, *columns),
            _ => return None,
        };
        let matrices = shape[..shape.len() - 2].iter().product();
        Some(Blocks { matrices, rows, columns, block })
    }

    /// Blocks of a matrix along rows and columns.
    fn grid(&self) -> [u64; 2] {
        [self.rows.div_ceil(self.block[0]), self.columns.div_ceil(self.block[1])]
    }

    /// Returns true if transformers, which divides the size by the number of blocks, finds another block size
    /// than was used: 160 rows in blocks of 128 and 32 are two blocks of 80 there.
    fn are_misread(&self) -> bool {
        let sizes = [self.rows, self.columns].into_iter().zip(self.grid()).zip(self.block);
        sizes.into_iter().any(|((size, blocks), block)| {
            blocks > 1 && size.is_multiple_of(blocks) && size / blocks != block
        })
    }

    /// Shape of the scales of a tensor of this shape.
    fn scale_shape(&self, shape: &[u64]) -> Vec<u64> {
        [&shape[..shape.len() - 2], &self.grid()].concat()
    }

    /// Row of the grids, one below the other, that has the scales of an element.
    fn grid_row(&self, element: u64) -> u64 {
        let row = element / self.columns;
        row / self.rows * self.grid()[0] + row % self.rows / self.block[0]
    }

    /// Range of the scales of a range of elements.
    fn scales(&self, elements: &Range<u64>) -> Range<u64> {
        if elements.is_empty() {
            return 0..0;
        }
        let width = self.grid()[1];
        self.grid_row(elements.start) * width..(self.grid_row(elements.end - 1) + 1) * width
    }

    /// Calls `work` with each run of elements in one row and one block, and the number of its scale. Both
    /// begin at 0 with the range.
    fn each_run(&self, elements: &Range<u64>, mut work: impl FnMut(Range<usize>, usize)) {
        let first = self.scales(elements).start;
        let mut at = elements.start;
        while at < elements.end {
            let column = at % self.columns;
            let block = column / self.block[1];
            let end_of_block = ((block + 1) * self.block[1]).min(self.columns);
            let end = (at + end_of_block - column).min(elements.end);
            let scale = self.grid_row(at) * self.grid()[1] + block - first;
            work((at - elements.start) as usize..(end - elements.start) as usize, scale as usize);
            at = end;
        }
    }
}

/// A tensor that is computed while it is read.
#[derive(Debug)]
enum Computed {
    /// F32 values of FP8 weights and their scales.
    Dequantized(Box<Dequantizer>),
    /// F8_E4M3 codes of the weights.
    Codes(Arc<Quantizer>),
    /// F32 scales of these codes.
    Scales(Arc<Quantizer>),
}

/// FP8 weights and their scales.
#[derive(Debug)]
struct Dequantizer {
    weight: View,
    scales: View,
    blocks: Blocks,
}

/// Weights that are divided into blocks and quantized. The scales need all weights, and are found once.
#[derive(Debug)]
struct Quantizer {
    weight: View,
    blocks: Blocks,
    largest: OnceLock<Vec<f32>>,
}

impl Computed {
    /// Bytes of an element.
    fn width(&self) -> u64 {
        match self {
            Computed::Codes(_) => 1,
            Computed::Dequantized(_) | Computed::Scales(_) => 4,
        }
    }

    /// The files that it is computed from.
    fn path(&self) -> &Path {
        let view = match self {
            Computed::Dequantized(dequantizer) => &dequantizer.weight,
            Computed::Codes(quantizer) | Computed::Scales(quantizer) => &quantizer.weight,
        };
        view.source_files().first().copied().unwrap_or(Path::new(""))
    }
}

impl Source for Computed {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        let width = self.width();
        let end = at + buffer.len() as u64;
        let elements = at / width..end.div_ceil(width);
        let mut values = Buffer::default();
        match self {
            Computed::Dequantized(dequantizer) => {
                let out = values.resize(((elements.end - elements.start) * 4) as usize);
                dequantizer.values(bytemuck::cast_slice_mut(out), elements.clone())?;
            }
            Computed::Codes(quantizer) => {
                quantizer.codes(values.resize((elements.end - elements.start) as usize), elements.clone())?;
            }
            Computed::Scales(quantizer) => {
                let largest = quantizer.largest()?;
                let range = elements.start as usize..elements.end as usize;
                let out = values.resize(4 * range.len());
                for (scale, largest) in
                    bytemuck::cast_slice_mut::<u8, f32>(out).iter_mut().zip(&largest[range])
                {
                    *scale = 1.0 / factor(*largest);
                }
            }
        }
        let skipped = (at - elements.start * width) as usize;
        buffer.copy_from_slice(&values.as_ref()[skipped..skipped + buffer.len()]);
        Ok(())
    }
}

impl Dequantizer {
    fn values(&self, out: &mut [f32], elements: Range<u64>) -> Result<()> {
        static VALUES: [OnceLock<[f32; 256]>; 2] = [OnceLock::new(), OnceLock::new()];
        let is_e5m2 = self.weight.dtype == Dtype::F8E5M2;
        let value = if is_e5m2 { decode_e5m2 } else { decode };
        let values = VALUES[is_e5m2 as usize].get_or_init(|| std::array::from_fn(|code| value(code as u8)));
        let mut codes = Buffer::default();
        self.weight.read(elements.clone(), &mut codes, &mut Buffer::default())?;
        let range = self.blocks.scales(&elements);
        let scales = read_f32(&self.scales, range.clone())?;
        if let Some(bad) = scales.iter().position(|scale| !is_scale(*scale)) {
            let (at, found) = (range.start + bad as u64, scales[bad]);
            let problem = format!("scale {at} is {found}; scales are finite and positive");
            return Err(Error::tensor(&self.scales.name, problem));
        }
        let codes = codes.as_ref();
        self.blocks.each_run(&elements, |run, block| {
            let scale = scales[block];
            for (x, code) in out[run.clone()].iter_mut().zip(&codes[run]) {
                *x = values[*code as usize] * scale;
            }
        });
        Ok(())
    }
}

/// Reads elements in f32.
fn read_f32(view: &View, elements: Range<u64>) -> Result<Vec<f32>> {
    let mut values = vec![0f32; (elements.end - elements.start) as usize];
    let mut stored = Buffer::default();
    view.read(elements, &mut stored, &mut Buffer::default())?;
    cast::convert(stored.as_ref(), view.dtype, bytemuck::cast_slice_mut(&mut values), Dtype::F32);
    Ok(values)
}

fn is_scale(x: f32) -> bool {
    x.is_finite() && x > 0.0
}

/// Factor of a block before rounding, in the order of operations of transformers; a block of zeros, or of
/// values too small for a factor, has 1.
fn factor(largest: f32) -> f32 {
    let factor = 1.0 / largest * LARGEST;
    if factor.is_finite() { factor } else { 1.0 }
}

impl Quantizer {
    /// Largest magnitude of every block.
    fn largest(&self) -> Result<&[f32]> {
        if let Some(largest) = self.largest.get() {
            return Ok(largest);
        }
        let [rows, columns] = self.blocks.grid();
        let mut largest = vec![0f32; (self.blocks.matrices * rows * columns) as usize];
        for piece in pieces(self.weight.elements(), 4, CHUNK_BYTES) {
            let values = read_f32(&self.weight, piece.clone())?;
            if let Some(bad) = values.iter().position(|x| !x.is_finite()) {
                let problem = format!(
                    "value {} is {}, which has no FP8 scale; see `ballast audit`",
                    piece.start + bad as u64,
                    values[bad]
                );
                return Err(Error::tensor(&self.weight.name, problem));
            }
            let first = self.blocks.scales(&piece).start as usize;
            self.blocks.each_run(&piece, |run, block| {
                let found = &mut largest[first + block];
                *found = values[run].iter().fold(*found, |most, x| most.max(x.abs()));
            });
        }
        Ok(self.largest.get_or_init(|| largest))
    }

    fn codes(&self, out: &mut [u8], elements: Range<u64>) -> Result<()> {
        let largest = self.largest()?;
        let values = read_f32(&self.weight, elements.clone())?;
        let first = self.blocks.scales(&elements).start as usize;
        self.blocks.each_run(&elements, |run, block| {
            let factor = factor(largest[first + block]);
            for (code, x) in out[run.clone()].iter_mut().zip(&values[run]) {
                *code = encode(*x * factor);
            }
        });
        Ok(())
    }
}

/// Returns true if the checkpoint has FP8 weights.
pub fn has_weights(checkpoint: &Checkpoint) -> bool {
    checkpoint.tensors.iter().any(|t| is_code(t.dtype))
}

/// Returns codes of fewer than 16 bits if config.json does not say that the model is quantized.
pub(crate) fn unconfigured(checkpoint: &Checkpoint) -> impl Iterator<Item = &StoredTensor> {
    let states = |config: &Value| config.get(SETTINGS).or(config.get("compression_config")).is_some();
    let config = checkpoint.config.as_ref();
    let stated = config.is_none_or(|config| states(config) || config.get("text_config").is_some_and(states));
    checkpoint.tensors.iter().filter(move |t| !stated && is_quantized(t.dtype))
}

/// Returns the scales whose weights are not there, or are values that need no scale.
pub(crate) fn scales_without_codes(checkpoint: &Checkpoint) -> Vec<&StoredTensor> {
    let dtypes: HashMap<(usize, &str), Dtype> =
        checkpoint.tensors.iter().map(|t| ((t.rank, t.name.as_str()), t.dtype)).collect();
    let has_codes = |rank: usize, weight: String| {
        let packed = format!("{weight}_packed");
        let dtype = dtypes.get(&(rank, weight.as_str())).or(dtypes.get(&(rank, packed.as_str())));
        dtype.is_some_and(|dtype| !dtype.is_plain_float())
    };
    let is_alone = |t: &&StoredTensor| weight_of_scale(&t.name).is_some_and(|w| !has_codes(t.rank, w));
    checkpoint.tensors.iter().filter(is_alone).collect()
}

/// Returns the block size of a config.json.
fn block_of(config: Option<&Value>) -> Result<[u64; 2], String> {
    let text = |config: &Value| config.get("text_config").and_then(|text| text.get(SETTINGS)).cloned();
    let Some(settings) = config.and_then(|config| config.get(SETTINGS).cloned().or_else(|| text(config)))
    else {
        return Ok(BLOCK);
    };
    let Some(size) = settings.get("weight_block_size").filter(|size| !size.is_null()) else {
        return Ok(BLOCK);
    };
    let sizes: Option<Vec<u64>> = size.as_array().and_then(|sizes| sizes.iter().map(Value::as_u64).collect());
    match sizes.as_deref() {
        Some([rows, columns]) if *rows > 0 && *columns > 0 => Ok([*rows, *columns]),
        _ => Err(format!("`{SETTINGS}.weight_block_size` must be two positive numbers, got {size}")),
    }
}

/// The scales of an FP8 weight.
pub(crate) enum ScaleOf {
    /// Index of the tensor with the scales, and the blocks that they are for.
    Found(usize, Blocks),
    /// There is none of this name.
    Missing(String),
    /// The scales do not fit the weight; the problem.
    Unfit(String),
}

/// Returns FP8 weights and their scales.
pub(crate) fn pairs(checkpoint: &Checkpoint) -> Result<Vec<(usize, ScaleOf)>> {
    let block = block_of(checkpoint.config.as_ref())
        .map_err(|problem| Error::Config { file: checkpoint.config_path(), problem })?;
    let weights = checkpoint.tensors.iter().enumerate().filter(|(_, t)| is_code(t.dtype));
    let by_name: HashMap<(usize, &str), usize> =
        checkpoint.tensors.iter().enumerate().map(|(i, t)| ((t.rank, t.name.as_str()), i)).collect();
    let scales_of = |t: &StoredTensor| {
        let name = scale_name(&t.name);
        let Some(&found) = by_name.get(&(t.rank, name.as_str())) else { return ScaleOf::Missing(name) };
        let scales = &checkpoint.tensors[found];
        let Some(blocks) = Blocks::new(&t.shape, block) else {
            return ScaleOf::Unfit(format!("shape {:?} has no rows and columns", t.shape));
        };
        let expected = blocks.scale_shape(&t.shape);
        let plain = scales.dtype.widens_exactly_to(Dtype::F32) || scales.dtype == Dtype::F8E8M0;
        match plain && scales.shape == expected {
            true => ScaleOf::Found(found, blocks),
            false => ScaleOf::Unfit(format!(
                "{name} is {} {:?}; F32 {expected:?} fits {:?} in blocks of {} x {}",
                scales.dtype, scales.shape, t.shape, block[0], block[1]
            )),
        }
    };
    Ok(weights.map(|(i, t)| (i, scales_of(t))).collect())
}

/// Returns the number of scales that are not finite and positive.
pub(crate) fn count_bad_scales(checkpoint: &Checkpoint, scales: usize) -> Result<u64> {
    let t = &checkpoint.tensors[scales];
    let (mut values, mut scratch) = (Buffer::default(), Buffer::default());
    let mut bad = 0;
    for piece in pieces(t.elements(), 4, CHUNK_BYTES) {
        checkpoint.read_f32(t, &piece, &mut values, &mut scratch)?;
        let values: &[f32] = bytemuck::cast_slice(values.as_ref());
        bad += values.iter().filter(|scale| !is_scale(**scale)).count() as u64;
    }
    Ok(bad)
}

/// Returns the checkpoint with FP8 weights as F32, without their scales; the same one if it has none. Other
/// codes, and scales that belong to no FP8 weight, are an error: the result would be read as values.
pub fn dequantized(source: &Arc<Checkpoint>) -> Result<Arc<Checkpoint>> {
    let refuse = |t: &StoredTensor, problem| Err(Error::tensor(&t.name, problem).of(&source.root));
    let is_unknown = |t: &&StoredTensor| t.elements() > 0 && is_quantized(t.dtype) && !is_code(t.dtype);
    if let Some(t) = source.tensors.iter().find(is_unknown) {
        let problem = format!("stored in {}, which cannot be dequantized; F8_E4M3 and F8_E5M2 can", t.dtype);
        return refuse(t, problem);
    }
    let codes: HashSet<(usize, String)> =
        source.tensors.iter().filter(|t| is_code(t.dtype)).map(|t| (t.rank, scale_name(&t.name))).collect();
    let is_unused =
        |t: &&StoredTensor| weight_of_scale(&t.name).is_some() && !codes.contains(&(t.rank, t.name.clone()));
    if let Some(t) = source.tensors.iter().find(is_unused) {
        let problem = "a scale that no FP8 weight is multiplied by: whether the weight has been multiplied is unknown; \
                       keep the types with --dtype keep, or convert the original checkpoint";
        return refuse(t, problem.into());
    }
    if !has_weights(source) {
        return Ok(source.clone());
    }
    let mut scales_used = HashSet::new();
    let mut result = source.derived();
    for (weight, scales) in pairs(source)? {
        let stored = &source.tensors[weight];
        let fail = |problem: String| Err(Error::tensor(&stored.name, problem).of(&source.root));
        let (scales, blocks) = match scales {
            ScaleOf::Found(scales, blocks) => (scales, blocks),
            ScaleOf::Missing(name) => {
                return fail(format!("stored in {} without its scales: {name} not found", stored.dtype));
            }
            ScaleOf::Unfit(problem) => return fail(problem),
        };
        if stored.elements().checked_mul(4).is_none() {
            return fail(format!("shape {:?} is too large", stored.shape));
        }
        scales_used.insert(scales);
        let (values, scales) = (View::stored(source, weight), View::stored(source, scales));
        let dequantizer = Dequantizer { weight: values, scales, blocks };
        result.compute(weight, Dtype::F32, Computed::Dequantized(Box::new(dequantizer)));
    }
    let mut index = 0;
    result.tensors.retain(|_| {
        index += 1;
        !scales_used.contains(&(index - 1))
    });
    if let Some(config) = &mut result.config {
        if let Some(text) = config.get_mut("text_config").and_then(Value::as_object_mut) {
            text.shift_remove(SETTINGS);
        }
        if let Some(whole) = config.as_object_mut() {
            whole.shift_remove(SETTINGS);
        }
    }
    Ok(Arc::new(result))
}

/// Returns true for the weights that releases quantize: products of the layers, but no router, gate, gate
/// projection of linear attention, convolution, norm, embedding or output head.
fn is_quantized_in_releases(name: &str) -> bool {
    let segments: Vec<&str> = name.split('.').collect();
    let owner = match segments.as_slice() {
        [.., owner, "weight"] => *owner,
        [.., "experts", last] => *last,
        _ => return false,
    };
    let excluded = matches!(
        owner,
        "in_proj_a" | "in_proj_b" | "in_proj_ba" | "conv1d" | "weights_proj" | "gate" | "shared_expert_gate"
    );
    let role = Role::of(name);
    let multiplied = matches!(
        role,
        Role::LinearAttention | Role::Attention | Role::Indexer | Role::Mlp | Role::Experts | Role::Mtp
    );
    segments.contains(&"layers") && multiplied && !excluded && !owner.contains("norm")
}

/// Returns the checkpoint with the weights that releases quantize in FP8, and their scales. Tensors that
/// `policy` protects stay as they are.
pub fn quantized(source: &Arc<Checkpoint>, policy: &Policy) -> Result<Arc<Checkpoint>> {
    let layout = Layout::detect(source);
    if layout.naming != Naming::Hf || source.ranks > 1 {
        return Err(Error::Refused(format!(
            "{}: FP8 is written in the layout hf only; convert to hf first, then to FP8",
            source.root.display()
        )));
    }
    let source = &dequantized(source)?;
    let mut result = source.derived();
    let mut left = Vec::new();
    for (index, stored) in source.tensors.iter().enumerate() {
        let blocks = Blocks::new(&stored.shape, BLOCK).filter(|_| stored.dtype.widens_exactly_to(Dtype::F32));
        let Some(blocks) = blocks.filter(|_| stored.elements() > 0) else { continue };
        let wanted = is_quantized_in_releases(&stored.name) && !blocks.are_misread();
        if !wanted || policy.rule_for(&stored.name).is_some() {
            left.extend(stored.name.strip_suffix(".weight").filter(|_| stored.shape.len() == 2));
            continue;
        }
        let weight = View::stored(source, index);
        let quantizer = Arc::new(Quantizer { weight, blocks, largest: OnceLock::new() });
        result.compute(index, Dtype::F8E4M3, Computed::Codes(quantizer.clone()));
        let scales = StoredTensor {
            name: scale_name(&stored.name),
            shape: blocks.scale_shape(&stored.shape),
            ..stored.clone()
        };
        result.tensors.push(scales);
        result.compute(result.tensors.len() - 1, Dtype::F32, Computed::Scales(quantizer));
    }
    left.retain(|module| !module.contains("embed") && !module.contains("norm"));
    let settings = json!({
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": left,
        "quant_method": "fp8",
        "weight_block_size": BLOCK,
    });
    match result.config.as_mut().and_then(Value::as_object_mut) {
        Some(config) => config.insert(SETTINGS.into(), settings),
        None => {
            return Err(Error::Config {
                file: source.config_path(),
                problem: "config.json not found; FP8 weights need its quantization_config to be read".into(),
            });
        }
    };
    Ok(Arc::new(result))
}

/// Returns a note for the user about what [`dequantized`] or [`quantized`] did.
pub fn note(before: &Checkpoint, after: &Checkpoint) -> Option<String> {
    let count = |checkpoint: &Checkpoint| checkpoint.tensors.iter().filter(|t| is_code(t.dtype)).count();
    match (count(before), count(after)) {
        (before, 0) if before > 0 => {
            Some(format!("{before} FP8 weights are multiplied by their scales in f32, then rounded once"))
        }
        (before, after) if after > 0 && before != after => Some(format!(
            "{after} weights are rounded to FP8 with a scale per block of {} x {}",
            BLOCK[0], BLOCK[1]
        )),
        _ => None,
    }
}

impl Checkpoint {
    /// Replaces a tensor by a computed one.
    fn compute(&mut self, tensor: usize, dtype: Dtype, computed: Computed) {
        let stored = &mut self.tensors[tensor];
        let bytes = dtype.bytes_for(stored.elements()).expect("checked by the caller");
        let path = computed.path().to_path_buf();
        *stored = StoredTensor { dtype, bytes, begin: 0, file: self.files.len(), ..stored.clone() };
        self.files.push(Arc::new(ShardFile::from_source(&path, bytes, computed)));
    }
}
