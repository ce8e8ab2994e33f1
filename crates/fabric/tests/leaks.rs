//! What is dropped is gone. Alone in its process, because it counts the process's descriptors.

mod conformance;

use conformance::Lab;
use thruway_fabric::iwarp::Config;
use thruway_fabric::{ConnectParams, QueuePairCaps};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn devices_go_when_nothing_uses_them() {
    let before = descriptors();
    for _ in 0..20 {
        // Queue pairs that are driven until their end, and their device never again.
        let (a, b) = (Config::default().open().unwrap(), Config::default().open().unwrap());
        let lab = Lab::new(a.clone(), b.clone());
        conformance::write_then_send(&lab);
        // A request that nobody answers.
        let cq = a.create_cq(1024).unwrap();
        let qp = a.alloc_pd().unwrap().create_qp(&cq, &cq, QueuePairCaps::default()).unwrap();
        qp.connect(lab.addr(), &ConnectParams::default()).unwrap();
        for _ in 0..1000 {
            a.progress();
            b.progress();
        }
    }
    assert_eq!(descriptors(), before, "each device has three, and each connection one");
}
