//! The daemon's configuration file.
//!
//! A TOML file with a table for each service. Its keys are the options of the command line, by the same names; each
//! value goes through the parser of its option, and the reference is made of the options' own help. So there is one
//! definition of every setting. Exports have tables of their own, for their paths may hold what separates words on
//! the command line. The file is checked whole: every mistake is told, with its line.

use super::ServeArgs;
use super::nfs::{SHARE, Spec as Share};
use super::{EXPORT, block, nfs};
use crate::tables::{Diagnostic, Mistakes, Placed, has_texts_only, line_of, lines, scalar};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Args};
use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::ops::Range;
use std::path::Path;
use thruway_block::export::{OPTIONS as DISK, Spec};
use thruway_block::layer;
use thruway_nfs::rules::{OPTIONS as RULE, Rule, RuleError};
use thruway_options::Row;
use thruway_transfer::daemon::Export;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// What a file says.
#[derive(Default)]
pub(super) struct File {
    /// Options, as on the command line.
    pub options: Vec<OsString>,
    /// Directories.
    pub exports: Vec<Export>,
    /// Disks.
    pub disks: Vec<Spec>,
    /// Shares.
    pub shares: Vec<Share>,
    /// Line number of each option (`--key`), export, disk and share (`export 'data'`).
    lines: HashMap<String, usize>,
    /// Names of options for messages, with the table (`transfer.max-sessions`), by option (`--max-sessions`).
    names: HashMap<String, String>,
}

impl File {
    /// Line number of an option, an export, a disk or a share.
    pub(super) fn line(&self, what: &str) -> Option<usize> {
        self.lines.get(what).copied()
    }

    /// Changes since an earlier state of the file that take effect at the next start, each with its line number. Shares
    /// are left out: the file service applies and reports their changes.
    pub(super) fn changes_since(&self, earlier: &File) -> Vec<(String, Option<usize>)> {
        let values = |file: &File, name: &str| -> Vec<OsString> {
            let of = |option: &&OsString| option_name(option) == name;
            file.options.iter().filter(of).cloned().collect()
        };
        let mut names: Vec<String> = self.options.iter().chain(&earlier.options).map(option_name).collect();
        names.sort();
        names.dedup();
        names.retain(|name| values(self, name) != values(earlier, name));
        let shown = |name: &String| self.names.get(name).or(earlier.names.get(name)).unwrap_or(name).clone();
        let mut changes: Vec<_> = names.iter().map(|name| (shown(name), self.line(name))).collect();
        let exports = |file: &File| file.exports.iter().map(|e| (format!("export '{}'", e.name), e.clone())).collect();
        let mut entries = differences::<Export>(exports(self), exports(earlier));
        let disks = |file: &File| file.disks.iter().map(|d| (format!("disk '{}'", d.name), d.clone())).collect();
        entries.extend(differences::<Spec>(disks(self), disks(earlier)));
        changes.extend(entries.into_iter().map(|what| (what.clone(), self.line(&what))));
        changes
    }
}

/// The part `--name` of an option `--name=value`.
fn option_name(option: &OsString) -> String {
    let text = option.to_string_lossy();
    text.split_once('=').map_or(&*text, |(name, _)| name).into()
}

/// Names of entries that were changed, added or removed.
fn differences<T: PartialEq>(now: Vec<(String, T)>, earlier: Vec<(String, T)>) -> Vec<String> {
    let value = |of: &[(String, T)], name: &String| of.iter().position(|(n, _)| n == name);
    let changed = now.iter().filter(|(name, entry)| value(&earlier, name).is_none_or(|at| earlier[at].1 != *entry));
    let gone = earlier.iter().filter(|(name, _)| value(&now, name).is_none());
    changed.chain(gone).map(|(name, _)| name.clone()).collect()
}

/// The key of a disk that is no option of it.
const LAYERS: &str = "layers";

/// The keys of `[[block.export]]`: those of a disk, and its layers.
fn disk_rows() -> Vec<Row> {
    let mut rows = DISK.rows();
    rows.push(Row {
        key: LAYERS,
        value: "list of texts".into(),
        default: "`[]`".into(),
        about: "Layers, from the lowest to the highest: see [layers](#layers)",
    });
    rows
}

