//! Entry points for the fuzzer.

use crate::gss::{GssCredential, InitResult};
use crate::rdma::header::{Header, PrivateData, Procedure};
use crate::rdma::reply::plan;
use crate::server::{Connection, Programs, Received, Transport};
use crate::xdr::{Decoder, Encoder};
use smallvec::SmallVec;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Wake};
use thruway_server::Body;
use tokio::runtime::{Builder, Runtime};

/// A message to these programs from a hostile client.
pub fn message(programs: &Programs, data: &[u8]) {
    let _ = (GssCredential::decode(data), InitResult::decode(&mut Decoder::new(data), 64 << 10));
    if let Some((position, len)) = programs.find_bulk(data) {
        assert!(position <= data.len(), "a bulk item of {len} bytes begins where the message has been decoded");
    }
    let connection = Rc::new(Connection::new(None, Transport::Tcp, false, Vec::new()));
    if let Ok(Some(Received::Call(mut call, program))) = programs.receive(data.to_vec(), SmallVec::new(), &connection) {
        let _ = without_waiting(programs.answer(&mut call, &*program));
    }
}

/// Polls a future to its end as long as it wakes itself, as a yield does; `None` if it waits for something else.
fn without_waiting<T>(work: impl Future<Output = T>) -> Option<T> {
    // For time limits, which never end here.
    static RUNTIME: LazyLock<Runtime> =
        LazyLock::new(|| Builder::new_current_thread().enable_time().build().expect("a runtime"));
    let _context = RUNTIME.enter();
    struct Woken(AtomicBool);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let woken = Arc::new(Woken(AtomicBool::new(true)));
    let waker = Arc::clone(&woken).into();
    let mut work = std::pin::pin!(work);
    while woken.0.swap(false, Ordering::Relaxed) {
        if let Poll::Ready(done) = work.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(done);
        }
    }
    None
}

/// The reply to a call, if there is one at once.
pub fn call(programs: &Programs, message: &[u8]) -> Option<Vec<u8>> {
    without_waiting(answer(programs, message)).flatten()
}

/// The reply to a call.
pub async fn answer(programs: &Programs, message: &[u8]) -> Option<Vec<u8>> {
    let connection = Rc::new(Connection::new(None, Transport::Tcp, false, Vec::new()));
    match programs.receive(message.to_vec(), SmallVec::new(), &connection) {
        Ok(Some(Received::Call(mut call, program))) => {
            programs.answer(&mut call, &*program).await.map(|reply| reply.to_bytes())
        }
        _ => None,
    }
}

/// The header of a message over RDMA, and the plan of a reply to it.
pub fn header(data: &[u8]) {
    let _ = PrivateData::decode(data);
    let mut decoder = Decoder::new(data);
    let Ok(header) = Header::decode(&mut decoder) else { return };
    let (Procedure::Message(chunks) | Procedure::NoMessage(chunks)) = header.procedure else { return };
    let _ = chunks.only_handle();
    let mut reply = Encoder::new();
    reply.u32(header.credits);
    reply.bulk(Body::Bytes(decoder.rest().to_vec()));
    if let Ok(plan) = plan(header.xid, 1, reply, chunks, 4096) {
        assert!(plan.message.len() <= 4096, "a message that the requester can receive");
        for transfer in &plan.transfers {
            let places: u64 = transfer.places.iter().map(|(_, len)| u64::from(*len)).sum();
            assert_eq!(places, transfer.body.len() as u64, "nothing is cut short");
        }
    }
}
