"""Programs with sockets, for the tests of `thruway run`. The first argument says which; all say what has gone wrong and
end with status 1."""
import hashlib
import itertools
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time


# Where servers listen.
ADDRESS = os.environ.get("ADDRESS", "127.0.0.1")


def stream(seed, length):
    """Bytes that say where they are from."""
    return random.Random(seed).randbytes(length)


def exactly(sock, length):
    got = bytearray()
    while len(got) < length:
        piece = sock.recv(min(length - len(got), 1 << 20))
        assert piece, f"the end after {len(got)} of {length} bytes"
        got += piece
    return bytes(got)


def listen():
    listener = socket.create_server((ADDRESS, 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    return listener


def wants_more_calls():
    """With `SLOW=relayed`: true until a relay has connected both ends. Then this process has mapped their memory."""
    if os.environ.get("SLOW") != "relayed":
        return False
    with open("/proc/self/maps") as maps:
        return "thruway socket" not in maps.read()


def greet(sock, is_first):
    """Calls enough for both ends to find each other. The first end marks its last call; the other end asks for more calls by its reply."""
    turns, is_last, reply = 0, False, b"again"
    while not is_last:
        turns += 1
        assert turns < 3000, "no relay has connected both ends"
        if is_first:
            # A relay takes some time for that.
            time.sleep(0.02 if "SLOW" in os.environ else 0)
            is_last = turns >= 12 and reply == b"reply" and not wants_more_calls()
            sock.sendall(b"final" if is_last else b"greet")
            reply = exactly(sock, 5)
            assert reply in (b"reply", b"again")
        else:
            call = exactly(sock, 5)
            assert call in (b"greet", b"final")
            is_last = call == b"final"
            sock.sendall(b"again" if wants_more_calls() else b"reply")


def serve_echo(sock):
    greet(sock, False)
    while True:
        head = b""
        while len(head) < 4:
            piece = sock.recv(4 - len(head))
            if not piece:
                return
            head += piece
        (length,) = struct.unpack("!I", head)
        sock.sendall(exactly(sock, length))


def echo_server():
    """Threads, with calls that wait."""
    listener = listen()
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve_echo, args=(sock,), daemon=True).start()


def prefork_server():
    """Processes that accept from one listener."""
    listener = listen()
    for _ in range(3):
        if os.fork() == 0:
            while True:
                sock, _ = listener.accept()
                serve_echo(sock)
                sock.close()
    signal.pause()


def fork_server():
    """A process for each connection; the parent has it for a moment, too."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = listen()
    while True:
        sock, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            serve_echo(sock)
            os._exit(0)
        sock.close()


def epoll_server():
    """Edges, and calls that do not wait."""
    listener = listen()
    listener.setblocking(False)
    poller = select.epoll()
    poller.register(listener, select.EPOLLIN)
    socks, out = {}, {}
    # Greetings, answered as they are; then everything comes back as it is.
    seen = {}
    while True:
        for fd, event in poller.poll():
            if fd == listener.fileno():
                sock, _ = listener.accept()
                sock.setblocking(False)
                socks[sock.fileno()], out[sock.fileno()], seen[sock.fileno()] = sock, bytearray(), bytearray()
                poller.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
                continue
            sock, waiting = socks[fd], out[fd]
            ended = False
            try:
                while True:
                    data = sock.recv(70000)
                    if not data:
                        ended = True
                        break
                    seen[fd] += data
            except BlockingIOError:
                pass
            except ConnectionResetError:
                ended = True
            data = seen[fd]
            while True:
                if data.startswith((b"greet", b"final")):
                    waiting += b"reply"
                    del data[:5]
                elif len(data) >= 4 and bytes(data[:4]) not in (b"gree", b"fina"):
                    (length,) = struct.unpack("!I", data[:4])
                    if len(data) < 4 + length:
                        break
                    waiting += data[4 : 4 + length]
                    del data[: 4 + length]
                else:
                    break
            try:
                while waiting:
                    del waiting[: sock.send(waiting)]
            except BlockingIOError:
                pass
            if ended:
                sock.close()
                del socks[fd], out[fd], seen[fd]


def echo_client():
    port, connections, rounds = (int(argument) for argument in sys.argv[2:5])
    failures = []

    def one(seed):
        try:
            rng = random.Random(seed)
            sock = socket.create_connection((ADDRESS, port))
            greet(sock, True)
            for turn in range(rounds):
                length = rng.choice([1, 13, 64, 1000, 5000, 65536, 300_000, 1_500_000])
                data = stream((seed, turn).__hash__(), length)
                sender = threading.Thread(target=sock.sendall, args=(struct.pack("!I", length) + data,))
                sender.start()
                got = exactly(sock, length)
                sender.join()
                assert got == data, f"connection {seed}, round {turn}: {length} bytes came back changed"
            sock.close()
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def connect_from(side, port):
    """A connection from a port that is lower, or higher, than the server's."""
    refused = []
    while True:
        sock = socket.socket()
        sock.bind((ADDRESS, 0))
        if (sock.getsockname()[1] < port) == (side == "low"):
            sock.connect((ADDRESS, port))
            return sock
        # Kept, so that it is not given again.
        refused.append(sock)


def talks():
    """Says something again and again until its standard input has ended. Before, it may have had a connection to another server."""
    side, port, *before = sys.argv[2:]
    for other in before:
        sock = connect_from(side, int(other))
        greet(sock, True)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
        sock.close()
    sock = connect_from(side, int(port))
    greet(sock, True)
    print("talks", flush=True)
    turn, end = 0, None
    while turn != end:
        data = stream(turn, 100)
        sock.sendall(struct.pack("!I", len(data)) + data)
        assert exactly(sock, len(data)) == data
        turn += 1
        if end is None and select.select([sys.stdin], [], [], 0.001)[0]:
            # So many more that it looks at the board once more: it does so less and less often.
            end = turn + turn // 2 + 50


def shared_memory(pid):
    """What a process shares with others, of memory without a file."""
    with open(f"/proc/{pid}/maps") as maps:
        return {line.split()[4] for line in maps if "rw-s" in line and "/dev/zero (deleted)" in line}


def part():
    """A child that becomes another user has no memory in common with its parent any more. Both go on with connections."""
    port = int(sys.argv[2])

    def connect():
        sock = socket.create_connection((ADDRESS, port))
        greet(sock, True)
        return sock

    def talk(sock, turns):
        for turn in range(turns):
            data = stream(turn, 100 + turn)
            sock.sendall(struct.pack("!I", len(data)) + data)
            assert exactly(sock, len(data)) == data

    own, common = connect(), connect()
    theirs, ours = socket.socketpair()
    child = os.fork()
    if child == 0:
        own.close()
        become(os.environ["PART"])
        theirs.sendall(b"x")
        assert theirs.recv(1) == b"x"
        talk(common, 20)
        talk(connect(), 20)
        os._exit(0)
    assert ours.recv(1) == b"x"
    mine, child_has = shared_memory(os.getpid()), shared_memory(child)
    assert mine and child_has and not mine & child_has, (mine, child_has)
    talk(own, 10)
    ours.sendall(b"x")
    talk(own, 10)
    assert os.waitpid(child, 0)[1] == 0
    talk(common, 20)
    talk(connect(), 20)


def short_then_long():
    """Connections that are over soon, one after the other, and one that is not."""
    port, count, turns = (int(argument) for argument in sys.argv[2:5])
    for _ in range(count):
        sock = socket.create_connection((ADDRESS, port))
        greet(sock, True)
        sock.close()
    sock = socket.create_connection((ADDRESS, port))
    greet(sock, True)
    for turn in range(turns):
        data = b"%d" % turn
        sock.sendall(struct.pack("!I", len(data)) + data)
        assert exactly(sock, len(data)) == data


def silent_server():
    """Reads nothing after the greeting."""
    listener = listen()
    keep = []
    while True:
        sock, _ = listener.accept()
        greet(sock, False)
        keep.append(sock)


def wait_for_end(sock, how):
    """Waits in one of the ways there are until the connection is over; by an error or not."""
    print("ready", flush=True)
    try:
        if how == "recv":
            assert sock.recv(100) == b""
        elif how == "look":
            sock.setblocking(False)
            while True:
                try:
                    assert sock.recv(100) == b""
                    break
                except BlockingIOError:
                    pass
        elif how in ("poll", "look_poll"):
            poller = select.poll()
            poller.register(sock, select.POLLIN)
            while not poller.poll(None if how == "poll" else 0):
                pass
            assert sock.recv(100) == b""
        elif how == "select":
            select.select([sock], [], [])
            assert sock.recv(100) == b""
        elif how in ("epoll", "level", "one_shot", "exclusive", "two", "nested", "look_epoll"):
            more = {"epoll": select.EPOLLET, "one_shot": select.EPOLLONESHOT, "exclusive": select.EPOLLEXCLUSIVE}
            poller = select.epoll()
            poller.register(sock, select.EPOLLIN | more.get(how, 0))
            if how == "two":
                other = select.epoll()
                other.register(sock, select.EPOLLIN)
            if how == "nested":
                inner, poller = poller, select.epoll()
                poller.register(inner, select.EPOLLIN)
            while not poller.poll(0 if how == "look_epoll" else None):
                pass
            assert sock.recv(100) == b""
        elif how == "send":
            # Little at a time: what a program sends that tells a peer that it is alive.
            while True:
                sock.send(b"alive")
                time.sleep(0.001)
        elif how == "flood":
            while True:
                sock.send(bytes(100_000))
        else:
            raise ValueError(how)
    except (ConnectionResetError, BrokenPipeError) as error:
        # Before it is said that it is over.
        how = type(error).__name__
    print("over", how, flush=True)


def victim():
    """Is connected to a server that is killed."""
    port, how = int(sys.argv[2]), sys.argv[3]
    sock = socket.create_connection((ADDRESS, port))
    greet(sock, True)
    wait_for_end(sock, how)


def victim_server():
    """Is what a victim is connected to, and is one itself."""
    listener = listen()
    sock, _ = listener.accept()
    greet(sock, False)
    wait_for_end(sock, sys.argv[2])


def both_ways():
    """Both ends send without reading until all is sent, each by a thread of its own."""
    port, length = int(sys.argv[2]), int(sys.argv[3])
    sock = socket.create_connection((ADDRESS, port))
    greet(sock, True)
    data = stream(1, length)
    sender = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)))
    sender.start()
    got = exactly(sock, length)
    assert sock.recv(1) == b""
    sender.join()
    assert got == stream(2, length)


