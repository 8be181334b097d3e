"""What a person sees while a run trains: a progress bar in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from agent_tunix.console import Output, draws_bars, show_controls
from agent_tunix.training.intervals import interval_text
from agent_tunix.types import Record

WIDE = 120  # columns that a bar and all numbers beside it have room in
LINES = 12  # lines printed over a run where no bar is drawn


class Bars:
    """The progress bars of the runs under way, one each; notices are printed above them."""

    def __init__(self, console: Console, several: bool = False):
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if console.width >= WIDE else 8),
            MofNCompleteColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        )
        self._console, self._several = console, several
        # In a notebook a bar takes what is printed while it is drawn for its own, so no thread may draw it at any time.
        by_itself = not console.is_jupyter
        self._progress = Progress(*columns, console=console, auto_refresh=by_itself, disable=not draws_bars(console))

    def __enter__(self) -> Bars:
        shown = isinstance(sys.stdout, Output)
        self._progress.start()
        if shown:  # again: rich has put a stream of its own over ours, and would take what is printed for its colours
            show_controls()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def notice(self, text: str) -> None:
        style = "yellow" if "warning:" in text else None
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def labelled(self, label: str) -> Callable[[str], None]:
        """Prints notices, with the label of their run where there are several."""
        return (lambda text: self.notice(f"[{label}] {text}")) if self._several else self.notice

    def display(self, label: str, total: int) -> Display:
        lines = 0 if draws_bars(self._console) or self._several else LINES
        return Display(self._progress, label, total, lines, self.labelled(label), self._console.width < WIDE)


class Display:
    """Shows the progress of one run of `total` updates: by its bar, or by `lines` lines where none is drawn."""

    def __init__(self, progress: Progress, label: str, total: int, lines: int, notice: Callable[[str], None], narrow: bool):
        self._progress, self._total, self._lines, self.notice = progress, total, lines, notice
        self._accuracy, self._guard, self._narrow = "-", "", narrow
        self._began, self._first = 0.0, 0  # when the first update of this process was done, and which it was
        self._task = progress.add_task(label, total=total, line="waiting")

    def begin(self, done: int) -> None:
        self._draw("compiling ...", completed=done)

    def end(self, status: str) -> None:
        self._draw(f"{status}, held-out {self._accuracy}  {self._guard}".rstrip())

    def _draw(self, line: str, completed: int | None = None) -> None:
        self._progress.update(self._task, completed=completed, line=line, refresh=not self._progress.live.auto_refresh)

    def step(self, record: Record) -> None:
        if "reward/mean" in record:
            gain, kl = f"reward {record['reward/mean']:.2f}", f"kl {record['kl']:.3f}"
        else:  # a supervised run, which has no reference
            gain, kl = f"loss {record['loss']:.3f}", ""
        speed = f"{record['tokens_per_second']:,.0f} tok/s"
        calling = f"calling {record['episode/calling']:.0%}" if "episode/calling" in record else ""
        rate = f"lr {record['lr']:.1e}"
        held_out = f"held-out {self._accuracy}"
        whole = [gain, calling, held_out, rate, kl, speed, self._guard]
        short = [gain, held_out, self._guard or speed]  # what there is room for beside a bar, in 80 columns
        self._draw("  ".join(filter(None, short if self._narrow else whole)), completed=record["step"])
        left = self._time_left(record["step"])
        if self._lines and record["step"] % max(1, self._total // self._lines) == 0:
            told = "  ".join(filter(None, [*whole, left and f"eta {left}"]))
            self.notice(f"step {record['step']:>{len(str(self._total))}}/{self._total}  {told}")

    def _time_left(self, step: int) -> str:
        """By the mean time of the updates since the first, which had programs to compile; empty until there are two."""
        now = time.monotonic()
        if not self._first or step <= self._first:  # or the run was rolled back
            self._began, self._first = now, step
            return ""
        return duration((now - self._began) / (step - self._first) * (self._total - step))

    def guard(self, state: str) -> None:
        """What the guard has done stays in the line from then on."""
        self._guard = f"[{state}]"

    def evaluation(self, record: Record) -> None:
        if "set" in record:
            self.notice(
                f"step {record['step']}: {record['set']} {record['accuracy']:.1%} ({counted(record['n'], 'problem')})"
            )
            return
        self._accuracy = f"{record['accuracy']:.1%}"
        sampled = f", sampled {record['sampled_accuracy']:.1%}" if "sampled_accuracy" in record else ""
        calling = f", {record['episode/calling']:.0%} call a tool" if "episode/calling" in record else ""
        self.notice(f"step {record['step']}: held-out accuracy {self._accuracy}{sampled}{calling} ({record['n']} problems)")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in 1:02:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def say(console: Console, text: str) -> None:
    """Prints a text as it is: commands are to be copied, so no line is broken and nothing is taken for markup."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def _said(sample: Record) -> str:
    """A completion, or the turns of an episode below each other, those of others with their names."""
    turns = [text if who == "assistant" else f"{who}: {text}" for who, text in sample.get("turns", ())]
    return "\n        ".join(turns) or sample["completion"]


def _share(record: Record, key: str) -> str:
    """With its 95 % interval, where it is known of how many problems it is."""
    return f"{record[key]:.1%}" + (f" ({interval_text(record[key], record['n'])})" if "n" in record else "")


def print_summary(
    console: Console, folder: Path, summary: Record, before: Sequence[Record], after: Sequence[Record], best: str = ""
) -> None:
    """The close of a run: accuracy before and after, samples before and after, what is said of its best, what to do next."""
    table = Table(title=f"{summary['status']}: {counted(summary['steps'], 'update')} in {summary['seconds']:.0f} s")
    for column in ("held-out", "before", "after"):  # shares, with 95 % intervals
        table.add_column(column, justify="left" if column == "held-out" else "right")
    first, final = summary["first_eval"] or {}, summary["final_eval"] or {}
    for key in ("accuracy", "sampled_accuracy", "partial_accuracy", "format_accuracy", "episode/calling"):
        if key in first and key in final:
            end = _share(final, key) if final["step"] > first["step"] else "-"  # stopped before its second evaluation
            name = "calling a tool" if key == "episode/calling" else key.replace("_", " ")
            table.add_row(name, _share(first, key), end)
    console.print(table)
    for old, new in zip(before, after, strict=False):
        console.print(
            Panel(
                f"before  {_said(old)}\nafter   {_said(new)}\ntruth   {new['answer']}",
                title=console.render_str(old["question"]),
                title_align="left",
            ),
            markup=False,
            highlight=False,
        )
    tokens = summary.get("tokens")
    cost = (
        f"\nTokens:     {tokens:,} of completions, {tokens / max(0.1, summary['seconds']):,.0f} a second" if tokens else ""
    )
    page = f"\nReport:     {folder / 'report.html'}" if (folder / "report.html").exists() else ""
    kept = f"\n{best}" if best else ""
    say(
        console,
        "\n".join([f"Run folder: {folder}{page}{cost}{kept}\n\nNext:", *(f"  {line}" for line in summary["advice"])]),
    )
