"""Stop strings in a stream: found across pieces, never shown in part, withheld no longer than needed."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from llmc.runtime.stop_strings import StopStrings

texts = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def first_stop(text: str, stop_list: list[str]) -> int | None:
    found = [text.find(stop) for stop in stop_list if stop in text]
    return min(found) if found else None


@given(text=texts, stop_list=stops, cuts=st.lists(st.integers(1, 5), max_size=30))
@example(text="aab", stop_list=["ab"], cuts=[1, 1, 1])
def test_what_is_shown_is_the_text_before_the_first_stop(text: str, stop_list: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stop_list)
    shown, rest = "", text
    while rest:
        size = cuts.pop() if cuts else 1
        before = len(shown)
        shown += matcher.push(rest[:size])
        rest = rest[size:]
        if matcher.matched is None:
            seen = text[: len(text) - len(rest)]
            withheld = seen[len(shown) :]
            assert seen.startswith(shown)
            assert not withheld or any(stop.startswith(withheld) for stop in stop_list)
        else:
            assert len(shown) >= before
    shown += matcher.finish()
    # With pieces of several characters a later-beginning stop may complete first; what ends the text is a stop.
    end = first_stop(text, stop_list)
    assert shown == (text if end is None else shown)
    assert (matcher.matched is None) is (end is None)
    if matcher.matched is not None:
        assert text.startswith(shown + matcher.matched)


def test_the_stop_that_begins_first_wins_within_a_piece() -> None:
    matcher = StopStrings(["cd", "bcd", "bc"])
    assert matcher.push("abcde") == "a"
    assert matcher.matched == "bcd"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_a_prefix_is_released_when_it_can_no_longer_match() -> None:
    matcher = StopStrings(["###"])
    assert [matcher.push(piece) for piece in ("a#", "#", "b", "#")] == ["a", "", "##b", ""]
    assert matcher.finish() == "#"
