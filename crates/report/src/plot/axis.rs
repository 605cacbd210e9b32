//! Axes: ranges, linear and log scales, ticks at round numbers.

use ballast_format as format;

/// Larger values are treated as infinities: their differences overflow.
const LARGEST: f64 = 1e300;

/// Mapping from values to positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences have equal distances.
    #[default]
    Linear,
    /// Equal ratios have equal distances. Only positive values can be drawn.
    Log,
}

impl Scale {
    /// Chooses a log scale if all values are positive and the largest or smallest is more than 20 times away
    /// from the median.
    pub fn fitting(values: impl IntoIterator<Item = f64>) -> Scale {
        let mut values: Vec<f64> =
            values.into_iter().filter(|value| Scale::Linear.can_draw(*value)).collect();
        values.sort_by(f64::total_cmp);
        match (values.first(), values.get(values.len() / 2), values.last()) {
            (Some(&low), Some(&middle), Some(&high)) if low > 0.0 => {
                if high / middle > 20.0 || middle / low > 20.0 { Scale::Log } else { Scale::Linear }
            }
            _ => Scale::Linear,
        }
    }

    /// Returns true if a value can be drawn.
    pub(crate) fn can_draw(self, value: f64) -> bool {
        value.is_finite() && value.abs() <= LARGEST && (self == Scale::Linear || value > 0.0)
    }

    /// Maps a value to the linear coordinate of the axis: itself, or its decimal logarithm.
    pub fn forward(self, value: f64) -> f64 {
        if self == Scale::Log { value.log10() } else { value }
    }

    /// Maps a coordinate back to its value; the inverse of [`Scale::forward`].
    pub fn back(self, value: f64) -> f64 {
        if self == Scale::Log { 10f64.powf(value).clamp(f64::MIN_POSITIVE, f64::MAX) } else { value }
    }
}

/// A range of values along one side of a plot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    whole: bool,
}

/// A labeled position on an axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Tick {
    /// The value.
    pub value: f64,
    /// Its label.
    pub label: String,
    /// Kept on narrow screens, where minor ticks are hidden.
    pub major: bool,
}

impl Axis {
    /// Creates an axis from exactly the smallest to exactly the largest value that can be drawn.
    pub fn tight(scale: Scale, values: impl IntoIterator<Item = f64>) -> Axis {
        let (low, high) = values
            .into_iter()
            .filter(|value| scale.can_draw(*value))
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let whole = false;
        match (low <= high, low < high, scale) {
            (true, true, _) => Axis { scale, low, high, whole },
            (true, false, Scale::Log) => Axis { scale, low: low / 2.0, high: high * 2.0, whole },
            (true, false, Scale::Linear) => {
                let around = if low == 0.0 { 1.0 } else { low.abs() / 2.0 };
                Axis { scale, low: low - around, high: high + around, whole }
            }
            (false, ..) => Axis { scale, low: 1.0, high: 2.0, whole },
        }
    }

    /// Creates an axis with 6 % of padding at both ends; a linear axis that starts near zero starts at zero.
    pub fn padded(scale: Scale, values: impl IntoIterator<Item = f64>) -> Axis {
        let Axis { low, high, .. } = Axis::tight(scale, values);
        let (from, to) = (scale.forward(low), scale.forward(high));
        let air = (to - from) * 0.06;
        let near_zero = scale == Scale::Linear && low >= 0.0 && low < 0.4 * high;
        let low = if near_zero { 0.0 } else { scale.back(from - air) };
        Axis { scale, low, high: scale.back(to + air), whole: false }
    }

    /// Restricts ticks to whole numbers, for counts.
    pub fn whole(self) -> Axis {
        Axis { whole: true, ..self }
    }

    /// Returns the scale.
    pub fn scale(&self) -> Scale {
        self.scale
    }

    /// Returns the position of a value, 0 at the low end and 1 at the high end; `None` if it cannot be drawn.
    pub(crate) fn position(&self, value: f64) -> Option<f64> {
        let (low, high) = (self.scale.forward(self.low), self.scale.forward(self.high));
        self.scale.can_draw(value).then(|| (self.scale.forward(value) - low) / (high - low))
    }

    /// Returns ticks at round numbers within the range, about `wanted` of them.
    pub(crate) fn ticks(&self, wanted: usize) -> Vec<Tick> {
        match self.scale {
            Scale::Linear => self.linear_ticks(wanted),
            Scale::Log => self.log_ticks(wanted),
        }
    }

    fn linear_ticks(&self, wanted: usize) -> Vec<Tick> {
        let step = round_step((self.high - self.low) / wanted.max(1) as f64);
        let step = if self.whole { step.max(1.0) } else { step };
        let (first, last) = ((self.low / step - 1e-9).ceil(), (self.high / step + 1e-9).floor());
        (0..=(last - first).max(0.0) as usize)
            .map(|index| {
                let value = (first + index as f64) * step;
                let major = (first + index as f64) % 2.0 == 0.0;
                Tick { value, label: format::tick(value, step), major }
            })
            .collect()
    }

