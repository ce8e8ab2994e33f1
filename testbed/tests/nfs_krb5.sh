# title: Linux's own NFS client with Kerberos, every version, signed and encrypted, over TCP and RDMA: users are who they prove to be
# limit: 300
hosts ours
kernel_end siw
share_directory
realm_start
chmod 1777 /tmp/served/data
install -m 600 -o 1000 -g 1000 /dev/null /tmp/served/data/private
echo mine >/tmp/served/data/private
SHARES=(--share data=/tmp/served/data,sec=krb5:krb5i:krb5p --share open=mem:1M --nfs-rdma 10.0.0.1:20049
    --nfs-keytab /tmp/realm/nfs.keytab --nfs-lease 15)
serve_shares
mkdir -p /run/rpc_pipefs
mount -t rpc_pipefs none /run/rpc_pipefs
rpc.gssd -f >/tmp/gssd 2>&1 &
as() { local uid=$1; shift; setpriv --reuid "$uid" --regid "$uid" --clear-groups env KRB5CCNAME="FILE:/tmp/krb5cc_$uid" "$@"; }
as 1000 kinit -k -t /tmp/realm/alice.keytab alice
as 1001 kinit -k -t /tmp/realm/bob.keytab bob
head -c 3M /dev/urandom >/tmp/random

# use_proven OPTIONS: mounts, and uses the share as three users.
use_proven() {
    echo "--- $1"
    mount -t nfs -o "$1" server.test:/data /mnt/n
    [[ $(as 1000 cat /mnt/n/private) == mine ]]
    fails as 1001 cat /mnt/n/private 2>/dev/null
    # Nobody here: the machine's own principal, and a user without tickets.
    fails cat /mnt/n/private 2>/dev/null
    fails as 1002 cat /mnt/n/private 2>/dev/null
    as 1001 sh -c 'cat /tmp/random >/mnt/n/of-bob; sync /mnt/n/of-bob'
    [[ $(stat -c %u:%g /tmp/served/data/of-bob) == 1001:1001 ]]
    echo 3 >/proc/sys/vm/drop_caches
    as 1000 cmp /mnt/n/of-bob /tmp/random
    fails as 1000 sh -c 'echo other >>/mnt/n/of-bob' 2>/dev/null
    as 1001 chgrp "${2:-1001}" /mnt/n/of-bob
    as 1001 rm /mnt/n/of-bob
    umount /mnt/n
}
for flavor in krb5 krb5i krb5p; do
    # Without rpcbind the ports are to be said, and there are no locks.
    use_proven vers=3,proto=tcp,sec=$flavor,port=2049,mountport=2049,nolock
    for version in 4.0 4.1 4.2; do
        use_proven vers=$version,proto=tcp,sec=$flavor
    done
    use_proven vers=4.2,proto=rdma,port=20049,sec=$flavor
done

echo '--- a server that is killed: contexts are made again'
mount -t nfs -o vers=4.2,proto=tcp,sec=krb5p server.test:/data /mnt/n
head -c 30M /dev/urandom >/tmp/more
as 1001 dd if=/tmp/more of=/mnt/n/written bs=64k conv=fsync status=none &
copy=$!
has_begun() { [[ -s /tmp/served/data/written ]]; }
wait_until 60 has_begun
restart_shares
wait $copy
cmp /tmp/more /tmp/served/data/written
echo '--- a delegation is called back'
[[ $(as 1000 cat /mnt/n/private) == mine ]]
echo changed >/tmp/served/data/private
[[ $(as 1000 cat /mnt/n/private) == changed ]]
umount /mnt/n

echo '--- without Kerberos there is nothing'
mount -t nfs -o vers=4.2,proto=tcp server.test:/open /mnt/n
umount /mnt/n
fails mount -t nfs -o vers=4.2,sec=sys,proto=tcp server.test:/data /mnt/n 2>/dev/null
echo '--- the client finds out what it needs'
mount -t nfs -o vers=4.2,proto=tcp server.test:/ /mnt/n
[[ $(as 1000 cat /mnt/n/data/private) == changed ]]
grep -q ' /mnt/n/data nfs4 .*sec=krb5,' /proc/mounts
umount /mnt/n/data
umount /mnt/n
kill $daemon
wait $daemon
fails grep -E 'ERROR|panicked' /tmp/said
