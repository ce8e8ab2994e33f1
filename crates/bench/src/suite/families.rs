//! The families, each with what was published and what must agree.

use super::super::{Op, Wait};
use super::charts::{KIB, MIB, SIZE, chart, steps};
use super::lab::{CHILDREN, Lab, OWN, Peer, Point, Shape, processor_seconds};
use super::{Axis, Family, Findings, Series, nfs, sockets, streams};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use thruway_fabric::{Access, iwarp};

const DEPTH: Axis = Axis { label: "operations in flight", sizes: false };

/// In the order of the report.
pub(super) static FAMILIES: [Family; 23] = [
    Family {
        id: "semantics",
        title: "One-sided against two-sided operations, by message size",
        source: "Ren 2015, fig. 2-4 and 2-5; Ren et al. 2012, fig. 3 and 4",
        reported: "On 40 Gbit/s InfiniBand and RoCE, Write and Send reach the rate of the wire from 16 to 64 KiB on; Read stays \
                   behind; Write costs the least processor time, and the passive end of a one-sided operation next to none.",
        expected: "The rate rises with the size and flattens, and Write is at most a tenth slower than Send. (In user space the passive end \
                   works too: it places what arrives.)",
        measure: semantics,
    },
    Family {
        id: "depth",
        title: "Synchronous against asynchronous: operations in flight",
        source: "Ren 2015, fig. 3-6 and § 3.4.2",
        reported: "With one operation at a time the rate is bounded by the round trip; with 16 and more it is the wire's.",
        expected: "Reads: sixteen under way are at least a quarter faster than one at a time. Writes are done when TCP has taken \
                   them, so on a short path one at a time is as fast.",
        measure: depth,
    },
    Family {
        id: "latency",
        title: "Half round trip, polled and by event",
        source: "Balaji 2006, ch. 4 and 8",
        reported: "InfiniBand: Write 5.5 µs, Read 12.5 µs polled and 24.5 by event; 10GbE with offload 8.9 µs; host TCP 10.4 to 20.5 µs.",
        expected: "Polling is faster than waiting for events; up to 1 KiB the size hardly matters.",
        measure: latency,
    },
    Family {
        id: "bidirectional",
        title: "One direction against both",
        source: "Balaji 2006, ch. 8; Ren 2015, § 6.4",
        reported: "10GbE offload 6.4 one way, 7 Gbit/s both ways; InfiniBand 5.4 and 6.4; RFTP 83 % more both ways than one way.",
        expected: "Both directions together are at most a tenth slower than one.",
        measure: bidirectional,
    },
    Family {
        id: "multi-stream",
        title: "Several connections between the same two hosts",
        source: "Balaji 2006, ch. 4 and 8",
        reported: "10GbE offload 7.1 to 7.6, host TCP 4.9 Gbit/s, nearly the same from one stream to many.",
        expected: "Sixteen connections carry at least 0.7 of what the best number does.",
        measure: multi_stream,
    },
    Family {
        id: "hot-spot",
        title: "Hot spot: many clients ping one server",
        source: "Balaji 2006, ch. 4 and 8",
        reported: "At 16 KiB, six clients instead of one cost SDP 138 µs more, and TCP over IPoIB 456 µs.",
        expected: "The time for one ping grows about as the number of clients; at most twice as fast where clients and server share \
                   the processors.",
        measure: hot_spot,
    },
    Family {
        id: "fan",
        title: "Fan-in and fan-out: many clients write to, and read from, one server",
        source: "Balaji 2006, ch. 4 and 11",
        reported: "SDP 687 MB/s in and 477 out, TCP over IPoIB 237 and 175; host TCP on 10GbE 3.5 Gbit/s in and 4.5 out.",
        expected: "Eight clients together get at least 0.6 of what the best number gets.",
        measure: fan,
    },
    Family {
        id: "overlap",
        title: "Computation between operations",
        source: "Balaji 2006, ch. 5",
        reported: "With AZ-SDP, 64 KiB messages lose no rate until the computation takes as long as they do: up to twice the rate of \
                   what waits for each message.",
        expected: "With sixteen under way the rate is higher than with one at a time at every amount of computation up to a message's time.",
        measure: overlap,
    },
    Family {
        id: "markers",
        title: "The cost of MPA's markers and CRC",
        source: "Balaji 2006, ch. 12, fig. 12-3",
        reported: "Markers cost software iWARP on the host most at small separations; CRC32 in software is the larger cost.",
        expected: "Together they cost something and do not stop the show: at least a tenth of the rate without is left.",
        measure: markers,
    },
    Family {
        id: "flow-control",
        title: "Credit-based against packetized flow control",
        source: "Balaji 2006, ch. 6",
        reported: "With buffers of 8 KiB, packetized flow control has up to tenfold the rate of small messages and uses nearly all of the \
                   peer's buffers, where credits use next to nothing of them; latencies are equal.",
        expected: "Packetized is faster at most sizes up to 1 KiB and uses all of what it takes up; credits use less than 1 % at one byte. (Both go over one \
                   TCP connection here, and a message of either costs it about the same.)",
        measure: streams::flow_control,
    },
    Family {
        id: "zero-copy",
        title: "Copied, synchronous and asynchronous zero copy",
        source: "Balaji 2006, ch. 5",
        reported: "Asynchronous zero copy has 35 % more throughput than synchronous, and up to twice with computation between sends; \
                   with many page faults it loses that.",
        expected: "With computation between sends, asynchronous zero copy is faster than synchronous at some amount of it. (Within one \
                   host, and with two processors for both ends, what overlaps is little.)",
        measure: streams::zero_copy,
    },
    Family {
        id: "sockets",
        title: "Unmodified socket programs: ping-pong, one direction and both",
        source: "Balaji 2006, ch. 2, 4 and 8",
        reported: "Sockets over EMP 28.5 µs against 120 by TCP and 840 against 550 Mbit/s; over VIA 9.5 µs, a fifth of TCP's; SDP 471 against 169                    MB/s of TCP over IPoIB.",
        expected: "Within one host: half of TCP's latency or better at 64 bytes, 1.5 times its rate or more at 64 KiB.",
        measure: sockets::basics,
    },
    Family {
        id: "sockets-several",
        title: "Unmodified socket programs: fan-in, fan-out, hot spot",
        source: "Balaji 2006, ch. 4 and 8",
        reported: "SDP 687 MB/s in and 477 out, TCP over IPoIB 237 and 175; a hot spot of 16 KiB grows by 138 µs, by TCP 456.",
        expected: "With eight clients faster than TCP, and a hot spot of six quicker.",
        measure: sockets::several,
    },
    Family {
        id: "sockets-overlap",
        title: "Unmodified socket programs: computation between sends",
        source: "Balaji 2006, ch. 5",
        reported: "With asynchronous zero copy, up to twice the rate at 64 KiB; at 1 MiB nothing is lost with 200 µs of computation.",
        expected: "Faster than TCP with 0, 10 and 40 µs of computation between sends of 64 KiB.",
        measure: sockets::overlap,
    },
    Family {
        id: "file-serving",
        title: "Files from memory to memory, as by FTP",
        source: "Balaji 2006, ch. 2",
        reported: "512 MB in 6.84 s, by TCP 11.8; a small file in 13.6 µs, by TCP 25.6.",
        expected: "Small files quicker and large ones faster than by TCP.",
        measure: sockets::files,
    },
    Family {
        id: "web-serving",
        title: "Documents by HTTP, of one size and by Zipf's law",
        source: "Balaji 2006, ch. 2 and 8",
        reported: "Apache up to six times as fast over EMP; with offload up to ten times, the more the smaller the documents.",
        expected: "With a thousand documents on a connection at least 1.3 times TCP's rate. (Connections of one document are left to TCP; those \
                   of eight, where all processors are busy, may lose more by being accelerated than they gain.)",
        measure: sockets::web,
    },
    Family {
        id: "registration",
        title: "Registration strategies",
        source: "Noronha 2008, fig. 3-6",
        reported: "Registering for each operation costs more than the transfer of small messages; pre-registered buffers, fast \
                   registration and caches remove it.",
        expected: "A window in registered memory costs at most half as much again as registering, and less than copying 1 MiB; memory registered once costs nothing.",
        measure: registration,
    },
    Family {
        id: "transfer",
        title: "Transfer by block size and streams, against GridFTP",
        source: "Ren 2015, fig. 4-4 to 4-7 and 6-12",
        reported: "RFTP reaches the rate of the wire from 256 KiB blocks on; GridFTP needs more than one processor and stays below it.",
        expected: "The rate rises with the block size and flattens by 1 MiB; both ends together use at most a tenth more processor time per byte than GridFTP.",
        measure: transfer,
    },
    Family {
        id: "breakdown",
        title: "Where a transfer's processor time goes",
        source: "Ren 2015, fig. 6-3",
        reported: "At 39 Gbit/s RFTP uses 122 % of a processor: 56 protocol, 0 copying, 70 loading, below 1 offloading; TCP iperf 642 %.",
        expected: "Loading and protocol are the most of it; verification and encryption add their own share and nothing else.",
        measure: breakdown,
    },
    Family {
        id: "nfs-designs",
        title: "NFS over RDMA: who moves what is read",
        source: "Noronha 2008, § 3.2 and fig. 3-8",
        reported: "The server writes (Read-Write) against the client reads (Read-Read): 47 % more at one thread, 5 % at eight; 400 against 375 \
                   MB/s; the client's processor 2 to 5 % against 4 to 24 %.",
        expected: "With one read at a time, Read-Write is faster: Read-Read needs a round trip more. Its client takes less processor time for each byte \
                   of small records at least.",
        measure: nfs::designs,
    },
    Family {
        id: "nfs-registration",
        title: "NFS over RDMA: how the client registers memory",
        source: "Noronha 2008, § 3.3 and fig. 3-9 to 3-13",
        reported: "A cache of registrations with a copy doubles the rate of 2 KiB records; registering each time without a copy wins for large ones. Fast \
                   registration 350 to 400 MB/s; all memory under one key nearly 900.",
        expected: "For 1 MiB, what needs no copy (registered each time, windows) is at least as fast as what needs one, within a tenth. (In user space nothing \
                   is pinned, so registering costs little at any size.)",
        measure: nfs::registration,
    },
    Family {
        id: "nfs-versions",
        title: "NFS versions 3 and 4, over RDMA and TCP",
        source: "Noronha 2008, ch. 4",
        reported: "128 KiB records: READ 714 and WRITE 542 MB/s by version 4 over RDMA, version 3 the same or slightly more; over TCP 200 and below 100.",
        expected: "By each transport, version 4 reads at least 0.8 of what version 3 does.",
        measure: nfs::versions,
    },
    Family {
        id: "nfs-delay",
        title: "NFS over a path with a delay",
        source: "Noronha 2008, ch. 5",
        reported: "700 MB/s up to 10 µs each way, about 100 at 1,000 µs; RDMA 40 % above TCP over IPoIB-RC at 10 µs, and the lowest at 1,000 µs.",
        expected: "With sixteen reads in flight the rate at 1,000 µs is below that at 0, and by both transports within a factor of three of sixteen reads for each round trip.",
        measure: nfs::delay,
    },
];

