//! The published questions, answered for the model at hand, in words with figures.
//!
//! A choice "matters" by comparison: with what storing everything else in bf16 costs (the run `bf16`, which keeps the
//! contract), since that is the price that was accepted already; and with the floor, the run in f32.

use ballast_model::Site;
use ballast_report::format::{
    bytes, capitalized, exact_percent, name_pattern, number, percent, plural, signed,
};

use crate::findings::{Answer, DecayError, Findings, ProtectedTensor, Run};

/// A tenth of what bf16 storage costs, and half of it: below the first a choice does not matter, above the second it does.
const LITTLE: f64 = 0.1;
const MUCH: f64 = 0.5;

/// All questions that the findings can answer.
pub fn answers(findings: &Findings) -> Vec<Answer> {
    let tensors = [("A_log", "A_log"), ("out_norm", "linear_attn.norm.weight"), ("dt_bias", "dt_bias")];
    let mut answers: Vec<Answer> =
        tensors.iter().filter_map(|(name, end)| rounded_tensor(findings, name, end)).collect();
    answers.extend(compounding(findings));
    answers.extend(decoded_state(findings));
    answers.extend(resolution(findings));
    answers.extend(indexer(findings));
    answers.extend(l2norm(findings));
    answers.extend(stored(findings));
    for answer in &mut answers {
        answer.short = capitalized(&answer.short);
    }
    answers
}

fn run<'f>(findings: &'f Findings, name: &str) -> Option<&'f Run> {
    findings.runs.iter().find(|run| run.name == name)
}

/// How a run's damage compares: a word, and a sentence.
fn verdict(findings: &Findings, run: &Run) -> (&'static str, String) {
    let (word, _, sentence) = judge(findings, run);
    (word, sentence)
}

/// A word, a few words, a sentence.
fn judge(findings: &Findings, run: &Run) -> (&'static str, String, String) {
    if let Some(place) = &run.not_finite {
        let text =
            format!("what comes out of it is non-finite, first in {} ({} values)", place.site, place.count);
        return ("yes", text.clone(), text);
    }
    let own = run.kl.mean;
    let floor = self::run(findings, "f32").map_or(0.0, |run| run.kl.mean);
    let figures = format!(
        "a KL divergence of {} per token (largest {}), a loss that differs by {}, and the same likeliest token for {} of tokens",
        number(own),
        number(run.kl.max),
        signed(run.loss_difference),
        exact_percent(run.top1_agreement)
    );
    let brief = format!("KL {}", number(own));
    let Some(bf16) = self::run(findings, "bf16").map(|run| run.kl.mean).filter(|kl| *kl > 0.0) else {
        let word = if own <= 2.0 * floor { "no" } else { "measured" };
        return (word, brief, format!("it costs {figures}; the floor of f32 is {}", number(floor)));
    };
    let part = own / bf16;
    let word = if own <= 2.0 * floor { "no" } else { word(part) };
    let beside = if own <= 2.0 * floor {
        format!("that is the floor of f32 arithmetic itself ({})", number(floor))
    } else {
        format!(
            "that is {} what storing weights and activations in bf16 costs with the contract kept",
            times(part)
        )
    };
    (word, format!("{brief}, {} bf16 storage's", times(part)), format!("it costs {figures}; {beside}"))
}

/// Of a part of what bf16 storage costs; what is not a number matters.
fn word(part: f64) -> &'static str {
    match part {
        _ if part < LITTLE => "hardly",
        _ if part < MUCH => "a little",
        _ => "yes",
    }
}

/// `0.3 % of`, `12 % of`, `3.4 times`.
fn times(part: f64) -> String {
    match part {
        _ if part >= 1.0 => format!("{} times", number(part)),
        _ if part >= 0.01 => format!("{:.0} % of", 100.0 * part),
        _ => format!("{} % of", number(100.0 * part)),
    }
}

fn rounded_tensor(findings: &Findings, name: &str, end: &str) -> Option<Answer> {
    let run = run(findings, name)?;
    let stored: Vec<&ProtectedTensor> = findings.protected.iter().filter(|t| t.name.ends_with(end)).collect();
    let (beyond, all) = stored.iter().fold((0, 0), |(b, n), t| (b + t.beyond_bf16, n + t.elements));
    let question = format!("Does {name} in bf16 matter here?");
    if beyond == 0 {
        let text = format!(
            "All {all} values of it in this checkpoint are bf16 values already, so rounding changes nothing."
        );
        return Some(Answer { question, short: "no: it holds bf16 values".into(), text });
    }
    let (word, mut text) = verdict(findings, run);
    text = format!("Rounded alone ({beyond} of {all} values are beyond bf16), {text}.");
    if name == "A_log" && !run.decay.is_empty() {
        let error = |d: &DecayError| d.rate_error.abs();
        let largest = run.decay.iter().map(error).fold(0.0, f64::max);
        let mean = run.decay.iter().map(error).sum::<f64>() / run.decay.len() as f64;
        text += &format!(
            " The decay rate exp(A_log) is off by {} % on average and by {} % at most, over {}; half-lives change by as much.",
            number(100.0 * mean),
            number(100.0 * largest),
            plural(run.decay.len(), "head")
        );
    }
    Some(Answer { question, short: word.into(), text })
}

