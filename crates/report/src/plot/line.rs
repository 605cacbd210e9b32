//! Line plots: curves, bands, reference lines and event markers.

use std::collections::BTreeSet;

use super::axis::{Axis, Scale};
use super::thin::thin;
use super::{COLORS, Figure, at, frame, legend};
use crate::page::inline;
use ballast_format as format;

/// Pixel columns of a plot at full width, and of a small plot.
const COLUMNS: usize = 800;
const SMALL_COLUMNS: usize = 240;
/// Hover strips with tooltips.
const STRIPS: usize = 120;
/// Size of the inner drawing; coordinates are whole numbers.
const WIDTH: f64 = 1600.0;
const HEIGHT: f64 = 1000.0;
/// Markers closer than this fraction of the width share a flag.
const FLAG_WIDTH: f64 = 0.04;

/// Style of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Look {
    /// A line.
    #[default]
    Line,
    /// A thin pale line, for values before smoothing.
    Pale,
    /// A line with a dot at each value, for few values.
    Dots,
    /// Dots without a line; several values may share an x.
    Cloud,
}

/// A curve.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// Name in the legend and in tooltips.
    pub name: String,
    /// (x, y), sorted by x.
    pub points: Vec<(f64, f64)>,
    /// Style.
    pub look: Look,
    /// Index of the color.
    pub color: usize,
}

/// The area between two curves.
#[derive(Clone, Debug, Default)]
pub struct Band {
    /// Name in the legend.
    pub name: String,
    /// (x, lower y, upper y), sorted by x.
    pub points: Vec<(f64, f64, f64)>,
    /// Index of the color.
    pub color: usize,
}

/// An event at one x.
#[derive(Clone, Debug, Default)]
pub struct Marker {
    /// Position.
    pub x: f64,
    /// Label above the plot, one or two characters.
    pub label: String,
    /// Tooltip.
    pub text: String,
}

/// A horizontal reference line.
#[derive(Clone, Debug, Default)]
pub struct Level {
    /// Position.
    pub y: f64,
    /// Name in the legend.
    pub name: String,
}

/// A line plot.
#[derive(Clone, Debug, Default)]
pub struct LinePlot {
    /// HTML id.
    pub id: String,
    /// Title.
    pub title: String,
    /// Measured quantity or unit, unless the title states it.
    pub unit: String,
    /// Caption: one sentence on what the plot shows.
    pub caption: String,
    /// Name of the x axis, in the singular.
    pub x_name: String,
    /// Curves; later ones lie on top.
    pub series: Vec<Series>,
    /// Bands behind the curves.
    pub bands: Vec<Band>,
    /// Event markers.
    pub markers: Vec<Marker>,
    /// Reference lines.
    pub levels: Vec<Level>,
    /// Scale of the y axis.
    pub scale: Scale,
    /// X axis shared by several plots; by default from the first to the last point.
    pub x_axis: Option<Axis>,
    /// Y axis shared by several plots; by default fitted to the values.
    pub y_axis: Option<Axis>,
    /// Draws a small figure, for a grid of several.
    pub small: bool,
}

impl LinePlot {
    /// Returns the figure as HTML.
    pub fn html(&self) -> String {
        let xs = self.series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
        let band_xs = self.bands.iter().flat_map(|band| band.points.iter().map(|point| point.0));
        let x = self.x_axis.unwrap_or_else(|| Axis::tight(Scale::Linear, xs.chain(band_xs)));
        let y = self.y_axis.unwrap_or_else(|| Axis::padded(self.scale, self.y_values()));
        let log = match (x.scale(), y.scale()) {
            _ if self.small => "",
            (Scale::Log, Scale::Log) => "both axes log",
            (Scale::Linear, Scale::Log) => "log scale",
            (Scale::Log, Scale::Linear) => "x on a log scale",
            (Scale::Linear, Scale::Linear) => "",
        };
        let comma = if self.unit.is_empty() || log.is_empty() { "" } else { ", " };
        let unit = format!("{}{comma}{log}", self.unit);
        let drawing = if self.y_values().any(|value| y.position(value).is_some()) {
            self.svg(&x, &y)
        } else {
            "<p class=\"empty\">Nothing to draw.</p>".into()
        };
        Figure {
            id: &self.id,
            title: &self.title,
            unit: &unit,
            caption: &self.caption,
            legend: self.legend(),
            drawing,
            notes: self.gap_notes(&y),
            small: self.small,
        }
        .html()
    }