fn semantics(lab: &Lab) -> Result<Findings, String> {
    let peer = Peer::bench(&Shape::default())?;
    let (mut rate, mut near, mut far) = (Vec::new(), Vec::new(), Vec::new());
    for op in [Op::Send, Op::Write, Op::Read] {
        let all = [&mut rate, &mut near, &mut far];
        all.into_iter().for_each(|s| s.push(Series::new(op.name())));
        for size in steps(256, 4 * MIB, 4) {
            let point = lab.point(&peer, &Shape { op, size, ..Shape::default() })?;
            let values = [(&mut rate, point.gbit), (&mut near, point.near_cost()), (&mut far, point.far_cost())];
            for (series, value) in values {
                series.last_mut().expect("pushed above").points.push((size.into(), value));
            }
        }
    }
    let (send, write) = (&rate[0], &rate[1]);
    let flat = write.at(f64::from(4 * MIB)) > 0.7 * write.most();
    let agrees = write.last() > 4.0 * write.points[0].1 && flat && write.last() > 0.9 * send.last();
    let because =
        format!("write {:.1}, send {:.1}, read {:.1} Gbit/s at 4 MiB", write.last(), send.last(), rate[2].last());
    let charts = vec![
        chart("Rate, 16 in flight", SIZE, "Gbit/s", rate),
        chart("Processor time of the active end", SIZE, "ns per byte", near),
        chart("Processor time of the passive end", SIZE, "ns per byte", far),
    ];
    Ok(Findings { charts, agrees: Some(agrees), because })
}

