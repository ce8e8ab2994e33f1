//! A file system of one's own, served by NFS to the user that this runs as: a directory with one file, which says how often it has
//! been read. `custom_file_system`, then `nfs-cat 'nfs://127.0.0.1/counter/reads?nfsport=PORT&mountport=PORT'` (libnfs), or
//! `thruway ls nfs://127.0.0.1:PORT/counter`.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use thruway_engine::{Reactors, Segment};
use thruway_nfs::delegations::Delegate;
use thruway_nfs::mount::Mount;
use thruway_nfs::share::{Policy, Share, Shares};
use thruway_nfs::v3::Nfs3;
use thruway_nfs::v4::{self, Nfs4};
use thruway_rpc::server::{Config, Program, Programs, Server};
use thruway_vfs::{
    As, Attributes, Credentials, Entry, Errno, FileId, FileSystem, Kind, Listing, Make, Op, OpenGuard, ReadData,
    Result, Rights, Room, SetAttributes, Stability, Time, Usage,
};

const ROOT: u8 = 1;
const FILE: u8 = 2;
const NAME: &[u8] = b"reads";

/// The file system. Its files are called by one byte.
#[derive(Default)]
struct Counter {
    reads: AtomicU64,
}

fn id(file: u8) -> FileId {
    FileId([file].as_slice().into())
}

/// Nothing here waits.
fn ready<'a, T: 'a>(result: Result<T>) -> Op<'a, T> {
    Box::pin(std::future::ready(result))
}

/// Nothing can be changed.
fn read_only<'a, T: 'a>() -> Op<'a, T> {
    ready(Err(Errno::ROFS))
}

impl Counter {
    fn text(&self) -> String {
        format!("read {} times\n", self.reads.load(Ordering::Relaxed))
    }

    fn about(&self, file: &FileId) -> Result<Attributes> {
        let (number, kind, mode, size) = match *file.0 {
            [ROOT] => (ROOT, Kind::Directory, 0o555, 4096),
            [FILE] => (FILE, Kind::Regular, 0o444, self.text().len() as u64),
            // Clients keep handles for years.
            _ => return Err(Errno::STALE),
        };
        let change = if number == FILE { self.reads.load(Ordering::Relaxed) } else { 0 };
        let changed = Time { seconds: change as i64, nanoseconds: 0 };
        Ok(Attributes {
            kind,
            mode,
            links: 1,
            uid: 0,
            gid: 0,
            size,
            used: size,
            device: (0, 0),
            fsid: self.fsid(),
            subvolume: 0,
            number: number.into(),
            number_in_parent: number.into(),
            accessed: changed,
            modified: changed,
            changed,
            change,
        })
    }

    fn check_directory(&self, dir: &FileId) -> Result<()> {
        if self.about(dir)?.kind == Kind::Directory { Ok(()) } else { Err(Errno::NOTDIR) }
    }
}

impl FileSystem for Counter {
    fn root(&self) -> FileId {
        id(ROOT)
    }

    fn fsid(&self) -> u64 {
        0x0063_6f75_6e74_6572
    }

    fn attributes<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes> {
        ready(self.about(file))
    }

    fn look_up<'a>(&'a self, _: &'a Credentials, dir: &'a FileId, name: &'a [u8]) -> Op<'a, (FileId, Attributes)> {
        ready(self.check_directory(dir).and_then(|()| {
            let found = match name {
                b"." | b".." => id(ROOT),
                NAME => id(FILE),
                _ if name.is_empty() || name.contains(&b'/') || name.contains(&0) => return Err(Errno::INVAL),
                _ if name.len() > 255 => return Err(Errno::NAMETOOLONG),
                _ => return Err(Errno::NOENT),
            };
            Ok((found.clone(), self.about(&found)?))
        }))
    }

    fn rights<'a>(&'a self, _: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (Rights, Attributes)> {
        ready(self.about(file).map(|about| {
            let execute = wanted.execute && about.kind == Kind::Directory;
            (Rights { read: wanted.read, write: false, execute }, about)
        }))
    }

    fn read_link<'a>(&'a self, file: &'a FileId) -> Op<'a, Vec<u8>> {
        ready(self.about(file).and(Err(Errno::INVAL)))
    }

    fn open<'a>(&'a self, _: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (OpenGuard, Attributes)> {
        ready(self.about(file).and_then(|about| match about.kind {
            Kind::Directory => Err(Errno::ISDIR),
            _ if wanted.write => Err(Errno::ROFS),
            _ => Ok((Arc::new(()) as OpenGuard, about)),
        }))
    }

