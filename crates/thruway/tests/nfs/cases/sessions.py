"""Cases of clients, sessions, slots and compounds."""
from cases.lab import *


def exchange(lab, name, verifier=b"verifier", flags=0, protection=words(0), **who):
    status, reply = lab.client.compound(words(42) + verifier + opaque(name) + words(flags) + protection + words(0), **who)
    if status == OK:
        reply.fixed(8)
    return status, reply


LIMITS = words(0, 4096, 4096, 1024, 8, 1, 0)


def session_of(lab, id, sequence, flags=0, limits=LIMITS, **who):
    create = words(43) + id + words(sequence, flags) + limits + limits + words(0x40001234, 1, 0)
    status, reply = lab.client.compound(create, **who)
    if status == OK:
        reply.fixed(8)
    return status, reply


def small(lab, request=1 << 20, response=1 << 20, cached=4096, operations=64):
    """Uses a session with these limits from now on."""
    limits = words(0, request, response, cached, operations, 1, 0)
    status, reply = session_of(lab, lab.client.id, lab.client.create_sequence, limits=limits)
    assert status == OK, status
    lab.client.session, lab.client.sequence = reply.fixed(16), 0


def sequence(lab, number, slot=0, keep=0):
    return words(53) + lab.client.session + words(number, slot, 0, keep)


@case
def sequence_alone(lab):
    number = lab.client.sequence + 1
    status, reply = lab.client.compound(sequence(lab, number))
    reply.fixed(8)
    assert reply.fixed(16) == lab.client.session and (reply.u32(), reply.u32()) == (number, 0)
    return status


@case
def repeated_call_that_was_kept(lab):
    operations = [sequence(lab, lab.client.sequence + 1, keep=1), fh(lab.dir), mkdir_op(b"once")]
    lab.client.sequence += 1
    operations[0] = sequence(lab, lab.client.sequence, keep=1)
    first, again = [lab.client.compound(*operations) for _ in range(2)]
    assert first[0] == OK and first[1].data == again[1].data
    return again[0]


@case
def repeated_call_of_another_user(lab):
    first = sequence(lab, lab.client.sequence + 1, keep=1)
    assert lab.client.compound(first, words(24))[0] == OK
    return lab.client.compound(first, words(24), uid=7)[0]


@case
def sequence_after_a_failure(lab):
    assert lab.client.compound(sequence(lab, 77))[0] != OK
    return lab.client.compound(sequence(lab, lab.client.sequence + 1))[0]


@case
def sequence_of_an_earlier_number(lab):
    for _ in range(2):
        lab.client.run(words(24))
    return lab.client.compound(sequence(lab, lab.client.sequence - 1))[0]


@case
def sequence_of_zero(lab):
    small(lab)
    return lab.client.compound(sequence(lab, 0))[0]


@case
def sequence_in_the_next_slot(lab):
    return lab.client.compound(sequence(lab, 1, slot=1))[0]


@case
def sequence_of_a_destroyed_session(lab):
    assert lab.client.compound(words(44) + lab.client.session)[0] == OK
    return lab.client.compound(sequence(lab, 1))[0]


@case
def more_operations_than_agreed(lab):
    small(lab, operations=4)
    return lab.client.run(*[words(24)] * 4)[0]


@case
def as_many_operations_as_agreed(lab):
    small(lab, operations=4)
    return lab.client.run(*[words(24)] * 3)[0]


@case
def reply_longer_than_agreed(lab):
    _, handle = lab.filled(b"x" * 4096)
    small(lab, response=1024)
    return lab.client.run(fh(handle), read_op(length=4096))[0]


@case
def compound_of_an_unknown_minor_version(lab):
    lab.client.minor = 3
    return lab.client.compound(sequence(lab, lab.client.sequence + 1))[0]


@case
def compound_of_nothing(lab):
    return lab.client.compound()[0]


@case
def compound_returns_the_tag(lab):
    head = opaque(b"tag") + words(lab.minor, 1)
    reply = lab.client.call(100003, 4, 1, head + sequence(lab, lab.client.sequence + 1))
    status = reply.u32()
    assert reply.opaque() == b"tag" and reply.u32() == 1
    return status


