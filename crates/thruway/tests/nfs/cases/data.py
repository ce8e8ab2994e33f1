"""Cases of operations on the data of files, and of copies and extended attributes of version 4.2."""
from cases.lab import *


@case
def read_without_the_right(lab):
    return lab.client.run(fh(lab.private()), read_op(), uid=7, gid=7)[0]


@case
def read_of_a_fifo(lab):
    return lab.on(lab.special(7), read_op())


@case
def read_of_the_root(lab):
    return lab.client.run(words(24), read_op())[0]


def read(lab, handle, at, length, stateid=ANONYMOUS):
    """Returns the end-of-file flag and the data."""
    status, reply = lab.ask(handle, read_op(stateid, at, length))
    assert status == OK, status
    return reply.u32(), reply.opaque()


@case
def read_of_a_part(lab):
    assert read(lab, lab.filled()[1], 2, 3) == (0, b"234")
    return OK


@case
def read_to_the_end(lab):
    assert read(lab, lab.filled()[1], 5, 5) == (1, b"56789")
    return OK


@case
def read_across_the_end(lab):
    assert read(lab, lab.filled()[1], 8, 100) == (1, b"89")
    return OK


@case
def read_beyond_the_end(lab):
    assert read(lab, lab.filled()[1], 11, 5) == (1, b"")
    return OK


@case
def read_at_the_largest_offset(lab):
    assert read(lab, lab.filled()[1], LAST, 100) == (1, b"")
    return OK


@case
def read_of_no_length(lab):
    assert read(lab, lab.filled()[1], 5, 0) == (0, b"")
    return OK


@case
def read_of_an_empty_file(lab):
    assert read(lab, lab.put(), 0, 10) == (1, b"")
    return OK


@case
def read_without_a_stateid_of_a_file_that_denies_it(lab):
    handle = lab.put()
    assert lab.other().open(lab.dir, b"f", access=WRITE, deny=READ)[0] == OK
    return lab.client.read(handle)[0]


@case
def read_with_the_bypass_stateid(lab):
    handle = lab.put()
    assert lab.other().open(lab.dir, b"f", access=WRITE, deny=READ)[0] == OK
    return lab.client.read(handle, BYPASS)[0]


@case
def read_with_a_closed_stateid(lab):
    stateid, handle = lab.closed()
    return lab.client.read(handle, stateid)[0]


@case
def read_with_the_stateid_of_another_file(lab):
    stateid, _ = lab.make()
    return lab.client.read(lab.put(b"g"), stateid)[0]


@case
def read_with_the_stateid_of_another_client(lab):
    stateid, handle = lab.make()
    return lab.other().read(handle, stateid)[0]


@case
def read_with_a_later_stateid(lab):
    stateid, handle = lab.make()
    return lab.client.read(handle, with_seqid(stateid, 77))[0]


@case
def read_with_the_latest_stateid(lab):
    stateid, handle = lab.make()
    return lab.client.read(handle, with_seqid(stateid, 0))[0]


@case
def read_with_the_stateid_of_a_lock(lab):
    _, lock, handle = lab.locked()
    return lab.client.read(handle, lock)[0]


@case
def read_with_the_invalid_stateid(lab):
    return lab.client.read(lab.put(), INVALID)[0]


@case
def read_with_the_current_stateid(lab):
    lab.put()
    return lab.in_dir(open_op(lab.client, by_name(b"f"), access=READ | WANT_NONE), read_op(CURRENT))[0]


@case
def read_without_a_current_stateid(lab):
    return lab.on(lab.put(), read_op(CURRENT))


@case
def read_with_the_current_stateid_of_later_versions(lab):
    return lab.on(lab.put(), read_op(CURRENT))


@case
def write_on_a_read_only_share(lab):
    return lab.read_only().run(fh(lab.put()), write_op())[0]


@case
def write_without_the_right(lab):
    return lab.client.run(fh(lab.private(0o644)), write_op(), uid=7, gid=7)[0]


@case
def write_of_a_fifo(lab):
    return lab.on(lab.special(7), write_op())


@case
def write_of_no_data(lab):
    stateid, handle = lab.filled()
    status, reply = lab.ask(handle, write_op(stateid, b"", 100))
    assert reply.u32() == 0 and lab.size(handle) == 10
    return status