/// Whether A_log's rounding grows along the sequence.
fn compounding(findings: &Findings) -> Option<Answer> {
    let run = run(findings, "A_log").filter(|run| run.first_difference.is_some())?;
    let by_position = &run.by_position;
    let last = by_position.last()?;
    // The first positions hardly decay anything.
    let early = by_position.iter().find(|p| p.from >= 8 && p.to <= last.from)?;
    let (a, b) = (early.recurrence?, last.recurrence?);
    if a == 0.0 && b == 0.0 {
        return None;
    }
    let ratio = b / a;
    let short = match ratio {
        _ if !ratio.is_finite() => "non-finite",
        _ if ratio > 4.0 => "yes",
        _ if ratio > 1.25 => "a little",
        _ => "no",
    };
    let most = by_position.iter().filter_map(|p| p.recurrence).fold(0.0, f64::max);
    let full =
        by_position.iter().find(|p| p.recurrence.is_some_and(|error| error >= 0.9 * most)).unwrap_or(last);
    let text = format!(
        "With A_log rounded, the delta rule's outputs are off by {} at positions {} to {} and by {} at positions {} to {}: {} \
         times as much. They come to 90 % of their largest error ({}) at positions {} to {}. KL at the first and the last of \
         these: {} and {}.",
        number(a),
        early.from,
        early.to - 1,
        number(b),
        last.from,
        last.to - 1,
        number(ratio),
        number(most),
        full.from,
        full.to - 1,
        number(early.kl),
        number(last.kl)
    );
    Some(Answer {
        question: "Does the recurrence compound A_log's rounding along the sequence?".into(),
        short: short.into(),
        text,
    })
}

/// Whether the recurrent state can be kept in bf16 while a text is written.
fn decoded_state(findings: &Findings) -> Option<Answer> {
    let decoded = |name: &str| findings.decoding.iter().find(|run| run.name == name);
    let state = decoded("state")?;
    let mut text = format!(
        "Rounded at every token it costs a KL divergence of {} per token (largest {}) beside decoding in f32, and the same \
         likeliest token for {} of tokens",
        number(state.kl.mean),
        number(state.kl.max),
        exact_percent(state.top1_agreement)
    );
    if let Some(run) = run(findings, "state").filter(|run| run.kl.mean > 0.0) {
        let ratio = state.kl.mean / run.kl.mean;
        text += &format!("; rounded from chunk to chunk only, as in a prefill, {}", number(run.kl.mean));
        text += &if ratio > 1.0 { format!(": {} times less", number(ratio)) } else { String::new() };
    }
    let mut short = "measured".to_string();
    if let Some(bf16) = decoded("bf16").filter(|run| run.kl.mean > 0.0) {
        let part = state.kl.mean / bf16.kl.mean;
        short = word(part).into();
        text += &format!("; that is {} what decoding in bf16 storage with an f32 state costs", times(part));
    }
    text += ".";
    let mut later = state.by_position.iter().filter(|place| place.from >= 8);
    if let (Some(first), Some(last)) = (later.next(), later.next_back()) {
        text += &format!(
            " KL at positions {} to {} is {}, at {} to {} it is {}.",
            first.from,
            first.to - 1,
            number(first.kl),
            last.from,
            last.to - 1,
            number(last.kl)
        );
    }
    let question = "Does it matter to keep the recurrent state in bf16 while decoding?".into();
    Some(Answer { question, short, text })
}

fn resolution(findings: &Findings) -> Option<Answer> {
    let widest = findings.attention.iter().max_by(|a, b| a.largest.total_cmp(&b.largest))?;
    let mut text = format!(
        "The largest |logit| is {} (layer {}), where neighbours in bf16 are {} apart",
        number(widest.largest),
        widest.layer,
        number(widest.bf16_ulp)
    );
    text += &match widest.f16_ulp {
        Some(ulp) => format!(" and in f16 {}: neither overflows.", number(ulp)),
        None => "; f16 ends at 65504 and overflows, bf16 does not.".into(),
    };
    let mut short = if widest.f16_ulp.is_none() { "f16 overflows" } else { "no overflow" }.to_string();
    let changed = |run: &Run| run.attention.iter().map(|a| a.top_key_changed).fold(0.0, f64::max);
    let [product, logits] = [Site::QkProduct, Site::Logits].map(Site::name);
    for name in [product, logits, &format!("{product}=f16"), &format!("{logits}=f16")] {
        if let Some(run) = run(findings, name) {
            let (word, brief, _) = judge(findings, run);
            if name == product || name == logits {
                short += &format!("; {name} in bf16: {word}");
            }
            text += &format!(
                " {name}: {brief}; another key is the largest in up to {} of a layer's rows.",
                exact_percent(changed(run))
            );
        }
    }
    if run(findings, product).is_some() {
        text += " (qk_product rounds the product alone; logits rounds maximum, exponentials and sum of the softmax too.)";
    }
    Some(Answer { question: "Do attention logits overflow, or lose resolution?".into(), short, text })
}

