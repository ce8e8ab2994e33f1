# title: two hosts, each with Debian's own kernel: a tree goes from siw on one to user space on the other and back, then over rxe
# guests: 2
# limit: 180
case $GUEST in
1)
    mkdir /tmp/served
    "$THRUWAY" serve --quiet --anonymous --listen 10.0.1.1:7117 --export e=/tmp/served &
    until_listening - 7117
    touch "$SHARED/user"
    until_there "$SHARED/copied"
    rdma link add rxe0 type rxe netdev eth0
    "$THRUWAY" serve --json --anonymous --provider verbs --listen 10.0.1.1:7118 --export e=/tmp/served >/tmp/ready &
    until_written /tmp/ready
    touch "$SHARED/rxe"
    until_there "$SHARED/done"
    same /usr/share/perl5 /tmp/served/perl5
    same /usr/share/perl5 /tmp/served/rxe
    ;;
2)
    rdma link add siw0 type siw netdev eth0
    until_there "$SHARED/user"
    "$THRUWAY" cp -rp --quiet --provider verbs /usr/share/perl5 tw://10.0.1.1:7117/e/
    "$THRUWAY" cp -rp --quiet --provider verbs tw://10.0.1.1:7117/e/perl5 /tmp/back
    same /usr/share/perl5 /tmp/back
    rdma link del siw0
    rdma link add rxe0 type rxe netdev eth0
    touch "$SHARED/copied"
    until_there "$SHARED/rxe"
    "$THRUWAY" cp -rp --quiet --provider verbs /usr/share/perl5 tw://10.0.1.1:7118/e/rxe
    touch "$SHARED/done"
    ;;
esac
