//! Rules and limits of accelerated connections: their definitions, for options and for the file of `--policy`.

use super::SPIN_MAX;
use crate::tables::{Mistakes, lines};
use std::path::{Path, PathBuf};
use thruway_engine::units::parse_size;
use thruway_options::{OptionError, OptionKind, Required, Schema, Set, Value};
use thruway_sockets::settings::{Mode, Rule, Settings};
use thruway_sockets::{RING_MAX, RING_MIN};
use toml::de::{DeTable, DeValue};

/// The keys of the file, some of which are options of `thruway run`.
pub(super) const OPTIONS: Schema<Settings> = Schema {
    what: "policy",
    required: &[],
    hints: &[],
    options: &[
        OptionKind {
            name: "after-calls",
            key: "after-calls",
            set: Set::Text {
                value: "CALLS",
                set: |settings, value| {
                    let calls =
                        value.parse().map_err(|_| OptionError::invalid("after-calls", value, "a number of calls"))?;
                    // This number holds for every service.
                    (settings.after_calls, settings.after_calls_of_short) = (calls, calls);
                    Ok(())
                },
            },
            get: |settings| settings.after_calls.to_string(),
            default: "",
            about: "Number of calls that send or receive after which a connection is accelerated. Default: 16, or 128 if other \
                    connections to the same port have ended sooner",
            is_reloaded: false,
        },
        OptionKind {
            name: "after-bytes",
            key: "after-bytes",
            set: Set::Text {
                value: "SIZE",
                set: |settings, value| {
                    settings.after_bytes = size("after-bytes", value)?;
                    Ok(())
                },
            },
            get: |settings| settings.after_bytes.to_string(),
            default: "256K",
            about: "Number of bytes after which it is accelerated, if that is sooner",
            is_reloaded: false,
        },
        OptionKind {
            name: "ring",
            key: "ring",
            set: Set::Text {
                value: "SIZE",
                set: |settings, value| {
                    settings.ring = ring_size(size("ring", value)?)
                        .map_err(|why| OptionError::Other(format!("ring = \"{value}\": {why}")))?;
                    Ok(())
                },
            },
            get: |settings| settings.ring.to_string(),
            default: "256K",
            about: "Bytes in transit in each direction of a connection through shared memory, a power of two from 4K to 4M. One end \
                    decides, mostly the server's",
            is_reloaded: false,
        },
        OptionKind {
            name: "memory",
            key: "memory",
            set: Set::Text {
                value: "SIZE",
                set: |settings, value| {
                    settings.memory = size("memory", value)?;
                    Ok(())
                },
            },
            get: |settings| settings.memory.to_string(),
            default: "256M",
            about: "Maximum memory of all rings in one process. When half of it is used, further rings have half the size, and so on",
            is_reloaded: false,
        },
        OptionKind {
            name: "spin",
            key: "spin",
            set: Set::Text {
                value: "MICROSECONDS",
                set: |settings, value| {
                    let spin = value.parse().ok().filter(|spin| *spin <= SPIN_MAX);
                    settings.spin = spin.ok_or_else(|| {
                        OptionError::invalid("spin", value, format!("{SPIN_MAX} microseconds at most"))
                    })?;
                    Ok(())
                },
            },
            get: |settings| settings.spin.to_string(),
            default: "20",
            about: "Microseconds for which a thread that receives polls before it sleeps, up to 1000; 0 to sleep at once",
            is_reloaded: false,
        },
        OptionKind {
            name: "board",
            key: "board",
            set: Set::Text {
                value: "DIR",
                set: |settings, value| {
                    let board = PathBuf::from(value);
                    if !board.is_absolute() || !board.is_dir() {
                        return Err(OptionError::Other(format!(
                            "board = \"{value}\": no directory, by its whole path"
                        )));
                    }
                    settings.board = board;
                    Ok(())
                },
            },
            get: |settings| settings.board.display().to_string(),
            default: "/dev/shm",
            about: "Directory in memory where programs find each other",
            is_reloaded: false,
        },
        OptionKind {
            name: "group",
            key: "group",
            set: Set::Text {
                value: "GROUP",
                set: |settings, value| {
                    let number = group_number(value);
                    let failed = |why| OptionError::Other(format!("group = \"{value}\": {why}"));
                    settings.group = Some(number.map_err(failed)?);
                    Ok(())
                },
            },
            get: |settings| settings.group.map_or(String::new(), |group| group.to_string()),
            default: "",
            about: "Accelerate connections between programs of all members of this group that run with the same group. Default: \
                    between programs of one user",
            is_reloaded: false,
        },
    ],
};

