//! Conformance table of NFS version 4: runs each of its cases against a daemon, and generates its page of the book.

use crate::support;
use crate::support::nfs_python;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use support::Lab;
use support::disks::{Disks, ok, text};

const TABLE: &str = include_str!("nfs/conformance.toml");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    operation: Vec<Operation>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Operation {
    name: String,
    number: u32,
    versions: Vec<u32>,
    absent: Option<String>,
    sections: String,
    #[serde(default)]
    case: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    case: String,
    given: String,
    result: String,
    rule: Option<String>,
    versions: Option<Vec<u32>>,
}

/// Numbers of statuses by name, without `NFS4ERR_` (RFC 8881, section 15.1).
const STATUSES: &[(&str, u32)] = &[
    ("OK", 0),
    ("PERM", 1),
    ("NOENT", 2),
    ("NXIO", 6),
    ("ACCESS", 13),
    ("EXIST", 17),
    ("XDEV", 18),
    ("NOTDIR", 20),
    ("ISDIR", 21),
    ("INVAL", 22),
    ("FBIG", 27),
    ("ROFS", 30),
    ("NAMETOOLONG", 63),
    ("NOTEMPTY", 66),
    ("STALE", 70),
    ("BADHANDLE", 10_001),
    ("BAD_COOKIE", 10_003),
    ("NOTSUPP", 10_004),
    ("TOOSMALL", 10_005),
    ("BADTYPE", 10_007),
    ("DELAY", 10_008),
    ("SAME", 10_009),
    ("DENIED", 10_010),
    ("LOCKED", 10_012),
    ("GRACE", 10_013),
    ("SHARE_DENIED", 10_015),
    ("CLID_INUSE", 10_017),
    ("RESOURCE", 10_018),
    ("NOFILEHANDLE", 10_020),
    ("MINOR_VERS_MISMATCH", 10_021),
    ("STALE_CLIENTID", 10_022),
    ("STALE_STATEID", 10_023),
    ("OLD_STATEID", 10_024),
    ("BAD_STATEID", 10_025),
    ("BAD_SEQID", 10_026),
    ("NOT_SAME", 10_027),
    ("SYMLINK", 10_029),
    ("RESTOREFH", 10_030),
    ("ATTRNOTSUPP", 10_032),
    ("NO_GRACE", 10_033),
    ("BADXDR", 10_036),
    ("LOCKS_HELD", 10_037),
    ("OPENMODE", 10_038),
    ("BADOWNER", 10_039),
    ("BADNAME", 10_041),
    ("OP_ILLEGAL", 10_044),
    ("BADSESSION", 10_052),
    ("BADSLOT", 10_053),
    ("COMPLETE_ALREADY", 10_054),
    ("SEQ_MISORDERED", 10_063),
    ("SEQUENCE_POS", 10_064),
    ("REQ_TOO_BIG", 10_065),
    ("REP_TOO_BIG", 10_066),
    ("REP_TOO_BIG_TO_CACHE", 10_067),
    ("RETRY_UNCACHED_REP", 10_068),
    ("TOO_MANY_OPS", 10_070),
    ("OP_NOT_IN_SESSION", 10_071),
    ("CLIENTID_BUSY", 10_074),
    ("SEQ_FALSE_RETRY", 10_076),
    ("ENCR_ALG_UNSUPP", 10_079),
    ("NOT_ONLY_OP", 10_081),
    ("WRONG_TYPE", 10_083),
    ("UNION_NOTSUPP", 10_090),
    ("NOXATTR", 10_095),
    ("XATTR2BIG", 10_096),
];

fn table() -> Table {
    toml::from_str(TABLE).expect("the table of the conformance tests")
}

fn number_of(status: &str) -> u32 {
    STATUSES.iter().find(|(name, _)| *name == status).unwrap_or_else(|| panic!("no status is named {status}")).1
}

/// Name of a status number; other text unchanged.
fn name_of(status: &str) -> &str {
    STATUSES.iter().find(|(_, number)| number.to_string() == status).map_or(status, |(name, _)| name)
}

fn versions_of<'a>(operation: &'a Operation, case: &'a Case) -> &'a [u32] {
    case.versions.as_deref().unwrap_or(&operation.versions)
}

/// Clients at 127.0.0.2 may only read.
const RULES: &str = "squash=none,allow=127.0.0.2+ro|127.0.0.1";

/// Starts a daemon with these shares.
fn serve(lab: &Lab, state: &str, shares: &[String]) -> Disks {
    let state = lab.path(state);
    let mut args = vec!["--quiet", "--nfs", "127.0.0.1:0", "--state", text(&state)];
    shares.iter().for_each(|share| args.extend(["--share", share]));
    Disks::serve(&args)
}

/// Runs the cases of a minor version with a share of a daemon. Returns a line for each wrong result.
fn wrong_results(daemon: &Disks, minor: u32, share: &str) -> Vec<String> {
    let table = table();
    let cases = table.operation.iter().flat_map(|op| op.case.iter().map(move |case| (op, case)));
    let cases: Vec<_> = cases.filter(|(op, case)| versions_of(op, case).contains(&minor)).collect();
    let names: BTreeSet<&str> = cases.iter().map(|(_, case)| &*case.case).collect();
    assert_eq!(names.len(), cases.len(), "version 4.{minor}: one result for each case");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nfs/conformance.py");
    let (at, minor_text) = (daemon.at("nfs"), minor.to_string());
    let args: Vec<&str> = ["-B", script, &at, share, &minor_text].into_iter().chain(names).collect();
    let said = ok("/usr/bin/python3", &args);
    let found: BTreeMap<&str, &str> = said.lines().filter_map(|line| line.split_once(' ')).collect();
    let wrong = cases.iter().filter(|(_, case)| found[&*case.case] != number_of(&case.result).to_string());
    let wrong = wrong.map(|(op, case)| {
        let (name, status) = (&case.case, name_of(found[&*case.case]));
        format!("4.{minor} of '{share}': {}: {name}: {status}, not {}", op.name, case.result)
    });
    wrong.collect()
}

