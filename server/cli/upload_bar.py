"""The progress of uploads that come one after another, as one bar on stderr."""

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from server.cli.terminal import stderr
from server.client.progress import Stage, Watcher


class UploadBar(Watcher):
    """A progress bar on a terminal; a pipe gets nothing.   size_bytes: the sum of all uploads."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        console = stderr()
        self._progress = Progress(
            TextColumn("{task.description:12.12} {task.fields[stage]:8}"),
            BarColumn(bar_width=20),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=size_bytes, stage="")
        self._before_bytes = 0
        self._upload_bytes = 0

    def __enter__(self) -> "UploadBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, name: str, size_bytes: int) -> None:
        """Begin the next upload. The one before counts as complete, whatever became of it."""
        self.end()
        self._upload_bytes = size_bytes
        self._progress.update(self._task, description=name)

    def end(self) -> None:
        self._before_bytes += self._upload_bytes
        self._upload_bytes = 0
        self._progress.update(self._task, completed=self._before_bytes, stage="")

    def enter(self, stage: Stage) -> None:
        self._progress.update(self._task, stage=stage)

    def sent(self, sent_bytes: int) -> None:
        self._progress.update(self._task, completed=self._before_bytes + sent_bytes)
