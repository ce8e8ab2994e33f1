//! The conformance suite over RDMA devices. Those are in the guest: `cargo xtask vm test verbs`
//! runs these tests there, with `THRUWAY_VERBS_DEVICE` and `THRUWAY_VERBS_ADDRESS`.

mod conformance;

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

#[test]
#[ignore = "needs an RDMA device"]
fn both_ends_on_the_device() {
    conformance::run_all(&|| Lab::at(device(), device(), address()));
}

#[test]
#[ignore = "needs an iWARP device"]
fn user_space_calls_the_device() {
    conformance::run_all(&|| Lab::at(iwarp::Config::default().open().unwrap(), device(), address()));
}

#[test]
#[ignore = "needs an iWARP device"]
fn the_device_calls_user_space() {
    conformance::run_all(&|| Lab::at(device(), iwarp::Config::default().open().unwrap(), address()));
}