fn depth(lab: &Lab) -> Result<Findings, String> {
    let peer = Peer::bench(&Shape::default())?;
    let mut series = Vec::new();
    for (op, size) in [(Op::Write, 16 * KIB), (Op::Write, 256 * KIB), (Op::Read, 16 * KIB)] {
        let mut line = Series::new(format!("{} {} KiB", op.name(), size / KIB));
        for depth in steps(1, 64, 2) {
            let point = lab.point(&peer, &Shape { op, size, depth, ..Shape::default() })?;
            line.points.push((depth.into(), point.gbit));
        }
        series.push(line);
    }
    let gains: Vec<f64> = series.iter().map(|s| s.at(16.0) / s.at(1.0)).collect();
    let agrees = gains[2] > 1.25;
    let because = format!(
        "16 against 1: write 16 KiB {:.1} x, 256 KiB {:.1} x, read 16 KiB {:.1} x",
        gains[0], gains[1], gains[2]
    );
    Ok(Findings { charts: vec![chart("Rate by depth", DEPTH, "Gbit/s", series)], agrees: Some(agrees), because })
}

fn latency(lab: &Lab) -> Result<Findings, String> {
    let peer = Peer::bench(&Shape::default())?;
    let mut charts = Vec::new();
    let mut ends = Vec::new();
    for (wait, title) in [(Wait::Poll, "Polled"), (Wait::Event, "By event")] {
        let mut series = Vec::new();
        for op in [Op::Send, Op::Write, Op::Read] {
            // A write's last byte can only be detected by polling.
            if op == Op::Write && wait == Wait::Event {
                continue;
            }
            let mut line = Series::new(op.name());
            for size in steps(4, 64 * KIB, 4) {
                let point = lab.point(&peer, &Shape { lat: true, op, size, depth: 1, wait, ..Shape::default() })?;
                line.points.push((size.into(), point.p50_us));
            }
            series.push(line);
        }
        ends.push(series[0].clone());
        charts.push(chart(format!("{title} (read: whole round trip)"), SIZE, "µs", series));
    }
    let (polled, event) = (&ends[0], &ends[1]);
    let agrees = polled.at(64.0) < event.at(64.0) && polled.at(1024.0) < 1.5 * polled.at(4.0);
    let because = format!("send of 64 bytes: {:.1} µs polled, {:.1} µs by event", polled.at(64.0), event.at(64.0));
    Ok(Findings { charts, agrees: Some(agrees), because })
}

