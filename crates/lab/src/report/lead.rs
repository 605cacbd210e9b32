//! Start and end of the page: title, headline, facts, published questions, notes.

use ballast_format::{self as format, sentence};
use ballast_report::page::{inline, prose};

use super::words::{floor, is_broken, is_single, list, named, other, plural, policies, soft, times_floor};
use crate::Findings;
use crate::findings::{Kind, Run};

/// A single choice is indistinguishable from f32 if its mean KL is at most this many times the floor.
const INDISTINCT: f64 = 2.0;
/// Most names in a sentence.
const NAMES: usize = 6;

pub(super) fn title(findings: &Findings) -> String {
    if let Some(other) = other(findings) {
        return format!("{} compared with {}", other.name, findings.model);
    }
    match findings.model.is_empty() {
        true => "Cost of precision choices".into(),
        false => format!("Cost of precision choices: {}", findings.model),
    }
}

/// Introduction, headline and facts.
pub(super) fn lead(findings: &Findings) -> String {
    if findings.runs.is_empty() {
        return "<p class=\"lead\">No policy was run.</p>\n".into();
    }
    let opening = self::opening(findings);
    let (opening, headline) = (inline(&opening), prose(&headline(findings)));
    format!("<p class=\"lead\">{opening}</p>\n<p>{headline}</p>\n{}", facts(findings))
}

fn opening(findings: &Findings) -> String {
    if let Some(other) = other(findings) {
        let read = format!(
            "read {} of {} in {}",
            plural(findings.input.tokens, "token"),
            findings.input.source,
            findings.reference.arithmetic
        );
        return match other.kind {
            Kind::Dump => {
                format!("{} {read}; {} holds tensors from another framework.", findings.model, other.name)
            }
            _ => format!("Both models {read}."),
        };
    }
    format!(
        "The model read {} of {}: once in {}, the reference, and once under {}.",
        plural(findings.input.tokens, "token"),
        findings.input.source,
        findings.reference.arithmetic,
        match policies(findings).count() {
            0 => "f32 alone".into(),
            1 => "one policy".into(),
            number => format!("each of {number} policies"),
        },
    )
}

/// The main findings in a few sentences: the worst policy, the worst single choice, and choices without
/// effect. Names are in backticks.
pub fn headline(findings: &Findings) -> String {
    if let Some(other) = other(findings) {
        return sentence(&[Some(parting(other))]) + " " + &sentence(&[Some(outputs(other))]);
    }
    let parts = [broken(findings), worst(findings), worst_single(findings), harmless(findings)];
    let sentences: Vec<String> = parts.into_iter().flatten().map(|part| sentence(&[Some(part)])).collect();
    sentences.join(" ")
}

/// The first difference between two models.
fn parting(other: &Run) -> String {
    match (&other.first_difference, other.kind) {
        (Some(site), _) => format!("{} first differs at {}", named(&other.name), named(site)),
        (None, Kind::Dump) => format!("{} agrees within the tolerance everywhere", named(&other.name)),
        (None, _) => format!("{} gives the same values everywhere", named(&other.name)),
    }
}

fn outputs(other: &Run) -> String {
    if !other.has_outputs() {
        return "it has no logits, so outputs were not compared".into();
    }
    if is_broken(other) {
        return "its outputs are non-finite".into();
    }
    format!(
        "the mean KL divergence of the outputs is {} nats, the loss differs by {}, and the top-1 token agrees for {} of \
         tokens",
        format::number(other.kl.mean),
        format::signed(other.loss_difference),
        format::exact_percent(other.top1_agreement)
    )
}

fn broken(findings: &Findings) -> Option<String> {
    let broken: Vec<&Run> = policies(findings).filter(|run| is_broken(run)).collect();
    let first = broken.first()?;
    let names: Vec<&str> = broken.iter().map(|run| &run.name[..]).collect();
    let at = match &first.not_finite {
        Some(lost) if names.len() == 1 => format!(", first at {}", named(&lost.site)),
        Some(lost) => format!(", {} first at {}", named(&first.name), named(&lost.site)),
        None => String::new(),
    };
    Some(format!(
        "{} {} non-finite values{at}",
        list(&names, NAMES),
        if names.len() == 1 { "produces" } else { "produce" }
    ))
}

/// The policy with the largest finite divergence.
fn worst(findings: &Findings) -> Option<String> {
    let run = policies(findings).find(|run| !is_broken(run))?;
    if run.kl.mean <= 0.0 {
        return Some("no policy changes the outputs".into());
    }
    Some(format!(
        "{} has the largest error{}: mean KL divergence {} nats, loss {} ({}), and another top-1 token for {} of \
         tokens",
        named(&run.name),
        if policies(findings).any(is_broken) { " of the others" } else { "" },
        format::number(run.kl.mean),
        format::number(run.loss),
        format::signed(run.loss_difference),
        format::exact_percent(1.0 - run.top1_agreement)
    ))
}

