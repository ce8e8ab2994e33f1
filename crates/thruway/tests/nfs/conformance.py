"""Runs cases of the table of operations and errors (`conformance.toml`). Each returns the status of the operation under test.

A case without a group is here, the others are in `cases`.
"""
from cases.lab import *


@case
def access_of_a_directory(lab):
    return lab.on(lab.dir, words(3, 0x3F))


@case
def operation_without_a_current_file(lab):
    return lab.client.run(words(9) + bits(1))[0]


@case
def backchannel_ctl_changes_the_program(lab):
    lab.client = lab.connect(b"called", back=True)
    return lab.client.run(words(40, 0x40001235, 1, 0))[0]


@case
def backchannel_ctl_without_back_channel(lab):
    return lab.client.run(words(40, 0x40001235, 1, 0))[0]


@case
def close_twice(lab):
    stateid, handle = lab.make()
    assert lab.client.close(handle, stateid) == OK
    return lab.client.close(handle, stateid)


@case
def create_session_after_sequence(lab):
    sequence = lab.client.create_sequence
    limits = words(0, 4096, 4096, 1024, 8, 1, 0)
    create = words(43) + lab.client.id + words(sequence, 0) + limits + limits + words(0x40001234, 1, 0)
    return lab.client.run(create)[0]


@case
def exchange_id_after_sequence(lab):
    return lab.client.run(words(42) + b"verifier" + opaque(b"another") + words(0, 0, 0))[0]


@case
def exchange_id_with_another_operation(lab):
    return lab.client.compound(words(42) + b"verifier" + opaque(b"another") + words(0, 0, 0), words(24))[0]


@case
def exchange_id_with_a_flag_of_version_4_2(lab):
    return lab.client.compound(words(42) + b"verifier" + opaque(b"fences") + words(4, 0, 0))[0]


@case
def getattr_of_an_attribute_that_is_only_set(lab):
    return lab.client.attributes(lab.dir, WRITE_ONLY)[0]


@case
def getattr_with_unknown_attributes_of_far_words(lab):
    return lab.on(lab.dir, words(9, 40, *([0] * 39), 1))


@case
def lock_for_the_owner_of_another_client(lab):
    other = lab.connect(b"other of " + lab.client.name)
    stateid, handle = lab.make()
    return lab.client.lock(handle, stateid, id=other.id)


