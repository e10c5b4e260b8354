"""Whether a database is the one that was delivered from. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pyroaring import BitMap64

from spoold.errors import SourceReplaced

__all__ = ["verified"]

_HINT = "on_replaced says what becomes of the old spool"


def verified(
    where: str,
    *,
    remembered: Mapping[int, str],
    found: Mapping[int, str],
    highest: int,
    given: int | None,
) -> BitMap64:
    """Return those of `remembered` whose row is gone: that alone is no replacement.

    `remembered` and `found`: env_id by environment id, of what was delivered or set aside and of
    what is there; `highest`: the highest such id; `given`: the highest ever given, None where
    nothing tells.
    Raises SourceReplaced where ids went backwards or an env_id belongs to another row.
    """
    if given is not None and given < highest:
        raise SourceReplaced(
            f"{where} has given ids up to {given}, and environment {highest} was delivered from "
            "here, or set aside",
            hint=_HINT,
        )
    for environment, env_id in found.items():
        if env_id != remembered[environment]:
            raise SourceReplaced(
                f"{where}: environment {environment} is another one than the one that was "
                "delivered from here, or set aside",
                hint=_HINT,
            )
    return BitMap64(remembered.keys() - found.keys())
