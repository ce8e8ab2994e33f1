"""Cases of operations on names, attributes and handles."""
from cases.lab import *

# Operations that need a current file. Those with stateids are in other modules.
NEED_FILE = {
    "access": words(3, 1),
    "commit": words(5) + long(0) + words(0),
    "create": mkdir_op(b"s"),
    "lookup": words(15) + opaque(b"f"),
    "lookupp": words(16),
    "nverify": words(17) + attributes(words(1), TYPE),
    "verify": words(37) + attributes(words(1), TYPE),
    "read": read_op(),
    "readdir": readdir_op(),
    "readlink": words(27),
    "remove": words(28) + opaque(b"f"),
    "rename": words(29) + opaque(b"f") + opaque(b"g"),
    "secinfo": words(33) + opaque(b"f"),
    "secinfo_no_name": words(52, 0),
    "setattr": setattr_op(ANONYMOUS, words(0o600), MODE),
    "write": write_op(),
    "allocate": range_op(59),
    "deallocate": range_op(62),
    "io_advise": words(63) + ANONYMOUS + long(0) + long(0) + words(0),
    "seek": seek_op(),
    "getxattr": words(72) + opaque(b"x"),
    "setxattr": words(73, 0) + opaque(b"x") + opaque(b"value"),
    "listxattrs": words(74) + long(0) + words(4096),
    "removexattr": words(75) + opaque(b"x"),
}

for name, operation in NEED_FILE.items():
    CASES[name + "_without_a_current_file"] = lambda lab, operation=operation: lab.client.run(operation)[0]

for name in "access commit nverify verify read setattr write allocate deallocate seek getxattr setxattr listxattrs".split():
    CASES[name + "_of_a_removed_file"] = lambda lab, name=name: lab.on(lab.removed(), NEED_FILE[name])

for name in "create lookup lookupp readdir remove secinfo".split():
    CASES[name + "_in_a_removed_directory"] = lambda lab, name=name: lab.on(lab.removed(2), NEED_FILE[name])

NAMED = {
    "create": lambda lab, name: lab.in_dir(mkdir_op(name))[0],
    "link": lambda lab, name: link(lab, lab.put(), name),
    "lookup": lambda lab, name: lab.in_dir(words(15) + opaque(name))[0],
    "open": lambda lab, name: lab.client.create(lab.dir, name)[0],
    "remove": lambda lab, name: lab.in_dir(words(28) + opaque(name))[0],
    "rename_from": lambda lab, name: rename(lab, name, b"g"),
    "rename_to": lambda lab, name: rename(lab, b"f", name),
    "secinfo": lambda lab, name: lab.in_dir(words(33) + opaque(name))[0],
}
NAMES = {
    "an_empty_name": b"",
    "dot": b".",
    "dot_dot": b"..",
    "a_slash": b"a/b",
    "a_nul": b"a\0b",
    "a_long_name": b"n" * 256,
}


def link(lab, handle, name, directory=None):
    return lab.client.run(fh(handle), words(32), fh(directory or lab.dir), words(11) + opaque(name))[0]


def rename(lab, old, new, source=None, target=None, **who):
    if b"f" in (old, new):
        lab.put()
    operations = [fh(source or lab.dir), words(32), fh(target or lab.dir), words(29) + opaque(old) + opaque(new)]
    return lab.client.run(*operations, **who)[0]


for operation, named in NAMED.items():
    for what, name in NAMES.items():
        CASES.setdefault("%s_of_%s" % (operation, what), lambda lab, named=named, name=name: named(lab, name))


@case
def lookup_of_the_longest_name(lab):
    return lab.in_dir(words(15) + opaque(b"n" * 255))[0]


@case
def create_of_the_longest_name(lab):
    return lab.in_dir(mkdir_op(b"n" * 255))[0]


def granted(lab, handle, asked=0x3F, **who):
    status, reply = lab.ask(handle, words(3, asked), **who)
    assert status == OK, status
    return reply.u32(), reply.u32()


@case
def access_of_one_right(lab):
    assert granted(lab, lab.dir, 1) == (1, 1)
    return OK


@case
def access_of_a_private_file(lab):
    assert granted(lab, lab.private(0o600), uid=7, gid=7)[1] == 0
    return OK


@case
def access_of_a_file_that_others_read(lab):
    assert granted(lab, lab.private(0o644), uid=7, gid=7)[1] == 1
    return OK


