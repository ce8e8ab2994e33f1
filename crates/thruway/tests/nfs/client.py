"""NFS clients that send any request of a test, including requests that kernel clients never send."""
import os, select, socket, struct, sys, time

OK, PERM, NOENT, IO, ACCESS, EXIST, ROFS, STALE = 0, 1, 2, 5, 13, 17, 30, 70
NOSPC, DELAY, SHARE_DENIED, CLID_INUSE, GRACE = 28, 10008, 10015, 10017, 10013
BAD_STATEID, NO_GRACE, RECLAIM_BAD, DELEG_REVOKED, RESOURCE = 10025, 10033, 10034, 10087, 10018
READ, WRITE, BOTH = 1, 2, 3
WANT_READ, WANT_NONE = 0x100, 0x400
ANONYMOUS = bytes(16)


def words(*numbers):
    return struct.pack(">%dI" % len(numbers), *numbers)


def long(number):
    return struct.pack(">Q", number)


def opaque(data):
    return words(len(data)) + data + bytes(-len(data) % 4)


class Reply:
    def __init__(self, data):
        self.data, self.at = data, 0

    def fixed(self, length):
        self.at += length
        assert self.at <= len(self.data), "the reply is too short"
        return self.data[self.at - length:self.at]

    def u32(self):
        return struct.unpack(">I", self.fixed(4))[0]

    def u64(self):
        return struct.unpack(">Q", self.fixed(8))[0]

    def opaque(self):
        length = self.u32()
        data = self.fixed(length)
        self.fixed(-length % 4)
        return data


class Connection:
    """A TCP connection for one call after the other, with a user ID and a source address."""

    def __init__(self, at, source="127.0.0.1", uid=0, gid=0):
        host, port = at.rsplit(":", 1)
        self.stream = socket.create_connection((host, int(port)), source_address=(source, 0))
        self.stream.settimeout(60)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.xid, self.uid, self.gid = 0, uid, gid
        self.calls = []

    def receive(self, length):
        data = b""
        while len(data) < length:
            part = self.stream.recv(length - len(data))
            assert part, "the server has closed the connection"
            data += part
        return data

    def message(self):
        length, = struct.unpack(">I", self.receive(4))
        return self.receive(length & 0x7FFFFFFF)

    def send(self, message):
        self.stream.sendall(words(0x80000000 | len(message)) + message)

    def begin(self, program, version, procedure, arguments, uid=None, gid=None):
        self.xid += 1
        uid = self.uid if uid is None else uid
        gid = self.gid if gid is None else gid
        credential = words(0) + opaque(b"host") + words(uid, gid, 0)
        head = words(self.xid, 0, 2, program, version, procedure, 1) + opaque(credential)
        self.send(head + words(0, 0) + arguments)
        return self.xid

    def end(self):
        while True:
            message = self.message()
            if message[4:8] == words(1):
                break
            self.calls.append(message)
        assert message[8:24] == words(0, 0, 0, 0), message[:24]
        return Reply(message[24:])

    def call(self, *arguments, **who):
        self.begin(*arguments, **who)
        return self.end()


def mount3(at, path, **who):
    """Returns the version 3 handle of a directory."""
    reply = Connection(at, **who).call(100005, 3, 1, opaque(path))
    assert reply.u32() == OK
    return reply.opaque()


