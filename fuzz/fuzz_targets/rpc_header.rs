//! Headers of RPC over RDMA from a hostile client.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_rpc::fuzzing::header(data));
