"""Client and files of a case of the table of operations and errors (`conformance.toml`), and encoders of operations."""
from client import *

CASES = {}


def case(function):
    assert function.__name__ not in CASES, function.__name__
    CASES[function.__name__] = function
    return function


class Lab:
    """A client of a minor version, with its own directory on a share."""

    def __init__(self, at, minor, share, name):
        self.at, self.minor, self.share = at, minor, share
        self.client = self.connect(name)
        assert self.client.status == OK, self.client.status
        root = self.client.handle(share)
        make = words(6, 2) + opaque(name) + words(2, 0, 2) + opaque(words(0o777))
        status, _ = self.client.run(words(22) + opaque(root), make)
        assert status == OK, status
        self.dir = self.client.handle(share, name)

    def connect(self, name, **who):
        kind = Client40 if self.minor == 0 else Client
        return kind(self.at, name, minor=self.minor, **who)

    def make(self, name=b"f", **how):
        """Creates and opens a file. Returns its stateid and its handle."""
        status, stateid, handle, _ = self.client.create(self.dir, name, **how)
        assert status == OK, status
        return stateid, handle

    def put(self, name=b"f"):
        """Creates a file and closes it. Returns its handle."""
        stateid, handle = self.make(name, owner=b"maker")
        assert self.client.close(handle, stateid, owner=b"maker") == OK
        return handle

    def special(self, kind, name=b"s"):
        """Creates an entry of another type than a file. Returns its handle."""
        more = {2: b"", 5: opaque(b"target"), 7: b"", 6: b""}[kind]
        status, _ = self.in_dir(words(6, kind) + more + opaque(name) + words(0, 0))
        assert status == OK, status
        return self.find(name)

    def in_dir(self, *operations):
        return self.client.run(words(22) + opaque(self.dir), *operations)

    def on(self, handle, *operations):
        return self.client.run(words(22) + opaque(handle), *operations)[0]

    def find(self, name):
        status, reply = self.in_dir(words(15) + opaque(name), words(10))
        assert status == OK, status
        reply.fixed(8 + 8 + 8)
        return reply.opaque()

    def change(self):
        return self.client.attributes(self.dir, 3)[1].u64()

    def ask(self, handle, operation, before=(), **who):
        """Runs an operation on a file. Returns its status, and its result if it succeeds."""
        head = [fh(handle), *before]
        status, reply = self.client.run(*head, operation, **who)
        if status == OK:
            reply.fixed(8 * len(head) + 8)
        return status, reply

    def mkdir(self, name=b"dir", mode=0o777):
        status, _ = self.in_dir(mkdir_op(name, values=words(mode), numbers=[MODE]))
        assert status == OK, status
        return self.find(name)

    def private(self, mode=0o600, name=b"private"):
        """Creates a file that other users cannot change. Returns its handle."""
        stateid, handle = self.make(name, mode=mode, owner=b"maker")
        assert self.client.close(handle, stateid, owner=b"maker") == OK
        return handle

    def removed(self, kind=1):
        """Creates an entry and removes it. Returns its handle."""
        handle = self.put(b"gone") if kind == 1 else self.special(kind, b"gone")
        assert self.in_dir(words(28) + opaque(b"gone"))[0] == OK
        return handle

    def filled(self, data=b"0123456789", name=b"f"):
        """Creates and opens a file with data."""
        stateid, handle = self.make(name)
        assert self.client.write(handle, stateid, data) == OK
        return stateid, handle

    def closed(self, name=b"f"):
        """Returns the stateid of a closed open, and the handle."""
        stateid, handle = self.make(name)
        assert self.client.close(handle, stateid) == OK
        return stateid, handle

    def read_only(self):
        """Another client, which may not change the share."""
        return self.connect(b"reads only " + self.client.name, source=READER)

    def other(self):
        return self.connect(b"other of " + self.client.name)

    def on_other_share(self):
        """Handle of the top of the other share."""
        return self.client.handle(b"m" if self.share == b"d" else b"d")

    def back(self):
        """Uses a client with a back channel from now on."""
        self.client = self.connect(b"called " + self.client.name, back=True)
        return self.client

    def lock(self, handle, stateid, kind=2, at=0, length=10, owner=b"locks", opener=b"owner"):
        """LOCK by a new owner. Returns the status and the stateid."""
        client = self.client
        lock = words(12, kind, 0) + long(at) + long(length) + words(1, client.open_number(opener)) + stateid
        status, reply = self.ask(handle, lock + words(0) + client.id + opaque(owner))
        return status, reply.fixed(16) if status == OK else None

    def locked(self, **how):
        """Creates, opens and locks a file. Returns the stateids of the open and the lock, and the handle."""
        stateid, handle = self.make()
        status, lock = self.lock(handle, stateid, **how)
        assert status == OK, status
        return stateid, lock, handle

    def more_locks(self, handle, lock, number=1, kind=2, at=0, length=10):
        """LOCK by an owner with locks."""
        op = words(12, kind, 0) + long(at) + long(length) + words(0) + lock + words(number if self.minor == 0 else 0)
        return self.ask(handle, op)

    def unlock(self, handle, lock, number=1, at=0, length=10):
        op = words(14, 2, number if self.minor == 0 else 0) + lock + long(at) + long(length)
        return self.ask(handle, op)

    def data(self, handle, at=0, length=4096):
        """All that a READ returns: the end-of-file flag and the data."""
        status, reply = self.ask(handle, read_op(ANONYMOUS, at, length))
        assert status == OK, status
        return reply.u32(), reply.opaque()

    def number(self, handle, attribute):
        """An attribute of 4 or 8 bytes."""
        status, values = self.client.attributes(handle, attribute)
        assert status == OK, status
        return int.from_bytes(values.data, "big")

    def size(self, handle):
        return self.number(handle, SIZE)