fn bidirectional(lab: &Lab) -> Result<Findings, String> {
    let peer = Peer::bench(&Shape::default())?;
    let mut series = Vec::new();
    for (both, name) in [(false, "one direction"), (true, "both together")] {
        let mut line = Series::new(name);
        for size in steps(4 * KIB, 4 * MIB, 4) {
            let shape = Shape { op: Op::Send, size, bidirectional: both, ..Shape::default() };
            line.points.push((size.into(), lab.point(&peer, &shape)?.gbit));
        }
        series.push(line);
    }
    let gain = series[1].most() / series[0].most();
    let because = format!("both ways {gain:.2} x one way");
    Ok(Findings { charts: vec![chart("Sends", SIZE, "Gbit/s", series)], agrees: Some(gain > 0.9), because })
}

fn multi_stream(lab: &Lab) -> Result<Findings, String> {
    let peer = Peer::bench(&Shape::default())?;
    let mut series = Vec::new();
    for op in [Op::Send, Op::Write] {
        let mut line = Series::new(op.name());
        for qps in steps(1, 64, 2) {
            let shape = Shape { op, qps, depth: 4, ..Shape::default() };
            line.points.push((qps.into(), lab.point(&peer, &shape)?.gbit));
        }
        series.push(line);
    }
    let share = series[1].at(16.0) / series[1].most();
    let because = format!("16 connections reach {share:.2} of the best");
    let x = Axis { label: "connections", sizes: false };
    Ok(Findings { charts: vec![chart("64 KiB messages", x, "Gbit/s", series)], agrees: Some(share > 0.7), because })
}