@case
def write_at_the_largest_offset(lab):
    stateid, handle = lab.make()
    return lab.client.write(handle, stateid, b"data", at=LAST)


@case
def write_beyond_the_end(lab):
    stateid, handle = lab.filled()
    status = lab.client.write(handle, stateid, b"x", at=12)
    assert lab.data(handle) == (1, b"0123456789\0\0x")
    return status


@case
def write_of_a_part(lab):
    stateid, handle = lab.filled()
    status = lab.client.write(handle, stateid, b"xy", at=4)
    assert lab.data(handle) == (1, b"0123xy6789")
    return status


@case
def write_that_is_stable(lab):
    stateid, handle = lab.make()
    status, reply = lab.ask(handle, write_op(stateid, stable=2))
    assert (reply.u32(), reply.u32()) == (4, 2)
    return status


@case
def write_that_is_stable_in_its_data(lab):
    stateid, handle = lab.make()
    status, reply = lab.ask(handle, write_op(stateid, stable=1))
    assert reply.u32() == 4 and reply.u32() >= 1
    return status


@case
def write_verifiers_are_equal(lab):
    stateid, handle = lab.make()
    verifiers = []
    for _ in range(2):
        status, reply = lab.ask(handle, write_op(stateid, stable=0))
        reply.fixed(8)
        verifiers.append(reply.fixed(8))
    verifiers.append(lab.ask(handle, words(5) + long(0) + words(0))[1].fixed(8))
    assert len(set(verifiers)) == 1
    return status


@case
def write_of_an_unknown_stability(lab):
    return lab.on(lab.put(), write_op(stable=3))


@case
def write_with_a_closed_stateid(lab):
    stateid, handle = lab.closed()
    return lab.client.write(handle, stateid, b"data")


@case
def write_with_the_stateid_of_another_file(lab):
    stateid, _ = lab.make()
    return lab.client.write(lab.put(b"g"), stateid, b"data")


@case
def write_with_the_stateid_of_another_client(lab):
    stateid, handle = lab.make()
    return lab.other().write(handle, stateid, b"data")


@case
def write_with_an_old_stateid(lab):
    stateid, handle = lab.make()
    assert lab.client.open(lab.dir, b"f", access=BOTH)[0] == OK
    return lab.client.write(handle, stateid, b"data")


@case
def write_with_the_bypass_stateid(lab):
    handle = lab.put()
    assert lab.other().open(lab.dir, b"f", access=READ, deny=WRITE)[0] == OK
    return lab.client.write(handle, BYPASS, b"data")


@case
def write_with_the_stateid_of_a_lock(lab):
    _, lock, handle = lab.locked()
    return lab.client.write(handle, lock, b"data")


@case
def write_with_the_anonymous_stateid(lab):
    return lab.client.write(lab.put(), ANONYMOUS, b"data")


@case
def write_changes_the_change_attribute(lab):
    stateid, handle = lab.make()
    before = lab.number(handle, CHANGE)
    status = lab.client.write(handle, stateid, b"data")
    assert lab.number(handle, CHANGE) != before
    return status


@case
def commit_of_a_fifo(lab):
    return lab.on(lab.special(7), words(5) + long(0) + words(0))


@case
def commit_beyond_the_end(lab):
    return lab.on(lab.filled()[1], words(5) + long(1000) + words(1000))


@case
def commit_of_a_part(lab):
    return lab.on(lab.filled()[1], words(5) + long(2) + words(3))


@case
def setattr_of_a_smaller_size(lab):
    stateid, handle = lab.filled()
    status = lab.on(handle, setattr_op(stateid, long(4), SIZE))
    assert lab.data(handle) == (1, b"0123")
    return status


@case
def setattr_of_a_larger_size(lab):
    stateid, handle = lab.filled()
    status = lab.on(handle, setattr_op(stateid, long(12), SIZE))
    assert lab.data(handle) == (1, b"0123456789\0\0")
    return status


@case
def setattr_of_the_largest_size(lab):
    stateid, handle = lab.make()
    return lab.on(handle, setattr_op(stateid, long(LAST), SIZE))


@case
def setattr_of_a_size_with_a_closed_stateid(lab):
    stateid, handle = lab.closed()
    return lab.on(handle, setattr_op(stateid, long(0), SIZE))


