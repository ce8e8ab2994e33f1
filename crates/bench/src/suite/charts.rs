//! Charts of measured values, and the sizes that families measure.

use serde::Serialize;

pub(super) const KIB: u32 = 1 << 10;
pub(super) const MIB: u32 = 1 << 20;

pub(super) const SIZE: Axis = Axis { label: "message size", sizes: true };
/// One plot.
#[derive(Serialize)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: &'static str,
    pub(super) series: Vec<Series>,
}

#[derive(Serialize, Clone, Copy)]
pub(super) struct Axis {
    pub(super) label: &'static str,
    /// Sizes are printed in KiB and MiB.
    pub(super) sizes: bool,
}

#[derive(Serialize, Clone)]
pub(super) struct Series {
    pub(super) name: String,
    /// Medians of all rounds.
    pub(super) points: Vec<(f64, f64)>,
    /// The least and the most of all rounds, by point.
    pub(super) spread: Vec<(f64, f64, f64)>,
}

impl Series {
    pub(super) fn new(name: impl Into<String>) -> Series {
        Series { name: name.into(), points: Vec::new(), spread: Vec::new() }
    }

    pub(super) fn at(&self, x: f64) -> f64 {
        self.points.iter().find(|p| p.0 == x).map_or(f64::NAN, |p| p.1)
    }

    pub(super) fn last(&self) -> f64 {
        self.points.last().map_or(f64::NAN, |p| p.1)
    }

    pub(super) fn most(&self) -> f64 {
        self.points.iter().map(|p| p.1).fold(f64::NAN, f64::max)
    }
}

pub(super) fn chart(title: impl Into<String>, x: Axis, y: &'static str, series: Vec<Series>) -> Chart {
    Chart { title: title.into(), x, y, series }
}

pub(super) fn steps(from: u32, to: u32, factor: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(from), move |n| n.checked_mul(factor)).take_while(move |n| *n <= to)
}
