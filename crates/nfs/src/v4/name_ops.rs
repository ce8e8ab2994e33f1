//! Operations on directories, names and attributes.

use super::attributes::{self, SaidAce, Wanted};
use super::bitmap::Bitmap;
use super::compound::{Compound, Done, Failure, Object, fsid, get_name, put_change_info, user};
use crate::delegations::Change;
use crate::share::{HandleError, Target};
use crate::state::Stateid;
use crate::status::Status;
use crate::users::Unavailable;
use rustix::io::Errno;
use thruway_rpc::server::BULK_MAX;
use thruway_rpc::xdr::{Bulk, Decoder, Encoder};
use thruway_server::Body;
use thruway_server::slices;
use thruway_vfs::acl::{Ace, ENTRIES_OF_UNIT, from_aces};
use thruway_vfs::{Attributes, Entry, Kind, Make, Rights, Room, Usage};

/// Bits of ACCESS.
mod access {
    pub(super) const READ: u32 = 0x01;
    pub(super) const LOOKUP: u32 = 0x02;
    pub(super) const MODIFY: u32 = 0x04;
    pub(super) const EXTEND: u32 = 0x08;
    pub(super) const DELETE: u32 = 0x10;
    pub(super) const EXECUTE: u32 = 0x20;
    pub(super) const READ_XATTR: u32 = 0x40;
    pub(super) const WRITE_XATTR: u32 = 0x80;
    pub(super) const LIST_XATTRS: u32 = 0x100;
}

/// How a file may be read or written.
pub(super) struct Access {
    /// The user's rights to do so were checked when it was opened.
    pub is_open: bool,
    /// Of a file that is not open.
    _change: Option<Change>,
}

/// Longest text of a symbolic link.
const LINK_MAX: u32 = 4096;

/// Bytes of an entry of a listing beside its name, attributes included, most of the time.
const ENTRY: usize = 4 + 8 + 4 + 2 + 4 + 12 + 200;

