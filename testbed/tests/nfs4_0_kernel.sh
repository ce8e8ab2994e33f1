# title: Linux's own NFS clients, two of them, version 4.0: owners whose operations are numbered, locks, restarts
# limit: 300
hosts ours a b
share_directory
SHARES=(--share data=/tmp/served/data,squash=none --nfs-lease 15)
serve_shares
told_apart a b
for client in a b; do
    mount_as $client 4.0 /data /mnt/$client
    grep -q " /mnt/$client nfs4 .*vers=4.0" /proc/mounts
done
use_share /mnt/a /tmp/served/data

echo '--- users whose rights differ'
install -m 600 -o 1000 -g 1000 /dev/null /mnt/a/private
setpriv --reuid 1000 --regid 1000 --clear-groups sh -c 'echo mine >/mnt/b/private'
fails setpriv --reuid 1001 --regid 1001 --clear-groups cat /mnt/a/private 2>/dev/null
[[ $(setpriv --reuid 1000 --regid 1000 --clear-groups cat /mnt/a/private) == mine ]]

echo '--- a file that the other removes stays open, here and over a restart'
echo here >/mnt/a/removed
exec 7</mnt/a/removed
rm /mnt/b/removed
echo 3 >/proc/sys/vm/drop_caches
[[ $(cat <&7) == here ]]
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
exec 8>&-
add() { for n in {1..15}; do flock "/mnt/$1/lock" sh -c "echo $1 >>/mnt/$1/lines"; done; }
add a &
adder=$!
add b
wait $adder
[[ $(sort /mnt/a/lines | uniq -c | xargs) == '15 a 15 b' ]]

echo '--- a server that is killed while it is written to'
head -c 30M /dev/urandom >/tmp/random
dd if=/tmp/random of=/mnt/a/written bs=64k conv=fsync status=none &
copy=$!
has_begun() { [[ -s /tmp/served/data/written ]]; }
wait_until 60 has_begun
restart_shares
wait $copy
echo 3 >/proc/sys/vm/drop_caches
cmp /tmp/random /mnt/b/written
cmp /tmp/random /tmp/served/data/written
umount /mnt/a /mnt/b
kill $daemon
wait $daemon
fails grep -E 'ERROR|panicked' /tmp/said
