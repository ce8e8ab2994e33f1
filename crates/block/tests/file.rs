//! Disks in files, on this machine's own file system.

use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use thruway_block::backend::{Backend, EXTENTS_MAX, FileBackend, Mode};
use thruway_engine::{Reactors, Segments};

/// Runs a task on a reactor, to its end.
fn on_a_reactor<T: Send + 'static, F: Future<Output = T> + 'static>(make: impl FnOnce() -> F + Send + 'static) -> T {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (tell, told) = mpsc::channel();
    reactors.handles()[0].spawn(move || async move { tell.send(make().await).unwrap() });
    told.recv().unwrap()
}

#[test]
fn extents_of_a_file_in_many_pieces_are_told_to_the_end() {
    const PIECE: u64 = 64 << 10;
    const PIECES: u64 = 50;
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(2 * PIECES * PIECE).unwrap();
    for piece in 0..PIECES {
        file.write_all_at(&[1; PIECE as usize], 2 * piece * PIECE).unwrap();
    }
    let disk = FileBackend::of(file).unwrap();
    let (few, all) = on_a_reactor(move || async move {
        let few = disk.extents(PIECE / 2, 2 * PIECE, EXTENTS_MAX).await.unwrap();
        (few, disk.extents(0, 2 * PIECES * PIECE, EXTENTS_MAX).await.unwrap())
    });
    let of = |extents: &[thruway_block::backend::Extent]| extents.iter().map(|e| (e.len, e.hole)).collect::<Vec<_>>();
    assert_eq!(of(&few), [(PIECE / 2, false), (PIECE, true), (PIECE / 2, false)]);
    assert_eq!(of(&all), [(PIECE, false), (PIECE, true)].repeat(PIECES as usize));
}

#[test]
fn direct_writes_and_reads_go_from_and_to_registered_memory_and_other() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let disk = FileBackend::open(&path, Mode::Direct, false).unwrap();
    on_a_reactor(move || async move {
        // More supplies than a ring can have registered; each is registered when it is used first.
        for round in 0..100u64 {
            let supply = Segments::new(2, 8192).unwrap();
            let mut reservation = supply.reserve(2).await;
            let mut segment = reservation.segment(8192);
            segment.as_mut_slice().fill(round as u8 + 1);
            disk.write(round * 8192, segment, round % 2 == 0).await.unwrap();
            let read = disk.read(round * 8192, reservation.segment(8192)).await.unwrap();
            assert!(read.as_slice().iter().all(|byte| *byte == round as u8 + 1), "round {round}");
            // Not aligned: read, changed and written.
            let mut odd = supply.reserve(1).await.segment(100);
            odd.as_mut_slice().fill(200);
            disk.write(round * 8192 + 50, odd, false).await.unwrap();
            let read = disk.read(round * 8192 + 1, supply.reserve(1).await.segment(200)).await.unwrap();
            let expected = |at: usize| if (49..149).contains(&at) { 200 } else { round as u8 + 1 };
            assert!(read.as_slice().iter().enumerate().all(|(at, byte)| *byte == expected(at)), "round {round}");
        }
    });
}
