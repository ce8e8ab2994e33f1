//! What `thruway run` tells the library in the programs that it starts, by one environment variable.

use crate::{RING_MAX, RING_MIN, Segment};
use std::path::PathBuf;

/// The environment variable.
pub const VARIABLE: &str = "THRUWAY_SOCKETS";

/// What may become of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Shared memory if the peer is a process of this host that has the library, too; else TCP.
    Auto,
    /// TCP.
    Tcp,
    /// Through the relay, also if the peer is on this host: to try that out.
    Relay,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Mode::Auto => "auto",
            Mode::Tcp => "tcp",
            Mode::Relay => "by-relay",
        }
    }
}

/// What may become of connections of which either end has one of these ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The lowest port.
    pub first: u16,
    /// The highest port.
    pub last: u16,
    /// What they may be.
    pub mode: Mode,
}

/// How the library behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The first rule that fits counts; a connection that none fits is [`Mode::Auto`].
    pub rules: Vec<Rule>,
    /// Calls that send or receive after which a connection is worth accelerating.
    pub after_calls: u32,
    /// Where connections of the same service have ended before so many calls, so many.
    pub after_calls_of_short: u32,
    /// Bytes after which it is, if that is sooner.
    pub after_bytes: u64,
    /// Bytes of a ring, of which a connection has two: a power of two from [`RING_MIN`] to [`RING_MAX`].
    pub ring: usize,
    /// Bytes of rings that a process has at most; further connections stay with TCP.
    pub memory: u64,
    /// Microseconds for which a thread that waits looks again and again before it sleeps. 0: never.
    pub spin: u32,
    /// The directory of boards, in memory.
    pub board: PathBuf,
    /// The group whose members' programs are accelerated with each other, by its number. `None`: programs of one user are.
    pub group: Option<u32>,
    /// The port of the relay, through which connections to other hosts go on; 0: they stay with TCP.
    pub relay: u16,
    /// A file of counters, mapped by each process.
    pub stats: Option<PathBuf>,
    /// A file to which what has become of each connection is appended.
    pub explain: Option<PathBuf>,
    /// The number of the process that waits for the program, without which the program is to end; 0: there is none.
    pub supervisor: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            rules: Vec::new(),
            after_calls: 16,
            after_calls_of_short: 128,
            after_bytes: 256 << 10,
            ring: 256 << 10,
            memory: 256 << 20,
            spin: 20,
            board: "/dev/shm".into(),
            group: None,
            relay: 0,
            stats: None,
            explain: None,
            supervisor: 0,
        }
    }
}

impl Settings {
    /// What may become of a connection between these ports.
    pub fn mode(&self, ports: [u16; 2]) -> Mode {
        let fits = |rule: &&Rule| ports.iter().any(|port| (rule.first..=rule.last).contains(port));
        self.rules.iter().find(fits).map_or(Mode::Auto, |rule| rule.mode)
    }

    /// The size of the rings of one more connection, where connections have so many bytes already: each time that half of what was left is
    /// used, rings become half as large. So a process has some connections with large rings, and many more with small ones. `None` if there
    /// is no memory for the smallest.
    pub fn ring_with(&self, used: u64) -> Option<usize> {
        let left = self.memory.checked_sub(used)?;
        let mut size = (self.ring >> self.memory.checked_div(left)?.ilog2().min(usize::BITS - 1)).max(RING_MIN);
        while size >= RING_MIN && Segment::len_with(size) as u64 > left {
            size /= 2;
        }
        (size >= RING_MIN).then_some(size)
    }

    /// As the value of [`VARIABLE`]: `name=value`, with commas between; `%` and a comma in a path as `%25` and `%2c`.
    pub fn encode(&self) -> String {
        let path = |path: &PathBuf| path.to_string_lossy().replace('%', "%25").replace(',', "%2c");
        let mut out = format!(
            "after-calls={},after-calls-of-short={},after-bytes={},ring={},memory={},spin={},board={}",
            self.after_calls,
            self.after_calls_of_short,
            self.after_bytes,
            self.ring,
            self.memory,
            self.spin,
            path(&self.board)
        );
        for rule in &self.rules {
            let mode = rule.mode.name();
            out += &format!(",{mode}={}-{}", rule.first, rule.last);
        }
        if let Some(group) = self.group {
            out += &format!(",group={group}");
        }
        if self.relay != 0 {
            out += &format!(",relay={}", self.relay);
        }
        if self.supervisor != 0 {
            out += &format!(",supervisor={}", self.supervisor);
        }
        for (name, file) in [("stats", &self.stats), ("explain", &self.explain)] {
            if let Some(file) = file {
                out += &format!(",{name}={}", path(file));
            }
        }
        out
    }

