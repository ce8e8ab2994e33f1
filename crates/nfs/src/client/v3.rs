//! Version 3 (RFC 1813).

use super::{ClientError, Handle, Result, UserCredential};
use crate::share::HANDLE_MAX;
use crate::v3::PROGRAM;
use thruway_rpc::client::{Arguments, Client, Procedure, Reply};
use thruway_rpc::xdr::{Decoder, Encoder};
use thruway_server::Body;

const LOOKUP: u32 = 3;
const GETATTR: u32 = 1;
const READ: u32 = 6;
const WRITE: u32 = 7;
const CREATE: u32 = 8;
const MKDIR: u32 = 9;
const REMOVE: u32 = 12;
const RMDIR: u32 = 13;
const COMMIT: u32 = 21;

/// Bytes of `fattr3`.
const ATTRIBUTES: usize = 84;

/// A client of version 3.
pub struct Nfs3Client {
    rpc: Client,
    user: UserCredential,
}

fn no_attributes(out: &mut Encoder, mode: Option<u32>) {
    out.option(mode, Encoder::u32);
    // Owner, group, size, and both times.
    (0..5).for_each(|_| out.u32(0));
}

fn skip_after(d: &mut Decoder<'_>) -> Result<()> {
    d.option(|d| d.fixed::<ATTRIBUTES>().map(drop))?;
    Ok(())
}

fn skip_change(d: &mut Decoder<'_>) -> Result<()> {
    // Size and two times.
    d.option(|d| d.fixed::<24>().map(drop))?;
    skip_after(d)
}

impl Nfs3Client {
    /// By this connection, as this user.
    pub fn new(rpc: Client, user: UserCredential) -> Nfs3Client {
        Nfs3Client { rpc, user }
    }

    async fn call(&self, procedure: u32, arguments: impl FnOnce(&mut Encoder)) -> Result<Reply> {
        self.call_for_data(procedure, 0, arguments).await
    }

    /// Calls a procedure whose results have data, at most so many bytes.
    async fn call_for_data(&self, procedure: u32, max: usize, arguments: impl FnOnce(&mut Encoder)) -> Result<Reply> {
        let mut bytes = Encoder::new();
        arguments(&mut bytes);
        let call = Arguments { bytes, item_max: max, reply_max: 0 };
        let procedure = Procedure { program: PROGRAM, version: 3, procedure };
        Ok(self.user.call(&self.rpc, procedure, call).await?)
    }

    /// The handle of a share's directory, from the mount program (which is asked by a connection of its own).
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn mount(mount: &Client, user: &UserCredential, share: &[u8]) -> Result<Handle> {
        const MNT: u32 = 1;
        let mut path = Encoder::new();
        path.opaque(share);
        let procedure = Procedure { program: crate::mount::PROGRAM, version: 3, procedure: MNT };
        let reply = user.call(mount, procedure, path).await?;
        let mut d = reply.results();
        status(&mut d, "MNT")?;
        Ok(d.opaque(HANDLE_MAX as u32)?.into())
    }

    /// The file with a name.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn look_up(&self, dir: &[u8], name: &[u8]) -> Result<Handle> {
        let reply = self.call(LOOKUP, |out| {
            out.opaque(dir);
            out.opaque(name);
        });
        let reply = reply.await?;
        let mut d = reply.results();
        status(&mut d, "LOOKUP")?;
        Ok(d.opaque(HANDLE_MAX as u32)?.into())
    }

    /// The size of a file.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn size(&self, file: &[u8]) -> Result<u64> {
        let reply = self.call(GETATTR, |out| out.opaque(file)).await?;
        let mut d = reply.results();
        status(&mut d, "GETATTR")?;
        // Behind type, mode, links, owner and group.
        d.fixed::<20>()?;
        Ok(d.u64()?)
    }

    /// Reads, and calls `each` with the data.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn read<T>(&self, file: &[u8], at: u64, len: u32, each: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let reply = self.call_for_data(READ, len as usize, |out| {
            out.opaque(file);
            out.u64(at);
            out.u32(len);
        });
        let reply = reply.await?;
        let mut d = reply.results();
        status(&mut d, "READ")?;
        skip_after(&mut d)?;
        let (_count, _is_end) = (d.u32()?, d.bool()?);
        Ok(each(d.bulk(len)?.as_slice()))
    }

    /// Writes; number of bytes that were written. Unless `is_stable`, they may be lost until COMMIT.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn write(&self, file: &[u8], at: u64, data: Body, is_stable: bool) -> Result<u32> {
        let reply = self.call(WRITE, |out| {
            out.opaque(file);
            out.u64(at);
            out.u32(data.len() as u32);
            out.u32(if is_stable { 2 } else { 0 });
            out.bulk(data);
        });
        let reply = reply.await?;
        let mut d = reply.results();
        status(&mut d, "WRITE")?;
        skip_change(&mut d)?;
        Ok(d.u32()?)
    }

    /// Brings what has been written to the medium.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn commit(&self, file: &[u8]) -> Result<()> {
        let reply = self.call(COMMIT, |out| {
            out.opaque(file);
            out.u64(0);
            out.u32(0);
        });
        status(&mut reply.await?.results(), "COMMIT")
    }

    /// Makes a file, if it is not there.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn create(&self, dir: &[u8], name: &[u8]) -> Result<Handle> {
        self.make(CREATE, dir, name, "CREATE").await
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn make_directory(&self, dir: &[u8], name: &[u8]) -> Result<Handle> {
        self.make(MKDIR, dir, name, "MKDIR").await
    }

    async fn make(&self, procedure: u32, dir: &[u8], name: &[u8], operation: &'static str) -> Result<Handle> {
        let reply = self.call(procedure, |out| {
            out.opaque(dir);
            out.opaque(name);
            if procedure == CREATE {
                // Unchecked.
                out.u32(0);
            }
            no_attributes(out, Some(if procedure == CREATE { 0o644 } else { 0o755 }));
        });
        let reply = reply.await?;
        let mut d = reply.results();
        status(&mut d, operation)?;
        match d.option(|d| d.opaque(HANDLE_MAX as u32).map(Handle::from))? {
            Some(handle) => Ok(handle),
            None => self.look_up(dir, name).await,
        }
    }

    /// Removes a file or a directory.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn remove(&self, dir: &[u8], name: &[u8], is_directory: bool) -> Result<()> {
        let reply = self.call(if is_directory { RMDIR } else { REMOVE }, |out| {
            out.opaque(dir);
            out.opaque(name);
        });
        status(&mut reply.await?.results(), if is_directory { "RMDIR" } else { "REMOVE" })
    }
}

fn status(d: &mut Decoder<'_>, operation: &'static str) -> Result<()> {
    match d.u32()? {
        0 => Ok(()),
        status => Err(ClientError::Status { operation, status }),
    }
}
