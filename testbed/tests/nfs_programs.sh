# title: programs as people use them on NFS: git, SQLite of two hosts, make, memory mappings, lines appended by two hosts
# limit: 600
hosts ours a b
share_directory
SHARES=(--share data=/tmp/served/data,squash=none --nfs-lease 30)
serve_shares
told_apart a b
mount_as a 4.2 /data /mnt/a
mount_as b 4.2 /data /mnt/b

echo '--- git: made by one host, cloned, packed and checked by the other'
export HOME=/tmp GIT_CONFIG_GLOBAL=/tmp/gitconfig
git config --global safe.directory '*'
git config --global user.name guest
git config --global user.email guest@example.org
git config --global init.defaultBranch main
cp -a /usr/share/zoneinfo/Europe /mnt/a/made
git -C /mnt/a/made init -q
git -C /mnt/a/made add .
git -C /mnt/a/made commit -qm one
git clone -q --no-hardlinks /mnt/b/made /mnt/b/cloned
for n in {1..5}; do echo $n >>/mnt/b/cloned/Paris; git -C /mnt/b/cloned commit -qam $n; done
git -C /mnt/b/cloned gc -q
git -C /mnt/b/cloned fsck --strict 2>/tmp/fsck || { cat /tmp/fsck; exit 1; }
git -C /mnt/a/made pull -q /mnt/a/cloned main
[[ -z $(git -C /mnt/b/made status --short) && $(git -C /mnt/b/made rev-list --count HEAD) == 6 ]]
same /mnt/a/cloned /tmp/served/data/cloned
rm -rf /mnt/a/made /mnt/a/cloned
[[ -z $(ls -A /tmp/served/data) ]]

echo '--- a database that two hosts write to'
sqlite3 /mnt/a/db 'create table t(host text, n int)'
insert() { for n in {1..25}; do sqlite3 -cmd '.timeout 60000' "/mnt/$1/db" "insert into t values('$1', $n)"; done; }
insert a &
other=$!
insert b
wait $other
[[ $(sqlite3 /mnt/a/db 'select host, count(distinct n) from t group by host' | xargs) == 'a|25 b|25' ]]
[[ $(sqlite3 /mnt/b/db 'pragma integrity_check') == ok ]]

echo '--- a program that one host builds and the other runs'
mkdir /mnt/a/src
for n in {1..12}; do echo "int f$n(void) { return $n; }" >/mnt/a/src/f$n.c; done
{
    for n in {1..12}; do echo "int f$n(void);"; done
    echo 'int main(void) { return !(0'
    for n in {1..12}; do echo "+ f$n()"; done
    echo '== 78); }'
} >/mnt/a/src/main.c
printf 'all: main f1.o f2.o f3.o f4.o f5.o f6.o f7.o f8.o f9.o f10.o f11.o f12.o\nmain: main.o %s\n' \
    "$(echo f{1..12}.o)" >/mnt/a/src/Makefile
make -s -C /mnt/a/src -j2
/mnt/b/src/main
touch /mnt/b/src/f3.c
[[ $(make -C /mnt/a/src | grep -c -- -c) == 1 ]]
make -s -C /mnt/a/src -q

echo '--- a mapping of memory, and lines of two hosts in one file'
/usr/bin/python3 - <<'P'
import mmap, os, random
n, r = 4 << 20, random.Random(1)
with open("/mnt/a/map", "wb") as f:
    f.truncate(n)
fd = os.open("/mnt/a/map", os.O_RDWR)
mapped, expected = mmap.mmap(fd, n), bytearray(n)
for _ in range(1000):
    at, data = r.randrange(n - 5000), r.randbytes(r.randrange(1, 5000))
    mapped[at:at + len(data)] = data
    expected[at:at + len(data)] = data
mapped.flush()
mapped.close()
os.close(fd)
for path in ("/mnt/b/map", "/tmp/served/data/map"):
    assert open(path, "rb").read() == bytes(expected), path
P
touch /mnt/a/lines
append() { for n in {1..50}; do flock "/mnt/$1/lines" sh -c "echo $1 $n >>/mnt/$1/lines"; done; }
append a &
other=$!
append b
wait $other
[[ $(sort -u /mnt/b/lines | wc -l) == 100 && $(wc -l </tmp/served/data/lines) == 100 ]]
umount /mnt/a /mnt/b
