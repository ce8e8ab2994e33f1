# title: locks of NFS version 3 by Linux's client (NLM, NSM, rpcbind): waits, other versions, restarts of server and clients
# limit: 240
hosts ours a b
share_directory
chmod 777 /tmp/served/data

# client NAME: a host with an rpcbind, a status monitor and mounts of its own, as `in_NAME`.
client() {
    : >"/tmp/$1.pid"
    ip netns exec "$1" unshare -m --propagation private bash -c '
        mount -t tmpfs tmpfs /run
        mount -t tmpfs tmpfs /var/lib/nfs
        mkdir -p /run/lock /run/rpcbind /var/lib/nfs/sm /var/lib/nfs/sm.bak /mnt/n4
        chown -R statd /var/lib/nfs 2>/dev/null || true
        rpcbind
        rpc.statd --no-notify
        echo $$ >/tmp/'"$1"'.pid
        exec sleep infinity' >"/tmp/$1.log" 2>&1 &
    until_written "/tmp/$1.pid"
}
as_of() { nsenter -t "$(cat "/tmp/$1.pid")" -m -n "${@:2}"; }
client a
client b

SHARES=(--share data=/tmp/served/data,squash=none --nfs-rpcbind own --nfs-lease 5 -vv)
serve_shares
echo '--- found by rpcbind, without any port'
as_of a rpcinfo -p 10.0.0.1 >/tmp/known
for program in '100003 *3 *tcp' '100003 *4 *tcp' '100005 *3 *tcp' '100021 *4 *tcp' '100024 *1 *tcp' '100024 *1 *udp'; do
    grep -q "$program" /tmp/known || { cat /tmp/known; exit 1; }
done
as_of a showmount -e 10.0.0.1 >/tmp/shown
grep -q '^/data' /tmp/shown
as_of a mount -t nfs -o vers=3,proto=tcp 10.0.0.1:/data /mnt/n
as_of b mount -t nfs -o vers=3,proto=tcp 10.0.0.1:/data /mnt/n
as_of b mount -t nfs -o vers=4.2,proto=tcp 10.0.0.1:/data /mnt/n4

cat >/tmp/lock.py <<'PY'
"""lock.py FILE sh|ex|sh-now|ex-now START LEN SAID RELEASE: locks, says so in SAID, and lets go when RELEASE appears. get: who has it."""
import fcntl, os, struct, sys, time
path, how, start, length, said, release = sys.argv[1:7]
file = open(path, "r+b")
if how == "get":
    flock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, int(start), int(length), 0)
    kind, _, at, size, pid = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, flock)[:28])
    sys.exit(print(kind == fcntl.F_UNLCK and "free" or f"{kind} {at} {size}"))
kind = fcntl.LOCK_SH if how.startswith("sh") else fcntl.LOCK_EX
try:
    fcntl.lockf(file, kind | (fcntl.LOCK_NB if how.endswith("now") else 0), int(length), int(start))
except BlockingIOError:
    sys.exit(3)
open(said, "w").write("locked\n")
while not os.path.exists(release):
    time.sleep(0.02)
PY
lock() { as_of "$1" python3 /tmp/lock.py "${@:2}"; }
# is_free HOST FILE START LEN, and is_taken: whether a lock could be had at once.
is_free() { rm -f /tmp/x; lock "$1" "$2" ex-now "$3" "$4" /tmp/x /tmp/served; }
is_taken() {
    local status=0
    is_free "$@" || status=$?
    ((status == 3)) || { echo "the lock of $2 at $3 can be had, or not be tried: $status" >&2; return 1; }
}
touch /tmp/served/data/file

