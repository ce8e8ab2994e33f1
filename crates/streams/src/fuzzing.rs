//! Entry points for the fuzzer.

use crate::core::{Action, End, Next};
use crate::settings::{Scheme, Settings};
use crate::wire::{Frame, Hello, MESSAGE_MAX, Message};
use std::collections::VecDeque;
use thruway_fabric::RemoteAddr;

const QUEUE_LEN: u32 = 16;
const LANDING_LEN: usize = 512;

/// Takes the next bytes of the input; zeros behind its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn byte(&mut self) -> u8 {
        self.take::<1>().map_or(0, |[byte]| byte)
    }

    fn half(&mut self) -> u16 {
        self.take().map_or(0, u16::from_be_bytes)
    }
}

/// A stream whose peer, and whose program, do what the input says: each message of the peer's is bytes of the input.
///
/// # Panics
/// If the end names memory that it does not have, posts what is posted, or posts more than there is room for.
pub fn peer(data: &[u8]) {
    let mut input = Input(data);
    let Some(hello) = input.take::<40>() else { return };
    let Ok(peer) = Hello::decode(&hello) else { return };
    let settings = Settings {
        credits: 4 + u16::from(input.byte() % 32),
        receive_len: 72 + u32::from(input.byte()),
        ring_len: u32::from(input.half()) % 4096,
        stage_len: 1 + u32::from(input.half()) % 4096,
        messages: peer.messages,
        ..Settings::of(Scheme::ALL[usize::from(input.byte()) % Scheme::ALL.len()])
    };
    let own = Hello {
        receives: settings.receives(),
        receive_len: settings.receive_len,
        ring_len: settings.ring_len,
        ring: RemoteAddr { addr: 1 << 40, rkey: 1 },
        locks: RemoteAddr { addr: 1 << 41, rkey: 2 },
        messages: settings.messages,
    };
    let mut end = End::new(settings, own, peer, QUEUE_LEN, LANDING_LEN);
    let mut posted: VecDeque<u16> = (0..settings.receives()).collect();
    let mut requests = VecDeque::new();
    let mut users = 0;
    while !input.0.is_empty() {
        match input.byte() % 10 {
            0 => {
                let span = end.stage(usize::from(input.half()));
                end.write(span.len, input.byte() & 1 != 0);
            }
            1 => consume(&mut end, input.half().into()),
            2 => drop(end.fetch(None, |_, _, _| input.0.first().is_none_or(|byte| byte & 1 != 0))),
            3 => {
                users += 1;
                end.offer_sink(users, 1 + usize::from(input.half()), RemoteAddr { addr: 0, rkey: 3 });
            }
            4 => {
                users += 1;
                let len = 1 + usize::from(input.half());
                end.offer_source(users, len, RemoteAddr { addr: 0, rkey: 4 }, input.byte() & 1 != 0);
            }
            5 => {
                let lock = u64::from(input.byte());
                if let Some(id) = requests.pop_front() {
                    end.completed(id, lock);
                }
            }
            6 => match input.byte() % 4 {
                0 => drop(end.withdraw(users)),
                1 => drop(end.claim(users)),
                2 => drop(end.cancel_sink()),
                _ => {
                    users += 1;
                    end.fetch(Some((users, 0, 1 + usize::from(input.byte()))), |_, _, _| true);
                }
            },
            _ => {
                let Some(slot) = posted.pop_front() else { return };
                let total = usize::from(input.half()) % (settings.receive_len as usize + 1);
                let len = total.min(MESSAGE_MAX).min(input.0.len());
                let (bytes, rest) = input.0.split_at(len);
                input.0 = rest;
                if end.received(slot, bytes, total).is_err() {
                    return;
                }
            }
        }
        while let Some(action) = end.action() {
            match action {
                Action::Receive(slot) => {
                    assert!(!posted.contains(&slot), "a receive that is posted already");
                    posted.push_back(slot);
                }
                Action::Send { id, frame, .. } => {
                    check(&frame, &peer);
                    requests.push_back(id);
                }
                Action::Write { id, from, .. } => {
                    assert!(from.iter().flatten().any(|span| span.len > 0), "a write of nothing");
                    requests.push_back(id);
                }
                Action::Read { id, to, .. } => {
                    assert!(to.len > 0, "a read of nothing");
                    requests.push_back(id);
                }
                Action::Claim { id, .. } => requests.push_back(id),
                _ => {}
            }
        }
        assert!(requests.len() <= QUEUE_LEN as usize, "more requests than the queue holds");
        match end.next() {
            Next::Ring { offset, len, .. } => assert!(offset + len <= settings.ring_len as usize),
            Next::Landing { offset, len, .. } => assert!(offset + len <= LANDING_LEN),
            Next::Receive { offset, len, .. } => assert!(offset + len <= settings.receive_len as usize),
            _ => {}
        }
    }
}

fn consume(end: &mut End, most: usize) {
    match end.next() {
        Next::Receive { len, .. } | Next::Ring { len, .. } | Next::Landing { len, .. } => end.consume(len.min(most)),
        Next::Sink { len, .. } => end.consume(len),
        _ => {}
    }
}

/// What an end sends is a message that fits the peer's receives.
fn check(frame: &Frame, peer: &Hello) {
    let mut bytes = [0; MESSAGE_MAX];
    let head = frame.encode(&mut bytes);
    let len = match frame.message {
        Message::Data { len, .. } => head + len as usize,
        _ => head,
    };
    assert!(len <= peer.receive_len as usize, "a message of {len} bytes");
    assert_eq!(Frame::decode(&bytes[..head], len), Ok(*frame));
}

#[cfg(test)]
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that says each message once, to a program that does everything once.
    #[test]
    fn seeds() {
        let remote = RemoteAddr { addr: 1 << 30, rkey: 7 };
        let messages = [
            Message::Data { len: 5, end: true },
            Message::RingWritten { len: 9, end: false },
            Message::SourceAvailable { len: 100, end: false, id: 1, source: remote },
            Message::UpdateSource { id: 1, source: remote },
            Message::CancelSource { id: 1 },
            Message::SinkAvailable { len: 50, parts: 0, sink: remote },
            Message::CancelSink,
            Message::Acknowledge,
            Message::ReadComplete { id: 1, len: 65, withdrawn: false },
            Message::Disconnect,
        ];
        for number in 0..Scheme::ALL.len() {
            let hello = Hello {
                receives: 36,
                receive_len: 128,
                ring_len: 4096,
                ring: remote,
                locks: remote,
                messages: number % 2 == 0,
            };
            let mut seed = hello.encode().to_vec();
            seed.extend([28, 100, 8, 0, 8, 0, number as u8]);
            for message in messages {
                let mut bytes = [0; MESSAGE_MAX];
                let mut len = Frame { receives: 0, ring: 0, message }.encode(&mut bytes);
                if let Message::Data { len: data, .. } = message {
                    len += data as usize;
                }
                seed.push(9);
                seed.extend((len as u16).to_be_bytes());
                seed.extend(&bytes[..len]);
                seed.extend([0, 0, 20, 1, 1, 0, 3, 2, 5, 0, 4, 0, 64, 1]);
            }
            peer(&seed);
            super::seeds::check("stream_peer", number, &seed);
        }
    }
}
