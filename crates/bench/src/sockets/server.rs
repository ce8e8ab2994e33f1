//! The listening end. What a client sends wrong ends its connection.

use super::files::{FILE_MAX, Files};
use super::{HEAD_LEN, Head, Kind};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a request at most.
const REQUEST_MAX: usize = 1024;

/// Serves until accepting fails.
pub(super) fn serve(listener: &TcpListener) -> Result<(), String> {
    let files = Arc::new(Files::new().map_err(|e| format!("no memory for files: {e}"))?);
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                let files = Arc::clone(&files);
                // Without a thread, the connection is closed.
                let _ = std::thread::Builder::new().spawn(move || answer(&stream, &files));
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(format!("accepting: {error}")),
        }
    }
}

fn answer(mut stream: &TcpStream, files: &Files) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut head = [0; HEAD_LEN];
    stream.read_exact(&mut head)?;
    let Some(Head { kind, size }) = Head::decode(&head) else { return documents(stream, &head, files) };
    let mut buffer = vec![0x5a; size as usize];
    match kind {
        Kind::Lat => loop {
            stream.read_exact(&mut buffer)?;
            stream.write_all(&buffer)?;
        },
        Kind::In => {
            take_all(stream, size)?;
            stream.write_all(&[1])
        }
        Kind::Out => loop {
            stream.write_all(&buffer)?;
        },
        Kind::Both => {
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let taken = take_all(stream, size);
                    stop.store(true, Ordering::Relaxed);
                    taken
                });
                while !stop.load(Ordering::Relaxed) {
                    stream.write_all(&buffer)?;
                }
                stream.shutdown(Shutdown::Write)?;
                reader.join().unwrap_or(Ok(()))
            })
        }
        Kind::File => loop {
            let mut len = [0; 8];
            stream.read_exact(&mut len)?;
            let len = u64::from_be_bytes(len);
            if len > FILE_MAX {
                return Ok(());
            }
            send_file(stream, files.at_least(len)?, len)?;
        },
        Kind::Web => documents(stream, &[], files),
    }
}

/// Receives everything, until the other end ends.
fn take_all(mut stream: &TcpStream, size: u32) -> io::Result<()> {
    let mut buffer = vec![0; (size as usize).max(64 << 10)];
    while stream.read(&mut buffer)? > 0 {}
    Ok(())
}

/// As servers of files do: none of it passes through the program.
fn send_file(stream: &TcpStream, file: &File, len: u64) -> io::Result<()> {
    let mut at: libc::off_t = 0;
    while (at as u64) < len {
        // By the C library, as every program does it.
        // SAFETY: both descriptors are open, and the call writes to `at` alone.
        match unsafe { libc::sendfile(stream.as_raw_fd(), file.as_raw_fd(), &raw mut at, (len - at as u64) as usize) } {
            1.. => {}
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}

/// Serves documents: `GET /BYTES HTTP/1.x`. `begun`: what has been received of the first request.
fn documents(mut stream: &TcpStream, begun: &[u8], files: &Files) -> io::Result<()> {
    let mut buffer = begun.to_vec();
    loop {
        let end = loop {
            if let Some(end) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
                break end;
            }
            if buffer.len() > REQUEST_MAX {
                return Ok(());
            }
            let mut more = [0; REQUEST_MAX];
            match stream.read(&mut more)? {
                0 => return Ok(()),
                len => buffer.extend(&more[..len]),
            }
        };
        let Some((len, goes_on)) = request(&buffer[..end]) else {
            return stream.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n");
        };
        buffer.drain(..end + 4);
        let head =
            format!("HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {len}\r\n\r\n");
        send_more(stream, head.as_bytes())?;
        send_file(stream, files.at_least(len)?, len)?;
        if !goes_on {
            return Ok(());
        }
    }
}

/// Bytes of the document that is asked for, and whether more is asked for on this connection.
fn request(head: &[u8]) -> Option<(u64, bool)> {
    let line = std::str::from_utf8(head).ok()?.lines().next()?;
    let rest = line.strip_prefix("GET /")?;
    let (len, version) = rest.split_once(' ')?;
    let len = len.parse().ok().filter(|len| (1..=FILE_MAX).contains(len))?;
    match version {
        "HTTP/1.1" => Some((len, true)),
        "HTTP/1.0" => Some((len, false)),
        _ => None,
    }
}

/// Sends what more comes behind: in one packet, if that fits.
fn send_more(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let flags = libc::MSG_MORE | libc::MSG_NOSIGNAL;
        // SAFETY: the bytes are there.
        match unsafe { libc::send(stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) } {
            sent @ 0.. => bytes = &bytes[sent as usize..],
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_understood_or_refused() {
        assert_eq!(request(b"GET /512 HTTP/1.1\r\nHost: x"), Some((512, true)));
        assert_eq!(request(b"GET /512 HTTP/1.0"), Some((512, false)));
        for bad in [
            "POST /1 HTTP/1.1",
            "GET /x HTTP/1.1",
            "GET /1",
            "GET /1 HTTP/2",
            "GET /0 HTTP/1.1",
            "GET /99999999999 HTTP/1.1",
            "",
        ] {
            assert_eq!(request(bad.as_bytes()), None, "{bad}");
        }
    }
}
