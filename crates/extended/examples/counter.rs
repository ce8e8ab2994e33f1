//! A counter that clients increase in the server's memory, which spends no time on it: `counter.c` in Rust.
//!
//! ```text
//! cargo run --example counter serve 127.0.0.1:5000 2        until two clients have come and gone
//! cargo run --example counter count 127.0.0.1:5000 1000     increases it a thousand times
//! ```

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_extended::{Access, Buffer, Options, REMOTE_REGION_LEN, RemoteRegion, accept, connect};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn serve(at: &str, clients: u32) -> Result<()> {
    let listener = TcpListener::bind(at)?;
    println!("listening on port {}", listener.local_addr()?.port());
    std::io::stdout().flush()?;
    let counter = Arc::new(Buffer::new(8)?);
    for _ in 0..clients {
        let (tcp, _) = listener.accept()?;
        let socket = accept(&tcp, &Options::default())?;
        let region = socket.register_buffer(&counter, Access::REMOTE_READ | Access::REMOTE_ATOMIC)?;
        socket.send(&region.remote().encode(), None)?;
        // The client does the rest. Its stream ends when it has.
        while socket.recv(&mut [0], None)? > 0 {}
        socket.close(Some(Instant::now() + Duration::from_secs(1)))?;
    }
    let mut value = [0; 8];
    counter.read(0, &mut value);
    println!("counted to {}", u64::from_ne_bytes(value));
    Ok(())
}

fn count(at: &str, times: u64) -> Result<()> {
    let tcp = TcpStream::connect(at)?;
    let socket = connect(&tcp, &Options::default())?;
    let mut description = [0; REMOTE_REGION_LEN];
    let mut got = 0;
    while got < description.len() {
        match socket.recv(&mut description[got..], None)? {
            0 => return Err("the server has gone".into()),
            len => got += len,
        }
    }
    let counter = RemoteRegion::decode(&description);
    let mut old = 0;
    for _ in 0..times {
        old = socket.fetch_add_wait((&counter, 0), 1)?;
    }
    println!("{} by {}", old + 1, socket.provider());
    socket.close(Some(Instant::now() + Duration::from_secs(1)))?;
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", at, clients] => serve(at, clients.parse()?),
        ["count", at, times] => count(at, times.parse()?),
        _ => Err("usage: counter serve|count ADDRESS:PORT TIMES".into()),
    }
}
