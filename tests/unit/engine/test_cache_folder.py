"""The folder of compiled programs is made for its user alone, and is none where others could put programs there."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_tunix.engine.cache_folder import open_for_one
from agent_tunix.errors import UserError

OTHER = 4711  # a user


@pytest.fixture
def home(tmp_path):
    """A folder that others can enter, and that lies in one."""
    tmp_path.chmod(0o755)
    (home := tmp_path / "home").mkdir(mode=0o755)
    return home


@pytest.fixture
def cache(home):
    (cache := home / "cache" / "programs").mkdir(parents=True, mode=0o755)
    return cache


@pytest.fixture(autouse=True)
def enterable(monkeypatch, tmp_path):
    """Folders around that of the tests are as pytest makes them: none can be entered, which would make all below safe."""
    lstat = Path.lstat

    def seen(path: Path):
        found = lstat(path)
        return found if tmp_path in (path, *path.parents) else changed(found, st_mode=found.st_mode & ~0o022 | 0o055)

    monkeypatch.setattr(Path, "lstat", seen)


def changed(found: os.stat_result, **fields: int) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(found, name) for name in ("st_mode", "st_uid", "st_gid")} | fields)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def given_to(monkeypatch):
    """Makes a file another user's, which the tests may not be able to."""

    def give(path: Path, user: int = OTHER) -> None:
        lstat = Path.lstat
        monkeypatch.setattr(
            Path, "lstat", lambda asked: changed(lstat(asked), st_uid=user) if asked == path else lstat(asked)
        )

    return give


def test_it_is_made_for_one_user_whatever_the_umask(home):
    before = os.umask(0)
    try:
        open_for_one(home / "a" / "b")
    finally:
        os.umask(before)
    assert (mode(home / "a"), mode(home / "a" / "b")) == (0o700, 0o700)
    open_for_one(home / "a" / "b")


def test_one_that_others_could_look_into_is_shut_and_what_it_holds_stays(cache):
    (cache / "program").write_text("mine")
    (cache / "more").mkdir()
    open_for_one(cache)
    assert mode(cache) == 0o700
    assert (cache / "program").read_text() == "mine"


@pytest.mark.parametrize("bits", [0o777, 0o757, 0o775, 0o1777])
@pytest.mark.parametrize("around", [False, True], ids=["itself", "around"])
def test_one_that_others_may_write_to_is_refused_as_it_is(cache, around, bits):
    """A folder around it that keeps what is one's own where it is, as /tmp does, is none of them."""
    place = cache.parent if around else cache
    place.chmod(bits)
    if around and bits & 0o1000:
        return open_for_one(cache)
    with pytest.raises(UserError, match=f"^others may write to {place}$"):
        open_for_one(cache)
    assert place.stat().st_mode & 0o7777 == bits


def test_nothing_is_made_where_others_may_write(home):
    home.chmod(0o777)
    with pytest.raises(UserError, match="others may write"):
        open_for_one(home / "cache")
    assert not any(home.iterdir())


@pytest.mark.parametrize("bits", [0o777, 0o755, 0o700])
def test_one_that_belongs_to_another_is_refused(cache, given_to, bits):
    cache.chmod(bits)
    given_to(cache)
    with pytest.raises(UserError, match=f"{cache} belongs to user {OTHER}"):
        open_for_one(cache)


def test_one_that_belongs_to_root_is_nobody_elses_but_folders_around_it_may_be(cache, given_to, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    for place in (cache, *cache.parents):
        given_to(place, OTHER if place == cache else 0)
    open_for_one(cache)
    given_to(cache, 0)
    with pytest.raises(UserError, match=f"{cache} belongs to root"):
        open_for_one(cache)


def test_folders_around_it_that_belong_to_another_are_refused(cache, given_to):
    given_to(cache.parent)
    with pytest.raises(UserError, match=f"{cache.parent} belongs to"):
        open_for_one(cache)


def test_in_a_folder_that_nobody_else_can_enter_permissions_of_others_mean_nothing(cache):
    for place, bits in ((cache, 0o777), (cache.parent, 0o775), (cache.parents[1], 0o700)):
        place.chmod(bits)
    open_for_one(cache)
    assert mode(cache) == 0o777, "it is taken as it is"


@pytest.mark.parametrize("kind", ["program of another", "link", "writable", "writable folder"])
def test_a_file_that_others_may_have_put_there_is_refused(cache, given_to, kind):
    path = cache / "program"
    path.mkdir() if kind == "writable folder" else path.symlink_to("/etc/hosts") if kind == "link" else path.touch()
    if kind.startswith("writable"):
        path.chmod(0o777)
    elif kind != "link":
        given_to(path)
    with pytest.raises(UserError, match=str(path)):
        open_for_one(cache)
    assert mode(cache) == 0o755, "it would not be looked through again"


def test_links_are_followed_and_judged_where_they_lead(home, cache, given_to):
    (home / "by").mkdir()
    (home / "by" / "link").symlink_to("../cache/../cache")
    (home / "absolute").symlink_to(cache.parent)
    for way in (home / "by" / "link" / "programs", home / "absolute" / "programs"):
        open_for_one(way)
        cache.chmod(0o755)
    home.chmod(0o700)
    (home.parent / "open").mkdir()
    (home.parent / "open").chmod(0o777)
    (home / "out").symlink_to("../open")
    for way in ("out", "out/programs"):
        with pytest.raises(UserError, match=f"others may write to {home.parent / 'open'}"):
            open_for_one(home / way)
    home.chmod(0o755)
    given_to(home / "absolute")
    with pytest.raises(UserError, match="absolute belongs to"):
        open_for_one(home / "absolute" / "programs")


@pytest.mark.parametrize("target", ["self", "gone/away"], ids=["loop", "dangling"])
@pytest.mark.parametrize("inner", ["", "programs"])
def test_a_link_that_leads_nowhere_is_refused(home, target, inner):
    (home / "self").symlink_to(target)
    with pytest.raises(UserError):
        open_for_one(home / "self" / inner)
    assert [path.name for path in home.iterdir()] == ["self"]


def test_what_is_in_the_way_is_named(home):
    (home / "file").touch()
    for way in ("file", "file/programs"):
        with pytest.raises(UserError, match="file is not a folder"):
            open_for_one(home / way)


@pytest.mark.parametrize(
    ("members", "name", "refused"),
    [([], "me", False), (["me"], "me", False), (["me", "you"], "me", True), ([], "all", True)],
)
def test_a_group_with_nobody_else_in_it_is_no_one(cache, monkeypatch, given_to, members, name, refused):
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_gid=OTHER, pw_name="me"))
    monkeypatch.setattr(grp, "getgrgid", lambda group: SimpleNamespace(gr_name=name, gr_mem=members))
    lstat = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: changed(lstat(path), st_uid=OTHER, st_gid=OTHER))
    cache.chmod(0o775)
    if not refused:
        return open_for_one(cache)
    with pytest.raises(UserError, match="others may write"):
        open_for_one(cache)
