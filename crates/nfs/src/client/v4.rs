//! Version 4: listings in minor version 0, which need no session, and reading and writing in minor version 1.

use super::compound::{Compound, Results};
use super::{ClientError, Handle, Result, UserCredential};
use crate::state::session::OPERATIONS_MAX;
use crate::v4::{attributes::number, bitmap::Bitmap, op};
use std::cell::{Cell, RefCell};
use thruway_rpc::client::{Client, Reply};
use thruway_rpc::server::CALL_MAX;
use thruway_rpc::xdr::{Decoder, Encoder};
use thruway_server::Body;
use tokio::sync::Semaphore;

/// Most entries of a listing: some servers never end.
const ENTRIES_MAX: usize = 4 << 20;

/// Longest handle.
const HANDLE_MAX: u32 = 128;

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: Vec<u8>,
    /// Type and permissions, as `st_mode` has them.
    pub mode: u32,
    /// Bytes.
    pub size: u64,
    /// When its data was last changed: seconds since 1970, and nanoseconds.
    pub modified: (i64, u32),
}

/// As [`super::list`], by a connection that is there.
pub(super) async fn list(rpc: &Client, user: &UserCredential, path: &[Vec<u8>]) -> Result<Vec<Listed>> {
    const BYTES: u32 = 64 << 10;
    let wanted = Bitmap::of(&[number::TYPE, number::SIZE, number::MODE, number::TIME_MODIFY]);
    let mut compound = Compound::new().then(op::PUTROOTFH, |_| {});
    for name in path {
        compound = compound.then(op::LOOKUP, |out| out.opaque(name));
    }
    let compound = compound.then(op::GETFH, |_| {}).then(op::GETATTR, |out| wanted.encode(out));
    let reply = compound.call(rpc, 0, user).await?;
    let mut results = Results::of(&reply)?;
    results.next("PUTROOTFH")?;
    for _ in path {
        results.next("LOOKUP")?;
    }
    let dir: Handle = results.next("GETFH")?.opaque(HANDLE_MAX)?.into();
    let own = get_listed(results.next("GETATTR")?, path.last().cloned().unwrap_or_default())?;
    if own.mode & 0o170_000 != 0o040_000 {
        return Ok(vec![own]);
    }
    let (mut entries, mut cookie, mut verifier) = (Vec::new(), 0, [0; 8]);
    loop {
        let list = Compound::new().then(op::PUTFH, |out| out.opaque(&dir)).then(op::READDIR, |out| {
            out.u64(cookie);
            out.fixed(&verifier);
            out.u32(BYTES);
            out.u32(BYTES);
            wanted.encode(out);
        });
        let list = list.with_long_results(BYTES as usize + 1024);
        let reply = list.call(rpc, 0, user).await?;
        let mut results = Results::of(&reply)?;
        results.next("PUTFH")?;
        let d = results.next("READDIR")?;
        verifier = *d.fixed()?;
        let before = entries.len();
        while d.bool()? {
            cookie = d.u64()?;
            let name = d.opaque(4096)?.to_vec();
            entries.push(get_listed(d, name)?);
            if entries.len() > ENTRIES_MAX {
                return Err(ClientError::TooLong(ENTRIES_MAX));
            }
        }
        if d.bool()? || entries.len() == before {
            return Ok(entries);
        }
    }
}

/// `fattr4` with as much of what was asked for as there is.
fn get_listed(d: &mut Decoder<'_>, name: Vec<u8>) -> Result<Listed> {
    const TYPES: [u32; 8] = [0, 0o100_000, 0o040_000, 0o060_000, 0o020_000, 0o120_000, 0o140_000, 0o010_000];
    let which = Bitmap::decode(d)?;
    let mut values = Decoder::new(d.opaque(64 << 10)?);
    let mut listed = Listed { name, mode: 0, size: 0, modified: (0, 0) };
    for attribute in which.iter() {
        match attribute {
            number::TYPE => listed.mode |= TYPES.get(values.u32()? as usize).copied().unwrap_or(0),
            number::SIZE => listed.size = values.u64()?,
            number::MODE => listed.mode |= values.u32()? & 0o7777,
            number::TIME_MODIFY => listed.modified = (values.i64()?, values.u32()?),
            // What was not asked for; its length is not known.
            _ => break,
        }
    }
    Ok(listed)
}

/// A client of minor version 1, with a session.
pub struct Nfs4Client {
    rpc: Client,
    user: UserCredential,
    session: [u8; 16],
    /// The numbers of the last requests in slots that are free.
    free: RefCell<Vec<(u32, u32)>>,
    turns: Semaphore,
    client: u64,
    highest: u32,
    owner: Cell<u64>,
}

/// Gives a slot back.
struct Slot<'a> {
    of: &'a Nfs4Client,
    slot: u32,
    sequence: u32,
    _turn: tokio::sync::SemaphorePermit<'a>,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.of.free.borrow_mut().push((self.slot, self.sequence));
    }
}

