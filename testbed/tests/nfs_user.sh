# title: a directory that an ordinary user shares by NFS: git, moves, a daemon that is killed, files that its host moves
# limit: 300
user=(setpriv --reuid 1000 --regid 1000 --clear-groups)
as_user() { "${user[@]}" "$@"; }
mkdir -p /tmp/served /tmp/state /mnt/{3,4}
truncate -s 400M /tmp/served.ext4
mkfs.ext4 -q /tmp/served.ext4
mount -o loop /tmp/served.ext4 /tmp/served
mkdir /tmp/served/data
chown 1000:1000 /tmp/served/data /tmp/state
chmod 700 /tmp/served/data

start() {
    : >/tmp/serve.json
    chmod 666 /tmp/serve.json
    # No function: its process would be the one that is killed. It does not inherit files of its own shares, which it would have to
    # close over the network when it is killed.
    "${user[@]}" "$THRUWAY" serve --json --share data=/tmp/served/data --nfs 127.0.0.1:"${port:-0}" --nfs-lease 10 \
        --state /tmp/state >/tmp/serve.json 2>>/tmp/said 7>&- 8>&- &
    daemon=$!
    until_written /tmp/serve.json
    port=$(grep -o '127.0.0.1:[0-9]*' /tmp/serve.json | head -n 1 | cut -d : -f 2)
}
start
grep -q 'not started by root' /tmp/said
mount -t nfs -o vers=3,proto=tcp,port=$port,mountport=$port,mountproto=tcp,nolock 127.0.0.1:/data /mnt/3
mount -t nfs -o vers=4.2,proto=tcp,port=$port 127.0.0.1:/data /mnt/4
restart() {
    kill -9 $daemon
    wait $daemon || true
    start
}
forget() { echo 3 >/proc/sys/vm/drop_caches; }

echo '--- git, whose files are read-only when they are written'
export HOME=/tmp GIT_CONFIG_GLOBAL=/tmp/gitconfig
printf '[user]\nname = guest\nemail = guest@example.org\n[init]\ndefaultBranch = main\n[safe]\ndirectory = *\n' >/tmp/gitconfig
chmod 644 /tmp/gitconfig
for v in 3 4; do
    as_user cp -r /usr/share/zoneinfo/Europe /mnt/$v/made$v
    as_user git -C /mnt/$v/made$v init -q
    as_user git -C /mnt/$v/made$v add .
    as_user git -C /mnt/$v/made$v commit -qm one
    as_user git clone -q --no-hardlinks /mnt/$v/made$v /mnt/$v/cloned$v
    as_user git -C /mnt/$v/cloned$v gc -q
    as_user git -C /mnt/$v/cloned$v fsck --strict 2>/tmp/fsck || { cat /tmp/fsck; exit 1; }
    same /mnt/$v/cloned$v /tmp/served/data/cloned$v
done
[[ $(find /tmp/served/data ! -user 1000 | wc -l) == 0 ]]

echo '--- what its permissions forbid, its owner may do over the network'
for v in 3 4; do
    as_user sh -c "umask 377; exec 7>/mnt/$v/closed$v; echo written >&7; exec 7>&-"
    [[ $(stat -c %a:%s /tmp/served/data/closed$v) == 400:8 ]]
    as_user chmod 0 /mnt/$v/closed$v
    fails as_user cat /mnt/$v/closed$v 2>/dev/null
    [[ $(stat -c %a /tmp/served/data/closed$v) == 0 ]]
done
# Not what is another's, whichever user the client names.
echo secret >/tmp/served/data/roots
chmod 600 /tmp/served/data/roots
fails cat /mnt/4/roots 2>/dev/null
fails as_user cat /mnt/3/roots 2>/dev/null
as_user touch /mnt/4/users
fails as_user chown 1001 /mnt/4/users 2>/dev/null
fails chown 0 /mnt/4/users 2>/dev/null
rm /tmp/served/data/roots

echo '--- killed while files are open, moved and deleted'
for v in 3 4; do
    mkdir -p /tmp/served/data/dir$v/deep
    chown -R 1000:1000 /tmp/served/data/dir$v
    exec 7<>/mnt/$v/dir$v/deep/file 8</mnt/$v/dir$v
    echo one >&7
    restart
    # The client has its handles only; what they name is where a client has moved it.
    mv /mnt/$v/dir$v /mnt/$v/moved$v
    restart
    echo two >&7
    sync -f /mnt/$v
    [[ $(cat /tmp/served/data/moved$v/deep/file) == $'one\ntwo' ]]
    # And where a program of the server's host has.
    kill -9 $daemon
    wait $daemon || true
    mv /tmp/served/data/moved$v/deep /tmp/served/data/away$v
    start
    forget
    echo three >&7
    sync -f /mnt/$v
    [[ $(cat /tmp/served/data/away$v/file) == $'one\ntwo\nthree' ]]
    ls /proc/self/fd/8/ >/dev/null
    exec 7>&- 8<&-
done
same /mnt/3/made4 /tmp/served/data/made4
same /mnt/4/made3 /tmp/served/data/made3
# Without its table it finds everything, too.
exec 7</mnt/3/away3/file 8</mnt/4/away4/file
kill -9 $daemon
wait $daemon || true
rm /tmp/state/nfs-paths-data
start
forget
[[ $(cat <&7) == $'one\ntwo\nthree' && $(cat <&8) == $'one\ntwo\nthree' ]]
exec 7<&- 8<&-

echo '--- many files, and all away'
as_user /usr/bin/python3 - <<'P'
import os
os.mkdir("/mnt/4/many")
for n in range(3000):
    os.close(os.open(f"/mnt/4/many/{n}", os.O_CREAT | os.O_WRONLY))
P
forget
[[ $(ls -l /mnt/3/many | wc -l) == 3001 ]]
as_user rm -r /mnt/4/many
as_user rm -rf /mnt/3/made3 /mnt/4/{made4,cloned3,cloned4,moved3,moved4,away3,away4,closed3,closed4,users}
[[ -z $(ls -A /tmp/served/data) ]]
umount /mnt/3 /mnt/4
kill $daemon
wait $daemon
