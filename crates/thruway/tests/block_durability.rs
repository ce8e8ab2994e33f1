//! What was written to a disk is there, whatever happened to the daemon, the storage or a neighbour's write.

use crate::support;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use support::disks::{Disks, LoopDevice, image, libnbd, ok, run, text};
use support::{Lab, THRUWAY, caches_of};

#[test]
fn a_disk_is_served_once() {
    let lab = Lab::new();
    let file = image(&lab, "disk.img");
    let (a, b) = (format!("a={}", text(&file)), format!("b={}", text(&file)));
    let refused = |args: &[&str]| {
        let output = run(THRUWAY, &[&["serve"], args].concat());
        assert!(!output.status.success(), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = refused(&["--block", &a, "--block", &b, "--nbd", "127.0.0.1:0"]);
    assert!(said.contains("in use") && said.contains("disk.img"), "{said}");
    let disks = Disks::serve(&["--block", &a, "--nbd", "127.0.0.1:0"]);
    for options in ["", ",ro", ",mode=direct"] {
        let said = refused(&["--block", &format!("{b}{options}"), "--nbd", "127.0.0.1:0"]);
        assert!(said.contains("in use"), "{said}");
    }
    // qemu and we see each other's locks, both ways.
    assert!(!run("qemu-io", &["-f", "raw", "-c", "write 0 512", text(&file)]).status.success());
    disks.stop();
    let mut qemu = Command::new("qemu-io")
        .args(["-f", "raw", text(&file)])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut prompt = [0; 8];
    qemu.stdout.as_mut().unwrap().read_exact(&mut prompt).unwrap();
    assert!(refused(&["--block", &a, "--nbd", "127.0.0.1:0"]).contains("in use"));
    drop(qemu.stdin.take());
    qemu.wait().unwrap();
    // Who only reads may share with those who only read.
    let (a, b) = (format!("{a},ro"), format!("{b},ro"));
    Disks::serve(&["--block", &a, "--block", &b, "--nbd", "127.0.0.1:0"]).stop();
    // A device, too: who only reads would be shown what nobody has told it of.
    let device = LoopDevice::over(&file);
    let (a, b) = (format!("a={}", device.0), format!("b={},ro", device.0));
    for (first, second) in [(&a, &b), (&b, &a)] {
        let disks = Disks::serve(&["--block", first, "--nbd", "127.0.0.1:0"]);
        let said = refused(&["--block", second, "--nbd", "127.0.0.1:0"]);
        assert!(said.contains("in use"), "{first}, {second}: {said}");
        disks.stop();
    }
}

#[test]
fn writes_beside_each_other_in_a_page_never_undo_one_another() {
    let lab = Lab::new();
    for mode in ["writeback", "direct", "cached"] {
        let file = lab.path(mode);
        fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let block = format!("d={},mode={mode}", text(&file));
        let disks = Disks::serve(&["--block", &block, "--nbd", "127.0.0.1:0", "--reactors", "2"]);
        // Each connection writes its own part of a page: one all that direct I/O takes, others odd pieces.
        libnbd(
            &disks.nbd("d"),
            "import threading\nfailed = []\n\
             def use(at, length):\n\
            \x20 try:\n\
            \x20   h = nbd.NBD()\n\
            \x20   h.connect_uri(uri)\n\
            \x20   for i in range(300):\n\
            \x20     zeroes = i % 3 == 2\n\
            \x20     mine = bytes([0 if zeroes else i % 251 + 1]) * length\n\
            \x20     if zeroes: h.zero(length, at)\n\
            \x20     else: h.pwrite(mine, at)\n\
            \x20     if h.pread(length, at) != mine: raise Exception('%d is lost at %d' % (i, at))\n\
            \x20 except Exception as e: failed.append(e)\n\
             parts = [(0, 1024), (1024, 100), (1124, 924), (2048, 512), (2560, 1), (2561, 1500), (4061, 4200)]\n\
             threads = [threading.Thread(target=use, args=part) for part in parts]\n\
             for t in threads: t.start()\n\
             for t in threads: t.join()\n\
             assert not failed, failed\n",
        );
    }
}

#[test]
fn a_device_is_written_so_that_whoever_reads_it_through_the_page_cache_sees_it() {
    let lab = Lab::new();
    let device = LoopDevice::over(&image(&lab, "disk.img"));
    let block = format!("d={},mode=cached", device.0);
    let disks = Disks::serve(&["--block", &block, "--nbd", "127.0.0.1:0"]);
    libnbd(
        &disks.nbd("d"),
        "h.connect_uri(uri)\n\
         for i in range(200):\n\
        \x20 at = i % 50 * 65536\n\
        \x20 h.pread(65536, at)\n\
        \x20 mine = bytes([i]) * 4096\n\
        \x20 h.pwrite(mine, at + 8192)\n\
        \x20 assert h.pread(4096, at + 8192) == mine, i\n",
    );
    // It is ours alone.
    let other = run(THRUWAY, &["serve", "--block", &format!("e={}", device.0), "--nbd", "127.0.0.1:0"]);
    assert!(!other.status.success());
    assert!(String::from_utf8_lossy(&other.stderr).contains("in use"), "{other:?}");
}

#[test]
fn a_sync_that_failed_once_is_told_to_everybody_who_flushes_until_the_disk_is_opened_again() {
    let lab = Lab::new();
    let small = lab.path("small");
    fs::create_dir(&small).unwrap();
    ok("mount", &["-t", "tmpfs", "-o", "size=1M", "tmpfs", text(&small)]);
    let image = small.join("disk.img");
    fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    {
        let device = LoopDevice::over(&image);
        let block = format!("d={}", device.0);
        let disks = Disks::serve(&["--block", &block, "--nbd", "127.0.0.1:0"]);
        libnbd(
            &disks.nbd("d"),
            "h.connect_uri(uri)\n\
             other = nbd.NBD()\n\
             other.connect_uri(uri)\n\
             other.flush()\n\
             for i in range(4): h.pwrite(b'x' * (1 << 20), i << 20)\n\
             def fails(what):\n\
            \x20 try: what()\n\
            \x20 except nbd.Error as e: assert e.errnum in (errno.EIO, errno.ENOSPC), e\n\
            \x20 else: raise AssertionError('it is lost, and nobody says so')\n\
             fails(h.flush)\n\
             fails(other.flush)\n\
             fails(h.flush)\n\
             fails(lambda: other.pwrite(b'y' * 512, 0, nbd.CMD_FLAG_FUA))\n\
             third = nbd.NBD()\n\
             third.connect_uri(uri)\n\
             fails(third.flush)\n",
        );
    }
    ok("umount", &[text(&small)]);
}

#[test]
fn fio_finds_every_byte_that_it_wrote() {
    let lab = Lab::new();
    let file = lab.path("disk.img");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let path = text(&file);
    let own = format!("own={path},cache=8M:writeback:16K");
    let slow = "slow=mem:16M,delay=1ms,rate=50M";
    let stripe = "stripe=stripe:64K:mem:20M:mem:20M:mem:20M";
    let disks = Disks::serve(&["--block", &own, "--block", stripe, "--block", slow, "--nbd", "127.0.0.1:0"]);
    for (export, size) in [("own", "64m"), ("stripe", "60m"), ("slow", "1m")] {
        ok(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &format!("--uri={}", disks.nbd(export)),
                "--rw=randwrite",
                "--bsrange=512-512k",
                "--bs_unaligned",
                &format!("--size={size}"),
                "--iodepth=16",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--randseed=7",
                "--serialize_overlap=1",
                "--verify_state_save=0",
            ],
        );
    }
    disks.stop();
}

#[test]
fn what_was_flushed_survives_a_kill() {
    let lab = Lab::new();
    for options in ["", ",mode=direct", ",cache=4M:writeback:16K"] {
        let file = lab.path("disk.img");
        fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let block = format!("d={}{options}", text(&file));
        let mut disks = Disks::serve(&["--block", &block, "--nbd", "127.0.0.1:0"]);
        libnbd(
            &disks.nbd("d"),
            "h.connect_uri(uri)\n\
             for i in range(64): h.pwrite(bytes([i + 1]) * 70000, i * 131072 + 512)\n\
             h.flush()\n\
             h.pwrite(b'fua' * 1000, 12 << 20, nbd.CMD_FLAG_FUA)\n",
        );
        let kept = caches_of(disks.child.id());
        disks.child.kill().unwrap();
        disks.child.wait().unwrap();
        kept.iter().for_each(|file| fs::remove_file(file).unwrap());
        let found = fs::read(&file).unwrap();
        for i in 0..64usize {
            let at = i * 131_072 + 512;
            assert!(found[at..at + 70_000].iter().all(|byte| *byte == i as u8 + 1), "write {i} with '{options}'");
        }
        assert!(found[12 << 20..].starts_with(b"fuafua"), "{options}");
    }
}

#[test]
fn what_a_write_back_cache_acknowledged_survives_a_kill_of_the_daemon() {
    let lab = Lab::new();
    for (cache, again) in [
        ("cache=8M:writeback:16K", "cache=8M:writeback:16K"),
        // Whatever the disk is served with next.
        ("cache=8M:writeback", "cache=2M:writeback:4K"),
        ("cache=8M:writeback", "mode=direct"),
    ] {
        let file = lab.path("disk.img");
        fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let block = |options: &str| format!("d={},{options}", text(&file));
        let mut disks = Disks::serve(&["--block", &block(cache), "--nbd", "127.0.0.1:0"]);
        // Nothing is flushed; some of it is written out before its time all the same, but what is written again and again, until the
        // daemon is gone.
        let script = "import nbd, sys\nh = nbd.NBD()\nh.connect_uri(sys.argv[1])\n\
             for i in range(100): h.pwrite(bytes([i + 1]) * 30000, i * 100000 + 512)\n\
             try:\n\
             \x20 while True:\n\
             \x20   h.pwrite(b'again' * 100, 512)\n\
             \x20   print('written', flush=True)\n\
             except nbd.Error: pass\n";
        let mut client = Command::new("/usr/bin/python3")
            .args(["-c", script, &disks.nbd("d")])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut written = BufReader::new(client.stdout.take().unwrap());
        written.read_line(&mut String::new()).unwrap();
        let kept = caches_of(disks.child.id());
        assert_eq!(kept.len(), 1, "{kept:?}");
        // Meanwhile the client's lines are read, so that it goes on writing.
        let reader = std::thread::spawn(move || std::io::copy(&mut written, &mut std::io::sink()));
        disks.child.kill().unwrap();
        disks.child.wait().unwrap();
        reader.join().unwrap().unwrap();
        assert!(client.wait().unwrap().success());
        assert!(kept[0].exists());
        let refused = run("timeout", &["60", THRUWAY, "serve", "--block", &block("ro"), "--nbd", "127.0.0.1:0"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("not on the disk yet"), "{said}");
        // The client goes on with the next daemon, flushes, and may believe what it is told.
        let disks = Disks::serve(&["--block", &block(again), "--nbd", "127.0.0.1:0"]);
        libnbd(
            &disks.nbd("d"),
            "h.connect_uri(uri)\nh.flush()\n\
             for i in range(1, 100): assert h.pread(30000, i * 100000 + 512) == bytes([i + 1]) * 30000, i\n\
             assert h.pread(600, 512) == b'again' * 100 + b'\\x01' * 100\n",
        );
        disks.stop();
        assert!(!kept[0].exists(), "an orderly end leaves nothing");
        let found = fs::read(&file).unwrap();
        assert!((1..100usize).all(|i| found[i * 100_000 + 512..][..30_000].iter().all(|byte| *byte == i as u8 + 1)));
    }
}

#[test]
fn a_cache_that_has_no_room_is_refused_and_leaves_nothing() {
    let lab = Lab::new();
    let block = format!("d={},cache=8M:writeback", text(&image(&lab, "disk.img")));
    // As in a container.
    let script =
        "mount -t tmpfs -o size=2m none /dev/shm || exit 9; \"$0\" serve --block \"$1\" --nbd 127.0.0.1:0; ls /dev/shm";
    let refused = run("unshare", &["--mount", "sh", "-c", script, THRUWAY, &block]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("/dev/shm") && said.contains(":volatile"), "{said}");
    assert_eq!(String::from_utf8_lossy(&refused.stdout), "", "something is left");
}

#[test]
fn what_was_acknowledged_before_the_daemon_stopped_is_in_the_file() {
    let lab = Lab::new();
    let file = lab.path("disk.img");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let block = format!("d={},cache=64M:writeback", text(&file));
    let disks = Disks::serve(&["--block", &block, "--nbd", "127.0.0.1:0"]);
    // A client that writes as fast as it can, never flushes, and says what was acknowledged until it is cut off.
    let script = "import nbd, sys\nh = nbd.NBD()\nh.connect_uri(sys.argv[1])\nn = 0\ntry:\n\
        \x20 while True:\n\
        \x20   h.pwrite((n + 1).to_bytes(8, 'little') * 512, n % 16384 * 4096)\n\
        \x20   n += 1\n\
        \x20   if n == 1000: print('go', flush=True)\n\
        except nbd.Error: print(n)\n";
    let mut client =
        Command::new("/usr/bin/python3").args(["-c", script, &disks.nbd("d")]).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(client.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    disks.stop();
    line.clear();
    said.read_line(&mut line).unwrap();
    client.wait().unwrap();
    let acknowledged: u64 = line.trim().parse().unwrap();
    let found = fs::read(&file).unwrap();
    for n in acknowledged.saturating_sub(16_384)..acknowledged {
        let at = (n % 16_384 * 4096) as usize;
        let there = u64::from_le_bytes(found[at..at + 8].try_into().unwrap());
        assert!(there > n, "write {n} of {acknowledged} was acknowledged, and {there} is there");
    }
}

/// That there is no room for a write is that write's own failure: nothing was lost that had been acknowledged, so what
/// follows is served.
#[test]
fn a_write_without_room_spoils_nothing_else() {
    let lab = Lab::new();
    for mode in ["writeback", "cached"] {
        // Each has its own: an io_uring lets go of its files some time after its process has ended.
        let small = lab.mkdir(mode);
        ok("mount", &["-t", "tmpfs", "-o", "size=2M", "tmpfs", text(&small)]);
        let image = small.join("disk.img");
        fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
        let disks = Disks::serve(&["--block", &format!("d={},mode={mode}", text(&image)), "--nbd", "127.0.0.1:0"]);
        libnbd(
            &disks.nbd("d"),
            "h.connect_uri(uri)\n\
             h.pwrite(b'a' * 4096, 0, nbd.CMD_FLAG_FUA)\n\
             for at in range(1, 4):\n\
            \x20 try: h.pwrite(b'x' * (1 << 20), at << 20, nbd.CMD_FLAG_FUA)\n\
            \x20 except nbd.Error as e: assert e.errnum == errno.ENOSPC, e\n\
            \x20 else: assert at < 3, 'there is no room for it'\n\
             h.pwrite(b'b' * 4096, 0, nbd.CMD_FLAG_FUA)\n\
             h.flush()\n\
             assert h.pread(4096, 0) == b'b' * 4096\n",
        );
        disks.stop();
        ok("umount", &["--lazy", text(&small)]);
    }
}