def both_ways_server():
    listener = listen()
    sock, _ = listener.accept()
    greet(sock, False)
    length = int(sys.argv[2])
    data = stream(2, length)
    sender = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)))
    sender.start()
    got = exactly(sock, length)
    assert sock.recv(1) == b""
    sender.join()
    assert got == stream(1, length)


def alone():
    """One thread with both ends sends as much as TCP takes, then reads it."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    # A relay takes a while to connect both ends.
    for _ in range(2000 if sys.argv[2:] else 12):
        for a, b in ((one, other), (other, one)):
            a.sendall(b"hello")
            assert exactly(b, 5) == b"hello"
    for turn in range(5):
        one.setblocking(False)
        sent = hashlib.sha256()
        length = 0
        # The kernel may make room for more just after it had none, and a relay makes room when it has its turn.
        least = int(sys.argv[2]) if sys.argv[2:] else 1_000_000
        while select.select([], [one], [], 0 if length > least else 30)[1]:
            piece = stream(length, 50_000)
            try:
                n = one.send(piece)
            except BlockingIOError:
                continue
            sent.update(piece[:n])
            length += n
        assert length > least, length
        got = hashlib.sha256(exactly(other, length))
        assert got.digest() == sent.digest(), turn
        assert select.select([], [one], [], 5)[1]
        one.setblocking(True)


def shared():
    """Two processes have one connection, and write and read in turn."""
    port = int(sys.argv[2])
    sock = socket.create_connection((ADDRESS, port))
    greet(sock, True)

    def turn(text):
        sock.sendall(struct.pack("!I", len(text)) + text)
        assert exactly(sock, len(text)) == text

    turn(b"before")
    here, there = socket.socketpair()
    child = os.fork()
    mine = there if child == 0 else here
    for number in range(200):
        if (number % 2 == 0) == (child != 0):
            turn(b"%d of %d" % (number, child != 0) * 50)
            mine.sendall(b"x")
        else:
            assert mine.recv(1) == b"x"
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    turn(b"after")
    sock.close()


def unread_server():
    """Sends something and ends."""
    listener = listen()
    while True:
        sock, _ = listener.accept()
        greet(sock, False)
        sock.sendall(stream(3, 50_000))
        sock.close()


def unread():
    """Forks while bytes of a peer that has gone are unread."""
    sock = socket.create_connection((ADDRESS, int(sys.argv[2])))
    greet(sock, True)
    # All of it, and the end, has come.
    poller = select.poll()
    poller.register(sock, 0x2000)
    poller.poll()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert exactly(sock, 50_000) == stream(3, 50_000)
    assert sock.recv(1) == b""


def early_server():
    """Reads to the end, byte by byte, and answers."""
    listener = listen()
    while True:
        sock, _ = listener.accept()
        while sock.recv(1):
            pass
        sock.sendall(b"answer")
        sock.close()


def early():
    """Ends its direction when the other end may have been accelerated, and this one has not looked since."""
    sock = socket.create_connection((ADDRESS, int(sys.argv[2])))
    for _ in range(14):
        sock.sendall(b"x")
    time.sleep(0.6)
    sock.shutdown(socket.SHUT_WR)
    assert exactly(sock, 6) == b"answer" and sock.recv(1) == b""


def hand_over_server():
    """Hands the connection to another program as its standard input and output, as inetd does; but after some talk."""
    listener = listen()
    how = sys.argv[2]
    while True:
        sock, _ = listener.accept()
        greet(sock, False)
        if how == "spawn":
            subprocess.run(["cat"], stdin=sock, stdout=sock, check=True)
        elif os.fork() == 0:
            os.dup2(sock.fileno(), 0)
            os.dup2(sock.fileno(), 1)
            os.execvp("cat", ["cat"])
        sock.close()


def hand_over_client():
    port = int(sys.argv[2])
    sock = socket.create_connection((ADDRESS, port))
    greet(sock, True)
    # The other program begins to read at its own time: what is sent before is for it, too.
    time.sleep(float(sys.argv[3]))
    for turn in range(50):
        data = stream(turn, 3000)
        sock.sendall(data)
        assert exactly(sock, 3000) == data
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""


def give_to_itself(sock):
    """Another process could have the connection now."""
    pair = socket.socketpair()
    socket.send_fds(pair[0], [b"x"], [sock.fileno()])
    return pair


def both_give_away_server():
    """Sends bytes that its peer does not read yet, gives the connection away, and waits for its peer."""
    sock, _ = listen().accept()
    greet(sock, False)
    data, sent = stream(1, 1_000_000), 0
    sock.setblocking(False)
    try:
        while sent < len(data):
            sent += sock.send(data[sent:])
    except BlockingIOError:
        pass
    _pair = give_to_itself(sock)
    with open(sys.argv[2] + ".new", "w", encoding="ascii") as file:
        file.write(str(sent))
    os.rename(sys.argv[2] + ".new", sys.argv[2])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    assert poll.poll(60000) and sock.recv(1) == b"z"


def both_give_away():
    sock = socket.create_connection((ADDRESS, int(sys.argv[2])))
    greet(sock, True)
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    _pair = give_to_itself(sock)
    with open(sys.argv[3], encoding="ascii") as file:
        sent = int(file.read())
    assert exactly(sock, sent) == stream(1, 1_000_000)[:sent]
    sock.sendall(b"z")


def interrupted():
    """A signal, or a time limit, ends a call that sends to a peer which does not read, also if some bytes have gone. One that comes while the call is not
    waiting is followed by another."""

    class Rung(Exception):
        pass

    def ring(*_):
        raise Rung

    signal.signal(signal.SIGALRM, ring)
    file = tempfile.TemporaryFile()
    file.truncate(64 << 20)
    calls = (lambda sock: sock.send(bytes(64 << 20)), lambda sock: os.sendfile(sock.fileno(), file.fileno(), 0, 64 << 20))
    for pause, call in itertools.product((0.01, 0.3), calls):
        sock = socket.create_connection((ADDRESS, int(sys.argv[2])))
        greet(sock, True)
        signal.setitimer(signal.ITIMER_REAL, pause, 0.3)
        try:
            while True:
                call(sock)
        except Rung:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        sock.close()
    # And so does a time limit.
    sock = socket.create_connection((ADDRESS, int(sys.argv[2])))
    greet(sock, True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
    try:
        while True:
            sock.send(bytes(64 << 20))
    except BlockingIOError:
        pass


def limits():
    """Time limits and signals, of calls that wait."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    for _ in range(12):
        for a, b in ((one, other), (other, one)):
            a.sendall(b"hello")
            assert exactly(b, 5) == b"hello"
    # Seconds and microseconds.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    try:
        one.recv(1)
        raise AssertionError("it came")
    except BlockingIOError:
        pass
    other.sendall(b"ab")
    assert one.recv(5, socket.MSG_WAITALL) == b"ab"
    # They are those of the whole call, also if there is something now and then: all of it would take minutes.
    enough = threading.Event()
    moved = 0

    def trickle():
        nonlocal moved
        while not enough.wait(0.01):
            other.sendall(b"1")
            moved += 1

    def sip():
        nonlocal moved
        while not enough.wait(0.01):
            moved += len(other.recv(64 << 10))

    def slowly(what, call):
        enough.clear()
        thread = threading.Thread(target=what)
        thread.start()
        try:
            return call()
        except BlockingIOError:
            return 0  # On a busy machine, the thread has moved nothing in time.
        finally:
            enough.set()
            thread.join()

    for flags in (0, socket.MSG_TRUNC):
        got = moved = 0
        while got == 0:
            got = slowly(trickle, lambda: len(one.recv(10_000, socket.MSG_WAITALL | flags)))
        assert 0 < got < 10_000
        exactly(one, moved - got)
    moved = 0
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 200_000))
    sent = slowly(sip, lambda: one.send(bytes(1 << 30)))
    assert 0 < sent < 1 << 30
    exactly(other, sent - moved)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    hits = []

    class Stop(Exception):
        pass

    def stop(number, frame):
        hits.append(number)
        raise Stop

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        one.recv(1)
        raise AssertionError("it came")
    except Stop:
        pass
    assert hits == [signal.SIGALRM]
    # And nothing has been lost by it.
    other.sendall(b"after")
    assert exactly(one, 5) == b"after"
    # MSG_WAITALL over a long time, in pieces.
    def later():
        for piece in (b"12", b"345", b"6" * 100_000):
            time.sleep(0.01)
            other.sendall(piece)

    thread = threading.Thread(target=later)
    thread.start()
    assert one.recv(100_005, socket.MSG_WAITALL) == b"12345" + b"6" * 100_000
    thread.join()
    # What is counted stays, what is thrown away does not.
    other.sendall(b"x" * 5000)
    assert len(one.recv(10_000, socket.MSG_PEEK | socket.MSG_TRUNC)) == 5000
    assert len(one.recv(3000, socket.MSG_TRUNC)) == 3000
    assert exactly(one, 2000) == b"x" * 2000
    # All of it is waited for, too.
    thread = threading.Thread(target=later)
    thread.start()
    assert len(one.recv(100_004, socket.MSG_WAITALL | socket.MSG_TRUNC)) == 100_004
    thread.join()
    assert exactly(one, 1) == b"6"
    # It waits also for what stays there; and not for more at the end.
    for ask, get in ((3000, 3000), (2000, 1500)):
        def come():
            other.sendall(b"a")
            time.sleep(0.02)
            other.sendall(b"b" * (get - 1))
            if get < ask:
                other.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=come)
        thread.start()
        assert one.recv(ask, socket.MSG_PEEK | socket.MSG_WAITALL) == b"a" + b"b" * (get - 1)
        thread.join()
        exactly(one, get)