/// Runs these at the same time, each with a minor version and the name of a share.
fn in_each_version<'a>(shares: &[&'a str], run: impl Fn(u32, &'a str) -> Vec<String> + Sync) {
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let run = &run;
        let pairs = (0..=2).flat_map(|minor| shares.iter().map(move |share| (minor, *share)));
        let running: Vec<_> = pairs.map(|(minor, share)| scope.spawn(move || run(minor, share))).collect();
        running.into_iter().flat_map(|pair| pair.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn every_case_of_the_table_has_the_result_that_the_rfc_asks_for() {
    in_each_version(&["d", "m"], |minor, share| {
        // A daemon for each: what clients of a host have had others wait for decides whether they get delegations.
        let lab = Lab::new();
        let shares = [format!("d={},{RULES}", text(&lab.mkdir("shared"))), format!("m=mem:64M,{RULES}")];
        let daemon = serve(&lab, "state", &shares);
        let wrong = wrong_results(&daemon, minor, share);
        daemon.stop();
        wrong
    });
}

/// As above, of a daemon that shares the directories of another one.
#[test]
fn every_case_has_the_same_result_where_a_share_is_shared_again() {
    in_each_version(&["d"], |minor, share| {
        let lab = Lab::new();
        let shares = [format!("d={},squash=none", text(&lab.mkdir("shared"))), "m=mem:64M,squash=none".into()];
        let first = serve(&lab, "first", &shares);
        let at = first.at("nfs");
        let again = ["d", "m"].map(|name| format!("{name}=nfs://{at}/{name},{RULES}"));
        let second = serve(&lab, "second", &again);
        let wrong = wrong_results(&second, minor, share);
        second.stop();
        first.stop();
        wrong
    });
}

/// Calls each operation number that the table does not list as served in a minor version, and expects an error.
#[test]
fn operations_that_are_not_served_are_refused() {
    const LAST: u32 = 80;
    let lab = Lab::new();
    let state = lab.path("state");
    let args = ["--quiet", "--share", "m=mem:64M", "--nfs", "127.0.0.1:0", "--state", text(&state)];
    let daemon = Disks::serve(&args);
    let operations: BTreeMap<u32, Operation> = table().operation.into_iter().map(|op| (op.number, op)).collect();
    for minor in 0..=2 {
        let expected = |number: u32| match operations.get(&number) {
            // Later versions define the operations of version 4.0 too, but do not support them.
            Some(op) if op.versions == [0] && minor > 0 => Some("NOTSUPP"),
            Some(op) if !op.versions.contains(&minor) => Some("OP_ILLEGAL"),
            Some(op) => op.absent.as_ref().map(|_| "NOTSUPP"),
            None => Some("OP_ILLEGAL"),
        };
        let expected: Vec<(u32, u32)> = (0..LAST).filter_map(|n| Some((n, number_of(expected(n)?)))).collect();
        let numbers: Vec<String> = expected.iter().map(|(number, _)| number.to_string()).collect();
        let script = r#"
minor, *numbers = map(int, args)
kind = Client40 if minor == 0 else Client
client = kind(at, b"client", minor=minor)
for number in numbers:
    print(number, client.run(words(24), words(number) + bytes(64))[0])
"#;
        let minor = minor.to_string();
        let args: Vec<&str> = [&*minor].into_iter().chain(numbers.iter().map(String::as_str)).collect();
        let said = nfs_python::python(&daemon.at("nfs"), script, &args);
        let said: Vec<(u32, u32)> = said
            .lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(number, status)| (number.parse().unwrap(), status.parse().unwrap()))
            .collect();
        assert_eq!(said, expected, "version 4.{minor}: number and status");
    }
    daemon.stop();
}

fn page() -> String {
    let mut page = "# Operations and errors of NFS version 4\n\nThis page is generated from the table of the conformance tests (`crates/thruway/tests/nfs/conformance.toml`). Each row is run against a directory and\nagainst memory, in each listed minor version. A result is the status of the operation, without `NFS4ERR_`.\n".to_string();
    let listed = |versions: &[u32]| versions.iter().map(|v| format!("4.{v}")).collect::<Vec<_>>().join(", ");
    for Operation { name, number, versions, absent, sections, case } in table().operation {
        let of_operation = listed(&versions);
        let _ = write!(page, "\n## {name}\n\nOperation {number}, version {of_operation} ({sections}).");
        if let Some(why) = absent {
            let _ = write!(page, " Not served: {why}.");
        }
        if case.is_empty() {
            page.push('\n');
            continue;
        }
        page.push_str("\n\n| given | result | versions | rule |\n|---|---|---|---|\n");
        for Case { given, result, rule, versions: of_case, .. } in case {
            let versions = of_case.as_deref().map_or_else(|| of_operation.clone(), listed);
            let _ = writeln!(page, "| {given} | {result} | {versions} | {} |", rule.unwrap_or_default());
        }
    }
    page
}

#[test]
fn the_page_of_the_book_is_made_of_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/nfs-conformance.md");
    let page = page();
    if std::env::var_os("THRUWAY_WRITE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page,
        "docs/src/nfs-conformance.md: THRUWAY_WRITE_DOCS=1 cargo test -p thruway --test main nfs_conformance::"
    );
}