    fn y_values(&self) -> impl Iterator<Item = f64> {
        let series = self.series.iter().flat_map(|series| series.points.iter().map(|point| point.1));
        let bands =
            self.bands.iter().flat_map(|band| band.points.iter().flat_map(|point| [point.1, point.2]));
        series.chain(bands).chain(self.levels.iter().map(|level| level.y))
    }

    fn legend(&self) -> String {
        let entries: Vec<(String, &str)> = (self.bands.iter())
            .map(|band| (format!("area c{}", band.color % COLORS), &band.name[..]))
            .chain(self.series.iter().map(|series| {
                let look = if series.look == Look::Pale { "pale " } else { "" };
                (format!("{look}c{}", series.color % COLORS), &series.name[..])
            }))
            .chain(self.levels.iter().map(|level| ("level".to_string(), &level.name[..])))
            .collect();
        if entries.len() < 2 || self.small {
            return String::new();
        }
        legend(&entries)
    }

    /// Notes on values that cannot be drawn. A smoothed curve has the gaps of its raw curve and gets no
    /// second note.
    fn gap_notes(&self, y: &Axis) -> Vec<String> {
        let mut named = Vec::new();
        (self.series.iter())
            .filter_map(|series| {
                let mut lost = series.points.iter().filter(|point| y.position(point.1).is_none());
                let (first, more) = (lost.next()?, lost.count());
                if named.contains(&(first.0, more)) {
                    return None;
                }
                named.push((first.0, more));
                let why = match series.points.iter().all(|point| Scale::Linear.can_draw(point.1)) {
                    true => "not positive",
                    false => "non-finite",
                };
                let (one, several) = match series.look {
                    Look::Cloud => ("it is not drawn", "they are not drawn"),
                    _ => ("the line has a gap", "the line has gaps"),
                };
                let name = if series.name.is_empty() { &self.title } else { &series.name };
                let at = format!("{} {}", self.x_name, x_text(first.0));
                Some(match more {
                    0 => format!("{name}: the value at {at} is {why}; {one}."),
                    _ => format!(
                        "{name}: {} values are {why}, the first at {at}; {several}.",
                        format::count(more + 1)
                    ),
                })
            })
            .collect()
    }

    fn svg(&self, x: &Axis, y: &Axis) -> String {
        let label = if self.caption.is_empty() { &self.title } else { &self.caption };
        let (across, up) = if self.small { (3, 3) } else { (8, 5) };
        let mut svg = frame(label, (x, across), (y, up), self.small);
        for level in &self.levels {
            if let Some(place) = y.position(level.y).map(|place| at(1.0 - place)) {
                svg += &format!("<line class=\"level\" x2=\"100%\" y1=\"{place}\" y2=\"{place}\"/>");
            }
        }
        svg += &format!(
            "<svg width=\"100%\" height=\"100%\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\">"
        );
        for band in &self.bands {
            svg += &band_path(band, x, y);
        }
        for marker in &self.markers {
            if let Some(place) = x.position(marker.x).filter(|place| (0.0..=1.0).contains(place)) {
                let px = (place * WIDTH).round();
                svg += &format!("<path class=\"event\" d=\"M{px} 0V{HEIGHT}\"/>");
            }
        }
        let columns = if self.small { SMALL_COLUMNS } else { COLUMNS };
        let mut dots = String::new();
        for series in &self.series {
            svg += &series_path(series, x, y, columns);
            if series.look == Look::Dots {
                dots += &series_dots(series, x, y);
            }
        }
        svg += &self.strips(x, y);
        svg += "</svg>";
        svg += &dots;
        if !self.small {
            svg += &self.flags(x);
        }
        svg + "</svg></div>"
    }

