# title: directories of Linux's NFS server and of nfs-ganesha as file systems, and shared again with Linux's clients
# limit: 300
mkdir -p /tmp/served /mnt/a /mnt/b /run/rpcbind /run/ganesha /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /proc/fs/nfsd /tmp/g/recovery /tmp/g/share
truncate -s 128M /tmp/disk
mkfs.ext4 -q /tmp/disk
mount -o loop /tmp/disk /tmp/served
rmdir /tmp/served/lost+found
mkdir /tmp/served/tests /tmp/served/data
ip link set lo up
rpcbind -w

# contract AT PATH LACKS: the contract of file systems, but for these cases.
contract() {
    THRUWAY_NFS_SERVER=$1 THRUWAY_NFS_PATH=$2 THRUWAY_NFS_LACKS=$3 RUST_BACKTRACE=0 \
        "$NFS_TESTS" --ignored --exact nfs_remote::another_server_keeps_the_contract_but_for_what_it_lacks
}

echo '--- nfs-ganesha'
cat >/tmp/g/conf <<'C'
NFS_CORE_PARAM { NFS_Port = 10949; MNT_Port = 10948; NFS_Protocols = 3,4; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }
NFSv4 { Graceless = true; RecoveryRoot = /tmp/g/recovery; Only_Numeric_Owners = true; }
EXPORT {
    Export_Id = 1; Path = /tmp/g/share; Pseudo = /share; Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Protocols = 3,4;
    Transports = TCP; PrivilegedPort = false; FSAL { Name = VFS; }
}
LOG { Default_Log_Level = CRIT; }
C
mount --bind /tmp/served/tests /tmp/g/share
ganesha.nfsd -F -f /tmp/g/conf -L /tmp/g/log -p /tmp/g/pid &
ganesha=$!
until_listening - 10949
# It checks rights at each READ, and has no extended attributes.
contract 127.0.0.1:10949 share 'open_files_keep_their_rights extended_attributes_are_kept'
kill $ganesha
wait $ganesha || true
umount /tmp/g/share
find /tmp/served/tests -mindepth 1 -delete

echo '--- Linux'
mount -t nfsd nfsd /proc/fs/nfsd 2>/dev/null || true
exportfs -o rw,no_root_squash,insecure,fsid=0,sync 127.0.0.1:/tmp/served
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
rpc.mountd --no-nfs-version 3 -N 3 2>/dev/null || rpc.mountd
rpc.nfsd -N 3 -U 2
# It checks rights at each READ.
contract 127.0.0.1:2049 tests open_files_keep_their_rights

echo '--- shared again'
share() {
    "$THRUWAY" serve --quiet --nfs 127.0.0.1:20490 --nfs-lease 10 --state /tmp/state --share again=nfs://127.0.0.1/data,squash=none 7>&- >/tmp/serve.log 2>&1 &
    daemon=$!
    until_listening - 20490
}
share
mount -t nfs4 -o port=20490,minorversion=2 127.0.0.1:/again /mnt/a
mount -t nfs -o vers=3,proto=tcp,port=20490,mountport=20490,mountproto=tcp,nolock 127.0.0.1:/again /mnt/b
cp -r /usr/include/linux /mnt/a/tree
same /usr/include/linux /tmp/served/data/tree
same /mnt/a/tree /tmp/served/data/tree
same /mnt/b/tree /tmp/served/data/tree
head -c 20M /dev/urandom >/mnt/b/large
same /mnt/b/large /tmp/served/data/large
mv /mnt/a/tree/nfs.h /mnt/a/renamed
ln /mnt/a/renamed /mnt/a/linked
ln -s renamed /mnt/b/link
chmod 640 /mnt/b/renamed
chown 1234:2345 /mnt/a/renamed
[[ $(stat -c '%a %u %g %h' /tmp/served/data/renamed) == '640 1234 2345 2' ]]
[[ $(readlink /tmp/served/data/link) == renamed ]]

# A file that is delegated to the client by both servers, and changed on the first one's host.
echo old >/tmp/served/data/delegated
exec 9</mnt/a/delegated
[[ $(cat /mnt/a/delegated) == old ]]
grep -q 'type: deleg' /proc/fs/nfsd/clients/*/states
echo new >/tmp/served/data/delegated
[[ $(cat /mnt/a/delegated) == new ]]
exec 9<&-

# Both servers are started again while a file is open.
exec 7>>/mnt/a/open
echo before >&7
kill -9 $daemon
wait $daemon || true
share
echo between >&7
rpc.nfsd 0
rpc.nfsd -N 3 -U 2
echo after >&7
exec 7>&-
[[ $(cat /tmp/served/data/open) == $'before\nbetween\nafter' ]]
# What was removed while it was open is there until it is closed.
exec 8<>/mnt/b/large
rm /mnt/b/large
cmp -n 1000 /dev/fd/8 /dev/fd/8
exec 8>&-
rm -r /mnt/a/tree
umount /mnt/a /mnt/b
kill $daemon
wait $daemon
