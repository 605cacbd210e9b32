//! Names in an order, each with a dot where its value is.

use super::axis::{Axis, Scale};
use super::{COLORS, Figure, at};
use crate::format;
use crate::page::inline;

/// A name and its value.
#[derive(Clone, Debug, Default)]
pub struct Rank {
    /// What it is.
    pub name: String,
    /// Where the dot is.
    pub value: f64,
    /// Which of the colors.
    pub color: usize,
}

/// Values by name, one below the other, on one axis.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    /// Anchor within the page.
    pub id: String,
    /// Heading.
    pub title: String,
    /// What is measured.
    pub unit: String,
    /// What one sees, in a sentence.
    pub caption: String,
    /// From top to bottom.
    pub rows: Vec<Rank>,
    /// Of the values' axis.
    pub scale: Scale,
    /// Classes and names of the colors, where they mean something.
    pub colors: Vec<(String, String)>,
    /// A value to compare with, and its name.
    pub level: Option<(String, f64)>,
}

impl Ranking {
    /// The figure. A value that is non-finite has a red dot at the right end, one without a place (zero on a log axis) an
    /// empty one at the left; both are written out beside it.
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
        // Names and figures leave little room on a narrow screen: the first and the last number say enough.
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
