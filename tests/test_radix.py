"""The prefix tree against a naive model that keeps every page by its whole prefix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pdd.policy.radix import Match, RadixTree

PAGE = 2
PAGES = st.sampled_from([[0, 0], [0, 1], [1, 0]])
IDS = st.builds(
    lambda pages, tail: [token for page in pages for token in page] + tail,
    st.lists(PAGES, min_size=1, max_size=5),
    st.sampled_from([[], [0]]),
)


class Naive:
    """Pages by prefix tuple, each with its last use and leases; every answer by brute force."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget = budget_tokens // PAGE
        self.used: dict[tuple[int, ...], int] = {}
        self.values: dict[tuple[int, ...], int] = {}
        self.leases: dict[tuple[int, ...], int] = {}
        self.tick = 0

    def prefixes(self, ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[:end]) for end in range(PAGE, len(ids) + 1, PAGE)]

    def touch(self, ids: list[int]) -> list[tuple[int, ...]]:
        self.tick += 1
        found = [prefix for prefix in self.prefixes(ids) if prefix in self.used]
        for prefix in found:
            self.used[prefix] = self.tick
        return found

    def evict(self, pages: int, kept: set[tuple[int, ...]] = frozenset()) -> int:
        for gone in range(pages):
            inner = {prefix[:-PAGE] for prefix in self.used}
            free = [p for p in self.used if p not in inner and not self.leases.get(p) and p not in kept]
            if not free:
                return gone
            oldest = min(free, key=lambda prefix: self.used[prefix])
            del self.used[oldest], self.values[oldest]
        return max(0, pages)

    def insert(self, ids: list[int], value: int) -> int:
        present = self.touch(ids)
        missing = self.prefixes(ids)[len(present) :]
        self.evict(len(self.used) + len(missing) - self.budget, set(present))
        for prefix in missing[: max(0, self.budget - len(self.used))]:
            self.used[prefix] = self.tick
            self.values[prefix] = value + len(prefix)
        return len(present) * PAGE


class TreeMachine(RuleBasedStateMachine):
    """Drives both with the same calls."""

    leases = Bundle("leases")
    budget_tokens = 10 * PAGE

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE, self.budget_tokens)
        self.naive = Naive(self.budget_tokens)
        self.value = 0

    @rule(ids=IDS)
    def insert(self, ids: list[int]) -> None:
        self.value += 1000
        present = self.tree.insert(np.array(ids, np.int32), lambda start, end: self.value + end)
        assert present == self.naive.insert(ids, self.value)

    @rule(ids=IDS)
    def match(self, ids: list[int]) -> None:
        peeked = self.tree.peek(ids)
        match = self.tree.match(ids)
        found = self.naive.touch(ids)
        assert peeked == match.tokens == len(found) * PAGE
        assert match.values == [self.naive.values[prefix] for prefix in found]

    @rule(target=leases, ids=IDS)
    def lease(self, ids: list[int]) -> tuple[Match, list[tuple[int, ...]]]:
        match = self.tree.lease(self.tree.match(ids))
        found = self.naive.touch(ids)
        for prefix in found:
            self.naive.leases[prefix] = self.naive.leases.get(prefix, 0) + 1
        assert match.tokens == len(found) * PAGE
        return match, found

    @rule(held=consumes(leases))
    def release(self, held: tuple[Match, list[tuple[int, ...]]]) -> None:
        match, found = held
        self.tree.release(match)
        self.tree.release(match)  # a second time changes nothing
        for prefix in found:
            self.naive.leases[prefix] -= 1

    @rule(held=leases)
    def leased_pages_stay(self, held: tuple[Match, list[tuple[int, ...]]]) -> None:
        match, found = held
        ids = list(found[-1]) if found else []
        assert self.tree.match(ids).values == match.values
        self.naive.touch(ids)

    @rule(pages=st.integers(1, 3))
    def evict(self, pages: int) -> None:
        assert self.tree.evict(pages * PAGE) == self.naive.evict(pages) * PAGE

    @precondition(lambda self: len(self.naive.used) > 8)
    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.naive.evict(len(self.naive.used))

    @invariant()
    def same_size_within_budget(self) -> None:
        assert self.tree.tokens == len(self.naive.used) * PAGE <= self.budget_tokens

    @invariant()
    def every_page_is_found(self) -> None:
        assert all(self.tree.peek(list(prefix)) == len(prefix) for prefix in self.naive.used)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def filled(*sequences: list[int], page: int = 2, budget: int = 100) -> RadixTree:
    tree = RadixTree(page, budget)
    for number, ids in enumerate(sequences):
        tree.insert(ids, lambda start, end, number=number: (number, start, end))
    return tree