@case
def compound_ends_at_a_failure(lab):
    status, reply = lab.in_dir(words(15) + opaque(b"nothing"), mkdir_op(b"d"))
    assert lab.in_dir(words(15) + opaque(b"d"))[0] == NOENT
    return status


@case
def compound_of_an_unknown_version(lab):
    lab.client.minor = 3
    return lab.client.compound(words(24))[0]


@case
def compound_without_operations(lab):
    return lab.client.compound()[0]


@case
def compound_that_begins_with_sequence(lab):
    return lab.client.compound(words(53) + bytes(16) + words(1, 0, 0, 0), words(24))[0]


@case
def backchannel_ctl_without_a_usable_flavor(lab):
    gss = words(6, 1) + opaque(b"one") + opaque(b"two")
    return lab.back().run(words(40, 0x40001235, 1) + gss)[0]


@case
def backchannel_ctl_without_sequence(lab):
    return lab.client.compound(words(40, 0x40001235, 1, 0))[0]


def bind(lab, direction):
    status, reply = lab.client.compound(words(41) + lab.client.session + words(direction, 0))
    if status == OK:
        reply.fixed(8)
        assert reply.fixed(16) == lab.client.session
    return status, reply


@case
def bind_conn_to_session_for_calls(lab):
    status, reply = bind(lab, 1)
    assert reply.u32() == 1
    return status


@case
def bind_conn_to_session_for_calls_and_maybe_back(lab):
    status, reply = bind(lab, 3)
    assert reply.u32() == 1
    return status


@case
def bind_conn_to_session_without_back_channel(lab):
    return bind(lab, 2)[0]


@case
def bind_conn_to_session_for_both(lab):
    lab.back()
    status, reply = bind(lab, 7)
    assert reply.u32() == 3
    return status


@case
def bind_conn_to_session_of_an_unknown_direction(lab):
    return bind(lab, 9)[0]


@case
def bind_conn_to_session_with_another_operation(lab):
    return lab.client.compound(words(41) + lab.client.session + words(1, 0), words(24))[0]


@case
def exchange_id_of_a_new_client(lab):
    status, reply = exchange(lab, b"new of " + lab.client.name)
    reply.fixed(12)
    assert reply.u32() & 0x80000000 == 0
    return status


@case
def exchange_id_again(lab):
    status, reply = exchange(lab, lab.client.name)
    assert reply.fixed(8) == lab.client.id
    reply.u32()
    assert reply.u32() & 0x80000000
    return status


@case
def exchange_id_after_a_restart(lab):
    status, reply = exchange(lab, lab.client.name, verifier=b"restart.")
    assert reply.fixed(8) != lab.client.id
    reply.u32()
    assert reply.u32() & 0x80000000 == 0
    return status


@case
def exchange_id_updates_an_unknown_client(lab):
    return exchange(lab, b"new of " + lab.client.name, flags=0x40000000)[0]


@case
def exchange_id_updates_with_another_verifier(lab):
    return exchange(lab, lab.client.name, verifier=b"restart.", flags=0x40000000)[0]


@case
def exchange_id_updates_as_another_user(lab):
    return exchange(lab, lab.client.name, flags=0x40000000, uid=7)[0]


@case
def exchange_id_updates(lab):
    return exchange(lab, lab.client.name, flags=0x40000000)[0]


@case
def exchange_id_that_is_confirmed(lab):
    return exchange(lab, b"new of " + lab.client.name, flags=0x80000000)[0]


@case
def exchange_id_with_an_unknown_protection(lab):
    return exchange(lab, b"new of " + lab.client.name, protection=words(3))[0]


@case
def create_session_again(lab):
    number = lab.client.create_sequence
    first, again = [session_of(lab, lab.client.id, number) for _ in range(2)]
    assert first[0] == OK and first[1].fixed(20) == again[1].fixed(20)
    return again[0]


@case
def create_session_twice(lab):
    number = lab.client.create_sequence
    first, second = session_of(lab, lab.client.id, number), session_of(lab, lab.client.id, number + 1)
    assert first[0] == OK and first[1].fixed(16) != second[1].fixed(16)
    return second[0]


@case
def create_session_of_another_user(lab):
    status, reply = exchange(lab, b"new of " + lab.client.name)
    assert status == OK
    return session_of(lab, reply.fixed(8), reply.u32(), uid=7)[0]


