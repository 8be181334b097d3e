"""The folders of the user's cache, which are its user's alone: what lies in that of compiled programs is run by whoever
reads it, and what lies in that of solve rates decides what is trained on.

A program that is kept is machine code, and ours are pickles besides. So nobody else may be able to put one there: neither
into the folder, nor in its place by a folder around it or by a link on the way.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

from agent_tunix.errors import UserError

WRITE, ENTER = 0o2, 0o1  # of the permissions of one class of users
LINKS = 40  # that the system follows on one way


def of_user(name: str) -> Path:
    """Where a folder of the cache is; raises a RuntimeError for a user who has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-tunix" / name


def open_for_one(folder: Path) -> None:
    """Makes the folder, for this user alone; raises a UserError where others may write to it, or it cannot be made."""
    try:
        if not os.path.lexists(folder):
            _walk(folder)
            for place in reversed([folder, *folder.parents]):
                if not place.exists():
                    place.mkdir(mode=0o700, exist_ok=True)
        if _walk(folder):
            return
        for path in folder.iterdir():
            _refuse_foreign(path, path.lstat())
        with contextlib.suppress(OSError):  # a disk that knows no permissions; it is looked through again next time
            folder.chmod(0o700)
    except OSError as fault:
        raise UserError(f"{fault.filename or folder}: {fault.strerror}") from fault


def _walk(folder: Path) -> bool:
    """Goes the way to a folder as the system does, link by link, as far as it is there; refuses what others may change.

    Returns whether others are shut out of the folder, by its own permissions or by those of one around it.
    """
    ahead, way, links = [*reversed(folder.absolute().parts)], [(Path(), False)], 0
    while ahead:
        (here, shut), name = way[-1], ahead.pop()
        if name == "..":  # of a link's target; `here` has no links in it
            way = way[: max(2, len(way) - 1)]
            continue
        if not os.path.lexists(place := here / name):
            return False
        found = place.lstat()
        if stat.S_ISLNK(found.st_mode):
            if (links := links + 1) > LINKS:
                raise UserError(f"{place} is one of too many links")
            _refuse_owner(place, found, or_root=True)
            target = Path(os.readlink(place))
            way = way[:1] if target.is_absolute() else way
            ahead += reversed(target.parts)
            continue
        if not stat.S_ISDIR(found.st_mode):
            raise UserError(f"{place} is not a folder")
        _refuse_owner(place, found, or_root=bool(ahead))
        sticky = ahead and found.st_mode & stat.S_ISVTX  # there, what is one's own stays where it is
        if _others_may(WRITE | ENTER, found) and not shut and not sticky:
            raise UserError(f"others may write to {place}")
        way.append((place, shut or not _others_may(ENTER, found)))
    return way[-1][1]


def _refuse_foreign(path: Path, found: os.stat_result) -> None:
    """Refuses what another may have put into a folder that others can look into, or may write to."""
    _refuse_owner(path, found)
    if stat.S_ISLNK(found.st_mode):
        raise UserError(f"{path} is a link")
    if _others_may(WRITE, found):
        raise UserError(f"others may write to {path}")


def _refuse_owner(path: Path, found: os.stat_result, or_root: bool = False) -> None:
    if found.st_uid != os.geteuid() and not (or_root and found.st_uid == 0):
        with contextlib.suppress(KeyError):  # one without a name
            raise UserError(f"{path} belongs to {pwd.getpwuid(found.st_uid).pw_name}")
        raise UserError(f"{path} belongs to user {found.st_uid}")


def _others_may(do: int, found: os.stat_result) -> bool:
    """Whether the permissions of a file let anybody else do all of this; a group in which there is nobody else is no one."""
    classes = [found.st_mode, *([] if _is_of_one(found.st_gid) else [found.st_mode >> 3])]
    return any(mode & do == do for mode in classes)


def _is_of_one(group: int) -> bool:
    """Whether it is this user's own group, as many systems make one of the same name for each user."""
    with contextlib.suppress(KeyError):
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return 0 != user.pw_gid == group and members.gr_name == user.pw_name and {*members.gr_mem} <= {user.pw_name}
    return False