@case
def access_on_a_read_only_share(lab):
    lab.client = lab.read_only()
    assert granted(lab, lab.dir)[1] == 0x03
    return OK


@case
def access_of_extended_attributes(lab):
    assert granted(lab, lab.dir, 0x1C0) == (0, 0)
    return OK


@case
def create_in_a_symbolic_link(lab):
    return lab.on(lab.special(5), mkdir_op(b"d"))


@case
def create_with_an_unknown_attribute(lab):
    return lab.in_dir(mkdir_op(b"d", values=long(0), numbers=[90]))[0]


@case
def create_with_a_read_only_attribute(lab):
    return lab.in_dir(mkdir_op(b"d", values=long(0), numbers=[CHANGE]))[0]


@case
def create_with_an_invalid_mode(lab):
    return lab.in_dir(mkdir_op(b"d", values=words(0o10000), numbers=[MODE]))[0]


@case
def create_with_a_size(lab):
    return lab.in_dir(mkdir_op(b"d", values=long(0), numbers=[SIZE]))[0]


@case
def create_without_the_right(lab):
    return lab.client.run(fh(lab.mkdir(mode=0o755)), mkdir_op(b"d"), uid=7, gid=7)[0]


@case
def create_on_a_read_only_share(lab):
    return lab.read_only().run(fh(lab.dir), mkdir_op(b"d"))[0]


@case
def create_in_the_root(lab):
    return lab.client.run(words(24), mkdir_op(b"d"))[0]


@case
def create_of_a_named_attribute(lab):
    return lab.in_dir(words(6, 9) + opaque(b"d") + words(0, 0))[0]


@case
def create_of_an_empty_link(lab):
    return lab.in_dir(mkdir_op(b"l", 5, opaque(b"")))[0]


@case
def create_of_a_device_without_the_right(lab):
    return lab.client.run(fh(lab.dir), mkdir_op(b"b", 3, words(7, 0)), uid=7, gid=7)[0]


@case
def create_sets_the_mode(lab):
    status, reply = lab.ask(lab.dir, mkdir_op(b"d", values=words(0o701), numbers=[MODE]))
    reply.fixed(20)
    assert [reply.u32() for _ in range(reply.u32())] == [0, 1 << MODE - 32]
    assert lab.number(lab.find(b"d"), MODE) == 0o701
    return status


@case
def create_tells_the_change(lab):
    before = lab.change()
    status, reply = lab.ask(lab.dir, mkdir_op(b"d"))
    reply.u32()
    assert (reply.u64(), reply.u64()) == (before, lab.change()) and before != lab.change()
    return status


@case
def create_changes_the_current_file(lab):
    status, reply = lab.in_dir(mkdir_op(b"d"), words(10))
    assert reply.data.endswith(opaque(lab.find(b"d")))
    return status


@case
def getattr_of_a_removed_file(lab):
    return lab.on(lab.removed(), getattr_op(TYPE))


@case
def getattr_of_a_removed_directory(lab):
    return lab.on(lab.removed(2), getattr_op(TYPE))


@case
def getattr_of_nothing(lab):
    status, reply = lab.ask(lab.dir, words(9, 0))
    assert (reply.u32(), reply.u32()) == (0, 0)
    return status


