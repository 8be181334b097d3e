"""Makes the pictures of the documentation from runs of the tiny model: `.venv/bin/python scripts/make_pictures.py`.

It trains the demo and a small search, and needs Pillow, and Chromium with its driver on the PATH. The terminal is what the
command writes to one of 100 columns; the pages are those that the runs leave. The drawing of the architecture,
docs/pictures/architecture.svg, is made by hand.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text
from selenium import webdriver

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
COLUMNS = 100
DEMO = ["agent-tunix", "train", "+experiment=quick_test", "hydra.run.dir=runs/quick_test"]
SEARCH = ["agent-tunix", "tune", "+experiment=quick_test", "tune.budget=300", "hydra.run.dir=tune/quick_test"]
MOVE = re.compile(r"\x1b\[(\d*)([A-Za-ln-z])|\x1b\[\?\d+[hl]|(\r)|(\n)")  # what moves the cursor, but no colours
COLOURS = 128  # of a picture of a page, which has few
TIMED = 30  # updates after which the picture of the terminal is taken: there is a bar, and there are results above it


def written(command: list[str], folder: Path) -> str:
    """What a command writes to a terminal."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=child, stdout=child, stderr=child)
    os.close(child)
    pieces = []
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        pieces.append(piece)
    if process.wait():
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{b''.join(pieces).decode()}")
    return b"".join(pieces).decode()


def shown(text: str) -> list[str]:
    """The lines that stand on a terminal after a text was written to it, with their colours."""
    lines, row, done = [""], 0, 0
    for move in MOVE.finditer(text):
        lines[row] += text[done : move.start()]
        done = move.end()
        count, kind = int(move[1] or 1), move[2]
        if move[4]:
            row += 1
            lines += [""] * (row == len(lines))
        elif kind == "A":
            row -= count
        elif kind == "K" or move[3]:  # rich clears a line whenever it begins it anew
            lines[row] = ""
    lines[row] += text[done:]
    return lines


def terminal(text: str) -> str:
    """A picture of the terminal in the middle of the run, without fonts of other servers."""
    bar = rf"m{TIMED}/\d+"  # after its colour
    before = text[: [found.end() for found in re.finditer(bar, text)][-1]]
    text = before + text[len(before) :].partition("\r")[0]
    lines = [line for line in shown(text.replace("\r\n", "\n")) if line.strip()]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    for line in ["$ " + " ".join(DEMO[:3]), *lines]:
        console.print(Text.from_ansi(line), soft_wrap=True)
    picture = console.export_svg(title="agent-tunix", unique_id="terminal")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    return re.sub(r"font-family: Fira Code, monospace", "font-family: monospace", picture)


def photograph(page: Path, picture: Path, height: int) -> None:
    """What a browser shows of the upper part of a page."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size=1000,{height}"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(page.as_uri())
        taken = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    finally:
        browser.quit()
    taken.quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        (PICTURES / "terminal.svg").write_text(terminal(written(DEMO, folder)))
        photograph(folder / "runs" / "quick_test" / "report.html", PICTURES / "report.png", 1390)
        written(SEARCH, folder)
        photograph(folder / "tune" / "quick_test" / "report.html", PICTURES / "tune.png", 1390)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
