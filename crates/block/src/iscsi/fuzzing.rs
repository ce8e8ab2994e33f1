//! Entry points for the fuzzer.

use super::login::{Login, Next, Transport};
use super::pdu::{BHS, Header};
use super::target::{Target, Targets};
use super::text::{Keys, binary, number};

/// Login requests of a hostile initiator.
pub fn login(data: &[u8]) {
    let target = Target { name: "iqn.x:t".into(), units: Vec::new() };
    let targets = Targets::new(vec![target], None, Vec::new());
    let mut login = Login::new(if data.len().is_multiple_of(2) { Transport::Tcp } else { Transport::Iser });
    let mut rest = data;
    while let Some((header, tail)) = rest.split_first_chunk::<BHS>() {
        let header = Header(*header);
        let (text, tail) = tail.split_at(header.data_len().min(tail.len()));
        rest = tail;
        if let Next::Done(_, _, agreed) = login.request(&header, text, &targets) {
            let _ = targets.open(agreed.0);
        }
    }
    let _ = super::iser::decode(data);
    if let Some(keys) = Keys::decode(data) {
        for (_, value) in &keys.0 {
            let _ = (binary(value), number(value));
        }
    }
}