@case
def setattr_of_a_size_with_the_stateid_of_another_file(lab):
    stateid, _ = lab.make()
    return lab.on(lab.put(b"g"), setattr_op(stateid, long(0), SIZE))


@case
def setattr_of_a_size_of_a_file_that_denies_writing(lab):
    handle = lab.put()
    assert lab.other().open(lab.dir, b"f", access=READ, deny=WRITE)[0] == OK
    return lab.on(handle, setattr_op(ANONYMOUS, long(0), SIZE))


@case
def allocate_of_no_length(lab):
    stateid, handle = lab.make()
    return lab.on(handle, range_op(59, stateid, 0, 0))


@case
def allocate_of_a_directory(lab):
    return lab.on(lab.dir, range_op(59))


@case
def allocate_of_a_symbolic_link(lab):
    return lab.on(lab.special(5), range_op(59))


@case
def allocate_of_a_fifo(lab):
    return lab.on(lab.special(7), range_op(59))


@case
def allocate_on_a_read_only_share(lab):
    return lab.read_only().run(fh(lab.put()), range_op(59))[0]


@case
def allocate_with_a_closed_stateid(lab):
    stateid, handle = lab.closed()
    return lab.on(handle, range_op(59, stateid))


@case
def allocate_without_the_right(lab):
    return lab.client.run(fh(lab.private(0o644)), range_op(59), uid=7, gid=7)[0]


@case
def allocate_beyond_the_end(lab):
    stateid, handle = lab.filled()
    status = lab.on(handle, range_op(59, stateid, 8, 6))
    assert lab.data(handle) == (1, b"0123456789" + bytes(4))
    return status


@case
def allocate_within_the_file(lab):
    stateid, handle = lab.filled()
    status = lab.on(handle, range_op(59, stateid, 2, 3))
    assert lab.data(handle) == (1, b"0123456789")
    return status


@case
def deallocate_of_no_length(lab):
    stateid, handle = lab.make()
    return lab.on(handle, range_op(62, stateid, 0, 0))


@case
def deallocate_of_a_directory(lab):
    return lab.on(lab.dir, range_op(62))


@case
def deallocate_of_a_symbolic_link(lab):
    return lab.on(lab.special(5), range_op(62))


@case
def deallocate_of_a_fifo(lab):
    return lab.on(lab.special(7), range_op(62))


@case
def deallocate_on_a_read_only_share(lab):
    return lab.read_only().run(fh(lab.put()), range_op(62))[0]


@case
def deallocate_with_the_stateid_of_another_file(lab):
    stateid, _ = lab.make()
    return lab.on(lab.put(b"g"), range_op(62, stateid))


@case
def deallocate_within_the_file(lab):
    stateid, handle = lab.filled()
    status = lab.on(handle, range_op(62, stateid, 2, 3))
    assert lab.data(handle) == (1, b"01\0\0\x0056789")
    return status


@case
def deallocate_across_the_end(lab):
    stateid, handle = lab.filled()
    status = lab.on(handle, range_op(62, stateid, 6, 100))
    assert lab.data(handle) == (1, b"012345" + bytes(4))
    return status


@case
def deallocate_beyond_the_end(lab):
    stateid, handle = lab.filled()
    status = lab.on(handle, range_op(62, stateid, 100, 100))
    assert lab.data(handle) == (1, b"0123456789")
    return status


@case
def seek_in_an_empty_file(lab):
    return lab.on(lab.put(), seek_op())


@case
def seek_at_the_end(lab):
    return lab.on(lab.filled()[1], seek_op(at=10))


@case
def seek_in_a_directory(lab):
    return lab.on(lab.dir, seek_op())


@case
def seek_in_a_symbolic_link(lab):
    return lab.on(lab.special(5), seek_op())


@case
def seek_in_a_fifo(lab):
    return lab.on(lab.special(7), seek_op())


@case
def seek_with_a_closed_stateid(lab):
    stateid, handle = lab.closed()
    return lab.on(handle, seek_op(stateid))


@case
def seek_without_the_right(lab):
    handle = lab.private()
    assert lab.client.write(handle, ANONYMOUS, b"data") == OK
    return lab.client.run(fh(handle), seek_op(), uid=7, gid=7)[0]


def sought(lab, handle, at, what):
    status, reply = lab.ask(handle, seek_op(at=at, what=what))
    assert status == OK, status
    return reply.u32(), reply.u64()


