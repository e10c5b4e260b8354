"""Shards: the run directories of N daemons together hold each environment once."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spoold.config import load
from spoold.errors import ConfigError
from spoold.model import ReadyWhen, Samples
from spoold.policy import shards
from spoold.policy.shards import WHOLE, Shard, number_of
from spoold.sources import Source, open_source
from spoold.sources.share import ASKED_ANEW, Share
from spoold.sources.sqlite import SqliteSource
from spoold.spool import setup
from tests.support.batches import tree
from tests.support.commands import spoold, spoold_process
from tests.support.daemons import Running, environments, mv, running, start
from tests.support.postgres import STYLES, postgres_rollouts
from tests.support.rollouts import JOB, Rollouts, make_rollouts
from tests.support.servers import postgres_server

NOTHING = BitMap64()
README = Path(__file__).parent.parent / "README.md"
TEXTS = st.text(max_size=12)

# ---- the hash, to the byte -----------------------------------------------------------------------

VECTORS = [
    ("job-1", "group-7", "ignored", 0xEBB29472D07D),
    ("job-1", "g1", "", 0x5EA6E6A57C98),
    ("job-1", "", "3f0c2a51-0b5e-4b7e-9a55-1f6f3c1d2e4a", 0x1DE0BCC7CD54),
    ("jöb", "数学", "", 0x219D24D4F966),
    ("j", "", "g", 0xFC97477DE7AE),
]


@pytest.mark.parametrize(("job", "group", "env_id", "number"), VECTORS)
def test_the_number_of_an_environment_is_as_documented(
    job: str, group: str, env_id: str, number: int
) -> None:
    assert number_of(job, group, env_id) == number


def test_the_numbers_in_the_documentation_are_true() -> None:
    written = re.findall(
        r"^ +(\S+) +(\S+) +(\S+) +(\d+)  (\d)$", shards.__doc__ or "", re.MULTILINE
    )
    assert len(written) == 4
    for job, group, env_id, number, owner in written:
        assert number_of(job, group.replace("none", ""), env_id) == int(number)
        assert int(number) % 3 == int(owner)


@pytest.mark.parametrize("text", [shards.__doc__, README.read_text()], ids=["module", "README"])
def test_the_command_in_the_documentation_computes_the_same(text: str) -> None:
    (line,) = re.findall(r"^ *(echo .*sha256sum.*)$", text, re.MULTILINE)
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == number_of("job-1", "group-7", "") % 3


@given(job=TEXTS, group=TEXTS, env_id=TEXTS, count=st.integers(1, 100))
def test_each_environment_belongs_to_one_shard_of_n(
    job: str, group: str, env_id: str, count: int
) -> None:
    owners = [i for i in range(count) if Shard(i, count).owns(job, group, env_id)]
    assert len(owners) == 1


@given(job=TEXTS, group=TEXTS.filter(bool), one=TEXTS, other=TEXTS)
def test_a_group_is_never_split(job: str, group: str, one: str, other: str) -> None:
    assert number_of(job, group, one) == number_of(job, group, other)


def test_an_env_id_is_not_taken_for_the_group_of_that_name() -> None:
    assert number_of("job-1", "x", "") != number_of("job-1", "", "x")


def test_shards_are_about_equal_where_there_are_many_groups() -> None:
    counts = [0] * 7
    for group in range(7_000):
        counts[number_of("job-1", f"group-{group}", "") % 7] += 1
    assert min(counts) > 850
    assert max(counts) < 1150


# ---- the setting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0/1", "0/3", "2/3", "11/12"])
def test_a_shard_is_written_as_it_is_read(text: str) -> None:
    assert str(Shard.parse(text)) == text


@pytest.mark.parametrize(
    "value",
    ["3", "3/3", "4/3", "0/0", "-1/2", "1/-2", "01/3", " 1/3", "1/3\n", "1/ 3", "٣/٤", "a/b"],
)
def test_what_is_no_shard_is_refused_with_setting_value_origin_and_what_is_allowed(
    value: str,
) -> None:
    given = {"db": "x", "run_dir": "y"}
    wanted = r"shard cannot be .* \(given {}\); it is a text I/N, 0 ≤ I < N: of three shards 0/3, "
    with pytest.raises(ConfigError, match=wanted.format("by --shard")):
        load(None, {**given, "shard": value}, {})
    with pytest.raises(ConfigError, match=wanted.format("in SPOOLD_SHARD")):
        load(None, given, {"SPOOLD_SHARD": value})


@pytest.mark.parametrize("value", ["3", "true", "[0, 3]", '"3/3"', "0.5"])
def test_what_is_no_shard_in_a_file_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "exp7.toml"
    file.write_text(f'db = "x"\nrun_dir = "y"\nshard = {value}\n')
    with pytest.raises(ConfigError, match=f"shard cannot be .*given in {re.escape(str(file))}"):
        load(str(file), {}, {})


def test_config_show_writes_the_shard_as_a_file_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "exp7.toml"
    file.write_text('db = "x"\nrun_dir = "y"\nshard = "1/3"\n')
    shown = spoold(capsys, "config", "show", "--config", file).out
    assert re.search(rf'^shard = "1/3" +# {re.escape(str(file))}$', shown, re.MULTILINE)
    assert load(str(file), {}, {}).shard == Shard(1, 3)
    assert load(None, {"db": "x", "run_dir": "y"}, {}).shard == WHOLE


# ---- the source ----------------------------------------------------------------------------------


def opened(path: Path, shard: Shard, gate: ReadyWhen = ReadyWhen.FINISHED) -> SqliteSource:
    source = opened_at(str(path), shard, gate)
    assert isinstance(source, SqliteSource)
    return source


def opened_at(url: str, shard: Shard, gate: ReadyWhen = ReadyWhen.FINISHED) -> Source:
    source = open_source(url, job=JOB, ready_when=gate, samples=Samples.TERMINAL, shard=shard)
    source.open()
    return source


FACTS = st.fixed_dictionaries(
    {
        "group": st.sampled_from(["a", "b", "c", "d", "", None, "数学"]),
        "job": st.sampled_from([JOB, JOB, JOB, "other"]),
        "act": st.sampled_from(["none", "step", "end", "complete", "finish"]),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    before=st.lists(FACTS, max_size=12),
    after=st.lists(FACTS, max_size=12),
    count=st.integers(1, 4),
    gate=st.sampled_from([ReadyWhen.FINISHED, ReadyWhen.TERMINAL]),
    few=st.sampled_from([1, 256]),
)
def test_what_n_shards_find_is_what_one_source_finds_of_everything(
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    count: int,
    gate: ReadyWhen,
    few: int,
) -> None:
    """By looks and by reconciles, in all that a source says of environments.

    `few`: up to how many ids a slice is asked for one by one, and not as a range.
    """
    with tempfile.TemporaryDirectory() as folder, patch("spoold.sources.sqlite._FEW", few):
        path = Path(folder, "rollout.db")
        rollouts = make_rollouts(path)
        _compare(rollouts, str(path), before, after, count, gate)
        rollouts.close()


@pytest.mark.parametrize("style", STYLES)
def test_what_n_shards_find_in_postgresql_is_what_one_source_finds_of_everything(
    style: str,
) -> None:
    server = postgres_server()

    @settings(max_examples=15, deadline=None)
    @given(
        before=st.lists(FACTS, max_size=12),
        after=st.lists(FACTS, max_size=12),
        count=st.integers(1, 4),
        gate=st.sampled_from([ReadyWhen.FINISHED, ReadyWhen.TERMINAL]),
    )
    def check(
        before: list[dict[str, Any]], after: list[dict[str, Any]], count: int, gate: ReadyWhen
    ) -> None:
        with postgres_rollouts(server, style=style) as rollouts:
            _compare(rollouts, rollouts.url, before, after, count, gate)

    check()


def _compare(
    rollouts: Rollouts,
    url: str,
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    count: int,
    gate: ReadyWhen,
) -> None:
    rollouts.register(group="first")
    every = [
        opened_at(url, WHOLE, gate),
        *(opened_at(url, Shard(i, count), gate) for i in range(count)),
    ]
    registered = _act(rollouts, before)
    found = [_say(source, by_look=True) for source in every]
    _same(found, registered)
    registered |= _act(rollouts, after)
    for by_look in (True, False, False):
        found = [_say(source, by_look=by_look) for source in every]
        _same(found, registered)
    for source in every:
        source.close()


def _act(rollouts: Rollouts, environments: list[dict[str, Any]]) -> dict[int, str]:
    groups = {}
    for facts in environments:
        (one,) = rollouts.register(group=facts["group"], job=facts["job"])
        groups[one] = facts["group"] or ""
        if facts["act"] == "finish":
            rollouts.finish(one)
        elif facts["act"] != "none":
            getattr(rollouts, facts["act"])(one)
    return groups


def _say(source: SqliteSource, *, by_look: bool) -> dict[str, Any]:
    looks = [source.look(NOTHING)] if by_look else list(source.reconcile(NOTHING))
    return {
        "candidates": [c.id for look in looks for c in look.candidates],
        "missing": sorted({one for look in looks for one in look.missing} | set(source.missing)),
        "running": source.running,
    }


def _same(found: list[dict[str, Any]], groups: dict[int, str]) -> None:
    whole, parts = found[0], found[1:]
    for what in ("candidates", "missing"):
        assert sorted(one for part in parts for one in part[what]) == whole[what]
    assert sum(part["running"] for part in parts) == whole["running"]
    for part in parts:
        own = {groups[one] for one in part["candidates"] if groups.get(one)}
        others = {groups[one] for one in whole["candidates"] if one not in part["candidates"]}
        assert own.isdisjoint(others)


def many_groups(rollouts: Rollouts, groups: int, *, of: int = 1) -> list[list[int]]:
    with rollouts.together():
        return [rollouts.register(of, group=f"group-{number}") for number in range(groups)]


def belongs(group: int, shard: Shard) -> bool:
    return shard.owns(JOB, f"group-{group}", "")


@pytest.fixture
def rollouts(tmp_path: Path) -> Any:
    made = make_rollouts(tmp_path / "rollout.db")
    yield made
    made.close()


def test_each_environment_is_hashed_once_however_often_it_is_looked_at(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counting(job: str, group: str, env_id: str) -> int:
        hashed.append(env_id)
        return number_of(job, group, env_id)

    monkeypatch.setattr(shards, "number_of", counting)
    ids = [one for group in many_groups(rollouts, 60) for one in group]
    source = opened(tmp_path / "rollout.db", Shard(1, 3))
    for _ in range(3):
        with rollouts.together():
            for one in ids:
                rollouts.step(one)
        source.look(NOTHING)
    assert len(hashed) == len(set(hashed)) == 60
    list(source.reconcile(NOTHING))
    source.look(NOTHING)
    # The reconcile asks again for the first of those that it has known for longest.
    assert len(hashed) == 120
    source.close()


def test_a_reconcile_passes_over_what_is_known_to_belong_to_others(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(1, 3)
    groups = many_groups(rollouts, 30, of=2)
    with rollouts.together():
        for one, _ in groups:
            rollouts.complete(one)
    source = opened(tmp_path / "rollout.db", shard)
    list(source.reconcile(NOTHING))
    monkeypatch.setattr(Share, "doubt", lambda self: None)
    statements: list[str] = []
    connection = source._database._connection  # type: ignore[union-attr]
    assert connection is not None
    connection.set_trace_callback(statements.append)
    list(source.reconcile(NOTHING))
    (asked,) = [
        re.findall(r"json_each\('(.*?)'\)", each)[0] for each in statements if "json_each" in each
    ]
    own = [one for group, pair in enumerate(groups) if belongs(group, shard) for one in pair]
    assert [one for one in json.loads(asked) if one <= groups[-1][-1]] == own
    source.close()


def test_what_is_known_of_others_is_doubted_in_turn_so_that_no_error_stays() -> None:
    share = Share(Shard(0, 2), job=JOB)
    far = 3 * ASKED_ANEW
    moved = next(n for n in range(100) if not Shard(0, 2).owns(JOB, f"{n}", ""))
    other = next(n for n in range(100) if Shard(0, 2).owns(JOB, f"{n}", ""))
    assert not share.owns(far, f"{moved}", "e")
    assert not share.owns(far, f"{other}", "e")
    for _ in range(4):
        share.doubt()
    assert share.owns(far, f"{other}", "e")


def test_new_rows_of_delivered_environments_are_told_by_their_own_shard_alone(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    groups = many_groups(rollouts, 12)
    parts = [Shard(i, 2) for i in range(2)]
    sources = [opened(tmp_path / "rollout.db", shard) for shard in parts]
    skips = [
        BitMap64([one for group, (one,) in enumerate(groups) if belongs(group, shard)])
        for shard in parts
    ]
    for (one,) in groups:
        rollouts.step(one)
    for source, skip in zip(sources, skips, strict=True):
        assert source.look(skip).late == tuple(skip)
        assert source.running == 0
        source.close()


def test_a_database_made_anew_is_dealt_out_anew(tmp_path: Path, rollouts: Rollouts) -> None:
    shard = Shard(0, 2)
    names = [next(n for n in range(99) if belongs(n, shard) is own) for own in (False, True)]
    path = tmp_path / "rollout.db"
    (one,) = rollouts.register(group=f"group-{names[0]}")
    rollouts.complete(one)
    source = opened(path, shard)
    assert [c for look in source.reconcile(NOTHING) for c in look.candidates] == []
    source.close()
    rollouts.close()
    for file in list(tmp_path.glob("rollout.db*")):
        file.rename(tmp_path / f"old-{file.name}")  # unlinked, their inodes might be used again
    anew = make_rollouts(path)
    (one,) = anew.register(group=f"group-{names[1]}")
    source.open()
    anew.complete(one)
    assert [c.id for c in source.look(NOTHING).candidates] == [one]
    source.close()
    anew.close()


# ---- the daemons ---------------------------------------------------------------------------------


def started(tmp_path: Path, shard: str, **options: Any) -> Running:
    run_dir = f"{tmp_path}/run-{shard.replace('/', '-of-')}"
    return start(tmp_path, shard=shard, run_dir=run_dir, **options)


def test_three_daemons_deliver_each_environment_once_and_no_group_is_split(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    daemons = [started(tmp_path, f"{i}/3", group_size=2) for i in range(3)]
    groups = many_groups(rollouts, 20, of=2)
    alone = rollouts.register(10, group="")
    for one, _ in groups:
        rollouts.complete(one)
    for one in alone:
        rollouts.complete(one)
    for it in daemons:
        it.go(5.0)
    for _, other in groups:
        rollouts.complete(other)
    for it in daemons:
        it.go(5.0)
    held = [environments(it.run) for it in daemons]
    assert sorted(one for each in held for one in each) == sorted([*chain(*groups), *alone])
    assert all(held)
    for group, pair in enumerate(groups):
        (owner,) = [i for i in range(3) if belongs(group, Shard(i, 3))]
        assert set(pair) <= set(held[owner])
    for it in daemons:
        it.kill()


def test_a_member_that_completes_late_is_noted_by_the_shard_of_its_group_alone(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    daemons = [started(tmp_path, f"{i}/2", group_size=2) for i in range(2)]
    groups = many_groups(rollouts, 8, of=3)
    for one, other, _ in groups:
        rollouts.complete(one)
        rollouts.complete(other)
    for it in daemons:
        it.go(5.0)
    for *_, late in groups:
        rollouts.complete(late)
    for i, it in enumerate(daemons):
        it.go(5.0)
        notes = list(tree(it.run, "rejected"))
        own = [late for group, (*_, late) in enumerate(groups) if belongs(group, Shard(i, 2))]
        assert notes == sorted(f"rejected/env-{late}.late.json" for late in own)
        it.kill()


def test_numbers_of_status_are_of_the_shard(tmp_path: Path, rollouts: Rollouts) -> None:
    groups = many_groups(rollouts, 10)
    for (one,) in groups:
        rollouts.step(one)
    total = 0
    for i in range(2):
        it = started(tmp_path, f"{i}/2")
        it.go(5.0)
        status = it.status
        assert status.shard == f"{i}/2"
        total += status.source.running
        it.kill()
    assert total == 10


def test_status_names_the_shard_and_how_to_start_its_daemon(
    tmp_path: Path, rollouts: Rollouts, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts.register()
    it = started(tmp_path, "1/3")
    it.go(5.0)
    it.kill()
    said = " ".join(spoold(capsys, "status", it.run.root).out.split())
    assert f"job {JOB}, shard 1/3, sqlite:" in said
    assert " --shard 1/3 --run-dir " in said
    assert json.loads(spoold(capsys, "status", it.run.root, "--json").out)["said"]["shard"] == "1/3"


# ---- identity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("was", "now"), [("0/3", "1/3"), ("0/3", "0/2"), ("0/3", ""), ("", "0/3")])
def test_another_shard_on_a_used_run_directory_is_refused_and_nothing_is_changed(
    tmp_path: Path, rollouts: Rollouts, was: str, now: str
) -> None:
    (one,) = rollouts.register(group="group-7")
    rollouts.complete(one)
    args = ["run", "--once", "--db", tmp_path / "rollout.db", "--run-dir", tmp_path / "run"]
    args += ["--min-free-bytes=0"]
    assert spoold_process(*args, *(["--shard", was] if was else [])).code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    ran = spoold_process(*args, *(["--shard", now] if now else []))
    assert ran.code == 78
    was, now = was or "0/1", now or "0/1"
    assert f"/run belongs to shard {was}, not to {now}; give --shard {was}, or" in ran.err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_another_shard_is_refused_though_the_database_is_not_there(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    rollouts.register()
    args = ["run", "--once", "--run-dir", tmp_path / "run", "--min-free-bytes=0"]
    assert spoold_process(*args, "--db", tmp_path / "rollout.db", "--shard", "0/2").code == 0
    assert spoold_process(*args, "--db", tmp_path / "gone.db", "--shard", "1/2").code == 78


def test_a_shard_is_recorded_so_that_a_spoold_without_shards_refuses(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    rollouts.register()
    for shard, wanted in (("0/1", {"format": 1}), ("1/2", {"format": 2, "shard": "1/2"})):
        it = started(tmp_path, shard)
        it.go()
        facts = json.loads(Path(it.run.source_json).read_bytes())
        assert facts == {**wanted, "job": JOB, "url": f"sqlite:///{tmp_path}/rollout.db"}
        assert (setup.read_source(it.run) or {})["shard"] == shard
        it.kill()


def test_a_replaced_database_is_delivered_by_the_same_shard(
    tmp_path: Path, rollouts: Rollouts
) -> None:
    shard = Shard(0, 2)
    groups = many_groups(rollouts, 6)
    for (one,) in groups:
        rollouts.complete(one)
    it = started(tmp_path, str(shard), batch_size=1)
    it.go(5.0)
    mv(it.run, tree(it.run)[0], "acked")
    it.go(5.0)
    rollouts.close()
    for file in tmp_path.glob("rollout.db*"):
        file.unlink()
    anew = make_rollouts(tmp_path / "rollout.db")
    groups = many_groups(anew, 12)
    for (one,) in groups:
        anew.complete(one)
    it.go(30.0)
    own = [one for group, (one,) in enumerate(groups) if belongs(group, shard)]
    assert environments(it.run, "pending") == own
    assert (setup.read_source(it.run) or {})["shard"] == "0/2"
    (retired,) = Path(it.run.retired).iterdir()
    old = json.loads((retired / ".spoold/source.json").read_bytes())
    assert old["shard"] == "0/2"
    it.kill()
    anew.close()


def test_a_shard_changes_only_at_a_restart(tmp_path: Path, rollouts: Rollouts) -> None:
    from spoold.config import reloaded

    rollouts.register()
    with running(tmp_path) as it:
        old = it.daemon.settings
        outcome = reloaded(old, old.model_copy(update={"shard": Shard(0, 2)}))
        assert (outcome.settings.shard, outcome.needs_restart) == (WHOLE, ("shard",))
