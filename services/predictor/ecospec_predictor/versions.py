"""Where models lie, which version of each is current, and the watch that serves a new version without a pause."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecospec_proto.background import in_daemon_thread
from ecospec_proto.memory import available_memory_bytes

from .base import ExpertModel
from .errors import AnotherTargetError, PredictorError, SettingsError
from .metrics import Metrics
from .settings import Settings

log = logging.getLogger(__name__)
LOOK_SECONDS = 2.0
MOST_NAME_BYTES = 255
# Of what is kept at last, for what loading holds beside it: the file's own tensors and their float32 copies.
LOADING_FACTOR = 3
Load = Callable[[Path, Path | None], ExpertModel]  # a model directory and its embeddings; raises PredictorError


@dataclass(frozen=True)
class Found:
    """A version, and what changes when its files do."""

    directory: Path
    marks: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Shelf:
    """The place of one target's model: a model directory, or a directory of versions, of which the symbolic link `current`, or
    else the file CURRENT (one line, the version's directory), names the one to serve. Replace either by a rename."""

    root: Path
    embeddings: Path | None = None

    def current(self) -> Found:
        """What to load. Raises PredictorError."""
        try:
            directory = self._current_directory()
            stats = [(path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file()]
        except (OSError, ValueError) as error:
            raise PredictorError(f"The current version in {self.root} cannot be found: {error}") from None
        return Found(directory, tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))

    def _current_directory(self) -> Path:
        link, named = self.root / "current", self.root / "CURRENT"
        if link.is_dir():
            return link.resolve()
        if not named.is_file():
            return self.root
        with named.open(encoding="utf-8") as file:
            name = file.read(MOST_NAME_BYTES + 1).strip()
        if not name or name in (".", "..") or len(name) > MOST_NAME_BYTES or os.path.basename(name) != name:
            raise ValueError(f"{named} holds {name!r:.80}; the name of a directory beside it is needed.")
        return self.root / name

    @property
    def has_versions(self) -> bool:
        return (self.root / "current").is_dir() or (self.root / "CURRENT").is_file()


@dataclass(frozen=True)
class Loaded:
    shelf: Shelf
    found: Found
    model: ExpertModel


def shelves_of(settings: Settings) -> list[Shelf]:
    """One per target. Raises SettingsError."""
    directories, tables = settings.model_dir, settings.embeddings
    for directory in directories:
        if not directory.is_dir():
            raise SettingsError(
                f"Setting model_dir is '{directory}', which is no directory; allowed: "
                f"{Settings.model_fields['model_dir'].description}."
            )
    for table in tables:
        if not table.exists():
            raise SettingsError(
                f"Setting embeddings is '{table}', which does not exist; allowed: "
                f"{Settings.model_fields['embeddings'].description}."
            )
    if tables and len(tables) != len(directories):
        raise SettingsError(
            f"Setting embeddings names {len(tables)} files for {len(directories)} directories in model_dir; one for each, in the "
            "same order, or none where no model needs them."
        )
    shelves = [Shelf(*pair) for pair in zip(directories, tables or [None] * len(directories), strict=True)]
    for shelf in shelves:
        if settings.watch_versions and not shelf.has_versions:
            raise SettingsError(
                f"Setting watch_versions is true, but '{shelf.root}' in model_dir is one model; give a directory of versions with "
                "a symbolic link current or a file CURRENT that names one of them."
            )
    return shelves


def load_all(shelves: Sequence[Shelf], load: Load) -> list[Loaded]:
    """The current model of every shelf. Raises PredictorError."""
    loaded: dict[str, Loaded] = {}
    for shelf in shelves:
        found = shelf.current()  # before it is loaded: one that becomes current meanwhile is seen by the watch
        this = Loaded(shelf, found, load_checked(found.directory, shelf.embeddings, load))
        geometry = this.model.geometry
        if (other := loaded.setdefault(geometry.fingerprint, this)) is not this:
            raise PredictorError(
                f"The models in {other.shelf.root} and {shelf.root} are both for {geometry.name}, revision {geometry.revision} "
                f"(fingerprint {geometry.fingerprint}); name one directory for each target."
            )
    return list(loaded.values())


def load_checked(directory: Path, embeddings: Path | None, load: Load, beside: bool = False) -> ExpertModel:
    """Raises PredictorError, for too little memory before anything is read. beside: another version is in memory, with the same
    embeddings."""
    needed = _estimated_loading_bytes(directory, embeddings is not None and not beside)
    available = available_memory_bytes()
    if needed > available:
        raise PredictorError(
            f"Loading {directory} takes about {needed >> 20} MiB, but {available >> 20} MiB of memory are available; free some, "
            "or start the version in a process of its own."
        )
    return load(directory, embeddings)


def _estimated_loading_bytes(directory: Path, with_embeddings: bool) -> int:
    kept = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if with_embeddings:
        try:
            target = json.loads((directory / "config.json").read_text(encoding="utf-8"))["target"]
            kept += 2 * int(target["vocab_size"]) * int(target["hidden_size"])  # in bfloat16
        except (OSError, ValueError, KeyError, TypeError):
            pass  # loading says what is wrong with it
    return LOADING_FACTOR * kept


@dataclass(eq=False)
class _Watched:
    shelf: Shelf
    fingerprint: str
    tried: Found  # a version that failed is tried again once its files change
    problem: str = ""  # of that version
    lost: str = ""  # why no current version can be found, as it was logged last
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Watch:
    """Looks for new versions, loads each beside the one that is served, and hands it to `swap`, which serves it from then on.
    What cannot be loaded or is for another target is logged and counted, and the version before goes on."""

    def __init__(
        self,
        loaded: Sequence[Loaded],
        load: Load,
        swap: Callable[[ExpertModel], Coroutine[Any, Any, None]],
        metrics: Metrics,
    ) -> None:
        self._load, self._swap, self._metrics = load, swap, metrics
        self._watched = [_Watched(item.shelf, item.model.geometry.fingerprint, item.found) for item in loaded]
        self._asked = asyncio.Event()

    def look_now(self) -> None:
        """For a signal's handler: once more, although nothing may have changed since a version failed."""
        for watched in self._watched:
            if watched.problem:
                watched.tried = Found(Path(), ())
        self._asked.set()

    async def run(self, look_seconds: float | None) -> None:
        """Until it is cancelled. look_seconds: between looks; None looks only when it is asked to."""
        while True:
            try:
                await asyncio.wait_for(self._asked.wait(), look_seconds)
            except TimeoutError:
                pass
            self._asked.clear()
            for watched in self._watched:
                await self._look(watched)

    async def _look(self, watched: _Watched) -> None:
        try:
            found = await in_daemon_thread(watched.shelf.current)
        except PredictorError as error:
            if str(error) != watched.lost:  # once, not at every look
                log.error("%s The version before goes on.", error)
                watched.lost = str(error)
            return
        watched.lost = ""
        if found == watched.tried:
            return
        watched.tried = found
        watched.problem = await self._take_or_tell(watched, found.directory)

    async def offer(self, fingerprint: str, find: Callable[[], Path]) -> None:
        """Serve a version that was published elsewhere; find() gives its directory, may block, and raises PredictorError."""
        watched = next(item for item in self._watched if item.fingerprint == fingerprint)
        try:
            directory = await in_daemon_thread(find)
        except PredictorError as error:
            self._metrics.swaps.labels("failed").inc()
            log.error("%s The version before goes on.", error)
            return
        await self._take_or_tell(watched, directory)

    async def _take_or_tell(self, watched: _Watched, directory: Path) -> str:
        """The problem, empty without one."""
        async with (
            watched.taking
        ):  # one new version of a target at a time, or two would need memory and the older might win
            outcome, problem = await self._try(watched, directory)
        self._metrics.swaps.labels(outcome).inc()
        if problem:
            log.error("The version in %s is not served; the one before goes on. %s", directory, problem)
        return problem

    async def _try(self, watched: _Watched, directory: Path) -> tuple[str, str]:
        """The outcome, as the metric names it, and the problem."""
        try:
            await self._take(watched, directory)
        except AnotherTargetError as error:
            return "another_target", str(error)
        except PredictorError as error:
            return "failed", str(error)
        except Exception as error:  # a bug in loading costs a version, never the watch
            log.exception("Loading %s failed.", directory)
            return "failed", f"Loading it failed: {error!r}"
        return "swapped", ""

    async def _take(self, watched: _Watched, directory: Path) -> None:
        model = await in_daemon_thread(lambda: load_checked(directory, watched.shelf.embeddings, self._load, True))
        geometry = model.geometry
        if geometry.fingerprint != watched.fingerprint:
            raise AnotherTargetError(
                f"It is for {geometry.name}, revision {geometry.revision} (fingerprint {geometry.fingerprint}), and "
                f"{watched.shelf.root} is for fingerprint {watched.fingerprint}; start it as a target of its own."
            )
        await self._swap(model)
        log.info("Version %s of the model for %s, from %s, is served.", model.version, geometry.name, directory)
