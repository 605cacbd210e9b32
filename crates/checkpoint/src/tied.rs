//! Checkpoints that store an output head although config.json ties it to the embedding.
//!
//! transformers (5.22) compares the two if `tie_word_embeddings` is true: equal ones become one tensor,
//! different ones stay two, with a warning. A program that uses one of them without comparing runs another
//! model.

use ballast_contract::Dtype;
use ballast_files::Result;
use ballast_files::cast::{self, Buffer};
use ballast_files::jobs::{CHUNK_BYTES, pieces};
use serde_json::Value;

use crate::layout::is_carried;
use crate::open::{Checkpoint, StoredTensor};

/// An output head that is stored beside the embedding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredHead {
    /// Name of the head.
    pub head: String,
    /// Name of the embedding.
    pub embedding: String,
    /// True if both have the same values. A NaN equals nothing.
    pub equal: bool,
}

/// Returns true if a config.json ties the output head to the embedding. This is the default of Gemma.
pub(crate) fn is_tied(config: &Value) -> bool {
    let text = config.get("text_config").filter(|text| text.is_object()).unwrap_or(config);
    let said = |config: &Value| config.get("tie_word_embeddings").and_then(Value::as_bool);
    let model_type = || text.get("model_type").or(config.get("model_type")).and_then(Value::as_str);
    let default = || model_type().is_some_and(|model_type| model_type.starts_with("gemma"));
    said(text).or(said(config)).unwrap_or_else(default)
}

/// Returns the output head of a checkpoint, in any layout, if it is stored beside the embedding. Reads and
/// compares both.
pub fn stored_head(checkpoint: &Checkpoint) -> Result<Option<StoredHead>> {
    let mut found: Option<StoredHead> = None;
    for rank in 0..checkpoint.ranks {
        let of_rank = || checkpoint.tensors.iter().filter(|t| t.rank == rank && !is_carried(&t.name));
        let head = of_rank().find(|t| is_head(&t.name));
        let embedding = of_rank().filter(|t| is_embedding(&t.name)).min_by_key(|t| t.name.len());
        let (Some(head), Some(embedding)) = (head, embedding) else { continue };
        let equal = same_values(checkpoint, head, embedding)?;
        match &mut found {
            Some(found) => found.equal &= equal,
            None => {
                let (head, embedding) = (head.name.clone(), embedding.name.clone());
                found = Some(StoredHead { head, embedding, equal });
            }
        }
    }
    Ok(found)
}

/// Returns true for the model's output head; multi-token-prediction layers may have heads of their own.
fn is_head(name: &str) -> bool {
    ["lm_head.weight", "language_model.lm_head.weight", "output_layer.weight"].contains(&name)
}

fn is_embedding(name: &str) -> bool {
    name == "embedding.word_embeddings.weight"
        || name.strip_suffix("embed_tokens.weight").is_some_and(|front| !front.contains("layers."))
}