/// Has `clients` threads measure the same thing at the same time.
fn together(lab: &Lab, peer: &Peer, clients: u32, shape: &Shape) -> Result<Vec<Point>, String> {
    let start = Barrier::new(clients as usize);
    std::thread::scope(|scope| {
        let client = || {
            start.wait();
            lab.point(peer, shape)
        };
        let clients: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        clients.into_iter().map(|c| c.join().map_err(|_| "a client panicked".to_string())?).collect()
    })
}

fn hot_spot(lab: &Lab) -> Result<Findings, String> {
    let peer = Peer::bench(&Shape::default())?;
    let mut series = Vec::new();
    for size in [64, 16 * KIB] {
        let name = if size < KIB { format!("{size} bytes") } else { format!("{} KiB", size / KIB) };
        let mut line = Series::new(name);
        for clients in [1, 2, 4, 6, 8, 12] {
            let shape = Shape { lat: true, op: Op::Send, size, depth: 1, ..Shape::default() };
            let points = together(lab, &peer, clients, &shape)?;
            let mean = points.iter().map(|p| p.p50_us).sum::<f64>() / f64::from(clients);
            line.points.push((clients.into(), mean));
        }
        series.push(line);
    }
    let growth = series[1].at(12.0) / series[1].at(1.0);
    let because = format!(
        "16 KiB: {:.0} µs with one client, {:.0} with six, {:.0} with twelve",
        series[1].at(1.0),
        series[1].at(6.0),
        series[1].at(12.0)
    );
    let x = Axis { label: "clients", sizes: false };
    Ok(Findings {
        charts: vec![chart("Half round trip, median", x, "µs", series)],
        agrees: Some(growth < 24.0),
        because,
    })
}

fn fan(lab: &Lab) -> Result<Findings, String> {
    let peer = Peer::bench(&Shape::default())?;
    let mut series = Vec::new();
    for (op, name) in [(Op::Write, "in (write)"), (Op::Read, "out (read)")] {
        let mut line = Series::new(name);
        for clients in [1, 2, 4, 8] {
            let shape = Shape { op, size: 256 * KIB, depth: 4, ..Shape::default() };
            let points = together(lab, &peer, clients, &shape)?;
            line.points.push((clients.into(), points.iter().map(|p| p.gbit).sum()));
        }
        series.push(line);
    }
    let shares: Vec<f64> = series.iter().map(|s| s.at(8.0) / s.most()).collect();
    let because = format!("eight clients: in {:.2}, out {:.2} of the best", shares[0], shares[1]);
    let x = Axis { label: "clients", sizes: false };
    let agrees = Some(shares.iter().all(|s| *s > 0.6));
    Ok(Findings { charts: vec![chart("256 KiB messages, all clients together", x, "Gbit/s", series)], agrees, because })
}

fn overlap(lab: &Lab) -> Result<Findings, String> {
    let peer = Peer::bench(&Shape::default())?;
    let mut series = Vec::new();
    for (depth, name) in [(1, "one at a time"), (16, "16 in flight")] {
        let mut line = Series::new(name);
        for compute in [0, 5, 10, 20, 40, 80, 160] {
            let rate = lab.computing(&peer, 64 * KIB, depth, Duration::from_micros(compute))?;
            line.points.push((compute as f64, rate));
        }
        series.push(line);
    }
    let gains: Vec<f64> = [0.0, 5.0, 10.0].iter().map(|c| series[1].at(*c) / series[0].at(*c)).collect();
    let because =
        format!("16 in flight against one, with 0, 5 and 10 µs: {:.2}, {:.2}, {:.2} x", gains[0], gains[1], gains[2]);
    let x = Axis { label: "computation between operations, µs", sizes: false };
    let agrees = Some(gains.iter().all(|g| *g > 1.0));
    Ok(Findings { charts: vec![chart("Reads of 64 KiB", x, "Gbit/s", series)], agrees, because })
}

