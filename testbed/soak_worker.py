#!/usr/bin/env python3
"""Uses a directory until a file appears, and knows what is in it. soak_worker.py DIR SEED END RESULT [COUNTER]

Files are written, cut, renamed, removed and read back; with COUNTER, a number in that file, which other workers have too, is raised
under a lock. RESULT gets a line with the digest of each file that is there at the end, and how often the number was raised.
"""
import fcntl
import hashlib
import os
import random
import sys

directory, seed, end, result = sys.argv[1:5]
counter = sys.argv[5] if len(sys.argv) > 5 else None
chance = random.Random(int(seed))
known = {}
raised = done = 0
os.makedirs(directory, exist_ok=True)


def at(name):
    return os.path.join(directory, name)


def write():
    """A part of a file, which may be new; what is not flushed is when it is closed."""
    name = f"f{chance.randrange(20)}"
    data = known.get(name, b"")
    position = chance.choice([0, len(data), chance.randrange(300_000)])
    more = chance.randbytes(chance.choice([1, 100, 4096, chance.randrange(1, 200_000)]))
    file = os.open(at(name), os.O_RDWR | os.O_CREAT | chance.choice([0, 0, os.O_SYNC]), 0o644)
    try:
        view = memoryview(more)
        written = 0
        while written < len(view):
            written += os.pwrite(file, view[written:], position + written)
        if chance.randrange(3) == 0:
            os.fsync(file)
    finally:
        os.close(file)
    known[name] = data[:position].ljust(position, b"\0") + more + data[position + len(more):]


def cut():
    if known:
        name = chance.choice(sorted(known))
        length = chance.randrange(len(known[name]) + 10_000)
        os.truncate(at(name), length)
        known[name] = known[name][:length].ljust(length, b"\0")


def rename():
    if known:
        name, other = chance.choice(sorted(known)), f"f{chance.randrange(20)}"
        if name == other:
            return
        try:
            os.rename(at(name), at(other))
        except FileNotFoundError:
            # The server ended between doing it and saying so.
            assert not os.path.exists(at(name)), name
        known[other] = known.pop(name)


def remove():
    if known:
        name = chance.choice(sorted(known))
        try:
            os.unlink(at(name))
        except FileNotFoundError:
            pass
        del known[name]


def verify(name):
    with open(at(name), "rb") as file:
        found = file.read()
    if found != known[name]:
        first = next((n for n, (a, b) in enumerate(zip(found, known[name])) if a != b), min(len(found), len(known[name])))
        sys.exit(f"{directory}/{name}: {len(found)} bytes instead of {len(known[name])}, other ones from {first} on")


def read():
    if known:
        verify(chance.choice(sorted(known)))


def listing():
    found, wanted = sorted(os.listdir(directory)), sorted(known)
    # What a client keeps of files that it has removed.
    found = [name for name in found if not name.startswith(".nfs")]
    if found != wanted:
        sys.exit(f"{directory} has {found} instead of {wanted}")


def raise_counter():
    global raised
    file = os.open(counter, os.O_RDWR)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX)
        number = int(os.pread(file, 20, 0))
        os.pwrite(file, b"%020d" % (number + 1), 0)
        fcntl.lockf(file, fcntl.LOCK_UN)
    finally:
        os.close(file)
    raised += 1


steps = [write] * 6 + [read] * 4 + [cut, rename, remove, listing] + [raise_counter] * (4 if counter else 0)
while not os.path.exists(end):
    chance.choice(steps)()
    done += 1
for name in sorted(known):
    verify(name)
listing()
with open(result, "w") as out:
    for name, data in sorted(known.items()):
        print(hashlib.sha256(data).hexdigest(), name, file=out)
    print("raised", raised, file=out)
print(f"{directory}: {done} steps, {raised} times raised")
