# title: Linux's own iSCSI initiator: CHAP, digests, file systems, recovery when the target is killed
# limit: 300
mkdir -p /tmp/disk
truncate -s 600M /tmp/disk/a.img
printf 'initiator alice wonderland-12\ntarget server looking-glass\n' >/tmp/chap
iqn=iqn.2026-11.org.thruway

serve() {
    "$THRUWAY" -v serve --json --block a=/tmp/disk/a.img,target=t --block m=mem:600M,target=t \
        --iscsi 127.0.0.1:3260 --chap /tmp/chap >/tmp/serve.json 2>>/tmp/serve.log &
    daemon=$!
    until_written /tmp/serve.json
}
serve

mkdir -p /run/lock/iscsi /etc/iscsi
echo "InitiatorName=iqn.2026-11.org.example:guest" >/etc/iscsi/initiatorname.iscsi
sed -i 's/^node.startup.*/node.startup = manual/' /etc/iscsi/iscsid.conf
iscsid -f >/tmp/iscsid.log 2>&1 &
# iscsiadm answers 21, no sessions, once the daemon is there.
for _ in {1..200}; do
    status=0
    iscsiadm -m session >/dev/null 2>&1 || status=$?
    [[ $status == 21 ]] && break
    read -rt 0.05 <> <(:) || true
done

set_node() { iscsiadm -m node -T $iqn:t -p 127.0.0.1:3260 -o update -n "$1" -v "$2"; }
cat >>/etc/iscsi/iscsid.conf <<CONF
discovery.sendtargets.auth.authmethod = CHAP
discovery.sendtargets.auth.username = alice
discovery.sendtargets.auth.password = wonderland-12
CONF
iscsiadm -m discovery -t sendtargets -p 127.0.0.1:3260 | tee /tmp/found
grep -q "$iqn:t" /tmp/found
# Without the secret nobody gets in.
! iscsiadm -m node -T $iqn:t -p 127.0.0.1:3260 --login >/dev/null 2>&1
set_node node.session.auth.authmethod CHAP
set_node node.session.auth.username alice
set_node node.session.auth.password wonderland-12
set_node node.session.auth.username_in server
set_node node.session.auth.password_in looking-glass
set_node node.conn[0].iscsi.HeaderDigest CRC32C
set_node node.conn[0].iscsi.DataDigest CRC32C
set_node node.session.timeo.replacement_timeout 60
iscsiadm -m node -T $iqn:t -p 127.0.0.1:3260 --login

device() { for _ in {1..200}; do d=$(ls -d /sys/class/iscsi_session/session*/device/target*/*:$1/block/* 2>/dev/null | head -1); [[ -n $d ]] && { echo "/dev/${d##*/}"; return; }; read -rt 0.05 <> <(:) || true; done; return 1; }
a=$(device 0)
m=$(device 1)
for d in $a $m; do [[ -b $d ]] || mknod "$d" b $(tr : ' ' <"/sys/block/${d##*/}/dev"); done

mkfs.ext4 -qF "$a"
mkfs.xfs -qf "$m"
mkdir -p /mnt/a /mnt/m
mount "$a" /mnt/a
mount "$m" /mnt/m
head -c 150M /dev/urandom >/tmp/random
cp /tmp/random /mnt/m/random
sync
same /tmp/random /mnt/m/random
umount /mnt/m
mount "$m" /mnt/m
same /tmp/random /mnt/m/random
umount /mnt/m
fstrim -v /mnt/a

# The target is killed while it is written to, and started again: the initiator goes on where it was.
cp /tmp/random /mnt/a/random &
copy=$!
kill -9 $daemon
wait $daemon || true
: >/tmp/serve.json
serve
wait $copy
sync
umount /mnt/a
mount "$a" /mnt/a
same /tmp/random /mnt/a/random
umount /mnt/a
iscsiadm -m node -T $iqn:t -p 127.0.0.1:3260 --logout
echo done
