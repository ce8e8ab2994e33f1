# title: Linux's own iSCSI initiator: CHAP, digests, file systems, recovery when the target is killed
# limit: 300
mkdir -p /tmp/disk
truncate -s 600M /tmp/disk/a.img
printf 'initiator alice wonderland-12\ntarget server looking-glass\n' >/tmp/chap

serve() {
    "$THRUWAY" -v serve --json --block a=/tmp/disk/a.img,target=t --block m=mem:600M,target=t \
        --iscsi 127.0.0.1:3260 --chap /tmp/chap >/tmp/serve.json 2>>/tmp/serve.log &
    daemon=$!
    until_written /tmp/serve.json
}
serve

initiator_start

set_node() { iscsiadm -m node -T $iqn -p 127.0.0.1:3260 -o update -n "$1" -v "$2"; }
cat >>/etc/iscsi/iscsid.conf <<CONF
discovery.sendtargets.auth.authmethod = CHAP
discovery.sendtargets.auth.username = alice
discovery.sendtargets.auth.password = wonderland-12
CONF
iscsiadm -m discovery -t sendtargets -p 127.0.0.1:3260 | tee /tmp/found
grep -q "$iqn" /tmp/found
# Without the secret nobody gets in.
fails iscsiadm -m node -T $iqn -p 127.0.0.1:3260 --login >/dev/null 2>&1
set_node node.session.auth.authmethod CHAP
set_node node.session.auth.username alice
set_node node.session.auth.password wonderland-12
set_node node.session.auth.username_in server
set_node node.session.auth.password_in looking-glass
set_node node.conn[0].iscsi.HeaderDigest CRC32C
set_node node.conn[0].iscsi.DataDigest CRC32C
set_node node.session.timeo.replacement_timeout 60
iscsiadm -m node -T $iqn -p 127.0.0.1:3260 --login

a=$(disk 0)
# Whoever asks for the state of the path is told, by tools that know the standard.
sg_inq "$a" >/tmp/inq
grep -q 'TPGS=1' /tmp/inq
sg_rtpg --extended --decode "$a" >/tmp/rtpg
grep -q 'active/optimized' /tmp/rtpg
for page in sv 0x83 0x86 0x88 0xb0 0xb1 0xb2; do sg_vpd --page=$page "$a" >/tmp/vpd-$page; done
grep -qi 'relative target port' /tmp/vpd-0x83
grep -qi 'relative port' /tmp/vpd-0x88
sg_opcodes --mask "$a" >/tmp/opcodes
sg_opcodes --tmf "$a" >/tmp/tmf
grep -qi 'logical unit reset' /tmp/tmf
file_systems

mkfs.ext4 -qF "$a"
mount "$a" /mnt/a
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
iscsiadm -m node -T $iqn -p 127.0.0.1:3260 --logout
echo done
