//! Families of streams: by which scheme their bytes are moved.

use super::super::BenchProvider;
use super::super::stream::{Pages, Program, rate};
use super::charts::{KIB, MIB, SIZE, chart, steps};
use super::lab::{Lab, Peer};
use super::{Axis, Findings, Series};
use std::time::Duration;
use thruway_streams::{Context, Scheme, Settings};

const IDLE: Program = Program { buffers: 1, pages: Pages::Heap, touch: false, compute: Duration::ZERO };

/// Calls of one peer, over iWARP.
struct Caller {
    peer: Peer,
    context: Context,
    time: Duration,
}

impl Caller {
    fn new(lab: &Lab) -> Result<Caller, String> {
        let peer = Peer::streams()?;
        let provider = BenchProvider::Iwarp.towards(peer.addr)?;
        let context = Context::open(&provider).map_err(|e| e.to_string())?;
        Ok(Caller { peer, context, time: Duration::from_secs_f64(lab.seconds) })
    }

    fn rate(&self, settings: Settings, size: u32, program: Program) -> Result<(f64, f64), String> {
        rate(&self.context, self.peer.addr, settings, size, program, self.time)
    }
}

pub(super) fn flow_control(lab: &Lab) -> Result<Findings, String> {
    let caller = Caller::new(lab)?;
    // Both have 256 KiB at the peer, as the work has it: 32 buffers of 8 KiB.
    let credit = Settings { receive_len: 8 * KIB + 16, ..Settings::of(Scheme::Credit) };
    let packetized = Settings { ring_len: 256 * KIB, ..Settings::of(Scheme::Packetized) };
    let (mut rates, mut uses) = (Vec::new(), Vec::new());
    for (settings, name) in [(credit, "credit-based"), (packetized, "packetized")] {
        let (mut line, mut used) = (Series::new(name), Series::new(name));
        for size in steps(1, 64 * KIB, 4) {
            let (bytes, share) = caller.rate(settings, size, IDLE)?;
            line.points.push((size.into(), bytes * 8e-9));
            used.points.push((size.into(), share * 100.0));
        }
        rates.push(line);
        uses.push(used);
    }
    let gains: Vec<f64> = rates[1].points.iter().zip(&rates[0].points).map(|(new, old)| new.1 / old.1).collect();
    let mut small: Vec<f64> = gains.iter().take(6).copied().collect();
    small.sort_by(f64::total_cmp);
    let agrees = Some(
        small[small.len() / 2] > 1.0 && uses[1].points.iter().all(|point| point.1 > 99.0) && uses[0].at(1.0) < 1.0,
    );
    let because = format!(
        "rate of packetized against credit-based: {}; buffers used at 1 B: {:.0} against {:.2} %",
        gains.iter().map(|gain| format!("{gain:.2}")).collect::<Vec<_>>().join(", "),
        uses[1].at(1.0),
        uses[0].at(1.0)
    );
    let charts =
        vec![chart("One direction", SIZE, "Gbit/s", rates), chart("Bytes sent, of bytes taken up", SIZE, "%", uses)];
    Ok(Findings { charts, agrees, because })
}

pub(super) fn zero_copy(lab: &Lab) -> Result<Findings, String> {
    let caller = Caller::new(lab)?;
    let schemes = [
        (Scheme::Packetized, "copied"),
        (Scheme::Rendezvous, "synchronous zero copy"),
        (Scheme::ZeroCopy, "asynchronous zero copy"),
    ];
    let settings = |scheme| Settings { zero_copy_min: 16 * KIB, ..Settings::of(scheme) };
    let (mut rates, mut computing, mut touched) = (Vec::new(), Vec::new(), Vec::new());
    let program = Program { buffers: 8, ..IDLE };
    for (scheme, name) in schemes {
        let (mut line, mut beside, mut window) = (Series::new(name), Series::new(name), Series::new(name));
        for size in steps(32 * KIB, 2 * MIB, 4) {
            line.points.push((size.into(), caller.rate(settings(scheme), size, program)?.0 * 8e-9));
        }
        for compute in [0, 50, 100, 200, 400] {
            let compute_for = Duration::from_micros(compute);
            let rate = caller.rate(settings(scheme), 512 * KIB, Program { compute: compute_for, ..program })?.0;
            beside.points.push((compute as f64, rate * 8e-9));
        }
        for buffers in [1, 2, 4, 8] {
            let rate = caller.rate(settings(scheme), 512 * KIB, Program { buffers, touch: true, ..program })?.0;
            window.points.push((buffers.into(), rate * 8e-9));
        }
        rates.push(line);
        computing.push(beside);
        touched.push(window);
    }
    let gain = |lines: &[Series], x: f64| lines[2].at(x) / lines[1].at(x);
    let most =
        [0.0, 50.0, 100.0, 200.0, 400.0].map(|compute| gain(&computing, compute)).into_iter().fold(0.0, f64::max);
    let because = format!(
        "asynchronous against synchronous at 512 KiB with computation: at most {most:.2} x; with every buffer written to right after it was sent: {:.2} x",
        gain(&touched, 1.0)
    );
    let agrees = Some(most > 1.0);
    let compute = Axis { label: "computation between sends, µs", sizes: false };
    let window = Axis { label: "buffers used in turn, each written to after it was sent", sizes: false };
    let charts = vec![
        chart("One direction", SIZE, "Gbit/s", rates),
        chart("512 KiB, with computation", compute, "Gbit/s", computing),
        chart("512 KiB, written to too early", window, "Gbit/s", touched),
    ];
    Ok(Findings { charts, agrees, because })
}
