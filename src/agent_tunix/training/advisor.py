"""What is said of a run while it trains, by someone who reads its folder and not by the loop itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from agent_tunix.config.schema import Config


class Advisor:
    """Says nothing. The command line hands in one that does, `lab.advice.LabAdvisor`."""

    def before(self, cfg: Config, prompt_width: int) -> list[str]:
        """Warnings before a run begins, as that it will not fit the device."""
        return []

    def midway(self, folder: Path) -> list[tuple[str, str]]:
        """What goes wrong by now: the name of each illness, which is told once, and what to say of it."""
        return []

    def after_divergence(self, cfg: Config, overrides: Sequence[str], fault: str, rolled_back: bool) -> str:
        """What to do about a run that diverged by a fault."""
        return ""

    def at_close(self, cfg: Config, overrides: Sequence[str], folder: Path, status: str, fault: str) -> list[str]:
        """The commands to try next."""
        return []

    def report(self, folder: Path, notice: Callable[[str], None]) -> None:
        """Writes what others read of a run that has ended."""
