//! An initiator that does as little as it can.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// An initiator session ID (ISID) that is unique in this process.
#[allow(dead_code)]
pub(crate) fn next_isid() -> u8 {
    static NEXT: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// A session with the only unit of a target, by one connection.
pub(crate) struct Initiator {
    stream: TcpStream,
    tag: u32,
    has_digests: bool,
}

impl Initiator {
    /// Logs in. What tells it from others is `isid`.
    pub(crate) fn log_in(address: &str, target: &str, isid: u8) -> Initiator {
        Initiator::log_in_with(address, target, isid, "")
    }

    /// The same, with more keys.
    pub(crate) fn log_in_with(address: &str, target: &str, isid: u8, more: &str) -> Initiator {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        let keys =
            format!("InitiatorName=iqn.2026-11.org.example:{isid}\0SessionType=Normal\0TargetName={target}\0{more}");
        let mut login = [&[0x43, 0x87, 0, 0, 0, 0, 0, keys.len() as u8][..], &[0; 40]].concat();
        login[13] = isid;
        login.extend(keys.as_bytes());
        login.resize(login.len().next_multiple_of(4), 0);
        let mut initiator = Initiator { stream, tag: 0, has_digests: false };
        initiator.stream.write_all(&login).unwrap();
        let (header, _) = initiator.receive().unwrap();
        assert_eq!((header[0], header[1] & 3, &header[36..38]), (0x23, 3, &[0, 0][..]), "{header:?}");
        initiator.has_digests = more.contains("DataDigest=CRC32C");
        // The first command is told that the unit is new to it.
        initiator.send([0; 6].into(), &[]).unwrap();
        initiator.status().unwrap();
        initiator
    }

    /// Logs in to a discovery session and stays; `None` if it is not let in for long.
    pub(crate) fn ask_for_names(address: &str) -> Option<TcpStream> {
        let mut stream = TcpStream::connect(address).unwrap();
        let keys = "InitiatorName=iqn.2026-11.org.example:asks\0SessionType=Discovery\0";
        let mut login = [&[0x43, 0x87, 0, 0, 0, 0, 0, keys.len() as u8][..], &[0; 40]].concat();
        login.extend(keys.as_bytes());
        login.resize(login.len().next_multiple_of(4), 0);
        stream.write_all(&login).ok()?;
        let mut header = [0; 48];
        stream.read_exact(&mut header).ok()?;
        assert_eq!((header[0], header[1] & 3, &header[36..38]), (0x23, 3, &[0, 0][..]), "{header:?}");
        Some(stream)
    }

    /// Returns the TCP connection of the session.
    #[allow(dead_code)]
    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Sends TEST UNIT READY, and returns its status.
    #[allow(dead_code)]
    pub(crate) fn test_unit_ready(&mut self) -> io::Result<u8> {
        self.send([0; 6].into(), &[])?;
        self.status()
    }

    fn receive(&mut self) -> io::Result<([u8; 48], Vec<u8>)> {
        let mut header = [0; 48];
        self.stream.read_exact(&mut header)?;
        let len = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
        let digest = if self.has_digests && len > 0 { 4 } else { 0 };
        let mut data = vec![0; len.next_multiple_of(4) + digest];
        self.stream.read_exact(&mut data)?;
        data.truncate(len);
        Ok((header, data))
    }

    /// A command beside the line, with its data at once.
    fn send(&mut self, cdb: Vec<u8>, data: &[u8]) -> io::Result<()> {
        self.tag += 1;
        let mut header = [0; 48];
        (header[0], header[1]) = (0x41, if data.is_empty() { 0x80 } else { 0xa0 });
        header[5..8].copy_from_slice(&(data.len() as u32).to_be_bytes()[1..]);
        header[16..20].copy_from_slice(&self.tag.to_be_bytes());
        header[20..24].copy_from_slice(&(data.len() as u32).to_be_bytes());
        header[32..32 + cdb.len()].copy_from_slice(&cdb);
        self.stream.write_all(&[&header[..], data].concat())
    }

    /// WRITE (10) of one block of 512 bytes.
    pub(crate) fn send_write(&mut self, block: u8, data: &[u8; 512]) -> io::Result<()> {
        self.send(vec![0x2a, 0, 0, 0, 0, block, 0, 0, 1, 0], data)
    }

    /// WRITE (10) of the first block, said to be a command that reads.
    pub(crate) fn send_write_as_read(&mut self) -> io::Result<()> {
        self.tag += 1;
        let mut header = [0; 48];
        (header[0], header[1]) = (0x41, 0xc0);
        header[16..20].copy_from_slice(&self.tag.to_be_bytes());
        header[20..24].copy_from_slice(&512u32.to_be_bytes());
        (header[32], header[40]) = (0x2a, 1);
        self.stream.write_all(&header)
    }

    /// VERIFY (16) of blocks from the first, whether each is zeroes.
    pub(crate) fn send_verify_same(&mut self, blocks: u64) -> io::Result<()> {
        let mut cdb = vec![0x8f, 0x06, 0, 0, 0, 0, 0, 0, 0, 0];
        cdb.extend((blocks as u32).to_be_bytes());
        self.send(cdb, &[0; 512])
    }

    /// GET LBA STATUS from the first block on, with room for so many descriptors; how many there are in the answer.
    #[allow(dead_code)]
    pub(crate) fn lba_status(&mut self, room: u32) -> io::Result<u32> {
        self.tag += 1;
        let (mut header, len) = ([0; 48], (8 + 16 * room).to_be_bytes());
        (header[0], header[1]) = (0x41, 0xc0);
        header[16..20].copy_from_slice(&self.tag.to_be_bytes());
        header[20..24].copy_from_slice(&len);
        (header[32], header[33]) = (0x9e, 0x12);
        header[42..46].copy_from_slice(&len);
        self.stream.write_all(&header)?;
        let (answer, data) = self.receive()?;
        assert_eq!((answer[0], answer[3]), (0x25, 0), "data with the status of success");
        Ok((data.len() as u32 - 8) / 16)
    }

    /// LOGICAL UNIT RESET; what comes of it.
    pub(crate) fn reset(&mut self) -> io::Result<u8> {
        self.manage(5)
    }

    /// A task management function; the response to it.
    pub(crate) fn manage(&mut self, function: u8) -> io::Result<u8> {
        self.tag += 1;
        let mut header = [0; 48];
        (header[0], header[1]) = (0x42, 0x80 | function);
        header[16..20].copy_from_slice(&self.tag.to_be_bytes());
        self.stream.write_all(&header)?;
        loop {
            let (answer, _) = self.receive()?;
            if answer[0] == 0x22 {
                return Ok(answer[2]);
            }
        }
    }

    /// WRITE (10) of so many blocks from the first; the tag by which the target asks for their data.
    pub(crate) fn begin_write(&mut self, blocks: u8) -> io::Result<[u8; 4]> {
        self.tag += 1;
        let mut header = [0; 48];
        (header[0], header[1]) = (0x41, 0xa0);
        header[16..20].copy_from_slice(&self.tag.to_be_bytes());
        header[20..24].copy_from_slice(&(u32::from(blocks) * 512).to_be_bytes());
        (header[32], header[40]) = (0x2a, blocks);
        self.stream.write_all(&header)?;
        let (asked, _) = self.receive()?;
        assert_eq!(asked[0], 0x31, "data is asked for");
        assert_eq!(asked[44..48], (u32::from(blocks) * 512).to_be_bytes(), "all of it");
        Ok(asked[20..24].try_into().unwrap())
    }

    /// The beginning of the data that was asked for, all in one, and how much of it.
    pub(crate) fn begin_data(&mut self, asked: [u8; 4], data: &[u8], now: usize) -> io::Result<()> {
        let mut header = [0; 48];
        (header[0], header[1]) = (0x05, 0x80);
        header[5..8].copy_from_slice(&(data.len() as u32).to_be_bytes()[1..]);
        header[16..20].copy_from_slice(&self.tag.to_be_bytes());
        header[20..24].copy_from_slice(&asked);
        self.stream.write_all(&[&header[..], &data[..now]].concat())
    }

    /// More of what was begun.
    pub(crate) fn more(&mut self, data: &[u8]) -> io::Result<()> {
        self.stream.write_all(data)
    }

    /// The status of a command: of the next that is over.
    pub(crate) fn status(&mut self) -> io::Result<u8> {
        loop {
            let (header, _) = self.receive()?;
            if header[0] == 0x21 {
                return Ok(header[3]);
            }
        }
    }

    /// Nothing more will come from here; the target's system knows it when this returns.
    pub(crate) fn half_close(&self) {
        self.stream.shutdown(std::net::Shutdown::Write).unwrap();
        loop {
            let mut unacknowledged: libc::c_int = 0;
            // SAFETY: the request writes a number to this address.
            let rc = unsafe { libc::ioctl(self.stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut unacknowledged) };
            assert_eq!(rc, 0);
            if unacknowledged == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }
}
