"""Ids that become visible out of order: none is passed over while somebody could still show it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spoold.sources import unseen as module
from spoold.sources.unseen import HIGHEST_ID, Gap, Snapshot, Unseen

OLD = 1_000.0


def gaps_of(unseen: Unseen) -> list[tuple[int, int]]:
    return [(gap.low, gap.high) for gap in unseen.gaps]


def test_ids_in_order_leave_no_gap() -> None:
    unseen = Unseen(0).saw([1, 2, 3], 0.0).saw([4], 1.0)
    assert unseen == Unseen(4)
    assert unseen.ranges() == [(5, HIGHEST_ID)]


def test_what_was_not_there_below_the_highest_is_looked_for_again() -> None:
    unseen = Unseen(10).saw([12, 13, 17], 0.0)
    assert unseen.ranges() == [(11, 11), (14, 16), (18, HIGHEST_ID)]
    assert [one for one in range(9, 20) if one in unseen] == [11, 14, 15, 16, 18, 19]
    assert unseen.saw([11, 15], 1.0).ranges() == [(14, 14), (16, 16), (18, HIGHEST_ID)]


def test_a_gap_stays_while_a_transaction_is_open_that_was_open_when_it_was_marked() -> None:
    unseen = Unseen(0).saw([2], 0.0)
    look = Snapshot(xmin=100, xmax=105, at=OLD)
    unseen = unseen.marked(look).settled(look)
    assert unseen.gaps == (Gap(1, 1, 0.0, 105),)
    held = Snapshot(xmin=104, xmax=900, at=OLD)
    assert gaps_of(unseen.marked(held).settled(held)) == [(1, 1)]
    ended = Snapshot(xmin=105, xmax=900, at=OLD)
    assert gaps_of(unseen.marked(ended).settled(ended)) == []


def test_a_gap_is_not_marked_before_its_time_as_its_writer_may_have_no_transaction_id_yet() -> None:
    unseen = Unseen(0).saw([2], 50.0)
    early = Snapshot(xmin=100, xmax=100, at=50.0 + module.GRACE_SECONDS - 0.1)
    assert gaps_of(unseen.marked(early).settled(early)) == [(1, 1)]
    late = Snapshot(xmin=100, xmax=100, at=50.0 + module.GRACE_SECONDS)
    assert gaps_of(unseen.marked(late).settled(late)) == []


def test_what_is_left_of_a_gap_keeps_its_age_and_its_mark() -> None:
    unseen = Unseen(9, (Gap(1, 5, 3.0, 70),)).saw([3, 11], 8.0)
    assert unseen.gaps == (Gap(1, 2, 3.0, 70), Gap(4, 5, 3.0, 70), Gap(10, 10, 8.0))


def test_a_sequence_that_jumps_by_billions_costs_one_range() -> None:
    unseen = Unseen(5).saw([6, 9_000_000_000_000], 0.0)
    assert unseen.ranges() == [(7, 8_999_999_999_999), (9_000_000_000_001, HIGHEST_ID)]


def test_too_many_gaps_are_joined_and_cover_what_they_covered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_GAPS", 10)
    unseen = Unseen(0).saw(list(range(2, 200, 2)), 0.0)
    assert len(unseen.gaps) <= 10
    assert all(one in unseen for one in range(1, 199, 2))
    low, high = Gap(1, 1, 0.0, 50), Gap(3, 3, 7.0)
    monkeypatch.setattr(module, "_MAX_GAPS", 1)
    assert Unseen(3, (low, high)).saw([9], 9.0).gaps == (Gap(1, 8, 9.0),)


class Server:
    """Transactions that draw ids and commit, or not, in any order."""

    def __init__(self) -> None:
        self.at = 0.0
        self.next_id = 1
        self.next_xid = 100
        self.open: dict[int, tuple[int, list[int]]] = {}  # xid, ids
        self.visible: set[int] = set()

    def snapshot(self) -> Snapshot:
        running = [xid for xid, _ in self.open.values()]
        return Snapshot(xmin=min(running, default=self.next_xid), xmax=self.next_xid, at=self.at)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["draw", "draw", "commit", "roll back", "look", "burn", "wait"]),
        st.integers(0, 3),
    ),
    max_size=60,
)


@given(ACTS)
def test_whatever_is_committed_is_seen_and_no_gap_stays_when_all_is_quiet(
    acts: list[tuple[str, int]],
) -> None:
    server, unseen, seen = Server(), Unseen(0), set[int]()

    def look() -> None:
        nonlocal unseen
        snapshot = server.snapshot()
        marked = unseen.marked(snapshot)
        found = sorted(
            one for low, high in marked.ranges() for one in server.visible if low <= one <= high
        )
        seen.update(found)
        unseen = marked.saw(found, snapshot.at).settled(snapshot)
        assert server.visible <= seen

    for act, who in acts:
        if act == "draw":
            if who not in server.open:
                server.open[who] = (server.next_xid, [])
                server.next_xid += 1
            server.open[who][1].append(server.next_id)
            server.next_id += 1
        elif act in ("commit", "roll back") and who in server.open:
            _, ids = server.open.pop(who)
            server.visible.update(ids if act == "commit" else ())
        elif act == "burn":
            server.next_id += 10**who
        elif act == "wait":
            server.at += 20.0
        elif act == "look":
            look()
    for who in list(server.open):
        server.visible.update(server.open.pop(who)[1])
    for _ in range(3):
        server.at += 20.0
        look()
    assert unseen.gaps == ()
