//! Histograms of counts that were binned before, over shaded zones.

use super::axis::{Axis, Scale};
use super::{COLORS, Figure, at, frame};
use crate::page::inline;
use ballast_format as format;

/// Number of values in `from..to`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Bin {
    pub from: f64,
    pub to: f64,
    pub count: u64,
}

/// A shaded range of the x axis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Zone {
    /// Lower end.
    pub from: f64,
    /// Upper end.
    pub to: f64,
    /// Darkness, 1 to [`Zone::SHADES`].
    pub shade: usize,
    /// Tooltip.
    pub name: String,
}

impl Zone {
    /// Number of shades.
    pub const SHADES: usize = 5;

    /// Returns the CSS classes of a zone and of its legend key.
    pub fn class(shade: usize) -> String {
        format!("zone z{} c1", shade.clamp(1, Zone::SHADES))
    }
}

/// A histogram of binned counts.
#[derive(Clone, Debug, Default)]
pub struct Binned {
    /// Title.
    pub title: String,
    /// Measured quantity or unit.
    pub unit: String,
    /// Caption: one sentence on what the plot shows.
    pub caption: String,
    /// Singular noun of a counted value.
    pub noun: String,
    /// The bins.
    pub bins: Vec<Bin>,
    /// Scale of the y axis; a log scale keeps a count of 1 visible.
    pub scale: Scale,
    /// X axis shared by several plots; by default from the first to the last bin.
    pub x_axis: Option<Axis>,
    /// Zones behind the bars.
    pub zones: Vec<Zone>,
    /// Names and x values of limits, drawn as dashed lines.
    pub limits: Vec<(String, f64)>,
    /// Index of the color.
    pub color: usize,
    /// Draws a small figure, for a grid of several.
    pub small: bool,
}

impl Binned {
    /// Returns the figure as HTML.
    pub fn html(&self) -> String {
        let edges = self.bins.iter().flat_map(|bin| [bin.from, bin.to]);
        let x = self.x_axis.unwrap_or_else(|| Axis::tight(Scale::Linear, edges));
        let most = self.bins.iter().map(|bin| bin.count).max().unwrap_or(0);
        let drawing =
            if most > 0 { self.svg(&x, most) } else { "<p class=\"empty\">Nothing to draw.</p>".into() };
        Figure {
            id: "",
            title: &self.title,
            unit: &self.unit,
            caption: &self.caption,
            legend: String::new(),
            drawing,
            notes: vec![],
            small: self.small,
        }
        .html()
    }

    fn svg(&self, x: &Axis, most: u64) -> String {
        let least = if self.scale == Scale::Log { 0.5 } else { 0.0 };
        let y = Axis::tight(self.scale, [least, 1.06 * most as f64]);
        let y = if self.scale == Scale::Linear { y.whole() } else { y };
        let label = if self.caption.is_empty() { &self.title } else { &self.caption };
        let mut svg = frame(label, (x, if self.small { 3 } else { 5 }), (&y, 3), self.small);
        for zone in &self.zones {
            svg += &rect(x, (zone.from, zone.to), 1.0, &Zone::class(zone.shade), &inline(&zone.name));
        }
        for bin in self.bins.iter().filter(|bin| bin.count > 0) {
            let height = y.position(bin.count as f64).unwrap_or(0.0);
            let (count, from, to) = (bin.count, format::number(bin.from), format::number(bin.to));
            let title = format!("{}\n{from} to {to}", format::plural(count, &inline(&self.noun)));
            let class = format!("bar c{}", self.color % COLORS);
            svg += &rect(x, (bin.from, bin.to), height, &class, &title);
        }
        for (name, value) in &self.limits {
            if let Some(place) = x.position(*value).filter(|place| (0.0..=1.0).contains(place)).map(at) {
                let name = inline(name);
                svg += &format!(
                    "<line class=\"level\" x1=\"{place}\" x2=\"{place}\" y2=\"100%\"><title>{name}</title></line>"
                );
            }
        }
        svg + "</svg></div>"
    }
}

/// Returns a rectangle from the lower edge to `height`, clipped to the axis. `title` is HTML.
fn rect(x: &Axis, (from, to): (f64, f64), height: f64, class: &str, title: &str) -> String {
    let (Some(from), Some(to)) = (x.position(from), x.position(to)) else { return String::new() };
    let (from, to) = (from.clamp(0.0, 1.0), to.clamp(0.0, 1.0));
    if from >= to {
        return String::new();
    }
    format!(
        "<rect class=\"{class}\" shape-rendering=\"crispEdges\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{title}</title></rect>",
        at(from),
        at(1.0 - height),
        at(to - from),
        at(height)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bins(counts: &[u64]) -> Vec<Bin> {
        let bin =
            |(index, count): (usize, &u64)| Bin { from: index as f64, to: index as f64 + 1.0, count: *count };
        counts.iter().enumerate().map(bin).collect()
    }

    #[test]
    fn every_bin_with_a_count_has_a_bar_and_one_value_alone_is_seen() {
        let plot = Binned {
            bins: bins(&[1, 0, 1_000_000, 3]),
            noun: "logit".into(),
            scale: Scale::Log,
            ..Binned::default()
        };
        let html = plot.html();
        assert_eq!(html.matches("class=\"bar c0\"").count(), 3);
        assert!(html.contains("<title>1 logit\n0 to 1.00</title>"), "{html}");
        let first = html.split("class=\"bar c0\"").nth(1).unwrap();
        let height: f64 =
            first.split("height=\"").nth(1).unwrap().split('%').next().unwrap().parse().unwrap();
        assert!(height > 3.0 && height < 10.0, "{height}");
    }

    #[test]
    fn zones_end_where_the_axis_ends_and_those_beyond_are_not_drawn() {
        let zone = |from: f64, to: f64| Zone { from, to, shade: 9, name: "<far>".into() };
        let html = Binned {
            bins: bins(&[1, 2]),
            zones: vec![zone(1.0, 64.0), zone(64.0, 128.0), zone(f64::NAN, 1.0)],
            limits: vec![("near".into(), 1.0), ("far".into(), 65504.0)],
            ..Binned::default()
        }
        .html();
        assert_eq!(
            html.matches(
                "class=\"zone z5 c1\" shape-rendering=\"crispEdges\" x=\"50%\" y=\"0%\" width=\"50%\""
            )
            .count(),
            1,
            "{html}"
        );
        assert_eq!(html.matches("&lt;far&gt;").count(), 1);
        assert!(html.contains("<title>near</title>") && !html.contains("<title>far</title>"));
    }

    #[test]
    fn no_bins_and_no_counts_are_nothing_to_draw() {
        assert!(Binned::default().html().contains("Nothing to draw"));
        assert!(Binned { bins: bins(&[0, 0]), ..Binned::default() }.html().contains("Nothing to draw"));
    }
}
