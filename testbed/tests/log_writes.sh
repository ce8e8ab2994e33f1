# title: whenever the power fails, every file is whole, old or new, and what was flushed or said to be done is there
# limit: 400
# contents DIR: a line for each file that has its name, as sha256sum writes it.
contents() { (cd "$1" && find . -type f ! -name '.*.tw-*' ! -name '.thruway-*' -print0 | sort -z | xargs -0r sha256sum); }

# names CONTENTS: what `contents` has found, without what is in it.
names() { cut -c67- "$1" | sort; }

# Two versions of a tree: half the files differ, one is large.
mkdir -p /tmp/old /mnt/d /mnt/r
for i in {1..60}; do head -c $((RANDOM + 1)) /dev/urandom >"/tmp/old/$i"; done
head -c 6M /dev/urandom >/tmp/old/large
cp -rp /tmp/old /tmp/new
for i in {1..30}; do head -c $((RANDOM + 1)) /dev/urandom >"/tmp/new/$i"; done
head -c 6M /dev/urandom >/tmp/new/large
mkdir /tmp/new/added
for i in {1..20}; do head -c 3000 /dev/urandom >"/tmp/new/added/$i"; done
contents /tmp/old >/tmp/contents.old
contents /tmp/new >/tmp/contents.new
sort -u /tmp/contents.{old,new} >/tmp/contents.either

files() {
    local point name said='' checked=0 every resumed number
    log_on
    case $1 in
        ext4) mkfs.ext4 -qF -E nodiscard /dev/mapper/d ;;
        xfs) mkfs.xfs -qfK /dev/mapper/d ;;
        btrfs) mkfs.btrfs -qfK /dev/mapper/d ;;
    esac
    mount /dev/mapper/d /mnt/d
    sync
    mark begun
    mkdir /mnt/d/tree
    "$THRUWAY" cp -rp --quiet --bwlimit 6M /tmp/old/. /mnt/d/tree
    mark old
    "$THRUWAY" cp -rp --quiet --bwlimit 6M /tmp/new/. /mnt/d/tree
    mark new
    umount /mnt/d
    log_off
    new_image
    # The marks, and some of the others (`cargo xtask replay`: as many as wanted).
    every=$(($(wc -l </tmp/points) / ${POINTS:-24} + 1))
    resumed=0 number=0
    while read -r point name; do
        [[ $name == begun ]] && said=begun
        [[ -n $said ]] || continue
        number=$((number + 1))
        [[ $name != - ]] || ((number % every == 0)) || continue
        [[ $name == - ]] || said=$name
        power_fails "$point"
        cp --sparse=always /tmp/image /tmp/after
        # Where the disk itself was: the same command goes on.
        mount -o loop /tmp/after /mnt/d
        mkdir -p /mnt/d/tree
        contents /mnt/d/tree | sort >/tmp/found
        comm -23 /tmp/found /tmp/contents.either >/tmp/wrong
        [[ ! -s /tmp/wrong ]] || { echo "$1: neither old nor new where the power fails at $point:"; cat /tmp/wrong; exit 1; }
        case $said in
            # What was said to be there is there.
            old)
                comm -23 <(names /tmp/contents.old) <(names /tmp/found) >/tmp/wrong
                [[ ! -s /tmp/wrong ]] || { echo "$1: not there any more at $point:"; cat /tmp/wrong; exit 1; }
                ;;
            new) sort /tmp/contents.new | cmp - /tmp/found ;;
        esac
        # And it is gone on from: wherever the second copy was in progress, and now and then elsewhere.
        if [[ $said == old || ($said != begun && $((checked % 3)) == 0) ]]; then
            "$THRUWAY" cp -rp --json /tmp/new/. /mnt/d/tree >/tmp/result
            contents /mnt/d/tree | cmp - /tmp/contents.new
            [[ -z $(find /mnt/d/tree -name '*.tw-*') ]]
            resumed=$((resumed + $(grep -o '"resumed_bytes":[0-9]*' /tmp/result | cut -d: -f2)))
        fi
        umount /mnt/d
        if [[ $1 == ext4 ]]; then fsck.ext4 -fn /tmp/after >/tmp/fsck || { cat /tmp/fsck; exit 1; }; fi
        checked=$((checked + 1))
    done </tmp/points
    ((checked >= 12))
    ((resumed > 0)) || { echo "$1: nothing was resumed" >&2; exit 1; }
    echo "$1: $checked of $(wc -l </tmp/points) points"
}

# disks file|device OPTIONS: rounds of writes and a flush, and of writes with FUA, by NBD to such a disk.
disks() {
    local what=$1 options=$2 round point name checked=0 show=()
    log_on
    if [[ $what == file ]]; then
        mkfs.ext4 -qF -E nodiscard /dev/mapper/d
        mount /dev/mapper/d /mnt/d
        truncate -s 16M /mnt/d/image
        sync
        serve_disk "/mnt/d/image$options"
    else
        serve_disk "/dev/mapper/d$options"
    fi
    /usr/bin/python3 - <<'END'
import nbd, subprocess

client = nbd.NBD()
client.connect_uri("nbd://127.0.0.1:10809/d")
mark = lambda name: subprocess.run(["dmsetup", "message", "d", "0", "mark", name], check=True)
for n in range(1, 7):
    client.pwrite(bytes([n]) * (300 << 10), 0)
    client.pwrite(bytes([n]) * 5120, n << 20)
    client.flush()
    mark(f"flush-{n}")
    client.pwrite(bytes([n + 100]) * 8192, 512 << 10, nbd.CMD_FLAG_FUA)
    mark(f"fua-{n}")
END
    kill -9 $daemon
    wait $daemon || true
    rm -f /dev/shm/thruway-cache-*
    if [[ $what == file ]]; then umount /mnt/d; fi
    log_off
    new_image
    while read -r point name; do
        [[ $name == *-* && $name != - ]] || continue
        power_fails "$point"
        show=(/tmp/image)
        if [[ $what == file ]]; then
            cp --sparse=always /tmp/image /tmp/after
            mount -o loop /tmp/after /mnt/r
            show=(/mnt/r/image)
        fi
        round=${name#*-}
        show+=(-c "read -P $round 0 300K" -c "read -P $round ${round}M 5120")
        [[ $name == flush-* ]] || show+=(-c "read -P $((round + 100)) 512K 8K")
        qemu-io -f raw -r "${show[@]:1}" "${show[0]}" >/tmp/qemu
        ! grep 'Pattern verification failed' /tmp/qemu || { echo "$what$options: gone at $name"; exit 1; }
        if [[ $what == file ]]; then umount /mnt/r; fi
        checked=$((checked + 1))
    done </tmp/points
    ((checked == 12))
    echo "$what$options: $checked points"
}

for kind in ext4 xfs btrfs; do files $kind; done
for options in '' ,mode=direct ,mode=cached ,cache=8M:writeback; do disks file "$options"; done
for options in ,mode=writeback ,mode=direct ,cache=8M:writeback; do disks device "$options"; done

# What nobody has flushed is not there, or this test tests nothing.
log_on
dd if=/dev/urandom of=/dev/mapper/d bs=64K count=1 oflag=direct status=none
mark unflushed
log_off
new_image
power_fails "$(grep unflushed /tmp/points | cut -d' ' -f1)"
cmp -s -n 65536 /tmp/image /dev/zero