    /// The other way round. Names that are left out have their defaults.
    ///
    /// # Errors
    /// The part that cannot be understood.
    pub fn parse(text: &str) -> Result<Settings, String> {
        let mut settings = Settings::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            settings.set(part).ok_or_else(|| part.to_owned())?;
        }
        Ok(settings)
    }

    fn set(&mut self, part: &str) -> Option<()> {
        let (name, value) = part.split_once('=')?;
        let path = || PathBuf::from(value.replace("%2c", ",").replace("%25", "%"));
        match name {
            "after-calls" => self.after_calls = value.parse().ok()?,
            "after-calls-of-short" => self.after_calls_of_short = value.parse().ok()?,
            "after-bytes" => self.after_bytes = value.parse().ok()?,
            "ring" => {
                self.ring = value.parse().ok()?;
                if !self.ring.is_power_of_two() || !(RING_MIN..=RING_MAX).contains(&self.ring) {
                    return None;
                }
            }
            "memory" => self.memory = value.parse().ok()?,
            "spin" => self.spin = value.parse().ok()?,
            "board" => self.board = path(),
            "group" => self.group = Some(value.parse().ok()?),
            "stats" => self.stats = Some(path()),
            "explain" => self.explain = Some(path()),
            "relay" => self.relay = value.parse().ok()?,
            "supervisor" => self.supervisor = value.parse().ok()?,
            "auto" | "tcp" | "by-relay" => {
                let (first, last) = value.split_once('-').unwrap_or((value, value));
                let (first, last) = (first.parse().ok()?, last.parse().ok()?);
                let mode = [Mode::Auto, Mode::Tcp, Mode::Relay].into_iter().find(|mode| mode.name() == name)?;
                self.rules.push(Rule { first, last, mode });
            }
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_connections_have_small_rings_rather_than_none() {
        let connections = |memory: u64, ring: usize| {
            let settings = Settings { memory, ring, ..Settings::default() };
            let (mut used, mut all, mut large) = (0, 0, 0);
            while let Some(size) = settings.ring_with(used) {
                assert!(size.is_power_of_two() && (RING_MIN..=ring).contains(&size), "{size}");
                used += Segment::len_with(size) as u64;
                assert!(used <= memory);
                all += 1;
                large += u32::from(size == ring);
            }
            (all, large)
        };
        let (all, large) = connections(256 << 20, 256 << 10);
        assert!(all > 1500 && large > 250, "{all}, {large}");
        let smallest = Segment::len_with(RING_MIN) as u64;
        assert_eq!(connections(100 * smallest, RING_MIN), (100, 100));
        // Memory for one alone, and for less than one.
        assert_eq!(connections(Segment::len_with(256 << 10) as u64, 256 << 10), (1, 1));
        assert_eq!(connections(100, 256 << 10), (0, 0));
        assert_eq!(connections(0, 4 << 20), (0, 0));
        assert!(Settings { memory: u64::MAX, ..Settings::default() }.ring_with(u64::MAX - 5).is_none());
    }

    #[test]
    fn what_is_told_is_understood() {
        let rule = |first, last, mode| Rule { first, last, mode };
        let settings = Settings {
            rules: vec![
                rule(22, 22, Mode::Tcp),
                rule(8000, 8100, Mode::Auto),
                rule(9, 9, Mode::Relay),
                rule(0, 65535, Mode::Tcp),
            ],
            relay: 7118,
            group: Some(0),
            supervisor: 5,
            after_calls: 1,
            after_calls_of_short: 2,
            ring: 4096,
            board: "/tmp/a,b%2c".into(),
            stats: Some("/tmp/s".into()),
            ..Settings::default()
        };
        assert_eq!(Settings::parse(&settings.encode()).unwrap(), settings);
        assert_eq!(Settings::parse("").unwrap(), Settings::default());
        assert_eq!(settings.mode([40000, 22]), Mode::Tcp);
        assert_eq!(settings.mode([8050, 40000]), Mode::Auto);
        assert_eq!(settings.mode([80, 40000]), Mode::Tcp);
        for wrong in ["ring=5000", "ring=0", "x=1", "spin=a", "group=-1", "tcp=1-b", "memory"] {
            assert_eq!(Settings::parse(&format!("spin=3,{wrong}")).unwrap_err(), wrong);
        }
    }
}
