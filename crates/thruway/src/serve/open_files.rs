//! The limit on open files: its division among listeners, and the least that the daemon can work with.

use super::{ServeArgs, factory};
use std::os::fd::{AsFd, OwnedFd};
use thruway_engine::limits;
use thruway_server::ConnectionKind;

/// Descriptors of one session of RFTP with the default number of data channels, its files and its pipes.
const OF_SESSION: usize = 32;
/// Descriptors of one connection of a disk or share, and of finding out its user.
const OF_CONNECTION: usize = 4;
/// The same over RDMA: a connection has up to six.
const OF_RDMA_CONNECTION: usize = 8;
/// Descriptors of 64 open files of a shared directory: two for each that is read.
const OF_DIRECTORY: usize = 64 * 2;
/// The same with `mode=direct`: two more for each.
const OF_DIRECT_DIRECTORY: usize = 64 * 4;

/// Divides the files that this process may have open among its listeners. Logs if there are too few for `--max-connections`.
pub(super) fn divide(args: &ServeArgs) {
    let listeners = factory::listeners(args);
    let others = [super::wants_transfer(args), args.nfs.is_rpcbind()].map(usize::from);
    limits::set_listeners(listeners.len() + others.iter().sum::<usize>());
    let wanted = args.max_connections as usize;
    let most = listeners.iter().map(|(protocol, kind)| (protocol, kind.connections_max()));
    let too_few: Vec<_> = most.filter(|(_, most)| *most < wanted).map(|(p, most)| format!("{most} of {p}")).collect();
    if too_few.is_empty() {
        return;
    }
    let (files, too_few) = (limits::open_files(), too_few.join(", "));
    let why = format!(
        "the limit of {files} open files allows fewer connections than --max-connections {wanted}: {too_few}; \
         raise it with ulimit -n, or LimitNOFILE= of systemd"
    );
    // The user did not ask for the default.
    if args.max_connections == super::MAX_CONNECTIONS { tracing::info!("{why}") } else { tracing::warn!("{why}") }
}

/// Refuses to serve if one client of each listener would exhaust the limit on open files. Called when the services have their
/// descriptors. Logs if clients of several shares could exhaust it.
pub(super) fn check(args: &ServeArgs) -> Result<(), String> {
    let mut needed = if super::wants_transfer(args) { OF_SESSION } else { 0 };
    for (_, kind) in factory::listeners(args) {
        needed += if kind == ConnectionKind::Rdma { OF_RDMA_CONNECTION } else { OF_CONNECTION };
    }
    let directories = args.nfs.share.iter().filter(|share| share.is_directory());
    let of_directories = directories.map(|share| if share.is_direct() { OF_DIRECT_DIRECTORY } else { OF_DIRECTORY });
    let (all, largest) = of_directories.fold((0, 0), |(all, largest), of| (all + of, largest.max(of)));
    // A count of open descriptors would need /proc, which Landlock refuses.
    let free = free_descriptors(needed + all);
    let limit = limits::open_files();
    // Rounded up, because threads of the services may still open some.
    let least = |needed: usize| (limit + needed.saturating_sub(free) as u64).next_multiple_of(16);
    if free < needed + largest {
        return Err(format!(
            "the limit of {limit} open files is too low, at least {} are needed; raise it with ulimit -n, or LimitNOFILE= of systemd",
            least(needed + largest)
        ));
    }
    if free < needed + all {
        tracing::warn!(
            "the limit of {limit} open files is too low for the clients of {} shares, {} would be enough; raise it with \
             ulimit -n, or LimitNOFILE= of systemd",
            args.nfs.share.len(),
            least(needed + all)
        );
    }
    Ok(())
}

/// Number of descriptors that this process can still open, counted up to `most`.
fn free_descriptors(most: usize) -> usize {
    let error = std::io::stderr();
    let opened: Vec<OwnedFd> = (0..most).map_while(|_| error.as_fd().try_clone_to_owned().ok()).collect();
    opened.len()
}
