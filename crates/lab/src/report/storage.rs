//! Protected tensors as stored in the checkpoint, and memory saved by the q/k norm inside the kernel.

use std::collections::BTreeMap;

use ballast_format::{self as format, name_pattern, sentence};
use ballast_report::page::inline;

use super::table::{Column, Table};
use super::words::{badness, cell, code, heading, named, plural, share_cell};
use crate::Findings;
use crate::findings::ProtectedTensor;

/// Protected tensors by name pattern and type.
pub(super) fn protected(findings: &Findings) -> String {
    if findings.protected.is_empty() {
        return String::new();
    }
    let mut groups: BTreeMap<(String, &str), Vec<&ProtectedTensor>> = BTreeMap::new();
    for tensor in &findings.protected {
        groups.entry((name_pattern(&tensor.name), &tensor.dtype)).or_default().push(tensor);
    }
    let mut table = Table::new(&[
        Column::Text("tensor"),
        Column::Number("count"),
        Column::Text("dtype"),
        Column::Number("elements"),
        Column::Number("not exact in bf16"),
        Column::Number("share"),
        Column::Number("max relative change in bf16"),
    ]);
    for ((pattern, dtype), tensors) in &groups {
        let elements: u64 = tensors.iter().map(|tensor| tensor.elements).sum();
        let beyond: u64 = tensors.iter().map(|tensor| tensor.beyond_bf16).sum();
        let most = tensors.iter().map(|tensor| badness(tensor.bf16_error)).fold(0.0, f64::max);
        table.row(&[
            code(pattern),
            format::count(tensors.len()),
            inline(dtype),
            format::count(elements),
            format::count(beyond),
            if elements > 0 { share_cell(beyond as f64 / elements as f64) } else { String::new() },
            cell(most),
        ]);
    }
    heading("protected", "Protected tensors in the checkpoint", &protected_caption(&findings.protected))
        + &table.html()
}

fn protected_caption(tensors: &[ProtectedTensor]) -> String {
    let elements: u64 = tensors.iter().map(|tensor| tensor.elements).sum();
    let beyond: u64 = tensors.iter().map(|tensor| tensor.beyond_bf16).sum();
    let carry = match beyond {
        0 => "all values are exact in bf16, so rounding changes nothing".to_string(),
        _ => {
            format!("{} of {} elements are not exact in bf16", format::count(beyond), format::count(elements))
        }
    };
    let worst = (tensors.iter()).max_by(|a, b| badness(a.bf16_error).total_cmp(&badness(b.bf16_error)));
    let worst = worst.filter(|tensor| tensor.bf16_error != 0.0).map(|tensor| {
        format!(
            "the largest relative change of an element is {}, in {}",
            format::number(tensor.bf16_error),
            named(&tensor.name)
        )
    });
    sentence(&[Some(format!("{}: {carry}", plural(tensors.len(), "tensor"))), worst])
}

/// Bytes saved for backward, with the q/k norm inside and outside the kernel.
pub(super) fn l2norm(findings: &Findings) -> String {
    let Some(longest) = findings.l2norm.iter().max_by_key(|row| row.tokens) else { return String::new() };
    let saved = |inside: u64, outside: u64| match outside.checked_sub(inside) {
        Some(bytes) => format::bytes(bytes),
        None => format!("-{}", format::bytes(inside - outside)),
    };
    let share = |inside: u64, outside: u64| 1.0 - inside as f64 / outside as f64;
    let mut table = Table::new(&[
        Column::Number("tokens"),
        Column::Number("norm inside"),
        Column::Number("norm outside"),
        Column::Number("saved"),
        Column::Number("share"),
    ]);
    for row in &findings.l2norm {
        table.row(&[
            format::count(row.tokens),
            format::bytes(row.inside),
            format::bytes(row.outside),
            saved(row.inside, row.outside),
            if row.outside > 0 { share_cell(share(row.inside, row.outside)) } else { String::new() },
        ]);
    }
    let caption = format!(
        "Memory saved for backward for q, k and their norm, over all layers with linear attention: at {} the norm \
         inside the kernel saves {}.",
        plural(longest.tokens, "token"),
        saved(longest.inside, longest.outside)
    );
    heading("l2norm", "q/k norm inside the kernel", &caption) + &table.html()
}