echo '--- clients of both versions exclude each other'
lock a /mnt/n/file ex 100 50 /tmp/said1 /tmp/go1 &
first=$!
until_written /tmp/said1
is_taken b /mnt/n/file 149 10
is_free b /mnt/n/file 150 10
is_free b /mnt/n/file 0 100
is_taken b /mnt/n4/file 120 1
[[ $(lock b /mnt/n/file get 0 0 - -) == "1 100 50" ]]
[[ $(lock b /mnt/n4/file get 0 0 - -) == "1 100 50" ]]
touch /tmp/go1
wait $first
is_free b /mnt/n4/file 0 0
lock b /mnt/n4/file sh 0 0 /tmp/said2 /tmp/go2 &
second=$!
until_written /tmp/said2
is_taken a /mnt/n/file 7 1
rm -f /tmp/x
lock a /mnt/n/file sh-now 7 1 /tmp/x /tmp/served
touch /tmp/go2
wait $second
is_free a /mnt/n/file 0 0

echo '--- a client that waits is called'
lock a /mnt/n/file ex 0 10 /tmp/said3 /tmp/go3 &
first=$!
until_written /tmp/said3
lock b /mnt/n/file ex 5 10 /tmp/said4 /tmp/go4 &
second=$!
lock b /mnt/n/file ex 0 1 /tmp/said5 /tmp/go5 &
third=$!
waits() { [[ $(grep -c 'a lock is waited for' /tmp/said) -ge $1 ]]; }
wait_until 60 waits 2
[[ ! -e /tmp/said4 && ! -e /tmp/said5 ]]
touch /tmp/go3
until_written /tmp/said4
until_written /tmp/said5
wait $first
wait_until 60 grep -q 'told that it has a lock' /tmp/said
is_taken a /mnt/n/file 5 1
touch /tmp/go4 /tmp/go5
wait $second $third
is_free a /mnt/n/file 0 0

echo '--- a process that waits is killed'
lock a /mnt/n/file ex 0 10 /tmp/said6 /tmp/go6 &
first=$!
until_written /tmp/said6
as_of b python3 /tmp/lock.py /mnt/n/file ex 0 10 /tmp/said7 /tmp/go7 &
second=$!
wait_until 60 waits 3
pkill -9 -f 'ex 0 10 /tmp/said7'
wait $second || true
touch /tmp/go6
wait $first
wait_until 60 is_free a /mnt/n/file 0 10

echo '--- a server that is killed: locks are reclaimed'
lock a /mnt/n/file ex 10 10 /tmp/said8 /tmp/go8 &
first=$!
until_written /tmp/said8
for _ in 1 2; do
    : >/tmp/said
    restart_shares
    wait_until 60 grep -q 'told to reclaim' /tmp/said
    # Waits until the time to reclaim is over.
    is_taken b /mnt/n/file 10 1
    is_free b /mnt/n/file 0 10
done

echo '--- a client that restarts: its locks are gone'
as_of a sm-notify -f
wait_until 60 grep -q 'its locks are gone' /tmp/said
wait_until 60 is_free b /mnt/n/file 10 1
touch /tmp/go8
wait $first

echo '--- an rpcbind of the host'
as_of a umount /mnt/n
as_of b umount /mnt/n
as_of b umount /mnt/n4
kill $daemon
wait $daemon
ip netns exec ours rpcbind
SHARES=(--share data=/tmp/served/data,squash=none --nfs-lease 5)
serve_shares
grep -q '"rpcbind":"registered"' /tmp/serve.json
as_of b rpcinfo -p 10.0.0.1 >/tmp/known
grep -q '100021 *4 *tcp *2049' /tmp/known
restart_shares
as_of b rpcinfo -p 10.0.0.1 >/tmp/known
grep -q '100021 *4 *tcp *2049' /tmp/known
as_of b mount -t nfs -o vers=3,proto=tcp 10.0.0.1:/data /mnt/n
is_free b /mnt/n/file 0 0
as_of b umount /mnt/n
kill $daemon
wait $daemon
as_of b rpcinfo -p 10.0.0.1 >/tmp/known
fails grep -E '10000[35]|10002[14]' /tmp/known
fails grep -E 'WARN|ERROR' /tmp/said
umount /tmp/served
