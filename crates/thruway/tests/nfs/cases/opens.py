"""Cases of opens, locks and delegations."""
from cases.lab import *

UNCHECKED, GUARDED, EXCLUSIVE, EXCLUSIVE41 = range(4)


def creating(kind, values=b"", numbers=(), verifier=b"verifier"):
    first = verifier if kind in (EXCLUSIVE, EXCLUSIVE41) else b""
    return words(1, kind) + first + (b"" if kind == EXCLUSIVE else attributes(values, *numbers))


@case
def close_without_a_current_file(lab):
    stateid, _ = lab.make()
    return lab.client.run(words(4, lab.client.open_number(b"owner")) + stateid)[0]


@case
def close_of_another_file(lab):
    stateid, _ = lab.make()
    return lab.client.close(lab.put(b"g"), stateid)


@case
def close_with_the_anonymous_stateid(lab):
    return lab.client.close(lab.make()[1], ANONYMOUS)


@case
def close_with_an_old_stateid(lab):
    stateid, handle = lab.make()
    assert lab.client.open(lab.dir, b"f", access=BOTH)[0] == OK
    return lab.client.close(handle, stateid)


@case
def close_with_a_later_stateid(lab):
    stateid, handle = lab.make()
    return lab.client.close(handle, with_seqid(stateid, 77))


@case
def close_of_another_client(lab):
    stateid, handle = lab.make()
    return lab.other().close(handle, stateid)


@case
def close_with_the_stateid_of_a_lock(lab):
    _, lock, handle = lab.locked()
    return lab.client.close(handle, lock)


@case
def close_out_of_order(lab):
    stateid, handle = lab.make()
    lab.client.open_number(b"owner")
    return lab.client.close(handle, stateid)


@case
def close_repeated(lab):
    stateid, handle = lab.make()
    assert lab.client.close(handle, stateid) == OK
    lab.client.numbers[b"owner"] -= 1
    return lab.client.close(handle, stateid)


@case
def close_returns_the_invalid_stateid(lab):
    stateid, handle = lab.make()
    status, reply = lab.ask(handle, words(4, 0) + stateid)
    assert reply.fixed(16) == INVALID
    return status


@case
def close_with_the_current_stateid(lab):
    lab.put()
    return lab.in_dir(open_op(lab.client, by_name(b"f"), access=READ | WANT_NONE), words(4, 0) + CURRENT)[0]


