//! The conformance suite over RDMA devices. Those are in the guest: `cargo xtask vm test verbs`
//! runs these tests there, with `THRUWAY_VERBS_DEVICE` and `THRUWAY_VERBS_ADDRESS`.

use crate::conformance;
use conformance::Lab;
use thruway_fabric::{iwarp, verbs};

fn setting(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} says which device to test"))
}

fn device() -> thruway_fabric::Device {
    verbs::Config { device: Some(setting("THRUWAY_VERBS_DEVICE")) }.open().unwrap()
}

fn address() -> std::net::IpAddr {
    setting("THRUWAY_VERBS_ADDRESS").parse().unwrap()
}

/// What the device under test cannot do, and why.
fn exceptions() -> &'static [(&'static str, &'static str)] {
    if setting("THRUWAY_VERBS_DEVICE").starts_with("siw") {
        &[
            ("atomics", "siw has none"),
            ("write_with_immediate", "iWARP needs RFC 7306 for it, which siw lacks"),
            ("read_scattered", "siw takes one element for the result of a read"),
            ("zero_based_regions", "siw knows memory only by its own addresses"),
        ]
    } else {
        &[]
    }
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask vm test verbs` runs it in the guest"]
fn both_ends_on_the_device() {
    conformance::run_except(exceptions(), &|| Lab::at(device(), device(), address()));
}

#[test]
#[ignore = "needs an iWARP device: `cargo xtask vm test verbs` runs it in the guest"]
fn user_space_calls_the_device() {
    let reset = "among connections that were given up, siw at times resets the next one too";
    let except = [exceptions(), &[("destroyed_while_connecting", reset)]].concat();
    conformance::run_except(&except, &|| Lab::at(iwarp::Config::default().open().unwrap(), device(), address()));
}

#[test]
#[ignore = "needs an iWARP device: `cargo xtask vm test verbs` runs it in the guest"]
fn the_device_calls_user_space() {
    let silent = "siw sends no ready-to-receive message, and a responder may not send before the initiator has";
    let except = [exceptions(), &[("responder_may_send_first", silent), ("waiting_sleeps_and_wakes", silent)]].concat();
    conformance::run_except(&except, &|| Lab::at(device(), iwarp::Config::default().open().unwrap(), address()));
}
