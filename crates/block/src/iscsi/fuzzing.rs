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

#[cfg(test)]
mod tests {
    use super::*;

    /// What the fuzzer begins with (`fuzz/seeds`).
    #[test]
    fn the_fuzzers_seeds_are_there() {
        let request = |stages: u8, text: &str| {
            let mut header = [0; BHS];
            (header[0], header[1]) = (0x43, stages);
            header[5..8].copy_from_slice(&(text.len() as u32).to_be_bytes()[1..]);
            header[8] = 0x80;
            let mut pdu = [&header[..], text.as_bytes()].concat();
            pdu.resize(pdu.len().next_multiple_of(4), 0);
            pdu
        };
        let who = "InitiatorName=iqn.i\0SessionType=Normal\0TargetName=iqn.x:t\0AuthMethod=None\0";
        let how = "HeaderDigest=CRC32C,None\0DataDigest=None\0MaxRecvDataSegmentLength=65536\0MaxBurstLength=262144\0\
                   FirstBurstLength=65536\0InitialR2T=Yes\0ImmediateData=Yes\0MaxOutstandingR2T=1\0ErrorRecoveryLevel=0\0";
        let chap = "AuthMethod=CHAP,None\0InitiatorName=iqn.i\0SessionType=Discovery\0";
        // Security to operations, operations to full feature phase; at once; discovery.
        let seeds = [
            [request(0x81, who), request(0x87, how)].concat(),
            request(0x87, &[who, how].concat()),
            [request(0x01, chap), request(0x81, "CHAP_A=5,7\0")].concat(),
        ];
        for (number, seed) in seeds.iter().enumerate() {
            login(seed);
            crate::seeds::check("iscsi_login", number, seed);
        }
    }
}
