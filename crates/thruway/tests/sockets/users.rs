//! Programs of several users: those of a group's members meet, and no others; and what a member does who lies.

use super::{Running, counters, finish, library, script};
use crate::support::Lab;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Nobody, on Debian.
const NOBODY: u32 = 65534;

/// A user and its groups, the first of which is the one of its files.
#[derive(Clone, Copy)]
struct User(u32, &'static [u32]);

const GROUP: u32 = 54321;
const GROUP_NAME: &str = "54321";
const SERVER: User = User(12001, &[12001, 7, GROUP]);
const CLIENT: User = User(12002, &[12002, GROUP]);
/// The group is its first.
const FIRST: User = User(12003, &[GROUP]);
const STRANGER: User = User(12004, &[12004]);
const ROOT: User = User(0, &[0]);

/// The program and all that it needs where every user finds it, and boards of their own.
struct Place {
    lab: Lab,
}

impl Place {
    fn new() -> Place {
        let lab = Lab::new();
        let program = lab.program_for_all();
        let mut files = vec![lab.dir.path().to_owned(), program];
        for (from, name) in [
            (library().to_owned(), "libthruway_preload.so"),
            (script("peers.py"), "peers.py"),
            (script("member.py"), "member.py"),
        ] {
            std::fs::copy(from, lab.path(name)).unwrap();
            files.push(lab.path(name));
        }
        for file in files {
            std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let boards = lab.mkdir("boards");
        std::fs::set_permissions(&boards, std::fs::Permissions::from_mode(0o1777)).unwrap();
        let policy = format!("board = \"{}\"\nafter-calls = 1\n", boards.display());
        std::fs::write(lab.path("policy.toml"), policy).unwrap();
        Place { lab }
    }

    fn boards(&self) -> std::path::PathBuf {
        self.lab.path("boards")
    }

    /// A program as a user, by `thruway run` with these options, or as it is.
    fn program(&self, user: User, run: Option<&[&str]>, name: &str, args: &[&str]) -> Command {
        let User(uid, groups) = user;
        let mut command = Command::new("/usr/bin/setpriv");
        let all: Vec<String> = groups.iter().map(u32::to_string).collect();
        command.args(["--reuid", &uid.to_string(), "--regid", &all[0], "--groups", &all.join(","), "--"]);
        if let Some(options) = run {
            command.arg(self.lab.path("thruway")).args(["run", "--policy"]).arg(self.lab.path("policy.toml"));
            command.args(options).arg("--");
        }
        command.arg("/usr/bin/python3").arg(self.lab.path(name)).args(args);
        command.env("TMPDIR", "/tmp").process_group(0).stdin(Stdio::null());
        command
    }

    fn peers(&self, user: User, run: Option<&[&str]>, args: &[&str]) -> Command {
        self.program(user, run, "peers.py", args)
    }
}

const MEMBER: Option<&[&str]> = Some(&["--group", GROUP_NAME]);
const COUNTED: Option<&[&str]> = Some(&["--group", GROUP_NAME, "--stats", "--json"]);
const WITHOUT: Option<&[&str]> = Some(&["--stats", "--json"]);

#[test]
fn another_user_is_served_by_tcp() {
    let place = Place::new();
    let (_server, port) = Running::server(place.peers(ROOT, Some(&[]), &["echo_server"]));
    let other = User(NOBODY, &[NOBODY]);
    let counted = counters(&finish(place.peers(other, WITHOUT, &["echo_client", &port, "1", "3"])));
    assert_eq!(counted["accelerated"], 0, "{counted:?}");
}

#[test]
fn programs_of_a_groups_members_meet_and_no_others() {
    let place = Place::new();
    let (_server, port) = Running::server(place.peers(SERVER, MEMBER, &["echo_server"]));
    let accelerated = |user, run| {
        // Connections one after the other have the memory of those before.
        let all = (0..2).map(|_| counters(&finish(place.peers(user, run, &["echo_client", &port, "3", "6"]))));
        let all: Vec<_> = all.map(|counted| counted["accelerated"]).collect();
        assert_eq!(all[0], all[1]);
        all[0]
    };
    for member in [CLIENT, SERVER, FIRST, ROOT] {
        assert_eq!(accelerated(member, COUNTED), 3, "user {}", member.0);
    }
    // Without the group, also its own user.
    for (user, run) in [(CLIENT, WITHOUT), (SERVER, WITHOUT), (STRANGER, WITHOUT)] {
        assert_eq!(accelerated(user, run), 0, "user {}", user.0);
    }
    let output = finish(place.peers(STRANGER, MEMBER, &["echo_client", &port, "1", "1"]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("not in the group '54321'"), "{said}");
}

#[test]
fn a_server_that_begins_as_root_meets_as_who_it_becomes() {
    let place = Place::new();
    for (becomes, expected) in [("12001:12001:54321", 2), ("12001:12001:12001", 0)] {
        let mut server = place.peers(ROOT, MEMBER, &["echo_server"]);
        server.env("BECOME", becomes);
        let (_server, port) = Running::server(server);
        let output = finish(place.peers(CLIENT, COUNTED, &["echo_client", &port, "2", "6"]));
        assert_eq!(counters(&output)["accelerated"], expected, "{becomes}");
    }
    // So does a client.
    let (_server, port) = Running::server(place.peers(SERVER, MEMBER, &["echo_server"]));
    let mut client = place.peers(ROOT, COUNTED, &["echo_client", &port, "2", "6"]);
    client.env("BECOME", "12002:12002:54321");
    assert_eq!(counters(&finish(client))["accelerated"], 2);
}

#[test]
fn a_child_that_becomes_another_user_shares_no_memory_with_its_parent() {
    let place = Place::new();
    let (_server, port) = Running::server(place.peers(ROOT, MEMBER, &["echo_server"]));
    let mut parent = place.peers(ROOT, COUNTED, &["part", &port]);
    parent.env("PART", "12002:12002:54321");
    let counted = counters(&finish(parent));
    // Two that both have at first, of which one goes on by TCP when the child parts; then one of each.
    assert_eq!((counted["accelerated"], counted["demoted"]), (4, 1), "{counted:?}");
}

/// Each end gives the connection away, so neither can ring for the other. Between users, the return of unread bytes has two seconds.
#[test]
fn unread_bytes_return_if_both_ends_give_a_connection_away() {
    let place = Place::new();
    let sent = place.boards().join("sent");
    let sent = sent.to_str().unwrap();
    let (mut server, port) = Running::server(place.peers(SERVER, MEMBER, &["both_give_away_server", sent]));
    let counted = counters(&finish(place.peers(CLIENT, COUNTED, &["both_give_away", &port, sent])));
    assert!(server.0.wait().unwrap().success());
    assert_eq!((counted["accelerated"], counted["demoted"]), (1, 1), "{counted:?}");
}

#[test]
fn a_board_that_is_cut_short_while_it_is_used_ends_no_program() {
    let place = Place::new();
    let (_server, port) = Running::server(place.peers(SERVER, MEMBER, &["echo_server"]));
    let board = place.boards().join(format!("thruway-sockets-1-group-{GROUP}"));
    let client = || counters(&finish(place.peers(CLIENT, COUNTED, &["echo_client", &port, "2", "6"])));
    assert_eq!(client()["accelerated"], 2);
    let board = std::fs::File::options().write(true).open(board).unwrap();
    let length = board.metadata().unwrap().len();
    board.set_len(0).unwrap();
    assert_eq!(client()["accelerated"], 0);
    board.set_len(length).unwrap();
    assert_eq!(client()["accelerated"], 2, "it is used again");
}

/// A member's program that has a connection to a server of another's, which does without the library, while a third one lies.
struct Victim<'a> {
    place: &'a Place,
    server: String,
    talks: Running,
    _server: Running,
}

/// Another member.
const LIAR: User = User(12005, &[12005, GROUP]);

impl Victim<'_> {
    /// `side`: with the lower port, it looks at the board, and with the higher writes there.
    fn new<'a>(place: &'a Place, side: &str, before: &[&str]) -> Victim<'a> {
        let (_server, server) = Running::server(place.peers(SERVER, None, &["echo_server"]));
        let mut talks = place.peers(CLIENT, COUNTED, &[&["talks", side, &server], before].concat());
        talks.stdin(Stdio::piped());
        let mut talks = Running::start(talks);
        assert_eq!(talks.line(), "talks");
        Victim { place, server, talks, _server }
    }

    fn lie(&self, what: &[&str]) -> Running {
        let board = self.place.boards().join(format!("thruway-sockets-1-group-{GROUP}"));
        let args = [&[board.to_str().unwrap()], what, &[&self.server]].concat();
        Running::start(self.place.program(LIAR, None, "member.py", &args))
    }

    /// What the program has counted in the end.
    fn counters(mut self) -> BTreeMap<String, u64> {
        drop(self.talks.0.stdin.take());
        let counted = self.talks.line();
        assert!(self.talks.0.wait().unwrap().success());
        serde_json::from_str(&counted).unwrap()
    }
}

