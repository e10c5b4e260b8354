from __future__ import annotations

import pytest

from spoold.model import Candidate, PartialGroups
from spoold.policy import Absence, Backoff, GroupPlan, Overdue, Plan, pressure


def plain(*ids: int) -> list[Candidate]:
    return [Candidate(one, "") for one in ids]


def members(group: str, *ids: int) -> list[Candidate]:
    return [Candidate(one, group) for one in ids]


def group_plan(**changes: object) -> GroupPlan:
    settings: dict[str, object] = {
        "group_size": 3,
        "batch_size": 2,
        "linger_seconds": 1.0,
        "timeout_seconds": 100.0,
        "partial": PartialGroups.WAIT,
    }
    return GroupPlan(**(settings | changes))  # type: ignore[arg-type]


def publish(plan: Plan | GroupPlan, *units: tuple[int, ...], at: float = 0.0) -> tuple[int, ...]:
    plan.take(units, at)
    return plan.published(units)


class TestPlan:
    def test_a_full_batch_is_due_at_once_lowest_ids_first(self) -> None:
        plan = Plan(batch_size=2, linger_seconds=5.0)
        plan.offer(plain(9, 3, 7), 10.0)
        assert plan.due_at() == 10.0
        assert plan.next_batch(10.0) == ((3,), (7,))

    def test_a_batch_that_is_not_full_lingers(self) -> None:
        plan = Plan(batch_size=2, linger_seconds=5.0)
        plan.offer(plain(3), 10.0)
        plan.offer(plain(3), 12.0)
        assert plan.due_at() == 15.0
        assert plan.next_batch(14.9) == ()
        assert plan.next_batch(15.0) == ((3,),)

    def test_what_is_left_begins_to_linger_anew(self) -> None:
        plan = Plan(batch_size=2, linger_seconds=5.0)
        plan.offer(plain(1, 2, 3), 0.0)
        publish(plan, (1,), (2,), at=4.0)
        assert plan.due_at() == 9.0
        publish(plan, (3,), at=9.0)
        assert plan.due_at() is None
        assert plan.next_batch(100.0) == ()

    def test_what_could_not_be_written_is_due_again(self) -> None:
        plan = Plan(batch_size=2, linger_seconds=0.0)
        plan.offer(plain(1, 2, 3), 0.0)
        plan.take(((1,), (2,)), 1.0)
        assert plan.next_batch(1.0) == ((3,),)
        plan.restore(((1,), (2,)), 2.0)
        assert plan.next_batch(2.0) == ((1,), (2,))

    def test_what_is_being_written_is_not_taken_in_again(self) -> None:
        plan = Plan(batch_size=1, linger_seconds=0.0)
        plan.offer(plain(1, 2), 0.0)
        plan.take(((1,),), 0.0)
        plan.offer(plain(1, 2), 0.0)
        assert plan.next_batch(0.0) == ((2,),)
        plan.published(((1,),))
        plan.offer(plain(1), 1.0)
        assert list(plan.ready) == [1, 2]

    def test_of_two_batches_under_way_each_ends_alone(self) -> None:
        plan = Plan(batch_size=1, linger_seconds=0.0)
        plan.offer(plain(1, 2), 0.0)
        plan.take(((1,),), 0.0)
        plan.take(((2,),), 0.0)
        plan.published(((1,),))
        plan.offer(plain(2), 0.0)
        assert not plan.next_batch(0.0)
        plan.restore(((2,),), 0.0)
        assert plan.next_batch(0.0) == ((2,),)

    def test_what_is_dropped_can_be_offered_again(self) -> None:
        plan = Plan(batch_size=2, linger_seconds=0.0)
        plan.offer(plain(1), 0.0)
        plan.drop((1,))
        assert plan.due_at() is None
        plan.offer(plain(1), 8.0)
        assert plan.next_batch(8.0) == ((1,),)


