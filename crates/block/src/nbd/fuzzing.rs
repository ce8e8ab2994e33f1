//! Entry points for the fuzzer.

use super::handshake::{Handshake, Tls};
use super::wire::Request;
use crate::export::Spec;
use std::sync::Arc;

/// Options and requests of a hostile client, decoded as a server does.
pub fn client(data: &[u8]) {
    let exports = ["a=mem:64K", "b=mem:1M,ro"].map(|spec| {
        let export = Spec::parse(spec).and_then(|spec| spec.open(None));
        Arc::new(export.expect("an export of memory can be opened"))
    });
    let Some((flags, mut rest)) = data.split_first_chunk::<4>() else { return };
    let tls = if flags[0] & 1 == 0 { Tls::Off } else { Tls::Required };
    let Some(mut handshake) = Handshake::new(Arc::from(exports), tls, [0, 0, 0, flags[3] & 3]) else { return };
    while let [number, len, tail @ ..] = rest {
        let (option, tail) = tail.split_at((*len as usize).min(tail.len()));
        handshake.option(u32::from(*number) % 13, option);
        rest = tail;
    }
    for extended in [false, true] {
        for header in data.chunks_exact(Request::header_len(extended)) {
            if let Some(request) = Request::decode(header, extended) {
                let _ = request.payload_len(extended);
            }
        }
    }
}