ENDS = ("close", "shutdown", "sendfile")


def ends_server():
    """Sends a stream on each connection, and ends it at once, in each way of ENDS."""
    listener = listen()
    with tempfile.TemporaryFile() as file:
        file.write(stream(3, 1_000_000))
        file.flush()
        for how in ENDS * int(sys.argv[2]):
            sock, _ = listener.accept()
            with sock:
                for _ in range(40):
                    assert exactly(sock, 20) == b"x" * 20
                    sock.sendall(b"y" * 20)
                if how == "sendfile":
                    at = 0
                    while at < 1_000_000:
                        at += os.sendfile(sock.fileno(), file.fileno(), at, 1_000_000 - at)
                else:
                    sock.sendall(stream(3, 100_000))
                if how != "close":
                    sock.shutdown(socket.SHUT_WR)
                    assert sock.recv(1) == b""


def ends():
    """Forks while a peer sends and ends, and reads to the end."""
    for number, how in enumerate(ENDS * int(sys.argv[3])):
        with socket.create_connection((ADDRESS, int(sys.argv[2]))) as sock:
            for _ in range(40):
                sock.sendall(b"x" * 20)
                assert exactly(sock, 20) == b"y" * 20
            # How far the peer has come differs.
            select.select([], [], [], 0.05 if how == "sendfile" else 0.002 * (number % 10))
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            got = b""
            try:
                while piece := sock.recv(65536):
                    got += piece
            except ConnectionResetError:
                # After all bytes, the end may be a reset: see the book.
                assert how == "close", (how, number, len(got))
            assert got == stream(3, 1_000_000 if how == "sendfile" else 100_000), (how, number, len(got))


