//! Small charts as SVG: lines over numbers, and bars.

use super::text::{escape, number};

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 54.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 18.0;
const BOTTOM: f64 = 42.0;
/// Labels under an axis that do not touch each other.
const LABELS: usize = 10;
/// Bars above which there is no room for a number on each.
const NUMBERED: usize = 20;
/// Points above which a line has no dots.
const DOTTED: usize = 60;

/// One bar.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bar {
    /// What stands under it.
    pub(super) label: String,
    /// What a pointer over it says.
    pub(super) tip: String,
    /// Its height; `None` is not known and drawn as a question mark.
    pub(super) value: Option<f64>,
    /// Good above 0, bad below.
    pub(super) worth: f64,
}

/// What the axes say, and how far the upright one reaches at least.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axes<'a> {
    /// What the whole chart says, for those who cannot see it.
    pub(super) title: &'a str,
    /// Under the flat axis.
    pub(super) flat: &'a str,
    /// Values that the upright axis holds, whatever the data.
    pub(super) least: Option<(f64, f64)>,
}

/// The upright axis: where it ends, and its ticks.
struct Scale {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Scale {
    fn of(values: impl Iterator<Item = f64>, least: Option<(f64, f64)>) -> Self {
        let start = least.unwrap_or((f64::INFINITY, f64::NEG_INFINITY));
        let grow = |(low, high): (f64, f64), value: f64| (low.min(value), high.max(value));
        let (mut low, mut high) = values.fold(start, grow);
        if low >= high {
            let room = if low == 0.0 { 1.0 } else { low.abs() * 0.5 };
            (low, high) = (low - room, high + room);
        }
        let step = step(high - low);
        (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        let count = ((high - low) / step).round() as usize;
        let ticks = (0..=count).map(|tick| low + tick as f64 * step).collect();
        Self { low, high, ticks }
    }

    fn y(&self, value: f64) -> f64 {
        TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)
    }
}

/// Returns a round distance that cuts a span into about four.
fn step(span: f64) -> f64 {
    let rough = span / 4.0;
    let power = 10.0_f64.powf(rough.log10().floor());
    let factor = match rough / power {
        part if part <= 1.5 => 1.0,
        part if part <= 3.0 => 2.0,
        part if part <= 7.0 => 5.0,
        _ => 10.0,
    };
    factor * power
}

/// Writes a tick: no more digits than its distance to the next one needs.
fn tick(value: f64, distance: f64) -> String {
    if distance < 1e-4 || value.abs() >= 1e6 {
        return match value.abs() < distance / 2.0 {
            true => "0".to_owned(),
            false => format!("{value:.1e}"),
        };
    }
    let digits = (-distance.log10()).ceil().max(0.0) as usize;
    let text = format!("{value:.digits$}");
    // A tick at 0 may be computed a little below it.
    match text.trim_start_matches('-').chars().all(|letter| "0.".contains(letter)) {
        true => text.trim_start_matches('-').to_owned(),
        false => text,
    }
}

fn open(axes: &Axes<'_>) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
        escape(axes.title)
    )
}

/// Draws the grid, the ticks' numbers and what the flat axis is.
fn frame(svg: &mut String, scale: &Scale, axes: &Axes<'_>) {
    let distance = (scale.high - scale.low) / (scale.ticks.len() - 1) as f64;
    for value in &scale.ticks {
        let y = scale.y(*value);
        let class = if value.abs() < distance / 2.0 { "zero" } else { "grid" };
        svg.push_str(&format!(
            "<line class=\"{class}\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\"/>\n\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
            WIDTH - RIGHT,
            LEFT - 7.0,
            y + 4.0,
            tick(*value, distance)
        ));
    }
    svg.push_str(&format!(
        "<text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 5.0,
        escape(axes.flat)
    ));
}

fn flat_label(svg: &mut String, x: f64, label: &str) {
    svg.push_str(&format!(
        "<text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n",
        HEIGHT - BOTTOM + 17.0,
        escape(label)
    ));
}

