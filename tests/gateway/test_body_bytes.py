import pytest

from gateway.errors import Overloaded
from gateway.http.body_bytes import BodyBytes, BodyInFlight


def receiving(body: BodyInFlight) -> BodyInFlight:
    """The body is still being received, so that it can be given up."""
    body.on_evicted = lambda: None
    return body


def test_a_customer_alone_may_have_all_but_no_more() -> None:
    bodies = BodyBytes(max_bytes=10)
    with bodies.body("a") as one, bodies.body("a") as two:
        receiving(one).take(6)
        receiving(two).take(4)

        with pytest.raises(Overloaded):
            two.take(1)

        assert not one.is_evicted, "it is the same customer's"
    assert bodies.num_bytes == 0


def test_the_largest_body_of_the_largest_customer_is_given_up() -> None:
    bodies = BodyBytes(max_bytes=10)
    with bodies.body("a") as small, bodies.body("a") as large, bodies.body("b") as other:
        receiving(small).take(4)
        receiving(large).take(6)

        receiving(other).take(5)

        assert (small.is_evicted, large.is_evicted) == (False, True)
        assert bodies.num_bytes == 9
        with pytest.raises(Overloaded):
            large.take(1)


def test_who_has_its_share_gets_nothing_of_anothers() -> None:
    bodies = BodyBytes(max_bytes=10)
    with bodies.body("a") as one, bodies.body("b") as two:
        receiving(one).take(5)
        receiving(two).take(5)

        with pytest.raises(Overloaded):
            two.take(1)

        assert bodies.num_bytes == 10


def test_a_body_that_has_arrived_is_never_given_up() -> None:
    bodies = BodyBytes(max_bytes=10)
    with bodies.body("a") as one, bodies.body("b") as two:
        one.take(10)

        with pytest.raises(Overloaded):
            two.take(1)