class Client(Connection):
    """A client of version 4.2 with a session of one slot."""

    def __init__(self, at, name, back=False, reclaimed=True, minor=2, verifier=b"verifier", **who):
        super().__init__(at, **who)
        self.minor, self.sequence, self.name = minor, 0, name
        self.status, reply = self.compound(words(42) + verifier + opaque(name) + words(0, 0, 0))
        if self.status == OK:
            reply.fixed(8)
            self.id, self.create_sequence = reply.fixed(8), reply.u32()
            self.status = self.create_session(back)
        if self.status == OK and reclaimed:
            self.status, _ = self.run(words(58, 0))

    def compound(self, *operations, **who):
        head = opaque(b"") + words(self.minor, len(operations))
        reply = self.call(100003, 4, 1, head + b"".join(operations), **who)
        status = reply.u32()
        reply.opaque()
        reply.u32()
        return status, reply

    def create_session(self, back=False):
        limits = words(0, 1 << 20, 1 << 20, 4096, 64, 1, 0)
        flags = words(2 if back else 0)
        create = words(43) + self.id + words(self.create_sequence) + flags + limits + limits
        status, reply = self.compound(create + words(0x40001234, 1, 0))
        if status == OK:
            reply.fixed(8)
            self.session, self.sequence = reply.fixed(16), 0
            self.create_sequence += 1
        return status

    def open_number(self, owner):
        """Returns the seqid of an owner's operation: 0 in versions with sessions."""
        return 0

    def run(self, *operations, **who):
        """Runs operations after SEQUENCE. Returns the status, and the results after that of SEQUENCE."""
        self.sequence += 1
        sequence = words(53) + self.session + words(self.sequence, 0, 0, 0)
        status, reply = self.compound(sequence, *operations, **who)
        if reply.u32() == 53 and reply.u32() == OK:
            reply.fixed(16)
            self.events = [reply.u32() for _ in range(5)][4]
        return status, reply

    def result(self, reply, operation):
        """Begins to read the result of the next operation."""
        assert reply.u32() == operation
        return reply.u32()

    def handle(self, *path, **who):
        operations = [words(24)] + [words(15) + opaque(name) for name in path] + [words(10)]
        status, reply = self.run(*operations, **who)
        if status != OK:
            return None
        reply.fixed(8 * (len(operations) - 1))
        assert self.result(reply, 10) == OK
        return reply.opaque()

    def open(self, dir, name, access=READ, deny=0, owner=b"owner", how=words(0), claim=None, want=WANT_NONE, **who):
        """OPEN. Returns the status, the stateid, the handle, and the stateid of the delegation."""
        claim = words(0) + opaque(name) if claim is None else claim
        number = self.open_number(owner)
        open = words(18, number, access | want, deny) + self.id + opaque(owner) + how + claim
        status, reply = self.run(words(22) + opaque(dir), open, words(10), **who)
        if status != OK:
            return status, None, None, None
        assert self.result(reply, 22) == OK and self.result(reply, 18) == OK
        stateid = reply.fixed(16)
        reply.fixed(20)
        self.open_flags = reply.u32()
        [reply.u32() for _ in range(reply.u32())]
        delegated = None
        kind = reply.u32()
        if kind in (1, 2):
            delegated = reply.fixed(16)
            reply.u32()
            if kind == 2:
                reply.fixed(12)
            reply.fixed(12)
            reply.opaque()
        elif kind == 3:
            if reply.u32() in (1, 2):
                reply.u32()
        assert self.result(reply, 10) == OK
        return status, stateid, reply.opaque(), delegated

    def create(self, dir, name, mode=0o666, **how):
        guarded = words(1, 1) + words(2, 0, 1 << 1) + opaque(words(mode))
        return self.open(dir, name, access=BOTH, how=guarded, **how)

    def close(self, handle, stateid, owner=b"owner", **who):
        return self.run(words(22) + opaque(handle), words(4, self.open_number(owner)) + stateid, **who)[0]

    def downgrade(self, handle, stateid, access, deny, owner=b"owner"):
        down = words(21) + stateid + words(self.open_number(owner), access, deny)
        return self.run(words(22) + opaque(handle), down)[0]

    def read(self, handle, stateid=ANONYMOUS, at=0, length=4096, **who):
        status, reply = self.run(words(22) + opaque(handle), words(25) + stateid + long(at) + words(length), **who)
        if status != OK:
            return status, None
        reply.fixed(8 + 8 + 4)
        return status, reply.opaque()

    def write(self, handle, stateid, data, at=0, **who):
        write = words(38) + stateid + long(at) + words(2) + opaque(data)
        return self.run(words(22) + opaque(handle), write, **who)[0]

    def attributes(self, handle, *numbers, **who):
        """GETATTR. Returns the status and the encoded values."""
        bits = words(2, sum(1 << n for n in numbers if n < 32), sum(1 << n - 32 for n in numbers if n >= 32))
        status, reply = self.run(words(22) + opaque(handle), words(9) + bits, **who)
        if status != OK:
            return status, None
        reply.fixed(16)
        [reply.u32() for _ in range(reply.u32())]
        return status, Reply(reply.opaque())

    def lock(self, handle, stateid, kind=2, at=0, length=2**64 - 1, reclaim=0, owner=b"locks", opener=b"owner", id=None):
        number = self.open_number(opener)
        lock = words(12, kind, reclaim) + long(at) + long(length) + words(1, number) + stateid + words(0)
        return self.run(words(22) + opaque(handle), lock + (id or self.id) + opaque(owner))[0]

    def test_lock(self, handle, kind=2, at=0, length=2**64 - 1, owner=b"tests"):
        test = words(13, kind) + long(at) + long(length) + self.id + opaque(owner)
        return self.run(words(22) + opaque(handle), test)[0]

    def give_back(self, handle, stateid):
        return self.run(words(22) + opaque(handle), words(8) + stateid)[0]

    def callback(self, limit=60):
        """Waits for a callback and answers it. Returns false if none arrives."""
        if not self.calls and not select.select([self.stream], [], [], limit)[0]:
            return False
        call = self.calls.pop(0) if self.calls else self.message()
        operations = call[56:]
        results = words(0, 0, 2, 11, 0) + operations[4:24] + words(0, 0, 0) + operations[40:44] + words(0)
        self.send(call[:4] + words(1, 0, 0, 0, 0) + results)
        return True


class Client40(Client):
    """A client of version 4.0."""

    def __init__(self, at, name, minor=0, verifier=b"verifier", **who):
        Connection.__init__(self, at, **who)
        self.minor, self.name, self.numbers, self.events = minor, name, {}, 0
        callback = words(0) + opaque(b"tcp") + opaque(b"0.0.0.0.0.0") + words(0)
        self.status, reply = self.compound(words(35) + verifier + opaque(name) + callback)
        if self.status == OK:
            reply.fixed(8)
            self.id, confirmation = reply.fixed(8), reply.fixed(8)
            self.status, _ = self.compound(words(36) + self.id + confirmation)

    def open_number(self, owner):
        self.numbers[owner] = self.numbers.get(owner, 0) + 1
        return self.numbers[owner]

    def run(self, *operations, **who):
        return self.compound(*operations, **who)

    def open(self, dir, name, want=0, confirm=True, owner=b"owner", **how):
        status, stateid, handle, delegated = super().open(dir, name, want=0, owner=owner, **how)
        if status == OK and self.open_flags & 2 and confirm:
            status, stateid = self.confirm(handle, stateid, owner)
        return status, stateid, handle, delegated

    def confirm(self, handle, stateid, owner=b"owner"):
        confirm = words(20) + stateid + words(self.open_number(owner))
        status, reply = self.run(words(22) + opaque(handle), confirm)
        if status != OK:
            return status, None
        reply.fixed(8 + 8)
        return status, reply.fixed(16)
