"""What calls on a TCP connection return, in sequences made from a seed.

Prints a line for each call: its result, or its error. The test runs this with and without acceleration and compares.

    semantics.py SEED SEQUENCES

Both ends are in this process. No call waits, and less is on its way than any buffer holds, so TCP over the loopback
interface is as deterministic as memory is. With LATE in the environment each call waits until what was sent before it has
arrived, as between hosts it does some time later.
"""
import errno
import fcntl
import array
import os
import random
import select
import socket
import struct
import sys
import termios
import time

LIMIT = 48 << 10
LATE = "LATE" in os.environ
# Longest time for that.
PATIENCE = 5


def pair(listener):
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    # Long enough for both ends to find each other. What was exchanged is read whole.
    for _ in range(12):
        if LATE:
            # A relay's answer takes as long as it takes.
            time.sleep(0.001)
        for one, other in ((a, b), (b, a)):
            one.sendall(b"hello")
            got = b""
            while len(got) < 5:
                got += other.recv(5 - len(got))
    for one in (a, b):
        one.setblocking(False)
        # Else TCP holds small pieces back until the peer has acknowledged others.
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return a, b


def name(error):
    return errno.errorcode.get(error.errno, str(error)) if isinstance(error, OSError) else type(error).__name__


def digest(data):
    return f"{len(data)}:{sum(data) % 65521}:{data[:4].hex()}"