@case
def close_ends_the_share_reservation(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f", access=READ, deny=BOTH)
    other = lab.other()
    assert other.open(lab.dir, b"f")[0] == SHARE_DENIED
    assert lab.client.close(handle, stateid) == OK
    return other.open(lab.dir, b"f", owner=b"again")[0]


@case
def delegreturn_without_a_current_file(lab):
    stateid, _ = lab.make()
    return lab.client.run(words(8) + stateid)[0]


@case
def delegreturn_of_the_anonymous_stateid(lab):
    return lab.client.give_back(lab.put(), ANONYMOUS)


def delegated(lab):
    """Opens a file that is delegated. Returns the stateids of the open and the delegation, and the handle."""
    lab.put()
    status, stateid, handle, delegation = lab.back().open(lab.dir, b"f", want=WANT_READ)
    assert status == OK and delegation, "the file is delegated"
    return stateid, delegation, handle


@case
def delegreturn_of_a_delegation(lab):
    _, delegation, handle = delegated(lab)
    return lab.client.give_back(handle, delegation)


@case
def delegreturn_twice(lab):
    _, delegation, handle = delegated(lab)
    assert lab.client.give_back(handle, delegation) == OK
    return lab.client.give_back(handle, delegation)


@case
def delegreturn_of_another_file(lab):
    _, delegation, _ = delegated(lab)
    return lab.client.give_back(lab.put(b"g"), delegation)


@case
def read_with_the_stateid_of_a_delegation(lab):
    _, delegation, handle = delegated(lab)
    return lab.client.read(handle, delegation)[0]


@case
def write_with_the_stateid_of_a_delegation(lab):
    _, delegation, handle = delegated(lab)
    return lab.client.write(handle, delegation, b"data")


@case
def free_stateid_of_a_delegation(lab):
    _, delegation, _ = delegated(lab)
    return lab.client.run(words(45) + delegation)[0]


@case
def open_of_a_delegated_file(lab):
    _, delegation, _ = delegated(lab)
    return lab.client.open(lab.dir, b"", claim=words(2) + delegation + opaque(b"f"))[0]


@case
def open_with_the_delegation_of_no_one(lab):
    stateid, _ = lab.make()
    return lab.client.open(lab.dir, b"", claim=words(2) + stateid + opaque(b"f"))[0]


@case
def open_with_a_delegation_of_an_earlier_client(lab):
    lab.put()
    return lab.client.open(lab.dir, b"", claim=words(3) + opaque(b"f"))[0]


@case
def lock_without_a_current_file(lab):
    stateid, _ = lab.make()
    lock = words(12, 2, 0) + long(0) + long(10) + words(1, lab.client.open_number(b"owner")) + stateid + words(0)
    return lab.client.run(lock + lab.client.id + opaque(b"locks"))[0]


@case
def lock_of_a_range_that_overflows(lab):
    stateid, handle = lab.make()
    return lab.lock(handle, stateid, at=LAST - 5, length=7)[0]


@case
def lock_to_the_end(lab):
    stateid, handle = lab.make()
    return lab.lock(handle, stateid, at=2**63, length=LAST)[0]


@case
def lock_of_the_last_byte(lab):
    stateid, handle = lab.make()
    return lab.lock(handle, stateid, at=LAST, length=1)[0]


@case
def lock_of_the_last_byte_that_is_locked(lab):
    stateid, _, handle = lab.locked(at=LAST - 1, length=LAST)
    assert lab.lock(handle, stateid, at=LAST - 2, length=1, owner=b"another")[0] == OK
    return lab.lock(handle, stateid, at=LAST, length=1, owner=b"third")[0]


@case
def lock_beyond_the_last_byte(lab):
    stateid, handle = lab.make()
    return lab.lock(handle, stateid, at=LAST, length=2)[0]


@case
def lock_of_an_unknown_type(lab):
    stateid, handle = lab.make()
    return lab.lock(handle, stateid, kind=5)[0]


@case
def lock_with_the_anonymous_stateid(lab):
    return lab.lock(lab.make()[1], ANONYMOUS)[0]


@case
def lock_with_a_closed_stateid(lab):
    stateid, handle = lab.closed()
    return lab.lock(handle, stateid)[0]


@case
def lock_with_the_stateid_of_another_file(lab):
    stateid, _ = lab.make()
    return lab.lock(lab.put(b"g"), stateid)[0]


@case
def lock_with_an_old_stateid(lab):
    stateid, handle = lab.make()
    assert lab.client.open(lab.dir, b"f", access=BOTH)[0] == OK
    return lab.lock(handle, stateid)[0]


@case
def lock_with_a_lock_for_the_open(lab):
    _, lock, handle = lab.locked()
    return lab.lock(handle, lock, owner=b"another")[0]


@case
def lock_for_reading_of_a_file_open_for_writing(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f", access=WRITE)
    return lab.lock(handle, stateid, kind=1)[0]


@case
def lock_reclaimed_when_nothing_was_locked(lab):
    stateid, handle = lab.make()
    return lab.client.lock(handle, stateid, reclaim=1)


@case
def lock_for_reading_by_two_owners(lab):
    stateid, _, handle = lab.locked(kind=1)
    return lab.lock(handle, stateid, kind=1, owner=b"another")[0]


@case
def lock_for_writing_of_what_is_read(lab):
    stateid, _, handle = lab.locked(kind=1)
    return lab.lock(handle, stateid, kind=2, owner=b"another")[0]


@case
def lock_of_the_next_range(lab):
    stateid, _, handle = lab.locked(at=0, length=10)
    return lab.lock(handle, stateid, at=10, length=10, owner=b"another")[0]


@case
def lockt_tells_the_lock(lab):
    stateid, _, handle = lab.locked(at=5, length=10)
    status, reply = lab.client.run(fh(handle), lockt_op(lab.client))
    reply.fixed(16)
    assert (reply.u64(), reply.u64(), reply.u32()) == (5, 10, 2)
    assert reply.fixed(8) == lab.client.id and reply.opaque() == b"locks"
    return status


@case
def lockt_of_a_file_delegated_to_another(lab):
    _, _, handle = delegated(lab)
    other = lab.other()
    return other.run(fh(handle), lockt_op(other))[0]


@case
def lock_returns_a_first_stateid(lab):
    assert lab.locked()[1][:4] == words(1)
    return OK


@case
def lock_again(lab):
    _, lock, handle = lab.locked()
    status, reply = lab.more_locks(handle, lock, at=100)
    assert reply.fixed(16) == with_seqid(lock, 2)
    return status


@case
def lock_upgraded(lab):
    _, lock, handle = lab.locked(kind=1)
    return lab.more_locks(handle, lock, kind=2)[0]


@case
def lock_again_with_an_old_stateid(lab):
    _, lock, handle = lab.locked()
    assert lab.more_locks(handle, lock, at=100)[0] == OK
    return lab.more_locks(handle, lock, number=2, at=200)[0]


@case
def lock_out_of_order(lab):
    _, lock, handle = lab.locked()
    return lab.more_locks(handle, lock, number=7, at=100)[0]


@case
def lockt_without_a_current_file(lab):
    return lab.client.run(lockt_op(lab.client))[0]


@case
def lockt_of_a_removed_file(lab):
    return lab.on(lab.removed(), lockt_op(lab.client))


@case
def lockt_of_no_length(lab):
    return lab.on(lab.put(), lockt_op(lab.client, length=0))


@case
def lockt_of_a_range_that_overflows(lab):
    return lab.on(lab.put(), lockt_op(lab.client, at=LAST - 5, length=7))


@case
def lockt_of_an_unknown_type(lab):
    return lab.on(lab.put(), lockt_op(lab.client, kind=9))


@case
def lockt_of_what_is_not_locked(lab):
    return lab.on(lab.put(), lockt_op(lab.client))


@case
def lockt_of_an_own_lock(lab):
    _, _, handle = lab.locked()
    return lab.on(handle, lockt_op(lab.client, owner=b"locks"))


@case
def lockt_of_a_lock_of_another_client(lab):
    _, _, handle = lab.locked()
    return lab.other().test_lock(handle)


@case
def lockt_for_reading_of_what_is_read(lab):
    _, _, handle = lab.locked(kind=1)
    return lab.on(handle, lockt_op(lab.client, kind=1))


@case
def lockt_of_an_unknown_client(lab):
    operation = words(13, 2) + long(0) + long(1) + bytes([7] * 8) + opaque(b"tests")
    return lab.on(lab.put(), operation)


@case
def locku_without_a_current_file(lab):
    _, lock, _ = lab.locked()
    return lab.client.run(words(14, 2, 1 if lab.minor == 0 else 0) + lock + long(0) + long(10))[0]


@case
def locku_of_no_length(lab):
    _, lock, handle = lab.locked()
    return lab.unlock(handle, lock, length=0)[0]


@case
def locku_of_a_range_that_overflows(lab):
    _, lock, handle = lab.locked()
    return lab.unlock(handle, lock, at=LAST - 5, length=7)[0]


@case
def locku_with_the_anonymous_stateid(lab):
    return lab.unlock(lab.put(), ANONYMOUS)[0]


@case
def locku_with_the_stateid_of_another_file(lab):
    _, lock, _ = lab.locked()
    return lab.unlock(lab.put(b"g"), lock)[0]


@case
def locku_with_an_old_stateid(lab):
    _, lock, handle = lab.locked()
    assert lab.more_locks(handle, lock, at=100)[0] == OK
    return lab.unlock(handle, lock, number=2)[0]


@case
def locku_of_another_client(lab):
    _, lock, handle = lab.locked()
    lab.client = lab.other()
    return lab.unlock(handle, lock)[0]


@case
def locku_after_close(lab):
    stateid, lock, handle = lab.locked()
    assert lab.client.close(handle, stateid) == OK
    return lab.unlock(handle, lock)[0]


@case
def locku_returns_the_next_stateid(lab):
    _, lock, handle = lab.locked()
    status, reply = lab.unlock(handle, lock)
    assert reply.fixed(16) == with_seqid(lock, 2)
    return status


@case
def locku_of_the_middle(lab):
    _, lock, handle = lab.locked(at=0, length=30)
    status, _ = lab.unlock(handle, lock, at=10, length=10)
    found = [lab.on(handle, lockt_op(lab.client, at=at, length=10)) for at in (0, 10, 20)]
    assert found == [10010, OK, 10010], found
    return status


@case
def open_without_a_current_file(lab):
    return lab.client.run(open_op(lab.client, by_name(b"f")))[0]


@case
def open_with_unknown_access(lab):
    lab.put()
    return lab.client.open(lab.dir, b"f", access=7)[0]


@case
def open_with_unknown_deny(lab):
    lab.put()
    return lab.client.open(lab.dir, b"f", deny=4)[0]


@case
def open_with_a_wish_of_later_versions(lab):
    lab.put()
    return lab.client.open(lab.dir, b"f", access=READ | WANT_NONE)[0]


@case
def open_with_an_unknown_claim(lab):
    lab.put()
    return lab.client.open(lab.dir, b"f", claim=words(9))[0]


@case
def open_of_an_unknown_type(lab):
    return lab.client.open(lab.dir, b"f", how=words(2))[0]


@case
def open_with_an_unknown_creation(lab):
    return lab.client.open(lab.dir, b"f", how=words(1, 4))[0]


@case
def open_exclusive_of_later_versions(lab):
    return lab.client.open(lab.dir, b"f", access=BOTH, how=creating(EXCLUSIVE41))[0]


@case
def open_exclusive_sets_the_mode(lab):
    how = creating(EXCLUSIVE41, words(0o640), [MODE])
    status, _, handle, _ = lab.client.open(lab.dir, b"f", access=BOTH, how=how)
    assert lab.number(handle, MODE) == 0o640
    return status


@case
def open_exclusive_with_a_time(lab):
    how = creating(EXCLUSIVE41, words(0), [54])
    return lab.client.open(lab.dir, b"f", access=BOTH, how=how)[0]


@case
def open_of_the_current_file(lab):
    return lab.client.open(lab.put(), b"", claim=words(4))[0]


@case
def open_of_the_current_directory(lab):
    return lab.client.open(lab.dir, b"", claim=words(4))[0]


@case
def open_of_the_current_symbolic_link(lab):
    return lab.client.open(lab.special(5), b"", claim=words(4))[0]


@case
def open_of_the_current_fifo(lab):
    return lab.client.open(lab.special(7), b"", claim=words(4))[0]


@case
def open_of_a_removed_file(lab):
    return lab.client.open(lab.removed(), b"", claim=words(4))[0]


@case
def open_with_creation_of_the_current_file(lab):
    return lab.client.open(lab.put(), b"", claim=words(4), how=creating(UNCHECKED))[0]


@case
def open_of_a_socket(lab):
    lab.special(6)
    return lab.client.open(lab.dir, b"s")[0]


@case
def open_in_a_fifo(lab):
    return lab.client.open(lab.special(7), b"f")[0]


@case
def open_in_a_removed_directory(lab):
    return lab.client.open(lab.removed(2), b"f", access=BOTH, how=creating(GUARDED))[0]


@case
def open_of_a_share(lab):
    return lab.client.open(lab.client.handle(), lab.share)[0]


@case
def open_with_creation_in_the_root(lab):
    return lab.client.create(lab.client.handle(), b"f")[0]


@case
def open_without_the_right(lab):
    lab.private()
    return lab.client.open(lab.dir, b"private", uid=7, gid=7)[0]


@case
def open_for_writing_without_the_right(lab):
    lab.private(0o644)
    return lab.client.open(lab.dir, b"private", access=WRITE, uid=7, gid=7)[0]


@case
def open_with_creation_without_the_right(lab):
    return lab.client.create(lab.mkdir(mode=0o755), b"f", uid=7, gid=7)[0]


@case
def open_for_writing_on_a_read_only_share(lab):
    lab.put()
    return lab.read_only().open(lab.dir, b"f", access=WRITE)[0]


@case
def open_with_creation_on_a_read_only_share(lab):
    return lab.read_only().create(lab.dir, b"f")[0]


@case
def open_for_reading_on_a_read_only_share(lab):
    lab.put()
    return lab.read_only().open(lab.dir, b"f")[0]


@case
def open_with_a_read_only_attribute(lab):
    return lab.client.open(lab.dir, b"f", access=BOTH, how=creating(GUARDED, long(0), [CHANGE]))[0]


@case
def open_with_an_unknown_attribute(lab):
    return lab.client.open(lab.dir, b"f", access=BOTH, how=creating(GUARDED, long(0), [90]))[0]


@case
def open_exclusive_of_what_is_there(lab):
    lab.put()
    return lab.client.open(lab.dir, b"f", access=BOTH, how=creating(EXCLUSIVE), owner=b"two")[0]


@case
def open_unchecked_of_what_is_there(lab):
    handle = lab.private(0o600)
    how = creating(UNCHECKED, words(0o777), [MODE])
    status, _, found, _ = lab.client.open(lab.dir, b"private", access=BOTH, how=how)
    assert found == handle and lab.number(handle, MODE) == 0o600
    return status


@case
def open_unchecked_truncates(lab):
    _, handle = lab.filled()
    status = lab.client.open(lab.dir, b"f", access=BOTH, how=creating(UNCHECKED, long(0), [SIZE]), owner=b"two")[0]
    assert lab.size(handle) == 0
    return status


@case
def open_unchecked_with_a_size(lab):
    _, handle = lab.filled()
    status = lab.client.open(lab.dir, b"f", access=BOTH, how=creating(UNCHECKED, long(5), [SIZE]), owner=b"two")[0]
    assert lab.size(handle) == 10
    return status


@case
def open_with_a_size(lab):
    status, _, handle, _ = lab.client.open(lab.dir, b"f", access=BOTH, how=creating(GUARDED, long(5), [SIZE]))
    assert lab.size(handle) == 5
    return status


@case
def open_denied_by_another_client(lab):
    lab.put()
    assert lab.other().open(lab.dir, b"f", access=READ, deny=WRITE)[0] == OK
    return lab.client.open(lab.dir, b"f", access=WRITE)[0]


@case
def open_that_denies_what_another_client_has(lab):
    lab.put()
    assert lab.other().open(lab.dir, b"f", access=WRITE)[0] == OK
    return lab.client.open(lab.dir, b"f", access=READ, deny=WRITE)[0]


@case
def open_of_what_is_not_denied(lab):
    lab.put()
    assert lab.other().open(lab.dir, b"f", access=READ, deny=WRITE)[0] == OK
    return lab.client.open(lab.dir, b"f", access=READ)[0]


@case
def open_again(lab):
    stateid, _ = lab.make()
    status, again, _, _ = lab.client.open(lab.dir, b"f", access=READ)
    assert again[4:] == stateid[4:] and again[:4] == words(int.from_bytes(stateid[:4], "big") + 1)
    return status


@case
def open_of_two_owners(lab):
    stateid, _ = lab.make()
    status, other, _, _ = lab.client.open(lab.dir, b"f", owner=b"two")
    assert other[4:] != stateid[4:]
    return status


def change_info(lab, operation):
    """Runs OPEN. Returns the change attribute of the directory before and after, as reported."""
    status, reply = lab.ask(lab.dir, operation)
    assert status == OK, status
    reply.fixed(16 + 4)
    return reply.u64(), reply.u64()


@case
def open_with_creation_tells_the_change(lab):
    before = lab.change()
    found = change_info(lab, open_op(lab.client, by_name(b"f"), BOTH, how=creating(GUARDED)))
    assert found == (before, lab.change()) and before != lab.change()
    return OK


@case
def open_tells_no_change(lab):
    lab.put()
    before = lab.change()
    assert change_info(lab, open_op(lab.client, by_name(b"f"))) == (before, before)
    return OK


@case
def open_of_an_unknown_client(lab):
    lab.put()
    return lab.in_dir(open_op(lab.client, by_name(b"f"), id=bytes([7] * 8)))[0]


@case
def open_out_of_order(lab):
    lab.make()
    lab.client.open_number(b"owner")
    return lab.client.open(lab.dir, b"f")[0]


@case
def open_repeated(lab):
    lab.make()
    status, stateid, _, _ = lab.client.open(lab.dir, b"f")
    lab.client.numbers[b"owner"] -= 1
    assert lab.client.open(lab.dir, b"f")[1] == stateid
    return status


@case
def open_confirm_without_a_current_file(lab):
    lab.put()
    stateid = lab.client.open(lab.dir, b"f", owner=b"new", confirm=False)[1]
    return lab.client.run(words(20) + stateid + words(lab.client.open_number(b"new")))[0]


@case
def open_confirm_out_of_order(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f", owner=b"new", confirm=False)
    lab.client.open_number(b"new")
    return lab.client.confirm(handle, stateid, b"new")[0]


@case
def open_confirm_of_another_file(lab):
    other = lab.put(b"g")
    lab.put()
    stateid = lab.client.open(lab.dir, b"f", owner=b"new", confirm=False)[1]
    return lab.client.confirm(other, stateid, b"new")[0]


@case
def open_confirm_returns_the_next_stateid(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f", owner=b"new", confirm=False)
    status, confirmed = lab.client.confirm(handle, stateid, b"new")
    assert confirmed == with_seqid(stateid, 2)
    return status


@case
def read_before_open_confirm(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f", owner=b"new", confirm=False)
    return lab.client.read(handle, stateid)[0]


@case
def open_downgrade_without_a_current_file(lab):
    stateid, _ = lab.make()
    return lab.client.run(words(21) + stateid + words(lab.client.open_number(b"owner"), BOTH, 0))[0]


@case
def open_downgrade_with_the_anonymous_stateid(lab):
    return lab.client.downgrade(lab.put(), ANONYMOUS, READ, 0)


@case
def open_downgrade_of_another_file(lab):
    stateid, _ = lab.make()
    return lab.client.downgrade(lab.put(b"g"), stateid, BOTH, 0)


@case
def open_downgrade_with_an_old_stateid(lab):
    stateid, handle = lab.make()
    assert lab.client.open(lab.dir, b"f", access=READ)[0] == OK
    return lab.client.downgrade(handle, stateid, READ, 0)


@case
def open_downgrade_to_no_access(lab):
    stateid, handle = lab.make()
    return lab.client.downgrade(handle, stateid, 0, 0)


@case
def open_downgrade_to_an_unknown_deny(lab):
    stateid, handle = lab.make()
    return lab.client.downgrade(handle, stateid, BOTH, 4)


@case
def open_downgrade_to_more(lab):
    lab.put()
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f")
    return lab.client.downgrade(handle, stateid, BOTH, 0)


@case
def open_downgrade_returns_the_next_stateid(lab):
    stateid, handle = lab.make()
    number = lab.client.open_number(b"owner")
    status, reply = lab.ask(handle, words(21) + stateid + words(number, BOTH, 0))
    assert reply.fixed(16) == with_seqid(stateid, int.from_bytes(stateid[:4], "big") + 1)
    return status


@case
def write_after_open_downgrade(lab):
    lab.put()
    lab.client.open(lab.dir, b"f", access=READ)
    _, stateid, handle, _ = lab.client.open(lab.dir, b"f", access=BOTH)
    number = lab.client.open_number(b"owner")
    status, reply = lab.ask(handle, words(21) + stateid + words(number, READ, 0))
    assert status == OK, status
    return lab.client.write(handle, reply.fixed(16), b"data")


@case
def remove_of_an_open_file(lab):
    stateid, handle = lab.filled()
    status, _ = lab.in_dir(words(28) + opaque(b"f"))
    assert lab.client.read(handle, stateid) == (OK, b"0123456789")
    return status


@case
def open_downgrade_to_an_unknown_access(lab):
    stateid, handle = lab.make()
    return lab.client.downgrade(handle, stateid, BOTH | 0x100, 0)
