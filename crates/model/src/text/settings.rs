//! Default sampling settings of a model and its stop tokens, from `generation_config.json`.

use std::path::Path;

use serde_json::{Map, Value};

use super::{Tokenizer, read_object, text_error};
use crate::error::Result;

/// Settings of the file; `None` for those it lacks.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct GenerationSettings {
    pub do_sample: Option<bool>,
    pub temperature: Option<f64>,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub max_new_tokens: Option<usize>,
    /// Stop tokens: `eos_token_id` of this file, else of config.json; and the tokenizer's `eos_token`.
    pub stops: Vec<u32>,
}

impl GenerationSettings {
    /// Loads the settings from the folder of a model.
    pub fn load(folder: &Path, tokenizer: &Tokenizer) -> Result<GenerationSettings> {
        let file = folder.join("generation_config.json");
        let fields = Fields { object: read_object(&file)?, file: &file };
        let mut stops = match fields.ids("eos_token_id")? {
            ids if !ids.is_empty() => ids,
            _ => {
                let file = folder.join("config.json");
                let config = read_object(&file)?;
                // Vision models keep their text model's settings one level down.
                let text = config.get("text_config").and_then(Value::as_object).cloned();
                let top = Fields { object: config, file: &file }.ids("eos_token_id")?;
                match text {
                    Some(object) if top.is_empty() => Fields { object, file: &file }.ids("eos_token_id")?,
                    _ => top,
                }
            }
        };
        stops.extend(tokenizer.special_id("eos_token"));
        stops.sort_unstable();
        stops.dedup();
        Ok(GenerationSettings {
            do_sample: fields.get("do_sample", "true or false", Value::as_bool)?,
            temperature: fields.number("temperature", "a number from 0", |x| x >= 0.0)?,
            top_k: fields.count("top_k")?,
            top_p: fields.number("top_p", "a number above 0, up to 1", |x| x > 0.0 && x <= 1.0)?,
            min_p: fields.number("min_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: fields.number("repetition_penalty", "a number above 0", |x| x > 0.0)?,
            max_new_tokens: fields.count("max_new_tokens")?,
            stops,
        })
    }
}

struct Fields<'a> {
    object: Map<String, Value>,
    file: &'a Path,
}

impl Fields<'_> {
    fn get<T>(&self, name: &str, expected: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        match self.object.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value)
                .map(Some)
                .ok_or_else(|| text_error(self.file, format!("`{name}` is {value}, not {expected}"))),
        }
    }

    fn number(&self, name: &str, expected: &str, holds: fn(f64) -> bool) -> Result<Option<f64>> {
        self.get(name, expected, |value| value.as_f64().filter(|x| holds(*x)))
    }

    fn count(&self, name: &str) -> Result<Option<usize>> {
        self.get(name, "a whole number from 0", |value| value.as_u64().map(|n| n as usize))
    }

    /// One id or a list of them.
    fn ids(&self, name: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let read = |value: &Value| match value {
            Value::Array(ids) => ids.iter().map(id).collect(),
            value => Some(vec![id(value)?]),
        };
        Ok(self.get(name, "an id or a list of ids", read)?.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::fixture;
    use super::*;

    #[test]
    fn settings_and_stops_come_from_the_files() {
        let tokenizer = Tokenizer::load(&fixture()).unwrap();
        let settings = GenerationSettings::load(&fixture(), &tokenizer).unwrap();
        assert_eq!(
            (settings.do_sample, settings.temperature, settings.top_k),
            (Some(true), Some(0.7), Some(20))
        );
        assert_eq!((settings.top_p, settings.min_p, settings.max_new_tokens), (Some(0.95), None, Some(24)));
        assert_eq!(settings.stops, [157, 159]);
    }

    #[test]
    fn stops_are_a_number_or_a_list_in_either_file_and_the_tokenizers() {
        let tokenizer = Tokenizer::load(&fixture()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let stops = || GenerationSettings::load(folder.path(), &tokenizer).map(|settings| settings.stops);
        assert_eq!(stops().unwrap(), [159]);
        put("config.json", r#"{"text_config": {"eos_token_id": 5}}"#);
        assert_eq!(stops().unwrap(), [5, 159]);
        put("config.json", r#"{"eos_token_id": [7, 6], "text_config": {"eos_token_id": 5}}"#);
        assert_eq!(stops().unwrap(), [6, 7, 159]);
        put("generation_config.json", r#"{"eos_token_id": 3}"#);
        assert_eq!(stops().unwrap(), [3, 159]);
        put("generation_config.json", r#"{"eos_token_id": -3}"#);
        assert!(stops().unwrap_err().to_string().contains("`eos_token_id` is -3, not an id"));
        put("generation_config.json", r#"{"top_p": 0}"#);
        assert!(
            stops()
                .unwrap_err()
                .to_string()
                .contains("generation_config.json: `top_p` is 0, not a number above 0")
        );
        put("generation_config.json", "[]");
        assert!(stops().unwrap_err().to_string().contains("not a JSON object"));
    }
}
