//! Operations on the data of files.

use super::compound::{Compound, Done, Failure, Object, user};
use super::name_ops::Access;
use crate::share::Target;
use crate::state::Stateid;
use crate::status::Status;
use rustix::io::Errno;
use thruway_engine::lent::Lent;
use thruway_engine::{Segment, Segments};
use thruway_rpc::server::BULK_MAX;
use thruway_rpc::xdr::{Bulk, Decoder, Encoder};
use thruway_server::Body;
use thruway_vfs::{Allocate, Attributes, Kind, Seek, Stability};

/// Most bytes of a READ that is not the first of its compound.
const FURTHER_READ_MAX: usize = 64 << 10;

/// A range that ends where positions in files can end.
pub(super) fn check_range(at: u64, len: u64) -> Done {
    if at.checked_add(len).is_none_or(|end| end > i64::MAX as u64) { Err(Status::FBIG.into()) } else { Ok(()) }
}

impl Compound<'_> {
    /// Replaces the error of an operation on data by that of the file's type. Version 4.0 has one error for all types without data
    /// (RFC 7530, section 16.23.4). Later versions have another one for symbolic links (RFC 8881, section 18.22.3).
    pub(super) async fn of_data(&self, done: Done) -> Done {
        let kind = match (&done, self.object()) {
            (Err(Failure { status: Status::INVAL, .. }), Ok(Object::File(target))) if self.minor > 0 => {
                target.attributes().await.map(|attributes| attributes.kind)
            }
            _ => None,
        };
        match kind {
            Some(Kind::SymbolicLink) => Err(Status::SYMLINK.into()),
            Some(Kind::Regular | Kind::Directory) | None => done,
            Some(_) => Err(Status::WRONG_TYPE.into()),
        }
    }

    /// Attributes of a regular file. Other types fail with the error of their type (RFC 8881, section 18.22.3; RFC 7530, section 16.23.4).
    pub(super) async fn regular(&self, target: &Target<'_>) -> Done<Attributes> {
        let attributes = target.share.files.attributes(&target.file).await?;
        Err(match (attributes.kind, self.minor) {
            (Kind::Regular, _) => return Ok(attributes),
            (Kind::Directory, _) => Status::ISDIR,
            (_, 0) => Status::INVAL,
            (Kind::SymbolicLink, _) => Status::SYMLINK,
            _ => Status::WRONG_TYPE,
        }
        .into())
    }

    /// Memory of the connection, if the compound has none of it yet: none waits for what another has.
    async fn memory(&self, len: usize) -> Done<Segment> {
        if self.reads == 0 {
            return Ok(self.call.connection.buffers.segment(len).await.map_err(|_| Status::DELAY)?);
        }
        let own = Segments::new(1, len.max(1).next_multiple_of(4096)).map_err(|_| Status::DELAY)?;
        Ok(own.reserve(1).await.segment(len))
    }

    pub(super) async fn read(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (stateid, at, len) = (self.get_stateid(d)?, d.u64()?, d.u32()?);
        let target = self.target()?;
        let access = self.is_open(target, stateid, false).await?;
        let user = user(target, access.is_open);
        // Pages cannot be kept for a call that is repeated.
        let pipes = self.call.pipes().filter(|_| self.reads == 0 && !self.is_kept());
        if let Some(pipes) = pipes
            && let Some(lent) =
                target.share.files.lend(user, &target.file, at, (len as usize).min(BULK_MAX), pipes).await?
        {
            out.bool(lent.is_end);
            out.bulk(Body::Lent(Lent::Piped(lent.pages)));
            self.reads += 1;
            return Ok(());
        }
        let most = if self.reads == 0 { BULK_MAX } else { FURTHER_READ_MAX };
        let segment = self.memory((len as usize).min(most)).await?;
        let read = target.share.files.read(user, &target.file, at, segment).await?;
        out.bool(read.is_end);
        out.bulk(match self.reads {
            0 => Body::Segments([read.segment].into_iter().collect()),
            _ => Body::Bytes(read.segment.as_slice().to_vec()),
        });
        self.reads += 1;
        Ok(())
    }

    pub(super) async fn write(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (stateid, at, stable) = (self.get_stateid(d)?, d.u64()?, d.u32()?);
        let data = d.bulk(BULK_MAX as u32)?;
        let stability = match stable {
            0 => Stability::Unstable,
            1 => Stability::Data,
            2 => Stability::File,
            _ => return Err(Status::BADXDR.into()),
        };
        let len = data.len();
        let target = self.writable()?;
        let access = self.is_open(target, stateid, true).await?;
        check_range(at, len as u64)?;
        let segment = match data {
            Bulk::Segment(segment) => segment,
            Bulk::Inline(bytes) => {
                let mut segment = self.memory(bytes.len()).await?;
                segment.as_mut_slice().copy_from_slice(bytes);
                segment
            }
        };
        let files = &target.share.files;
        // Before the write: if it changes meanwhile, the client writes once too often.
        let verifier = files.write_verifier();
        files.write(user(target, access.is_open), &target.file, at, segment, stability).await?;
        out.u32(len as u32);
        out.u32(if stability == Stability::Unstable { 0 } else { 2 });
        out.u64(verifier);
        Ok(())
    }

    pub(super) async fn commit(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (_at, _len) = (d.u64()?, d.u32()?);
        // The root has the error of a directory.
        self.target()?;
        let target = self.writable()?;
        let files = &target.share.files;
        files.flush(&target.file).await?;
        // After the flush: what it may have lost the client is to write again.
        out.u64(files.write_verifier());
        Ok(())
    }

    pub(super) async fn seek(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (stateid, at, what) = (self.get_stateid(d)?, d.u64()?, d.u32()?);
        let what = match what {
            0 => Seek::Data,
            1 => Seek::Hole,
            _ => return Err(Status::UNION_NOTSUPP.into()),
        };
        let target = self.target()?;
        let access = self.is_open(target, stateid, false).await?;
        let (files, user) = (&target.share.files, user(target, access.is_open));
        let size = self.regular(target).await?.size;
        if at >= size {
            return Err(Errno::NXIO.into());
        }
        match files.seek(user, &target.file, at, what).await {
            Ok(found) => {
                out.bool(found >= size);
                out.u64(found);
            }
            // There is no more data.
            Err(Errno::NXIO) if what == Seek::Data => {
                out.bool(true);
                out.u64(size);
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    pub(super) async fn allocate(&mut self, d: &mut Decoder<'_>, is_reserved: bool) -> Done {
        let (stateid, at, len) = (self.get_stateid(d)?, d.u64()?, d.u64()?);
        let target = self.writable()?;
        let access = self.is_open(target, stateid, true).await?;
        self.regular(target).await?;
        check_range(at, len)?;
        if len == 0 {
            return Err(Status::INVAL.into());
        }
        let what = if is_reserved { Allocate::Reserve } else { Allocate::Punch };
        Ok(target.share.files.allocate(user(target, access.is_open), &target.file, at, len, what).await?)
    }

    /// The saved file, open for reading, and the current one, open for writing. Returns both, the size of the saved file, and the
    /// access to both. Fails with `NFS4ERR_WRONG_TYPE` unless both are regular files (RFC 7862, sections 15.2.3 and 15.13.3).
    pub(super) async fn source_and_target(
        &self,
        from: Stateid,
        to: Stateid,
    ) -> Done<(&Target<'_>, &Target<'_>, u64, [Access; 2])> {
        let (source, target) = self.saved_and_current()?;
        self.writable()?;
        let can_read = self.is_open(source, from, false).await?;
        let can_write = self.is_open(target, to, true).await?;
        let files = &target.share.files;
        let (from, to) = (files.attributes(&source.file).await?, files.attributes(&target.file).await?);
        if [from.kind, to.kind] != [Kind::Regular; 2] {
            return Err(Status::WRONG_TYPE.into());
        }
        Ok((source, target, from.size, [can_read, can_write]))
    }

    pub(super) async fn clone_range(&mut self, d: &mut Decoder<'_>) -> Done {
        let (from, to) = (self.get_stateid(d)?, self.get_stateid(d)?);
        let (from_at, to_at, len) = (d.u64()?, d.u64()?, d.u64()?);
        let (source, target, size, access) = self.source_and_target(from, to).await?;
        let user = user(target, access.iter().all(|access| access.is_open));
        let files = &target.share.files;
        if from_at > size || len > size - from_at {
            return Err(Status::INVAL.into());
        }
        let len = if len == 0 { size - from_at } else { len };
        if len > 0 {
            files.copy(user, (&source.file, from_at), (&target.file, to_at), len, true).await?;
        }
        Ok(())
    }

    /// Hints about what will be read and written; none is followed.
    pub(super) async fn advise(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (stateid, _, _) = (self.get_stateid(d)?, d.u64()?, d.u64()?);
        super::bitmap::Bitmap::decode(d)?;
        self.is_open(self.target()?, stateid, false).await?;
        super::bitmap::Bitmap::default().encode(out);
        Ok(())
    }
}
