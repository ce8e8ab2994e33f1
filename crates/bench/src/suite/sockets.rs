//! Families of unmodified socket programs: over TCP as they are, and by `thruway run`.

use super::charts::{KIB, MIB, SIZE, chart, steps};
use super::lab::{Lab, Peer};
use super::{Axis, Findings, Series};
use std::process::Command;

const CLIENTS: Axis = Axis { label: "clients", sizes: false };

/// How a program is started, and what the lines of a chart are called by it.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    before: &'static [&'static str],
}

const WAYS: [Way; 2] =
    [Way { name: "TCP", before: &[] }, Way { name: "thruway run", before: &["run", "--quiet", "--"] }];

/// A server, and clients for it.
struct Servers(Vec<(Way, Peer)>);

/// A line of `bench sockets`.
struct Row {
    gbit: f64,
    operations: f64,
    p50_us: f64,
}

impl Servers {
    fn start() -> Result<Servers, String> {
        let start = |way: Way| Ok((way, Peer::sockets(way.before)?));
        Ok(Servers(WAYS.into_iter().map(start).collect::<Result<_, String>>()?))
    }

    /// A line for each way: `y` of what `args` measures, at each `x`.
    fn lines(
        &self,
        lab: &Lab,
        at: &[u32],
        args: impl Fn(u32) -> String,
        y: impl Fn(&Row) -> f64,
    ) -> Result<Vec<Series>, String> {
        let mut lines: Vec<Series> = self.0.iter().map(|(way, _)| Series::new(way.name)).collect();
        for &x in at {
            for (line, (way, peer)) in lines.iter_mut().zip(&self.0) {
                line.points.push((x.into(), y(&measure(lab, *way, peer, &args(x))?)));
            }
        }
        Ok(lines)
    }
}

fn measure(lab: &Lab, way: Way, peer: &Peer, args: &str) -> Result<Row, String> {
    let program = std::env::current_exe().map_err(|e| format!("this program's own path: {e}"))?;
    let mut command = Command::new(&program);
    if !way.before.is_empty() {
        command.args(way.before).arg(&program);
    }
    command.args(["bench", "sockets", "--json", "--connect", &peer.addr.to_string()]);
    command.args(["--seconds", &lab.seconds.to_string()]).args(args.split_whitespace());
    let done = command.output().map_err(|e| e.to_string())?;
    if !done.status.success() {
        return Err(String::from_utf8_lossy(&done.stderr).trim().to_owned());
    }
    let rows: serde_json::Value = serde_json::from_slice(&done.stdout).map_err(|e| format!("bench sockets: {e}"))?;
    let get = |key: &str| rows[0][key].as_f64().unwrap_or(f64::NAN);
    Ok(Row {
        gbit: get("bytes_per_second") * 8e-9,
        operations: get("operations_per_second"),
        p50_us: get("lat_us_p50"),
    })
}

/// How many times as much the second line has.
fn gain(lines: &[Series], x: u32) -> f64 {
    lines[1].at(x.into()) / lines[0].at(x.into())
}

pub(super) fn basics(lab: &Lab) -> Result<Findings, String> {
    let servers = Servers::start()?;
    let small: Vec<u32> = steps(1, 64 * KIB, 4).collect();
    let large: Vec<u32> = steps(64, MIB, 4).collect();
    let latency = servers.lines(lab, &small, |size| format!("--test lat --size {size}"), |row| row.p50_us)?;
    let one_way = servers.lines(lab, &large, |size| format!("--test in --size {size}"), |row| row.gbit)?;
    let both_ways = servers.lines(lab, &large, |size| format!("--test both --size {size}"), |row| row.gbit)?;
    let (quicker, faster) = (1.0 / gain(&latency, 64), gain(&one_way, 64 * KIB));
    let because = format!(
        "64 bytes in {:.2} µs, by TCP {:.1}; 64 KiB one way {faster:.1} x, both ways {:.1} x",
        latency[1].at(64.0),
        latency[0].at(64.0),
        gain(&both_ways, 64 * KIB)
    );
    let charts = vec![
        chart("Half round trip, median", SIZE, "µs", latency),
        chart("One direction", SIZE, "Gbit/s", one_way),
        chart("Both directions together", SIZE, "Gbit/s", both_ways),
    ];
    Ok(Findings { charts, agrees: Some(quicker > 2.0 && faster > 1.5), because })
}