    /// Full-height hover strips, each with the values in its x range as a tooltip: minimum to maximum.
    fn strips(&self, x: &Axis, y: &Axis) -> String {
        let most = self.series.iter().map(|series| series.points.len()).max().unwrap_or(0);
        let strips = most.clamp(2, if self.small { STRIPS / 2 } else { STRIPS });
        let mut said: Vec<Vec<Extent>> = vec![vec![Extent::default(); self.series.len()]; strips];
        for (number, series) in self.series.iter().enumerate() {
            for (px, py) in &series.points {
                if let Some(place) = x.position(*px).filter(|place| (0.0..=1.0).contains(place)) {
                    let strip = (place * (strips - 1) as f64).round() as usize;
                    said[strip][number].add(*px, *py, y);
                }
            }
        }
        let width = WIDTH / (strips - 1) as f64;
        let mut svg = String::new();
        for (index, extents) in said.iter().enumerate() {
            let steps = extents.iter().fold(Extent::default(), |all, extent| all.with_x_of(extent));
            let Some(steps) = steps.x else { continue };
            let from = ((index as f64 - 0.5) * width).max(0.0).round();
            let to = ((index as f64 + 0.5) * width).min(WIDTH).round();
            let values: Vec<String> = (self.series.iter().zip(extents))
                .filter(|(_, extent)| extent.x.is_some())
                .map(|(series, extent)| format!("{}: {}", inline(&series.name), extent.y_text()))
                .collect();
            svg += &format!(
                "<path class=\"strip\" d=\"M{from} 0H{to}V{HEIGHT}H{from}z\"><title>{} {}\n{}</title></path>",
                inline(&self.x_name),
                range_text(steps, x_text),
                values.join("\n")
            );
        }
        svg
    }

    fn flags(&self, x: &Axis) -> String {
        let mut markers: Vec<(f64, &Marker)> = (self.markers.iter())
            .filter_map(|marker| Some((x.position(marker.x)?, marker)))
            .filter(|(place, _)| (0.0..=1.0).contains(place))
            .collect();
        markers.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut svg = String::new();
        let mut rest = &markers[..];
        while let Some((place, first)) = rest.first() {
            let together = rest.partition_point(|(other, _)| *other < place + FLAG_WIDTH);
            let (flag, others) = rest.split_at(together);
            let more = if flag.len() > 1 { "+" } else { "" };
            let texts: Vec<String> = (flag.iter())
                .map(|(_, marker)| {
                    format!("{} {}: {}", inline(&self.x_name), x_text(marker.x), inline(&marker.text))
                })
                .collect();
            svg += &format!(
                "<g class=\"flag\"><title>{}</title><text x=\"{}\" y=\"-5\">{}{more}</text></g>",
                texts.join("\n"),
                at(*place),
                inline(&first.label)
            );
            rest = others;
        }
        svg
    }
}

/// Ranges of x and y over some points.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    x: Option<(f64, f64)>,
    y: Option<(f64, f64)>,
    lost: bool,
}

impl Extent {
    fn add(&mut self, x: f64, y: f64, axis: &Axis) {
        self.x = wider(self.x, (x, x));
        if axis.position(y).is_some() {
            self.y = wider(self.y, (y, y));
        } else {
            self.lost = true;
        }
    }

    fn with_x_of(self, other: &Extent) -> Extent {
        Extent { x: other.x.map_or(self.x, |x| wider(self.x, x)), ..self }
    }

    fn y_text(&self) -> String {
        match (self.y, self.lost) {
            (Some(y), false) => range_text(y, format::number),
            (Some(y), true) => format!("{}, with gaps", range_text(y, format::number)),
            (None, _) => "gap".into(),
        }
    }
}

fn wider(range: Option<(f64, f64)>, other: (f64, f64)) -> Option<(f64, f64)> {
    Some(range.map_or(other, |range| (range.0.min(other.0), range.1.max(other.1))))
}

