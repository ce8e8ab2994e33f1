//! Calls of version 3 about files that are there.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_nfs::fuzzing::operations_of_version_3(data));
