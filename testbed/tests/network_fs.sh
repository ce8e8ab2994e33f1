# title: NFS, FUSE, vfat and directories that fold names, as source and as target of copies
# limit: 240
mkdir -p /tmp/tree/deep/er /tmp/served /mnt/n /mnt/f /tmp/below
for i in {1..30}; do head -c $((RANDOM * 3)) /dev/urandom >"/tmp/tree/$i"; done
head -c 12M /dev/urandom >/tmp/tree/deep/large
head -c 5000 /dev/urandom >/tmp/tree/deep/er/leaf
chmod 640 /tmp/tree/3
touch -d '2001-02-03 04:05:06' /tmp/tree/4

# there_and_back DIR: to it, changed, to it again with deletion, and from it, and resumed after a kill.
there_and_back() {
    local copy i
    "$THRUWAY" cp -rp --quiet /tmp/tree/. "$1/tree"
    same /tmp/tree "$1/tree"
    [[ $(stat -c %Y "$1/tree/4") == "$(stat -c %Y /tmp/tree/4)" ]]
    rm -rf /tmp/back
    "$THRUWAY" cp -rp --quiet "$1/tree/." /tmp/back
    same /tmp/tree /tmp/back
    "$THRUWAY" cp -rp --quiet --bwlimit 8M /tmp/tree/. "$1/again" &
    copy=$!
    has_begun() { compgen -G "$1/again/deep/.large.tw-*" >/dev/null; }
    wait_until 60 has_begun "$1"
    kill -9 $copy
    wait $copy || true
    "$THRUWAY" cp -rp --quiet /tmp/tree/. "$1/again"
    same /tmp/tree "$1/again"
    rm "$1/again/3"
    echo other >"$1/again/4"
    echo more >"$1/again/not-ours"
    "$THRUWAY" cp -rp --quiet --update --delete /tmp/tree/. "$1/again"
    same /tmp/tree "$1/again"
    rm -r "$1/tree" "$1/again"
    [[ -z $(ls -A "$1") || $(ls -A "$1") == lost+found ]]
}

echo '--- NFS'
truncate -s 64M /tmp/nfs.ext4
mkfs.ext4 -q /tmp/nfs.ext4
mount -o loop /tmp/nfs.ext4 /tmp/served
rmdir /tmp/served/lost+found
mkdir -p /run/rpcbind /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /proc/fs/nfsd
mount -t nfsd nfsd /proc/fs/nfsd 2>/dev/null || true
exportfs -o rw,no_root_squash,insecure,fsid=0,sync 127.0.0.1:/tmp/served
# Nobody has been here before who could want back what it had.
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
rpc.mountd --no-nfs-version 3 -N 3 2>/dev/null || rpc.mountd
rpc.nfsd -N 3 -U 2
mount -t nfs4 -o soft,timeo=50,retrans=2 127.0.0.1:/ /mnt/n
there_and_back /mnt/n
# No room at the server: the client's kernel tells it at the sync, or when the file is closed.
head -c 80M /dev/urandom >/tmp/much
fails "$THRUWAY" cp --quiet --retries 0 /tmp/much /mnt/n/ 2>/tmp/said
grep -q 'No space left\|Input/output error' /tmp/said || { cat /tmp/said; exit 1; }
[[ ! -e /mnt/n/much ]]
umount /mnt/n

echo '--- FUSE'
bindfs /tmp/below /mnt/f
there_and_back /mnt/f
# Times of this very moment, which a file system that does nothing would seem to keep.
mkdir /tmp/fresh
touch /tmp/fresh/{1..5}
"$THRUWAY" cp -rp --quiet /tmp/fresh/. /mnt/f/fresh
[[ $(stat -c %y /tmp/fresh/*) == "$(stat -c %y /mnt/f/fresh/*)" ]]
umount /mnt/f
# One that says it keeps permissions and owners, and does not.
bindfs --chmod-ignore --chown-ignore /tmp/below /mnt/f
chmod 4755 /tmp/fresh/1
chown 1000 /tmp/fresh/2
fails "$THRUWAY" cp -rp --quiet /tmp/fresh/. /mnt/f/rights 2>/tmp/said
grep -q 'permissions are not preserved' /tmp/said
grep -q 'owners are not preserved' /tmp/said
umount /mnt/f

echo '--- vfat'
truncate -s 64M /tmp/fat
mkfs.vfat /tmp/fat >/dev/null
mkdir /mnt/v
mount -t vfat -o loop /tmp/fat /mnt/v
"$THRUWAY" cp -r --quiet /tmp/tree/. /mnt/v/tree
same /tmp/tree /mnt/v/tree
# Two names of the source that are one there: the second is refused and named, the first stays what it is.
mkdir /tmp/names
echo lower >/tmp/names/name
echo upper >/tmp/names/NAME
fails "$THRUWAY" cp -r --quiet /tmp/names/. /mnt/v/names 2>/tmp/said
grep -qi 'name' /tmp/said
(($(ls /mnt/v/names | wc -l) == 1))
# Links and owners cannot be kept there, and that is told.
ln -s 3 /tmp/names/link
rm /tmp/names/NAME
fails "$THRUWAY" cp -rp --quiet /tmp/names/. /mnt/v/links 2>/tmp/said
grep -q link /tmp/said
same /tmp/names/name /mnt/v/links/name
umount /mnt/v

echo '--- directories that fold names'
truncate -s 64M /tmp/fold
mkfs.ext4 -q -O casefold -E encoding=utf8 /tmp/fold
mkdir /mnt/c
mount -o loop /tmp/fold /mnt/c
mkdir /mnt/c/fold
chattr +F /mnt/c/fold
there_and_back /mnt/c/fold
echo upper >/tmp/names/NAME
rm /tmp/names/link
fails "$THRUWAY" cp -r --quiet /tmp/names/. /mnt/c/fold/names 2>/tmp/said
(($(ls /mnt/c/fold/names | wc -l) == 1))
# A kill between the two halves of it, and again: what is there is one of the two and whole.
for i in {1..5}; do
    "$THRUWAY" cp -r --quiet /tmp/names/. /mnt/c/fold/killed 2>/dev/null &
    copy=$!
    kill -9 $copy
    wait $copy || true
done
fails "$THRUWAY" cp -r --quiet /tmp/names/. /mnt/c/fold/killed 2>/tmp/said
grep -q 'upper\|lower' /mnt/c/fold/killed/*
(($(ls /mnt/c/fold/killed | wc -l) == 1))
[[ -z $(find /mnt/c/fold/killed -name '*.tw-*') ]]
umount /mnt/c