@case
def seek_of_data(lab):
    assert sought(lab, lab.filled()[1], 3, 0) == (0, 3)
    return OK


@case
def seek_of_a_hole_at_the_end(lab):
    _, handle = lab.filled()
    assert sought(lab, handle, 3, 1)[1] == 10
    return OK


@case
def seek_of_data_behind_the_last(lab):
    stateid, handle = lab.filled()
    assert lab.on(handle, setattr_op(stateid, long(1 << 20), SIZE)) == OK
    assert sought(lab, handle, 1 << 19, 0)[0] == 1
    return OK


@case
def seek_of_a_hole_between_data(lab):
    stateid, handle = lab.filled(b"x" * 65536)
    assert lab.client.write(handle, stateid, b"x" * 65536, at=1 << 20) == OK
    assert sought(lab, handle, 0, 1) == (0, 65536)
    assert sought(lab, handle, 65536, 0) == (0, 1 << 20)
    return OK


@case
def io_advise_with_a_closed_stateid(lab):
    stateid, handle = lab.closed()
    return lab.on(handle, words(63) + stateid + long(0) + long(0) + words(0))


@case
def io_advise_of_an_unknown_hint(lab):
    stateid, handle = lab.make()
    status, reply = lab.ask(handle, words(63) + stateid + long(0) + long(0) + bits(70))
    assert sum(reply.u32() for _ in range(reply.u32())) == 0
    return status


def copy_args(at=0, to=0, length=0, synchronous=1):
    return long(at) + long(to) + long(length) + words(1, synchronous, 0)


def clone_args(at=0, to=0, length=0):
    return long(at) + long(to) + long(length)


def transfer(lab, number, arguments, source, target, **who):
    """COPY or CLONE. Returns the status and the result."""
    (from_stateid, from_handle), (to_stateid, to_handle) = source, target
    head = [fh(from_handle), words(32), fh(to_handle)]
    status, reply = lab.client.run(*head, words(number) + from_stateid + to_stateid + arguments, **who)
    if status == OK:
        reply.fixed(8 * 4)
    return status, reply


def pair(lab):
    return lab.filled(), lab.make(b"g", owner=b"owner")


BOTH_COPIES = {"copy": (60, copy_args()), "clone": (71, clone_args())}


def without_a_saved_file(lab, number, arguments):
    return lab.on(lab.put(), words(number) + ANONYMOUS + ANONYMOUS + arguments)


def to_another_share(lab, number, arguments):
    other = lab.on_other_share()
    name = b"copied of %s %d" % (lab.share, number)
    status, stateid, handle, _ = lab.client.create(other, name)
    assert status == OK, status
    return transfer(lab, number, arguments, lab.filled(), (stateid, handle))[0]


def to_a_file_open_for_reading(lab, number, arguments):
    lab.put(b"g")
    _, stateid, handle, _ = lab.client.open(lab.dir, b"g")
    return transfer(lab, number, arguments, lab.filled(), (stateid, handle))[0]


def with_a_closed_source(lab, number, arguments):
    return transfer(lab, number, arguments, lab.closed(b"h"), lab.make(b"g"))[0]


def with_a_closed_target(lab, number, arguments):
    closed = lab.closed(b"h")
    return transfer(lab, number, arguments, lab.filled(), closed)[0]


def with_exchanged_stateids(lab, number, arguments):
    source, target = pair(lab)
    return transfer(lab, number, arguments, (target[0], source[1]), (source[0], target[1]))[0]


def from_a_directory(lab, number, arguments):
    return transfer(lab, number, arguments, (ANONYMOUS, lab.mkdir()), lab.make(b"g"))[0]


def to_a_directory(lab, number, arguments):
    return transfer(lab, number, arguments, lab.filled(), (ANONYMOUS, lab.mkdir()))[0]


def to_a_symbolic_link(lab, number, arguments):
    return transfer(lab, number, arguments, lab.filled(), (ANONYMOUS, lab.special(5)))[0]


def from_a_fifo(lab, number, arguments):
    return transfer(lab, number, arguments, (ANONYMOUS, lab.special(7)), lab.make(b"g"))[0]


def on_a_read_only_share(lab, number, arguments):
    source, target = lab.put(b"h"), lab.put(b"g")
    lab.client = lab.read_only()
    return transfer(lab, number, arguments, (ANONYMOUS, source), (ANONYMOUS, target))[0]