fn markers(lab: &Lab) -> Result<Findings, String> {
    let mut series = Vec::new();
    for (crc, markers, name) in
        [(false, false, "neither"), (false, true, "markers"), (true, false, "CRC"), (true, true, "CRC and markers")]
    {
        let shape = Shape { crc, markers, ..Shape::default() };
        let peer = Peer::bench(&shape)?;
        let mut line = Series::new(name);
        for size in steps(KIB, MIB, 4) {
            line.points.push((size.into(), lab.point(&peer, &Shape { size, ..shape.clone() })?.gbit));
        }
        series.push(line);
    }
    let part = |n: usize| series[n].last() / series[0].last();
    let because =
        format!("at 1 MiB, of the rate with neither: markers {:.2}, CRC {:.2}, both {:.2}", part(1), part(2), part(3));
    let agrees = Some(part(3) > 0.1 && part(3) < 1.0);
    Ok(Findings { charts: vec![chart("Writes, 16 in flight", SIZE, "Gbit/s", series)], agrees, because })
}

fn registration(lab: &Lab) -> Result<Findings, String> {
    let fail = |e: thruway_fabric::Error| e.to_string();
    let device = iwarp::Config::default().open().map_err(fail)?;
    let pd = device.alloc_pd().map_err(|e| e.to_string())?;
    let most = 16 * MIB as usize;
    let pool = Lab::buffer(most)?;
    let whole = pd.register(&pool, Access::LOCAL_WRITE).map_err(fail)?;
    let source = vec![1u8; most];
    let mut series = [
        "registered for each operation",
        "memory mapped and registered",
        "window in registered memory",
        "copied into registered memory",
    ]
    .map(Series::new);
    for size in steps(4 * KIB, 16 * MIB, 4) {
        let len = size as usize;
        let time = |step: &mut dyn FnMut() -> Result<(), String>| {
            let (start, mut n) = (Instant::now(), 0u32);
            while start.elapsed().as_secs_f64() < lab.seconds / 4.0 {
                step()?;
                n += 1;
            }
            Ok::<f64, String>(start.elapsed().as_secs_f64() * 1e6 / f64::from(n))
        };
        let register = time(&mut || pd.register(&pool, Access::REMOTE_WRITE).map(drop).map_err(fail))?;
        let fresh = time(&mut || pd.register(&Lab::buffer(len)?, Access::REMOTE_WRITE).map(drop).map_err(fail))?;
        let window = time(&mut || whole.bind_window(0, len, Access::REMOTE_WRITE).map(drop).map_err(fail))?;
        let copy = time(&mut || {
            pool.write(0, &source[..len]);
            Ok(())
        })?;
        for (line, value) in series.iter_mut().zip([register, fresh, window, copy]) {
            line.points.push((size.into(), value));
        }
    }
    let mib = f64::from(MIB);
    let because = format!(
        "1 MiB: registered {:.2} µs, window {:.2} µs, copied {:.0} µs; user-space iWARP pins nothing, so registering costs the same at every size",
        series[0].at(mib),
        series[2].at(mib),
        series[3].at(mib)
    );
    let agrees = Some(series[2].at(mib) < 1.5 * series[0].at(mib) && series[2].at(mib) < series[3].at(mib));
    let charts = vec![chart("Time for one operation's memory, user-space iWARP", SIZE, "µs", series.to_vec())];
    Ok(Findings { charts, agrees, because })
}

/// Runs `thruway cp` and returns its report.
fn copy(args: &[String]) -> Result<serde_json::Value, String> {
    let program = std::env::current_exe().map_err(|e| format!("this program's own path: {e}"))?;
    let done = Command::new(program).args(["cp", "--json"]).args(args).output().map_err(|e| e.to_string())?;
    if !done.status.success() {
        return Err(String::from_utf8_lossy(&done.stderr).trim().to_owned());
    }
    serde_json::from_slice(&done.stdout).map_err(|e| format!("the report of cp: {e}"))
}

fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

