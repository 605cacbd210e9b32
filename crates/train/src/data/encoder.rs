//! Tokenization of records, with the mask of trained tokens.

use std::path::Path;

use ballast_model::text::{ChatTemplate, GenerationSettings, Tokenizer, folder_of};

use super::DataConfig;
use super::chat::{Rendered, render};
use super::record::Record;
use crate::error::{Error, Result};

/// Tokenizer and chat template of the data.
pub struct TextEncoder {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Chat template, if there is one.
    pub template: Option<ChatTemplate>,
    /// End-of-text token.
    pub eos: Option<u32>,
}

/// Token ids, and which of them are trained on.
pub(crate) type Tokens = (Vec<u32>, Vec<bool>);

impl TextEncoder {
    /// Loads the files beside a model. A text ends with the tokenizer's `eos_token`; without one, with the
    /// single id in generation_config.json or config.json.
    pub fn load(model: &Path) -> Result<TextEncoder> {
        let folder = folder_of(model);
        let tokenizer = Tokenizer::load(&folder)?;
        let template = ChatTemplate::load(&folder)?;
        let eos = match tokenizer.special_id("eos_token") {
            Some(eos) => Some(eos),
            None => match GenerationSettings::load(&folder, &tokenizer)?.stops.as_slice() {
                [eos] => Some(*eos),
                _ => None,
            },
        };
        Ok(TextEncoder { tokenizer, template, eos })
    }

    /// Returns an error if a setting needs something that the model's files lack.
    pub(crate) fn check(&self, config: &DataConfig) -> Result {
        if config.add_eos && self.eos.is_none() {
            return Err(Error::config(
                "data.add_eos",
                format!(
                    "data.add_eos: no `eos_token` in {}; add one there or set data.add_eos = false",
                    self.tokenizer.file().with_file_name("tokenizer_config.json").display()
                ),
            ));
        }
        Ok(())
    }

    /// The tokens of a record.
    pub(crate) fn record(&self, record: &Record, config: &DataConfig) -> Result<Tokens, String> {
        let words = |error: ballast_model::Error| error.to_string();
        match record {
            Record::Text(text) => self.plain(text, true, config.add_eos).map_err(words),
            Record::Completion { prompt, completion } => {
                let text = format!("{prompt}{completion}");
                let trained = prompt.len()..text.len();
                let tokens = self.masked(&Rendered { text, trained: vec![trained] }, true).map_err(words)?;
                Ok(self.ended(tokens, config.add_eos))
            }
            Record::Chat(conversation) => {
                let template = self.template.as_ref().ok_or_else(|| {
                    "`messages` need a chat template, and the model has none; add a chat_template.jinja beside tokenizer.json"
                        .to_string()
                })?;
                let special = &self.tokenizer.special;
                let rendered = render(template, special, conversation, &config.train_roles)?;
                self.masked(&rendered, false).map_err(words)
            }
        }
    }

    /// The tokens of plain text; at the begin of a document the tokenizer's prefix tokens come first.
    pub(crate) fn plain(&self, text: &str, begins: bool, add_eos: bool) -> ballast_model::Result<Tokens> {
        let ids = self.tokenizer.encode(text, begins)?;
        let trained = vec![true; ids.len()];
        Ok(self.ended((ids, trained), add_eos))
    }

    /// A token is trained on if its last byte is in a trained range.
    fn masked(&self, rendered: &Rendered, special: bool) -> ballast_model::Result<Tokens> {
        let (ids, ends) = self.tokenizer.encode_with_ends(&rendered.text, special)?;
        let inside = |end: &usize| {
            let span = rendered.trained.partition_point(|span| span.end < *end);
            rendered.trained.get(span).is_some_and(|span| span.start < *end)
        };
        let trained = ends.iter().map(inside).collect();
        Ok((ids, trained))
    }

    /// Appends the end-of-text token, unless it is there, and trains on it.
    fn ended(&self, (mut ids, mut trained): Tokens, add_eos: bool) -> Tokens {
        if let (true, Some(eos)) = (add_eos, self.eos) {
            if ids.last() != Some(&eos) {
                ids.push(eos);
                trained.push(true);
            }
            trained.last_mut().into_iter().for_each(|last| *last = true);
        }
        (ids, trained)
    }
}