@case
def create_session_with_an_unknown_flag(lab):
    return session_of(lab, lab.client.id, lab.client.create_sequence, flags=8)[0]


@case
def create_session_with_tiny_requests(lab):
    limits = words(0, 16, 4096, 1024, 8, 1, 0)
    return session_of(lab, lab.client.id, lab.client.create_sequence, limits=limits)[0]


@case
def create_session_with_the_largest_limits(lab):
    most = 2**32 - 1
    limits = words(0, most, most, most, most, most, 0)
    status, reply = session_of(lab, lab.client.id, lab.client.create_sequence, limits=limits)
    reply.fixed(16 + 4 + 4 + 4)
    assert all(reply.u32() < most for _ in range(5))
    return status


@case
def create_session_with_another_operation(lab):
    create = words(43) + lab.client.id + words(lab.client.create_sequence, 0) + LIMITS + LIMITS
    return lab.client.compound(create + words(0x40001234, 1, 0), words(24))[0]


@case
def destroy_session_as_the_last_operation(lab):
    return lab.client.run(words(44) + lab.client.session)[0]


@case
def destroy_session_alone(lab):
    return lab.client.compound(words(44) + lab.client.session)[0]


@case
def destroy_session_twice(lab):
    assert lab.client.compound(words(44) + lab.client.session)[0] == OK
    return lab.client.compound(words(44) + lab.client.session)[0]


@case
def destroy_session_with_another_operation(lab):
    return lab.client.compound(words(44) + lab.client.session, words(24))[0]


@case
def destroy_clientid_without_a_session(lab):
    assert lab.client.compound(words(44) + lab.client.session)[0] == OK
    return lab.client.compound(words(57) + lab.client.id)[0]


@case
def destroy_clientid_twice(lab):
    assert lab.client.compound(words(44) + lab.client.session)[0] == OK
    assert lab.client.compound(words(57) + lab.client.id)[0] == OK
    return lab.client.compound(words(57) + lab.client.id)[0]


@case
def destroy_clientid_in_its_session(lab):
    return lab.client.run(words(57) + lab.client.id)[0]


@case
def destroy_clientid_that_is_not_confirmed(lab):
    _, reply = exchange(lab, b"new of " + lab.client.name)
    return lab.client.compound(words(57) + reply.fixed(8))[0]


@case
def free_stateid_of_a_lock(lab):
    return lab.client.run(words(45) + lab.locked()[1])[0]


@case
def free_stateid_without_locks(lab):
    _, lock, handle = lab.locked()
    assert lab.unlock(handle, lock)[0] == OK
    status, _ = lab.client.run(words(45) + with_seqid(lock, 2))
    assert lab.unlock(handle, with_seqid(lock, 2))[0] == BAD_STATEID
    return status


@case
def free_stateid_of_the_anonymous_stateid(lab):
    return lab.client.run(words(45) + ANONYMOUS)[0]


@case
def free_stateid_of_another_client(lab):
    stateid, _ = lab.make()
    return lab.other().run(words(45) + stateid)[0]


@case
def free_stateid_with_an_old_stateid(lab):
    _, lock, handle = lab.locked()
    assert lab.unlock(handle, lock)[0] == OK
    return lab.client.run(words(45) + lock)[0]


def tested(lab, *stateids, client=None):
    status, reply = (client or lab.client).run(words(55, len(stateids)) + b"".join(stateids))
    assert status == OK, status
    reply.fixed(8)
    return [reply.u32() for _ in range(reply.u32())]


@case
def test_stateid_of_nothing(lab):
    assert tested(lab) == []
    return OK


@case
def test_stateid_of_two(lab):
    stateid, _ = lab.make()
    assert tested(lab, stateid, UNKNOWN) == [OK, BAD_STATEID]
    return OK


@case
def test_stateid_of_a_lock(lab):
    return tested(lab, lab.locked()[1])[0]


@case
def test_stateid_of_an_old_stateid(lab):
    stateid, _ = lab.make()
    assert lab.client.open(lab.dir, b"f", access=BOTH)[0] == OK
    return tested(lab, stateid)[0]


@case
def test_stateid_of_a_closed_stateid(lab):
    return tested(lab, lab.closed()[0])[0]


@case
def test_stateid_of_the_anonymous_stateid(lab):
    return tested(lab, ANONYMOUS)[0]


