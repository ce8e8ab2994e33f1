#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_fabric::iwarp::fuzzing::mpa_frame(data));
