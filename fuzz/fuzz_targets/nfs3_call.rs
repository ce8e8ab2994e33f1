//! Calls of a hostile NFS client.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_nfs::fuzzing::call(data));
