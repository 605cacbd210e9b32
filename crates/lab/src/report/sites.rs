//! Errors of named tensors, grouped by name pattern over all layers.

use std::collections::BTreeMap;

use ballast_format::{self as format, name_pattern};
use ballast_report::page::inline;

use super::table::{Column, Table};
use super::words::{badness, cell, code, floor, heading, in_layer, named, top};
use crate::Findings;
use crate::findings::{Run, SiteError};

/// Whole policies shown, and as many single choices.
const RUNS: usize = 3;
/// Most rows of a run.
const ROWS: usize = 40;

/// All tensors of one name pattern that differ from f32.
struct Group<'a> {
    pattern: String,
    tensors: usize,
    first: &'a SiteError,
    largest: &'a SiteError,
}

pub(super) fn section(findings: &Findings) -> String {
    let runs = top(findings, RUNS, |run| !run.sites.is_empty());
    if runs.is_empty() {
        return String::new();
    }
    let of_floor: BTreeMap<&str, &SiteError> = (floor(findings).iter())
        .flat_map(|floor| floor.sites.iter().map(|site| (&site.site[..], site)))
        .collect();
    let caption = match of_floor.is_empty() {
        true => {
            "Tensors grouped over layers, in the order of computation. The error is RMS(difference) / RMS; the first error is that \
             of the first layer that differs."
        }
        false => {
            "Tensors grouped over layers, in the order of computation; those equal to f32 are left out. The error is \
             RMS(difference) / RMS; the first error is that of the first layer that differs from f32."
        }
    };
    let tables: String =
        (runs.iter().enumerate()).map(|(index, run)| table(run, &of_floor, index == 0)).collect();
    heading("sites", "Where the error enters", caption) + &tables
}

fn table(run: &Run, of_floor: &BTreeMap<&str, &SiteError>, open: bool) -> String {
    let groups = groups(run, of_floor);
    let worst = worst(run);
    let mut columns = vec![
        Column::Text("tensor"),
        Column::Number("count"),
        Column::Number("first error"),
        Column::Number("largest error"),
        Column::Number("max difference"),
    ];
    columns.extend((!of_floor.is_empty()).then_some(Column::Number("largest / f32")));
    let mut table = Table::new(&columns);
    for group in groups.iter().take(ROWS) {
        let name = code(&group.pattern);
        let is_worst = worst.is_some_and(|worst| worst.site == group.largest.site);
        let floor = of_floor.get(&group.largest.site[..]).map(|site| group.largest.error / site.error);
        let mut cells = vec![
            format!(
                "{} <span class=\"soft\">{}</span>",
                if is_worst { format!("<strong>{name}</strong>") } else { name },
                inline(&group.largest.dtype)
            ),
            format::count(group.tensors),
            error(group.first),
            error(group.largest),
            cell(group.largest.max_abs),
        ];
        let ratio = floor.filter(|ratio| ratio.is_finite());
        let ratio = ratio.map_or(String::new(), |ratio| format!("{} ×", format::number(ratio)));
        cells.extend((!of_floor.is_empty()).then_some(ratio));
        table.row(&cells);
    }
    let more = match groups.len().saturating_sub(ROWS) {
        0 => String::new(),
        more => format!("; {} more rows are in lab.json", format::count(more)),
    };
    let caption = match &run.first_difference {
        None if of_floor.is_empty() => "no tensor differs".to_string(),
        None => "no tensor differs from f32".to_string(),
        Some(first) => {
            let largest = worst.map_or(String::new(), |worst| {
                format!(", largest error {} at {}", format::number(worst.error), named(&worst.site))
            });
            format!("first differs at {}{largest}{more}", named(first))
        }
    };
    table.folded(&code(&run.name), &caption, open)
}

/// The first tensor with the largest error.
fn worst(run: &Run) -> Option<&SiteError> {
    run.sites
        .iter()
        .reduce(|worst, site| if badness(site.error) > badness(worst.error) { site } else { worst })
}

/// The error with the layer, from the numbers in the tensor's name.
fn error(site: &SiteError) -> String {
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let numbers: Vec<&str> = site.site.split('.').filter(is_number).collect();
    match numbers.is_empty() {
        true => cell(site.error),
        false => in_layer(cell(site.error), numbers.join(".")),
    }
}

fn groups<'a>(run: &'a Run, of_floor: &BTreeMap<&str, &SiteError>) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for site in &run.sites {
        let differs = match of_floor.get(&site.site[..]) {
            Some(floor) => *floor != site,
            None => site.error != 0.0,
        };
        if !differs {
            continue;
        }
        let pattern = name_pattern(&site.site);
        match places.get(&pattern) {
            None => {
                places.insert(pattern.clone(), groups.len());
                groups.push(Group { pattern, tensors: 1, first: site, largest: site });
            }
            Some(place) => {
                let group = &mut groups[*place];
                group.tensors += 1;
                if badness(site.error) > badness(group.largest.error) {
                    group.largest = site;
                }
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_fold_into_the_first_and_the_worst_and_nan_is_the_worst() {
        let site = |name: &str, error: f64| SiteError { site: name.into(), error, ..SiteError::default() };
        let sites = vec![
            site("embed", 0.0),
            site("layers.0.out", 0.1),
            site("layers.1.out", 0.3),
            site("layers.2.out", f64::NAN),
            site("layers.3.out", 0.2),
            site("logits", 0.5),
        ];
        let run = Run { sites, ..Run::default() };
        let floor = site("layers.0.out", 0.1);
        let groups = groups(&run, &BTreeMap::from([("layers.0.out", &floor)]));
        let names: Vec<&str> = groups.iter().map(|group| &group.pattern[..]).collect();
        assert_eq!(names, ["layers.*.out", "logits"]);
        assert_eq!((groups[0].tensors, groups[0].first.error), (3, 0.3));
        assert_eq!(groups[0].largest.site, "layers.2.out");
    }
}
