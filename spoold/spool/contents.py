"""What a batch file delivers, by its bytes."""

from __future__ import annotations

import hashlib

from spoold import codec
from spoold.errors import BatchCorrupt
from spoold.layout import BatchName
from spoold.ledger import Entry

__all__ = ["entry_of"]


def entry_of(name: BatchName, data: bytes) -> Entry:
    """Return the ledger entry that a batch has when it is acked.

    Raises BatchCorrupt where the bytes are not those that the name was given for, or no samples.
    """
    if hashlib.sha256(data).hexdigest()[:12] != name.digest:
        raise BatchCorrupt("its bytes do not fit the digest in its name")
    refs = codec.environment_refs(data)
    environments = tuple(dict.fromkeys(ref.environment for ref in refs))
    env_ids = {ref.environment: ref.env_id for ref in refs}
    return Entry(environments, env_ids[max(environments)])
