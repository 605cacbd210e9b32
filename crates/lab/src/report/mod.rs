//! lab.html: the findings as one HTML page without scripts.
//!
//! Each section is a file: it draws its part of the findings, with captions made from the same numbers, and
//! is empty without data. `words.rs` has shared helpers: which run is the f32 floor, how cells are formatted;
//! `table.rs` writes tables. The page depends on the findings alone: the same findings give the same bytes.

mod attention;
mod decay;
mod decoding;
mod gradients;
mod indexer;
mod layers;
mod lead;
mod position;
mod runs;
mod sites;
mod storage;
mod table;
mod training;
mod words;

use ballast_report::page::page;

use crate::Findings;
pub use lead::headline;

/// Returns the page as HTML.
pub fn html(findings: &Findings) -> String {
    let sections: [fn(&Findings) -> String; 15] = [
        lead::lead,
        lead::answers,
        runs::section,
        layers::section,
        position::section,
        sites::section,
        attention::section,
        decay::section,
        indexer::section,
        gradients::section,
        training::section,
        decoding::section,
        storage::protected,
        storage::l2norm,
        lead::notes,
    ];
    let body: String = sections.iter().map(|section| section(findings)).collect();
    page(&lead::title(findings), &body)
}
