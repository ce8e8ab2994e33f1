//! Mapping of clients' users to [`NOBODY`].

use std::fmt;
use thruway_rpc::server::{Credential, User};
use thruway_vfs::Credentials;

/// Number of the user and of the group without rights.
pub const NOBODY: u32 = 65_534;

/// Users of clients that are mapped to [`NOBODY`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Squash {
    /// Root.
    #[default]
    Root,
    /// All.
    All,
    /// None.
    None,
}

impl fmt::Display for Squash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Squash::Root => "root",
            Squash::All => "all",
            Squash::None => "none",
        })
    }
}

impl Squash {
    /// Credentials of the user that a caller counts as.
    pub(crate) fn credentials(self, credential: &Credential, user: Option<&User>) -> Credentials {
        let nobody = || Credentials { uid: NOBODY, gid: NOBODY, groups: Vec::new() };
        let known_groups = user.map_or(&[][..], |user| &user.groups);
        let (uid, gid, said_groups) = match (credential, user) {
            (Credential::Sys(sys), _) => (sys.uid, sys.gid, &sys.gids[..]),
            (Credential::Gss(_), Some(user)) => (user.uid, user.gid, &[][..]),
            _ => return nobody(),
        };
        let squashed = |id| if id == 0 && self == Squash::Root { NOBODY } else { id };
        match self {
            Squash::All => nobody(),
            Squash::Root | Squash::None => Credentials {
                uid: squashed(uid),
                gid: squashed(gid),
                groups: {
                    let more = known_groups.iter().filter(|group| !said_groups.contains(group));
                    said_groups.iter().chain(more).copied().map(squashed).collect()
                },
            },
        }
    }
}