fn worst_single(findings: &Findings) -> Option<String> {
    let changes_outputs = |run: &&Run| run.kl.mean > 0.0 && !findings.changes_gradients_alone(run);
    let mut singles =
        policies(findings).filter(|run| is_single(run) && !is_broken(run)).filter(changes_outputs);
    let run = singles.next()?;
    let floor = times_floor(run.kl.mean, floor(findings).map(|floor| floor.kl.mean));
    let then = singles
        .next()
        .map(|next| format!("; {} is next with {}", named(&next.name), format::number(next.kl.mean)));
    Some(format!(
        "of single choices, {} matters most: mean KL divergence {} nats{}{}",
        named(&run.name),
        format::number(run.kl.mean),
        floor.map_or(String::new(), |floor| format!(", {floor}")),
        then.unwrap_or_default()
    ))
}

/// Single choices that change no bit, or gradients alone, and those that are indistinguishable from f32.
fn harmless(findings: &Findings) -> Option<String> {
    let limit = floor(findings).map_or(0.0, |floor| INDISTINCT * floor.kl.mean);
    let singles: Vec<&Run> = policies(findings).filter(|run| is_single(run) && !is_broken(run)).collect();
    let names = |wanted: &dyn Fn(&Run) -> bool| -> Vec<&str> {
        singles.iter().filter(|run| wanted(run)).map(|run| &run.name[..]).collect()
    };
    let same = names(&|run| run.first_difference.is_none() && !findings.changes_gradients_alone(run));
    let gradients = names(&|run| findings.changes_gradients_alone(run));
    let near = names(&|run| run.first_difference.is_some() && run.kl.mean <= limit);
    let verb = |number: usize| if number == 1 { "changes" } else { "change" };
    let parts = [
        (!same.is_empty()).then(|| format!("{} {} no bit", list(&same, NAMES), verb(same.len()))),
        (!gradients.is_empty())
            .then(|| format!("{} {} gradients alone", list(&gradients, NAMES), verb(gradients.len()))),
        (!near.is_empty()).then(|| format!("{} cannot be told from f32 rounding", list(&near, NAMES))),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn facts(findings: &Findings) -> String {
    let input = &findings.input;
    let reference = &findings.reference;
    let mut facts = vec![
        ("Model", findings.model.clone()),
        ("Type", findings.model_type.clone()),
        ("Parameters", format::count(findings.parameters)),
        ("Layers", format::count(findings.layers)),
        ("Input", input.source.clone()),
        (
            "Length",
            format!(
                "{} in {}, the longest {}",
                plural(input.tokens, "token"),
                plural(input.sequences, "sequence"),
                format::count(input.longest)
            ),
        ),
        ("Predicted tokens", format::count(input.predicted)),
        ("Reference", reference.arithmetic.clone()),
        (
            "Reference loss",
            format!(
                "{}, perplexity {}",
                format::number(reference.loss),
                format::number(reference.perplexity)
            ),
        ),
        ("Time", format::duration(findings.seconds)),
    ];
    facts.extend(findings.peak_memory_bytes.map(|bytes| ("Peak memory", format::bytes(bytes))));
    let facts: String = (facts.iter())
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("<div><dt>{name}</dt><dd>{}</dd></div>", inline(value)))
        .collect();
    format!("<dl class=\"facts\">{facts}</dl>\n")
}

/// The published questions with their answers.
pub(super) fn answers(findings: &Findings) -> String {
    if findings.answers.is_empty() {
        return String::new();
    }
    let answers: String = (findings.answers.iter())
        .map(|answer| {
            format!(
                "<h3>{}</h3>\n<p><strong>{}</strong> {}</p>\n",
                prose(&answer.question),
                inline(&with_stop(&answer.short)),
                prose(&answer.text)
            )
        })
        .collect();
    format!("<h2 id=\"answers\">Published questions</h2>\n{answers}")
}

fn with_stop(text: &str) -> String {
    if text.is_empty() || text.ends_with(['.', '!', '?', ':']) { text.into() } else { format!("{text}.") }
}

/// Notes for the reader.
pub(super) fn notes(findings: &Findings) -> String {
    if findings.notes.is_empty() {
        return String::new();
    }
    let notes: String = findings.notes.iter().map(|note| soft(note)).collect();
    format!("<h2 id=\"notes\">Notes</h2>\n{notes}")
}
