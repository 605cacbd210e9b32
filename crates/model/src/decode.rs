//! Decoding: runs the new tokens of one or several sequences on the cached state of the earlier ones.
//!
//! Prompt, continuation and single token are the same call. Each layer runs on the new tokens and keeps its
//! state:
//! - softmax attention: a KV cache
//! - latent attention: a KV cache and the indexer's keys
//! - linear attention: the last columns of the convolution's input and the f32 recurrent state

use ballast_kernels::{Element, Scratch};
use half::bf16;

use crate::batch::Batch;
use crate::config::{Layer, Mixer};
use crate::error::{Error, Result};
use crate::layers::State;
use crate::layerwise::Trail;
use crate::model::Model;
use crate::params::Part;
use crate::precision::{Storage, with_storage};
use crate::probe::Probe;
use crate::run::Tally;

/// Maximum number of new tokens per forward pass; a longer prompt is split into pieces of this length.
pub const PREFILL_TOKENS: usize = 512;

/// Decoding session: sequences that are decoded together.
pub struct Session<'m> {
    model: &'m Model,
    states: SessionStates,
    /// Number of tokens so far, by sequence.
    lengths: Vec<usize>,
    scratch: Scratch,
}

enum SessionStates {
    F32(Vec<State<f32>>),
    Bf16(Vec<State<bf16>>),
}

impl Model {
    /// Starts a decoding session with `sequences` empty sequences.
    pub fn session(&self, sequences: usize) -> Session<'_> {
        let states = match self.precision().activations {
            Storage::F32 => SessionStates::F32(self.states(sequences)),
            Storage::Bf16 => SessionStates::Bf16(self.states(sequences)),
        };
        Session { model: self, states, lengths: vec![0; sequences], scratch: Scratch::new(0) }
    }

    /// Predicts [`Session::bytes`], the bytes of caches and states, for one sequence of `tokens` tokens.
    pub fn session_bytes(&self, tokens: usize) -> usize {
        let element = self.precision().activations.bytes();
        let bytes = |layer: &Layer| match &layer.mixer {
            Mixer::Linear(linear) => {
                let (kd, vd) = (linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim);
                (2 * kd + vd) * (linear.conv_width - 1) * element + 4 * linear.key_dim * vd
            }
            Mixer::Softmax(attention) if attention.shared_from.is_some() => 0,
            Mixer::Softmax(attention) => 2 * tokens * attention.kv_heads * attention.head_dim * element,
            Mixer::Latent(latent) => {
                let head = latent.nope_dim + latent.rope_dim + latent.value_dim;
                tokens * (latent.heads * head + latent.index_dim) * element
            }
        };
        self.config.layers.iter().map(bytes).sum()
    }
}

impl Session<'_> {
    /// Number of tokens so far, by sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Bytes of caches and states.
    pub fn bytes(&self) -> usize {
        with_storage!(SessionStates, &self.states, |states| states.iter().map(State::bytes).sum())
    }

    /// Appends new tokens to every sequence and returns the logits \[V\] after the last token of each. A
    /// sequence may have no new tokens; its logits are empty.
    pub fn advance(&mut self, tokens: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let mut last = vec![Vec::new(); tokens.len()];
        let longest = tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0);
        for first in (0..longest).step_by(PREFILL_TOKENS) {
            let piece: Vec<&[u32]> = tokens
                .iter()
                .map(|tokens| &tokens[first.min(tokens.len())..(first + PREFILL_TOKENS).min(tokens.len())])
                .collect();
            let vocabulary = self.model.config.vocabulary;
            let logits = self.piece(&piece, false, None)?;
            let mut rows = logits.chunks(vocabulary);
            for (last, piece) in last.iter_mut().zip(&piece) {
                if !piece.is_empty() {
                    *last = rows.next().unwrap_or_default().to_vec();
                }
            }
        }
        Ok(last)
    }

    /// Appends new tokens to every sequence in one forward pass and returns the logits of all of them:
    /// [new tokens, V].
    pub fn advance_all(&mut self, tokens: &[&[u32]], probe: Option<&mut dyn Probe>) -> Result<Vec<f32>> {
        self.piece(tokens, true, probe)
    }

    fn piece(&mut self, tokens: &[&[u32]], all: bool, probe: Option<&mut dyn Probe>) -> Result<Vec<f32>> {
        if tokens.len() != self.lengths.len() {
            return Err(Error::Input(format!(
                "got new tokens for {} sequences, but the session has {}",
                tokens.len(),
                self.lengths.len()
            )));
        }
        let mut ends = vec![0];
        for tokens in tokens {
            ends.push(ends[ends.len() - 1] + tokens.len());
        }
        let mut batch = Batch::packed(tokens.concat(), ends)?;
        for (ends, before) in batch.cu_seqlens.windows(2).zip(&self.lengths) {
            for position in &mut batch.positions[ends[0]..ends[1]] {
                *position += *before as u32;
            }
        }
        let (model, scratch) = (self.model, &self.scratch);
        // Runs on a thread of the pool: from another thread, every kernel call would wake a worker and wait
        // for it.
        let logits = rayon::scope(|_| {
            with_storage!(SessionStates, &mut self.states, |states| {
                model.advance(states, &batch, all, scratch, probe)
            })
        })?;
        for (length, tokens) in self.lengths.iter_mut().zip(tokens) {
            *length += tokens.len();
        }
        Ok(logits)
    }
}

impl Model {
    fn states<A: Element>(&self, sequences: usize) -> Vec<State<A>> {
        self.layers().iter().map(|layer| layer.state(&self.config, sequences)).collect()
    }

    /// Returns the logits of all new tokens, or of the last new token of each sequence that has any.
    fn advance<A: Element>(
        &self,
        states: &mut [State<A>],
        batch: &Batch,
        all: bool,
        scratch: &Scratch,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Vec<f32>> {
        batch.check(self.config.vocabulary)?;
        if batch.tokens() == 0 {
            return Ok(Vec::new());
        }
        let tables = self.tables(&batch.positions);
        let tally = Tally::default();
        let run = self.run_on(batch, &tables, scratch, &tally, probe.map(|probe| probe as &mut dyn Probe))?;
        let mut trail = Trail::new(self, None);
        for part in Part::before_head(states.len()) {
            self.part_forward(&run, &mut trail, part, Some(&mut *states))?;
        }
        let hidden: Vec<A> = self.hidden(&run, &trail)?;
        if all {
            return self.project(&run, &hidden);
        }
        let width = self.config.hidden;
        let last: Vec<A> = batch
            .cu_seqlens
            .windows(2)
            .filter(|ends| ends[1] > ends[0])
            .flat_map(|ends| &hidden[(ends[1] - 1) * width..ends[1] * width])
            .copied()
            .collect();
        self.project(&run, &last)
    }
}
