//! Operations of a hostile client of NFS version 4 that has a session.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_nfs::fuzzing::operations(data));