/// Draws one line over numbers. A value that is not known leaves a gap.
pub(super) fn line(axes: &Axes<'_>, points: &[(u64, Option<f64>)]) -> String {
    let scale = Scale::of(points.iter().filter_map(|(_, value)| *value), axes.least);
    let (first, last) = match (points.first(), points.last()) {
        (Some(first), Some(last)) => (first.0 as f64, last.0 as f64),
        _ => (0.0, 1.0),
    };
    let inner = WIDTH - LEFT - RIGHT - 20.0;
    let x = |place: u64| match last > first {
        true => LEFT + 10.0 + (place as f64 - first) / (last - first) * inner,
        false => LEFT + 10.0 + inner / 2.0,
    };
    let mut svg = open(axes);
    frame(&mut svg, &scale, axes);
    let every = points.len().div_ceil(LABELS).max(1);
    for (place, _) in points.iter().step_by(every) {
        flat_label(&mut svg, x(*place), &place.to_string());
    }
    for run in points.split(|(_, value)| value.is_none()) {
        let path: Vec<String> = run
            .iter()
            .filter_map(|(place, value)| Some((x(*place), scale.y((*value)?))))
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        if path.len() > 1 {
            svg.push_str(&format!("<polyline class=\"line\" points=\"{}\"/>\n", path.join(" ")));
        }
        // A lone point would not be seen without a dot.
        if points.len() <= DOTTED || path.len() == 1 {
            for ((place, value), at) in run.iter().zip(&path) {
                let (x, y) = at.split_once(',').unwrap_or_default();
                svg.push_str(&format!(
                    "<circle class=\"dot\" cx=\"{x}\" cy=\"{y}\" r=\"3\"><title>{place}: {}</title></circle>\n",
                    number(*value)
                ));
            }
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// Draws bars up and down from 0, each with its number while there is room. The
/// bars of a `run` (first, count) stand on a band with a word on it.
pub(super) fn bars(axes: &Axes<'_>, bars: &[Bar], run: Option<(usize, usize, &str)>) -> String {
    let scale = Scale::of(bars.iter().filter_map(|bar| bar.value), axes.least);
    let room = (WIDTH - LEFT - RIGHT) / bars.len().max(1) as f64;
    let width = (room * 0.66).clamp(0.5, 60.0);
    let mut svg = open(axes);
    if let Some((first, count, word)) = run {
        band(&mut svg, LEFT + room * first as f64, room * count as f64, word);
    }
    frame(&mut svg, &scale, axes);
    let every = bars.len().div_ceil(LABELS).max(1);
    for (place, bar) in bars.iter().enumerate() {
        let middle = LEFT + room * (place as f64 + 0.5);
        if place % every == 0 {
            flat_label(&mut svg, middle, &bar.label);
        }
        one_bar(&mut svg, &scale, bar, (middle, width), bars.len() <= NUMBERED);
    }
    svg.push_str("</svg>\n");
    svg
}

fn band(svg: &mut String, x: f64, width: f64, word: &str) {
    // The word begins at the band and ends before the chart does.
    let (at, anchor) = match x > WIDTH * 0.6 {
        true => (x + width, "end"),
        false => (x, "start"),
    };
    svg.push_str(&format!(
        "<rect class=\"band\" x=\"{x:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{:.1}\"/>\n\
         <text class=\"word\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>\n",
        HEIGHT - TOP - BOTTOM,
        TOP - 6.0,
        escape(word)
    ));
}

fn one_bar(
    svg: &mut String,
    scale: &Scale,
    bar: &Bar,
    (middle, width): (f64, f64),
    numbered: bool,
) {
    let tip = escape(&bar.tip);
    let zero = scale.y(0.0_f64.clamp(scale.low, scale.high));
    let Some(value) = bar.value else {
        svg.push_str(&format!(
            "<text class=\"unknown\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">?<title>{tip}</title></text>\n",
            zero - 4.0
        ));
        return;
    };
    let class = match bar.worth {
        worth if worth > 0.0 => "good",
        worth if worth < 0.0 => "bad",
        _ => "neutral",
    };
    // A bar of height 0 would not be seen at all.
    let (top, height) = match (scale.y(value) - zero).abs() {
        height if height < 2.0 => (zero - 1.5, 3.0),
        height => (zero.min(scale.y(value)), height),
    };
    svg.push_str(&format!(
        "<rect class=\"{class}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"><title>{tip}</title></rect>\n",
        middle - width / 2.0
    ));
    if numbered {
        // Inside the frame: below the end of a bar that goes down only if there is room.
        let y = match value < 0.0 {
            true if top + height + 14.0 < HEIGHT - BOTTOM => top + height + 12.0,
            true => top + height - 5.0,
            false if top - 16.0 > TOP => top - 4.0,
            false => top + 13.0,
        };
        let inside = y > top && y < top + height;
        svg.push_str(&format!(
            "<text class=\"{}\" x=\"{middle:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>\n",
            if inside { "inside" } else { "number" },
            short(value)
        ));
    }
}

/// Writes the number on a bar.
fn short(value: f64) -> String {
    match value.fract() == 0.0 {
        true => format!("{value:.0}"),
        false => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Scale, step, tick};

    #[test]
    fn scales_are_round() {
        assert_eq!(step(2.0), 0.5);
        assert_eq!(step(7.0), 2.0);
        let scale = Scale::of([0.13, 0.94].into_iter(), None);
        assert_eq!((scale.low, scale.high, scale.ticks.len()), (0.0, 1.0, 6));
        let flat = Scale::of([5.0].into_iter(), None);
        assert!(flat.low < 5.0 && flat.high > 5.0);
        let empty = Scale::of([].into_iter(), Some((-1.0, 1.0)));
        assert_eq!(empty.ticks, [-1.0, -0.5, 0.0, 0.5, 1.0]);
    }

    #[test]
    fn ticks_are_short() {
        assert_eq!(tick(0.5, 0.5), "0.5");
        assert_eq!(tick(-1e-17, 0.5), "0.0");
        assert_eq!(tick(20.0, 10.0), "20");
        assert_eq!(tick(0.00002, 0.00001), "2.0e-5");
        assert_eq!(tick(0.02, 0.01), "0.02");
    }
}