@case
def test_stateid_of_another_client(lab):
    stateid, _ = lab.make()
    return tested(lab, stateid, client=lab.other())[0]


@case
def reclaim_complete_without_a_current_file(lab):
    return lab.client.run(words(58, 1))[0]


@case
def reclaim_complete_of_a_new_client(lab):
    client = lab.connect(b"new of " + lab.client.name, reclaimed=False)
    return client.run(words(58, 0))[0]


@case
def reclaim_complete_of_a_file_system(lab):
    client = lab.connect(b"new of " + lab.client.name, reclaimed=False)
    assert client.run(fh(lab.dir), words(58, 1))[0] == OK
    return client.run(words(58, 0))[0]


@case
def open_before_reclaim_complete(lab):
    lab.put()
    client = lab.connect(b"new of " + lab.client.name, reclaimed=False)
    return client.open(lab.dir, b"f")[0]


def set_client(lab, name, verifier=b"verifier", **who):
    callback = words(0) + opaque(b"tcp") + opaque(b"0.0.0.0.0.0") + words(0)
    status, reply = lab.client.run(words(35) + verifier + opaque(name) + callback, **who)
    if status == OK:
        reply.fixed(8)
        return status, reply.fixed(8), reply.fixed(8)
    return status, None, None


@case
def setclientid_again(lab):
    status, id, _ = set_client(lab, lab.client.name)
    assert id == lab.client.id
    return status


@case
def setclientid_after_a_restart(lab):
    status, id, _ = set_client(lab, lab.client.name, verifier=b"restart.")
    assert id != lab.client.id
    return status


@case
def setclientid_does_not_replace_a_client(lab):
    stateid, handle = lab.make()
    assert set_client(lab, lab.client.name, verifier=b"restart.")[0] == OK
    return lab.client.read(handle, stateid)[0]


@case
def setclientid_confirm_twice(lab):
    _, id, confirmation = set_client(lab, b"new of " + lab.client.name)
    assert lab.client.run(words(36) + id + confirmation)[0] == OK
    return lab.client.run(words(36) + id + confirmation)[0]


@case
def setclientid_confirm_with_another_verifier(lab):
    _, id, _ = set_client(lab, b"new of " + lab.client.name)
    return lab.client.run(words(36) + id + bytes(8))[0]


@case
def setclientid_confirm_of_another_user(lab):
    _, id, confirmation = set_client(lab, b"new of " + lab.client.name)
    return lab.client.run(words(36) + id + confirmation, uid=7)[0]


@case
def setclientid_confirm_after_a_restart(lab):
    _, id, confirmation = set_client(lab, lab.client.name, verifier=b"restart.")
    assert lab.client.run(words(36) + id + confirmation)[0] == OK
    return lab.client.run(words(30) + lab.client.id)[0]


@case
def renew_of_a_client(lab):
    return lab.client.run(words(30) + lab.client.id)[0]


@case
def renew_of_a_client_that_is_not_confirmed(lab):
    _, id, _ = set_client(lab, b"new of " + lab.client.name)
    return lab.client.run(words(30) + id)[0]


@case
def release_lockowner_of_an_unknown_client(lab):
    return lab.client.run(words(39) + bytes([7] * 8) + opaque(b"locks"))[0]


@case
def release_lockowner_after_locku(lab):
    _, lock, handle = lab.locked()
    status, reply = lab.unlock(handle, lock)
    lock = reply.fixed(16)
    status, _ = lab.client.run(words(39) + lab.client.id + opaque(b"locks"))
    assert lab.unlock(handle, lock, number=2)[0] == BAD_STATEID
    return status


@case
def compound_with_an_undefined_operation(lab):
    status, reply = lab.client.run(words(9999))
    assert reply.data.endswith(words(10044, 10044))
    return status


@case
def compound_with_an_operation_of_version_4_0(lab):
    return lab.client.run(words(30) + lab.client.id)[0]


@case
def compound_with_an_operation_that_is_not_defined(lab):
    status, reply = lab.client.compound(words(24), words(9999))
    assert reply.data.endswith(words(10044, 10044))
    return status


@case
def compound_of_too_many_operations(lab):
    return lab.client.compound(*[words(24)] * 65)[0]