/// A table of the file.
struct Table {
    /// Empty: the top.
    name: &'static str,
    about: &'static str,
    /// Tables in it of which there may be several.
    entries: &'static [Entries],
}

/// Tables of which there may be several.
struct Entries {
    /// Behind the name of the table that they are in.
    name: &'static str,
    /// What one is called in messages.
    what: &'static str,
    about: &'static str,
    rows: fn() -> Vec<Row>,
}

const TABLES: &[Table] = &[
    Table { name: "", about: "Before the first table, for all services.", entries: &[] },
    Table {
        name: "transfer",
        about: "Directories for `thruway cp`. Served if there is a `listen` or an export, or neither a disk nor a share.",
        entries: &[Entries { name: "export", what: EXPORT.what, about: "", rows: || EXPORT.rows() }],
    },
    Table {
        name: "block",
        about: "Disks. Served if there is an export.",
        entries: &[Entries { name: "export", what: DISK.what, about: "", rows: disk_rows }],
    },
    Table {
        name: "nfs",
        about: "Directories shared by NFS. Served if there is a share.",
        entries: &[
            Entries {
                name: "share",
                what: "share",
                about: "A share, instead of a line of `share`.",
                rows: || SHARE.rows(),
            },
            Entries {
                name: "share.allow",
                what: "rule",
                about: "A rule of the share before it. The first whose clients fit counts; without any rule, the share is for everybody.",
                rows: || RULE.rows(),
            },
        ],
    },
];

/// The table that an option is set in.
fn table_of(arg: &Arg) -> Option<&'static str> {
    match arg.get_id().as_str() {
        "config" | "check" | "once" | "block" | "export" => None,
        "provider" | "anonymous" | "no_landlock" | "user" | "state" | "max_connections" | "control" => Some(""),
        _ if arg.is_hide_set() || arg.get_long().is_none() => None,
        _ if arg.get_help_heading() == Some(block::HEADING) => Some("block"),
        _ if arg.get_help_heading() == Some(nfs::HEADING) => Some("nfs"),
        _ => Some("transfer"),
    }
}

fn command() -> clap::Command {
    ServeArgs::augment_args(clap::Command::new("serve")).no_binary_name(true)
}

/// Key of the line number of the second entry with a name.
pub(super) fn again(what: &str) -> String {
    format!("{what} again")
}

/// Parses the text of a configuration file.
///
/// # Errors
/// All mistakes in the file, one per line.
pub(super) fn read(path: &Path, text: &str) -> Result<File, String> {
    parse(text).map_err(|mistakes| lines(path, text, &mistakes))
}

fn parse(text: &str) -> Result<File, Vec<Diagnostic>> {
    let (top, errors) = DeTable::parse_recoverable(text);
    let command = command();
    let mut reader = Reader { command: &command, file: File::default(), mistakes: Mistakes::default() };
    for error in errors {
        reader.mistake(error.span().unwrap_or_default(), error.message());
    }
    reader.table(&TABLES[0], top.get_ref());
    let Reader { mut file, mistakes, .. } = reader;
    // The reader has stored byte offsets.
    file.lines.values_mut().for_each(|at| *at = line_of(text, *at));
    match mistakes.len() {
        0 => Ok(file),
        _ => Err(mistakes.into_sorted()),
    }
}

/// What a key of a table is called in messages.
fn full(table: &str, key: &str) -> String {
    if table.is_empty() { key.into() } else { format!("{table}.{key}") }
}

struct Reader<'a> {
    command: &'a clap::Command,
    file: File,
    mistakes: Mistakes,
}