def test_edges_are_split_at_pages_and_values_stay_with_their_pages() -> None:
    tree = filled([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9])
    assert tree.match([1, 2, 3, 4, 5, 6]).values == [(0, 0, 2), (0, 2, 4), (0, 4, 6)]
    assert tree.match([1, 2, 3, 9, 9, 9, 7]).values == [(0, 0, 2), (1, 2, 4), (1, 4, 6)]
    assert tree.tokens == 10


def test_unusable_last_pages_are_cut_off_the_match() -> None:
    tree = filled([1, 2, 3, 4, 5, 6])
    match = tree.match([1, 2, 3, 4, 5, 6], usable=lambda value: value[2] == 4)
    assert match.tokens == 4 and len(match.values) == 2
    tree.lease(match)
    assert tree.evict(100) == 2, "only what lies behind the usable part may go"


def test_a_failing_make_enters_nothing_and_leaves_no_lease() -> None:
    tree = filled([1, 2, 3, 4])

    def fail(start: int, end: int) -> None:
        raise RuntimeError("no KV")

    with pytest.raises(RuntimeError, match="no KV"):
        tree.insert([1, 2, 3, 4, 5, 6], fail)
    assert tree.tokens == 4
    assert tree.evict(4) == 4


def test_a_stale_match_cannot_be_leased() -> None:
    tree = filled([1, 2, 3, 4])
    match = tree.match([1, 2, 3, 4])
    tree.evict(2)
    with pytest.raises(ValueError, match="evicted"):
        tree.lease(match)
    held = tree.lease(tree.match([1, 2]))
    with pytest.raises(ValueError, match="leased already"):
        tree.lease(held)


def test_an_insert_beyond_the_budget_keeps_the_leading_pages_and_no_leased_page_goes() -> None:
    tree = filled([1, 2, 3, 4], budget=8)
    held = tree.lease(tree.match([1, 2, 3, 4]))
    tree.insert([5, 6, 7, 8, 9, 10, 11, 12], lambda start, end: end)
    assert tree.match([5, 6, 7, 8, 9, 10]).tokens == 4
    assert tree.match([1, 2, 3, 4]).tokens == 4
    tree.release(held)
    assert filled([1, 2], budget=0).tokens == 0


@pytest.mark.parametrize(("page", "budget"), [(0, 10), (2, -1)])
def test_impossible_sizes_are_refused(page: int, budget: int) -> None:
    with pytest.raises(ValueError, match="give >= 1"):
        RadixTree(page, budget)


def test_a_long_run_of_matches_keeps_the_eviction_queue_small() -> None:
    tree = filled(*[[n, n] for n in range(50)], budget=200)
    for round_ in range(1000):
        tree.match([round_ % 50, round_ % 50])
    assert len(tree._heap) <= 50


def test_a_leased_edge_that_is_split_is_free_again_after_its_release() -> None:
    tree = filled([1, 2, 3, 4, 5, 6])
    held = tree.lease(tree.match([1, 2, 3, 4, 5, 6]))
    assert tree.match([1, 2]).tokens == 2, "splits the leased edge"
    tree.clear()
    assert tree.tokens == 6
    tree.release(held)
    tree.clear()
    assert tree.tokens == 0