class Pair:
    def __init__(self, listener, rng):
        self.rng = rng
        self.ends = dict(zip("ab", pair(listener)))
        self.extra = {"a": [], "b": []}
        self.on_way = {"a": 0, "b": 0}
        self.next = 0
        # Something has come since an edge was last looked for.
        self.fresh = {"a": False, "b": False}
        # Ends that have sent all that they will.
        self.over = set()
        self.known = set()
        # Ends that receive nothing more.
        self.deaf = set()
        # What calls return from here on depends on time if bytes take any to arrive.
        self.undefined = False
        self.epolls = {}
        for side, sock in self.ends.items():
            level, edge = select.epoll(), select.epoll()
            mask = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP
            level.register(sock, mask)
            edge.register(sock, mask | select.EPOLLET)
            edge.poll(0)
            self.epolls[side] = (level, edge)

    def data(self, n):
        start = self.next
        self.next += n
        return bytes((i * 31 + (i >> 8)) & 255 for i in range(start, start + n))

    def room(self, side):
        return max(0, LIMIT - self.on_way[side])

    def sizes(self):
        return self.rng.choice([1, 2, 7, 64, 500, 4096, 9000])

    def arrive(self):
        """Waits until everything has come."""
        until = time.monotonic() + PATIENCE
        if self.over != self.known:
            self.known = set(self.over)
            # That an end has gone is known to the kernel before it is known to the other process.
            time.sleep(0.02)
        for side, other in (("a", "b"), ("b", "a")):
            sock = self.ends[side]
            if side in self.deaf:
                continue
            while sock.fileno() >= 0 and time.monotonic() < until:
                p = select.poll()
                p.register(sock, 0x2000)
                events = p.poll(0)
                ended = bool(events and events[0][1] & (0x2000 | select.POLLHUP | select.POLLERR))
                if "reset" in self.over:
                    if ended:
                        break
                elif self.unread(side, other, sock) == self.on_way[other] and ended >= (other in self.over):
                    break

    def step(self):
        rng = self.rng
        if LATE:
            self.arrive()
        side = rng.choice("ab")
        other = "b" if side == "a" else "a"
        sock = self.ends[side]
        calls = [self.send] * 8 + [self.receive] * 8 + [self.peek, self.poll, self.poll, self.select, self.level, self.edge, self.edge]
        calls += [self.sendmsg, self.recvmsg, self.writev, self.readv, self.into, self.trunc, self.unread, self.option, self.empty]
        calls += [self.dup, self.drain, self.names]
        if rng.random() < 0.02:
            calls = [self.shutdown, self.shutdown, self.close, self.reset]
        call = rng.choice(calls)
        try:
            result = call(side, other, sock)
        except (OSError, ValueError) as error:
            result = name(error)
        return f"{side} {call.__name__} {result}"

    def sent(self, side, n):
        self.on_way[side] += n
        other = "b" if side == "a" else "a"
        self.fresh[other] |= n > 0
        if n > 0 and (other in self.deaf or self.ends[other].fileno() < 0):
            # It answers with a reset, or has no use for the bytes. When that is known depends on when they come.
            self.undefined = True
        return n

    def got(self, other, data):
        self.on_way[other] -= len(data)
        return digest(data)

    def send(self, side, other, sock):
        n = min(self.sizes(), self.room(side))
        flags = self.rng.choice([0, 0, 0, socket.MSG_NOSIGNAL, socket.MSG_DONTWAIT, socket.MSG_MORE])
        # Held back by the kernel for a while, which acceleration does not do.
        flags &= ~socket.MSG_MORE
        return self.sent(side, sock.send(self.data(n), flags))

    def receive(self, side, other, sock):
        n = self.rng.choice([1, 3, 100, 5000, 20000])
        flags = self.rng.choice([0, 0, socket.MSG_DONTWAIT, socket.MSG_WAITALL | socket.MSG_DONTWAIT])
        return self.got(other, sock.recv(n, flags))

    def peek(self, side, other, sock):
        n = self.rng.choice([1, 3, 100])
        return digest(sock.recv(n, socket.MSG_PEEK))

    def drain(self, side, other, sock):
        out = []
        for _ in range(20):
            try:
                data = sock.recv(9000)
            except OSError as error:
                out.append(name(error))
                break
            out.append(self.got(other, data))
            if not data:
                break
        return " ".join(out)

    def poll(self, side, other, sock):
        p = select.poll()
        for one, s in self.ends.items():
            if s.fileno() >= 0:
                p.register(s, select.POLLIN | select.POLLOUT | select.POLLPRI | 0x2000)
        byfd = {s.fileno(): one for one, s in self.ends.items()}
        return sorted((byfd[fd], event) for fd, event in p.poll(0))

    def select(self, side, other, sock):
        live = [s for s in self.ends.values() if s.fileno() >= 0]
        byfd = {s: one for one, s in self.ends.items()}
        return [sorted(byfd[s] for s in ready) for ready in select.select(live, live, live, 0)]

    def level(self, side, other, sock):
        return [event for _, event in self.epolls[side][0].poll(0)]

    def edge(self, side, other, sock):
        events = self.epolls[side][1].poll(0)
        is_news, self.fresh[side] = self.fresh[side] and self.on_way[other] > 0, False
        # The kernel also tells what has been read meanwhile, and that the peer has read. What must not be missed is news.
        return sorted(event for _, event in events) if is_news else "whatever"

    def sendmsg(self, side, other, sock):
        n = min(self.sizes(), self.room(side))
        data = self.data(n)
        return self.sent(side, sock.sendmsg([data[: n // 3], b"", data[n // 3 :]]))

    def recvmsg(self, side, other, sock):
        data, control, flags, address = sock.recvmsg(self.rng.choice([1, 100, 5000]), 64)
        return f"{self.got(other, data)} {control} {flags & ~0x40000000} {address}"

    def writev(self, side, other, sock):
        n = min(self.sizes(), self.room(side))
        data = self.data(n)
        return self.sent(side, os.writev(sock.fileno(), [data[: n // 2], data[n // 2 :]]))

    def readv(self, side, other, sock):
        pieces = [bytearray(self.rng.choice([1, 10, 3000])) for _ in range(3)]
        n = os.readv(sock.fileno(), pieces)
        return self.got(other, b"".join(pieces)[:n])

    def into(self, side, other, sock):
        buffer = bytearray(700)
        n, address = sock.recvfrom_into(buffer)
        return f"{self.got(other, buffer[:n])} {address}"

    def trunc(self, side, other, sock):
        # Discards on TCP.
        n = self.rng.choice([1, 50, 3000])
        data = sock.recv(n, socket.MSG_TRUNC)
        self.on_way[other] -= len(data)
        return len(data)

    def unread(self, side, other, sock):
        count = array.array("i", [0])
        fcntl.ioctl(sock.fileno(), termios.FIONREAD, count)
        return count[0]

    def option(self, side, other, sock):
        which = self.rng.choice(["error", "nodelay", "cork", "type", "keepalive"])
        if which == "error":
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if which == "nodelay":
            before = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return before, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if which == "cork":
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK)
        if which == "type":
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    def empty(self, side, other, sock):
        return sock.send(b""), sock.recv(0)

    def dup(self, side, other, sock):
        copy = sock.dup()
        how = self.rng.randrange(4)
        if how == 0:
            n = min(9, self.room(side))
            result = self.sent(side, copy.send(self.data(n)))
        elif how == 1:
            try:
                result = self.got(other, copy.recv(50))
            except OSError as error:
                result = name(error)
        elif how == 2:
            # The copy takes the place of the first.
            number = sock.fileno()
            os.dup2(copy.fileno(), number)
            result = "dup2"
        else:
            result = "closed"
        copy.close()
        return result

    def names(self, side, other, sock):
        return sock.getpeername() == self.ends[other].getsockname() if self.ends[other].fileno() >= 0 else bool(sock.getpeername())

    def shutdown(self, side, other, sock):
        how = self.rng.choice([socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR])
        sock.shutdown(how)
        if how != socket.SHUT_WR:
            self.deaf.add(side)
        if how != socket.SHUT_RD:
            self.over.add(side)
        # A doorbell for bytes that have come already resets a connection that is shut down in both directions.
        self.undefined |= {side} <= self.deaf & self.over
        return how

    def close(self, side, other, sock):
        if self.on_way[other]:
            # TCP resets a connection whose end has not read all.
            self.over.add("reset")
        self.over.add(side)
        sock.close()
        return "closed"

    def reset(self, side, other, sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.over |= {side, "reset"}
        sock.close()
        return "reset"

    def end(self):
        for side, sock in self.ends.items():
            sock.close()
        for both in self.epolls.values():
            for one in both:
                one.close()


def main():
    seed, sequences = int(sys.argv[1]), int(sys.argv[2])
    listener = socket.create_server(("127.0.0.1", 0))
    for sequence in range(seed, seed + sequences):
        rng = random.Random(sequence)
        both = Pair(listener, rng)
        for number in range(rng.choice([20, 60, 150])):
            print(f"{sequence}.{number} {both.step()}")
            # Which call learns of a reset depends on when it comes.
            if LATE and ("reset" in both.over or both.undefined):
                break
        both.end()


main()
