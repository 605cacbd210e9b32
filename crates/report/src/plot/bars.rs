//! Histograms of values, and stacked bars of the parts of a whole.

use super::axis::{Axis, Scale};
use super::{COLORS, Figure, at, frame};
use crate::page::inline;
use ballast_format as format;

/// A histogram of raw values.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// Title.
    pub title: String,
    /// Measured quantity or unit.
    pub unit: String,
    /// Caption: one sentence on what the plot shows.
    pub caption: String,
    /// Singular noun of a counted value.
    pub noun: String,
    /// The values.
    pub values: Vec<f64>,
    /// Scale of the x axis.
    pub scale: Scale,
    /// Number of bins.
    pub bins: usize,
    /// Index of the color.
    pub color: usize,
    /// Draws a small figure, for a grid of several.
    pub small: bool,
}

impl Histogram {
    /// Returns the figure as HTML.
    pub fn html(&self) -> String {
        let x = Axis::tight(self.scale, self.values.iter().copied());
        let bins = self.bins.max(1);
        let mut counts = vec![0_u64; bins];
        let mut extents = vec![(f64::INFINITY, f64::NEG_INFINITY); bins];
        let mut lost = 0;
        for value in &self.values {
            let Some(place) = x.position(*value) else {
                lost += 1;
                continue;
            };
            let bin = ((place * bins as f64) as usize).min(bins - 1);
            counts[bin] += 1;
            extents[bin] = (extents[bin].0.min(*value), extents[bin].1.max(*value));
        }
        let y = Axis::padded(Scale::Linear, counts.iter().map(|count| *count as f64).chain([0.0])).whole();
        let notes = (lost > 0).then(|| format!("{} not drawn on this axis.", format::plural(lost, "value")));
        let drawing = if lost as usize == self.values.len() {
            "<p class=\"empty\">Nothing to draw.</p>".into()
        } else {
            self.svg(&x, &y, &counts, &extents)
        };
        Figure {
            id: "",
            title: &self.title,
            unit: &self.unit,
            caption: &self.caption,
            legend: String::new(),
            drawing,
            notes: notes.into_iter().collect(),
            small: self.small,
        }
        .html()
    }

    fn svg(&self, x: &Axis, y: &Axis, counts: &[u64], extents: &[(f64, f64)]) -> String {
        let label = if self.caption.is_empty() { &self.title } else { &self.caption };
        let mut svg = frame(label, (x, 5), (y, 3), false);
        let width = 1.0 / counts.len() as f64;
        for (index, (count, (low, high))) in counts.iter().zip(extents).enumerate() {
            let height = y.position(*count as f64).unwrap_or(0.0);
            if *count == 0 {
                continue;
            }
            svg += &format!(
                "<rect class=\"bar c{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{}\n{} to {}</title></rect>",
                self.color % COLORS,
                at((index as f64 + 0.06) * width),
                at(1.0 - height),
                at(0.88 * width),
                at(height),
                format::plural(*count, &inline(&self.noun)),
                format::number(*low),
                format::number(*high)
            );
        }
        svg + "</svg></div>"
    }
}

/// A horizontal bar of the parts of a whole, with an optional mark for comparison.
#[derive(Clone, Debug, Default)]
pub struct StackedBar {
    /// Names and sizes of the parts.
    pub parts: Vec<(String, f64)>,
    /// Name and position of the mark.
    pub mark: Option<(String, f64)>,
}

impl StackedBar {
    /// Returns the CSS class of a part; from the ninth part on colors repeat, paler.
    pub fn class(part: usize) -> String {
        format!("c{}{}", part % COLORS, if part / COLORS % 2 == 1 { " again" } else { "" })
    }

    /// Returns the bar as HTML, without a legend; `text` formats a size.
    pub fn html(&self, text: impl Fn(f64) -> String) -> String {
        let total: f64 = self.parts.iter().map(|part| part.1.max(0.0)).sum();
        let whole = self.mark.iter().map(|mark| mark.1).fold(total, f64::max);
        if !whole.is_finite() || whole <= 0.0 {
            return String::new();
        }
        let mut svg =
            "<svg class=\"stack\" role=\"img\" aria-label=\"Stacked bar of the parts\">".to_string();
        let mut from = 0.0;
        for (index, (name, size)) in self.parts.iter().enumerate() {
            svg += &format!(
                "<rect class=\"bar {}\" x=\"{}\" width=\"{}\" y=\"18\" height=\"30\"><title>{}: {}</title></rect>",
                StackedBar::class(index),
                at(from / whole),
                at(size.max(0.0) / whole),
                inline(name),
                text(*size)
            );
            from += size.max(0.0);
        }
        if let Some((name, size)) = &self.mark {
            let (place, anchor) = (size / whole, if size / whole > 0.5 { "end" } else { "start" });
            svg += &format!(
                "<line class=\"mark\" x1=\"{0}\" x2=\"{0}\" y1=\"14\" y2=\"54\"/>\
                 <text x=\"{0}\" y=\"10\" text-anchor=\"{anchor}\">{1} {2}</text>",
                at(place),
                inline(name),
                text(*size)
            );
        }
        svg + "</svg>"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_every_value_that_has_a_place() {
        let values = vec![1.0, 1.1, 2.0, 9.0, f64::NAN];
        let html = Histogram { values, bins: 4, noun: "step".into(), ..Histogram::default() }.html();
        assert!(html.contains("<title>3 steps\n1.00 to 2.00</title>"), "{html}");
        assert!(html.contains("<title>1 step\n9.00 to 9.00</title>"));
        assert!(html.contains("1 value not drawn"));
        assert!(Histogram { bins: 4, ..Histogram::default() }.html().contains("Nothing to draw"));
    }

    #[test]
    fn a_stacked_bar_makes_room_for_a_mark_beyond_its_parts() {
        let bar = StackedBar {
            parts: vec![("a".into(), 1.0), ("b".into(), 2.0)],
            mark: Some(("peak".into(), 4.0)),
        };
        let html = bar.html(|size| format!("{size} B"));
        assert!(html.contains("x=\"25%\" width=\"50%\"") && html.contains("x=\"100%\" y=\"10\""), "{html}");
        assert_eq!(StackedBar::default().html(|_| String::new()), "");
    }
}
