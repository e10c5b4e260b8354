r"""Which of N daemons an environment belongs to. Pure.

Environments are dealt out by a hash that every program can compute. All members of a group go to
one shard, whatever `group_size` is; an environment without a group goes by itself:

    text    job id, a zero byte, then "g" and the group id, or "e" and the env id where there is no
            group (null or ""); in UTF-8
    number  the first 12 hex digits of its SHA-256
    shard   number modulo N

Twelve digits are exact as a double, and positive in 64 bits:

    echo $((16#$(printf 'job-1\0ggroup-7' | sha256sum | cut -c-12) % 3))

    job     group    env id                                number           of 3
    job-1   group-7  any                                   259152227258493  0
    job-1   g1       any                                   104070927187096  1
    job-1   none     3f0c2a51-0b5e-4b7e-9a55-1f6f3c1d2e4a   32851077090644  2
    jöb     数学     any                                    36958811519334  0

So long as job, group id and env id stay as they were registered, each environment is in exactly one
of 0/N to N-1/N. Nothing balances the shards: they are about equal where there are many groups.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

__all__ = ["WHOLE", "Shard", "number_of"]

_DIGITS: Final = 12
_WRITTEN: Final = re.compile(r"(0|[1-9][0-9]{0,8})/([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part `index` of `count`, counted from 0. Written `1/3`; all there is is `0/1`."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `I/N`. Raises ValueError unless 0 ≤ I < N, both in plain digits."""
        written = _WRITTEN.fullmatch(text)
        if written is None or int(written[1]) >= int(written[2]):
            raise ValueError(f"{text!r} is no shard")
        return cls(int(written[1]), int(written[2]))

    @property
    def is_whole(self) -> bool:
        """Whether every environment belongs to it."""
        return self.count == 1

    def owns(self, job: str, group: str, env_id: str) -> bool:
        """Whether an environment belongs to it. `group` is "" where there is none."""
        return number_of(job, group, env_id) % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE: Final = Shard(0, 1)


def number_of(job: str, group: str, env_id: str) -> int:
    """Return the number of an environment that is dealt out; the same for all of a group."""
    key = f"{job}\0g{group}" if group else f"{job}\0e{env_id}"
    return int(hashlib.sha256(key.encode()).hexdigest()[:_DIGITS], 16)
