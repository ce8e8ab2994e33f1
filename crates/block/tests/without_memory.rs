//! A write for which there is no memory is not acknowledged. Alone in its process, whose memory it limits.

#[path = "../../thruway/tests/support/nbd.rs"]
mod client;
#[path = "support/nbd_server.rs"]
mod nbd_server;

use client::{Nbd, READ, WRITE};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use thruway_block::export::Spec;
use thruway_engine::Reactors;

/// Of the pieces that long requests are cut into, and of what one of the connection's two pools of blocks takes at most.
const CHUNK: u64 = 64 << 10;
const POOL_MAX: u64 = 8 << 20;

/// Bytes of memory that this process has, used or not.
fn mapped() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    size.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn a_write_of_which_a_part_finds_no_memory_is_not_acknowledged() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let export = Arc::new(Spec::parse("d=mem:16M,chunk=64K").unwrap().open(None).unwrap());
    let (_server, address) = nbd_server::serve(export, &reactors);
    let mut client = Nbd::connect(&address, "d").unwrap();
    // Small blocks are there after this one.
    client.ask((0, WRITE), 0, 512, &[1; 512]).unwrap().unwrap();
    let len = 4096 + CHUNK;
    let data = vec![2; len as usize];
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(mapped() + POOL_MAX / 2), ..before }).unwrap();
    // First a small piece, which is written, then one that needs a large block.
    let sent = client.send((0, WRITE), CHUNK - 4096, len as u32, &data);
    let answer = sent.and_then(|()| client.answer());
    setrlimit(Resource::As, before).unwrap();
    assert!(!answer.is_ok_and(|acknowledged| acknowledged), "it is acknowledged");
    let mut next = Nbd::connect(&address, "d").unwrap();
    let after = next.ask((0, READ), CHUNK, CHUNK as u32, &[]).unwrap().unwrap();
    assert_eq!(after, vec![0; CHUNK as usize], "the part without memory cannot have been written");
    next.ask((0, WRITE), CHUNK - 4096, len as u32, &data).unwrap().unwrap();
}
