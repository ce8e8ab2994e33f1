# title: access control lists by Linux's own NFS clients: POSIX ones by version 3, and version 4's, which say the same
# limit: 300
# backend: qemu
hosts ours a b
share_directory
chmod 777 /tmp/served/data
SHARES=(--share data=/tmp/served/data,squash=none --nfs-lease 15)
serve_shares
modprobe -a nfs nfsv3 nfsv4
told_apart a b
nsenter --net=/run/netns/a mount -t nfs -o vers=3,proto=tcp,mountproto=tcp,port=2049,mountport=2049,nolock 10.0.0.1:/data /mnt/a
mount_as b 4.2 /data /mnt/b
as() { local uid=$1; shift; setpriv --reuid "$uid" --regid "$uid" --clear-groups "$@"; }
# The lists of a file, as the host has them, without comments.
host() { getfacl -cEn "/tmp/served/data/$1" | xargs; }

echo '--- version 3: a user more, and what a directory passes on'
echo text >/mnt/a/file
chmod 640 /mnt/a/file
fails as 1000 cat /mnt/a/file 2>/dev/null
setfacl -m u:1000:rw /mnt/a/file
[[ $(host file) == 'user::rw- user:1000:rw- group::r-- mask::rw- other::---' ]]
[[ $(getfacl -cEn /mnt/a/file | xargs) == "$(host file)" ]]
[[ $(as 1000 cat /mnt/a/file) == text && $(as 1000 cat /mnt/b/file) == text ]]
fails as 1001 cat /mnt/b/file 2>/dev/null
as 1000 sh -c 'echo more >>/mnt/b/file'
fails as 1000 setfacl -m u:1001:r /mnt/a/file 2>/dev/null
mkdir /mnt/a/dir
setfacl -d -m g:50:rwx /mnt/a/dir
touch /mnt/b/dir/inherits
[[ $(host dir/inherits) == *group:50:rw* ]]
setfacl -b /mnt/a/file
[[ $(host file) == 'user::rw- group::r-- other::---' ]]
fails as 1000 cat /mnt/b/file 2>/dev/null

echo '--- version 4: what is there is told, and what can be said is set'
nfs4_getfacl /mnt/b/dir >/tmp/told
grep -q '^A:fdig:50:' /tmp/told
nfs4_setfacl -a A::1000:rwatcy /mnt/b/file
[[ $(host file) == 'user::rw- user:1000:rw- group::r-- mask::rw- other::---' ]]
[[ $(as 1000 cat /mnt/a/file) == 'text more' || $(as 1000 cat /mnt/a/file | xargs) == 'text more' ]]
nfs4_getfacl /mnt/b/file >/tmp/told
grep -q '^A::1000:rwatcy' /tmp/told
# As it is told it can be set, on another file.
echo other >/mnt/b/second
nfs4_setfacl -S /tmp/told /mnt/b/second
[[ $(host second) == "$(host file)" ]]
# A denial for one user, whom the owner may be: it is for those who are not.
nfs4_setfacl -s 'A::OWNER@:rwatcy,D::1001:rwax,A:g:GROUP@:rtcy,A::EVERYONE@:rtcy' /mnt/b/second
[[ $(host second) == 'user::rw- user:1001:--- group::r-- mask::r-- other::r--' ]]
fails as 1001 cat /mnt/a/second 2>/dev/null
as 1002 cat /mnt/a/second >/dev/null
echo '--- what POSIX cannot say is refused, and nothing is changed'
before=$(host second)
fails nfs4_setfacl -a A::1002:atcy /mnt/b/second 2>/dev/null
fails nfs4_setfacl -s 'D::1002:r,A::OWNER@:rwatcy,A::EVERYONE@:rtcy' /mnt/b/second 2>/dev/null
fails nfs4_setfacl -a A::no-such-user@nowhere:rtcy /mnt/b/second 2>/dev/null
fails as 1000 nfs4_setfacl -a A::1000:rwatcy /mnt/b/second 2>/dev/null
[[ $(host second) == "$before" ]]
umount /mnt/a /mnt/b
kill $daemon
wait $daemon
fails grep -E 'ERROR|panicked' /tmp/said
