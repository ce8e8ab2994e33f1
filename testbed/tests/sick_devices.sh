# title: bad sectors, a full thin pool, a device that reports medium errors, a full file behind a device, a file system shut down: each is told
# limit: 300
mkdir -p /mnt/d /tmp/tree
for i in {1..20}; do head -c 100000 /dev/urandom >"/tmp/tree/$i"; done
head -c 8M /dev/urandom >/tmp/tree/large

ends() {
    kill $daemon
    wait $daemon || true
}
nbd() { qemu-io -f raw -t none "$@" nbd://127.0.0.1:10809/d >/tmp/qemu 2>&1 || { cat /tmp/qemu; return 1; }; }
# nbd_fails ARG...: a request fails for want of room or of a sound device, or what was written fails to be flushed (of which
# qemu-io says nothing), and the daemon answers the next.
nbd_fails() {
    fails nbd "$@" >/dev/null
    grep -q 'No space left\|Input/output error\|^wrote' /tmp/qemu || { cat /tmp/qemu; exit 1; }
    nbd -r -c 'read 0 4K'
}
# fails_to CMD...: it fails, and says on its standard error that it was input or output, or that there is no room.
fails_to() {
    fails "$@" 2>/tmp/said
    grep -q 'Input/output error\|No space left\|Read-only file system' /tmp/said || { cat /tmp/said; exit 1; }
}
device() { losetup --find --show "$1"; }

echo '--- sectors that cannot be read'
truncate -s 64M /tmp/dust
loop=$(device /tmp/dust)
size=$(blockdev --getsz "$loop")
dmsetup create dust --table "0 $size dust $loop 0 512"
dmsetup mknodes
mkfs.ext4 -qF -b 4096 /dev/mapper/dust
mount /dev/mapper/dust /mnt/d
cp -rp /tmp/tree /mnt/d/
sync
first=$(filefrag -v /mnt/d/tree/7 | awk '/^ *0:/ {sub(/\.\..*/, "", $4); print $4}')
umount /mnt/d
dmsetup message dust 0 addbadblock $((first * 8 + 16))
dmsetup message dust 0 enable
mount /dev/mapper/dust /mnt/d
# One file cannot be read: it is named, the others arrive.
fails "$THRUWAY" cp -rp --quiet /mnt/d/tree /tmp/copied 2>/tmp/said
grep -q '/7.*Input/output error' /tmp/said || { cat /tmp/said; exit 1; }
[[ ! -e /tmp/copied/7 && ! -e /tmp/copied/tree/7 ]]
mkdir /tmp/rest
cp -rp /tmp/tree/. /tmp/rest
rm /tmp/rest/7
same /tmp/rest "$(dirname "$(find /tmp/copied -name large)")"
umount /mnt/d
# The device itself: what is read there fails, and nothing else; who writes it again reads it again.
for options in ,mode=direct ,mode=writeback ,cache=8M ,cache=8M:writeback; do
    serve_disk "/dev/mapper/dust$options"
    at=$((first * 4096 + 8192))
    nbd_fails -r -c "read $at 4K"
    # The page cache reads as much as it likes as one.
    nbd -r -c "read $((at - (1 << 20))) 64K" -c "read $((at + (1 << 20))) 64K"
    ends
done
serve_disk /dev/mapper/dust,mode=direct
nbd -c "write -P 5 $at 4K" -c flush -c "read -P 5 $at 4K"
ends
dmsetup remove dust

echo '--- a thin pool that is full'
truncate -s 4M /tmp/meta
truncate -s 16M /tmp/data
meta=$(device /tmp/meta) data=$(device /tmp/data)
dmsetup create pool --table "0 $(blockdev --getsz "$data") thin-pool $meta $data 128 0 1 error_if_no_space"
dmsetup message pool 0 'create_thin 0'
dmsetup mknodes
dmsetup create thin --table "0 $((256 << 11)) thin /dev/mapper/pool 0"
dmsetup mknodes
mkfs.ext4 -qF -E nodiscard /dev/mapper/thin
mount /dev/mapper/thin /mnt/d
head -c 40M /dev/urandom >/tmp/much
fails_to "$THRUWAY" cp --quiet --retries 0 /tmp/much /mnt/d/
[[ ! -e /mnt/d/much ]]
umount /mnt/d
for options in ,mode=direct ,mode=writeback ,cache=8M:writeback; do
    serve_disk "/dev/mapper/thin$options"
    # Whatever is said to be written, the flush tells.
    nbd_fails -c 'write -P 6 128M 32M' -c flush
    nbd_fails -c 'write -P 6 128M 4K' -c 'write -P 6 170M 8M' -c flush
    ends
done
dmsetup remove thin
dmsetup remove pool

echo '--- a device with a medium error'
has_disk() {
    [[ -e /sys/bus/pseudo/drivers/scsi_debug/adapter0 ]] || echo 1 >/sys/bus/pseudo/drivers/scsi_debug/add_host
    compgen -G '/sys/bus/pseudo/drivers/scsi_debug/adapter0/host*/target*/*/block/*' >/dev/null
}
wait_until 60 has_disk
disk=$(compgen -G '/sys/bus/pseudo/drivers/scsi_debug/adapter0/host*/target*/*/block/*' | head -n 1)
disk=${disk##*/}
until_readable "$disk"
# Sectors 0x1234 and on are those that it fails to read.
bad=$((0x1234 * 512))
for options in ,mode=direct ,mode=writeback ,cache=4M; do
    echo 0 >/sys/bus/pseudo/drivers/scsi_debug/opts
    serve_disk "/dev/$disk$options"
    nbd -c "write -P 3 0 6M" -c flush
    ends
    echo 3 >/proc/sys/vm/drop_caches
    echo 2 >/sys/bus/pseudo/drivers/scsi_debug/opts
    serve_disk "/dev/$disk$options"
    nbd_fails -r -c "read $bad 512"
    nbd -r -c "read -P 3 $((bad - (1 << 20))) 64K" -c "read -P 3 $((bad + (1 << 20))) 64K"
    ends
done
echo 0 >/sys/bus/pseudo/drivers/scsi_debug/opts

echo '--- a device whose file has no room'
mkdir /mnt/small
mount -t tmpfs -o size=12M none /mnt/small
truncate -s 64M /mnt/small/file
loop=$(device /mnt/small/file)
mkfs.ext4 -qF -E nodiscard "$loop"
mount "$loop" /mnt/d
fails_to "$THRUWAY" cp --quiet --retries 0 /tmp/much /mnt/d/
[[ ! -e /mnt/d/much ]]
umount /mnt/d
for options in ,mode=direct ,mode=writeback ,cache=8M:writeback; do
    serve_disk "$loop$options"
    nbd_fails -c 'write -P 6 20M 32M' -c flush
    ends
done

echo '--- a file system that is shut down'
for kind in ext4 xfs; do
    rm -f /tmp/fs
    truncate -s 400M /tmp/fs
    "mkfs.$kind" -q /tmp/fs
    mount -o loop /tmp/fs /mnt/d
    "$THRUWAY" cp -rp --quiet --retries 0 --bwlimit 4M /tmp/tree /mnt/d/ 2>/tmp/said &
    copy=$!
    has_begun() { compgen -G '/mnt/d/tree/.large.tw-*' >/dev/null; }
    wait_until 60 has_begun
    xfs_io -x -c 'shutdown -f' /mnt/d
    fails wait $copy
    grep -q 'Input/output error' /tmp/said || { cat /tmp/said; exit 1; }
    umount /mnt/d
    mount -o loop /tmp/fs /mnt/d
    "$THRUWAY" cp -rp --quiet /tmp/tree /mnt/d/
    same /tmp/tree /mnt/d/tree
    umount /mnt/d
    echo "$kind: done"
done
