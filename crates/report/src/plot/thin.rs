//! Downsampling that preserves the drawn picture.
//!
//! Per pixel column, a line shows its first, last, lowest and highest point. Those four are kept, so a spike
//! of one step among a hundred thousand keeps its height.

/// A point in the unit square.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    /// 0 at the left, 1 at the right.
    pub x: f64,
    /// 0 at the bottom, 1 at the top.
    pub y: f64,
    /// True if no line connects it with the previous point.
    pub after_gap: bool,
}

/// Keeps at most four points for each of `columns`. `None` is a gap; a gap within a column is not visible and
/// is dropped. A point that goes back in x, as after a rollback, begins a new line.
pub(super) fn thin(points: impl IntoIterator<Item = Option<(f64, f64)>>, columns: usize) -> Vec<Point> {
    let mut kept = Vec::new();
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
            column.empty_into(&mut kept);
            column.index = index;
            column.points.push(Point { x, y, after_gap: gap || back });
        } else {
            column.points.push(Point { x, y, after_gap: false });
        }
        (gap, last_x) = (false, x);
    }
    column.empty_into(&mut kept);
    kept
}

#[derive(Default)]
struct Column {
    index: i64,
    points: Vec<Point>,
}

impl Column {
    fn empty_into(&mut self, thinned: &mut Vec<Point>) {
        let by_height = |a: &usize, b: &usize| self.points[*a].y.total_cmp(&self.points[*b].y);
        let all = 0..self.points.len();
        if let (Some(low), Some(high)) = (all.clone().min_by(by_height), all.clone().max_by(by_height)) {
            let mut kept = [0, low, high, self.points.len() - 1];
            kept.sort_unstable();
            let mut before = None;
            for index in kept.into_iter().filter(|index| before.replace(*index) != Some(*index)) {
                thinned.push(self.points[index]);
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
        let kept = thin(points.iter().copied().map(Some), 500);
        assert!(kept.len() <= 2000);
        let kept: Vec<(f64, f64)> = kept.iter().map(|point| (point.x, point.y)).collect();
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
