//! What comes first and last: the model, the headline, the published questions, the notes.

use ballast_report::format::{self, sentence};
use ballast_report::page::{inline, prose};

use super::words::{
    are, floor, is_broken, is_single, list, named, other, plural, policies, soft, times_floor,
};
use crate::Findings;
use crate::findings::{Kind, Run};

/// A single choice whose mean KL is within this many times f32's own cannot be told from it.
const INDISTINCT: f64 = 2.0;
/// Names in a sentence.
const NAMES: usize = 6;

pub(super) fn title(findings: &Findings) -> String {
    if let Some(other) = other(findings) {
        return format!("{} beside {}", other.name, findings.model);
    }
    match findings.model.is_empty() {
        true => "What precision costs".into(),
        false => format!("What precision costs: {}", findings.model),
    }
}

/// The run and its headline in words, and the facts.
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
                format!("{} {read}; {} has what another framework computed.", findings.model, other.name)
            }
            _ => format!("Both {read}."),
        };
    }
    format!(
        "The model read {} of {}: once in {}, which all else is compared with, and once under {}.",
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

/// What does most damage and what none, in a few sentences, with names between backticks.
pub fn headline(findings: &Findings) -> String {
    if let Some(other) = other(findings) {
        return sentence(&[Some(parting(other))]) + " " + &sentence(&[Some(outputs(other))]);
    }
    let parts = [broken(findings), worst(findings), worst_single(findings), harmless(findings)];
    let sentences: Vec<String> = parts.into_iter().flatten().map(|part| sentence(&[Some(part)])).collect();
    sentences.join(" ")
}

/// Where two part.
fn parting(other: &Run) -> String {
    match (&other.first_difference, other.kind) {
        (Some(site), _) => format!("{} parts from it at {}", named(&other.name), named(site)),
        (None, Kind::Dump) => format!("{} agrees everywhere within the tolerance", named(&other.name)),
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
        "the outputs are apart by a mean KL divergence of {} nats, the loss differs by {}, and {} of the tokens have the same \
         likeliest next one",
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
    Some(format!("{} {} non-finite{at}", list(&names, NAMES), are(names.len())))
}

/// The finite one with most damage.
fn worst(findings: &Findings) -> Option<String> {
    let run = policies(findings).find(|run| !is_broken(run))?;
    if run.kl.mean <= 0.0 {
        return Some("no policy changes a single output".into());
    }
    Some(format!(
        "{} does most damage{}: a mean KL divergence of {} nats, a loss of {} ({}), and another likeliest token for {} \
         of the tokens",
        named(&run.name),
        if policies(findings).any(is_broken) { " of the others" } else { "" },
        format::number(run.kl.mean),
        format::number(run.loss),
        format::signed(run.loss_difference),
        format::exact_percent(1.0 - run.top1_agreement)
    ))
}

fn worst_single(findings: &Findings) -> Option<String> {
    let mut singles = policies(findings).filter(|run| is_single(run) && !is_broken(run) && run.kl.mean > 0.0);
    let run = singles.next()?;
    let floor = times_floor(run.kl.mean, floor(findings).map(|floor| floor.kl.mean));
    let then = singles
        .next()
        .map(|next| format!("; {} comes next, {}", named(&next.name), format::number(next.kl.mean)));
    Some(format!(
        "of single choices {} matters most: a mean KL divergence of {} nats{}{}",
        named(&run.name),
        format::number(run.kl.mean),
        floor.map_or(String::new(), |floor| format!(", {floor} of f32")),
        then.unwrap_or_default()
    ))
}

/// Single choices that change no bit, and those that change no more than f32 does.
fn harmless(findings: &Findings) -> Option<String> {
    let limit = floor(findings).map_or(0.0, |floor| INDISTINCT * floor.kl.mean);
    let singles: Vec<&Run> = policies(findings).filter(|run| is_single(run) && !is_broken(run)).collect();
    let names = |same: bool| -> Vec<&str> {
        (singles.iter())
            .filter(|run| run.first_difference.is_none() == same && (same || run.kl.mean <= limit))
            .map(|run| &run.name[..])
            .collect()
    };
    let (same, near) = (names(true), names(false));
    let verb = |number: usize| if number == 1 { "changes" } else { "change" };
    let same_part = (!same.is_empty()).then(|| format!("{} {} no bit", list(&same, NAMES), verb(same.len())));
    let near_part = (!near.is_empty())
        .then(|| format!("{} cannot be told from what f32 itself costs", list(&near, NAMES)));
    match (same_part, near_part) {
        (None, None) => None,
        (same, near) => Some(same.into_iter().chain(near).collect::<Vec<_>>().join("; ")),
    }
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
            "Read",
            format!(
                "{} in {}, the longest {}",
                plural(input.tokens, "token"),
                plural(input.sequences, "sequence"),
                format::count(input.longest)
            ),
        ),
        ("Predicted", plural(input.predicted, "token")),
        ("Reference", reference.arithmetic.clone()),
        (
            "Its loss",
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

/// The published questions.
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

/// What a reader must know.
pub(super) fn notes(findings: &Findings) -> String {
    if findings.notes.is_empty() {
        return String::new();
    }
    let notes: String = findings.notes.iter().map(|note| soft(note)).collect();
    format!("<h2 id=\"notes\">Notes</h2>\n{notes}")
}
