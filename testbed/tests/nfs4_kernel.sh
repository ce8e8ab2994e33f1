# title: Linux's own NFS clients, two of them, versions 4.1 and 4.2: coherence, locks, holes, attributes, restarts, a client that dies
# limit: 600
hosts ours a b
share_directory
export THRUWAY_LOG=info,thruway_nfs::v4=debug
SHARES=(--share data=/tmp/served/data,squash=none --share still=/tmp/served/data,ro --share memory=mem:64M,squash=none --nfs-lease 30)
serve_shares
told_apart a b

mount_as a 4.1 /data /mnt/a
use_share /mnt/a /tmp/served/data
umount /mnt/a
mount_as a 4.2 /data /mnt/a
mount_as b 4.2 /data /mnt/b
use_share /mnt/a /tmp/served/data

echo '--- the shares, and what can be read only'
mount_as b 4.2 / /mnt/n
[[ $(ls /mnt/n) == $'data\nmemory\nstill' ]]
echo here >/mnt/a/file
[[ $(cat /mnt/n/still/file) == here ]]
fails touch /mnt/n/still/file 2>/dev/null
fails touch /mnt/n/new 2>/dev/null
fails cat /mnt/n/none/file 2>/dev/null
umount /mnt/n/still /mnt/n

echo '--- what one writes the other reads'
echo one >/mnt/a/file
[[ $(cat /mnt/b/file) == one ]]
echo two >>/mnt/b/file
[[ $(cat /mnt/a/file) == $'one\ntwo' ]]
mv /mnt/a/file /mnt/a/moved
[[ $(cat /mnt/b/moved) == $'one\ntwo' ]]
chmod 640 /mnt/b/moved
[[ $(stat -c %a /mnt/a/moved) == 640 ]]

echo '--- a file that only one reads is not asked for again, until somebody changes it'
recalls() { grep -c 'recall answered' /tmp/said || true; }
echo one >/tmp/served/data/kept
[[ $(cat /mnt/a/kept) == one ]]
before=$(opens /mnt/a)
for n in {1..20}; do [[ $(cat /mnt/a/kept) == one ]]; done
[[ $(opens /mnt/a) == "$before" ]]
# A program of the server's host waits until the client has heard of it.
echo two >/tmp/served/data/kept
[[ $(cat /mnt/a/kept) == two ]]
(($(recalls) == 1))
echo one >/tmp/served/data/other
[[ $(cat /mnt/a/other) == one ]]
echo two >/mnt/b/other
[[ $(cat /mnt/a/other) == two ]]
(($(recalls) == 2))
# Permissions and names, of which the client hears afterwards.
echo one >/tmp/served/data/third
[[ $(cat /mnt/a/third) == one ]]
chmod 600 /tmp/served/data/third
changed() { [[ $(stat -c %a /mnt/a/third) == 600 ]]; }
wait_until 100 changed
(($(recalls) == 3))

# Removed and replaced by programs of the host: what is open stays open, and the client can give it back.
echo one | tee /tmp/served/data/gone >/tmp/served/data/replaced
[[ $(cat /mnt/a/gone) == one && $(cat /mnt/a/replaced) == one ]]
exec 7</mnt/a/gone
rm /tmp/served/data/gone
echo two >/tmp/served/data/new
mv /tmp/served/data/new /tmp/served/data/replaced
[[ $(cat <&7) == one ]]
exec 7<&-
replaced() { [[ $(cat /mnt/a/replaced) == two ]]; }
wait_until 100 replaced

echo '--- memory, where clients keep what they write until others look'
mkdir /mnt/am /mnt/bm
mount_as a 4.2 /memory /mnt/am
mount_as b 4.2 /memory /mnt/bm
head -c 3000000 /dev/urandom >/tmp/random
/usr/bin/python3 - <<'P'
import os
data = open("/tmp/random", "rb").read()
# With permissions that would not let it be opened again.
fd = os.open("/mnt/am/kept", os.O_RDWR | os.O_CREAT, 0o600)
os.write(fd, data)
os.fchmod(fd, 0)
# Listed, looked at and read by the other, while it is open.
assert [e.stat().st_size for e in os.scandir("/mnt/bm")] == [len(data)]
assert open("/mnt/bm/kept", "rb").read() == data
os.pwrite(fd, b"more", 0)
os.fsync(fd)
os.close(fd)
assert open("/mnt/bm/kept", "rb").read() == b"more" + data[4:]
P
for n in {1..10}; do
    echo "a $n" >>/mnt/am/lines
    [[ $(tail -n 1 /mnt/bm/lines) == "a $n" ]]
    echo "b $n" >>/mnt/bm/lines
    [[ $(tail -n 1 /mnt/am/lines) == "b $n" ]]
