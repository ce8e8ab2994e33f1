//! A stream over a queue pair whose peer says anything.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_streams::fuzzing::peer(data));
