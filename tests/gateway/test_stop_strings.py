import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.requests.stop_strings import StopStrings


def shown(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopStrings(stops)
    text = "".join(scanner.push(piece) for piece in pieces)
    if scanner.matched is None:
        text += scanner.flush()
    return text, scanner.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["a ", "b"], ("a b", None)),
        (["END"], ["a b ", "END", " c"], ("a b ", "END")),
        (["END"], ["a E", "N", "D c"], ("a ", "END")),
        (["END"], ["a EN"], ("a EN", None)),
        (["END"], ["a ENEND"], ("a EN", "END")),
        (["ab", "abc"], ["abc"], ("", "ab")),
        (["abcd", "bc"], ["abcd"], ("a", "bc")),
        (["aab"], ["aa", "ab"], ("a", "aab")),
        (["bc", "abc"], ["abc"], ("", "abc")),
    ],
)
def test_text_ends_before_the_stop_string_that_is_complete_first(stops, pieces, expected):
    assert shown(stops, pieces) == expected


def test_text_that_may_still_become_a_stop_string_is_held_back():
    scanner = StopStrings(["\n\nHuman:"])

    assert scanner.push("Hello.\n") == "Hello."
    assert scanner.push("\nHu") == ""
    assert scanner.push("go") == "\n\nHugo"


def test_nothing_is_shown_after_a_match():
    scanner = StopStrings(["x"])
    scanner.push("ax")

    assert scanner.push("b") == ""
    assert scanner.flush() == ""


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    text=st.text("abc", max_size=20),
    data=st.data(),
)
def test_the_answer_does_not_depend_on_how_the_text_was_cut(stops, text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]

    assert shown(stops, pieces) == shown(stops, [text]) == shown(stops, list(text))
