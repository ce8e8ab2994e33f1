//! Shares: file systems with names, and their handles.

use crate::delegations::{Delegate, Delegations};
use crate::rules::Rule;
use crate::security::{Security, SecuritySet};
pub use crate::squash::{NOBODY, Squash};
use crate::status::Status;
use crate::users::{Unavailable, Users};
use smallvec::SmallVec;
use std::sync::{Arc, RwLock};
use thruway_rpc::server::{Call, Connection, Credential};
use thruway_tcp::Origin;
use thruway_vfs::identity::FileIdentity;
use thruway_vfs::{As, Attributes, Credentials, FILE_ID_MAX, FileId, FileSystem};

/// A file system that is served.
pub struct Share {
    /// Its name: clients mount `/NAME`.
    pub name: String,
    /// The file system.
    pub files: Box<dyn FileSystem>,
    /// Who may do what.
    policy: RwLock<Arc<Policy>>,
    /// What of its files is delegated to clients.
    pub delegate: Delegate,
    /// To whom: asked of version 4, when that is there.
    pub(crate) delegations: Delegations,
    /// See [`Share::number`].
    number: [u8; 4],
    /// Key of the codes in its handles; set by [`Shares::new`].
    handle_key: [u8; 32],
}

/// Who may do what with a share, which may change while it is served.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policy {
    /// Nothing can be changed.
    pub read_only: bool,
    /// Which users count as nobody.
    pub squash: Squash,
    /// How callers show who they are.
    pub security: SecuritySet,
    /// Who may use it; everybody, if there are none.
    pub rules: Vec<Rule>,
}

impl Share {
    /// A file system with a name.
    pub fn new(name: impl Into<String>, files: Box<dyn FileSystem>, policy: Policy, delegate: Delegate) -> Share {
        let (name, policy) = (name.into(), RwLock::new(Arc::new(policy)));
        let number = *blake3::hash(name.as_bytes()).as_bytes().first_chunk().expect("a hash is longer");
        Share { name, files, policy, delegate, delegations: Delegations::default(), number, handle_key: [0; 32] }
    }

    /// Who may do what.
    pub fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.read().expect("no panics under the lock"))
    }

    /// From the next call on, this counts.
    pub fn set_policy(&self, policy: Policy) {
        *self.policy.write().expect("no panics under the lock") = Arc::new(policy);
    }

    /// What is to be done with a file of it by a call.
    ///
    /// # Errors
    /// If its client may not use the share, or not in this way.
    pub fn enter(&self, file: FileId, call: &Call) -> Result<Target<'_>, HandleError> {
        let access = self.access(&call.connection).ok_or(HandleError::NotAllowed)?;
        if !access.security.contains(Security::of(&call.credential)) {
            return Err(HandleError::WrongSecurity);
        }
        if call.user_is_unavailable.get() {
            return Err(HandleError::UnknownCaller);
        }
        let who = access.squash.credentials(&call.credential, call.user.get().map(|user| &**user));
        Ok(Target { share: self, file, who, read_only: access.read_only })
    }

    /// How a client's callers show who they are; `None` if it may not use the share.
    pub fn security(&self, client: &Connection) -> Option<SecuritySet> {
        self.access(client).map(|access| access.security)
    }

    /// What a client may; `None` if it may not use the share.
    fn access(&self, client: &Connection) -> Option<Access> {
        let policy = self.policy();
        let own = Access { read_only: policy.read_only, squash: policy.squash, security: policy.security };
        if policy.rules.is_empty() {
            return Some(own);
        }
        let address = client.peer.map(|peer| peer.ip());
        let rule = policy.rules.iter().find(|rule| rule.clients.contain(address, &client.names))?;
        Some(Access {
            read_only: rule.read_only.unwrap_or(own.read_only),
            squash: rule.squash.unwrap_or(own.squash),
            security: rule.security.unwrap_or(own.security),
        })
    }

    /// Identity of one of its files.
    pub(crate) fn identity(&self, file: &FileId) -> FileIdentity {
        FileIdentity { file_system: self.files.fsid(), file: file.clone() }
    }

    /// Number that distinguishes it from the other shares, also after a restart.
    pub(crate) fn number(&self) -> [u8; 4] {
        self.number
    }

    /// Derives the key of the codes in the share's handles. It depends on the directory, so another directory under the same share name
    /// has other handles.
    fn derive_handle_key(&self, key: &[u8; 32]) -> [u8; 32] {
        let FileIdentity { file_system, file: root } = self.identity(&self.files.root());
        let mut hasher = blake3::Hasher::new_keyed(key);
        hasher.update(&[HANDLE_VERSION]).update(&self.number).update(&file_system.to_be_bytes()).update(&root.0);
        *hasher.finalize().as_bytes()
    }

    /// Code in the handle of a file.
    fn handle_code(&self, file: &[u8]) -> [u8; CODE] {
        let hash = blake3::keyed_hash(&self.handle_key, file);
        *hash.as_bytes().first_chunk().expect("a hash is longer")
    }
}

