//! Files that are open on the server.
//!
//! Each user is an open-owner of its own, as with Linux's clients, because servers check the user of an open. A file has one stateid per user,
//! and is closed when the last guard of that user is dropped.

use super::attributes::{Described, HANDLE_MAX, of_files};
use super::callbacks::Delegation;
use super::events::{Event, Stateid};
use super::session::{Answer, Session, Shared, errno};
use crate::client::compound::{Compound, Results};
use crate::client::{ClientError, Handle, Result};
use crate::status::Status;
use crate::v4::bitmap::Bitmap;
use crate::v4::op;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use thruway_rpc::xdr::{DecodeError, Decoder, Encoder};
use thruway_vfs::{Credentials, Rights};

pub(super) const READ: u32 = 1;
pub(super) const WRITE: u32 = 2;

/// Wish of an OPEN: no delegation. Without a wish, the server decides.
pub(super) const WANT_NO_DELEGATION: u32 = 0x400;

/// Stateid of requests without an open.
pub(super) const ANONYMOUS: Stateid = [0; 16];

/// Claim of an OPEN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// By its handle.
    Handle,
    /// By its handle: it was open before the restart of the server.
    Previous,
}

/// A file that is open, or is being opened or closed.
pub(super) struct OpenFile {
    handle: Handle,
    uid: u32,
    /// Held during an OPEN and a CLOSE.
    turn: tokio::sync::Mutex<()>,
    state: Mutex<OpenState>,
}

#[derive(Default)]
struct OpenState {
    stateid: Option<Stateid>,
    /// Access of the open: [`READ`], [`WRITE`] or both.
    access: u32,
    guards: usize,
    /// The last guard has been dropped.
    is_to_be_closed: bool,
    /// Credentials of the last open.
    who: Option<Credentials>,
    delegation: Option<Arc<Delegation>>,
}

impl OpenFile {
    fn state(&self) -> MutexGuard<'_, OpenState> {
        self.state.lock().expect("no panics under the lock")
    }
}

/// All files that are open on the server, by their handles and users.
#[derive(Default)]
pub(super) struct Opens(Mutex<Files>);

type Files = BTreeMap<(Handle, u32), Arc<OpenFile>>;

/// Keeps a file open.
pub(super) struct Guard {
    file: Arc<OpenFile>,
    shared: Arc<Shared>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut state = self.file.state();
        state.guards -= 1;
        if state.guards == 0 {
            state.is_to_be_closed = true;
            self.shared.tell(Event::Close(self.file.handle.clone(), self.file.uid));
        }
    }
}

/// Result of an OPEN.
pub(super) struct Opened {
    pub stateid: Stateid,
    /// A delegation without a request.
    pub delegation: Option<Stateid>,
}

/// Arguments of an OPEN up to the claim, which follows. `access` includes the wish about delegations.
pub(super) fn put_open(out: &mut Encoder, client: u64, uid: u32, access: u32, put_creation: impl FnOnce(&mut Encoder)) {
    // No sequence number in version 4.1, and no deny mode.
    [0, access, 0].into_iter().for_each(|word| out.u32(word));
    out.u64(client);
    out.opaque(&uid.to_be_bytes());
    put_creation(out);
}

/// Decodes the results of an OPEN.
pub(super) fn get_opened(d: &mut Decoder<'_>) -> Result<Opened> {
    let mut stateid: Stateid = *d.fixed()?;
    stateid[..4].fill(0);
    let (_atomic, _before, _after, _flags, _set) = (d.bool()?, d.u64()?, d.u64()?, d.u32()?, Bitmap::decode(d)?);
    let delegation = match d.u32()? {
        0 => None,
        kind @ (1 | 2) => {
            let (stateid, _recall) = (*d.fixed()?, d.bool()?);
            if kind == 2 {
                // Limit by bytes, or by blocks and their size: three words either way.
                d.fixed::<12>()?;
            }
            let _ace = (d.u32()?, d.u32()?, d.u32()?, d.opaque(1024)?);
            Some(stateid)
        }
        3 => {
            // A flag follows two of the reasons.
            if matches!(d.u32()?, 1 | 2) {
                d.bool()?;
            }
            None
        }
        value => return Err(DecodeError::Invalid { value }.into()),
    };
    Ok(Opened { stateid, delegation })
}

