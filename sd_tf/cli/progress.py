"""Show the progress of a command."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

EVERY = 10.0  # seconds between lines


class Progress:
    """A bar on a terminal, else a line now and then; on stderr, apart from results."""

    def __init__(self, count: int, unit: str):
        self.count, self.unit = count, unit
        self._start = self._told = self._before = None
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        self._bar = RichProgress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file or a pipe stays there
        )
        self._task = self._bar.add_task(f"{count} {unit}", total=count)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def reach(self, done: float) -> None:
        """Show how much is done by now; the first call starts the clock of the rate."""
        if not self._bar.disable:
            self._bar.update(self._task, completed=done)
            return
        now = time.perf_counter()
        if self._start is None:
            self._start, self._told, self._before = now, now, done
        elif now - self._told >= EVERY:
            self._told = now
            rate = (done - self._before) / (now - self._start)
            left = (self.count - done) / rate
            self._bar.console.print(
                f"{round(done, 1):.10g} of {self.count} {self.unit}, {rate:.3g} a second, "
                f"{left:.0f} s left",
                highlight=False,
                soft_wrap=True,
            )