/// What a client may do with a share.
#[derive(Debug, Clone, Copy)]
struct Access {
    /// It can change nothing.
    read_only: bool,
    /// Which of its users count as nobody.
    squash: Squash,
    /// How its callers show who they are.
    security: SecuritySet,
}

/// A file handle, as clients get it: at most [`HANDLE_MAX`] bytes.
pub type FileHandle = SmallVec<[u8; 64]>;

/// Most bytes of a handle: what version 3 allows.
pub const HANDLE_MAX: usize = 64;

/// Version 2 of handles contains the number of the file system. The code covers that number and the directory of the share.
const HANDLE_VERSION: u8 = 2;
/// Bytes of version, share, number of the file system, and code.
const HANDLE_HEADER: usize = 1 + 4 + 8 + CODE;
const CODE: usize = 8;
/// Version of the handles of release 0.1, without the number of the file system.
const EARLIER_VERSION: u8 = 1;
const _: () = assert!(HANDLE_HEADER + FILE_ID_MAX <= HANDLE_MAX);

/// Why a handle leads to no file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandleError {
    /// It has not the form of a handle.
    Malformed,
    /// It is not ours, or of a share that is not served any more.
    Stale,
    /// It is of a share that the client may not use.
    NotAllowed,
    /// It is of a share whose callers have to show otherwise who they are.
    WrongSecurity,
    /// Who calls cannot be found out now.
    UnknownCaller,
}

impl From<HandleError> for Status {
    fn from(error: HandleError) -> Status {
        match error {
            HandleError::Malformed => Status::BADHANDLE,
            HandleError::Stale => Status::STALE,
            HandleError::UnknownCaller => Status::DELAY,
            HandleError::NotAllowed => Status::ACCESS,
            HandleError::WrongSecurity => Status::WRONGSEC,
        }
    }
}

/// What a call is about, and as whom it is done.
#[derive(Clone)]
pub struct Target<'a> {
    /// Its share.
    pub share: &'a Share,
    /// The file.
    pub file: FileId,
    /// As whom.
    pub who: Credentials,
    /// The client can change nothing.
    pub read_only: bool,
}

impl Target<'_> {
    /// Of whom no file is open.
    pub fn user(&self) -> As<'_> {
        As { who: &self.who, is_open: false }
    }

    /// What there is to know of it, if that can be told.
    pub async fn attributes(&self) -> Option<Attributes> {
        self.share.files.attributes(&self.file).await.ok()
    }
}

/// The shares of a server. Handles carry a code, so that none can be made up, and what is not shared stays out of reach.
pub struct Shares {
    shares: Vec<Share>,
    key: [u8; 32],
    users: Users,
}

impl Shares {
    /// These shares. Handles stay good for as long as the key is the same.
    ///
    /// # Errors
    /// The names of two shares that handles could not tell apart.
    pub fn new(mut shares: Vec<Share>, key: [u8; 32]) -> Result<Shares, (String, String)> {
        for (at, share) in shares.iter().enumerate() {
            if let Some(other) = shares[..at].iter().find(|other| other.number() == share.number()) {
                return Err((other.name.clone(), share.name.clone()));
            }
        }
        shares.iter_mut().for_each(|share| share.handle_key = share.derive_handle_key(&key));
        Ok(Shares { shares, key, users: Users::default() })
    }