def closed_unseen():
    """Closes a connection of which the relay has one end, while the relay is stopped and takes no messages. The argument is its process id."""
    relay, calls = int(sys.argv[2]), 80
    with socket.create_server((ADDRESS, 0), backlog=512) as listener:
        def connected():
            sock = socket.socket()
            # The end of the stream comes when the reader has made calls.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            sock.connect(listener.getsockname())
            return sock, listener.accept()[0]

        def exchange(one, other):
            for _ in range(calls):
                one.sendall(b"x")
                assert exactly(other, 1) == b"x"

        one, other = connected()
        # `one` is looked for, and `other` has not been used.
        for _ in range(calls):
            one.sendall(b"x")
        os.kill(relay, signal.SIGSTOP)
        try:
            for _ in range(calls):
                assert exactly(other, 1) == b"x"
            others = [connected() for _ in range(300)]
            for pair in others:
                exchange(*pair)
            other.setblocking(False)
            sent = other.send(bytes(100_000))
            other.close()
        finally:
            os.kill(relay, signal.SIGCONT)
        got = 0
        while piece := one.recv(100):
            got += len(piece)
            time.sleep(0.0005)
        assert got == sent, (got, sent)


def become(who):
    """As a server does that begins as root."""
    uid, gid, *groups = (int(number) for number in who.split(":"))
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def main():
    if "BECOME" in os.environ:
        become(os.environ["BECOME"])
    globals()[sys.argv[1]]()


main()