@case
def getattr_of_the_required_attributes(lab):
    status, reply = lab.ask(lab.dir, getattr_op(0))
    reply.fixed(4 * reply.u32())
    reply.u32()
    first = [reply.u32() for _ in range(reply.u32())]
    required = list(range(12)) + [19] + ([75] if lab.minor else [])
    assert all(first[n // 32] >> n % 32 & 1 for n in required)
    return status


@case
def getattr_of_types(lab):
    handles = [lab.put(), lab.special(2, b"d"), lab.special(5, b"l"), lab.special(6, b"s"), lab.special(7, b"p")]
    assert [lab.number(handle, TYPE) for handle in handles] == [1, 2, 5, 6, 7]
    return OK


@case
def getattr_of_the_root(lab):
    root, top = lab.client.handle(), lab.client.handle(lab.share)
    assert lab.number(root, TYPE) == 2 and lab.number(root, FSID) != lab.number(top, FSID)
    return OK


@case
def getattr_of_the_handle(lab):
    status, values = lab.client.attributes(lab.dir, FILEHANDLE)
    assert values.opaque() == lab.dir
    return status


@case
def getfh_after_putfh(lab):
    status, reply = lab.ask(lab.dir, words(10))
    assert reply.opaque() == lab.dir
    return status


@case
def getfh_of_two_names(lab):
    handle = lab.put()
    assert link(lab, handle, b"g") == OK and lab.find(b"g") == handle
    return OK


@case
def getfh_after_a_failure(lab):
    return lab.in_dir(words(15) + opaque(b"nothing"), words(10))[0]


@case
def link_without_a_current_file(lab):
    return lab.client.run(words(11) + opaque(b"l"))[0]


@case
def link_in_a_file(lab):
    return link(lab, lab.put(), b"l", directory=lab.put(b"g"))


@case
def link_on_another_share(lab):
    return link(lab, lab.put(), b"l", directory=lab.on_other_share())


@case
def link_on_a_read_only_share(lab):
    handle = lab.put()
    lab.client = lab.read_only()
    return link(lab, handle, b"l")


@case
def link_without_the_right(lab):
    stateid, handle = lab.make(mode=0o666)
    operations = [fh(handle), words(32), fh(lab.mkdir(mode=0o755)), words(11) + opaque(b"l")]
    return lab.client.run(*operations, uid=7, gid=7)[0]


@case
def link_of_a_removed_file(lab):
    return link(lab, lab.removed(), b"l")


@case
def link_in_a_removed_directory(lab):
    return link(lab, lab.put(), b"l", directory=lab.removed(2))


@case
def link_counts(lab):
    handle = lab.put()
    status = link(lab, handle, b"l")
    assert lab.number(handle, LINKS) == 2
    return status


@case
def link_tells_the_change(lab):
    handle, before = lab.put(), None
    before = lab.change()
    status, reply = lab.ask(handle, words(11) + opaque(b"l"), before=[words(32), fh(lab.dir)])
    reply.u32()
    assert (reply.u64(), reply.u64()) == (before, lab.change()) and before != lab.change()
    return status


@case
def lookup_without_the_right(lab):
    return lab.client.run(fh(lab.mkdir(mode=0o744)), words(15) + opaque(b"f"), uid=7, gid=7)[0]


@case
def lookup_in_a_fifo(lab):
    return lab.on(lab.special(7), words(15) + opaque(b"f"))


@case
def lookup_of_an_unknown_share(lab):
    return lab.client.run(words(24), words(15) + opaque(b"nothing"))[0]


@case
def lookup_of_a_symbolic_link(lab):
    assert lab.number(lab.special(5), TYPE) == 5
    return OK


@case
def lookupp_of_a_directory(lab):
    status, reply = lab.ask(lab.mkdir(), words(10), before=[words(16)])
    assert reply.opaque() == lab.dir
    return status


@case
def lookupp_of_the_top_of_a_share(lab):
    status, reply = lab.ask(lab.client.handle(lab.share), words(10), before=[words(16)])
    assert reply.opaque() == lab.client.handle()
    return status


@case
def lookupp_without_the_right(lab):
    return lab.client.run(fh(lab.mkdir(mode=0o744)), words(16), uid=7, gid=7)[0]


@case
def lookupp_of_a_fifo(lab):
    return lab.on(lab.special(7), words(16))


@case
def verify_of_what_is_so(lab):
    return lab.on(lab.dir, words(37) + attributes(words(2), TYPE))


@case
def verify_of_what_is_not_so(lab):
    return lab.on(lab.dir, words(37) + attributes(words(1), TYPE))


@case
def verify_of_rdattr_error(lab):
    return lab.on(lab.dir, words(37) + attributes(words(0), 11))


@case
def verify_of_two_attributes(lab):
    return lab.on(lab.put(), words(37) + attributes(words(1) + long(5), TYPE, SIZE))


@case
def nverify_of_an_attribute_that_is_only_set(lab):
    return lab.on(lab.dir, words(17) + attributes(words(0), WRITE_ONLY))


@case
def nverify_of_an_attribute_that_is_not_there(lab):
    return lab.on(lab.dir, words(17) + attributes(words(0), 40))


@case
def nverify_of_rdattr_error(lab):
    return lab.on(lab.dir, words(17) + attributes(words(0), 11))


@case
def nverify_of_two_attributes(lab):
    return lab.on(lab.put(), words(17) + attributes(words(1) + long(5), TYPE, SIZE))


@case
def putfh_of_an_empty_handle(lab):
    return lab.client.run(fh(b""))[0]


@case
def putfh_of_a_short_handle(lab):
    return lab.client.run(fh(b"\2"))[0]


@case
def putfh_of_a_long_handle(lab):
    return lab.client.run(fh(bytes(132)))[0]


@case
def putfh_of_the_root(lab):
    return lab.client.run(fh(lab.client.handle()))[0]


@case
def putrootfh_is_a_directory(lab):
    assert lab.number(lab.client.handle(), TYPE) == 2
    return OK


@case
def putrootfh_replaces_the_current_file(lab):
    status, reply = lab.ask(lab.dir, words(10), before=[words(24)])
    assert reply.opaque() == lab.client.handle()
    return status


@case
def putpubfh_has_the_handle_of_the_root(lab):
    status, reply = lab.ask(lab.dir, words(10), before=[words(23)])
    assert reply.opaque() == lab.client.handle()
    return status


@case
def readlink_returns_the_text(lab):
    status, reply = lab.ask(lab.special(5), words(27))
    assert reply.opaque() == b"target"
    return status


@case
def readlink_of_a_directory(lab):
    return lab.on(lab.dir, words(27))


@case
def readlink_of_a_fifo(lab):
    return lab.on(lab.special(7), words(27))


@case
def readlink_of_the_root(lab):
    return lab.client.run(words(24), words(27))[0]


@case
def readlink_of_a_removed_link(lab):
    return lab.on(lab.removed(5), words(27))


def listing(lab, handle, cookie=0, room=4096):
    """Returns the names, the last cookie and the end-of-file flag."""
    status, reply = lab.ask(handle, readdir_op(cookie, room=room))
    assert status == OK, status
    reply.fixed(8)
    names = []
    while reply.u32():
        cookie = reply.u64()
        names.append(reply.opaque())
        reply.fixed(8)
    return names, cookie, reply.u32()


@case
def readdir_without_the_right(lab):
    return lab.client.run(fh(lab.mkdir(mode=0o711)), readdir_op(), uid=7, gid=7)[0]


@case
def readdir_of_a_symbolic_link(lab):
    return lab.on(lab.special(5), readdir_op())


@case
def readdir_of_a_fifo(lab):
    return lab.on(lab.special(7), readdir_op())


@case
def readdir_with_the_other_reserved_cookie(lab):
    return lab.on(lab.dir, readdir_op(2))


@case
def readdir_with_another_verifier(lab):
    lab.put()
    cookie = listing(lab, lab.dir)[1]
    return lab.on(lab.dir, readdir_op(cookie, verifier=b"verifier"))


@case
def readdir_without_room_for_an_entry(lab):
    lab.put(b"n" * 200)
    return lab.on(lab.dir, readdir_op(room=100))


@case
def readdir_lists_all_entries(lab):
    for name in (b"a", b"b", b"c"):
        lab.put(name)
    names, _, is_end = listing(lab, lab.dir)
    assert sorted(names) == [b"a", b"b", b"c"] and is_end
    return OK


@case
def readdir_of_an_empty_directory(lab):
    assert listing(lab, lab.mkdir())[::2] == ([], 1)
    return OK


@case
def readdir_in_pieces(lab):
    expected = [b"name %d" % n for n in range(6)]
    for name in expected:
        lab.special(2, name)
    names, cookie, is_end = [], 0, 0
    while not is_end:
        more, cookie, is_end = listing(lab, lab.dir, cookie, room=100)
        assert more or is_end
        names += more
    assert sorted(names) == expected
    return OK


@case
def readdir_of_an_unknown_attribute(lab):
    lab.put()
    return lab.on(lab.dir, readdir_op(numbers=[90]))


@case
def readdir_of_the_root(lab):
    assert sorted(listing(lab, lab.client.handle())[0]) == [b"d", b"m"]
    return OK


@case
def remove_without_the_right(lab):
    directory = lab.mkdir(mode=0o755)
    assert lab.on(directory, mkdir_op(b"inside")) == OK
    return lab.client.run(fh(directory), words(28) + opaque(b"inside"), uid=7, gid=7)[0]


@case
def remove_on_a_read_only_share(lab):
    lab.put()
    return lab.read_only().run(fh(lab.dir), words(28) + opaque(b"f"))[0]


@case
def remove_of_a_share(lab):
    return lab.client.run(words(24), words(28) + opaque(lab.share))[0]


@case
def remove_in_a_symbolic_link(lab):
    return lab.on(lab.special(5), words(28) + opaque(b"f"))


@case
def remove_of_an_empty_directory(lab):
    lab.mkdir()
    return lab.in_dir(words(28) + opaque(b"dir"))[0]


@case
def remove_of_a_symbolic_link(lab):
    lab.put(b"target")
    lab.special(5)
    status, _ = lab.in_dir(words(28) + opaque(b"s"))
    assert lab.find(b"target")
    return status


@case
def remove_of_one_of_two_names(lab):
    handle = lab.put()
    assert link(lab, handle, b"g") == OK
    status, _ = lab.in_dir(words(28) + opaque(b"f"))
    assert lab.number(handle, LINKS) == 1
    return status


@case
def remove_tells_the_change(lab):
    lab.put()
    before = lab.change()
    status, reply = lab.ask(lab.dir, words(28) + opaque(b"f"))
    reply.u32()
    assert (reply.u64(), reply.u64()) == (before, lab.change()) and before != lab.change()
    return status


@case
def rename_without_a_saved_file(lab):
    return lab.in_dir(words(29) + opaque(b"f") + opaque(b"g"))[0]


@case
def rename_from_a_file(lab):
    return rename(lab, b"x", b"g", source=lab.put())


@case
def rename_into_a_file(lab):
    return rename(lab, b"f", b"g", target=lab.put(b"h"))


@case
def rename_to_another_share(lab):
    return rename(lab, b"f", b"g", target=lab.on_other_share())


@case
def rename_on_a_read_only_share(lab):
    lab.put()
    lab.client = lab.read_only()
    return lab.in_dir(words(32), words(29) + opaque(b"f") + opaque(b"g"))[0]


@case
def rename_without_the_right(lab):
    return rename(lab, b"f", b"g", target=lab.mkdir(mode=0o755), uid=7, gid=7)


@case
def rename_of_a_file_onto_a_directory(lab):
    lab.mkdir(b"g")
    return rename(lab, b"f", b"g")


@case
def rename_of_a_file_onto_a_file(lab):
    lab.put(b"g")
    handle = lab.put()
    status = lab.in_dir(words(32), words(29) + opaque(b"f") + opaque(b"g"))[0]
    assert lab.find(b"g") == handle
    return status


@case
def rename_onto_an_empty_directory(lab):
    old, _ = lab.mkdir(b"old"), lab.mkdir(b"new")
    status = rename(lab, b"old", b"new")
    assert lab.find(b"new") == old
    return status


@case
def rename_into_itself(lab):
    return rename(lab, b"dir", b"inside", target=lab.mkdir())


@case
def rename_into_a_removed_directory(lab):
    return rename(lab, b"f", b"g", target=lab.removed(2))


@case
def rename_tells_the_changes(lab):
    lab.put()
    target = lab.mkdir()
    before = lab.change(), lab.number(target, CHANGE)
    operation = words(29) + opaque(b"f") + opaque(b"g")
    status, reply = lab.ask(lab.dir, operation, before=[words(32), fh(target)])
    reply.u32()
    source = reply.u64(), reply.u64()
    reply.u32()
    assert source == (before[0], lab.change())
    assert (reply.u64(), reply.u64()) == (before[1], lab.number(target, CHANGE))
    return status


@case
def savefh_keeps_the_file(lab):
    status, reply = lab.ask(lab.dir, words(10), before=[words(32), words(24), words(31)])
    assert reply.opaque() == lab.dir
    return status


@case
def savefh_twice(lab):
    status, reply = lab.ask(lab.dir, words(10), before=[words(32), words(24), words(32), fh(lab.dir), words(31)])
    assert reply.opaque() == lab.client.handle()
    return status


@case
def restorefh_twice(lab):
    status, reply = lab.ask(lab.dir, words(10), before=[words(32), words(31), words(24), words(31)])
    assert reply.opaque() == lab.dir
    return status


@case
def restorefh_restores_the_stateid(lab):
    lab.put()
    operations = [words(32), open_op(lab.client, by_name(b"f"), access=READ | WANT_NONE), words(31)]
    return lab.in_dir(*operations, words(4, 0) + CURRENT)[0]


@case
def secinfo_in_a_file(lab):
    return lab.on(lab.put(), words(33) + opaque(b"f"))


@case
def secinfo_without_the_right(lab):
    return lab.client.run(fh(lab.mkdir(mode=0o744)), words(33) + opaque(b"f"), uid=7, gid=7)[0]


@case
def secinfo_tells_the_flavor(lab):
    lab.put()
    status, reply = lab.ask(lab.dir, words(33) + opaque(b"f"))
    assert (reply.u32(), reply.u32()) == (1, 1)
    return status


@case
def secinfo_keeps_the_current_file(lab):
    lab.put()
    return lab.in_dir(words(33) + opaque(b"f"), words(10))[0]


@case
def secinfo_no_name_tells_the_flavor(lab):
    status, reply = lab.ask(lab.put(), words(52, 0))
    assert (reply.u32(), reply.u32()) == (1, 1)
    return status


@case
def secinfo_no_name_of_the_parent(lab):
    return lab.on(lab.dir, words(52, 1))


@case
def secinfo_no_name_of_the_parent_of_a_file(lab):
    return lab.on(lab.put(), words(52, 1))


@case
def secinfo_no_name_of_an_unknown_style(lab):
    return lab.on(lab.dir, words(52, 2))


@case
def secinfo_no_name_uses_up_the_current_file(lab):
    return lab.on(lab.dir, words(52, 0), words(10))


@case
def setattr_on_a_read_only_share(lab):
    return lab.read_only().run(fh(lab.put()), setattr_op(ANONYMOUS, words(0o600), MODE))[0]


@case
def setattr_of_the_mode_by_another_user(lab):
    return lab.client.run(fh(lab.put()), setattr_op(ANONYMOUS, words(0o600), MODE), uid=7, gid=7)[0]


@case
def setattr_of_the_owner_by_an_ordinary_user(lab):
    return lab.client.run(fh(lab.put()), setattr_op(ANONYMOUS, opaque(b"7"), 36), uid=7, gid=7)[0]


@case
def setattr_of_the_size_without_the_right(lab):
    return lab.client.run(fh(lab.private()), setattr_op(ANONYMOUS, long(0), SIZE), uid=7, gid=7)[0]


@case
def setattr_of_an_invalid_mode(lab):
    return lab.on(lab.dir, setattr_op(ANONYMOUS, words(0o10000), MODE))


@case
def setattr_of_an_unknown_owner(lab):
    return lab.on(lab.dir, setattr_op(ANONYMOUS, opaque(b"no such user@nowhere"), 36))


@case
def setattr_of_an_invalid_time(lab):
    return lab.on(lab.dir, setattr_op(ANONYMOUS, words(1) + long(0) + words(10**9), 54))


@case
def setattr_of_the_time_that_is_only_read(lab):
    return lab.on(lab.dir, setattr_op(ANONYMOUS, long(0) + words(0), 53))


@case
def setattr_of_a_value_that_is_too_long(lab):
    return lab.on(lab.dir, setattr_op(ANONYMOUS, words(0o700, 0), MODE))


@case
def setattr_of_a_value_that_is_too_short(lab):
    return lab.on(lab.dir, setattr_op(ANONYMOUS, words(0), SIZE))


@case
def setattr_of_nothing(lab):
    return lab.on(lab.dir, words(34) + ANONYMOUS + words(0, 0))


@case
def setattr_tells_what_is_set(lab):
    status, reply = lab.ask(lab.dir, setattr_op(ANONYMOUS, words(0o701), MODE))
    assert [reply.u32() for _ in range(reply.u32())] == [0, 1 << MODE - 32]
    assert lab.number(lab.dir, MODE) == 0o701
    return status


@case
def setattr_that_fails_tells_that_nothing_is_set(lab):
    status, reply = lab.client.run(fh(lab.dir), setattr_op(ANONYMOUS, words(0o10000), MODE))
    assert reply.data[-4:] == words(0)
    return status


@case
def setattr_of_a_time(lab):
    time = long(12345) + words(678000000)
    status = lab.on(lab.dir, setattr_op(ANONYMOUS, words(1) + time, 54))
    assert lab.client.attributes(lab.dir, 53)[1].fixed(12) == time
    return status


@case
def setattr_changes_the_change_attribute(lab):
    before = lab.change()
    status = lab.on(lab.dir, setattr_op(ANONYMOUS, words(0o701), MODE))
    assert lab.change() != before
    return status


@case
def rename_of_a_share(lab):
    return lab.client.run(words(24), words(32), words(29) + opaque(lab.share) + opaque(b"new"))[0]
