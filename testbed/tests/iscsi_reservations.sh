# title: two of Linux's iSCSI initiators on one disk: persistent reservations, and both paths as one by multipath
# limit: 120
truncate -s 64M /tmp/disk
serve() {
    : >/tmp/serve.json
    "$THRUWAY" serve --json --state /tmp/state --block a=/tmp/disk,target=t --iscsi 127.0.0.1:3260 \
        --nbd 127.0.0.1:10809 >/tmp/serve.json &
    daemon=$!
    until_written /tmp/serve.json
}
serve
initiator_start
for name in one two; do
    iscsiadm -m iface -o new -I $name >/dev/null
    iscsiadm -m iface -o update -I $name -n iface.transport_name -v tcp >/dev/null
    iscsiadm -m iface -o update -I $name -n iface.initiatorname -v iqn.2026-11.org.example:$name >/dev/null
    iscsiadm -m node -T $iqn -p 127.0.0.1:3260 -I $name -o new >/dev/null
    iscsiadm -m node -T $iqn -p 127.0.0.1:3260 -I $name --login
done
has_both() {
    disks=($(compgen -G '/sys/class/iscsi_session/session*/device/target*/*:0/block/*' || true))
    ((${#disks[@]} == 2))
}
wait_until 60 has_both
one=/dev/${disks[0]##*/} two=/dev/${disks[1]##*/}
for d in $one $two; do until_readable "${d##*/}"; done

write() { dd if=/dev/urandom of="$1" bs=4096 count=1 oflag=direct status=none 2>/dev/null; }
write $one
write $two
# Write exclusive, registrants only: who is not registered reads, but does not write.
sg_persist --out --register --param-sark=0x1 $one >/dev/null
sg_persist --out --reserve --param-rk=0x1 --prout-type=5 $one >/dev/null
sg_persist --in --read-reservation $two >/tmp/reservation
grep -q 'Key=0x1' /tmp/reservation
write $one
fails write $two
# A client of NBD is somebody who is not registered.
nbd-client -N a 127.0.0.1 10809 /dev/nbd0 >/dev/null
fails write /dev/nbd0
dd if=/dev/nbd0 of=/dev/null bs=4096 count=1 iflag=direct status=none
dd if=$two of=/dev/null bs=4096 count=1 iflag=direct status=none
sg_persist --out --register --param-sark=0x2 $two >/dev/null
write $two
# The second takes it over from the first.
sg_persist --out --preempt --param-rk=0x2 --param-sark=0x1 --prout-type=5 $two >/dev/null
write $two
fails write $one
sg_persist --out --clear --param-rk=0x2 $two >/dev/null
write $one
write /dev/nbd0
nbd-client -d /dev/nbd0 >/dev/null
# Whoever has asked for that is kept out by the next daemon, too, by whatever protocol.
sg_persist --out --register --param-sark=0x1 $one >/dev/null
sg_persist --out --reserve --param-rk=0x1 --prout-type=5 $one >/dev/null
[[ ! -e /tmp/state/reservations ]]
sg_persist --out --register-ignore --param-aptpl --param-sark=0x1 $one >/dev/null
kill -9 $daemon
wait $daemon || true
serve
nbd-client -N a 127.0.0.1 10809 /dev/nbd0 >/dev/null
fails write /dev/nbd0
nbd-client -d /dev/nbd0 >/dev/null
wait_until 60 write $one
fails write $two
sg_persist --in --read-reservation $two >/tmp/reservation
grep -q 'Key=0x1' /tmp/reservation
sg_persist --out --clear --param-rk=0x1 $one >/dev/null
write $two

# Both are one disk: they say the same name, and are joined by it.
same_id() { [[ $(sg_inq --page=0x83 "$1" | grep -m1 -A1 'NAA') == $(sg_inq --page=0x83 "$2" | grep -m1 -A1 'NAA') ]]; }
same_id $one $two
size=$(blockdev --getsz $one)
dmsetup create both --table "0 $size multipath 0 0 1 1 round-robin 0 2 1 $(tr -d ' ' <"/sys/block/${one##*/}/dev") 1 $(tr -d ' ' <"/sys/block/${two##*/}/dev") 1"
dmsetup mknodes
mkfs.ext4 -qF /dev/mapper/both
mkdir -p /mnt/both
mount /dev/mapper/both /mnt/both
head -c 8M /dev/urandom >/tmp/random
cp /tmp/random /mnt/both/first
# One of the paths goes while it is written to.
cp /tmp/random /mnt/both/second &
copy=$!
iscsiadm -m node -T $iqn -p 127.0.0.1:3260 -I one --logout
wait $copy
sync
same /tmp/random /mnt/both/first
same /tmp/random /mnt/both/second
umount /mnt/both
dmsetup remove both