/// Ports, and what may become of their connections.
struct PortRule {
    ports: Vec<(u16, u16)>,
    mode: Mode,
}

/// The keys of `[[rule]]`.
const RULE: Schema<PortRule> = Schema {
    what: "rule",
    required: &[
        Required { key: "ports", about: "A port, or ports and ranges of them, as in `22, 8000-8100`, at either end" },
        Required { key: "mode", about: "`tcp`, `auto`, or `relay`: through the relay, also within this host" },
    ],
    hints: &[],
    options: &[],
};

/// Tables of which there may be several.
const RULES: &str = "rule";

impl PortRule {
    fn new(ports: &str, mode: &str) -> Result<PortRule, String> {
        let mode = match mode {
            "auto" => Mode::Auto,
            "tcp" => Mode::Tcp,
            "relay" => Mode::Relay,
            other => return Err(format!("mode = \"{other}\": expected auto, tcp or relay")),
        };
        let list = ports.split(',').map(port_range).collect::<Result<_, _>>();
        Ok(PortRule { ports: list.map_err(|why| format!("ports = \"{ports}\": {why}"))?, mode })
    }

    fn settings(&self) -> impl Iterator<Item = Rule> {
        self.ports.iter().map(|&(first, last)| Rule { first, last, mode: self.mode })
    }
}

/// Reads the file of `--policy`.
///
/// # Errors
/// All mistakes in it, a line each.
pub(super) fn read(path: &Path) -> Result<Settings, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    parse(path, &text)
}

fn parse(path: &Path, text: &str) -> Result<Settings, String> {
    let (top, errors) = DeTable::parse_recoverable(text);
    let mut mistakes = Mistakes::default();
    for error in errors {
        mistakes.add(error.span().unwrap_or_default(), error.message());
    }
    let placed = (0..0, top.get_ref());
    let settings = mistakes.item(
        &OPTIONS,
        &[RULES],
        placed,
        |_| Ok(Settings::default()),
        |mistakes, settings, key, value| {
            if key != RULES {
                return false;
            }
            let DeValue::Array(entries) = value.get_ref() else {
                mistakes.add(value.span(), format!("write [[{RULES}]], with two brackets"));
                return true;
            };
            let mut rules = Vec::new();
            for entry in entries.iter() {
                let new = |values: &[String]| PortRule::new(&values[0], &values[1]);
                let placed = mistakes.content(RULES, entry);
                let rule = placed.and_then(|placed| mistakes.item(&RULE, &[], placed, new, |_, _, _, _| false));
                rules.extend(rule.iter().flat_map(PortRule::settings));
            }
            if let Some(settings) = settings {
                settings.rules = rules;
            }
            true
        },
    );
    match settings {
        Some(settings) if mistakes.len() == 0 => Ok(settings),
        _ => Err(lines(path, text, &mistakes.into_sorted())),
    }
}

/// Sets an option of the command line.
///
/// # Errors
/// [`OptionError`].
pub(super) fn set(settings: &mut Settings, key: &str, value: &str) -> Result<(), OptionError> {
    let option = OPTIONS.with_key(key).expect("an option of the schema");
    option.set_value(settings, &Value::Text(value.into()))
}

/// The value of an option of the command line, if it is valid.
pub(super) fn checked(key: &str, value: &str) -> Result<String, OptionError> {
    set(&mut Settings::default(), key, value).map(|()| value.into())
}

/// Help of an option of the command line.
pub(super) fn about(key: &str) -> &'static str {
    OPTIONS.with_key(key).map_or("", |option| option.about)
}

fn size(name: &'static str, text: &str) -> Result<u64, OptionError> {
    parse_size(text).map_err(|why| OptionError::Other(format!("{name} = \"{text}\": {why}")))
}

/// A port, or a range of ports.
pub(super) fn port_range(text: &str) -> Result<(u16, u16), String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.trim(), last.trim());
    match (first.parse(), last.parse()) {
        (Ok(_), Ok(0)) => Err("no connection has port 0".to_owned()),
        (Ok(first), Ok(last)) if first <= last => Ok((first, last)),
        _ => Err("a port or a range of ports, as 8000-8100".to_owned()),
    }
}

