# title: Linux's own NFS client, version 3 over TCP: trees, permissions, links, long directories, a server that is killed
# limit: 240
mkdir -p /tmp/served /tmp/state /mnt/n
truncate -s 400M /tmp/served.ext4
mkfs.ext4 -q /tmp/served.ext4
mount -o loop /tmp/served.ext4 /tmp/served
rmdir /tmp/served/lost+found
mkdir -m 755 /tmp/served/data

start() {
    : >/tmp/serve.json
    "$THRUWAY" serve --json --share data=/tmp/served/data,squash=none --share root=/tmp/served \
        --share still=/tmp/served/data,ro --nfs 127.0.0.1:2049 --state /tmp/state >/tmp/serve.json 2>>/tmp/said &
    daemon=$!
    until_written /tmp/serve.json
}
options=vers=3,proto=tcp,port=2049,mountport=2049,mountproto=tcp,nolock
start
mount -t nfs -o $options 127.0.0.1:/data /mnt/n

echo '--- a tree'
mkdir -p /tmp/tree/deep/er
for i in {1..30}; do head -c $((RANDOM * 3)) /dev/urandom >"/tmp/tree/$i"; done
head -c 12M /dev/urandom >/tmp/tree/deep/large
ln -s ../1 /tmp/tree/deep/link
ln /tmp/tree/2 /tmp/tree/hard
mkfifo /tmp/tree/fifo
mknod /tmp/tree/device c 1 3
chmod 4755 /tmp/tree/3
touch -d '2001-02-03 04:05:06.789' /tmp/tree/4
chown 1000:1001 /tmp/tree/5
cp -a /tmp/tree /mnt/n/tree
list() { (cd "$1" && find . -printf '%P %y %m %n %U:%G %s %T@ %l\n' | sed 's/^\(.* d .*\) [0-9]* \([0-9.]* \)$/\1 \2/' | sort); }
echo 3 >/proc/sys/vm/drop_caches
regular() { (cd "$1" && find . -type f -exec sha256sum {} + | sort -k2); }
[[ $(regular /tmp/tree) == "$(regular /mnt/n/tree)" ]]
diff <(list /tmp/tree) <(list /mnt/n/tree)
diff <(list /tmp/tree) <(list /tmp/served/data/tree)
[[ $(stat -c %t:%T /mnt/n/tree/device) == 1:3 ]]

echo '--- changes'
mv /mnt/n/tree/deep /mnt/n/tree/other
mv /mnt/n/tree/6 /mnt/n/tree/7
[[ ! -e /mnt/n/tree/6 && -e /tmp/served/data/tree/other/er ]]
cmp /tmp/tree/6 /mnt/n/tree/7
truncate -s 5 /mnt/n/tree/8
[[ $(cat /tmp/served/data/tree/8 | wc -c) == 5 ]]
printf xyz | dd of=/mnt/n/tree/9 bs=1 seek=1000 conv=notrunc status=none
printf xyz | dd of=/tmp/tree/9 bs=1 seek=1000 conv=notrunc status=none
cmp /tmp/tree/9 /tmp/served/data/tree/9
fails rmdir /mnt/n/tree 2>/dev/null
fails mkdir /mnt/n/tree 2>/dev/null
fails cat /mnt/n/none 2>/dev/null
fails touch "/mnt/n/$(printf 'x%.0s' {1..256})" 2>/dev/null
touch "/mnt/n/$(printf 'x%.0s' {1..255})"
exec 7<>/mnt/n/tree/10
rm /mnt/n/tree/10
echo still here >&7
cat /proc/self/fd/7 >/dev/null
exec 7>&-
[[ ! -e /tmp/served/data/tree/10 ]]
rm -r /mnt/n/tree
[[ -z $(ls -A /tmp/served/data | grep -v ^xxx) ]]

echo '--- permissions'
mkdir -m 700 /mnt/n/private
echo secret >/mnt/n/private/file
as() { setpriv --reuid="$1" --regid="$2" --groups="$3" "${@:4}"; }
fails as 1000 1000 1000 cat /mnt/n/private/file 2>/dev/null
mkdir -m 775 /mnt/n/team
chown 0:2000 /mnt/n/team
as 1000 1000 5,2000 touch /mnt/n/team/mine
[[ $(stat -c %u:%g /tmp/served/data/team/mine) == 1000:1000 ]]
fails as 1001 1000 5 touch /mnt/n/team/other 2>/dev/null
fails as 1001 1000 5 chmod 777 /mnt/n/team/mine 2>/dev/null
# What the owner has opened stays writable to it.
as 1000 1000 2000 bash -c 'exec 8>/mnt/n/team/closed; chmod 0 /mnt/n/team/closed; echo data >&8'
[[ $(cat /tmp/served/data/team/closed) == data ]]
chmod 6777 /mnt/n/team/mine
as 1001 1001 1001 bash -c 'echo more >>/mnt/n/team/mine'
[[ $(stat -c %a /tmp/served/data/team/mine) == 777 ]]
# Root counts as nobody where it is not said otherwise.
mkdir /mnt/root
mount -t nfs -o $options 127.0.0.1:/root /mnt/root
fails touch /mnt/root/file 2>/dev/null
fails ls /mnt/root/data/private 2>/dev/null
umount /mnt/root
mount -t nfs -o $options 127.0.0.1:/still /mnt/root
fails touch /mnt/root/file 2>/dev/null
fails cat /mnt/root/team/closed 2>/dev/null
chmod 644 /mnt/n/team/closed
[[ $(cat /mnt/root/team/closed) == data ]]
umount /mnt/root
fails mount -t nfs -o $options,retry=0 127.0.0.1:/none /mnt/root 2>/dev/null

echo '--- a long directory'
mkdir /mnt/n/many
(cd /tmp/served/data/many && seq 20000 | xargs touch)
[[ $(ls -f /mnt/n/many | sort -u | wc -l) == 20002 && $(ls -f /mnt/n/many | wc -l) == 20002 ]]
[[ $(ls -l /mnt/n/many | wc -l) == 20001 ]]
(cd /mnt/n/many && seq 2000 | xargs rm)
[[ $(ls /mnt/n/many | wc -l) == 18000 && $(ls /tmp/served/data/many | wc -l) == 18000 ]]

echo '--- verified load'
fio --name=v --directory=/mnt/n --size=24M --bsrange=512-256k --rw=randrw --verify=crc32c --verify_fatal=1 \
    --ioengine=psync --numjobs=2 --fsync=50 --output=/tmp/fio || { cat /tmp/fio; exit 1; }
fio --name=d --directory=/mnt/n --size=24M --bsrange=4k-1m --rw=randwrite --verify=crc32c --verify_fatal=1 \
    --ioengine=libaio --iodepth=16 --direct=1 --output=/tmp/fio || { cat /tmp/fio; exit 1; }

echo '--- a server that is killed'
head -c 60M /dev/urandom >/tmp/random
dd if=/tmp/random of=/mnt/n/copy bs=64k conv=fsync status=none &
copy=$!
has_begun() { [[ -s /tmp/served/data/copy ]]; }
wait_until 60 has_begun
for _ in 1 2 3; do
    kill -9 $daemon
    wait $daemon || true
    start
done
wait $copy
echo 3 >/proc/sys/vm/drop_caches
cmp /tmp/random /mnt/n/copy
cmp /tmp/random /tmp/served/data/copy
umount /mnt/n
kill $daemon
wait $daemon
if grep -v '^$' /tmp/said; then exit 1; fi
umount /tmp/served