impl Reader<'_> {
    fn mistake(&mut self, span: Range<usize>, what: impl Into<String>) {
        self.mistakes.add(span, what);
    }

    /// Records the byte offset of an entry. [`parse`] replaces it by the line number. A second entry of the same name is recorded
    /// apart ([`again`]).
    fn place(&mut self, what: String, span: Range<usize>) {
        let what = if self.file.lines.contains_key(&what) { again(&what) } else { what };
        self.file.lines.entry(what).or_insert(span.start);
    }

    fn table(&mut self, table: &Table, content: &DeTable<'_>) {
        for (key, value) in content {
            let name = key.get_ref().as_ref();
            if table.name.is_empty()
                && let Some(inner) = TABLES.iter().find(|t| !t.name.is_empty() && t.name == name)
            {
                match value.get_ref() {
                    DeValue::Table(content) => self.table(inner, content),
                    _ => self.mistake(value.span(), format!("'{name}' is a table: write [{name}]")),
                }
                continue;
            }
            if let Some(entries) = table.entries.iter().find(|entries| entries.name == name) {
                match value.get_ref() {
                    // As on the command line.
                    DeValue::Array(values) if has_texts_only(values) && self.is_option(table, name) => {}
                    DeValue::Array(values) => {
                        values.iter().for_each(|value| self.entry(table, entries, value));
                        continue;
                    }
                    DeValue::String(_) if self.is_option(table, name) => {}
                    _ => {
                        self.mistake(value.span(), format!("write [[{}.{name}]], with two brackets", table.name));
                        continue;
                    }
                }
            }
            // They are the daemon's, and were a service's once.
            let moved = |arg: &Arg| match arg.get_id().as_str() {
                "user" => table.name == "transfer",
                "state" | "max_connections" => ["block", "nfs"].contains(&table.name),
                _ => false,
            };
            match self.command.get_arguments().find(|arg| arg.get_long() == Some(name)) {
                Some(arg) if table_of(arg) == Some(table.name) || moved(arg) => self.option(table, arg, value),
                Some(arg) if table_of(arg).is_some() => {
                    let here = shown(table);
                    self.mistake(
                        key.span(),
                        match table_of(arg).unwrap_or_default() {
                            "" => format!("'{name}' belongs before the first table, not in {here}"),
                            other => format!("'{name}' belongs to [{other}], not to {here}"),
                        },
                    );
                }
                _ => {
                    let known = keys_of(self.command, table);
                    self.mistake(key.span(), format!("{} (expected {known})", unknown(table, name)));
                }
            }
        }
    }

    fn option(&mut self, table: &Table, arg: &Arg, value: &Spanned<DeValue<'_>>) {
        let name = arg.get_long().expect("options of tables have names");
        let full = full(table.name, name);
        match (arg.get_action(), value.get_ref()) {
            (ArgAction::SetTrue, DeValue::Boolean(set)) => {
                self.file.names.insert(format!("--{name}"), full);
                if *set {
                    self.file.options.push(format!("--{name}").into());
                }
            }
            (ArgAction::SetTrue, _) => self.mistake(value.span(), format!("{full} is true or false")),
            (ArgAction::Append, DeValue::Array(values)) => {
                for value in values.iter() {
                    self.value(&full, name, value);
                }
            }
            (_, DeValue::Array(_)) => self.mistake(value.span(), format!("{full} has one value, not a list")),
            _ => self.value(&full, name, value),
        }
    }

    /// A value, which the option's own parser judges.
    fn value(&mut self, full: &str, name: &str, value: &Spanned<DeValue<'_>>) {
        self.place(format!("--{name}"), value.span());
        self.file.names.insert(format!("--{name}"), full.into());
        let Some(text) = scalar(value.get_ref()) else {
            return self.mistake(value.span(), format!("{full} is a text or a number"));
        };
        let option = format!("--{name}={text}");
        // Other errors are about what else would have to be given; that is seen when everything is there.
        if let Err(error) = self.command.clone().try_get_matches_from([&option])
            && let Some(why) = judgement(&error)
        {
            return self.mistake(value.span(), format!("{full}: '{text}': {why}"));
        }
        self.file.options.push(option.into());
    }

    /// Whether there is an option of this name, too.
    fn is_option(&self, table: &Table, name: &str) -> bool {
        self.command.get_arguments().any(|arg| arg.get_long() == Some(name) && table_of(arg) == Some(table.name))
    }

    fn entry(&mut self, table: &Table, entries: &Entries, entry: &Spanned<DeValue<'_>>) {
        let Some(placed) = self.mistakes.content(&full(table.name, entries.name), entry) else { return };
        let name = placed.1.get("name").and_then(|name| scalar(name.get_ref())).unwrap_or_default();
        match table.name {
            "transfer" => self.file.exports.extend(directory(&mut self.mistakes, placed)),
            "block" => self.file.disks.extend(disk(&mut self.mistakes, placed)),
            _ => {
                let rules = full(table.name, table.entries[1].name);
                self.file.shares.extend(share(&mut self.mistakes, &rules, placed));
            }
        }
        self.place(format!("{} '{name}'", entries.what), entry.span());
    }
}

