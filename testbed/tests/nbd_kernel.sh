# title: Linux's own NBD client: ext4, xfs and btrfs under load, over several connections
# limit: 240
mkdir -p /tmp/disk
truncate -s 600M /tmp/disk/a.img
"$THRUWAY" serve --json --block a=/tmp/disk/a.img --block m=mem:600M --nbd 127.0.0.1:10809 >/tmp/serve.json &
until_written /tmp/serve.json

# fill DIR: a tree with every kind of entry, and its sums.
fill() {
    cp -r /usr/share/doc/bash /usr/share/zoneinfo "$1/" 2>/dev/null || true
    head -c 100M /dev/urandom >"$1/large"
    mkdir "$1/many"
    for i in {1..500}; do echo "$i" >"$1/many/$i"; done
    (cd "$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum) >/tmp/sums
}

round() {
    local export=$1 kind=$2
    nbd-client -N "$export" -C 4 127.0.0.1 /dev/nbd0 >/dev/null
    case $kind in
        ext4) mkfs.ext4 -qF /dev/nbd0 ;;
        xfs) mkfs.xfs -qf /dev/nbd0 ;;
        btrfs) mkfs.btrfs -qf /dev/nbd0 ;;
    esac
    mkdir -p /mnt/a
    mount "/dev/nbd0" /mnt/a
    fill /mnt/a
    fstrim /mnt/a || true
    umount /mnt/a
    nbd-client -d /dev/nbd0 >/dev/null
    # Another connection sees what was written.
    nbd-client -N "$export" -C 4 127.0.0.1 /dev/nbd0 >/dev/null
    mount "/dev/nbd0" /mnt/a
    (cd /mnt/a && sha256sum --quiet -c /tmp/sums)
    umount /mnt/a
    nbd-client -d /dev/nbd0 >/dev/null
    echo "$export $kind: done"
}

round a ext4
round m xfs
round a btrfs
