//! Which tensors of a file are the model, and which lie beside it: optimizer state, averages, buffers of a run.
//!
//! A tensor is reached by keys. One rule serves files of `torch.save` and folders of torch.distributed.checkpoint:
//! - a dict under `model`, `state_dict`, `model_state_dict` or `module` is the model, and all else is beside it.
//!   Two of them are an error, because either may be meant;
//! - a dict that is alone and has such a dict (`{"app": {"model": ..., "optim": ...}}`) is looked into;
//! - else everything is the model, but for dicts under the keys of an optimizer and for its moments.

use ballast_files::Result;

use super::saved::Found;

/// Keys under which the model is saved.
const MODEL: [&str; 4] = ["model", "state_dict", "model_state_dict", "module"];
/// Keys under which the optimizer is saved.
const OPTIMIZER: [&str; 8] = [
    "optimizer",
    "optim",
    "optimizers",
    "optimizer_state_dict",
    "optimizer_states",
    "optim_state_dict",
    "opt",
    "opt_state",
];
/// State that optimizers have for each parameter.
const MOMENTS: [&str; 6] =
    ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "fp32_param"];

/// A tensor, or why it is not supported.
pub(super) struct Item {
    /// All keys that lead to it, with dots between them.
    pub(super) name: String,
    /// The bytes of these dots. A key may have dots itself.
    pub(super) cuts: Vec<u32>,
    pub(super) tensor: Result<Found, String>,
}

impl Item {
    /// The key at a level, if it leads to a dict and not to the tensor itself.
    fn dict_key(&self, level: usize) -> Option<&str> {
        let end = *self.cuts.get(level)? as usize;
        Some(&self.name[self.start(level)..end])
    }

    /// The byte at which the key of a level begins.
    fn start(&self, level: usize) -> usize {
        level.checked_sub(1).and_then(|before| self.cuts.get(before)).map_or(0, |cut| *cut as usize + 1)
    }
}

/// Tensors of the model, without the keys that lead to it, and those beside it.
pub(super) struct Divided {
    pub(super) model: Vec<Item>,
    pub(super) beside: Vec<Item>,
}

/// Divides the tensors of a file. The error is the problem.
pub(super) fn divide(items: Vec<Item>) -> Result<Divided, String> {
    let (mut model, mut beside) = (items, Vec::new());
    let mut level = 0;
    while let Some(key) = key_of_model(&model, level)? {
        let (inner, outer): (Vec<Item>, Vec<Item>) =
            model.into_iter().partition(|item| item.dict_key(level) == Some(key.as_str()));
        model = inner;
        beside.extend(outer);
        level += 1;
        // A model may have a module called `model`; below the first one, only an optimizer tells another wrapper.
        let has_optimizer = model.iter().any(|item| item.dict_key(level).is_some_and(is_optimizer));
        if MODEL.contains(&key.as_str()) && !has_optimizer {
            break;
        }
    }
    let is_beside = |item: &Item| {
        item.dict_key(level).is_some_and(is_optimizer)
            || item.name[item.start(level)..].split('.').any(|part| MOMENTS.contains(&part))
    };
    let (outer, mut model): (Vec<Item>, Vec<Item>) = model.into_iter().partition(is_beside);
    beside.extend(outer);
    for item in &mut model {
        item.name.drain(..item.start(level));
        if let Ok(tensor) = &mut item.tensor {
            tensor.name.clone_from(&item.name);
        }
    }
    Ok(Divided { model, beside })
}

fn is_optimizer(key: &str) -> bool {
    OPTIMIZER.contains(&key)
}

/// The key at a level that leads to the model; none if the model is at this level.
fn key_of_model(items: &[Item], level: usize) -> Result<Option<String>, String> {
    let has = |key: &str| items.iter().any(|item| item.dict_key(level) == Some(key));
    match MODEL.into_iter().filter(|key| has(key)).collect::<Vec<_>>()[..] {
        [key] => return Ok(Some(key.into())),
        [first, second, ..] => {
            return Err(format!(
                "tensors lie under both {first:?} and {second:?}, and either may be the model; save one of them alone"
            ));
        }
        [] => {}
    }
    // One dict alone, with a model in it.
    let Some(key) = items.first().and_then(|item| item.dict_key(level)) else { return Ok(None) };
    let is_alone = items.iter().all(|item| item.dict_key(level) == Some(key));
    let has_model = items.iter().any(|item| item.dict_key(level + 1).is_some_and(|key| MODEL.contains(&key)));
    Ok((is_alone && has_model).then(|| key.into()))
}