/// Compares values as floats, or bytes if f32 cannot represent the dtype.
fn same_values(checkpoint: &Checkpoint, a: &StoredTensor, b: &StoredTensor) -> Result<bool> {
    let wide = [a, b].iter().all(|t| t.dtype.widens_exactly_to(Dtype::F32));
    if a.shape != b.shape || !wide && a.dtype != b.dtype {
        return Ok(false);
    }
    let (mut bytes, mut left, mut right) = (Buffer::default(), Buffer::default(), Buffer::default());
    for range in pieces(a.elements(), 4, CHUNK_BYTES) {
        let mut read = |t: &StoredTensor, out: &mut Buffer| -> Result<()> {
            let part = |elements: u64| t.dtype.bytes_for(elements).unwrap_or(t.bytes).min(t.bytes);
            let (begin, end) = (part(range.start), part(range.end));
            let from = bytes.resize((end - begin) as usize);
            checkpoint.files[t.file].read_at(from, t.begin + begin)?;
            if wide {
                let elements = (range.end - range.start) as usize;
                cast::convert(from, t.dtype, out.resize(4 * elements), Dtype::F32);
            } else {
                out.resize(from.len()).copy_from_slice(from);
            }
            Ok(())
        };
        read(a, &mut left)?;
        read(b, &mut right)?;
        let equal = match wide {
            true => {
                bytemuck::cast_slice::<u8, f32>(left.as_ref())
                    == bytemuck::cast_slice::<u8, f32>(right.as_ref())
            }
            false => left.as_ref() == right.as_ref(),
        };
        if !equal {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::MemoryTensor;
    use serde_json::json;

    fn checkpoint(tensors: &[(&str, Dtype, &[u8])]) -> Checkpoint {
        let tensor = |(name, dtype, data): &(&str, Dtype, &[u8])| {
            let shape = vec![data.len() as u64 / dtype.bytes().unwrap()];
            MemoryTensor { name: name.to_string(), dtype: *dtype, shape, data: data.to_vec() }
        };
        let blank = Checkpoint::blank(json!({}));
        Checkpoint::in_memory(&blank, tensors.iter().map(tensor).collect(), &[]).unwrap()
    }

    fn equal(a: (Dtype, &[u8]), b: (Dtype, &[u8])) -> bool {
        let tensors = [("lm_head.weight", a.0, a.1), ("model.embed_tokens.weight", b.0, b.1)];
        stored_head(&checkpoint(&tensors)).unwrap().unwrap().equal
    }

    #[test]
    fn heads_are_compared_by_value_across_types() {
        let f32s = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let one = f32s(&[1.0, -0.0]);
        assert!(equal((Dtype::F32, &one), (Dtype::F32, &f32s(&[1.0, 0.0]))));
        assert!(equal((Dtype::Bf16, &[0x80, 0x3f, 0, 0]), (Dtype::F32, &one)));
        assert!(!equal((Dtype::F32, &one), (Dtype::F32, &f32s(&[1.0, 1e-30]))));
        let nan = f32s(&[f32::NAN]);
        assert!(!equal((Dtype::F32, &nan), (Dtype::F32, &nan)), "as transformers has it");
        assert!(!equal((Dtype::F32, &one), (Dtype::F32, &f32s(&[1.0]))));
        // More than one piece.
        let mut long = f32s(&vec![0.5; 600_000]);
        let same = long.clone();
        assert!(equal((Dtype::F32, &long), (Dtype::F32, &same)));
        *long.last_mut().unwrap() ^= 1;
        assert!(!equal((Dtype::F32, &long), (Dtype::F32, &same)));
    }

    #[test]
    fn a_head_is_found_under_the_names_of_every_family() {
        for (head, embedding) in [
            ("lm_head.weight", "model.embed_tokens.weight"),
            ("lm_head.weight", "model.language_model.embed_tokens.weight"),
            ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
            ("output_layer.weight", "embedding.word_embeddings.weight"),
        ] {
            let mtp = [
                ("mtp.embed_tokens.weight", Dtype::U8, &[1][..]),
                ("model.layers.9.embed_tokens.weight", Dtype::U8, &[1]),
            ];
            let tensors = [(head, Dtype::U8, &[7][..]), (embedding, Dtype::U8, &[7][..])];
            let found = stored_head(&checkpoint(&[&mtp[..], &tensors].concat())).unwrap().unwrap();
            assert_eq!(found, StoredHead { head: head.into(), embedding: embedding.into(), equal: true });
            assert_eq!(stored_head(&checkpoint(&tensors[1..])).unwrap(), None);
        }
    }

    #[test]
    fn a_config_ties_where_it_says_so_and_in_gemma_by_default() {
        for (config, tied) in [
            (json!({}), false),
            (json!({"tie_word_embeddings": true}), true),
            (json!({"model_type": "gemma3_text"}), true),
            (json!({"model_type": "gemma3", "text_config": {}}), true),
            (json!({"model_type": "gemma2", "tie_word_embeddings": false}), false),
            (json!({"text_config": {"tie_word_embeddings": true}, "tie_word_embeddings": false}), true),
            (json!({"text_config": {"model_type": "qwen3_5_text"}, "tie_word_embeddings": true}), true),
        ] {
            assert_eq!(is_tied(&config), tied, "{config}");
        }
    }
}