fn directory(mistakes: &mut Mistakes, placed: Placed<'_>) -> Option<Export> {
    mistakes.item(&EXPORT, &[], placed, |values| super::new_export(&values[0], &values[1]), |_, _, _, _| false)
}

/// `rules` is the name of the tables for its rules.
fn share(mistakes: &mut Mistakes, rules: &str, placed: Placed<'_>) -> Option<Share> {
    let new = |values: &[String]| Share::new(&values[0], &values[1]);
    mistakes.item(&SHARE, &[], placed, new, |mistakes, mut share, key, value| {
        let Some(list) = value.get_ref().as_array().filter(|list| key == "allow" && !has_texts_only(list)) else {
            return false;
        };
        // Each is as on the command line, or a table.
        for entry in list.iter() {
            let read = match entry.get_ref() {
                DeValue::String(text) => {
                    let read = text.parse();
                    read.map_err(|e: RuleError| mistakes.add(entry.span(), e.to_string())).ok()
                }
                _ => mistakes.content(rules, entry).and_then(|placed| rule(mistakes, placed)),
            };
            if let (Some(share), Some(rule)) = (share.as_deref_mut(), read) {
                share.allow(rule);
            }
        }
        true
    })
}

fn rule(mistakes: &mut Mistakes, placed: Placed<'_>) -> Option<Rule> {
    let new = |values: &[String]| values[0].parse::<Rule>().map_err(|e| e.to_string());
    mistakes.item(&RULE, &[], placed, new, |_, _, _, _| false)
}

fn disk(mistakes: &mut Mistakes, placed: Placed<'_>) -> Option<Spec> {
    let new = |values: &[String]| Spec::new(&values[0], &values[1]).map_err(|e| e.to_string());
    mistakes.item(&DISK, &[LAYERS], placed, new, |mistakes, mut disk, key, value| {
        if key != LAYERS {
            return false;
        }
        let Some(layers) = value.get_ref().as_array() else {
            mistakes.add(value.span(), format!("{LAYERS} is a list"));
            return true;
        };
        for layer in layers.iter() {
            let word = layer.get_ref().as_str().unwrap_or_default();
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            match disk.as_deref_mut().map_or(Ok(true), |disk| disk.layer(key, value)) {
                Ok(true) => {}
                Ok(false) => {
                    let why = format!("unknown layer '{word}' (expected {})", layer::syntax());
                    mistakes.add(layer.span(), why);
                }
                Err(why) => mistakes.add(layer.span(), why.to_string()),
            }
        }
        true
    })
}

/// A table, for messages.
fn shown(table: &Table) -> String {
    if table.name.is_empty() { "the top".into() } else { format!("[{}]", table.name) }
}

fn unknown(table: &Table, name: &str) -> String {
    if table.name.is_empty() {
        return format!("unknown table or key '{name}' at the top");
    }
    format!("unknown key '{name}' in [{}]", table.name)
}

/// The keys of a table, for messages.
fn keys_of(command: &clap::Command, table: &Table) -> String {
    let options = command.get_arguments().filter(|arg| table_of(arg) == Some(table.name));
    let mut names: Vec<String> = options.filter_map(Arg::get_long).map(String::from).collect();
    names.sort();
    names.extend(table.entries.iter().map(|entries| format!("[[{}.{}]]", table.name, entries.name)));
    if table.name.is_empty() {
        names.extend(TABLES[1..].iter().map(|t| format!("[{}]", t.name)));
    }
    names.join(", ")
}

/// What an option's parser says against a value; `None` if the error is about something else.
fn judgement(error: &clap::Error) -> Option<String> {
    match error.kind() {
        ErrorKind::ValueValidation => Some(std::error::Error::source(error)?.to_string()),
        ErrorKind::InvalidValue => match error.get(ContextKind::ValidValue) {
            Some(ContextValue::Strings(valid)) if !valid.is_empty() => Some(format!("expected {}", valid.join(", "))),
            _ => Some("a value is missing".into()),
        },
        _ => None,
    }
}