@case
def lock_for_writing_of_a_file_open_for_reading(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f")
    return lab.client.lock(handle, stateid, kind=2)


@case
def lock_that_is_in_the_way(lab):
    stateid, handle = lab.make()
    assert lab.client.lock(handle, stateid) == OK
    return lab.client.lock(handle, stateid, owner=b"another")


@case
def lock_of_no_length(lab):
    stateid, handle = lab.make()
    return lab.client.lock(handle, stateid, length=0)


@case
def lockt_of_a_directory(lab):
    return lab.client.test_lock(lab.dir)


@case
def lockt_of_a_symbolic_link(lab):
    return lab.client.test_lock(lab.special(5))


@case
def lockt_of_a_fifo(lab):
    return lab.client.test_lock(lab.special(7))


@case
def lookup_of_nothing(lab):
    return lab.in_dir(words(15) + opaque(b"nothing"))[0]


@case
def lookup_with_an_empty_name(lab):
    return lab.in_dir(words(15) + opaque(b""))[0]


@case
def lookup_in_a_file(lab):
    _, handle = lab.make()
    return lab.on(handle, words(15) + opaque(b"f"))


@case
def open_denied_by_the_same_owner(lab):
    lab.put()
    assert lab.client.open(lab.dir, b"f", access=WRITE, deny=READ)[0] == OK
    return lab.client.open(lab.dir, b"f", access=READ)[0]


@case
def open_confirm_twice(lab):
    lab.put()
    status, stateid, handle, _ = lab.client.open(lab.dir, b"f", owner=b"new", confirm=False)
    assert status == OK and lab.client.open_flags & 2
    status, stateid = lab.client.confirm(handle, stateid, b"new")
    assert status == OK
    return lab.client.confirm(handle, stateid, b"new")[0]


@case
def open_downgrade_to_modes_that_were_opened(lab):
    lab.put()
    lab.client.open(lab.dir, b"f", access=READ)
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f", access=BOTH)
    return lab.client.downgrade(handle, stateid, READ, 0)


@case
def open_downgrade_to_modes_that_were_not_opened(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f", access=BOTH)
    return lab.client.downgrade(handle, stateid, READ, 0)


@case
def open_exclusive_with_another_verifier(lab):
    how = lambda first: words(1, 2) + bytes([first, 1, 1, 1, 1, 1, 1, 1])
    # The verifiers differ in the highest bit only.
    assert lab.client.open(lab.dir, b"x", access=BOTH, how=how(0x01), owner=b"one")[0] == OK
    return lab.client.open(lab.dir, b"x", access=BOTH, how=how(0x81), owner=b"two")[0]


@case
def open_exclusive_again(lab):
    how = words(1, 2) + bytes([0x81, 1, 1, 1, 0xFF, 1, 1, 1])
    assert lab.client.open(lab.dir, b"x", access=BOTH, how=how)[0] == OK
    return lab.client.open(lab.dir, b"x", access=BOTH, how=how)[0]


@case
def open_guarded_of_what_is_there(lab):
    lab.make()
    return lab.client.create(lab.dir, b"f", owner=b"another")[0]


@case
def open_of_a_directory(lab):
    lab.special(2)
    return lab.client.open(lab.dir, b"s")[0]


@case
def open_without_access(lab):
    lab.put()
    return lab.client.open(lab.dir, b"f", access=0)[0]


@case
def putfh_of_garbage(lab):
    return lab.client.run(words(22) + opaque(bytes(40)))[0]


@case
def read_with_a_stateid_of_no_one(lab):
    _, handle = lab.make()
    return lab.client.read(handle, words(1) + bytes([7] * 12))[0]


@case
def read_of_a_directory(lab):
    return lab.client.read(lab.dir)[0]


@case
def readdir_of_an_attribute_that_is_only_set(lab):
    return lab.on(lab.dir, words(26) + long(0) + bytes(8) + words(4096, 4096) + bits(WRITE_ONLY))


@case
def readdir_of_an_empty_directory_with_the_least_room(lab):
    return lab.on(lab.dir, words(26) + long(0) + bytes(8) + words(16, 16) + words(0))


@case
def readdir_with_too_little_room(lab):
    return lab.on(lab.dir, words(26) + long(0) + bytes(8) + words(15, 15) + words(0))


@case
def readdir_of_a_file(lab):
    _, handle = lab.make()
    return lab.on(handle, words(26) + long(0) + bytes(8) + words(4096, 4096) + words(0))


@case
def readlink_of_a_file(lab):
    _, handle = lab.make()
    return lab.on(handle, words(27))


@case
def remove_of_a_directory_with_entries(lab):
    directory = lab.special(2)
    assert lab.on(directory, words(6, 2) + opaque(b"inside") + words(0, 0)) == OK
    return lab.in_dir(words(28) + opaque(b"s"))[0]


def rename(lab, old, new):
    return lab.in_dir(words(32), words(29) + opaque(old) + opaque(new))


@case
def rename_onto_itself(lab):
    lab.make()
    before = lab.change()
    status, _ = rename(lab, b"f", b"f")
    assert lab.change() == before, "the directory has not been changed"
    return status


@case
def rename_onto_another_name_of_the_file(lab):
    _, handle = lab.make()
    link = [words(22) + opaque(handle), words(32), words(22) + opaque(lab.dir), words(11) + opaque(b"g")]
    assert lab.client.run(*link)[0] == OK
    before = lab.change()
    status, _ = rename(lab, b"f", b"g")
    assert lab.change() == before and lab.find(b"f") == lab.find(b"g"), "nothing has been done"
    return status


@case
def reply_that_is_too_long_to_be_kept(lab):
    lab.make()
    for n in range(8):
        lab.put(b"%d" % n * 200)
    listing = words(26) + long(0) + bytes(8) + words(1 << 16, 1 << 16) + bits(1, 4, 19, 20, 33, 36, 37)
    operations = [words(15) + opaque(b"f")] + [words(22) + opaque(lab.dir), listing] * 20
    client = lab.client
    client.sequence += 1
    sequence = words(53) + client.session + words(client.sequence, 0, 0, 1)
    remove = words(28) + opaque(b"f")
    status, _ = client.compound(sequence, words(22) + opaque(lab.dir), *operations, remove)
    assert lab.find(b"f"), "the file has not been removed"
    return status


@case
def request_longer_than_agreed(lab):
    client = lab.client
    limits = lambda longest: words(0, longest, 1 << 20, 4096, 64, 1, 0)
    create = words(43) + client.id + words(client.create_sequence, 0) + limits(1024) + limits(4096) + words(0x40001234, 1, 0)
    status, reply = client.compound(create)
    assert status == OK
    reply.fixed(8)
    client.session, client.sequence = reply.fixed(16), 0
    return client.run(*[words(22) + opaque(bytes(100))] * 20)[0]


@case
def setattr_of_an_attribute_that_is_only_read(lab):
    return lab.on(lab.dir, words(34) + ANONYMOUS + bits(3) + opaque(long(0)))


@case
def verify_of_an_attribute_that_is_only_set(lab):
    return lab.on(lab.dir, words(37) + bits(WRITE_ONLY) + opaque(words(0)))


@case
def verify_of_an_attribute_that_is_not_there(lab):
    return lab.on(lab.dir, words(37) + bits(40) + opaque(words(0)))


@case
def nverify_of_what_is_so(lab):
    return lab.on(lab.dir, words(17) + bits(1) + opaque(words(2)))


@case
def write_under_an_open_for_reading(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f")
    return lab.client.write(handle, stateid, b"data")


@case
def write_without_a_stateid_to_a_file_that_denies_it(lab):
    handle = lab.put()
    other = lab.connect(b"denies " + lab.client.name)
    assert other.open(lab.dir, b"f", access=READ, deny=WRITE)[0] == OK
    return lab.client.write(handle, ANONYMOUS, b"data")


@case
def access_of_unknown_rights(lab):
    return lab.on(lab.dir, words(3, 0xFFFFFFFF))


@case
def commit_of_a_directory(lab):
    return lab.on(lab.dir, words(5) + long(0) + words(0))


@case
def commit_of_a_symbolic_link(lab):
    return lab.on(lab.special(5), words(5) + long(0) + words(0))


@case
def create_of_what_is_there(lab):
    lab.special(2)
    return lab.in_dir(words(6, 2) + opaque(b"s") + words(0, 0))[0]


@case
def create_of_a_regular_file(lab):
    return lab.in_dir(words(6, 1) + opaque(b"s") + words(0, 0))[0]


@case
def create_in_a_file(lab):
    _, handle = lab.make()
    return lab.on(handle, words(6, 2) + opaque(b"s") + words(0, 0))


@case
def create_with_a_long_name(lab):
    return lab.in_dir(words(6, 2) + opaque(b"n" * 256) + words(0, 0))[0]


@case
def delegreturn_of_an_open(lab):
    stateid, handle = lab.make()
    return lab.client.give_back(handle, stateid)


@case
def getfh_without_a_current_file(lab):
    return lab.client.run(words(10))[0]


def link(lab, handle, name):
    return lab.client.run(words(22) + opaque(handle), words(32), words(22) + opaque(lab.dir), words(11) + opaque(name))[0]


@case
def link_of_a_directory(lab):
    return link(lab, lab.special(2), b"l")


@case
def link_to_a_name_that_is_there(lab):
    _, handle = lab.make()
    return link(lab, handle, b"f")


@case
def link_without_a_saved_file(lab):
    return lab.in_dir(words(11) + opaque(b"l"))[0]


@case
def locku_of_what_is_not_locked(lab):
    stateid, handle = lab.make()
    number = lab.client.open_number(b"owner")
    lock = words(12, 2, 0) + long(0) + long(10) + words(1, number) + stateid + words(1) + lab.client.id + opaque(b"locks")
    status, reply = lab.client.run(words(22) + opaque(handle), lock)
    assert status == OK, status
    reply.fixed(8 + 8)
    unlock = words(14, 2, 2) + reply.fixed(16) + long(100) + long(10)
    return lab.on(handle, unlock)


@case
def locku_under_an_open(lab):
    stateid, handle = lab.make()
    return lab.on(handle, words(14, 2, 1) + stateid + long(0) + long(10))


@case
def lookupp_of_a_file(lab):
    _, handle = lab.make()
    return lab.on(handle, words(16))


@case
def lookupp_of_the_root(lab):
    return lab.client.run(words(24), words(16))[0]


@case
def lookup_of_dot(lab):
    return lab.in_dir(words(15) + opaque(b"."))[0]


@case
def lookup_in_a_symbolic_link(lab):
    return lab.on(lab.special(5), words(15) + opaque(b"f"))


@case
def lookup_of_a_long_name(lab):
    return lab.in_dir(words(15) + opaque(b"n" * 256))[0]


@case
def nverify_of_what_is_not_so(lab):
    return lab.on(lab.dir, words(17) + bits(1) + opaque(words(1)))


@case
def open_of_a_symbolic_link(lab):
    lab.special(5)
    return lab.client.open(lab.dir, b"s")[0]


@case
def open_of_a_fifo(lab):
    lab.special(7)
    return lab.client.open(lab.dir, b"s")[0]


@case
def open_of_nothing(lab):
    return lab.client.open(lab.dir, b"nothing")[0]


@case
def open_in_a_file(lab):
    return lab.client.open(lab.put(), b"f")[0]


@case
def open_reclaimed_when_nothing_was_open(lab):
    handle = lab.put()
    return lab.client.open(handle, b"", claim=words(1, 0))[0]


@case
def putpubfh_is_the_root(lab):
    return lab.client.run(words(23), words(10))[0]


@case
def read_at_the_end(lab):
    stateid, handle = lab.make()
    return lab.client.read(handle, stateid, at=2**40)[0]


@case
def read_of_a_symbolic_link(lab):
    return lab.client.read(lab.special(5))[0]


@case
def read_with_an_old_stateid(lab):
    lab.put()
    _, old, handle, _ = lab.client.open(lab.dir, b"f")
    assert lab.client.open(lab.dir, b"f", access=BOTH)[0] == OK
    return lab.client.read(handle, old)[0]


@case
def readdir_with_a_reserved_cookie(lab):
    return lab.on(lab.dir, words(26) + long(1) + bytes(8) + words(4096, 4096) + words(0))


@case
def remove_of_nothing(lab):
    return lab.in_dir(words(28) + opaque(b"nothing"))[0]


@case
def remove_of_dot_dot(lab):
    return lab.in_dir(words(28) + opaque(b".."))[0]


@case
def remove_in_a_file(lab):
    return lab.on(lab.put(), words(28) + opaque(b"f"))


@case
def rename_of_nothing(lab):
    return rename(lab, b"nothing", b"f")[0]


@case
def rename_of_a_directory_onto_a_file(lab):
    lab.special(2)
    lab.put()
    return rename(lab, b"s", b"f")[0]


@case
def rename_onto_a_directory_with_entries(lab):
    directory = lab.special(2, b"full")
    assert lab.on(directory, words(6, 2) + opaque(b"inside") + words(0, 0)) == OK
    lab.special(2)
    return rename(lab, b"s", b"full")[0]


@case
def restorefh_without_a_saved_file(lab):
    return lab.client.run(words(31))[0]


@case
def savefh_without_a_current_file(lab):
    return lab.client.run(words(32))[0]


@case
def secinfo_of_nothing(lab):
    return lab.in_dir(words(33) + opaque(b"nothing"))[0]


@case
def secinfo_uses_up_the_current_file(lab):
    lab.put()
    return lab.in_dir(words(33) + opaque(b"f"), words(10))[0]


@case
def setattr_of_the_size_of_a_directory(lab):
    return lab.on(lab.dir, words(34) + ANONYMOUS + bits(4) + opaque(long(0)))


@case
def setattr_of_an_unknown_attribute(lab):
    return lab.on(lab.dir, words(34) + ANONYMOUS + bits(90) + opaque(long(0)))


@case
def setattr_of_a_size_under_an_open_for_reading(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f")
    return lab.on(handle, words(34) + stateid + bits(4) + opaque(long(0)))


@case
def renew_of_an_unknown_client(lab):
    return lab.client.run(words(30) + bytes([7] * 8))[0]


@case
def setclientid_confirm_of_an_unknown_client(lab):
    return lab.client.run(words(36) + bytes([7] * 8) + bytes(8))[0]


@case
def setclientid_of_another_user(lab):
    lab.make()
    callback = words(0) + opaque(b"tcp") + opaque(b"0.0.0.0.0.0") + words(0)
    return lab.client.run(words(35) + b"verifier" + opaque(lab.client.name) + callback, uid=7)[0]


@case
def release_lockowner_that_has_locks(lab):
    stateid, handle = lab.make()
    assert lab.client.lock(handle, stateid, owner=b"locks") == OK
    return lab.client.run(words(39) + lab.client.id + opaque(b"locks"))[0]


@case
def release_lockowner_without_locks(lab):
    return lab.client.run(words(39) + lab.client.id + opaque(b"nobody"))[0]


@case
def bind_conn_to_session_of_an_unknown_session(lab):
    return lab.client.compound(words(41) + bytes(16) + words(1, 0))[0]


@case
def bind_conn_to_session_behind_sequence(lab):
    return lab.client.run(words(41) + lab.client.session + words(1, 0))[0]


@case
def exchange_id_of_another_user(lab):
    lab.make()
    return lab.client.compound(words(42) + b"verifier" + opaque(lab.client.name) + words(0, 0, 0), uid=7)[0]


@case
def exchange_id_with_an_unknown_flag(lab):
    return lab.client.compound(words(42) + b"verifier" + opaque(b"flags") + words(8, 0, 0))[0]


@case
def create_session_out_of_order(lab):
    limits = words(0, 4096, 4096, 1024, 8, 1, 0)
    create = words(43) + lab.client.id + words(77, 0) + limits + limits + words(0x40001234, 1, 0)
    return lab.client.compound(create)[0]


@case
def create_session_of_an_unknown_client(lab):
    limits = words(0, 4096, 4096, 1024, 8, 1, 0)
    create = words(43) + bytes([7] * 8) + words(1, 0) + limits + limits + words(0x40001234, 1, 0)
    return lab.client.compound(create)[0]


@case
def create_session_with_tiny_replies(lab):
    limits = words(0, 4096, 16, 1024, 8, 1, 0)
    create = words(43) + lab.client.id + words(lab.client.create_sequence, 0) + limits + limits
    return lab.client.compound(create + words(0x40001234, 1, 0))[0]


@case
def destroy_session_of_an_unknown_session(lab):
    return lab.client.compound(words(44) + bytes(16))[0]


@case
def destroy_session_before_the_last_operation(lab):
    return lab.client.run(words(44) + lab.client.session, words(24))[0]


@case
def free_stateid_of_an_open(lab):
    stateid, _ = lab.make()
    return lab.client.run(words(45) + stateid)[0]


@case
def free_stateid_of_no_one(lab):
    return lab.client.run(words(45) + words(1) + bytes([7] * 12))[0]


@case
def test_stateid_of_no_one(lab):
    status, reply = lab.client.run(words(55, 1) + words(1) + bytes([7] * 12))
    assert status == OK
    reply.fixed(8)
    assert reply.u32() == 1
    return reply.u32()


@case
def secinfo_no_name_of_the_parent_of_the_root(lab):
    return lab.client.run(words(24), words(52, 1))[0]


@case
def sequence_in_an_unknown_slot(lab):
    return lab.client.compound(words(53) + lab.client.session + words(1, 999, 999, 0))[0]


@case
def sequence_out_of_order(lab):
    return lab.client.compound(words(53) + lab.client.session + words(77, 0, 0, 0))[0]


@case
def sequence_twice(lab):
    return lab.client.run(words(53) + lab.client.session + words(1, 0, 0, 0))[0]


@case
def sequence_of_an_unknown_session(lab):
    return lab.client.compound(words(53) + bytes(16) + words(1, 0, 0, 0))[0]


@case
def repeated_call_with_other_arguments(lab):
    client = lab.client
    client.sequence += 1
    sequence = words(53) + client.session + words(client.sequence, 0, 0, 1)
    assert client.compound(sequence, words(24))[0] == OK
    return client.compound(sequence, words(24), words(10))[0]


@case
def repeated_call_that_was_not_to_be_kept(lab):
    assert lab.client.run(words(24), words(10))[0] == OK
    lab.client.sequence -= 1
    return lab.client.run(words(24), words(10))[0]


@case
def destroy_clientid_with_a_session(lab):
    return lab.client.compound(words(57) + lab.client.id)[0]


@case
def destroy_clientid_of_an_unknown_client(lab):
    return lab.client.compound(words(57) + bytes([7] * 8))[0]


@case
def reclaim_complete_twice(lab):
    return lab.client.run(words(58, 0))[0]


@case
def operation_without_sequence(lab):
    return lab.client.compound(words(24))[0]


@case
def allocate_beyond_the_largest_file(lab):
    stateid, handle = lab.make()
    return lab.on(handle, words(59) + stateid + long(2**63 - 1) + long(4096))


@case
def allocate_under_an_open_for_reading(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f")
    return lab.on(handle, words(59) + stateid + long(0) + long(4096))


def copy(lab, source, target, operation, arguments):
    (from_stateid, from_handle), (to_stateid, to_handle) = source, target
    head = [words(22) + opaque(from_handle), words(32), words(22) + opaque(to_handle)]
    return lab.client.run(*head, words(operation) + from_stateid + to_stateid + arguments)[0]


@case
def copy_onto_an_overlapping_range(lab):
    stateid, handle = lab.make()
    assert lab.client.write(handle, stateid, b"x" * 8192) == OK
    arguments = long(0) + long(4096) + long(8192) + words(1, 1, 0)
    return copy(lab, (stateid, handle), (stateid, handle), 60, arguments)


@case
def copy_from_beyond_the_end(lab):
    source, target = lab.make(b"f"), lab.make(b"g", owner=b"another")
    return copy(lab, source, target, 60, long(4096) + long(0) + long(10) + words(1, 1, 0))


@case
def deallocate_under_an_open_for_reading(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f")
    return lab.on(handle, words(62) + stateid + long(0) + long(4096))


@case
def io_advise_of_an_open(lab):
    stateid, handle = lab.make()
    return lab.on(handle, words(63) + stateid + long(0) + long(0) + words(1, 1))


@case
def offload_cancel_of_no_copy(lab):
    _, handle = lab.make()
    return lab.on(handle, words(66) + words(1) + bytes([7] * 12))


@case
def offload_status_of_no_copy(lab):
    _, handle = lab.make()
    return lab.on(handle, words(67) + words(1) + bytes([7] * 12))


@case
def seek_beyond_the_end(lab):
    stateid, handle = lab.make()
    return lab.on(handle, words(69) + stateid + long(100) + words(0))


@case
def seek_of_something_unknown(lab):
    stateid, handle = lab.make()
    return lab.on(handle, words(69) + stateid + long(0) + words(7))


@case
def getxattr_that_is_not_there(lab):
    _, handle = lab.make()
    return lab.on(handle, words(72) + opaque(b"nothing"))


@case
def setxattr_that_must_not_be_there_and_is(lab):
    _, handle = lab.make()
    assert lab.on(handle, words(73, 1) + opaque(b"name") + opaque(b"value")) == OK
    return lab.on(handle, words(73, 1) + opaque(b"name") + opaque(b"value"))


@case
def setxattr_that_must_be_there_and_is_not(lab):
    _, handle = lab.make()
    return lab.on(handle, words(73, 2) + opaque(b"name") + opaque(b"value"))


@case
def removexattr_that_is_not_there(lab):
    _, handle = lab.make()
    return lab.on(handle, words(75) + opaque(b"nothing"))


@case
def listxattrs_with_too_little_room(lab):
    _, handle = lab.make()
    assert lab.on(handle, words(73, 0) + opaque(b"n" * 100) + opaque(b"value")) == OK
    return lab.on(handle, words(74) + long(0) + words(20))


@case
def write_beyond_the_largest_file(lab):
    stateid, handle = lab.make()
    return lab.client.write(handle, stateid, b"data", at=2**63 - 2)


@case
def write_of_a_directory(lab):
    return lab.client.write(lab.dir, ANONYMOUS, b"data")


@case
def write_of_a_symbolic_link(lab):
    return lab.client.write(lab.special(5), ANONYMOUS, b"data")


if __name__ == "__main__":
    import cases.data
    import cases.names
    import cases.opens
    import cases.sessions

    run(sys.argv[4:])
