//! Entry points for the fuzzer.

use super::handshake::{Handshake, Tls};
use super::wire::Request;
use crate::export::Spec;
use std::sync::Arc;

/// Options and requests of a hostile client, decoded as a server does.
pub fn client(data: &[u8]) {
    let exports = ["a=mem:64K", "b=mem:1M,ro"].map(|spec| {
        let export = Spec::parse(spec).expect("a disk of memory").open(None);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What the fuzzer begins with (`fuzz/seeds`).
    #[test]
    fn the_fuzzers_seeds_are_there() {
        let option = |number: u8, data: &[u8]| [&[number, data.len() as u8][..], data].concat();
        let info = |name: &[u8]| [&(name.len() as u32).to_be_bytes()[..], name, &[0, 1, 0, 3]].concat();
        let contexts = [&1_u32.to_be_bytes()[..], b"a", &[0, 0, 0, 1, 0, 0, 0, 15], b"base:allocation"].concat();
        // List; structured replies, contexts and GO; the old way; TLS.
        let seeds = [
            option(3, b""),
            [option(8, b""), option(10, &contexts), option(7, &info(b"a"))].concat(),
            [option(11, b""), option(6, &info(b"b")), option(1, b"b")].concat(),
            [option(5, b""), option(2, b"")].concat(),
        ];
        for (number, options) in seeds.iter().enumerate() {
            let seed = [&[u8::from(number == 3), 0, 0, 3][..], options].concat();
            client(&seed);
            crate::seeds::check("nbd_client", number, &seed);
        }
    }
}