/// The reference, for the book.
pub(super) fn reference() -> String {
    let command = command();
    let mut page = String::from(INTRODUCTION);
    for table in TABLES {
        let title = if table.name.is_empty() { "Top".into() } else { format!("`[{}]`", table.name) };
        let _ = write!(page, "\n## {title}\n\n{}\n\n{HEAD}", table.about);
        for arg in command.get_arguments().filter(|arg| table_of(arg) == Some(table.name)) {
            let name = arg.get_long().expect("options of tables have names");
            let names: Vec<&str> = arg.get_value_names().unwrap_or_default().iter().map(|n| n.as_str()).collect();
            let possible: Vec<String> =
                arg.get_possible_values().iter().map(|v| format!("`\"{}\"`", v.get_name())).collect();
            let value = match arg.get_action() {
                ArgAction::SetTrue => "`true` or `false`".into(),
                ArgAction::Append => format!("list of {}", names.join(" ")),
                _ if possible.is_empty() => names.join(" "),
                _ => possible.join(" or "),
            };
            let defaults: Vec<String> =
                arg.get_default_values().iter().map(|v| format!("`{}`", v.to_string_lossy())).collect();
            let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
            row(&mut page, name, &value, &defaults.join(" "), &help);
        }
        for entries in table.entries {
            let _ = write!(page, "\n### `[[{}.{}]]`\n\n", table.name, entries.name);
            if !entries.about.is_empty() {
                let _ = write!(page, "{}\n\n", entries.about);
            }
            page.push_str(HEAD);
            for key in (entries.rows)() {
                row(&mut page, key.key, &key.value, &key.default, key.about);
            }
        }
    }
    page.push_str("\n### Layers\n\nEach stands on what is before it (on the command line: to its left).\n\n| layer | |\n|---|---|\n");
    for kind in layer::KINDS {
        let _ = writeln!(page, "| `{}` | {} |", kind.syntax.replace('|', "\\|"), kind.about);
    }
    page
}

const HEAD: &str = "| key | value | default | meaning |\n|---|---|---|---|\n";

fn row(page: &mut String, name: &str, value: &str, default: &str, help: &str) {
    let cell = |text: &str| text.replace('\n', " ").replace('|', "\\|");
    let _ = writeln!(page, "| `{name}` | {} | {} | {} |", cell(value), cell(default), cell(help));
}

const INTRODUCTION: &str = r#"# The configuration file

`thruway serve --config FILE` reads a TOML file with a table for each service. Its keys are the options of
`thruway serve`, by the same names and with the same values. Options on the command line are added to lists, and take
the place of single values. The file is checked whole before anything is started, and every error is reported with its line
number. `thruway serve --config FILE --check` also opens the directories, disks, keys and certificates in it. It starts nothing, so a daemon may already
serve them, and does not check whether addresses are free. It reports every mistake, with file and line if it is in the file, or that the configuration is valid. Mistakes of the file's syntax and values are reported first, alone. The exit status is 2 if an option is wrong, and 1 if only
something that it names is.

`SIGHUP` reloads the authorized keys, the certificates and the rules of shares. The daemon prints a line for each reloaded item and for each mistake. Other settings need a restart: if one has changed, the daemon prints a line with
file and line number. The last line begins with `reload done` or `reload with mistakes`. A configuration file with mistakes changes nothing but the authorized keys, which are reloaded in any case.

```toml
provider = "iwarp"

[transfer]
listen = ["0.0.0.0:7117"]
key = "/etc/thruway/host"
authorized-keys = "/etc/thruway/authorized_keys"

[[transfer.export]]
name = "data"
dir = "/srv/data"
read-only = true

[block]
nbd = ["127.0.0.1:10809", "unix:/run/thruway/nbd.sock"]
iscsi = ["0.0.0.0:3260"]
chap = "/etc/thruway/chap"

[[block.export]]
name = "disk"
path = "/srv/disk.img"
mode = "direct"
layers = ["cache=1G:writeback", "rate=500M"]

[nfs]
nfs = ["0.0.0.0:2049"]
nfs-keytab = "/etc/thruway/nfs.keytab"

[[nfs.share]]
name = "home"
dir = "/srv/home"
sec = ["krb5p", "krb5i"]

[[nfs.share.allow]]
clients = "192.0.2.0/24"

[[nfs.share.allow]]
clients = "198.51.100.7"
read-only = true
squash = "all"
```

