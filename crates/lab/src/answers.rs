//! Answers to the published questions for this model, with numbers.
//!
//! A choice "matters" relative to two runs: `bf16` (bf16 storage with the contract kept), whose cost is
//! accepted already, and `f32`, the floor.

use ballast_format::{bytes, capitalized, exact_percent, name_pattern, number, percent, plural, signed};
use ballast_model::Site;

use crate::findings::{Answer, DecayError, Findings, ProtectedTensor, Run};

/// Fractions of the cost of bf16 storage: below `LITTLE` a choice hardly matters, from `MUCH` on it does.
const LITTLE: f64 = 0.1;
const MUCH: f64 = 0.5;

/// Answers all questions that the findings can answer.
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

/// The verdict on a run: a word and a sentence.
fn verdict(findings: &Findings, run: &Run) -> (&'static str, String) {
    let (word, _, sentence) = judge(findings, run);
    (word, sentence)
}

/// The verdict on a run: a word, a short phrase and a sentence.
fn judge(findings: &Findings, run: &Run) -> (&'static str, String, String) {
    if let Some(place) = &run.not_finite {
        let text = format!("it produces non-finite values, first in {} ({} values)", place.site, place.count);
        return ("yes", text.clone(), text);
    }
    let own = run.kl.mean;
    let floor = self::run(findings, "f32").map_or(0.0, |run| run.kl.mean);
    let figures = format!(
        "a mean KL divergence of {} per token (max {}), a loss difference of {}, and a top-1 agreement of {}",
        number(own),
        number(run.kl.max),
        signed(run.loss_difference),
        exact_percent(run.top1_agreement)
    );
    let brief = format!("KL {}", number(own));
    let Some(bf16) = self::run(findings, "bf16").map(|run| run.kl.mean).filter(|kl| *kl > 0.0) else {
        let word = if own <= 2.0 * floor { "no" } else { "measured" };
        return (word, brief, format!("it costs {figures}; the f32 floor is {}", number(floor)));
    };
    let part = own / bf16;
    let word = if own <= 2.0 * floor { "no" } else { word(part) };
    let beside = if own <= 2.0 * floor {
        format!("that is at the f32 floor ({})", number(floor))
    } else {
        format!("that is {} the cost of bf16 storage with the contract kept", times(part))
    };
    (word, format!("{brief}, {} that of bf16 storage", times(part)), format!("it costs {figures}; {beside}"))
}

/// The word for a fraction of the cost of bf16 storage; NaN gives `yes`.
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
        let text =
            format!("All {all} values in this checkpoint are exact in bf16, so rounding changes nothing.");
        return Some(Answer { question, short: "no, its values are exact in bf16".into(), text });
    }
    let (word, mut text) = verdict(findings, run);
    text = format!("Rounded alone ({beyond} of {all} values are not exact in bf16), {text}.");
    if name == "A_log" && !run.decay.is_empty() {
        let error = |d: &DecayError| d.rate_error.abs();
        let largest = run.decay.iter().map(error).fold(0.0, f64::max);
        let mean = run.decay.iter().map(error).sum::<f64>() / run.decay.len() as f64;
        text += &format!(
            " The decay rate exp(A_log) of {} changes by {} % on average and {} % at most; half-lives change by as much.",
            plural(run.decay.len(), "head"),
            number(100.0 * mean),
            number(100.0 * largest)
        );
    }
    Some(Answer { question, short: word.into(), text })
}

