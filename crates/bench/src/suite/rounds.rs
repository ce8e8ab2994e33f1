//! Several rounds of one family as one finding: medians, spreads, and a verdict that says when the machine is too noisy for one.

use super::{Findings, Series, Verdict, Whole};

/// Whether enough is known: at least `rounds` rounds, and either all agree on the verdict or there have been three times as many.
pub(super) fn is_enough(found: &[Findings], rounds: usize) -> bool {
    let unanimous = found.windows(2).all(|pair| pair[0].agrees == pair[1].agrees);
    found.len() >= rounds && (unanimous || found.len() >= 3 * rounds)
}

/// Puts the rounds of a family together. Each round has gone through all of its points, so what is compared was measured alternately.
///
/// # Panics
/// If there is no round.
pub(super) fn combine(mut rounds: Vec<Findings>) -> Whole {
    let count = rounds.len();
    let agreed = rounds.iter().filter(|round| round.agrees == Some(true)).count();
    let differed = rounds.iter().filter(|round| round.agrees == Some(false)).count();
    let verdict = match (agreed, differed) {
        (0, 0) => Verdict::Measured,
        (_, 0) => Verdict::Agrees,
        (0, _) => Verdict::Differs,
        _ => Verdict::Inconclusive,
    };
    let because = match verdict {
        Verdict::Inconclusive => {
            let each: Vec<&str> = rounds.iter().map(|round| round.because.as_str()).collect();
            format!("{agreed} of {count} rounds agree: {}", each.join("; "))
        }
        // The round in the middle has no figure of its own: any of them tells.
        _ => rounds[count / 2].because.clone(),
    };
    let mut whole = rounds.pop().expect("at least one round");
    for (chart_at, chart) in whole.charts.iter_mut().enumerate() {
        for (series_at, series) in chart.series.iter_mut().enumerate() {
            let others = rounds.iter().filter_map(|round| round.charts.get(chart_at)?.series.get(series_at));
            let all: Vec<Series> = others.cloned().chain([series.clone()]).collect();
            series.spread.clear();
            for point in &mut series.points {
                let mut values: Vec<f64> = all.iter().map(|s| s.at(point.0)).filter(|v| v.is_finite()).collect();
                values.sort_by(f64::total_cmp);
                if let (Some(least), Some(most)) = (values.first(), values.last()) {
                    point.1 = values[values.len() / 2];
                    series.spread.push((point.0, *least, *most));
                }
            }
        }
    }
    let findings = Findings { agrees: verdict.agrees(), because, charts: whole.charts };
    Whole { findings, verdict, rounds: count }
}

#[cfg(test)]
mod tests {
    use super::super::{Axis, Chart};
    use super::*;

    fn round(agrees: Option<bool>, value: f64) -> Findings {
        let series = vec![Series { points: vec![(1.0, value), (2.0, 10.0 * value)], ..Series::new("one") }];
        let x = Axis { label: "size", sizes: true };
        let charts = vec![Chart { title: "Rate".into(), x, y: "Gbit/s", series }];
        Findings { charts, agrees, because: format!("{value}") }
    }

    #[test]
    fn rounds_become_medians_with_their_spread() {
        let whole = combine([3.0, 1.0, 2.0].map(|value| round(Some(true), value)).into());
        let series = &whole.findings.charts[0].series[0];
        assert_eq!(series.points, [(1.0, 2.0), (2.0, 20.0)]);
        assert_eq!(series.spread, [(1.0, 1.0, 3.0), (2.0, 10.0, 30.0)]);
        assert_eq!((whole.verdict, whole.findings.agrees, whole.rounds), (Verdict::Agrees, Some(true), 3));
    }

    #[test]
    fn rounds_that_disagree_are_repeated_and_then_inconclusive() {
        let mut found = vec![round(Some(true), 1.0), round(Some(false), 2.0), round(Some(true), 3.0)];
        assert!(!is_enough(&found, 3), "more rounds may tell");
        found.extend([1.0; 6].map(|value| round(Some(true), value)));
        assert!(is_enough(&found, 3));
        let whole = combine(found);
        assert_eq!((whole.verdict, whole.findings.agrees), (Verdict::Inconclusive, None));
        assert!(whole.findings.because.starts_with("8 of 9 rounds agree"), "{}", whole.findings.because);
        assert!(is_enough(&[round(None, 1.0)], 1) && !is_enough(&[round(None, 1.0)], 2));
        assert_eq!(combine(vec![round(None, 1.0)]).verdict, Verdict::Measured);
        assert_eq!(combine(vec![round(Some(false), 1.0)]).verdict, Verdict::Differs);
    }
}
