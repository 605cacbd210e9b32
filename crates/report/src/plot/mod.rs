//! Plots as inline SVG, without a script.
//!
//! A plot keeps its letters at their size on every screen: curves lie in an inner SVG that stretches to the room there
//! is, with lines that keep their width; letters and dots lie around it at percentages. Colors are those of the page's
//! style, `c0` to `c7`, which tell apart for every kind of color vision, in the light and in the dark.
//!
//! What cannot be drawn (NaN, infinities, and on a log axis what is not positive) is a gap in the line, a red tick at
//! the upper edge, and a sentence below the plot.

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
pub use thin::{Place, thin};

use crate::page::{inline, prose};

/// How many colors there are before they come again.
pub const COLORS: usize = 8;

/// A plot with its heading, a note on its scale, the sentence that caption what one sees, and what else belongs to it.
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
    /// One of several that stand beside each other.
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

/// What the lines and areas of a plot are, or of several plots that share them: the classes of a key and its name.
pub fn legend(entries: &[(String, &str)]) -> String {
    let entries: String = (entries.iter())
        .map(|(class, name)| format!("<li><i class=\"key {class}\"></i>{}</li>", inline(name)))
        .collect();
    format!("<ul class=\"legend\">{entries}</ul>")
}

/// Figures beside each other, as many as fit.
pub fn grid(figures: &[String]) -> String {
    format!("<div class=\"grid\">{}</div>\n", figures.concat())
}

/// The beginning of a drawing: rules and numbers of the y axis, numbers of the x axis. What is drawn over them follows,
/// then `</svg></div>`.
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
        let class = if tick.stays || small { "x" } else { "x odd" };
        svg += &format!("<text class=\"{class}\" x=\"{place}\" y=\"100%\" dy=\"18\">{}</text>", tick.label);
    }
    svg
}

/// A share of the whole as an SVG percentage.
fn at(share: f64) -> String {
    let text = format!("{:.2}", 100.0 * share);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}