    fn read<'a>(&'a self, _: As<'a>, file: &'a FileId, at: u64, mut segment: Segment) -> Op<'a, ReadData> {
        ready(self.about(file).and_then(|about| {
            if about.kind == Kind::Directory {
                return Err(Errno::ISDIR);
            }
            let text = self.text();
            let from = usize::try_from(at).unwrap_or(usize::MAX).min(text.len());
            let rest = &text.as_bytes()[from..];
            let len = rest.len().min(segment.len());
            drop(segment.split_off(len));
            segment.as_mut_slice().copy_from_slice(&rest[..len]);
            if at == 0 {
                self.reads.fetch_add(1, Ordering::Relaxed);
            }
            Ok(ReadData { segment, is_end: len == rest.len(), attributes: Some(about) })
        }))
    }

    fn list<'a>(
        &'a self,
        _: &'a Credentials,
        dir: &'a FileId,
        cookie: u64,
        _: Room,
        with_files: bool,
    ) -> Op<'a, Listing> {
        ready(self.check_directory(dir).and_then(|()| {
            let entries = [(1, &b"."[..], ROOT), (2, b"..", ROOT), (3, NAME, FILE)];
            let behind = entries.into_iter().filter(|(place, ..)| *place > cookie);
            let entry = |(cookie, name, file): (u64, &[u8], u8)| {
                let found = if with_files { Some((id(file), self.about(&id(file))?)) } else { None };
                Ok(Entry { name: name.to_vec(), number: file.into(), cookie, file: found })
            };
            Ok(Listing { entries: behind.map(entry).collect::<Result<_>>()?, is_end: true })
        }))
    }

    fn usage(&self) -> Op<'_, Usage> {
        ready(Ok(Usage::default()))
    }

    fn set_attributes<'a>(&'a self, _: As<'a>, _: &'a FileId, _: SetAttributes, _: Option<Time>) -> Op<'a, Attributes> {
        read_only()
    }

    fn write<'a>(&'a self, _: As<'a>, _: &'a FileId, _: u64, _: Segment, _: Stability) -> Op<'a, Attributes> {
        read_only()
    }

    fn flush<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes> {
        ready(self.about(file))
    }

    fn write_verifier(&self) -> u64 {
        0
    }

    fn make<'a>(
        &'a self,
        _: &'a Credentials,
        _: &'a FileId,
        _: &'a [u8],
        _: Make,
        _: SetAttributes,
    ) -> Op<'a, (FileId, Attributes)> {
        read_only()
    }

    fn remove<'a>(&'a self, _: &'a Credentials, _: &'a FileId, _: &'a [u8], _: bool) -> Op<'a, ()> {
        read_only()
    }

    fn rename<'a>(&'a self, _: &'a Credentials, _: (&'a FileId, &'a [u8]), _: (&'a FileId, &'a [u8])) -> Op<'a, ()> {
        read_only()
    }

    fn link<'a>(&'a self, _: &'a Credentials, _: &'a FileId, _: &'a FileId, _: &'a [u8]) -> Op<'a, ()> {
        read_only()
    }
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let policy = Policy { read_only: true, ..Policy::default() };
    let share = Share::new("counter", Box::new(Counter::default()), policy, Delegate::Nothing);
    // Another key makes handles stale; a server that is to be started again keeps it.
    let shares = Shares::new(vec![share], thruway_engine::random::random());
    let shares = Arc::new(shares.map_err(|_| "one share cannot be taken for another")?);
    let v4 = v4::Config { lease: Duration::from_secs(90), state_file: None, had_clients: false };
    let programs = Programs::new([
        Arc::new(Nfs3::new(Arc::clone(&shares))) as Arc<dyn Program>,
        Arc::new(Nfs4::new(Arc::clone(&shares), v4)?),
        Arc::new(Mount::new(shares)),
    ]);
    let reactors = Reactors::start(None)?;
    let config = Config {
        protocol: "NFS",
        listen: vec!["127.0.0.1:0".parse()?],
        programs,
        tls: None,
        tls_required: false,
        own_user_only: true,
        connections_max: 16,
    };
    let server = Server::start(config, &reactors)?;
    for address in server.addresses() {
        println!("{address}");
    }
    loop {
        std::thread::park();
    }
}