def without_the_right(lab, number, arguments):
    stateid, target = lab.make(b"g", mode=0o666)
    stateid, source = lab.make(b"h", mode=0o600)
    assert lab.client.write(source, stateid, b"x" * 4096) == OK
    return transfer(lab, number, arguments, (ANONYMOUS, source), (ANONYMOUS, target), uid=7, gid=7)[0]


OF_BOTH = [
    without_a_saved_file,
    to_another_share,
    to_a_file_open_for_reading,
    with_a_closed_source,
    with_a_closed_target,
    with_exchanged_stateids,
    from_a_directory,
    to_a_directory,
    to_a_symbolic_link,
    from_a_fifo,
    on_a_read_only_share,
    without_the_right,
]
for name, (number, arguments) in BOTH_COPIES.items():
    for function in OF_BOTH:
        run_it = lambda lab, f=function, number=number, arguments=arguments: f(lab, number, arguments)
        CASES["%s_%s" % (name, function.__name__)] = run_it


def copied(lab, source, target, **how):
    """Bytes that COPY reports."""
    status, reply = transfer(lab, 60, copy_args(**how), source, target)
    assert status == OK, status
    assert reply.u32() == 0
    return reply.u64()


@case
def copy_of_all(lab):
    source, target = pair(lab)
    assert copied(lab, source, target, at=4) == 6
    assert lab.data(target[1]) == (1, b"456789")
    return OK


@case
def copy_of_a_part(lab):
    source, target = pair(lab)
    assert copied(lab, source, target, at=2, to=1, length=3) == 3
    assert lab.data(target[1]) == (1, b"\x00234")
    return OK


@case
def copy_of_nothing(lab):
    source, target = pair(lab)
    assert copied(lab, source, target, at=10) == 0
    assert lab.size(target[1]) == 0
    return OK


@case
def copy_across_the_end(lab):
    source, target = pair(lab)
    return transfer(lab, 60, copy_args(at=4, length=100), source, target)[0]


@case
def copy_within_a_file(lab):
    source = lab.filled()
    assert copied(lab, source, source, at=0, to=10, length=10) == 10
    assert lab.data(source[1]) == (1, b"0123456789" * 2)
    return OK


@case
def copy_beyond_the_largest_file(lab):
    source, target = pair(lab)
    return transfer(lab, 60, copy_args(to=2**63 - 5, length=10), source, target)[0]


@case
def clone_from_beyond_the_end(lab):
    source, target = pair(lab)
    return transfer(lab, 71, clone_args(at=4096), source, target)[0]


@case
def clone_across_the_end(lab):
    source, target = pair(lab)
    return transfer(lab, 71, clone_args(length=4096), source, target)[0]


@case
def clone_of_nothing(lab):
    return transfer(lab, 71, clone_args(), lab.make(b"h"), lab.make(b"g"))[0]


@case
def offload_cancel_of_an_open(lab):
    stateid, handle = lab.make()
    return lab.on(handle, words(66) + stateid)


@case
def offload_status_of_an_open(lab):
    stateid, handle = lab.make()
    return lab.on(handle, words(67) + stateid)


@case
def offload_cancel_of_the_anonymous_stateid(lab):
    return lab.on(lab.put(), words(66) + ANONYMOUS)


@case
def offload_status_of_the_anonymous_stateid(lab):
    return lab.on(lab.put(), words(67) + ANONYMOUS)


def get_xattr(name=b"x"):
    return words(72) + opaque(name)


def set_xattr(name=b"x", value=b"value", how=0):
    return words(73, how) + opaque(name) + opaque(value)


def list_xattrs(cookie=0, room=4096):
    return words(74) + long(cookie) + words(room)


def remove_xattr(name=b"x"):
    return words(75) + opaque(name)


@case
def getxattr_returns_the_value(lab):
    handle = lab.put()
    assert lab.on(handle, set_xattr()) == OK
    status, reply = lab.ask(handle, get_xattr())
    assert reply.opaque() == b"value"
    return status


@case
def getxattr_of_an_empty_value(lab):
    handle = lab.put()
    assert lab.on(handle, set_xattr(value=b"")) == OK
    status, reply = lab.ask(handle, get_xattr())
    assert reply.opaque() == b""
    return status


