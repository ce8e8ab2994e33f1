//! The report as one HTML page that needs nothing else.

use super::{Chart, Entry, Report};
use plotters::prelude::*;
use std::fmt::Write;

const STYLE: &str = "
:root { --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --ground: #ffffff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --ground: #0d1117; --card: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 0; }
.soft, dt { color: var(--soft); }
table { border-collapse: collapse; width: 100%; margin: 1.5rem 0 2.5rem; font-size: .95rem; }
th, td { text-align: left; padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:nth-child(2), .mark { white-space: nowrap; }
a { color: inherit; }
section { border: 1px solid var(--line); border-radius: 8px; padding: 1.25rem; margin: 0 0 1.5rem; background: var(--card); }
header { display: flex; gap: 1rem; justify-content: space-between; align-items: baseline; }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .35rem 1rem; margin: .9rem 0; font-size: .95rem; }
dd { margin: 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
figure { margin: 0; max-width: 640px; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
svg { width: 100%; height: auto; display: block; }
.mark { font-size: .85rem; padding: .1rem .6rem; border-radius: 1rem; border: 1px solid currentColor; }
.agrees { color: #1a7f37; } .differs { color: #cf222e; } .measured, .inconclusive { color: var(--soft); }
@media (prefers-color-scheme: dark) { .agrees { color: #3fb950; } .differs { color: #f85149; } }
details { margin-top: .75rem; font-size: .85rem; } pre { overflow-x: auto; }
";

const COLOURS: [RGBColor; 6] = [
    RGBColor(0x1f, 0x6f, 0xb4),
    RGBColor(0xd9, 0x5f, 0x02),
    RGBColor(0x1b, 0x9e, 0x77),
    RGBColor(0xa6, 0x3d, 0x9b),
    RGBColor(0x8a, 0x6d, 0x1b),
    RGBColor(0x55, 0x5b, 0x66),
];

pub(super) fn render(report: &Report) -> Result<String, String> {
    let mut page = String::new();
    let machine = &report.machine;
    write!(
        page,
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>Thruway: the published figures again</title><style>{STYLE}</style></head><body><main>\
         <h1>The published figures, measured again</h1>\
         <p class=\"soft\">Thruway {}, {} s for each point and round, medians with bars from the least to the most of all rounds. {}, {} processors, {} GiB, {}. Both ends on this machine, iWARP in user \
         space over the loopback device: the shapes are to be compared, not the figures.</p>\
         <table><tr><th>Figures</th><th>Shape</th><th>Why</th></tr>",
        report.version,
        report.seconds_per_point,
        escape(&machine.processor),
        machine.processors,
        machine.memory_gib,
        escape(&machine.kernel),
    )
    .expect("writing to a string");
    for entry in &report.families {
        let why = entry.error.as_ref().unwrap_or(&entry.whole.findings.because);
        write!(
            page,
            "<tr><td><a href=\"#{}\">{}</a></td><td>{}</td><td>{}</td></tr>",
            entry.id,
            entry.title,
            mark(entry),
            escape(why)
        )
        .expect("writing to a string");
    }
    page.push_str("</table>");
    for entry in &report.families {
        section(&mut page, entry)?;
    }
    page.push_str("</main></body></html>\n");
    Ok(page)
}

fn mark(entry: &Entry) -> String {
    let word = if entry.error.is_some() { "failed" } else { entry.whole.verdict.name() };
    let class = if word == "failed" { "differs" } else { word };
    format!("<span class=\"mark {class}\">{word}</span>")
}

fn section(page: &mut String, entry: &Entry) -> Result<(), String> {
    let here = entry.error.as_ref().unwrap_or(&entry.whole.findings.because);
    write!(
        page,
        "<section id=\"{}\"><header><h2>{}</h2>{}</header><dl><dt>Published</dt><dd>{}</dd><dt>Reported</dt><dd>{}</dd>\
         <dt>Must agree</dt><dd>{}</dd><dt>Here</dt><dd>{}</dd><dt>Rounds</dt><dd>{}</dd></dl><div class=\"plots\">",
        entry.id,
        entry.title,
        mark(entry),
        entry.source,
        entry.reported,
        entry.expected,
        escape(here),
        entry.whole.rounds,
    )
    .expect("writing to a string");
    for chart in &entry.whole.findings.charts {
        write!(page, "<figure>{}</figure>", plot(chart)?).expect("writing to a string");
    }
    page.push_str("</div>");
    if !entry.whole.findings.charts.is_empty() {
        page.push_str("<details><summary>Figures</summary>");
        entry.whole.findings.charts.iter().for_each(|chart| table(page, chart));
        page.push_str("</details>");
    }
    page.push_str("</section>");
    Ok(())
}

fn table(page: &mut String, chart: &Chart) {
    write!(page, "<table><tr><th>{}, {}</th>", escape(&chart.title), chart.y).expect("writing to a string");
    let xs: Vec<f64> = chart.series.first().map(|s| s.points.iter().map(|p| p.0).collect()).unwrap_or_default();
    for x in &xs {
        write!(page, "<th>{}</th>", tick(chart, *x)).expect("writing to a string");
    }
    page.push_str("</tr>");
    for series in &chart.series {
        write!(page, "<tr><td>{}</td>", escape(&series.name)).expect("writing to a string");
        for x in &xs {
            let value = series.at(*x);
            let text = if value.is_nan() { String::new() } else { figure(value) };
            write!(page, "<td>{text}</td>").expect("writing to a string");
        }
        page.push_str("</tr>");
    }
    page.push_str("</table>");
}

fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

fn tick(chart: &Chart, x: f64) -> String {
    match x {
        x if chart.x.sizes && x >= 1_048_576.0 => format!("{} MiB", x / 1_048_576.0),
        x if chart.x.sizes && x >= 1024.0 => format!("{} KiB", x / 1024.0),
        x if chart.x.sizes => format!("{x} B"),
        x => format!("{x}"),
    }
}

/// The points lie at equal distances, each with its own label: sizes and depths are powers.
fn plot(chart: &Chart) -> Result<String, String> {
    let fail = |e: &dyn std::fmt::Display| format!("the plot '{}': {e}", chart.title);
    let xs: Vec<f64> = chart.series.first().map(|s| s.points.iter().map(|p| p.0).collect()).unwrap_or_default();
    let values = || {
        chart
            .series
            .iter()
            .flat_map(|s| s.points.iter().map(|p| p.1).chain(s.spread.iter().map(|p| p.2)))
            .filter(|v| v.is_finite())
    };
    let top = values().fold(0.0, f64::max).max(1e-6);
    let least = values().filter(|v| *v > 0.0).fold(f64::INFINITY, f64::min);
    // Times over sizes span decades; rates do not.
    let decades = chart.x.sizes && top / least > 100.0 && chart.y != "Gbit/s";
    // Where the lines begin low there is room above their beginnings.
    let mean = |end: fn(&super::Series) -> Option<&(f64, f64)>| {
        chart.series.iter().filter_map(|s| end(s).map(|p| p.1)).sum::<f64>() / chart.series.len().max(1) as f64
    };
    let rising = mean(|s| s.points.first()) <= mean(|s| s.points.last());
    let corner = if rising { SeriesLabelPosition::UpperLeft } else { SeriesLabelPosition::UpperRight };
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (640, 380)).into_drawing_area();
        area.fill(&WHITE).map_err(|e| fail(&e))?;
        let right = xs.len().saturating_sub(1).max(1) as f64;
        let mut builder = ChartBuilder::on(&area);
        builder.margin(12).caption(&chart.title, ("sans-serif", 17)).x_label_area_size(44).y_label_area_size(58);
        let label = |at: &f64| {
            let near = at.round();
            let known = (near - at).abs() < 0.01 && near >= 0.0;
            xs.get(near as usize).filter(|_| known).map(|x| tick(chart, *x)).unwrap_or_default()
        };
        macro_rules! draw {
            ($y:expr) => {{
                let mut plot = builder.build_cartesian_2d(-0.2..right + 0.2, $y).map_err(|e| fail(&e))?;
                plot.configure_mesh()
                    .light_line_style(TRANSPARENT)
                    .bold_line_style(RGBColor(0xe4, 0xe8, 0xec))
                    .x_labels(xs.len() * 2 + 1)
                    .x_label_formatter(&label)
                    .y_label_formatter(&|v| figure(*v).trim_end_matches(".00").to_owned())
                    .x_desc(chart.x.label)
                    .y_desc(chart.y)
                    .label_style(("sans-serif", 13))
                    .axis_desc_style(("sans-serif", 14))
                    .draw()
                    .map_err(|e| fail(&e))?;
                for (series, colour) in chart.series.iter().zip(COLOURS.iter().cycle()) {
                    let at = |x: f64| xs.iter().position(|known| *known == x).unwrap_or(0) as f64;
                    let points: Vec<(f64, f64)> = series.points.iter().map(|p| (at(p.0), p.1)).collect();
                    plot.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))
                        .map_err(|e| fail(&e))?
                        .label(&series.name)
                        .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(3)));
                    // From the least to the most of all rounds.
                    let bars = series.spread.iter().map(|(x, least, most)| {
                        PathElement::new([(at(*x), *least), (at(*x), *most)], colour.mix(0.6).stroke_width(3))
                    });
                    plot.draw_series(bars).map_err(|e| fail(&e))?;
                    let dots = points.into_iter().map(|p| Circle::new(p, 3, colour.filled()));
                    plot.draw_series(dots).map_err(|e| fail(&e))?;
                }
                plot.configure_series_labels()
                    .position(corner.clone())
                    .background_style(WHITE.mix(0.85))
                    .border_style(RGBColor(0xd0, 0xd7, 0xde))
                    .label_font(("sans-serif", 13))
                    .draw()
                    .map_err(|e| fail(&e))?;
            }};
        }
        if decades {
            draw!((least / 2.0..top * 3.0).log_scale());
        } else {
            draw!(0.0..top * 1.4);
        }
        area.present().map_err(|e| fail(&e))?;
    }
    Ok(svg)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::{Axis, Series};
    use super::*;

    #[test]
    fn a_plot_has_its_lines_and_labels() {
        let line = |name: &str, k: f64| Series {
            name: name.into(),
            points: vec![(1024.0, k), (1_048_576.0, 3.0 * k)],
            spread: vec![(1024.0, 0.9 * k, 1.1 * k)],
        };
        for y in ["Gbit/s", "µs"] {
            let series = vec![line("one <way>", 1.0), line("both", 200.0)];
            let chart = Chart { title: "Rate".into(), x: Axis { label: "size", sizes: true }, y, series };
            let svg = plot(&chart).unwrap();
            assert!(svg.starts_with("<svg") && svg.matches("<polyline").count() >= 2);
            for text in ["1 KiB", "1 MiB", "one &lt;way", "both", "Rate"] {
                assert!(svg.contains(text), "{text} is missing");
            }
        }
    }
}