fn open_call(file: &OpenFile, client: u64, access: u32, claim: Claim, wants_delegation: bool) -> Compound {
    let wish = if wants_delegation { 0 } else { WANT_NO_DELEGATION };
    let open = Compound::new().then(op::PUTFH, |out| out.opaque(&file.handle)).then(op::OPEN, |out| {
        put_open(out, client, file.uid, access | wish, |out| out.u32(0));
        match claim {
            Claim::Handle => out.u32(4),
            Claim::Previous => [1, 0].into_iter().for_each(|word| out.u32(word)),
        }
    });
    open.then(op::GETATTR, |out| of_files().encode(out)).that_changes()
}

/// The results of [`open_call`]. The file is open also if its attributes cannot be read.
fn opened(answer: &Answer) -> Result<(Opened, Option<Described>)> {
    let mut results = answer.results()?;
    results.next("PUTFH")?;
    let opened = get_opened(results.next("OPEN")?)?;
    Ok((opened, results.next("GETATTR").and_then(|d| Described::decode(d)).ok()))
}

impl Opens {
    fn files(&self) -> MutexGuard<'_, Files> {
        self.0.lock().expect("no panics under the lock")
    }

    fn find(&self, handle: &Handle, uid: u32) -> Option<Arc<OpenFile>> {
        self.files().get(&(handle.clone(), uid)).cloned()
    }

    fn find_or_insert(&self, handle: &Handle, uid: u32) -> Arc<OpenFile> {
        let mut files = self.files();
        let file = files.entry((handle.clone(), uid)).or_insert_with(|| {
            let (turn, state) = (tokio::sync::Mutex::default(), Mutex::default());
            Arc::new(OpenFile { handle: handle.clone(), uid, turn, state })
        });
        Arc::clone(file)
    }

    fn contains(&self, file: &Arc<OpenFile>) -> bool {
        self.find(&file.handle, file.uid).is_some_and(|known| Arc::ptr_eq(&known, file))
    }

    fn remove(&self, file: &Arc<OpenFile>) {
        let mut files = self.files();
        let key = (file.handle.clone(), file.uid);
        if files.get(&key).is_some_and(|known| Arc::ptr_eq(known, file)) {
            files.remove(&key);
        }
    }

    /// The opens of a file by all users.
    fn of_all_users(&self, handle: &Handle) -> Vec<Arc<OpenFile>> {
        let range = (handle.clone(), 0)..=(handle.clone(), u32::MAX);
        self.files().range(range).map(|(_, file)| Arc::clone(file)).collect()
    }

    /// Stateid of a user's open; [`ANONYMOUS`] if there is none.
    pub(super) fn stateid(&self, handle: &Handle, uid: u32) -> Stateid {
        self.find(handle, uid).and_then(|file| file.state().stateid).unwrap_or(ANONYMOUS)
    }

    /// The files that are open.
    pub(super) fn all(&self) -> Vec<Arc<OpenFile>> {
        self.files().values().cloned().collect()
    }

    /// Opens a file as a user with these rights. Without any, for its creator.
    pub(super) async fn open(
        &self,
        shared: &Arc<Shared>,
        who: &Credentials,
        handle: &Handle,
        wanted: Rights,
    ) -> thruway_vfs::Result<(Guard, Option<Described>)> {
        let access = if wanted.read || wanted.execute { READ } else { 0 } | if wanted.write { WRITE } else { 0 };
        if access == READ && shared.callbacks.can_be_called() {
            // A new file that is still open for its creator would not be delegated.
            for file in self.of_all_users(handle) {
                let is_written = file.state().access & WRITE != 0;
                if is_written {
                    self.close(shared, &file).await;
                }
            }
        }
        loop {
            let file = self.find_or_insert(handle, who.uid);
            let _turn = file.turn.lock().await;
            if !self.contains(&file) {
                // It was closed in the meantime.
                continue;
            }
            let made = access == 0 && file.state().stateid.is_some();
            let result = if made { Ok(None) } else { self.open_on_server(shared, who, &file, access).await };
            let mut state = file.state();
            match result {
                Ok(described) => {
                    state.guards += 1;
                    state.is_to_be_closed = false;
                    drop(state);
                    return Ok((Guard { file: Arc::clone(&file), shared: Arc::clone(shared) }, described));
                }
                Err(error) => {
                    if state.guards == 0 && state.stateid.is_none() {
                        drop(state);
                        self.remove(&file);
                    }
                    return Err(error);
                }
            }
        }
    }

    async fn open_on_server(
        &self,
        shared: &Arc<Shared>,
        who: &Credentials,
        file: &Arc<OpenFile>,
        access: u32,
    ) -> thruway_vfs::Result<Option<Described>> {
        // The creator gets the access that the server grants.
        let attempts: &[u32] = if access == 0 { &[READ | WRITE, READ, WRITE] } else { &[access] };
        let mut failure = Errno::ACCESS;
        for access in attempts {
            // Who writes has no use for it, and would have it recalled.
            let wants =
                *access == READ && shared.callbacks.can_be_called() && shared.callbacks.of(&file.handle).is_none();
            let call = open_call(file, shared.client.load(Ordering::Relaxed), *access, Claim::Handle, wants);
            let answer = shared.call(who, call).await.map_err(errno)?;
            match opened(&answer) {
                Ok((opened, described)) => {
                    self.note(shared, file, opened, *access, who);
                    return Ok(described);
                }
                Err(error) if error.status() == Some(Status::WRONG_TYPE) => return Err(Errno::NXIO),
                Err(error) if error.status() == Some(Status::SYMLINK) => return Err(Errno::LOOP),
                Err(error) => failure = errno(error),
            }
            if failure != Errno::ACCESS {
                return Err(failure);
            }
        }
        // Servers let the owner of a file read and write without an open.
        if access == 0 { Ok(None) } else { Err(failure) }
    }

    fn note(&self, shared: &Arc<Shared>, file: &Arc<OpenFile>, opened: Opened, access: u32, who: &Credentials) {
        let mut state = file.state();
        state.stateid = Some(opened.stateid);
        state.access |= access;
        state.who = Some(who.clone());
        if let Some(stateid) = opened.delegation {
            let delegation = shared.callbacks.add(&file.handle, stateid, who);
            if access & WRITE == 0 && !delegation.is_recalled() {
                state.delegation = Some(delegation);
            }
        }
    }

    /// Records a file that was created, and is open. It stays open for a moment, for its creator.
    pub(super) fn note_made(&self, shared: &Arc<Shared>, handle: &Handle, opened: Opened, who: &Credentials) {
        let file = self.find_or_insert(handle, who.uid);
        self.note(shared, &file, opened, READ | WRITE, who);
        shared.tell(Event::Made(handle.clone(), who.uid));
    }

    /// Drops the delegations that have been recalled. Those of leases are returned with the last lease.
    pub(super) fn give_up_delegations(&self) {
        for file in self.all() {
            let mut state = file.state();
            let recalled = state.delegation.take_if(|delegation| delegation.is_recalled());
            drop(state);
            drop(recalled);
        }
    }

    /// A delegation of the file, if nobody here has it open for writing.
    pub(super) fn delegation(&self, shared: &Shared, handle: &Handle) -> Option<Arc<Delegation>> {
        let is_written = |file: &Arc<OpenFile>| {
            let state = file.state();
            state.guards > 0 && state.access & WRITE != 0
        };
        match self.of_all_users(handle).iter().any(is_written) {
            true => None,
            false => shared.callbacks.of(handle),
        }
    }

    /// Whether any file is open on the server without a guard.
    pub(super) fn any_unused(&self) -> bool {
        self.files().values().any(|file| file.state().guards == 0)
    }

    /// Waits for the CLOSE of a file whose last guard has been dropped.
    pub(super) async fn settle_closed(&self, shared: &Arc<Shared>, handle: &Handle) {
        for file in self.of_all_users(handle) {
            if file.state().is_to_be_closed {
                self.close(shared, &file).await;
            }
        }
    }

    /// Closes a file at once for all users without a guard.
    pub(super) async fn settle(&self, shared: &Arc<Shared>, handle: &Handle) {
        for file in self.of_all_users(handle) {
            self.close(shared, &file).await;
        }
    }

    /// As [`Opens::close`], of the file as a user has it open.
    pub(super) async fn close_of(&self, shared: &Arc<Shared>, handle: &Handle, uid: u32) {
        if let Some(file) = self.find(handle, uid) {
            self.close(shared, &file).await;
        }
    }

    /// Closes a file, unless it is in use.
    pub(super) async fn close(&self, shared: &Arc<Shared>, file: &Arc<OpenFile>) {
        let _turn = file.turn.lock().await;
        let (stateid, who) = {
            let mut state = file.state();
            if state.guards > 0 {
                return;
            }
            (state.stateid.take(), state.who.clone())
        };
        let delegation = file.state().delegation.take();
        if let Some(stateid) = stateid {
            let close = Compound::new().then(op::PUTFH, |out| out.opaque(&file.handle)).then(op::CLOSE, |out| {
                out.u32(0);
                out.fixed(&stateid);
            });
            let who = who.as_ref().unwrap_or(&shared.machine);
            if let Err(error) = shared.call(who, close.that_changes()).await.and_then(|answer| {
                let mut results = answer.results()?;
                results.next("PUTFH")?;
                results.next("CLOSE").map(drop)
            }) {
                tracing::debug!(%error, "closing a file on the NFS server");
            }
        }
        drop(delegation);
        self.remove(file);
    }

    /// Opens a file again whose stateid the server has lost; in a session that is not published yet, or else in the current one.
    pub(super) async fn reopen(
        &self,
        shared: &Arc<Shared>,
        file: &Arc<OpenFile>,
        in_session: Option<&Arc<Session>>,
        claim: Claim,
    ) -> Result<()> {
        let (access, who) = {
            let state = file.state();
            let Some(who) = state.who.clone().filter(|_| state.stateid.is_some()) else { return Ok(()) };
            (state.access, who)
        };
        let client = shared.client.load(Ordering::Relaxed);
        let call = open_call(file, client, access, claim, false);
        let answer = match in_session {
            None => shared.call(&who, call).await?,
            Some(session) => {
                let answer = shared.exchange_in(session, &who, call).await?;
                answer.ok_or(ClientError::Status { operation: "SEQUENCE", status: Status::BADSESSION.0 })?
            }
        };
        let (opened, _) = opened(&answer)?;
        self.note(shared, file, opened, access, &who);
        Ok(())
    }

    /// Opens a file again if the server has revoked its stateid.
    pub(super) async fn renew(&self, shared: &Arc<Shared>, file: &Arc<OpenFile>) {
        let _turn = file.turn.lock().await;
        let Some(stateid) = file.state().stateid else { return };
        let test = Compound::new().then(op::TEST_STATEID, |out| out.array(&[stateid], |out, s| out.fixed(s)));
        let tested = shared.call(&shared.machine, test).await.and_then(|answer| {
            let mut results: Results<'_> = answer.results()?;
            Ok(results.next("TEST_STATEID")?.array(1, Decoder::u32)?)
        });
        if matches!(tested.as_deref(), Ok([0])) {
            return;
        }
        let free = Compound::new().then(op::FREE_STATEID, |out| out.fixed(&stateid));
        drop(shared.call(&shared.machine, free.that_changes()).await);
        if let Err(error) = self.reopen(shared, file, None, Claim::Handle).await {
            tracing::warn!(%error, "a file that was open on the NFS server cannot be opened again");
            file.state().stateid = None;
        }
    }

    /// As [`Opens::renew`], for the open of a user, if its stateid is still this one.
    pub(super) async fn renew_stateid(&self, shared: &Arc<Shared>, handle: &Handle, uid: u32, stateid: Stateid) {
        if let Some(file) = self.find(handle, uid)
            && file.state().stateid == Some(stateid)
        {
            self.renew(shared, &file).await;
        }
    }

    /// Opens all files again after a restart of the server, before other requests begin.
    pub(super) async fn reclaim(&self, shared: &Arc<Shared>, session: &Arc<Session>) -> Result<()> {
        for file in self.all() {
            let reclaimed = match self.reopen(shared, &file, Some(session), Claim::Previous).await {
                Err(error) if matches!(error.status(), Some(Status::NO_GRACE | Status::RECLAIM_BAD)) => {
                    self.reopen(shared, &file, Some(session), Claim::Handle).await
                }
                reclaimed => reclaimed,
            };
            match reclaimed {
                Ok(()) => {}
                Err(error @ ClientError::Status { operation: "OPEN" | "PUTFH", .. }) => {
                    tracing::warn!(%error, "a file that was open before the restart of the NFS server cannot be opened again");
                    file.state().stateid = None;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Decodes a handle.
pub(super) fn get_handle(d: &mut Decoder<'_>) -> Result<Handle> {
    Ok(d.opaque(HANDLE_MAX)?.into())
}