@case
def getxattr_of_an_empty_name(lab):
    return lab.on(lab.put(), get_xattr(b""))


@case
def getxattr_of_a_long_name(lab):
    return lab.on(lab.put(), get_xattr(b"n" * 256))


@case
def getxattr_without_the_right(lab):
    handle = lab.private()
    assert lab.on(handle, set_xattr()) == OK
    return lab.client.run(fh(handle), get_xattr(), uid=7, gid=7)[0]


@case
def getxattr_of_a_directory(lab):
    assert lab.on(lab.dir, set_xattr()) == OK
    return lab.on(lab.dir, get_xattr())


@case
def setxattr_replaces_the_value(lab):
    handle = lab.put()
    assert lab.on(handle, set_xattr()) == OK
    status = lab.on(handle, set_xattr(value=b"other"))
    assert lab.ask(handle, get_xattr())[1].opaque() == b"other"
    return status


@case
def setxattr_of_an_empty_name(lab):
    return lab.on(lab.put(), set_xattr(b""))


@case
def setxattr_of_a_long_name(lab):
    return lab.on(lab.put(), set_xattr(b"n" * 256))


@case
def setxattr_of_an_unknown_option(lab):
    return lab.on(lab.put(), set_xattr(how=3))


@case
def setxattr_on_a_read_only_share(lab):
    return lab.read_only().run(fh(lab.put()), set_xattr())[0]


@case
def setxattr_without_the_right(lab):
    return lab.client.run(fh(lab.private(0o644)), set_xattr(), uid=7, gid=7)[0]


@case
def setxattr_of_a_long_value(lab):
    return lab.on(lab.put(), set_xattr(value=bytes(65537)))


@case
def setxattr_tells_the_change(lab):
    handle = lab.put()
    before = lab.number(handle, CHANGE)
    status, reply = lab.ask(handle, set_xattr())
    reply.u32()
    assert (reply.u64(), reply.u64()) == (before, lab.number(handle, CHANGE)) and before != lab.number(handle, CHANGE)
    return status


def xattrs(lab, handle, cookie=0, room=4096):
    """Returns the next cookie, the names, and the end-of-list flag."""
    status, reply = lab.ask(handle, list_xattrs(cookie, room))
    assert status == OK, status
    return reply.u64(), [reply.opaque() for _ in range(reply.u32())], reply.u32()


@case
def listxattrs_of_nothing(lab):
    assert xattrs(lab, lab.put())[1:] == ([], 1)
    return OK


@case
def listxattrs_in_pieces(lab):
    handle, names, cookie, is_end = lab.put(), [], 0, 0
    for name in (b"one", b"two", b"three"):
        assert lab.on(handle, set_xattr(name)) == OK
    while not is_end:
        cookie, more, is_end = xattrs(lab, handle, cookie, room=32)
        names += more
    assert sorted(names) == [b"one", b"three", b"two"]
    return OK


@case
def listxattrs_with_an_unknown_cookie(lab):
    return lab.on(lab.put(), list_xattrs(LAST))


@case
def listxattrs_without_the_right(lab):
    handle = lab.private()
    assert lab.on(handle, set_xattr()) == OK
    return lab.client.run(fh(handle), list_xattrs(), uid=7, gid=7)[0]


@case
def removexattr_removes_the_attribute(lab):
    handle = lab.put()
    assert lab.on(handle, set_xattr()) == OK
    status = lab.on(handle, remove_xattr())
    assert xattrs(lab, handle)[1] == []
    return status


@case
def removexattr_of_an_empty_name(lab):
    return lab.on(lab.put(), remove_xattr(b""))


@case
def removexattr_on_a_read_only_share(lab):
    return lab.read_only().run(fh(lab.put()), remove_xattr())[0]


@case
def removexattr_without_the_right(lab):
    handle = lab.private(0o644)
    assert lab.on(handle, set_xattr()) == OK
    return lab.client.run(fh(handle), remove_xattr(), uid=7, gid=7)[0]


@case
def commit_of_the_root(lab):
    return lab.client.run(words(24), words(5) + long(0) + words(0))[0]


@case
def getxattr_of_the_root(lab):
    return lab.client.run(words(24), get_xattr())[0]


@case
def listxattrs_of_the_root(lab):
    assert xattrs(lab, lab.client.handle())[1:] == ([], 1)
    return OK
