//! lab.html: what was found, as one page without script.
//!
//! A section is a file here: it draws what the findings have for it, with a sentence to each plot that is made from the same
//! figures, and is empty without them. `words.rs` has what sections share: which run is the floor, how figures are written;
//! `table.rs` writes tables. Nothing but the findings is asked, so the same findings give the same bytes.

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

/// The page.
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

#[cfg(test)]
mod example;
#[cfg(test)]
mod tests;