    /// Powers of ten; 1, 2 and 5 times each over few decades, every n-th decade over many.
    fn log_ticks(&self, wanted: usize) -> Vec<Tick> {
        let (low, high) = (self.low.log10(), self.high.log10());
        if high - low < 0.7 {
            return self.linear_ticks(wanted);
        }
        let factors: &[f64] = if high - low < 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let every = ((high - low) / wanted.max(1) as f64).ceil().max(1.0) as i32;
        (low.floor() as i32..=high.floor() as i32)
            .filter(|decade| decade.rem_euclid(every) == 0)
            .flat_map(|decade| factors.iter().map(move |factor| (decade, *factor)))
            .map(|(decade, factor)| {
                let value = factor * 10f64.powi(decade);
                Tick { value, label: format::tick(value, value), major: factor == 1.0 }
            })
            .filter(|tick| tick.value >= self.low * (1.0 - 1e-9) && tick.value <= self.high * (1.0 + 1e-9))
            .collect()
    }
}

/// Rounds `step` up to 1, 2 or 5 times a power of ten.
fn round_step(step: f64) -> f64 {
    let decade = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * decade >= step * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * decade
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis, wanted: usize) -> Vec<String> {
        axis.ticks(wanted).into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn linear_ticks_are_round_numbers() {
        assert_eq!(
            labels(&Axis::tight(Scale::Linear, [1.0, 300.0]), 6),
            ["50", "100", "150", "200", "250", "300"]
        );
        assert_eq!(
            labels(&Axis::tight(Scale::Linear, [0.0, 1e5]), 5),
            ["0", "20k", "40k", "60k", "80k", "100k"]
        );
        assert_eq!(labels(&Axis::tight(Scale::Linear, [-0.3, 0.31]), 4), ["-0.2", "0.0", "0.2"]);
        assert_eq!(labels(&Axis::tight(Scale::Linear, [1.0, 3.0]).whole(), 8), ["1", "2", "3"]);
        assert_eq!(labels(&Axis::tight(Scale::Linear, [0.0199, 0.021]), 3), ["0.0200", "0.0205", "0.0210"]);
        assert_eq!(labels(&Axis::tight(Scale::Linear, [0.0, 1e-3]), 4), ["0", "5e-4", "1e-3"]);
        for (low, high) in [(0.0, 7.3), (1e-9, 3.7e-8), (-5e4, 12e4), (1234.5, 1234.6)] {
            let ticks = Axis::tight(Scale::Linear, [low, high]).ticks(5);
            assert!((2..=7).contains(&ticks.len()), "{ticks:?}");
            let step = ticks[1].value - ticks[0].value;
            let leading = step / 10f64.powf((step * 1.0001).log10().floor());
            assert!([1.0, 2.0, 5.0].iter().any(|round| (round - leading).abs() < 1e-3), "{ticks:?}");
        }
    }

    #[test]
    fn log_ticks_are_decades_or_one_two_five() {
        assert_eq!(labels(&Axis::tight(Scale::Log, [0.3, 40.0]), 5), ["0.5", "1", "2", "5", "10", "20"]);
        assert_eq!(labels(&Axis::tight(Scale::Log, [1e-3, 20.0]), 5), ["0.001", "0.01", "0.1", "1", "10"]);
        assert!(labels(&Axis::tight(Scale::Log, [1e-30, 1e30]), 5).len() <= 6);
    }

    #[test]
    fn no_values_one_value_and_absurd_values_have_an_axis() {
        for scale in [Scale::Linear, Scale::Log] {
            for values in
                [vec![], vec![0.0], vec![f64::NAN, f64::INFINITY], vec![3.0], vec![1e300, -1e300, 1e-300]]
            {
                let axis = Axis::padded(scale, values.clone());
                assert!(axis.low < axis.high, "{values:?}");
                assert!(!axis.ticks(5).is_empty() && axis.ticks(5).len() < 20, "{values:?} {axis:?}");
                assert!(
                    values
                        .iter()
                        .filter_map(|value| axis.position(*value))
                        .all(|place| (0.0..=1.0).contains(&place))
                );
            }
        }
        assert_eq!(Axis::tight(Scale::Log, [1.0, 10.0]).position(0.0), None);
    }

    #[test]
    fn the_fitting_scale_is_log_for_wide_positive_values_only() {
        assert_eq!(Scale::fitting([11.0, 3.0, 2.5]), Scale::Linear);
        assert_eq!(Scale::fitting([5.0, 0.1, 0.05, 0.04]), Scale::Log);
        assert_eq!(Scale::fitting([5.0, 0.0, 1e9]), Scale::Linear);
        assert_eq!(Scale::fitting([f64::NAN]), Scale::Linear);
    }
}