impl Nfs4Client {
    /// Makes a client with a session of at most so many requests at a time, by this connection.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn new(rpc: Client, user: UserCredential, name: &[u8], requests: u32) -> Result<Nfs4Client> {
        let exchange = Compound::new().then(op::EXCHANGE_ID, |out| {
            out.fixed(&thruway_engine::random::random::<8>());
            out.opaque(name);
            // No flags, no protection of state, no name of an implementation.
            [0, 0, 0].into_iter().for_each(|word| out.u32(word));
        });
        let reply = exchange.call(&rpc, 1, &user).await?;
        let mut results = Results::of(&reply)?;
        let d = results.next("EXCHANGE_ID")?;
        let (client, sequence) = (d.u64()?, d.u32()?);
        let limits = |out: &mut Encoder, requests: u32| {
            let most = CALL_MAX as u32;
            [0, most, most, 4096, OPERATIONS_MAX, requests, 0].into_iter().for_each(|word| out.u32(word));
        };
        let create = Compound::new().then(op::CREATE_SESSION, |out| {
            out.u64(client);
            out.u32(sequence);
            out.u32(0);
            limits(out, requests);
            limits(out, 1);
            // A program for callbacks, by AUTH_NONE; there are none.
            [0x4000_0000, 1, 0].into_iter().for_each(|word| out.u32(word));
        });
        let reply = create.call(&rpc, 1, &user).await?;
        let mut results = Results::of(&reply)?;
        let d = results.next("CREATE_SESSION")?;
        let session = *d.fixed::<16>()?;
        let (_sequence, _flags) = (d.u32()?, d.u32()?);
        let (_padding, _request, _response, _cached, _operations, slots) =
            (d.u32()?, d.u32()?, d.u32()?, d.u32()?, d.u32()?, d.u32()?);
        let slots = slots.clamp(1, requests);
        let made = Nfs4Client {
            rpc,
            user,
            session,
            free: RefCell::new((0..slots).rev().map(|slot| (slot, 0)).collect()),
            turns: Semaphore::new(slots as usize),
            client,
            highest: slots - 1,
            owner: Cell::new(0),
        };
        made.complete().await?;
        Ok(made)
    }

    /// Says that there is nothing to be reclaimed from before.
    async fn complete(&self) -> Result<()> {
        let (reply, _slot) = self.call(Compound::new().then(op::RECLAIM_COMPLETE, |out| out.bool(false))).await?;
        self.results(&reply)?.next("RECLAIM_COMPLETE").map(drop)
    }

    /// Asks for operations in a slot.
    async fn call(&self, compound: Compound) -> Result<(Reply, Slot<'_>)> {
        let turn = self.turns.acquire().await.expect("never closed");
        let (slot, last) = self.free.borrow_mut().pop().expect("as many as there are turns");
        let slot = Slot { of: self, slot, sequence: last.wrapping_add(1), _turn: turn };
        let call = Compound::new().then(op::SEQUENCE, |out| {
            out.fixed(&self.session);
            [slot.sequence, slot.slot, self.highest, 0].into_iter().for_each(|word| out.u32(word));
        });
        let reply = call.and(compound).call(&self.rpc, 1, &self.user).await?;
        Ok((reply, slot))
    }

    /// The results behind SEQUENCE.
    fn results<'a>(&self, reply: &'a Reply) -> Result<Results<'a>> {
        let mut results = Results::of(reply)?;
        results.next("SEQUENCE")?.fixed::<36>()?;
        Ok(results)
    }

    /// The file at a path of names from the root of all shares on.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn find(&self, path: &[Vec<u8>]) -> Result<Handle> {
        let mut compound = Compound::new().then(op::PUTROOTFH, |_| {});
        for name in path {
            compound = compound.then(op::LOOKUP, |out| out.opaque(name));
        }
        let (reply, _slot) = self.call(compound.then(op::GETFH, |_| {})).await?;
        let mut results = self.results(&reply)?;
        results.next("PUTROOTFH")?;
        for _ in path {
            results.next("LOOKUP")?;
        }
        Ok(results.next("GETFH")?.opaque(HANDLE_MAX)?.into())
    }

    /// The file with a name.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn look_up(&self, dir: &[u8], name: &[u8]) -> Result<Handle> {
        let compound = at(dir).then(op::LOOKUP, |out| out.opaque(name)).then(op::GETFH, |_| {});
        let (reply, _slot) = self.call(compound).await?;
        let mut results = self.results(&reply)?;
        results.next("PUTFH")?;
        results.next("LOOKUP")?;
        Ok(results.next("GETFH")?.opaque(HANDLE_MAX)?.into())
    }

    /// The size of a file.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn size(&self, file: &[u8]) -> Result<u64> {
        let wanted = Bitmap::of(&[number::SIZE]);
        let (reply, _slot) = self.call(at(file).then(op::GETATTR, |out| wanted.encode(out))).await?;
        let mut results = self.results(&reply)?;
        results.next("PUTFH")?;
        Ok(get_listed(results.next("GETATTR")?, Vec::new())?.size)
    }

    /// Reads without having opened the file, and calls `each` with the data.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn read<T>(&self, file: &[u8], from: u64, len: u32, each: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let read = at(file).then(op::READ, |out| {
            out.fixed(&[0; 16]);
            out.u64(from);
            out.u32(len);
        });
        let read = read.with_data(len as usize);
        let (reply, _slot) = self.call(read).await?;
        let mut results = self.results(&reply)?;
        results.next("PUTFH")?;
        let d = results.next("READ")?;
        let _is_end = d.bool()?;
        Ok(each(d.bulk(len)?.as_slice()))
    }

    /// Writes without having opened the file; number of bytes that were written. Unless `is_stable`, they may be lost until COMMIT.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn write(&self, file: &[u8], from: u64, data: Body, is_stable: bool) -> Result<u32> {
        let write = at(file).then(op::WRITE, |out| {
            out.fixed(&[0; 16]);
            out.u64(from);
            out.u32(if is_stable { 2 } else { 0 });
            out.bulk(data);
        });
        let (reply, _slot) = self.call(write).await?;
        let mut results = self.results(&reply)?;
        results.next("PUTFH")?;
        Ok(results.next("WRITE")?.u32()?)
    }

    /// Brings what has been written to the medium.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn commit(&self, file: &[u8]) -> Result<()> {
        let commit = at(file).then(op::COMMIT, |out| {
            out.u64(0);
            out.u32(0);
        });
        let (reply, _slot) = self.call(commit).await?;
        let mut results = self.results(&reply)?;
        results.next("PUTFH")?;
        results.next("COMMIT").map(drop)
    }

    /// Makes a file, if it is not there, and closes it again.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn create(&self, dir: &[u8], name: &[u8]) -> Result<Handle> {
        /// Both reading and writing.
        const BOTH: u32 = 3;
        self.owner.set(self.owner.get() + 1);
        let mode = Bitmap::of(&[number::MODE]);
        let open = at(dir)
            .then(op::OPEN, |out| {
                [0, BOTH, 0].into_iter().for_each(|word| out.u32(word));
                out.u64(self.client);
                out.opaque(&self.owner.get().to_be_bytes());
                // It is made, unchecked, with these permissions; by its name.
                [1, 0].into_iter().for_each(|word| out.u32(word));
                mode.encode(out);
                out.opaque(&0o644_u32.to_be_bytes());
                out.u32(0);
                out.opaque(name);
            })
            .then(op::GETFH, |_| {});
        let (stateid, handle) = {
            let (reply, _slot) = self.call(open).await?;
            let mut results = self.results(&reply)?;
            results.next("PUTFH")?;
            let d = results.next("OPEN")?;
            let stateid = *d.fixed::<16>()?;
            // Change of the directory, flags, attributes that were set, and no delegation.
            let _ = (d.bool()?, d.u64()?, d.u64()?, d.u32()?, Bitmap::decode(d)?);
            match d.u32()? {
                0 => {}
                3 => drop(d.u32()?),
                _ => return Err(ClientError::Status { operation: "OPEN", status: 10_006 }),
            }
            (stateid, Handle::from(results.next("GETFH")?.opaque(HANDLE_MAX)?))
        };
        let close = at(&handle).then(op::CLOSE, |out| {
            out.u32(0);
            out.fixed(&stateid);
        });
        let (reply, _slot) = self.call(close).await?;
        let mut results = self.results(&reply)?;
        results.next("PUTFH")?;
        results.next("CLOSE")?;
        Ok(handle)
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn make_directory(&self, dir: &[u8], name: &[u8]) -> Result<Handle> {
        const DIRECTORY: u32 = 2;
        let make = at(dir)
            .then(op::CREATE, |out| {
                out.u32(DIRECTORY);
                out.opaque(name);
                Bitmap::of(&[number::MODE]).encode(out);
                out.opaque(&0o755_u32.to_be_bytes());
            })
            .then(op::GETFH, |_| {});
        let (reply, _slot) = self.call(make).await?;
        let mut results = self.results(&reply)?;
        results.next("PUTFH")?;
        let d = results.next("CREATE")?;
        let _ = (d.bool()?, d.u64()?, d.u64()?, Bitmap::decode(d)?);
        Ok(results.next("GETFH")?.opaque(HANDLE_MAX)?.into())
    }

    /// Removes a file or a directory.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn remove(&self, dir: &[u8], name: &[u8]) -> Result<()> {
        let (reply, _slot) = self.call(at(dir).then(op::REMOVE, |out| out.opaque(name))).await?;
        let mut results = self.results(&reply)?;
        results.next("PUTFH")?;
        results.next("REMOVE").map(drop)
    }

    /// Ends the session and the client.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn end(self) -> Result<()> {
        let destroy = Compound::new().then(op::DESTROY_SESSION, |out| out.fixed(&self.session));
        let reply = destroy.call(&self.rpc, 1, &self.user).await?;
        Results::of(&reply)?.next("DESTROY_SESSION")?;
        let destroy = Compound::new().then(op::DESTROY_CLIENTID, |out| out.u64(self.client));
        let reply = destroy.call(&self.rpc, 1, &self.user).await?;
        Results::of(&reply)?.next("DESTROY_CLIENTID").map(drop)
    }
}

/// A compound about this file.
fn at(file: &[u8]) -> Compound {
    Compound::new().then(op::PUTFH, |out| out.opaque(file))
}
