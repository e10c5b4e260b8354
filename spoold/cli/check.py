"""`spoold check`: read everything, list what is not as it should be, put right what is safe."""

from __future__ import annotations

import json
from typing import Any

import click

from spoold import fs
from spoold.cli.words import counted, debug_option, json_option, printable, run_dir_argument, say
from spoold.errors import EX_BAD_SPOOL
from spoold.layout import RunDir
from spoold.spool import check as checking
from spoold.spool import setup
from spoold.spool.check import Finding, Report
from spoold.spool.overview import open_run_dir, shown

__all__ = ["check"]


@click.command()
@run_dir_argument
@json_option
@click.option("--repair", is_flag=True, help="Put right what is safe; not while a daemon runs.")
@debug_option
@click.pass_context
def check(ctx: click.Context, run_dir: str, as_json: bool, repair: bool) -> None:
    """Read every batch, note and ledger entry, and list what is not as it should be.

    One line a finding: what, where, and what to do. Nothing is changed without --repair, and
    --repair does only what loses and doubles nothing. Exits 65 when a finding is left.
    """
    run = open_run_dir(run_dir)
    report, mended = _repair(run) if repair else (checking.look(run), [])
    left = [finding for finding in report.findings if finding not in mended]
    if as_json:
        click.echo(json.dumps(_as_dict(run, report, mended), indent=1))
    else:
        for finding in report.findings:
            click.echo(printable(_line(finding, was_mended=finding in mended, repair=repair)))
        read = f"{counted(report.batches, 'batch')} and {counted(report.entries, 'ledger file')}"
        words = f"{counted(len(left), 'finding')} left" if left else "all is well"
        say(f"{read} read: {words}")
    if left:
        ctx.exit(EX_BAD_SPOOL)


def _repair(run: RunDir) -> tuple[Report, list[Finding]]:
    """Look and mend under the daemon's lock. Raises SpoolLocked while a daemon runs."""
    fs.make_dirs(run.house)
    lock = setup.lock_run(run)
    if lock is None:
        raise setup.locked_by(run)
    try:
        report = checking.look(run)
        mended = []
        for finding in report.findings:
            if finding.mend is not None:
                finding.mend()
                mended.append(finding)
        return report, mended
    finally:
        lock.release()


def _line(finding: Finding, *, was_mended: bool, repair: bool) -> str:
    what = f"{finding.code}: {shown(finding.path)} {finding.text}"
    if was_mended:
        return f"{what}; mended"
    hint = "" if finding.mend is None or repair else " (--repair does that)"
    return f"{what}; {finding.remedy}{hint}"


def _as_dict(run: RunDir, report: Report, mended: list[Finding]) -> dict[str, Any]:
    return {
        "format": 1,
        "run_dir": run.root,
        "batches": report.batches,
        "ledger_files": report.entries,
        "findings": [
            {
                "code": finding.code,
                "path": shown(finding.path),
                "text": finding.text,
                "remedy": finding.remedy,
                "safe": finding.mend is not None,
                "mended": finding in mended,
            }
            for finding in report.findings
        ],
    }