`thruway run` has a file of its own, its [policy](sockets.md#rules), and `thruway relay` has options only.

This page is made of the program's own definitions (`thruway serve --config-reference`).
"#;

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> &'static str {
        INTRODUCTION.split("```toml\n").nth(1).unwrap().split("```").next().unwrap()
    }

    #[test]
    fn the_example_is_right() {
        let Ok(file) = parse(example()) else { panic!("the example has mistakes") };
        let wanted = Spec::parse("disk=/srv/disk.img,mode=direct,cache=1G:writeback,rate=500M").unwrap();
        assert_eq!(file.disks, [wanted]);
        assert_eq!(file.exports[0].name, "data");
        assert!(file.exports[0].read_only);
        assert!(file.options.contains(&"--nbd=unix:/run/thruway/nbd.sock".into()), "{:?}", file.options);
        assert!(file.options.contains(&"--provider=iwarp".into()));
        let rules = "192.0.2.0/24|198.51.100.7+ro+squash=all";
        let wanted = format!("--share=home=/srv/home,sec=krb5p:krb5i,allow={rules}");
        let options = command().try_get_matches_from([wanted]).unwrap();
        assert_eq!(file.shares, [options.get_one::<Share>("share").unwrap().clone()]);
    }

    #[test]
    fn shares_are_tables_or_lines() {
        let both = "[nfs]\nshare = ['a=/srv/a', 'b=mem:1M,ro']\n";
        let Ok(file) = parse(both) else { panic!("lines") };
        assert_eq!((file.options.len(), file.shares.len()), (2, 0));
        let text = "[[nfs.share]]\nname = 'a'\ndir = '/srv/with,commas=and:all'\nasync = true\nsquash = 'none'\ndelegations = 'read'\nallow = ['::1+ro', { clients = 'cert:a.example', read-only = false }]\n";
        let Ok(file) = parse(text) else { panic!("a table") };
        assert_eq!(
            file.shares[0].to_string(),
            "share /a = /srv/with,commas=and:all (read-write, squash=none, sec=sys, async, delegations=read) for ::1+ro|cert:a.example+rw"
        );
        for (wrong, says) in [
            ("dir = '/srv'\nsec = ['krb6']", "krb6"),
            ("dir = '/srv'\nsec = [7]", "''"),
            ("dir = '/srv'\nsec = 'krb5'", "is a list"),
            ("dir = '/srv'\nsquash = 'some'", "invalid squash 'some'"),
            ("dir = '/srv'\nro = true", "'ro' of a share (expected name, dir, read-only"),
            ("dir = '/srv'\nallow = []", "allow is empty"),
            ("dir = '/srv'\nallow = ['10.0.0.1/8']", "10.0.0.0/8"),
            ("dir = '/srv'\nallow = [{ clients = '10.0.0.0/8+ro', squash = 'x' }]", "invalid squash 'x'"),
            ("dir = '/srv'\nallow = [{ read-only = true }]", "the rule's clients is missing"),
            ("dir = '/srv'\nallow = [7]", "[[nfs.share.allow]]"),
            ("dir = ''", "dir is empty"),
            ("dir = 'mem:1Q'", "1Q"),
            ("", "the share's dir is missing"),
        ] {
            let mistakes = parse(&format!("[[nfs.share]]\nname = 'a'\n{wrong}\n")).err().unwrap();
            let said: Vec<&str> = mistakes.iter().map(|mistake| mistake.what.as_str()).collect();
            assert!(said.len() == 1 && said[0].contains(says), "{wrong}: {said:?}");
        }
    }

    #[test]
    fn the_user_is_the_daemons_wherever_it_is_written() {
        for text in ["user = 'nobody'", "[transfer]\nuser = 'nobody'"] {
            let Ok(file) = parse(text) else { panic!("{text}") };
            assert_eq!(file.options, ["--user=nobody"]);
        }
    }

    #[test]
    fn an_option_of_a_disk_means_the_same_in_the_file_and_on_the_command_line() {
        for kind in DISK.options {
            let (in_file, on_command_line) = match kind.name {
                "ro" => ("true", "ro"),
                "mode" => ("'direct'", "mode=direct"),
                "chunk" => ("'64K'", "chunk=64K"),
                "target" => ("'t'", "target=t"),
                "sector" => ("4096", "sector=4096"),
                "uuid" => ("'00000000-0000-0000-0000-00000000000a'", "uuid=00000000-0000-0000-0000-00000000000a"),
                "allow" => ("['a', 'b']", "allow=a|b"),
                other => panic!("say how '{other}' is written"),
            };
            let text = format!("[[block.export]]\nname = 'd'\npath = '/srv/d'\n{} = {in_file}\n", kind.key);
            let Ok(file) = parse(&text) else { panic!("{text}") };
            let wanted = Spec::parse(&format!("d=/srv/d,{on_command_line}")).unwrap();
            assert_eq!(file.disks, std::slice::from_ref(&wanted), "{}", kind.name);
            let plain = Spec::parse("d=/srv/d").unwrap();
            assert_ne!(wanted, plain, "{} changes nothing", kind.name);
            assert_ne!((kind.get)(&wanted), (kind.get)(&plain), "{} is not compared", kind.name);
        }
    }

    #[test]
    fn every_mistake_is_told_with_its_line() {
        let text = r#"provider = "pigeon"
speed = 9

[transfer]
listen = ["127.0.0.1:7117", "nowhere"]
max-sessions = "many"
anonymous = true
depth = [64]

[[transfer.export]]
name = "data"

[block]
nbd = 10809
iscsi = "[::1]:3260"
chap = { file = "x" }

[[block.export]]
name = "disk"
path = "mem:1Q"

[[block.export]]
name = "disk2"
path = "mem:1M"
read-only = "yes"
turbo = true

[[block.export]]
name = "disk3"
path = "mem:1M"
mode = "fast"
layers = ["cache=1M", "magic"]
"#;
        let mistakes = parse(text).err().unwrap();
        let told: Vec<(usize, String)> =
            mistakes.into_iter().map(|m| (1 + text[..m.span.start].matches('\n').count(), m.what)).collect();
        let wanted = [
            (1, "expected iwarp, verbs"),
            (2, "'speed'"),
            (5, "'nowhere'"),
            (6, "'many'"),
            (7, "'anonymous' belongs before the first table, not in [transfer]"),
            (8, "not a list"),
            (10, "dir is missing"),
            (14, "'10809'"),
            (16, "block.chap"),
            (18, "'1Q'"),
            (25, "true or false"),
            (26, "'turbo'"),
            (31, "'fast'"),
            (32, "'magic'"),
        ];
        assert_eq!(told.len(), wanted.len(), "{told:#?}");
        for ((line, what), (wanted_line, wanted)) in told.iter().zip(wanted) {
            assert_eq!(*line, wanted_line, "{told:#?}");
            assert!(what.contains(wanted), "{what}: {wanted}");
        }
    }

    #[test]
    fn a_disk_has_the_same_options_in_the_file_as_on_the_command_line() {
        let text = r#"
[[block.export]]
name = "disk"
path = "mem:1M"
uuid = "00000000-0000-0000-0000-00000000000a"
allow = ["backup", "iqn.2026-11.org.example:host"]
"#;
        let Ok(file) = parse(text) else { panic!("it has mistakes") };
        let uuid = "uuid=00000000-0000-0000-0000-00000000000a";
        let wanted = Spec::parse(&format!("disk=mem:1M,{uuid},allow=backup|iqn.2026-11.org.example:host")).unwrap();
        assert_eq!(file.disks, [wanted]);
        let text = text.replace("\"backup\"", "\"one|two\"");
        let Ok(file) = parse(&text) else { panic!("it has mistakes") };
        assert_eq!(file.disks[0].allow[0], "one|two", "a name, and not two");
        for wrong in ["allow = []", "allow = [\"\"]", "allow = [7]", "allow = \"x\"", "uuid = \"7\""] {
            let text = format!("[[block.export]]\nname = \"disk\"\npath = \"mem:1M\"\n{wrong}\n");
            assert_eq!(parse(&text).err().unwrap().len(), 1, "{wrong}");
        }
    }

    #[test]
    fn broken_toml_is_a_mistake_too() {
        let mistakes = parse("[transfer]\nlisten = [\n[block\n").err().unwrap();
        assert!(!mistakes.is_empty());
    }
}
