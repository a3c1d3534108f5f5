from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting_queue import WaitingQueue
from tests.engine.oracle import ask, small_config


def sequence(name: str, namespace: bytes = b"a") -> Sequence:
    request = ask(name, [1], namespace=namespace)
    return Sequence(request, small_config(), max_tokens=1, submitted_ms=0)


def test_the_preempted_stand_before_the_newcomers() -> None:
    queue = WaitingQueue()
    first, second, third = (sequence(name) for name in ("first", "second", "third"))
    queue.add(second)
    queue.add(third)

    queue.preempted.appendleft(first)

    assert list(queue) == [first, second, third]
    assert len(queue) == 3
    assert list(queue.newcomers()) == [second, third]


def test_each_namespace_has_its_own_order_of_arrival() -> None:
    queue = WaitingQueue()
    members = [sequence("0", b"a"), sequence("1", b"b"), sequence("2", b"a")]
    for member in members:
        queue.add(member)

    assert list(queue.namespaces()) == [b"a", b"b"]
    assert list(queue.newcomers_of(b"a")) == [members[0], members[2]]
    assert list(queue.newcomers_of(b"nobody")) == []


def test_whoever_leaves_is_in_no_list_and_an_empty_namespace_is_none() -> None:
    queue = WaitingQueue()
    newcomer, preempted = sequence("newcomer"), sequence("preempted", b"b")
    queue.add(newcomer)
    queue.preempted.append(preempted)
    assert newcomer in queue
    assert preempted in queue

    queue.remove(newcomer)
    queue.remove(preempted)

    assert newcomer not in queue
    assert preempted not in queue
    assert (len(queue), list(queue), list(queue.namespaces())) == (0, [], [])