fn transfer(lab: &Lab) -> Result<Findings, String> {
    let daemon = Peer::daemon(None)?;
    let size = (lab.seconds * 8e9) as u64;
    let run = |provider: &str, block: u32, streams: u32| -> Result<(f64, f64), String> {
        let before = daemon.cpu_seconds();
        let args = [
            format!("--provider={provider}"),
            "--verify=none".into(),
            format!("--block-size={block}"),
            format!("--streams={streams}"),
            format!("--size={size}"),
            "/dev/zero".into(),
            format!("tw://{}/dev/null", daemon.addr),
        ];
        let report = copy(&args)?;
        let get = |key: &str| report[key].as_f64().unwrap_or(f64::NAN);
        let cpu = get("cpu_seconds") + daemon.cpu_seconds() - before;
        Ok((get("bytes_per_second") * 8e-9, cpu / get("bytes") * 1e9))
    };
    let (mut rate, mut cost) = (Vec::new(), Vec::new());
    for (provider, streams) in [("iwarp", 1), ("iwarp", 8), ("tcp", 1), ("tcp", 8)] {
        let name = format!("{provider}, {streams} stream{}", if streams == 1 { "" } else { "s" });
        let (mut r, mut c) = (Series::new(name.clone()), Series::new(name));
        for block in steps(64 * KIB, 4 * MIB, 4) {
            let (gbit, cpu) = run(provider, block, streams)?;
            r.points.push((block.into(), gbit));
            c.points.push((block.into(), cpu));
        }
        rate.push(r);
        cost.push(c);
    }
    let mib = f64::from(MIB);
    let flat = rate[0].at(mib) > 0.7 * rate[0].most() && rate[0].at(mib) > rate[0].at(f64::from(64 * KIB)) * 0.9;
    let (mut because, mut agrees) =
        (format!("iwarp, 1 MiB blocks: {:.0} Gbit/s, {:.3} ns/byte", rate[0].at(mib), cost[0].at(mib)), None);
    if has("globus-gridftp-server") && has("globus-url-copy") {
        let (mut r, mut c) = (Series::new("GridFTP, 1 stream"), Series::new("GridFTP, 1 stream"));
        let server = GridFtp::start()?;
        for block in steps(64 * KIB, 4 * MIB, 4) {
            let (seconds, cpu) = server.copy(size, block)?;
            r.points.push((block.into(), size as f64 * 8e-9 / seconds));
            c.points.push((block.into(), cpu / size as f64 * 1e9));
        }
        because += &format!("; GridFTP {:.0} Gbit/s, {:.3} ns/byte", r.at(mib), c.at(mib));
        agrees = Some(flat && cost[0].at(mib) < 1.1 * c.at(mib));
        rate.push(r);
        cost.push(c);
    } else {
        because += "; GridFTP is not installed (globus-gridftp-server-progs, globus-gass-copy-progs)";
    }
    let x = Axis { label: "block size", sizes: true };
    let charts = vec![
        chart("/dev/zero to /dev/null", x, "Gbit/s", rate),
        chart("Processor time of both ends", x, "ns per byte", cost),
    ];
    Ok(Findings { charts, agrees, because })
}

/// A GridFTP server, as its own package runs it in the foreground.
struct GridFtp {
    child: std::process::Child,
    port: u16,
}