pub(super) fn several(lab: &Lab) -> Result<Findings, String> {
    let servers = Servers::start()?;
    let counts = [1, 2, 4, 8];
    let run = |test: &'static str, size: &'static str| {
        move |clients: u32| format!("--test {test} --size {size} --clients {clients}")
    };
    let streams = servers.lines(lab, &counts, run("in", "64K"), |row| row.gbit)?;
    let fan_out = servers.lines(lab, &counts, run("out", "64K"), |row| row.gbit)?;
    let hot_spot = servers.lines(lab, &[1, 2, 4, 6, 12], run("lat", "16K"), |row| row.p50_us)?;
    let because = format!(
        "eight clients: in {:.1} x, out {:.1} x TCP; hot spot of 16 KiB with six clients {:.0} µs, by TCP {:.0}",
        gain(&streams, 8),
        gain(&fan_out, 8),
        hot_spot[1].at(6.0),
        hot_spot[0].at(6.0)
    );
    let agrees = Some(gain(&streams, 8) > 1.0 && gain(&fan_out, 8) > 1.0 && gain(&hot_spot, 6) < 1.0);
    let charts = vec![
        chart("Fan-in: 64 KiB messages, all clients together", CLIENTS, "Gbit/s", streams),
        chart("Fan-out", CLIENTS, "Gbit/s", fan_out),
        chart("Hot spot: half round trip of 16 KiB", CLIENTS, "µs", hot_spot),
    ];
    Ok(Findings { charts, agrees, because })
}

pub(super) fn overlap(lab: &Lab) -> Result<Findings, String> {
    let servers = Servers::start()?;
    let compute = Axis { label: "computation between sends, µs", sizes: false };
    let run = |size: &'static str| move |compute: u32| format!("--test in --size {size} --compute {compute}");
    let small = servers.lines(lab, &[0, 5, 10, 20, 40, 80], run("64K"), |row| row.gbit)?;
    let large = servers.lines(lab, &[0, 50, 100, 200, 400], run("1M"), |row| row.gbit)?;
    let because = format!(
        "64 KiB with 0, 10 and 40 µs: {:.1}, {:.1}, {:.1} x TCP; 1 MiB with 0 and 200 µs: {:.1}, {:.1} x",
        gain(&small, 0),
        gain(&small, 10),
        gain(&small, 40),
        gain(&large, 0),
        gain(&large, 200)
    );
    let agrees = Some([0, 10, 40].iter().all(|us| gain(&small, *us) > 1.0));
    let charts = vec![chart("64 KiB", compute, "Gbit/s", small), chart("1 MiB", compute, "Gbit/s", large)];
    Ok(Findings { charts, agrees, because })
}

pub(super) fn files(lab: &Lab) -> Result<Findings, String> {
    let servers = Servers::start()?;
    let sizes: Vec<u32> = steps(64, 64 * MIB, 8).collect();
    let time = servers.lines(lab, &sizes, |size| format!("--test file --size {size}"), |row| row.p50_us)?;
    let mut rate = time.clone();
    for point in rate.iter_mut().flat_map(|line| &mut line.points) {
        point.1 = point.0 * 8e-3 / point.1;
    }
    let because = format!(
        "64 bytes in {:.1} µs, by TCP {:.1}; the largest {:.1} x TCP",
        time[1].at(64.0),
        time[0].at(64.0),
        rate[1].last() / rate[0].last()
    );
    let agrees = Some(gain(&time, 64) < 1.0 && rate[1].last() > rate[0].last());
    let charts = vec![chart("Time of a file, median", SIZE, "µs", time), chart("Rate", SIZE, "Gbit/s", rate)];
    Ok(Findings { charts, agrees, because })
}

pub(super) fn web(lab: &Lab) -> Result<Findings, String> {
    let servers = Servers::start()?;
    let sizes: Vec<u32> = steps(4, 8 * KIB, 4).collect();
    let per_second = |row: &Row| row.operations;
    let mut charts = Vec::new();
    let mut gains = Vec::new();
    for requests in [1, 8, 1000] {
        let run = |size: u32| format!("--test web --size {size} --requests {requests}");
        let lines = servers.lines(lab, &sizes, run, per_second)?;
        gains.push(gain(&lines, 4 * KIB));
        let title = match requests {
            1 => "HTTP/1.0, one client".to_owned(),
            n => format!("HTTP/1.1, {n} documents on a connection, one client"),
        };
        charts.push(chart(title, SIZE, "documents per second", lines));
    }
    // Tenths.
    let exponents = [0, 5, 10, 15, 20];
    let run = |tenths: u32| format!("--test web --zipf {} --clients 4", f64::from(tenths) / 10.0);
    let mut zipf = servers.lines(lab, &exponents, run, per_second)?;
    let worst = exponents.iter().map(|tenths| gain(&zipf, *tenths)).fold(f64::INFINITY, f64::min);
    for point in zipf.iter_mut().flat_map(|line| &mut line.points) {
        point.0 /= 10.0;
    }
    let exponent = Axis { label: "exponent of Zipf's law", sizes: false };
    charts.push(chart(
        "20 documents by Zipf's law, 8 on a connection, four clients",
        exponent,
        "documents per second",
        zipf,
    ));
    let because = format!(
        "4 KiB documents, 1, 8 and 1,000 on a connection: {:.2}, {:.2}, {:.2} x TCP; by Zipf's law with four clients at least {worst:.2} x",
        gains[0], gains[1], gains[2]
    );
    Ok(Findings { charts, agrees: Some(gains[2] > 1.3), because })
}
