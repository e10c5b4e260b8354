"""The whole thing in fifteen seconds: rollouts, spool and trainer as processes, and two kills.

    spoold demo [DIR]

    DIR/rollouts.db          written live by `spoold.demo.writer`
    DIR/run/                 the run directory, filled by the real daemon
    DIR/checkpoint.json      what `spoold.demo.trainer` has learned: the samples that it saw
    DIR/{writer,daemon,trainer}.log

`writer` and `trainer` are small on purpose: they show how a rollout database is filled and how a
trainer is written. `account` says at the end, from the database and the files alone, whether each
completed environment arrived once. Where is what: `stage` is the course of events, `screen` what is
printed, `children` the processes, `database` the tables.
"""

from __future__ import annotations

__all__ = ["run"]


def run(folder: str | None) -> int:
    """Play the demo in `folder` and return the exit code: 0 when the account is clean.

    None takes the first free one of ./spoold-demo, ./spoold-demo-2, …. Nothing that is there is
    ever removed. Raises ConfigError when the folder is not empty, SpooldError when a process of the
    demo ended that should not have.
    """
    from spoold.demo.stage import play

    return play(folder)