#[test]
fn a_member_does_not_get_the_memory_of_others_connections() {
    let place = Place::new();
    let victim = Victim::new(&place, "low", &[]);
    let mut liar = victim.lie(&["be-found"]);
    assert_eq!(liar.line(), "met");
    let counted = victim.counters();
    assert_eq!(liar.line(), "0 bytes, 0 files");
    assert_eq!((counted["accelerated"], counted["failed"]), (0, 1), "{counted:?}");
}

#[test]
fn a_member_cannot_take_the_place_of_the_other_end() {
    let place = Place::new();
    let victim = Victim::new(&place, "high", &[]);
    assert_eq!(victim.lie(&["offer"]).line(), "taken");
    assert_eq!(victim.counters()["accelerated"], 0);
}

/// The memory of a connection that has ended is for the next one between the same two processes.
#[test]
fn a_member_does_not_get_others_connections_through_memory_of_its_own() {
    let place = Place::new();
    let (liar, port) = Running::server(place.peers(LIAR, MEMBER, &["epoll_server"]));
    let victim = Victim::new(&place, "low", &[&port]);
    // That of the program which `setpriv` and `thruway run` have become.
    let pid = liar.0.id().to_string();
    assert_eq!(victim.lie(&["be-found-as", &pid]).line(), "written");
    let counted = victim.counters();
    assert_eq!((counted["accelerated"], counted["reused"], counted["failed"]), (1, 0, 1), "{counted:?}");
}
