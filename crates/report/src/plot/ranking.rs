//! Dot plots: one row per name, with a dot at its value.

use super::axis::{Axis, Scale};
use super::{COLORS, Figure, at};
use crate::page::inline;
use ballast_format as format;

/// A row of a [`Ranking`].
#[derive(Clone, Debug, Default)]
pub struct Rank {
    /// Name.
    pub name: String,
    /// Value.
    pub value: f64,
    /// Index of the color.
    pub color: usize,
}

/// A dot plot: one row per name, on a shared axis.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    /// HTML id.
    pub id: String,
    /// Title.
    pub title: String,
    /// Measured quantity or unit.
    pub unit: String,
    /// Caption: one sentence on what the plot shows.
    pub caption: String,
    /// Rows from top to bottom.
    pub rows: Vec<Rank>,
    /// Scale of the x axis.
    pub scale: Scale,
    /// Legend: CSS classes and names of the colors.
    pub colors: Vec<(String, String)>,
    /// Name and value of a reference line.
    pub level: Option<(String, f64)>,
}

impl Ranking {
    /// Returns the figure as HTML. A non-finite value has a red dot at the right end; a value that cannot be
    /// drawn, such as zero on a log axis, a hollow dot at the left. Both are written out beside it.
    pub fn html(&self) -> String {
        let level = self.level.iter().map(|level| level.1);
        let x = Axis::padded(self.scale, self.rows.iter().map(|row| row.value).chain(level));
        let log = if self.scale == Scale::Log { "log scale" } else { "" };
        let comma = if self.unit.is_empty() || log.is_empty() { "" } else { ", " };
        let mut keys: Vec<(String, &str)> =
            self.colors.iter().map(|(class, name)| (class.clone(), &name[..])).collect();
        keys.extend(self.level.iter().map(|(name, _)| ("level".to_string(), &name[..])));
        Figure {
            id: &self.id,
            title: &self.title,
            unit: &format!("{}{comma}{log}", self.unit),
            caption: &self.caption,
            legend: if keys.is_empty() { String::new() } else { super::legend(&keys) },
            drawing: self.table(&x),
            notes: vec![],
            small: false,
        }
        .html()
    }

    fn table(&self, x: &Axis) -> String {
        if self.rows.is_empty() {
            return "<p class=\"empty\">Nothing to draw.</p>".into();
        }
        let ticks = x.ticks(6);
        let place = |value: f64| at(x.position(value).unwrap_or(0.0));
        let mut behind: String = (ticks.iter().map(|tick| place(tick.value)))
            .map(|place| format!("<line class=\"rule\" x1=\"{place}\" x2=\"{place}\" y2=\"100%\"/>"))
            .collect();
        if let Some(place) = self.level.as_ref().and_then(|level| x.position(level.1)).map(at) {
            behind += &format!("<line class=\"level\" x1=\"{place}\" x2=\"{place}\" y2=\"100%\"/>");
        }
        let rows: String = self.rows.iter().map(|row| row.html(x, &behind)).collect();
        // Narrow screens have room for the first and the last label only.
        let labels: String = (ticks.iter().enumerate())
            .map(|(index, tick)| {
                let class = if index == 0 || index + 1 == ticks.len() { "x" } else { "x odd" };
                format!("<text class=\"{class}\" x=\"{}\" y=\"14\">{}</text>", place(tick.value), tick.label)
            })
            .collect();
        format!(
            "<table class=\"ranking\"><tbody>{rows}</tbody><tfoot aria-hidden=\"true\"><tr><td></td>\
             <td><svg class=\"frame\">{labels}</svg></td><td></td></tr></tfoot></table>"
        )
    }
}

impl Rank {
    fn html(&self, x: &Axis, behind: &str) -> String {
        let (place, class) = match x.position(self.value) {
            Some(place) => (place, format!("dot c{}", self.color % COLORS)),
            None if self.value.is_finite() => (0.0, format!("hollow c{}", self.color % COLORS)),
            None => (1.0, "dot bad".into()),
        };
        let text = match self.value.is_finite() {
            true => format::number(self.value),
            false => "<span class=\"bad\">non-finite</span>".into(),
        };
        format!(
            "<tr><td title=\"{0}\"><code>{0}</code></td><td><svg class=\"frame\" aria-hidden=\"true\">{behind}\
             <circle class=\"{class}\" cx=\"{1}\" cy=\"50%\" r=\"4.5\"/></svg></td>\
             <td class=\"number\">{text}</td></tr>\n",
            inline(&self.name),
            at(place)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_dot_and_its_value_in_words() {
        let row = |name: &str, value: f64| Rank { name: name.into(), value, color: 0 };
        let rows = vec![row("<worst>", f64::NAN), row("a", 0.5), row("b", 1e-6), row("none", 0.0)];
        let level = Some(("floor".into(), 1e-9));
        let html = Ranking { rows, scale: Scale::Log, level, ..Ranking::default() }.html();
        assert_eq!(html.matches("<circle").count(), 4);
        assert!(html.contains("&lt;worst&gt;") && html.contains("class=\"dot bad\" cx=\"100%\""));
        assert!(html.contains("class=\"hollow c0\" cx=\"0%\""));
        assert!(html.contains("<span class=\"bad\">non-finite</span>") && html.contains(">1e-6</td>"));
        assert_eq!(html.matches("class=\"level\"").count(), 4);
        assert!(!html.contains("NaN") && html.contains("log scale") && html.contains("floor"));
    }

    #[test]
    fn no_rows_and_rows_without_a_place_make_a_figure() {
        assert!(Ranking::default().html().contains("Nothing to draw"));
        let rows = vec![Rank { name: "a".into(), value: f64::INFINITY, color: 9 }];
        assert!(Ranking { rows, scale: Scale::Log, ..Ranking::default() }.html().contains("non-finite"));
    }
}
