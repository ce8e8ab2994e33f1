# title: Linux's own NBD client: the server is killed under load and started again, and its connections are replaced
# limit: 180
mkdir -p /tmp/disk /mnt/a
truncate -s 600M /tmp/disk/a.img
serve() {
    : >/tmp/serve.json
    "$THRUWAY" serve --json --block a=/tmp/disk/a.img --nbd 127.0.0.1:10809 >/tmp/serve.json &
    daemon=$!
    until_written /tmp/serve.json
}
linux() { python3 "$(dirname "${BASH_SOURCE[0]}")/../nbd_netlink.py" "$@"; }

serve
linux connect 0 a 10809 2
mkfs.ext4 -qF /dev/nbd0
mount /dev/nbd0 /mnt/a
head -c 150M /dev/urandom >/tmp/random
for round in 1 2 3; do
    cp /tmp/random /mnt/a/random$round &
    copy=$!
    # In the middle of it: a part has arrived.
    has_part() { (($(stat -c %b /tmp/disk/a.img) * 512 > round * 40 * 1048576)) || ! kill -0 $copy 2>/dev/null; }
    wait_until 60 has_part
    kill -9 $daemon
    wait $daemon || true
    serve
    linux reconnect 0 a 10809 2
    wait $copy
    sync -f /mnt/a
done
umount /mnt/a
mount /dev/nbd0 /mnt/a
for round in 1 2 3; do same /tmp/random /mnt/a/random$round; done
umount /mnt/a
linux disconnect 0
# What the file holds is what the file system says, past Linux's client too.
e2fsck -fn /tmp/disk/a.img >/dev/null
echo done
