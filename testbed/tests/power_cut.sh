# title: what was said to be done or flushed is there after a power cut, on ext4, xfs and btrfs; a disk that fails is told; either is gone on from
# limit: 300
truncate -s 400M /tmp/disk
loop=$(losetup --find --show /tmp/disk)
size=$(blockdev --getsz "$loop")
dmsetup create d --table "0 $size linear $loop 0"
dmsetup mknodes

# disk well|lies|fails: from now on, writes are done, are said to be done and are not (the power is gone and nobody
# knows it yet), or fail.
disk() {
    local table="0 $size linear $loop 0"
    [[ $1 == lies ]] && table="0 $size flakey $loop 0 0 3600 1 drop_writes"
    [[ $1 == fails ]] && table="0 $size flakey $loop 0 0 3600 1 error_writes"
    dmsetup suspend --nolockfs d
    dmsetup load d --table "$table"
    dmsetup resume d
}

# power_cut: as if the machine had lost its power: nothing that is not on the disk by now ever gets there.
power_cut() {
    disk lies
    umount /mnt/d
    disk well
    mount /dev/mapper/d /mnt/d
}

mkdir -p /tmp/tree /mnt/d
for i in {1..40}; do
    mkdir "/tmp/tree/$i"
    for j in {1..10}; do head -c $((RANDOM * 2)) /dev/urandom >"/tmp/tree/$i/$j"; done
done
ln -s 1/1 /tmp/tree/link
ln /tmp/tree/2/2 /tmp/tree/name
head -c 24M /dev/urandom >/tmp/tree/large

# until_half_done: waits until a copy of the tree is in progress.
until_half_done() {
    is_half_done() {
        compgen -G '/mnt/d/tree/.large.tw-*' >/dev/null && (($(stat -c %b /mnt/d/tree/.large.tw-*) > 8000))
    }
    wait_until 60 is_half_done || { echo "the copy does not get on" >&2; return 1; }
}

# begin_copy: a copy of the tree, in progress.
begin_copy() {
    "$THRUWAY" cp -rp --quiet --bwlimit 16M /tmp/tree /mnt/d/ 2>/tmp/said &
    copy=$!
    until_half_done
}

transfers() {
    # What nobody has synced is lost, or this test tests nothing.
    cp -r /tmp/tree /mnt/d/plain
    power_cut
    fails same /tmp/tree /mnt/d/plain 2>/dev/null
    rm -rf /mnt/d/plain
    "$THRUWAY" cp -rp --quiet /tmp/tree /mnt/d/
    power_cut
    same /tmp/tree /mnt/d/tree
    [[ /mnt/d/tree/name -ef /mnt/d/tree/2/2 ]]
    rm -r /mnt/d/tree
    sync

    begin_copy
    disk lies
    kill -9 $copy
    wait $copy || true
    power_cut
    "$THRUWAY" cp -rp --quiet --bwlimit 16M /tmp/tree /mnt/d/
    power_cut
    same /tmp/tree /mnt/d/tree
    rm -r /mnt/d/tree
    sync

    begin_copy
    disk fails
    fails wait $copy
    grep -q 'Input/output error\|Read-only file system\|durable' /tmp/said
    umount /mnt/d
    disk well
    [[ $1 != ext4 ]] || fsck.ext4 -fy /dev/mapper/d >/dev/null || (($? == 1))
    mount /dev/mapper/d /mnt/d
    "$THRUWAY" cp -rp --quiet /tmp/tree /mnt/d/
    power_cut
    same /tmp/tree /mnt/d/tree
    rm -r /mnt/d/tree
}

# ends: the daemon is killed, and what it had in memory goes with the machine.
ends() {
    kill -9 $daemon
    wait $daemon || true
    rm -f /dev/shm/thruway-cache-*
}

nbd() { qemu-io -f raw "$@" nbd://127.0.0.1:10809/d >/tmp/qemu 2>&1; }


disks() {
    local options
    for options in '' ,mode=direct ,mode=cached ,cache=8M:writeback; do
        rm -f /mnt/d/image
        truncate -s 32M /mnt/d/image
        sync
        serve_disk "/mnt/d/image$options"
        nbd -c 'write -P 7 512 3000K' -c flush -c 'write -P 9 8M 4M'
        disk lies
        ends
        power_cut
        qemu-io -f raw -r -c 'read -P 7 512 3000K' /mnt/d/image >/tmp/qemu
        ! grep -q 'Pattern verification failed' /tmp/qemu || { echo "flushed and not there ($options)" >&2; exit 1; }

        serve_disk "/mnt/d/image$options"
        nbd -c 'write -P 1 0 1M' -c flush
        disk fails
        fails nbd -c 'write -P 8 0 1M' -c flush
        disk well
        # One that has lost writes once is not to be believed until it has been looked at.
        [[ $options == *writeback ]] || fails nbd -c 'write -P 8 16M 4K' -c flush
        ends
        umount /mnt/d
        [[ $1 != ext4 ]] || fsck.ext4 -fy /dev/mapper/d >/dev/null || (($? == 1))
        mount /dev/mapper/d /mnt/d
    done
}

for kind in ext4 xfs btrfs; do
    case $kind in
        ext4) mkfs.ext4 -qF /dev/mapper/d ;;
        xfs) mkfs.xfs -qf /dev/mapper/d ;;
        btrfs) mkfs.btrfs -qf /dev/mapper/d ;;
    esac
    mount /dev/mapper/d /mnt/d
    transfers $kind
    disks $kind
    umount /mnt/d
    echo "$kind: done"
done

# The device itself.
for options in ,mode=writeback ,mode=direct ,cache=8M:writeback; do
    dd if=/dev/zero of=/dev/mapper/d bs=1M count=16 oflag=direct status=none
    serve_disk "/dev/mapper/d$options"
    nbd -c 'write -P 7 512 3000K' -c flush
    disk lies
    nbd -c 'write -P 9 512 3000K' -c flush
    ends
    disk well
    qemu-io -f raw -r -c 'read -P 7 512 3000K' /dev/mapper/d >/tmp/qemu
    ! grep -q 'Pattern verification failed' /tmp/qemu || { echo "flushed and not on the device ($options)" >&2; exit 1; }
done
