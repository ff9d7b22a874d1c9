"""The source of the modules that studies were run from, kept once for each text.

A file may be edited after a run; what a registered result was made with must not change with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from sqlalchemy import Connection, select

from storage.columns import utc_now
from storage.link import Link
from storage.schema import sources


def digest_of(files: Mapping[str, str]) -> str:
    """Return the sha256 that stands for some files, by their names and texts."""
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


class Sources:
    """The source files of studies: a name with slashes and the text of each."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def put(self, files: Mapping[str, str]) -> str:
        """Keep some files, if they are not there yet, and return their digest."""
        digest = digest_of(files)

        def work(connection: Connection) -> None:
            there = select(sources.c.digest).where(sources.c.digest == digest)
            if connection.execute(there).first() is None:
                connection.execute(sources.insert(), {
                    "digest": digest, "files": dict(files), "created_at": utc_now()})

        if self.get(digest) is None:
            self._link.write(work)
        return digest

    def get(self, digest: str | None) -> dict[str, str] | None:
        """Return the files of a digest, or None where they were never kept."""
        query = select(sources.c.files).where(sources.c.digest == digest)
        return self._link.read(lambda c: c.execute(query).scalar_one_or_none())
