"""What the pages of the documentation have in them: blocks of code, commands, links and headings, of Markdown and of rst."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^(?P<fence>```+)[ ]*(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^(?: {4,}|\t)[^\n]*\n(?:[ \t]*\n)*)+", re.MULTILINE)
INLINE = re.compile(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
PROGRAMS = ("python", "agent-tunix", "make", "pip")
ASSIGNMENT = re.compile(r"^(?:[A-Z_]+=\S+ +)+")
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|^\.\. (?:image|figure):: (\S+)$", re.MULTILINE)
RST_LINK = re.compile(r"`[^`<]*<([^`>]+)>`__?")
RST_PAGE = re.compile(r":doc:`(?:[^`<]*<)?([^`>]+)>?`")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
RST_HEADING = re.compile(r"^(\S.*)\n(=+|-+|~+|\^+)$", re.MULTILINE)


def blocks(text: str, suffix: str) -> Iterator[tuple[str, str]]:
    """The language, as far as it is said, and the text of each block of code."""
    if suffix == ".md":
        for fenced in FENCE.finditer(text):
            yield fenced["language"], fenced["code"]
        text = FENCE.sub("", text)
    for indented in INDENTED.finditer(text):
        yield "", indented[0]


def commands(text: str, suffix: str) -> Iterator[str]:
    """The commands of a page on a line each, as they stand in blocks of code and within its sentences."""
    for _, code in blocks(text, suffix):
        for line in re.sub(r" *\\\n *", " ", code).splitlines():
            if is_command(line.strip()):
                yield ASSIGNMENT.sub("", line.strip())
    outside = INDENTED.sub("", FENCE.sub("", text) if suffix == ".md" else text)
    for inline in INLINE.finditer(outside):
        if is_command(said := " ".join(inline[2].split())):
            yield ASSIGNMENT.sub("", said)


def is_command(line: str) -> bool:
    program, _, rest = ASSIGNMENT.sub("", line).partition(" ")
    return program in PROGRAMS and bool(rest) and not re.match(r"[=:|]", rest)


def links(text: str, suffix: str) -> Iterator[str]:
    """Where the links and the pictures of a page lead to."""
    bare = INLINE.sub("", INDENTED.sub("", FENCE.sub("", text))) if suffix == ".md" else text
    if suffix == ".md":
        yield from LINK.findall(bare)
    else:
        yield from RST_LINK.findall(bare)
    yield from (one or other for one, other in PICTURE.findall(bare))


def anchors(text: str, suffix: str) -> set[str]:
    """The names by which headings can be linked to, where GitHub and Sphinx give the same."""
    titles = HEADING.findall(FENCE.sub("", text)) if suffix == ".md" else [title for title, _ in RST_HEADING.findall(text)]
    titles = [title.replace("`", "") for title in titles]
    return {of_github(title) for title in titles} & {of_sphinx(title) for title in titles}


def of_github(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def of_sphinx(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def read(page: Path) -> tuple[str, str]:
    return page.read_text(), page.suffix