fn indexer(findings: &Findings) -> Option<Answer> {
    let run = run(findings, Site::IndexerLogits.name())?;
    let question = "Do the indexer's logits need f32?".to_string();
    let learning = learning(findings, run);
    if run.indexer.is_empty() {
        let text = "No query had more keys than the indexer takes (or the input is too long to look at every score), so it chose \
                    nothing.";
        return Some(Answer { question, short: "not here".into(), text: text.to_string() + &learning });
    }
    let mean = run.indexer.iter().map(|layer| layer.overlap).sum::<f64>() / run.indexer.len() as f64;
    let same = run.indexer.iter().map(|layer| layer.same).sum::<f64>() / run.indexer.len() as f64;
    let (word, sentence) = verdict(findings, run);
    let text = format!(
        "In bf16, {} of the chosen keys are the reference's, and {} of queries choose exactly the same; {sentence}.{learning}",
        exact_percent(mean),
        exact_percent(same)
    );
    Some(Answer { question, short: word.into(), text })
}

/// What rounded logits do to the training of the indexers.
fn learning(findings: &Findings, run: &Run) -> String {
    let Some(error) = run.indexer_gradient_error else { return String::new() };
    let mut text =
        format!(" The gradients that the indexers have of their own loss are off by {}", number(error));
    if let Some(bf16) = self::run(findings, "bf16").and_then(|run| run.indexer_gradient_error) {
        text += &format!(", where bf16 storage has {}", number(bf16));
    }
    text + "."
}

fn l2norm(findings: &Findings) -> Option<Answer> {
    let longest = findings.l2norm.last()?;
    let saved = findings
        .l2norm
        .iter()
        .map(|row| format!("{} at {}", bytes(row.outside - row.inside), plural(row.tokens, "token")));
    let mut text = format!(
        "Inside, in f32, nothing of q's and k's size is kept for backward: over all layers that saves {} in bf16, {} of what \
         the outside form keeps of q and k.",
        saved.collect::<Vec<_>>().join(", "),
        percent(1.0 - longest.inside as f64 / longest.outside as f64)
    );
    if let Some(floor) = run(findings, "f32") {
        let errors =
            floor.sites.iter().filter(|site| site.site.ends_with("linear_attn.o")).map(|site| site.error);
        text += &format!(
            " The delta rule with the norm inside is within {} of the {} one at every layer in f32.",
            number(errors.fold(0.0, f64::max)),
            findings.reference.arithmetic
        );
    }
    let mut short = "it loses nothing".to_string();
    if let Some(run) = run(findings, Site::L2Norm.name()) {
        let (word, sentence) = verdict(findings, run);
        short = format!("it loses nothing; outside in bf16 matters: {word}");
        text += &format!(" Normalised outside and rounded to bf16, {sentence}.");
    }
    Some(Answer {
        question: "Is the q/k norm inside the kernel lossless, and what does it save?".into(),
        short,
        text,
    })
}

fn stored(findings: &Findings) -> Option<Answer> {
    if findings.protected.is_empty() {
        return None;
    }
    let mut kinds: Vec<(String, &str, u64, u64, usize)> = Vec::new();
    for tensor in &findings.protected {
        let kind = name_pattern(&tensor.name).trim_start_matches("layers.*.").to_string();
        match kinds.iter_mut().find(|(name, dtype, ..)| *name == kind && *dtype == tensor.dtype) {
            Some((_, _, beyond, all, count)) => {
                *beyond += tensor.beyond_bf16;
                *all += tensor.elements;
                *count += 1;
            }
            None => kinds.push((kind, &tensor.dtype, tensor.beyond_bf16, tensor.elements, 1)),
        }
    }
    let sentence = |(kind, dtype, beyond, all, count): &(String, &str, u64, u64, usize)| {
        let content = if *beyond == 0 {
            "holds bf16 values only".into()
        } else {
            format!("carries more than bf16 in {beyond} of {all} values")
        };
        format!("{kind} is {dtype} in {} and {content}", plural(*count, "layer"))
    };
    let text = kinds.iter().map(sentence).collect::<Vec<_>>().join("; ") + ".";
    let beyond = findings.protected.iter().any(|tensor| tensor.beyond_bf16 > 0);
    let f32 = findings.protected.iter().any(|tensor| tensor.dtype == "F32");
    let short = match (f32, beyond) {
        (true, true) => "f32 with f32 content",
        (true, false) => "f32 files, bf16 content",
        _ => "bf16",
    };
    let question =
        "Which dtype does this checkpoint use for protected tensors, and does their content need it?";
    Some(Answer { question: question.into(), short: short.into(), text })
}
