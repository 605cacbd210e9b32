//! Fewer points, the same picture.
//!
//! Of the points of one pixel column a line shows where it enters, where it leaves, and its extremes. Those four are
//! kept, so a spike of one step among a hundred thousand stays as high as it was.

/// A place in the unit square, and whether the line is broken before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// From left, 0, to right, 1.
    pub x: f64,
    /// From bottom, 0, to top, 1.
    pub y: f64,
    /// Whether no line leads here from the point before.
    pub after_gap: bool,
}

/// Keeps at most four points for each of `columns`. A point without a place is a gap; one within a column cannot be
/// seen and is passed over. Points that go back, as those of a run that was rolled back, begin a new line.
pub fn thin(points: impl IntoIterator<Item = Option<(f64, f64)>>, columns: usize) -> Vec<Place> {
    let mut places = Vec::new();
    let mut column = Column::default();
    let mut gap = true;
    let mut last_x = f64::NEG_INFINITY;
    for point in points {
        let Some((x, y)) = point else {
            gap = true;
            continue;
        };
        let index = (x * columns as f64).floor() as i64;
        let back = x <= last_x;
        if index != column.index || back || column.points.is_empty() {
            column.empty_into(&mut places);
            column.index = index;
            column.points.push(Place { x, y, after_gap: gap || back });
        } else {
            column.points.push(Place { x, y, after_gap: false });
        }
        (gap, last_x) = (false, x);
    }
    column.empty_into(&mut places);
    places
}

#[derive(Default)]
struct Column {
    index: i64,
    points: Vec<Place>,
}

impl Column {
    fn empty_into(&mut self, places: &mut Vec<Place>) {
        let by_height = |a: &usize, b: &usize| self.points[*a].y.total_cmp(&self.points[*b].y);
        let all = 0..self.points.len();
        if let (Some(low), Some(high)) = (all.clone().min_by(by_height), all.clone().max_by(by_height)) {
            let mut kept = [0, low, high, self.points.len() - 1];
            kept.sort_unstable();
            let mut before = None;
            for index in kept.into_iter().filter(|index| before.replace(*index) != Some(*index)) {
                places.push(self.points[index]);
            }
        }
        self.points.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_extremes_of_every_column() {
        let count = 100_000;
        let height = |index: usize| match index {
            31_234 => 9.0,
            77_777 => -9.0,
            _ => (index as f64 * 0.37).sin(),
        };
        let points: Vec<(f64, f64)> =
            (0..count).map(|index| (index as f64 / count as f64, height(index))).collect();
        let places = thin(points.iter().copied().map(Some), 500);
        assert!(places.len() <= 2000);
        let kept: Vec<(f64, f64)> = places.iter().map(|place| (place.x, place.y)).collect();
        assert!(kept.contains(&points[31_234]) && kept.contains(&points[77_777]));
        assert!(kept.contains(&points[0]) && kept.contains(&points[count - 1]));
        assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0));
        for column in 0..500 {
            let all = points[column * 200..][..200].iter().map(|point| point.1);
            let of_kept = kept.iter().filter(|(x, _)| (x * 500.0) as usize == column).map(|point| point.1);
            assert_eq!(all.clone().fold(f64::MIN, f64::max), of_kept.clone().fold(f64::MIN, f64::max));
            assert_eq!(all.fold(f64::MAX, f64::min), of_kept.fold(f64::MAX, f64::min));
        }
    }

    #[test]
    fn gaps_and_steps_back_break_the_line() {
        let points = [Some((0.1, 1.0)), None, Some((0.5, 2.0)), Some((0.9, 3.0)), Some((0.4, 4.0))];
        let broken: Vec<bool> = thin(points, 10).iter().map(|place| place.after_gap).collect();
        assert_eq!(broken, [true, true, false, true]);
        assert!(thin([None, None], 10).is_empty());
    }

    #[test]
    fn gaps_everywhere_do_not_defeat_thinning() {
        let points = (0..10_000).map(|index| (index % 2 == 0).then_some((index as f64 / 1e4, index as f64)));
        assert!(thin(points, 100).len() <= 400);
    }
}