/// The number of a group, which this process has to be in: programs could not open its board.
fn group_number(name: &str) -> Result<u32, String> {
    let number = match nix::unistd::Group::from_name(name) {
        Ok(Some(group)) => group.gid.as_raw(),
        _ => name.parse().map_err(|_| format!("there is no group '{name}'"))?,
    };
    let groups = rustix::process::getgroups().unwrap_or_default();
    let is_in = groups.into_iter().chain([rustix::process::getegid()]).any(|group| group.as_raw() == number);
    if is_in || rustix::process::geteuid().is_root() {
        return Ok(number);
    }
    Err(format!(
        "this process is not in the group '{name}': add its user (usermod -aG), and log in again; or use newgrp, or SupplementaryGroups= of systemd"
    ))
}

/// The size of a ring, if it is a valid one.
pub(crate) fn ring_size(bytes: u64) -> Result<usize, String> {
    let size = usize::try_from(bytes).unwrap_or(usize::MAX);
    if size.is_power_of_two() && (RING_MIN..=RING_MAX).contains(&size) {
        Ok(size)
    } else {
        Err(format!("{bytes} is no power of two from {RING_MIN} to {RING_MAX}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_understood_or_refused_with_its_mistake() {
        let parse = |text: &str| parse(Path::new("policy.toml"), text);
        let settings = parse(
            "after-calls = 4\nring = \"1M\"\nmemory = 1048576\n[[rule]]\nports = \"22\"\nmode = \"tcp\"\n[[rule]]\nports = \"1-9\"\nmode = \"auto\"",
        )
        .unwrap();
        assert_eq!((settings.after_calls, settings.after_calls_of_short), (4, 4));
        assert_eq!((settings.ring, settings.memory), (1 << 20, 1 << 20));
        assert_eq!(settings.mode([22, 40000]), Mode::Tcp);
        for text in ["22", "\"22\"", "\"8000-8100, 22\""] {
            let settings = parse(&format!("[[rule]]\nports = {text}\nmode = \"tcp\"")).unwrap();
            assert_eq!(settings.mode([22, 40000]), Mode::Tcp, "{text}");
            assert_eq!(settings.mode([8050, 40000]) == Mode::Tcp, text.contains("8000"), "{text}");
        }
        let own = rustix::process::getegid().as_raw();
        assert_eq!(parse(&format!("group = {own}")).unwrap().group, Some(own));
        assert_eq!(parse(&format!("group = \"{own}\"")).unwrap().group, Some(own));
        for (text, why) in [
            ("ring = 5000", "policy.toml:1: ring = \"5000\": 5000 is no power of two"),
            ("\nring = \"x\"", "policy.toml:2: ring"),
            ("[[rule]]\nports = \"9-1\"\nmode = \"tcp\"", "9-1"),
            ("[[rule]]\nports = 70000\nmode = \"tcp\"", "ports"),
            ("[[rule]]\nports = \"1,\"\nmode = \"tcp\"", "1,"),
            ("[[rule]]\nports = \"0\"\nmode = \"tcp\"", "port 0"),
            ("[[rule]]\nports = \"1\"\nmode = \"rdma\"", "rdma"),
            ("[[rule]]\nports = \"1\"", "the rule's mode is missing"),
            ("[rule]\nports = \"1\"\nmode = \"tcp\"", "[[rule]]"),
            ("aftercalls = 1", "'aftercalls' of a policy (expected after-calls"),
            ("after-calls = -1", "a number of calls"),
            ("spin = 2000", "1000 microseconds at most"),
            ("board = \"here\"", "by its whole path"),
            ("group = \"no such group\"", "no such group"),
            ("group = -1", "no group '-1'"),
            ("ring = true", "ring is a text or a number"),
            ("[[rule]]\nports = [22, 23]\nmode = \"tcp\"", "ports is a text or a number"),
            ("ring = \"x\"\nspin = true", "policy.toml:2: spin"),
            ("ring", "policy.toml:1:"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    /// The values of the definitions are those of a program that is run without options.
    #[test]
    fn defaults_are_those_of_the_library() {
        let settings = Settings::default();
        for option in OPTIONS.options.iter().filter(|option| !option.default.is_empty()) {
            let mut same = settings.clone();
            set(&mut same, option.key, option.default).unwrap();
            assert_eq!(same, settings, "{}", option.key);
        }
    }

    #[test]
    fn the_book_has_each_key_with_its_meaning() {
        let page = include_str!("../../../../docs/src/sockets.md");
        for row in OPTIONS.rows().into_iter().chain(RULE.rows()) {
            let line = format!("| `{}` | {} | {} |", row.key, row.default, row.about);
            assert!(page.contains(&line), "docs/src/sockets.md has no line {line}");
        }
    }
}