fn range_text((low, high): (f64, f64), text: impl Fn(f64) -> String) -> String {
    let (low, high) = (text(low), text(high));
    if low == high { low } else { format!("{low} to {high}") }
}

fn x_text(x: f64) -> String {
    if x >= 0.0 && x.fract() == 0.0 && x < 1e15 { format::count(x as u64) } else { format::number(x) }
}

fn series_path(series: &Series, x: &Axis, y: &Axis, columns: usize) -> String {
    let (path, class) = match series.look {
        Look::Cloud => (cloud_path(series, x, y), " cloud"),
        Look::Pale => (line_path(series, x, y, columns), " pale"),
        Look::Line | Look::Dots => (line_path(series, x, y, columns), ""),
    };
    let mut svg = format!("<path class=\"line{class} c{}\" d=\"{path}\"/>", series.color % COLORS);
    let lost = series.points.iter().filter(|point| y.position(point.1).is_none());
    let lost = lost.filter_map(|point| Some((x.position(point.0)?, 0.0)));
    let ticks: String = (thin(lost.map(Some), columns / 4).iter())
        .map(|place| format!("M{:.0} 0v40", place.x * WIDTH))
        .collect();
    if !ticks.is_empty() {
        svg += &format!("<path class=\"lost\" d=\"{ticks}\"/>");
    }
    svg
}

/// A line of zero length is drawn as a dot; equal positions are drawn once.
fn cloud_path(series: &Series, x: &Axis, y: &Axis) -> String {
    let places: BTreeSet<(i64, i64)> = (series.points.iter())
        .filter_map(|(px, py)| Some((x.position(*px)?, y.position(*py)?)))
        .map(|(px, py)| ((px * WIDTH).round() as i64, ((1.0 - py) * HEIGHT).round() as i64))
        .collect();
    places.iter().map(|(px, py)| format!("M{px} {py}h0")).collect()
}

fn line_path(series: &Series, x: &Axis, y: &Axis, columns: usize) -> String {
    let points = series.points.iter().map(|(px, py)| Some((x.position(*px)?, y.position(*py)?)));
    let mut path = String::new();
    let places = thin(points, columns);
    for (index, place) in places.iter().enumerate() {
        let command = if place.after_gap { "M" } else { "L" };
        path += &format!("{command}{:.0} {:.0}", place.x * WIDTH, (1.0 - place.y) * HEIGHT);
        if place.after_gap && places.get(index + 1).is_none_or(|next| next.after_gap) {
            path += "h0";
        }
    }
    path
}

fn series_dots(series: &Series, x: &Axis, y: &Axis) -> String {
    if series.points.len() > COLUMNS / 10 {
        return String::new();
    }
    (series.points.iter())
        .filter_map(|(px, py)| Some((x.position(*px)?, y.position(*py)?)))
        .map(|(px, py)| {
            format!(
                "<circle class=\"dot c{}\" cx=\"{}\" cy=\"{}\" r=\"2.5\"/>",
                series.color % COLORS,
                at(px),
                at(1.0 - py)
            )
        })
        .collect()
}