    /// Learns who calls, if that is more than the credential says: the groups of a user who has more of them than it has room
    /// for, and the user that a principal of Kerberos is here.
    pub async fn learn_user(&self, call: &Call) {
        // A caller that is refused anyway need not be known.
        if !self.security(&call.connection).contains(Security::of(&call.credential)) {
            return;
        }
        let origin = call.connection.origin();
        let user = match &call.credential {
            Credential::Sys(sys) => self.users.with_many_groups(origin, sys.uid, &sys.gids).await,
            Credential::Gss(caller) => match caller.local_user() {
                Some(name) => self.users.named(origin, name).await,
                None => Ok(None),
            },
            _ => Ok(None),
        };
        match user {
            // It is not known yet.
            Ok(Some(user)) => drop(call.user.set(user)),
            Ok(None) => {}
            Err(Unavailable) => call.user_is_unavailable.set(true),
        }
    }

    /// The number of a user, or of a group, by its name on this host.
    pub(crate) async fn number_of(
        &self,
        origin: Origin,
        name: &str,
        is_group: bool,
    ) -> Result<Option<u32>, Unavailable> {
        if is_group {
            return self.users.group_named(origin, name).await;
        }
        Ok(self.users.named(origin, name).await?.map(|user| user.uid))
    }

    /// How callers of a client may show who they are to the server: in any way that any share takes.
    pub(crate) fn security(&self, client: &Connection) -> SecuritySet {
        let sets = self.shares.iter().filter_map(|share| share.security(client));
        sets.reduce(SecuritySet::union).unwrap_or_default()
    }

    /// Whether a client may use any of them. One that may not is refused by the server as a whole, and has nothing there.
    pub fn admit(&self, client: &Connection) -> bool {
        let may = self.shares.is_empty() || self.shares.iter().any(|share| share.access(client).is_some());
        if !may && client.is_first_refusal() {
            let peer = client.peer.map(tracing::field::display);
            tracing::warn!(peer, "refused: no share has a rule for this client");
        }
        may
    }

