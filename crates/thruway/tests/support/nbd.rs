//! A client of NBD that does one thing at a time.

use std::io::{self, Read, Write};
use std::net::TcpStream;

/// A connection in transmission, with simple replies.
pub(crate) struct Nbd(TcpStream);

/// NBD_EPERM, NBD_EIO, NBD_ENOSPC.
const STORAGE_ERRORS: [u32; 3] = [1, 5, 28];

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
#[allow(dead_code)]
pub(crate) const FLUSH: u16 = 3;
#[allow(dead_code)]
pub(crate) const ZEROES: u16 = 6;
#[allow(dead_code)]
pub(crate) const FUA: u16 = 1;

impl Nbd {
    pub(crate) fn connect(address: &str, export: &str) -> io::Result<Nbd> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.read_exact(&mut [0; 18])?;
        let go = [&(export.len() as u32).to_be_bytes()[..], export.as_bytes(), &[0, 0]].concat();
        let header =
            [&3u32.to_be_bytes()[..], b"IHAVEOPT", &7u32.to_be_bytes(), &(go.len() as u32).to_be_bytes()].concat();
        stream.write_all(&[header, go].concat())?;
        loop {
            let mut reply = [0; 20];
            stream.read_exact(&mut reply)?;
            let (kind, len) = (&reply[12..16], u32::from_be_bytes(reply[16..].try_into().unwrap()));
            stream.read_exact(&mut vec![0; len as usize])?;
            if kind == 1u32.to_be_bytes() {
                return Ok(Nbd(stream));
            }
            assert!(kind[0] < 0x80, "the export is refused");
        }
    }

    /// The connection.
    #[allow(dead_code)]
    pub(crate) fn into_stream(self) -> TcpStream {
        self.0
    }

    pub(crate) fn send(&mut self, command: (u16, u16), at: u64, len: u32, data: &[u8]) -> io::Result<()> {
        self.send_many(1, command, at, len, data)
    }

    /// Nothing more will come from here.
    #[allow(dead_code)]
    pub(crate) fn half_close(&self) {
        self.0.shutdown(std::net::Shutdown::Write).unwrap();
    }

    /// The same request many times, all at once.
    pub(crate) fn send_many(
        &mut self,
        count: usize,
        (flags, command): (u16, u16),
        at: u64,
        len: u32,
        data: &[u8],
    ) -> io::Result<()> {
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend([flags.to_be_bytes(), command.to_be_bytes()].concat());
        request.extend([7u64.to_be_bytes(), at.to_be_bytes()].concat());
        request.extend(len.to_be_bytes());
        request.extend(data);
        self.0.write_all(&request.repeat(count))
    }

    /// The daemon's answer: what was read, or `None` if the storage has failed.
    pub(crate) fn ask(&mut self, command: (u16, u16), at: u64, len: u32, data: &[u8]) -> io::Result<Option<Vec<u8>>> {
        self.send(command, at, len, data)?;
        if !self.answer()? {
            return Ok(None);
        }
        let mut found = vec![0; if command.1 == READ { len as usize } else { 0 }];
        self.0.read_exact(&mut found)?;
        Ok(Some(found))
    }

    /// The beginning of an answer; false if the storage has failed.
    pub(crate) fn answer(&mut self) -> io::Result<bool> {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply)?;
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        if reply[4..8] != [0; 4] {
            let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
            assert!(STORAGE_ERRORS.contains(&error), "the storage has failed, not the request: {error}");
        }
        Ok(reply[4..8] == [0; 4])
    }
}