done
umount /mnt/am /mnt/bm
fails grep 'not given back in time' /tmp/said

echo '--- a file that the other removes stays open'
exec 7</mnt/a/moved
rm /mnt/b/moved
echo 3 >/proc/sys/vm/drop_caches
[[ $(cat <&7) == $'one\ntwo' ]]
exec 7<&-

echo '--- locks, also over a restart of the server'
touch /mnt/a/lock
exec 8<>/mnt/a/lock
flock 8
fails flock -n /mnt/b/lock true
restart_shares
fails flock -n /mnt/b/lock true
flock -u 8
flock -n /mnt/b/lock true
# Each adds lines to one file under a lock.
add() { for n in {1..20}; do flock "/mnt/$1/lock" sh -c "echo $1 >>/mnt/$1/lines"; done; }
add a &
adder=$!
add b
wait $adder
[[ $(sort /mnt/a/lines | uniq -c | xargs) == '20 a 20 b' ]]
# Waiting clients did not poll: they got callbacks.
grep -q 'callback answered.*status=0' /tmp/said

echo '--- a client that dies'
flock 8
ip -n a link set eth0 down
wait_until 200 flock -n /mnt/b/lock true
ip -n a link set eth0 up
exec 8>&-
ls /mnt/a >/dev/null

echo '--- holes, storage, copies'
truncate -s 100M /mnt/a/holes
printf x | dd of=/mnt/a/holes bs=1 seek=50M conv=notrunc status=none
seek() { python3 -c "import os,sys; f = os.open(sys.argv[1], 0); print(os.lseek(f, int(sys.argv[2]), os.$3))" "$1" "$2"; }
[[ $(seek /mnt/b/holes 0 SEEK_DATA) == $((50 << 20)) ]]
(($(seek /mnt/b/holes $((50 << 20)) SEEK_HOLE) <= (50 << 20) + 65536))
fails fallocate -l 800M /mnt/a/storage 2>/dev/null
[[ $(stat -c %s /mnt/a/storage) == 0 && $(stat -c %s /tmp/served/data/storage) == 0 ]]
rm /mnt/a/storage
# Its blocks are free when the last descriptor of the file is closed.
until (($(df --output=avail -k /tmp/served/data | tail -1) > 65536)); do sleep 0.1; done
fallocate -l 8M /mnt/a/storage
(($(stat -c %b /tmp/served/data/storage) * 512 >= 8 << 20))
fallocate -p -o 1M -l 4M /mnt/a/storage
(($(stat -c %b /tmp/served/data/storage) * 512 < 6 << 20))
head -c 20M /dev/urandom >/mnt/a/source
cp /mnt/a/source /mnt/a/copy
cmp /tmp/served/data/source /tmp/served/data/copy
# Beyond 64 MiB the client is called when it is done; a copy that is interrupted is cancelled.
copy_all() { python3 -c "import os,sys; f, t = os.open(sys.argv[1], 0), os.open(sys.argv[2], 0o1102); print(os.copy_file_range(f, t, 1 << 30))" "$1" "$2"; }
[[ $(copy_all /mnt/a/holes /mnt/a/long) == $((100 << 20)) ]]
cmp /mnt/b/holes /mnt/b/long
grep -q 'end of a copy answered' /tmp/said
rm /mnt/a/long

echo '--- extended attributes'
setfattr -n user.colour -v blue /mnt/a/source
[[ $(getfattr --only-values -n user.colour /mnt/b/source) == blue ]]
[[ $(getfattr --only-values -n user.colour /tmp/served/data/source) == blue ]]
setfattr -n user.size -v big /mnt/b/source
[[ $(getfattr /mnt/a/source 2>/dev/null | grep -c ^user) == 2 ]]
setfattr -x user.colour /mnt/b/source
fails getfattr -n user.colour /mnt/a/source 2>/dev/null

echo '--- a server that is killed while it is written to'
head -c 60M /dev/urandom >/tmp/random
dd if=/tmp/random of=/mnt/a/written bs=64k conv=fsync status=none &
copy=$!
has_begun() { [[ -s /tmp/served/data/written ]]; }
wait_until 60 has_begun
for _ in 1 2 3; do restart_shares; done
wait $copy
echo 3 >/proc/sys/vm/drop_caches
cmp /tmp/random /mnt/b/written
cmp /tmp/random /tmp/served/data/written
umount /mnt/a /mnt/b
kill $daemon
wait $daemon
fails grep -E 'ERROR|panicked' /tmp/said
