//! A path with a delay each way, in user space: a relay of TCP connections.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Bytes that are passed on at once.
const PIECE: usize = 256 << 10;
/// Pieces on their way: more than the longest path holds.
const PIECES: usize = 256;

/// Passes connections on to a server, each byte after a delay; where it listens. It ends with the process.
pub(super) fn relay(to: SocketAddr, delay: Duration) -> Result<SocketAddr, String> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    let address = listener.local_addr().map_err(|e| e.to_string())?;
    let serve = async move {
        let listener = TcpListener::from_std(listener)?;
        loop {
            let (near, _) = listener.accept().await?;
            tokio::spawn(async move {
                let far = TcpStream::connect(to).await?;
                near.set_nodelay(true)?;
                far.set_nodelay(true)?;
                let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
                let _ = tokio::join!(pass(near_in, far_out, delay), pass(far_in, near_out, delay));
                io::Result::Ok(())
            });
        }
    };
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let ended: io::Result<()> = runtime.and_then(|runtime| runtime.block_on(serve));
        drop(ended);
    });
    Ok(address)
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    delay: Duration,
) -> io::Result<()> {
    let (sender, mut pieces) = mpsc::channel::<(Instant, Vec<u8>)>(PIECES);
    let reading = async move {
        loop {
            let mut piece = Vec::with_capacity(PIECE);
            if from.read_buf(&mut piece).await? == 0 || sender.send((Instant::now() + delay, piece)).await.is_err() {
                return io::Result::Ok(());
            }
        }
    };
    let writing = async move {
        while let Some((due, piece)) = pieces.recv().await {
            // Timers count in milliseconds; what is shorter is waited for by looking at the clock.
            if due > Instant::now() + Duration::from_millis(2) {
                tokio::time::sleep_until(due - Duration::from_millis(1)).await;
            }
            while Instant::now() < due {
                tokio::task::yield_now().await;
            }
            to.write_all(&piece).await?;
        }
        to.shutdown().await
    };
    tokio::try_join!(reading, writing).map(drop)
}