impl GridFtp {
    fn start() -> Result<GridFtp, String> {
        let port =
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map_err(|e| e.to_string())?.port();
        let mut command = Command::new("globus-gridftp-server");
        command.args(["-aa", "-daemon", "-p", &port.to_string()]);
        if rustix::process::geteuid().is_root() {
            // As root it wants somebody to become.
            command.args(["-anonymous-user", "nobody"]);
        }
        let null = || std::process::Stdio::null();
        let child = command.stdin(null()).stdout(null()).stderr(null()).spawn();
        let server = GridFtp { child: child.map_err(|e| format!("globus-gridftp-server: {e}"))?, port };
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            if Instant::now() > deadline {
                return Err("globus-gridftp-server did not come up".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    /// Seconds and processor seconds of both ends.
    fn copy(&self, size: u64, block: u32) -> Result<(f64, f64), String> {
        // Processor time of the children this process has waited for.
        let waited_for = || processor_seconds("self", CHILDREN);
        let before = (self.cpu_seconds(), waited_for());
        let start = Instant::now();
        let target = format!("ftp://127.0.0.1:{}/dev/null", self.port);
        let (size, block) = (size.to_string(), block.to_string());
        let done = Command::new("globus-url-copy")
            .args(["-len", &size, "-bs", &block, "file:///dev/zero", &target])
            .output()
            .map_err(|e| format!("globus-url-copy: {e}"))?;
        if !done.status.success() {
            return Err(format!("globus-url-copy: {}", String::from_utf8_lossy(&done.stderr).trim()));
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok((seconds, self.cpu_seconds() - before.0 + waited_for() - before.1))
    }

    /// Of the server and of those of its children that it has waited for.
    fn cpu_seconds(&self) -> f64 {
        processor_seconds(self.child.id(), OWN.start..CHILDREN.end)
    }
}

impl Drop for GridFtp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn breakdown(lab: &Lab) -> Result<Findings, String> {
    let target = lab.dir.path().join("target");
    std::fs::create_dir_all(&target).map_err(|e| e.to_string())?;
    let daemon = Peer::daemon(Some(&target))?;
    let source = lab.dir.path().join("source");
    let size = (lab.seconds * 1e9).max(64e6) as usize;
    let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut file = std::fs::File::create(&source).map_err(|e| e.to_string())?;
    for _ in 0..size >> 20 {
        std::io::Write::write_all(&mut file, &bytes).map_err(|e| e.to_string())?;
    }
    let mut totals: Vec<[f64; 6]> = Vec::new();
    // Plain; verified; verified and encrypted.
    for (verify, encrypt) in [("none", "off"), ("xxh3", "off"), ("xxh3", "on")] {
        let before = daemon.cpu_seconds();
        let args = [
            format!("--verify={verify}"),
            format!("--encrypt={encrypt}"),
            "--no-resume".into(),
            "--provider=iwarp".into(),
            source.display().to_string(),
            format!("tw://{}/e/{verify}{encrypt}", daemon.addr),
        ];
        let report = copy(&args)?;
        let gib = report["bytes"].as_f64().unwrap_or(f64::NAN) / f64::from(1 << 30);
        let stage = |wanted: &str| {
            let of = |s: &&serde_json::Value| s["stage"].as_str() == Some(wanted);
            report["stages"].as_array().and_then(|all| all.iter().find(of)?["service_seconds"].as_f64()).unwrap_or(0.0)
                / gib
        };
        let near = report["cpu_seconds"].as_f64().unwrap_or(f64::NAN) / gib;
        let (load, digest, seal) = (stage("storage"), stage("integrity"), stage("security"));
        let far = (daemon.cpu_seconds() - before) / gib;
        totals.push([near, far, load, digest, seal, (near - digest - seal).max(0.0)]);
    }
    let parts = [
        "source, all",
        "sink, all",
        "storage, in service",
        "verification, source",
        "encryption, source",
        "source, the rest",
    ];
    let series = parts.iter().enumerate().map(|(part, name)| Series {
        points: totals.iter().enumerate().map(|(case, values)| (case as f64 + 1.0, values[part])).collect(),
        ..Series::new(*name)
    });
    let (plain, verified, sealed) = (&totals[0], &totals[1], &totals[2]);
    let because = format!(
        "processor seconds per GiB at the source: {:.2} plain, {:.2} verified (verification {:.2}), {:.2} encrypted too (encryption {:.2})",
        plain[0], verified[0], verified[3], sealed[0], sealed[4]
    );
    let agrees = Some(verified[3] < verified[0] / 2.0 && plain[3] == 0.0 && sealed[4] > 0.0 && verified[4] == 0.0);
    let x = Axis { label: "1: plain, 2: verified, 3: verified and encrypted", sizes: false };
    Ok(Findings {
        charts: vec![chart("Processor time of one file's copy", x, "s per GiB", series.collect())],
        agrees,
        because,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_names_of_their_own_and_say_all() {
        for (n, family) in FAMILIES.iter().enumerate() {
            assert!(FAMILIES[..n].iter().all(|f| f.id != family.id));
            assert!(!family.reported.is_empty() && !family.expected.is_empty());
        }
    }
}
