# title: whenever the power fails, names and attributes that an NFS client was told of are there, and data that it flushed
# limit: 400
mkdir -p /mnt/{d,n,r} /tmp/state /tmp/expected

# listing DIR: a line for each file, with what a client has been told of it: type, permissions, links and size of files, times,
# target, extended attributes, content. Btrfs gives new times to what it has found in its log: these are later ones, which no client has cached.
listing() {
    (
        cd "$1"
        find . -mindepth 1 -not -name lost+found \( -type d -printf "%y %m %U $times %p\n" -o -printf "%y %m %U %n %s $times %p %l\n" \) | sort
        find . -type f -print0 | sort -z | xargs -0r getfattr -d -m '^user\.' --
        find . -type f -print0 | sort -z | xargs -0r sha256sum
    )
}

# told NAME: what there is now has been told to the client, and holds from here on.
told() {
    listing /mnt/d/share >"/tmp/expected/$1"
    mark "$1"
}

changes() {
    local n=$1/nfs
    mkdir "$n" && told mkdir
    : >"$n/empty" && told create
    chmod 600 "$n/empty" && told chmod
    ln "$n/empty" "$n/linked" && told link
    ln -s to/nowhere "$n/symlink" && told symlink
    mkfifo "$n/fifo" && told fifo
    chmod 600 "$n/fifo" && told chmod-fifo
    chown -h 1234 "$n/symlink" && told chown-symlink
    mv "$n/linked" "$n/moved" && told rename
    setfattr -n user.colour -v blue "$n/moved" && told setfattr
    dd if=/tmp/random of="$n/data" bs=64k conv=fsync status=none && told data
    truncate -s 100000 "$n/data" && told truncate
    mkdir -p "$n/a/b" && mv "$n/data" "$n/a/b/data" && told moved
    dd if=/tmp/random of="$n/new" bs=4k count=3 conv=fsync status=none && mv "$n/new" "$n/empty" && told replaced
    rm "$n/moved" && told remove
    rmdir "$n/a/b" 2>/dev/null || true
    touch -d @1000000000 "$n/empty" && told touch
    dd if=/tmp/random of="$n/direct" bs=4k count=2 oflag=direct,sync status=none && told stable
    rm -r "$n/a" && told tree
}

# begin KIND [OPTIONS]: a share with these options on a new logged disk with a file system of this kind, mounted at /mnt/n.
begin() {
    log_on
    case $1 in
        ext4) mkfs.ext4 -qF -E nodiscard /dev/mapper/d ;;
        xfs) mkfs.xfs -qfK /dev/mapper/d ;;
        btrfs) mkfs.btrfs -qfK /dev/mapper/d ;;
    esac
    mount /dev/mapper/d /mnt/d
    mkdir /mnt/d/share
    sync
    : >/tmp/serve.json
    "$THRUWAY" serve --json --share "data=/mnt/d/share,squash=none${2:-}" --nfs 127.0.0.1:2049 --state "/tmp/state/$1${2:-}" \
        --nfs-lease 15 >/tmp/serve.json &
    daemon=$!
    until_written /tmp/serve.json
    mount -t nfs -o vers=4.2,port=2049 127.0.0.1:/data /mnt/n
}

# end: the log is whole, and /tmp/image is what was there before.
end() {
    umount /mnt/n
    kill $daemon
    wait $daemon
    umount /mnt/d
    log_off
    new_image
}

head -c 300000 /dev/urandom >/tmp/random
for kind in ext4 xfs btrfs; do
    times='%T@ %C@'
    [[ $kind != btrfs ]] || times=%T@
    begin $kind
    changes /mnt/n
    end
    checked=0
    while read -r point name; do
        [[ $name != - && $name != dm-* ]] || continue
        power_fails "$point"
        cp --sparse=always /tmp/image /tmp/after
        mount -o loop /tmp/after /mnt/r
        listing /mnt/r/share >/tmp/found
        diff "/tmp/expected/$name" /tmp/found || { echo "$kind: the power fails behind $name"; exit 1; }
        umount /mnt/r
        checked=$((checked + 1))
    done </tmp/points
    ((checked == 18))
    echo "$kind: $checked points"
done

# A share that does not promise this does not do it, or this test tests nothing.
begin ext4 ,async
mkdir /mnt/n/nfs
mark mkdir
end
power_fails "$(grep ' mkdir$' /tmp/points | cut -d' ' -f1)"
mount -o loop /tmp/image /mnt/r
[[ ! -e /mnt/r/share/nfs ]]
umount /mnt/r
