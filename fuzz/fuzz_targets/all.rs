//! All fuzz targets in one program: it is linked once. `THRUWAY_FUZZ_TARGET` selects one; without it, the program prints their names.
#![no_main]

use std::sync::OnceLock;

const TARGETS: [(&str, fn(&[u8])); 16] = [
    // Login requests and text keys of a hostile iSCSI initiator.
    ("iscsi_login", thruway_block::iscsi::fuzzing::login),
    // Messages of a peer that are right but for a field here and there.
    ("iwarp_dialogue", thruway_iwarp::fuzzing::dialogue),
    ("iwarp_receive", thruway_iwarp::fuzzing::receive),
    ("mpa_frame", thruway_iwarp::fuzzing::mpa_frame),
    // Options and requests of a hostile NBD client.
    ("nbd_client", thruway_block::nbd::fuzzing::client),
    // Calls of a hostile NFS client.
    ("nfs3_call", thruway_nfs::fuzzing::call),
    // Calls of version 3 on existing files.
    ("nfs3_operations", thruway_nfs::fuzzing::operations_of_version_3),
    // Operations of a hostile client of NFS version 4 with a session.
    ("nfs4_operations", thruway_nfs::fuzzing::operations),
    // Results of a hostile server of NFS version 4.
    ("nfs4_results", thruway_nfs::fuzzing::results),
    // Messages from another relay.
    ("relay_messages", thruway_relay::fuzzing::messages),
    ("rftp_journal", thruway_transfer::fuzzing::journal),
    ("rftp_messages", thruway_transfer::fuzzing::messages),
    ("rftp_pack", thruway_transfer::fuzzing::pack),
    // Headers of RPC over RDMA from a hostile client.
    ("rpc_header", thruway_rpc::fuzzing::header),
    // SCSI commands of a hostile initiator, and their data.
    ("scsi_initiator", thruway_block::scsi::fuzzing::initiator),
    // Messages of a hostile peer of a stream over a queue pair.
    ("stream_peer", thruway_streams::fuzzing::peer),
];

static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();

/// The selected target. Ends the program if there is none.
fn selected() -> fn(&[u8]) {
    let Some(name) = std::env::var_os("THRUWAY_FUZZ_TARGET") else {
        TARGETS.iter().for_each(|(name, _)| println!("{name}"));
        std::process::exit(0);
    };
    match TARGETS.iter().find(|(known, _)| name == *known) {
        Some((_, target)) => *target,
        None => {
            eprintln!("invalid THRUWAY_FUZZ_TARGET {name:?} (the program prints the names without it)");
            std::process::exit(2);
        }
    }
}

libfuzzer_sys::fuzz_target!(
    init: {
        TARGET.get_or_init(selected);
    },
    |data: &[u8]| {
        if let Some(target) = TARGET.get() {
            target(data);
        }
    }
);