class TestGroups:
    def test_only_whole_groups_are_delivered_and_none_is_split(self) -> None:
        plan = group_plan(batch_size=1)
        plan.offer(members("a", 1, 2) + members("b", 5, 6, 7), 0.0)
        assert plan.next_batch(0.0) == ((5, 6, 7),)
        publish(plan, (5, 6, 7))
        assert plan.next_batch(50.0) == ()
        plan.offer(members("a", 9), 60.0)
        assert plan.next_batch(60.0) == ((1, 2, 9),)

    @pytest.mark.parametrize("is_published", [True, False])
    def test_of_two_batches_under_way_each_ends_alone(self, is_published: bool) -> None:
        plan = group_plan(batch_size=1)
        plan.offer(members("a", 1, 2, 3) + members("b", 5, 6, 7), 0.0)
        plan.take(((1, 2, 3),), 0.0)
        plan.take(((5, 6, 7),), 0.0)
        if is_published:
            plan.published(((1, 2, 3),))
        else:
            plan.restore(((1, 2, 3),), 0.0)
        plan.drop((5,))  # of what is being written nothing is taken out
        plan.offer(members("b", 8), 0.0)
        plan.restore(((5, 6, 7),), 0.0)
        assert plan.next_batch(0.0) == ((5, 6, 7),)
        assert len(plan) == (3 if is_published else 6)

    def test_batch_size_counts_groups_and_a_batch_that_is_not_full_lingers(self) -> None:
        plan = group_plan()
        plan.offer(members("a", 1, 2, 3), 0.0)
        assert plan.next_batch(0.5) == ()
        assert plan.next_batch(1.0) == ((1, 2, 3),)
        plan.offer(members("b", 4, 5, 6), 0.6)
        assert plan.next_batch(0.6) == ((1, 2, 3), (4, 5, 6))

    def test_an_environment_without_a_group_is_whole_by_itself(self) -> None:
        plan = group_plan()
        plan.offer(plain(1, 2), 0.0)
        assert plan.next_batch(0.0) == ((1,), (2,))
        assert publish(plan, (1,), (2,)) == ()
        assert len(plan) == 0

    def test_a_member_that_completes_after_its_group_was_delivered_is_late(self) -> None:
        plan = group_plan(batch_size=1)
        plan.offer(members("a", 1, 2, 3), 0.0)
        publish(plan, (1, 2, 3))
        assert plan.offer(members("a", 4), 1.0) == (4,)

    def test_of_more_members_than_the_group_size_the_first_to_complete_are_delivered(self) -> None:
        plan = group_plan(batch_size=1)
        plan.offer(members("a", 9, 8), 0.0)
        plan.offer(members("a", 7, 1), 1.0)
        assert plan.next_batch(1.0) == ((7, 8, 9),)
        assert publish(plan, (7, 8, 9)) == (1,)

    def test_where_one_of_the_first_is_bad_the_next_to_complete_makes_the_group_up(self) -> None:
        plan = group_plan(group_size=2, batch_size=1)
        plan.offer(members("a", 9, 8, 7, 6), 0.0)
        plan.drop((9,))
        assert plan.next_batch(0.0) == ((7, 8),)
        assert publish(plan, (7, 8)) == (6,)

    def test_a_group_that_could_not_be_written_is_due_again_and_not_closed(self) -> None:
        plan = group_plan(batch_size=1)
        plan.offer(members("a", 1, 2, 3), 0.0)
        plan.take(((1, 2, 3),), 0.0)
        assert plan.next_batch(9.0) == ()
        assert list(plan.waiting()) == []
        plan.restore(((1, 2, 3),), 9.0)
        assert plan.next_batch(9.0) == ((1, 2, 3),)
        plan.offer(members("a", 4), 9.0)
        assert publish(plan, (1, 2, 3)) == (4,)

    def test_what_could_not_be_written_comes_before_what_came_after_it(self) -> None:
        plan = group_plan(group_size=1, batch_size=2)
        for one in (3, 1, 2):
            plan.offer(members(f"g{one}", one), 0.0)
        plan.take(((3,), (1,)), 0.0)
        plan.restore(((3,), (1,)), 0.0)
        assert plan.next_batch(0.0) == ((3,), (1,))

    def test_a_member_that_is_gone_while_it_is_written_does_not_make_up_its_group_anew(
        self,
    ) -> None:
        plan = group_plan(group_size=2, batch_size=1)
        plan.offer(members("a", 1, 2, 3), 0.0)
        plan.take(((1, 2),), 0.0)
        plan.drop((1,))
        assert plan.next_batch(0.0) == ()
        assert plan.published(((1, 2),)) == (3,)
        assert plan.offer(members("a", 4), 0.0) == (4,)

    def test_a_member_that_was_gone_while_it_could_not_be_written_can_be_dropped_then(
        self,
    ) -> None:
        plan = group_plan(group_size=2, batch_size=1)
        plan.offer(members("a", 1, 2, 3), 0.0)
        plan.take(((1, 2),), 0.0)
        plan.drop((1,))
        plan.restore(((1, 2),), 0.0)
        plan.drop((1,))
        assert plan.next_batch(0.0) == ((2, 3),)

    def test_a_group_stays_closed_after_a_restart(self) -> None:
        plan = group_plan()
        plan.close("a")
        assert plan.offer(members("a", 4), 0.0) == (4,)

    def test_a_member_that_turned_out_not_to_be_complete_makes_its_group_wait_again(self) -> None:
        plan = group_plan(batch_size=1)
        plan.offer(members("a", 1, 2, 3), 0.0)
        plan.drop((2,))
        assert plan.next_batch(0.0) == ()
        assert [group.key for group in plan.waiting()] == ["a"]
        plan.offer(members("a", 2), 5.0)
        assert plan.next_batch(5.0) == ((1, 2, 3),)

    def test_another_complete_member_takes_the_place_of_one_that_is_lost(self) -> None:
        plan = group_plan(batch_size=1)
        plan.offer(members("a", 1, 2, 3, 4), 0.0)
        plan.lose(2, "a", 0.0)
        assert plan.next_batch(0.0) == ((1, 3, 4),)

    def test_wait_waits_for_ever(self) -> None:
        plan = group_plan()
        plan.offer(members("a", 1, 2), 0.0)
        assert plan.next_batch(10**9) == ()
        assert plan.give_up(10**9) == ()
        assert plan.due_at() is None

    def test_deliver_delivers_what_there_is_after_the_timeout_without_progress(self) -> None:
        plan = group_plan(partial=PartialGroups.DELIVER, linger_seconds=0.0)
        plan.offer(members("a", 1), 0.0)
        plan.offer(members("a", 2), 60.0)
        assert plan.next_batch(100.0) == ()
        assert plan.due_at() == 160.0
        assert plan.give_up(160.0) == ()
        assert plan.next_batch(160.0) == ((1, 2),)
        publish(plan, (1, 2), at=160.0)
        assert plan.offer(members("a", 3), 161.0) == (3,)

    def test_reject_gives_the_members_up_after_the_timeout(self) -> None:
        plan = group_plan(partial=PartialGroups.REJECT)
        plan.offer(members("a", 1, 2), 0.0)
        assert plan.give_up(99.9) == ()
        assert [list(group.complete) for group in plan.give_up(100.0)] == [[1, 2]]

    def test_a_lost_member_is_not_waited_for(self) -> None:
        plan = group_plan(partial=PartialGroups.DELIVER, linger_seconds=0.0)
        plan.offer(members("a", 1, 2), 0.0)
        plan.lose(3, "a", 1.0)
        plan.give_up(1.0)
        assert plan.next_batch(1.0) == ((1, 2),)


