//! Self-contained HTML reports: plots as inline SVG, and a page without scripts.
//!
//! The crate knows nothing about what it draws. Every plot is a struct of plain data
//! with an `html` method; the same data always gives the same bytes.
//!
//! ```
//! use ballast_report::page::page;
//! use ballast_report::plot::{LinePlot, Series};
//!
//! let points: Vec<(f64, f64)> = (1..=100).map(|step| (step as f64, 5.0 / step as f64)).collect();
//! let plot = LinePlot {
//!     title: "Loss".into(),
//!     x_name: "step".into(),
//!     series: vec![Series { name: "train".into(), points, ..Series::default() }],
//!     ..LinePlot::default()
//! };
//! let html = page("My run", &plot.html());
//! assert!(html.starts_with("<!doctype html>") && html.contains("<svg"));
//! # let folder = std::env::temp_dir();
//! std::fs::write(folder.join("report.html"), html)?;
//! # std::fs::remove_file(folder.join("report.html"))?;
//! # Ok::<(), std::io::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod page;
pub mod plot;