def bits(*numbers, count=3):
    return words(count, *(sum(1 << n - 32 * w for n in numbers if n // 32 == w) for w in range(count)))


WRITE_ONLY = 48
BYPASS, INVALID = b"\xff" * 16, b"\xff" * 4 + bytes(12)
CURRENT = words(1) + bytes(12)
UNKNOWN = words(1) + bytes([7] * 12)
LAST = 2**64 - 1
READER = "127.0.0.2"
TYPE, CHANGE, SIZE, FSID, FILEHANDLE, FILEID, MODE, LINKS = 1, 3, 4, 8, 19, 20, 33, 35


def with_seqid(stateid, seqid):
    return words(seqid) + stateid[4:]


def fh(handle):
    return words(22) + opaque(handle)


def attributes(values, *numbers):
    return bits(*numbers) + opaque(values)


def getattr_op(*numbers):
    return words(9) + bits(*numbers)


def setattr_op(stateid, values, *numbers):
    return words(34) + stateid + attributes(values, *numbers)


def mkdir_op(name, kind=2, more=b"", values=b"", numbers=()):
    return words(6, kind) + more + opaque(name) + attributes(values, *numbers)


def readdir_op(cookie=0, verifier=bytes(8), room=4096, numbers=()):
    return words(26) + long(cookie) + verifier + words(room, room) + bits(*numbers)


def read_op(stateid=ANONYMOUS, at=0, length=10):
    return words(25) + stateid + long(at) + words(length)


def write_op(stateid=ANONYMOUS, data=b"data", at=0, stable=2):
    return words(38) + stateid + long(at) + words(stable) + opaque(data)


def range_op(number, stateid=ANONYMOUS, at=0, length=4096):
    """ALLOCATE, DEALLOCATE."""
    return words(number) + stateid + long(at) + long(length)


def seek_op(stateid=ANONYMOUS, at=0, what=0):
    return words(69) + stateid + long(at) + words(what)


def lockt_op(client, kind=2, at=0, length=LAST, owner=b"tests"):
    return words(13, kind) + long(at) + long(length) + client.id + opaque(owner)


def open_op(client, claim, access=READ, deny=0, how=words(0), owner=b"owner", id=None):
    number = client.open_number(owner)
    return words(18, number, access, deny) + (id or client.id) + opaque(owner) + how + claim


def by_name(name):
    return words(0) + opaque(name)


def run(cases):
    """Runs cases by name, each in a directory of its own. Prints the status or the failure of each."""
    at, share, minor = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
    for name in cases:
        try:
            status = CASES[name](Lab(at, minor, share, b"%s %d %s" % (share, minor, name.encode())))
        except Exception as error:
            status = "%s: %s, line %d" % (type(error).__name__, error, error.__traceback__.tb_next.tb_lineno)
        print(name, status, flush=True)
