//! `thruway bench suite`: the figure families of the published works, measured again on this
//! machine, as one HTML page with plots and one JSON file.

mod charts;
mod delay;
mod families;
mod lab;
mod nfs;
mod page;
mod rounds;
mod sockets;
mod streams;

use charts::{Axis, Chart, Series};
use clap::Args;
use families::FAMILIES;
use lab::Lab;
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use thruway_cli::Common;

/// Arguments of `thruway bench suite`.
#[derive(Args)]
pub(super) struct SuiteArgs {
    /// Directory for report.html and report.json
    #[arg(long, value_name = "DIR", default_value = "thruway-bench")]
    output: PathBuf,
    /// Seconds for each point
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// Rounds of each family; more, up to three times as many, while they disagree on the verdict
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Only these families (see --list); may be repeated
    #[arg(long, value_name = "FAMILY", value_delimiter = ',')]
    only: Vec<String>,
    /// Name the families and end
    #[arg(long)]
    list: bool,
}

/// A family of figures.
struct Family {
    /// Its name on the command line.
    id: &'static str,
    title: &'static str,
    /// Where it was published.
    source: &'static str,
    /// What was reported there.
    reported: &'static str,
    /// What must agree on any hardware.
    expected: &'static str,
    measure: fn(&Lab) -> Result<Findings, String>,
}

/// What a measurement found.
#[derive(Serialize, Default)]
struct Findings {
    charts: Vec<Chart>,
    /// Whether what must agree does; `None` if this machine cannot tell.
    agrees: Option<bool>,
    /// In figures, why.
    because: String,
}

/// All rounds of a measurement together.
#[derive(Serialize, Default)]
struct Whole {
    #[serde(flatten)]
    findings: Findings,
    verdict: Verdict,
    /// How often it was measured.
    rounds: usize,
}

/// What the rounds of a family say together.
#[derive(Serialize, Default, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// What must agree does, in every round.
    Agrees,
    /// It does not, in any round.
    Differs,
    /// Some rounds agree and some do not: the machine is too noisy, or the difference too small.
    Inconclusive,
    /// There is nothing that must agree.
    #[default]
    Measured,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Agrees => "agrees",
            Verdict::Differs => "differs",
            Verdict::Inconclusive => "inconclusive",
            Verdict::Measured => "measured",
        }
    }

    fn agrees(self) -> Option<bool> {
        match self {
            Verdict::Agrees => Some(true),
            Verdict::Differs => Some(false),
            Verdict::Inconclusive | Verdict::Measured => None,
        }
    }
}

/// Everything, as it is written.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    machine: Machine,
    seconds_per_point: f64,
    families: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    id: &'static str,
    title: &'static str,
    source: &'static str,
    reported: &'static str,
    expected: &'static str,
    /// Why there is nothing.
    error: Option<String>,
    #[serde(flatten)]
    whole: Whole,
}

#[derive(Serialize)]
struct Machine {
    kernel: String,
    processor: String,
    processors: usize,
    memory_gib: u64,
}

impl Machine {
    fn this() -> Machine {
        let uname = rustix::system::uname();
        let field = |path: &str, key: &str| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let line = text.lines().find(|l| l.starts_with(key)).unwrap_or_default().to_owned();
            line.split_once(':').map(|(_, v)| v.trim().to_owned()).unwrap_or_default()
        };
        let memory = field("/proc/meminfo", "MemTotal");
        let memory: u64 = memory.trim_end_matches(" kB").parse().unwrap_or(0);
        Machine {
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            processor: field("/proc/cpuinfo", "model name"),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory >> 20,
        }
    }
}

pub(super) fn run(args: &SuiteArgs, common: &Common) -> Result<(), String> {
    if args.list {
        for family in &FAMILIES {
            thruway_cli::say!("{:<16} {} ({})", family.id, family.title, family.source);
        }
        return Ok(());
    }
    if let Some(unknown) = args.only.iter().find(|id| FAMILIES.iter().all(|f| f.id != **id)) {
        return Err(format!("--only {unknown}: no such family; --list names them"));
    }
    if !(args.seconds > 0.0 && args.seconds <= 60.0) {
        return Err(format!("invalid --seconds {} (expected more than 0, at most 60)", args.seconds));
    }
    std::fs::create_dir_all(&args.output).map_err(|e| format!("{}: {e}", args.output.display()))?;
    let lab = Lab::new(args.seconds)?;
    let wanted = |f: &&Family| args.only.is_empty() || args.only.iter().any(|id| id == f.id);
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::this(),
        seconds_per_point: args.seconds,
        families: Vec::new(),
    };
    for family in FAMILIES.iter().filter(wanted) {
        if !common.quiet && !common.json {
            let _ = write!(std::io::stderr(), "{:<16} {} … ", family.id, family.title);
        }
        let (whole, error) = match measure(family, &lab, args.rounds as usize) {
            Ok(whole) => (whole, None),
            Err(error) => (Whole::default(), Some(error)),
        };
        if !common.quiet && !common.json {
            thruway_cli::say_error!("{}", error.as_deref().unwrap_or(whole.verdict.name()));
        }
        let Family { id, title, source, reported, expected, .. } = *family;
        report.families.push(Entry { id, title, source, reported, expected, error, whole });
    }
    let write = |name: &str, text: &str| {
        let path = args.output.join(name);
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display())).map(|()| path)
    };
    let json = serde_json::to_string_pretty(&report).expect("plain structures");
    write("report.json", &json)?;
    let path = write("report.html", &page::render(&report)?)?;
    if common.json {
        thruway_cli::say!("{json}");
    } else if !common.quiet {
        thruway_cli::say!("{}", path.display());
    }
    let failed = report.families.iter().filter(|f| f.error.is_some()).count();
    if failed > 0 { Err(format!("{failed} families could not be measured; the report says why")) } else { Ok(()) }
}

/// Measures a family until its verdict and spread are known.
fn measure(family: &Family, lab: &Lab, rounds: usize) -> Result<Whole, String> {
    let mut found = Vec::new();
    while !rounds::is_enough(&found, rounds) {
        found.push((family.measure)(lab)?);
    }
    Ok(rounds::combine(found))
}