impl<'a> Compound<'a> {
    /// The file with a name in the current directory.
    pub(super) async fn find(&self, name: &[u8]) -> Done<Object<'a>> {
        match self.object()? {
            Object::Root => {
                let share = self.server.shares.find(name);
                let share = share.ok_or(Status::NOENT)?;
                match share.enter(share.files.root(), self.call) {
                    // There are no shares for those who may not use them.
                    Err(HandleError::NotAllowed) => {
                        self.server.shares.note_refusal(&self.call.connection, share);
                        Err(Status::NOENT.into())
                    }
                    entered => Ok(Object::File(entered?)),
                }
            }
            Object::File(dir) => {
                let found = dir.share.files.look_up(&dir.who, &dir.file, name).await;
                let (file, _) = match found {
                    // Of a symbolic link it is to be said that it is one.
                    Err(Errno::NOTDIR) => return Err(self.no_directory(dir).await),
                    found => found?,
                };
                Ok(Object::File(Target { file, ..dir.clone() }))
            }
        }
    }

    async fn no_directory(&self, what: &Target<'_>) -> Failure {
        let kind = what.attributes().await.map(|attributes| attributes.kind);
        if kind == Some(Kind::SymbolicLink) { Status::SYMLINK.into() } else { Status::NOTDIR.into() }
    }

    /// The directory above the current one.
    pub(super) async fn parent(&self) -> Done<Object<'a>> {
        match self.object()? {
            Object::Root => Err(Status::NOENT.into()),
            Object::File(dir) if dir.file == dir.share.files.root() => Ok(Object::Root),
            Object::File(dir) => {
                let (file, _) = dir.share.files.look_up(&dir.who, &dir.file, b"..").await?;
                Ok(Object::File(Target { file, ..dir.clone() }))
            }
        }
    }

    pub(super) async fn look_up(&mut self, d: &mut Decoder<'_>) -> Done {
        let found = self.find(get_name(d)?).await?;
        self.set_current(found)
    }

    pub(super) async fn look_up_parent(&mut self) -> Done {
        let parent = self.parent().await?;
        self.set_current(parent)
    }

    pub(super) async fn access(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        use access::*;
        const CHANGES: u32 = MODIFY | EXTEND | DELETE;
        const ALL: u32 = 0x3f;
        const XATTRS: u32 = READ_XATTR | WRITE_XATTR | LIST_XATTRS;
        let known = if self.minor >= 2 { ALL | XATTRS } else { ALL };
        let wanted = d.u32()? & known;
        let Object::File(target) = self.object()? else {
            out.u32(wanted & (READ | LOOKUP | MODIFY | EXTEND | DELETE));
            out.u32(wanted & (READ | LOOKUP));
            return Ok(());
        };
        let asked = Rights {
            read: wanted & (READ | READ_XATTR | LIST_XATTRS) != 0,
            write: wanted & (CHANGES | WRITE_XATTR) != 0 && !target.read_only,
            execute: wanted & (LOOKUP | EXECUTE) != 0,
        };
        let (rights, attributes) = target.share.files.rights(&target.who, &target.file, asked).await?;
        // What can be deleted is an entry, which is the directory's affair.
        let (may_execute, may_change) = match attributes.kind {
            Kind::Directory => (LOOKUP, CHANGES),
            _ => (EXECUTE, MODIFY | EXTEND),
        };
        let read = READ | READ_XATTR | LIST_XATTRS;
        let supported = wanted & (read | WRITE_XATTR | may_execute | may_change);
        let mut granted = 0;
        for (has, bits) in
            [(rights.read, read), (rights.write, may_change | WRITE_XATTR), (rights.execute, may_execute)]
        {
            granted |= if has { bits & supported } else { 0 };
        }
        out.u32(supported);
        out.u32(granted);
        Ok(())
    }

    pub(super) async fn get_attributes(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let wanted = attributes::get_readable(d)?;
        let object = self.object()?;
        if let Object::File(target) = object {
            target.look(self.known_client()).await?;
        }
        self.put_attributes(out, object, &wanted).await
    }

    pub(super) async fn set_attributes(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let done = self.try_set_attributes(d).await;
        let put_which = |which: &Bitmap, out: &mut Encoder| which.encode(out);
        match done {
            Ok(which) => {
                put_which(&which, out);
                Ok(())
            }
            // Which have been set is told in any case.
            Err(failure) => {
                let mut body = Encoder::new();
                put_which(&Bitmap::default(), &mut body);
                Err(Failure { body: Some(body), ..failure })
            }
        }
    }

    /// The attributes that something is to be made with.
    pub(super) async fn get_wanted(&self, d: &mut Decoder<'_>) -> Done<Wanted> {
        let wanted = self.get_changes(d).await?;
        // What is made has the list that its directory gives it.
        if wanted.acl.is_some() { Err(Status::ATTRNOTSUPP.into()) } else { Ok(wanted) }
    }

    /// The entries of an access control list, with the numbers of users and groups that have names there.
    async fn look_up_all(&self, said: Vec<SaidAce>) -> Done<Vec<Ace>> {
        let mut aces = Vec::with_capacity(said.len());
        for ace in said {
            let number = match &ace.name {
                None => None,
                Some(name) => Some(self.number_of(name, ace.is_of_group()).await?),
            };
            aces.push(ace.with_number(number));
        }
        Ok(aces)
    }

    /// The number of a user, or of a group, with a name.
    async fn number_of(&self, name: &str, is_group: bool) -> Done<u32> {
        let found = self.server.shares.number_of(self.call.connection.origin(), name, is_group).await;
        Ok(found.map_err(|Unavailable| Status::DELAY)?.ok_or(Status::BADOWNER)?)
    }

    /// The attributes that are to be set, with the numbers of users and groups that have names there.
    async fn get_changes(&self, d: &mut Decoder<'_>) -> Done<Wanted> {
        let mut wanted = attributes::decode(d, self.minor)?;
        if let Some(name) = wanted.owner.take() {
            wanted.set.uid = Some(self.number_of(&name, false).await?);
        }
        if let Some(name) = wanted.group.take() {
            wanted.set.gid = Some(self.number_of(&name, true).await?);
        }
        Ok(wanted)
    }

    async fn try_set_attributes(&mut self, d: &mut Decoder<'_>) -> Done<Bitmap> {
        let stateid = self.get_stateid(d)?;
        let mut wanted = self.get_changes(d).await?;
        let aces = match wanted.acl.take() {
            Some(said) => {
                slices::spend(said.len() / ENTRIES_OF_UNIT).await;
                Some(self.look_up_all(said).await?)
            }
            None => None,
        };
        let target = self.writable()?;
        let is_open = match wanted.set.size {
            Some(_) => self.is_open(target, stateid, true).await?.is_open,
            None => false,
        };
        let _change = target.change(self.known_client()).await?;
        let files = &target.share.files;
        if let Some(aces) = aces {
            let is_directory = files.attributes(&target.file).await?.kind == Kind::Directory;
            let acl = from_aces(&aces, is_directory).map_err(|why| {
                tracing::info!(%why, "an access control list that POSIX cannot have");
                Status::ATTRNOTSUPP
            })?;
            files.set_acl(&target.who, &target.file, acl).await.map_err(|error| match error {
                Errno::OPNOTSUPP => Status::ATTRNOTSUPP,
                error => error.into(),
            })?;
        }
        if wanted.which.iter().any(|number| number != attributes::number::ACL) {
            files.set_attributes(user(target, is_open), &target.file, wanted.set, None).await?;
        }
        Ok(wanted.which)
    }

    /// How a file may be read or written under a stateid.
    pub(super) async fn is_open(&self, target: &Target<'_>, stateid: Stateid, is_write: bool) -> Done<Access> {
        let (client, uid, file) = (self.client_with(stateid)?, target.who.uid, target.key());
        // Who has it open, or has it delegated, has waited for the others then.
        let change = match (stateid.is_special(), is_write) {
            (false, _) => None,
            (true, true) => target.change_data(self.known_client()).await?,
            (true, false) => {
                target.look(self.known_client()).await?;
                None
            }
        };
        let is_open = self
            .server
            .retry_on_conflict(|state, now| state.access(now, client, uid, stateid, &file, is_write))
            .await?;
        Ok(Access { is_open, _change: change })
    }

    pub(super) async fn verify(&mut self, d: &mut Decoder<'_>, is_same: bool) -> Done {
        let (which, theirs) = attributes::get_raw(d)?;
        attributes::check_readable(&which)?;
        let readable = attributes::readable(&which, self.minor);
        if which.iter().any(|number| !readable.contains(number)) {
            return Err(Status::ATTRNOTSUPP.into());
        }
        if which.contains(attributes::number::RDATTR_ERROR) {
            return Err(Status::INVAL.into());
        }
        if let Object::File(target) = self.object()? {
            target.look(self.known_client()).await?;
        }
        let mut ours = Encoder::new();
        self.put_attributes(&mut ours, self.object()?, &which).await?;
        let ours = ours.to_bytes();
        let mut ours = Decoder::new(&ours);
        let (_, ours) = attributes::get_raw(&mut ours)?;
        match (ours == theirs, is_same) {
            (true, false) => Err(Status::SAME.into()),
            (false, true) => Err(Status::NOT_SAME.into()),
            _ => Ok(()),
        }
    }

    pub(super) async fn list(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        /// Verifier, and the two words behind the last entry.
        const AROUND: usize = 8 + 8;
        let (cookie, verifier, _names, bytes) = (d.u64()?, d.u64()?, d.u32()?, d.u32()?);
        let wanted = attributes::get_readable(d)?;
        // Cookies survive changes of the directory, so every verifier is 0 (RFC 8881, section 18.23.3).
        if verifier != 0 && cookie != 0 {
            return Err(Status::NOT_SAME.into());
        }
        // Reserved for the two entries that are never listed.
        if cookie == 1 || cookie == 2 {
            return Err(Status::BAD_COOKIE.into());
        }
        let bytes = (bytes as usize).min(BULK_MAX);
        if bytes < AROUND {
            return Err(Status::TOOSMALL.into());
        }
        out.u64(0);
        let Object::File(dir) = self.object()? else {
            return self.list_root(cookie, bytes, &wanted, out).await;
        };
        let dir = dir.clone();
        self.call.begin_long_reply().await;
        let (mut used, mut cookie, mut is_first) = (AROUND, cookie, true);
        let is_end = loop {
            let room = Room { bytes: bytes.saturating_sub(used), entry: ENTRY };
            let listing = dir.share.files.list(&dir.who, &dir.file, cookie, room, true).await?;
            let Some(last) = listing.entries.last() else { break true };
            cookie = last.cookie;
            // All that clients keep is recalled at once.
            let client = self.known_client();
            let files = listing.entries.iter().filter_map(|entry| entry.file.as_ref());
            if files.filter(|(file, _)| dir.is_kept(file, client)).count() > 0 {
                return Err(Status::DELAY.into());
            }
            let mut is_full = false;
            for entry in &listing.entries {
                let mark = out.mark();
                let before = out.len();
                if !self.put_entry(out, &dir, entry, &wanted) {
                    continue;
                }
                used += out.len() - before;
                if used > bytes {
                    out.truncate(mark);
                    if is_first {
                        return Err(Status::TOOSMALL.into());
                    }
                    is_full = true;
                    break;
                }
                is_first = false;
            }
            // Of a directory that has only its own two names so far, there is more to be read.
            if is_full || !is_first && !listing.is_end {
                break false;
            }
            if listing.is_end {
                break true;
            }
        };
        out.bool(false);
        out.bool(is_end);
        Ok(())
    }

    /// Appends an entry of a directory; false if it is none for the client.
    fn put_entry(&self, out: &mut Encoder, dir: &Target<'_>, entry: &Entry, wanted: &Bitmap) -> bool {
        if entry.name == b"." || entry.name == b".." {
            return false;
        }
        let has_error = wanted.contains(attributes::number::RDATTR_ERROR);
        if entry.file.is_none() && !has_error {
            return false;
        }
        out.bool(true);
        out.u64(entry.cookie);
        out.opaque(&entry.name);
        // What is mounted there is not shared, and what cannot be looked at cannot be told.
        let Some((file, attributes)) = &entry.file else {
            attributes::encode_error(out, Status::ACCESS);
            return true;
        };
        let handle = if wanted.contains(attributes::number::FILEHANDLE) {
            self.server.shares.handle(dir.share, file).to_vec()
        } else {
            Vec::new()
        };
        let fsid = fsid(dir, attributes);
        let described = self.describe(attributes, fsid, attributes.number_in_parent, &handle, Usage::default());
        attributes::encode(out, wanted, &described);
        true
    }

    /// The shares.
    async fn list_root(&self, cookie: u64, bytes: usize, wanted: &Bitmap, out: &mut Encoder) -> Done {
        /// Cookies of the shares begin behind those that are reserved.
        const FIRST: usize = 3;
        let begin = (cookie as usize).saturating_sub(FIRST - 1);
        let (mut used, mut is_end, mut is_first) = (16, true, true);
        for (at, share) in self.server.shares.iter().enumerate().skip(begin) {
            let entered = share.enter(share.files.root(), self.call);
            if matches!(entered, Err(HandleError::NotAllowed)) {
                continue;
            }
            let (mark, before) = (out.mark(), out.len());
            out.bool(true);
            out.u64((at + FIRST) as u64);
            out.opaque(share.name.as_bytes());
            // A share whose directory cannot be looked at does not hide the others.
            let described = match entered {
                Ok(target) => self.put_attributes(out, &Object::File(target), wanted).await,
                Err(error) => Err(error.into()),
            };
            if let Err(failure) = described {
                attributes::encode_error(out, failure.status);
            }
            used += out.len() - before;
            if used > bytes {
                out.truncate(mark);
                if is_first {
                    return Err(Status::TOOSMALL.into());
                }
                is_end = false;
                break;
            }
            is_first = false;
        }
        out.bool(false);
        out.bool(is_end);
        Ok(())
    }

    pub(super) async fn read_link(&mut self, out: &mut Encoder) -> Done {
        let wrong_type = if self.minor == 0 { Status::INVAL } else { Status::WRONG_TYPE };
        let Object::File(target) = self.object()? else { return Err(wrong_type.into()) };
        let to = target.share.files.read_link(&target.file).await;
        let to = to.map_err(|error| if error == Errno::INVAL { wrong_type } else { error.into() })?;
        out.bulk(Body::Bytes(to));
        Ok(())
    }

    pub(super) async fn create(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let what = match d.u32()? {
            2 => Make::Directory,
            number @ (3 | 4) => {
                let kind = if number == 3 { Kind::BlockDevice } else { Kind::CharacterDevice };
                Make::Special(kind, d.u32()?, d.u32()?)
            }
            5 => Make::SymbolicLink(match d.bulk(LINK_MAX)? {
                Bulk::Inline(bytes) => bytes.to_vec(),
                Bulk::Segment(segment) => segment.as_slice().to_vec(),
            }),
            6 => Make::Special(Kind::Socket, 0, 0),
            7 => Make::Special(Kind::Fifo, 0, 0),
            _ => return Err(Status::BADTYPE.into()),
        };
        if matches!(&what, Make::SymbolicLink(to) if to.is_empty()) {
            return Err(Status::INVAL.into());
        }
        let name = get_name(d)?;
        let wanted = self.get_wanted(d).await?;
        // A directory, a device or a link has no size that could be set.
        if wanted.set.size.is_some() {
            return Err(Status::INVAL.into());
        }
        let dir = self.writable()?.clone();
        let before = dir.attributes().await;
        let (file, _) = dir.share.files.make(&dir.who, &dir.file, name, what, wanted.set).await?;
        put_change_info(out, before.as_ref(), dir.attributes().await.as_ref());
        wanted.which.encode(out);
        self.set_current(Object::File(Target { file, ..dir }))
    }

    /// In the grace period no name goes: it may be that of a file that a client is still to reclaim, which has no other.
    fn check_grace(&self) -> Result<(), Status> {
        if self.server.state(|state, now| state.is_grace(now)) { Err(Status::GRACE) } else { Ok(()) }
    }

    pub(super) async fn remove(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let name = get_name(d)?;
        let dir = self.writable()?;
        self.check_grace()?;
        let _change = dir.change_entry(name).await?;
        let before = dir.attributes().await;
        let files = &dir.share.files;
        // Version 4 removes files and directories alike.
        match files.remove(&dir.who, &dir.file, name, false).await {
            Err(Errno::ISDIR) => files.remove(&dir.who, &dir.file, name, true).await?,
            done => done?,
        }
        put_change_info(out, before.as_ref(), dir.attributes().await.as_ref());
        Ok(())
    }

    pub(super) async fn rename(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (old, new) = (get_name(d)?, get_name(d)?);
        let (from, to) = self.saved_and_current()?;
        self.writable()?;
        self.check_grace()?;
        let _changes = (from.change_entry(old).await?, to.change_entry(new).await?);
        let (from_before, to_before) = (from.attributes().await, to.attributes().await);
        let is_directory = |about: &Option<Attributes>| about.is_some_and(|about| about.kind == Kind::Directory);
        let in_directories = is_directory(&from_before) && is_directory(&to_before);
        let renamed = from.share.files.rename(&from.who, (&from.file, old), (&to.file, new)).await;
        renamed.map_err(|error| match error {
            // The entry with the new name is of another type, or is not an empty directory (RFC 8881, section 18.26.3).
            Errno::ISDIR | Errno::NOTEMPTY => Errno::EXIST,
            Errno::NOTDIR if in_directories => Errno::EXIST,
            error => error,
        })?;
        put_change_info(out, from_before.as_ref(), from.attributes().await.as_ref());
        put_change_info(out, to_before.as_ref(), to.attributes().await.as_ref());
        Ok(())
    }

    pub(super) async fn link(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let name = get_name(d)?;
        let (file, dir) = self.saved_and_current()?;
        self.writable()?;
        if file.attributes().await.is_some_and(|attributes| attributes.kind == Kind::Directory) {
            return Err(Status::ISDIR.into());
        }
        let _change = file.change(None).await?;
        let before = dir.attributes().await;
        file.share.files.link(&file.who, &file.file, &dir.file, name).await?;
        put_change_info(out, before.as_ref(), dir.attributes().await.as_ref());
        Ok(())
    }
}