/// Each run of points without gaps is a closed shape.
fn band_path(band: &Band, x: &Axis, y: &Axis) -> String {
    let places = band
        .points
        .iter()
        .map(|(px, low, high)| Some((x.position(*px)?, y.position(*low)?, y.position(*high)?)));
    let places: Vec<Option<(f64, f64, f64)>> = places.collect();
    let mut path = String::new();
    for stretch in places.split(|place| place.is_none()) {
        let upper = stretch.iter().flatten().map(|(px, _, high)| (px, high));
        let lower = stretch.iter().flatten().rev().map(|(px, low, _)| (px, low));
        for (index, (px, py)) in upper.chain(lower).enumerate() {
            let command = if index == 0 { "M" } else { "L" };
            path += &format!("{command}{:.0} {:.0}", px * WIDTH, (1.0 - py) * HEIGHT);
        }
        path += if stretch.is_empty() { "" } else { "z" };
    }
    format!("<path class=\"band c{}\" d=\"{path}\"/>", band.color % COLORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>) -> LinePlot {
        let series = vec![Series { name: "train".into(), points, ..Series::default() }];
        LinePlot { title: "Loss".into(), x_name: "step".into(), series, ..LinePlot::default() }
    }

    #[test]
    fn no_points_one_point_and_points_without_a_place_make_a_figure() {
        let empty = plot(vec![]).html();
        assert!(empty.contains("Nothing to draw") && !empty.contains("<svg"));
        let single = plot(vec![(1.0, 2.0)]).html();
        assert!(single.contains("<svg") && single.contains("h0") && !single.contains("NaN"));
        let diverged = plot(vec![(1.0, 2.0), (2.0, f64::NAN), (3.0, f64::INFINITY), (4.0, 1.0)]).html();
        assert!(diverged.contains("train: 2 values are non-finite, the first at step 2"), "{diverged}");
        assert!(
            diverged.contains("class=\"lost\"") && !diverged.contains("NaN") && !diverged.contains("inf")
        );
        let log = LinePlot { scale: Scale::Log, ..plot(vec![(1.0, 2.0), (2.0, 0.0), (3.0, 9.0)]) }.html();
        assert!(log.contains("the value at step 2 is not positive") && log.contains("log scale"));
    }

    #[test]
    fn events_near_each_other_share_a_flag_and_say_all_they_have() {
        let marker = |x: f64| Marker { x, label: format!("{x}"), text: "<spike>".into() };
        let markers = vec![marker(50.0), marker(10.0), marker(11.0), marker(1e9)];
        let html = LinePlot { markers, ..plot(vec![(1.0, 1.0), (100.0, 2.0)]) }.html();
        assert_eq!(html.matches("class=\"flag\"").count(), 2);
        assert!(html.contains(">10+</text>") && html.contains("step 11: &lt;spike&gt;"));
    }

    #[test]
    fn bands_break_at_gaps() {
        let points = vec![(1.0, 1.0, 2.0), (2.0, f64::NAN, 2.0), (3.0, 1.0, 2.0)];
        let bands = vec![Band { name: "range".into(), points, color: 1 }];
        let html = LinePlot { bands, ..plot(vec![(1.0, 1.5), (3.0, 1.5)]) }.html();
        let path =
            html.split("class=\"band c1\" d=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        assert_eq!(path.matches('M').count(), 2);
        assert_eq!(path.matches('z').count(), 2);
    }

    #[test]
    fn a_cloud_is_dots_without_a_line_and_equal_ones_are_one() {
        let points = vec![(1.0, 1.0), (1.0, 3.0), (1.0, 3.0), (2.0, 2.0), (2.0, f64::NAN)];
        let mut cloud = plot(points);
        cloud.series[0].look = Look::Cloud;
        let html = cloud.html();
        let path = html.split("class=\"line cloud c0\" d=\"").nth(1).and_then(|rest| rest.split('"').next());
        let path = path.unwrap();
        assert_eq!(
            (path.matches('M').count(), path.matches("h0").count(), path.matches('L').count()),
            (3, 3, 0)
        );
        assert!(html.contains("train: the value at step 2 is non-finite; it is not drawn."));
        assert!(html.contains("train: 1.00 to 3.00"), "{html}");
    }

    #[test]
    fn a_plot_says_which_of_its_axes_are_logs() {
        let x_axis = Some(Axis::tight(Scale::Log, [1.0, 100.0]));
        let both = LinePlot { scale: Scale::Log, x_axis, ..plot(vec![(1.0, 1.0), (100.0, 50.0)]) };
        assert!(both.html().contains("both axes log"));
        let one = LinePlot { unit: "nats".into(), x_axis, ..plot(vec![(1.0, 1.0), (100.0, 50.0)]) };
        assert!(one.html().contains("nats, x on a log scale"));
    }
}