    /// A client has asked for a share by its name that it may not use.
    pub(crate) fn note_refusal(&self, client: &Connection, share: &Share) {
        if client.is_first_refusal() {
            let peer = client.peer.map(tracing::field::display);
            tracing::warn!(peer, share = share.name, "refused: the share has no rule for this client");
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Share> {
        self.shares.iter()
    }

    /// The share with a name.
    pub fn find(&self, name: &[u8]) -> Option<&Share> {
        self.shares.iter().find(|share| share.name.as_bytes() == name)
    }

    /// The handle of a file.
    pub fn handle(&self, share: &Share, file: &FileId) -> FileHandle {
        let mut handle = FileHandle::new();
        handle.push(HANDLE_VERSION);
        handle.extend_from_slice(&share.number());
        handle.extend_from_slice(&share.files.fsid().to_be_bytes());
        handle.extend_from_slice(&share.handle_code(&file.0));
        handle.extend_from_slice(&file.0);
        handle
    }

    /// A name for this server that no other has, and that outlives restarts.
    pub fn server_name(&self) -> [u8; 16] {
        let hash = blake3::keyed_hash(&self.key, b"name of the server");
        *hash.as_bytes().first_chunk().expect("a hash is longer")
    }

    /// The file of a handle, for a call.
    ///
    /// # Errors
    /// As [`Shares::resolve`], or if the client may not use the share.
    pub fn target(&self, handle: &[u8], call: &Call) -> Result<Target<'_>, HandleError> {
        let (share, file) = self.resolve(handle)?;
        share.enter(file, call)
    }

    /// The file of a handle.
    ///
    /// # Errors
    /// If it leads to none.
    pub fn resolve(&self, handle: &[u8]) -> Result<(&Share, FileId), HandleError> {
        let (header, file) = handle.split_at_checked(HANDLE_HEADER).ok_or(HandleError::Malformed)?;
        match header[0] {
            HANDLE_VERSION if file.len() <= FILE_ID_MAX => {}
            // Clients may keep handles of release 0.1 for years.
            EARLIER_VERSION => return Err(HandleError::Stale),
            _ => return Err(HandleError::Malformed),
        }
        let number: [u8; 4] = *header[1..].first_chunk().expect("the header is longer");
        let file_system = &header[5..13];
        let share = self.shares.iter().find(|share| share.number() == number).ok_or(HandleError::Stale)?;
        // A code that is guessed wrong takes as long as any: 64 bits are not guessed.
        if file_system != share.files.fsid().to_be_bytes() || share.handle_code(file) != header[13..] {
            return Err(HandleError::Stale);
        }
        Ok((share, FileId(SmallVec::from_slice(file))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thruway_rpc::message::AuthSys;
    use thruway_rpc::server::User;
    use thruway_vfs::{LocalFileSystem, LocalOptions};

    fn share(name: &str, squash: Squash) -> Option<Share> {
        let dir = tempfile::tempdir().unwrap();
        // Only root opens files by handles.
        let files = Box::new(LocalFileSystem::open(dir.path(), &LocalOptions::default()).ok()?);
        Some(Share::new(name, files, Policy { squash, ..Policy::default() }, Delegate::Reading))
    }

    #[test]
    fn handles_lead_back_and_cannot_be_made_up() {
        let Some(one) = share("one", Squash::Root) else { return };
        let two = share("two", Squash::Root).unwrap();
        let shares = Shares::new(vec![one, two], [1; 32]).unwrap();
        let (one, two) = (&shares.shares[0], &shares.shares[1]);
        let file = FileId(SmallVec::from_slice(&[9; FILE_ID_MAX]));
        let handle = shares.handle(one, &file);
        assert_eq!(handle.len(), 1 + 4 + 8 + 8 + FILE_ID_MAX);
        let found = shares.resolve(&handle).unwrap();
        assert_eq!((found.0.name.as_str(), found.1), ("one", file.clone()));
        assert_ne!(shares.handle(two, &file), handle);
        for at in 0..handle.len() {
            let mut other = handle.clone();
            other[at] ^= 1;
            assert!(shares.resolve(&other).is_err(), "byte {at}");
        }
        assert_eq!(shares.resolve(&handle[..12]).err(), Some(HandleError::Malformed));
        let other_key = Shares::new(vec![share("one", Squash::Root).unwrap()], [2; 32]).unwrap();
        assert_eq!(other_key.resolve(&handle).err(), Some(HandleError::Stale));
        let other_directory = Shares::new(vec![share("one", Squash::Root).unwrap()], [1; 32]).unwrap();
        assert_eq!(other_directory.resolve(&handle).err(), Some(HandleError::Stale));
        let earlier = [&[EARLIER_VERSION], &handle[1..5], &handle[13..]].concat();
        assert_eq!(shares.resolve(&earlier).err(), Some(HandleError::Stale));
    }

    #[test]
    fn users_count_as_the_share_says() {
        let sys =
            |uid, gid, gids: &[u32]| Credential::Sys(AuthSys { machine: Vec::new(), uid, gid, gids: gids.into() });
        let who = |uid, gid, groups: &[u32]| Credentials { uid, gid, groups: groups.into() };
        assert_eq!(Squash::Root.credentials(&sys(0, 0, &[0, 5]), None), who(NOBODY, NOBODY, &[NOBODY, 5]));
        assert_eq!(Squash::Root.credentials(&sys(1000, 0, &[]), None), who(1000, NOBODY, &[]));
        assert_eq!(Squash::Root.credentials(&Credential::None, None), who(NOBODY, NOBODY, &[]));
        assert_eq!(Squash::All.credentials(&sys(1000, 1000, &[5]), None), who(NOBODY, NOBODY, &[]));
        assert_eq!(Squash::None.credentials(&sys(0, 0, &[5]), None), who(0, 0, &[5]));
        // Those that have been looked up count as the others, once.
        let user = User { uid: 1, gid: 3, groups: vec![6, 0, 7] };
        assert_eq!(Squash::Root.credentials(&sys(1, 2, &[5, 6]), Some(&user)), who(1, 2, &[5, 6, NOBODY, 7]));
    }
}
