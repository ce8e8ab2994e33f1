//! Options and requests of a hostile NBD client.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_block::nbd::fuzzing::client(data));
