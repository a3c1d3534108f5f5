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


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """The match that ends first; of those the one that starts first."""
    matches = [
        (end, start, text[start:end])
        for end in range(1, len(text) + 1)
        for start in range(end)
        if text[start:end] in stops
    ]
    if not matches:
        return text, None
    _, start, stop = min(matches)
    return text[:start], stop


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    text=st.text("abc", max_size=20),
)
def test_the_match_is_the_defined_one(stops, text):
    assert shown(stops, [text]) == shown(stops, list(text)) == by_definition(stops, text)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("ab", max_size=20),
)
def test_exactly_what_may_still_become_a_stop_string_is_held_back(stops, text):
    scanner = StopStrings(stops)

    safe = "".join(scanner.push(character) for character in text)

    if scanner.matched is None:
        may_match = [
            end for end in range(len(text)) if any(s.startswith(text[end:]) for s in stops)
        ]
        assert safe == text[: min(may_match, default=len(text))]


def test_stop_strings_that_nearly_match_take_time_linear_in_the_text():
    """Each character moves the automaton a step deeper, and each link followed moves it back."""
    stops = ["a" * length + "b" for length in range(1, 100)]
    automaton = StopStrings(stops)._automaton
    steps = 0

    state = 0
    for character in "a" * 5_000 + "c" + "a" * 5_000:
        before = automaton.depth[state]
        state = automaton.next(state, character)
        steps += 1 + max(0, before + 1 - automaton.depth[state])

    assert steps <= 2 * 10_001