class TestAbsence:
    def test_two_still_passes_fifty_milliseconds_apart_make_a_file_missing(self) -> None:
        absence = Absence()
        assert absence.passed({"a"}, at=0.0, still=True) == ()
        assert absence.passed({"a"}, at=0.03, still=True) == ()
        assert absence.passed({"a"}, at=0.05, still=True) == ("a",)

    def test_a_pass_during_which_something_changed_proves_nothing(self) -> None:
        absence = Absence()
        assert absence.passed({"a"}, at=0.0, still=False) == ()
        assert absence.passed({"a"}, at=1.0, still=True) == ()
        assert absence.passed({"a"}, at=1.2, still=False) == ()
        assert absence.passed({"a"}, at=1.3, still=True) == ("a",)

    def test_ten_passes_over_ten_seconds_do_even_when_nothing_is_ever_still(self) -> None:
        absence = Absence()
        results = [absence.passed({"a"}, at=float(n), still=False) for n in range(11)]
        assert results == [()] * 10 + [("a",)]

    def test_a_file_that_turns_up_again_is_forgotten(self) -> None:
        absence = Absence()
        absence.passed({"a"}, at=0.0, still=True)
        absence.passed((), at=0.1, still=True)
        assert not absence
        assert absence.passed({"a"}, at=0.2, still=True) == ()


def test_a_missing_row_is_overdue_after_its_time_counted_from_the_first_sight() -> None:
    overdue = Overdue(seconds=10.0)
    overdue.seen([1, 2], 0.0)
    overdue.seen([1], 9.0)
    overdue.drop([2])
    assert overdue.due(9.9) == ()
    assert overdue.due_at() == 10.0
    assert overdue.due(10.0) == (1,)


def test_pauses_grow_up_to_the_longest_and_begin_again() -> None:
    backoff = Backoff(first=1.0, longest=5.0)
    assert [backoff.failed(0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.succeeded()
    assert backoff.failed(7.0) == 1.0
    assert backoff.until == 8.0


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({}, None),
        ({"batches": 64}, "max_pending_batches"),
        ({"size_bytes": 1000}, "max_pending_bytes"),
        ({"free_bytes": 9}, "min_free_bytes"),
        ({"batches": 63, "size_bytes": 999, "free_bytes": 10}, None),
    ],
)
def test_reading_stops_at_each_mark(facts: dict[str, int], code: str | None) -> None:
    usual = {"batches": 0, "size_bytes": 0, "free_bytes": 100}
    marks = {"max_batches": 64, "max_bytes": 1000, "min_free_bytes": 10}
    over = pressure(**(usual | facts), **marks)
    assert (over.code if over else None) == code