/// Growth of A_log's rounding error along the sequence.
fn compounding(findings: &Findings) -> Option<Answer> {
    let run = run(findings, "A_log").filter(|run| run.first_difference.is_some())?;
    let by_position = &run.by_position;
    let last = by_position.last()?;
    // At the first positions the state has hardly anything to decay.
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
        "With A_log rounded, the relative error of the delta rule's outputs is {} at positions {} to {} and {} at positions {} to \
         {}: {} times as much. It reaches 90 % of its maximum ({}) at positions {} to {}. Mean KL at the first and the last of \
         these ranges: {} and {}.",
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

/// The cost of a bf16 recurrent state while decoding.
fn decoded_state(findings: &Findings) -> Option<Answer> {
    let decoded = |name: &str| findings.decoding.iter().find(|run| run.name == name);
    let state = decoded("state")?;
    let mut text = format!(
        "Rounded at every token, it costs a mean KL divergence of {} per token (max {}) relative to decoding in f32, with a \
         top-1 agreement of {}",
        number(state.kl.mean),
        number(state.kl.max),
        exact_percent(state.top1_agreement)
    );
    if let Some(run) = run(findings, "state").filter(|run| run.kl.mean > 0.0) {
        let ratio = state.kl.mean / run.kl.mean;
        text += &format!("; rounded only between chunks, as in prefill, it costs {}", number(run.kl.mean));
        text += &if ratio > 1.0 { format!(": {} times less", number(ratio)) } else { String::new() };
    }
    let mut short = "measured".to_string();
    if let Some(bf16) = decoded("bf16").filter(|run| run.kl.mean > 0.0) {
        let part = state.kl.mean / bf16.kl.mean;
        short = word(part).into();
        text += &format!("; that is {} the cost of decoding in bf16 storage with an f32 state", times(part));
    }
    text += ".";
    let mut later = state.by_position.iter().filter(|place| place.from >= 8);
    if let (Some(first), Some(last)) = (later.next(), later.next_back()) {
        text += &format!(
            " Mean KL is {2} at positions {0} to {1} and {5} at positions {3} to {4}.",
            first.from,
            first.to - 1,
            number(first.kl),
            last.from,
            last.to - 1,
            number(last.kl)
        );
    }
    let question = "Does a bf16 recurrent state matter while decoding?".into();
    Some(Answer { question, short, text })
}

fn resolution(findings: &Findings) -> Option<Answer> {
    let widest = findings.attention.iter().max_by(|a, b| a.largest.total_cmp(&b.largest))?;
    let mut text = format!(
        "The largest |logit| is {} (layer {}), where neighbors are {} apart in bf16",
        number(widest.largest),
        widest.layer,
        number(widest.bf16_ulp)
    );
    text += &match widest.f16_ulp {
        Some(ulp) => format!(" and {} in f16: neither overflows.", number(ulp)),
        None => "; f16 overflows beyond 65504, bf16 does not.".into(),
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
            text += &match changed(run) {
                0.0 => format!(" {name}: {brief}; the top key changes in no row."),
                share => format!(
                    " {name}: {brief}; the top key changes in up to {} of a layer's rows.",
                    exact_percent(share)
                ),
            };
        }
    }
    if run(findings, product).is_some() {
        text += " (qk_product rounds the product alone; logits also rounds the maximum, exponentials and sum of the softmax.)";
    }
    Some(Answer { question: "Do attention logits overflow or lose resolution?".into(), short, text })
}

fn indexer(findings: &Findings) -> Option<Answer> {
    let run = run(findings, Site::IndexerLogits.name())?;
    let question = "Do the indexer's logits need f32?".to_string();
    let learning = learning(findings, run);
    if run.indexer.is_empty() {
        let text = "No query has more keys than the indexer takes (or the input is too long to compare every score), so there is no \
                    choice to compare.";
        return Some(Answer {
            question,
            short: "not measured here".into(),
            text: text.to_string() + &learning,
        });
    }
    let mean = run.indexer.iter().map(|layer| layer.overlap).sum::<f64>() / run.indexer.len() as f64;
    let same = run.indexer.iter().map(|layer| layer.same).sum::<f64>() / run.indexer.len() as f64;
    let (word, sentence) = verdict(findings, run);
    let text = format!(
        "In bf16, {} of the chosen keys agree with the reference and {} of queries choose exactly the same keys; {sentence}.{learning}",
        exact_percent(mean),
        exact_percent(same)
    );
    Some(Answer { question, short: word.into(), text })
}

/// The error of the indexers' own gradients.
fn learning(findings: &Findings, run: &Run) -> String {
    let Some(error) = run.indexer_gradient_error else { return String::new() };
    let mut text = format!(" The relative error of the gradients of the indexer loss is {}", number(error));
    if let Some(bf16) = self::run(findings, "bf16").and_then(|run| run.indexer_gradient_error) {
        text += &format!(" ({} with bf16 storage)", number(bf16));
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
        "Inside the kernel the norm is computed in f32 and no normalized q and k are saved for backward: over all layers this \
         saves {} in bf16, {} of what the outside form saves for q and k.",
        saved.collect::<Vec<_>>().join(", "),
        percent(1.0 - longest.inside as f64 / longest.outside as f64)
    );
    if let Some(floor) = run(findings, "f32") {
        let errors =
            floor.sites.iter().filter(|site| site.site.ends_with("linear_attn.o")).map(|site| site.error);
        text += &format!(
            " In f32, the delta rule with the norm inside is within {} (relative) of the {} reference at every layer.",
            number(errors.fold(0.0, f64::max)),
            findings.reference.arithmetic
        );
    }
    let mut short = "it loses nothing".to_string();
    if let Some(run) = run(findings, Site::L2Norm.name()) {
        let (word, sentence) = verdict(findings, run);
        short = format!("it loses nothing; outside, in bf16: {word}");
        text += &format!(" Computed outside and rounded to bf16, {sentence}.");
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
            "is exact in bf16".into()
        } else {
            format!("is not exact in bf16 for {beyond} of {all} values")
        };
        format!("{kind} is {dtype} in {} and {content}", plural(*count, "layer"))
    };
    let text = kinds.iter().map(sentence).collect::<Vec<_>>().join("; ") + ".";
    let beyond = findings.protected.iter().any(|tensor| tensor.beyond_bf16 > 0);
    let f32 = findings.protected.iter().any(|tensor| tensor.dtype == "F32");
    let short = match (f32, beyond) {
        (true, true) => "f32, and the values need it",
        (true, false) => "f32, but the values are exact in bf16",
        _ => "bf16",
    };
    let question = "Which dtype does this checkpoint use for protected tensors, and do their values need it?";
    Some(Answer { question: question.into(), short: short.into(), text })
}
