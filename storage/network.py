"""Find out whether a path lies on a network file system.

SQLite's write-ahead log needs shared memory between its processes, which no network file system
gives; a database there is damaged sooner or later, so it is refused before anything is written.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpo.errors import InputError

# Kernel names and FUSE names; https://www.sqlite.org/wal.html, section 1, names the limit.
NETWORK_TYPES = frozenset(
    "nfs nfs3 nfs4 cifs smb2 smb3 smbfs ncpfs afs coda lustre gpfs beegfs ceph glusterfs orangefs "
    "pvfs2 panfs davfs sshfs fuse.sshfs fuse.glusterfs fuse.ceph fuse.ceph-fuse fuse.s3fs "
    "fuse.gcsfuse fuse.rclone fuse.juicefs fuse.davfs2 fuse.mfs fuse.moosefs fuse.beegfs "
    "fuse.smbnetfs fuse.goofys fuse.mount-s3".split()
)


def refuse_network_path(path: str | os.PathLike[str], mounts: str | None = None) -> None:
    """Refuse a path on a network file system.

    `mounts` is a mount table in the form of /proc/mounts; the machine's own by default.

    Raises:
        InputError: the mount point, its type and what to use instead.
    """
    found = _mount_of(os.path.realpath(path), _own_mounts() if mounts is None else mounts)
    if found is None or found[1] not in NETWORK_TYPES:
        return
    point, kind = found
    raise InputError(
        f"storage '{path}': {point} is a network file system ({kind}), where a SQLite database "
        "used by several processes is damaged; put it on a local disk, or give a postgresql:// URL"
    )


def _own_mounts() -> str:
    table = Path("/proc/self/mounts")
    return table.read_text(errors="surrogateescape") if table.exists() else ""


def _mount_of(real_path: str, mounts: str) -> tuple[str, str] | None:
    """Return mount point and type of the longest mount point above the path."""
    best: tuple[str, str] | None = None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = _unescape(fields[1])
        inside = point == "/" or real_path == point or real_path.startswith(point + "/")
        # A later line of equal length is mounted over the earlier one.
        if inside and (best is None or len(point) >= len(best[0])):
            best = point, fields[2]
    return best


def _unescape(field: str) -> str:
    r"""Turn the table's octal escapes (\040 is a blank) into characters."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field
