//! Plots as inline SVG, without a script.
//!
//! Text keeps its size on every screen: curves lie in an inner SVG that stretches to the available width
//! while lines keep their thickness; labels and dots lie around it at percentages. Colors `c0` to `c7` come
//! from the page's style and are distinguishable with every kind of color vision, in light and dark mode.
//!
//! A value that cannot be drawn (NaN, infinity, or zero and below on a log axis) is a gap in the line, a red
//! tick at the upper edge, and a note below the plot.

mod axis;
mod bars;
mod binned;
mod line;
mod ranking;
mod thin;

pub use axis::{Axis, Scale, Tick};
pub use bars::{Histogram, StackedBar};
pub use binned::{Bin, Binned, Zone};
pub use line::{Band, Level, LinePlot, Look, Marker, Series};
pub use ranking::{Rank, Ranking};

use crate::page::{inline, prose};

/// Number of colors; color indices wrap around.
pub(crate) const COLORS: usize = 8;

/// A plot with its title, unit, caption, legend and notes.
pub(crate) struct Figure<'a> {
    pub id: &'a str,
    pub title: &'a str,
    pub unit: &'a str,
    pub caption: &'a str,
    /// HTML.
    pub legend: String,
    /// HTML.
    pub drawing: String,
    pub notes: Vec<String>,
    /// Draws a small figure, for a grid of several.
    pub small: bool,
}

impl Figure<'_> {
    pub(crate) fn html(&self) -> String {
        let mut html = format!("<figure{}", if self.small { " class=\"small\"" } else { "" });
        if !self.id.is_empty() {
            html += &format!(" id=\"{}\"", inline(self.id));
        }
        html += &format!("><figcaption><strong>{}</strong>", inline(self.title));
        if !self.unit.is_empty() {
            html += &format!(" <span class=\"unit\">{}</span>", inline(self.unit));
        }
        if !self.caption.is_empty() {
            html += &format!("<p>{}</p>", prose(self.caption));
        }
        html += "</figcaption>";
        html += &self.legend;
        html += &self.drawing;
        for note in &self.notes {
            html += &format!("<p class=\"note\">{}</p>", inline(note));
        }
        html + "</figure>\n"
    }
}

/// Returns the legend of a plot, or of several that share it, from CSS classes and names.
pub fn legend(entries: &[(String, &str)]) -> String {
    let entries: String = (entries.iter())
        .map(|(class, name)| format!("<li><i class=\"key {class}\"></i>{}</li>", inline(name)))
        .collect();
    format!("<ul class=\"legend\">{entries}</ul>")
}

/// Returns figures in a grid, as many per row as fit.
pub fn grid(figures: &[String]) -> String {
    format!("<div class=\"grid\">{}</div>\n", figures.concat())
}

/// Returns the start of a drawing: grid lines and labels of the y axis, labels of the x axis. The caller
/// appends the content and `</svg></div>`. `x` and `y` come with their number of ticks.
fn frame(label: &str, x: (&Axis, usize), y: (&Axis, usize), small: bool) -> String {
    let mut svg = format!(
        "<div class=\"plot\"><svg class=\"frame\" role=\"img\" aria-label=\"{}\">",
        inline(&label.replace('`', ""))
    );
    let ticks = Some(y.0.ticks(y.1)).filter(|ticks| ticks.len() > 1).unwrap_or_else(|| y.0.ticks(2 * y.1));
    for tick in ticks {
        let place = at(1.0 - y.0.position(tick.value).unwrap_or(0.0));
        svg += &format!("<line class=\"rule\" x2=\"100%\" y1=\"{place}\" y2=\"{place}\"/>");
        svg += &format!("<text class=\"y\" x=\"-8\" y=\"{place}\" dy=\".35em\">{}</text>", tick.label);
    }
    for tick in x.0.ticks(x.1) {
        let place = at(x.0.position(tick.value).unwrap_or(0.0));
        let class = if tick.major || small { "x" } else { "x odd" };
        svg += &format!("<text class=\"{class}\" x=\"{place}\" y=\"100%\" dy=\"18\">{}</text>", tick.label);
    }
    svg
}

/// Formats a fraction of the width or height as an SVG percentage.
fn at(share: f64) -> String {
    let text = format!("{:.2}", 100.0 * share);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}
