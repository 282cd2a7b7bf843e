"""The base models of `chorale serve`: which there are, and the processes of each.

    wanted ──▶ loaded by a thread ──▶ its engines run ──▶ former: removed or replaced ──▶ gone
                 └▶ problem

The base models that are wanted are those of the settings and those that the gateway added
(`models.json`). `bases.json` tells the gateway what became of each. A model whose settings change
is replaced: the new one gets a home of its own, and the old one serves until the new one is loaded,
and then as a former one until the gateway wants none of its engines and all journals are settled.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol

from server.launch.children import base_revision_of
from server.launch.errors import ServeError
from server.launch.gateways import Gateways
from server.launch.gpus import gpus_for
from server.launch.homes import Home, all_homes, home_of
from server.launch.loaded_base import LoadedBase
from server.launch.settings import Settings
from server.launch.supervised_base import Processes, SupervisedBase, wanted_bases
from server.launch.supervisor import ChildSpec
from server.pool.control_files import WantedEngines, bases_file, changes_file

logger = logging.getLogger(__name__)


Work = Callable[[], None]


class Place(Protocol):
    """A place where engines run: ThisMachine or RayCluster."""

    @property
    def gpus(self) -> Sequence[str]: ...

    @property
    def heads(self) -> Sequence[ChildSpec]:
        """Processes of the place that all base models share."""

    def run(self, model: LoadedBase, home: Home, gpus: Sequence[str]) -> Processes: ...

    def settle(self, home: Home) -> Processes | None: ...


def on_a_thread(work: Work) -> None:
    """Begin `work` on a thread that does not outlive the process."""
    threading.Thread(target=work, name="model loader", daemon=True).start()


def _fulfil(loading: Future[LoadedBase], load: Callable[[], LoadedBase]) -> None:
    try:
        loading.set_result(load())
    except Exception as error:
        # An operator's addition must not end what is served, whatever its files are like.
        loading.set_exception(error)


class SupervisedBases:
    """The base models of a supervisor, which calls this for its children at every poll.

    settings: as `resolve_settings` returns them. Their models are loaded at once, which raises
    ServeError; a later one that cannot be served has a problem.   load: loads the model of one
    settings; it raises ServeError or OSError.   start: begins such work, which may take minutes,
    and returns at once.
    """

    def __init__(
        self,
        settings: Settings,
        place: Place,
        gateways: Gateways,
        *,
        load: Callable[[Settings], LoadedBase] = LoadedBase.load,
        start: Callable[[Work], None] = on_a_thread,
    ) -> None:
        self._settings = settings
        self._data_dir = settings.data_dir
        self._place = place
        self.gateways = gateways
        self._load = load
        self._start = start
        self._loading: tuple[SupervisedBase, Future[LoadedBase]] | None = None
        self._listed, self._asked = bases_file(self._data_dir), changes_file(self._data_dir)
        self._bases: list[SupervisedBase] = []
        # The base models that the last run told of.
        self._known = {entry.home: entry for entry in self._listed.latest()}
        self._asked.look()
        self._begin()
        self._follow()
        self._reserve_homes()
        for home in all_homes(self._data_dir):
            self._settle(home)
        self()

    def __call__(self) -> list[ChildSpec]:
        """The children that should run now. What gateways read is written first."""
        if self._asked.look():
            self._follow()
        self._take_loaded()
        for base in [base for base in self._bases if base.refusal]:
            self._give_up(base, base.refusal)
        children = [child for base in self._bases for child in base.children()]
        self._let_go()
        self._load_next()
        self._listed.keep([base.entry for base in self._bases])
        return [*children, *self._place.heads, *self.gateways()]

    def set_models(self, settings: Settings) -> None:
        """Serve the base models of these settings from now on; nothing else of them is taken."""
        self._settings = self._settings.with_models_of(settings)
        self._follow()

    # ---- at the start ----

    def _begin(self) -> None:
        """Load the models of the settings, the first into the data directory itself."""
        models = [base for base in self._wanted() if base.origin == "settings"]
        for base in models:
            assert base.settings is not None
            base.is_vital = True
            if base is models[0]:
                base.home = Home(self._data_dir)
            self._adopt(base, self._load(base.settings), is_alone=len(models) == 1)
            self._bases.append(base)

    def _reserve_homes(self) -> None:
        """Give models that were added before this start the homes that they had."""
        had = {entry.name: entry.home for entry in self._known.values() if not entry.is_former}
        homes = {str(home.folder): home for home in all_homes(self._data_dir)}
        for base in self._bases:
            home = homes.get(had.get(base.name, ""))
            if base.processes is None and home and home.folder not in self._taken():
                base.home = home

    def _settle(self, home: Home) -> None:
        """Have stand-ins for the engines of a home that no base model has, until it is settled."""
        if home.folder in self._taken() or (processes := self._place.settle(home)) is None:
            return
        if entry := self._known.get(str(home.folder)):
            name, revision = entry.name, entry.base_revision
        else:
            name, revision = home.slug, base_revision_of(home.engine_config(1)) or ""
        former = SupervisedBase(name, {}, home=home, processes=processes, base_revision=revision)
        former.is_former = True
        self._bases.append(former)
        logger.info("%s: the journals of a former base model are to be settled", home.folder)

    # ---- which base models are wanted ----

    def _wanted(self) -> list[SupervisedBase]:
        return wanted_bases(self._settings, self._asked.content)

    def _follow(self) -> None:
        """Compare the base models that there are with those that are wanted."""
        present = [self._of(wanted) for wanted in self._wanted()]
        names = {base.name for base in present}
        others = [base for base in self._bases if base.processes and base not in present]
        for base in others:
            # One that is replaced serves on until the new one is loaded.
            if not base.is_former and base.name not in names:
                self._make_former(base)
        dropped = [base for base in self._bases if base.processes is None and base not in present]
        self._bases = [*present, *others]
        for base in dropped:
            self._give_up_home(base)

    def _of(self, wanted: SupervisedBase) -> SupervisedBase:
        """The base model that is there with these settings, or a new one."""
        for base in self._bases:
            is_same = (base.name, base.table) == (wanted.name, wanted.table)
            if is_same and not base.is_former:
                if base.processes:
                    base.origin = wanted.origin
                elif not self._loading or base is not self._loading[0]:
                    base.settings, base.origin = wanted.settings, wanted.origin
                    base.problem = wanted.problem
                return base
        return wanted

    def _make_former(self, base: SupervisedBase) -> None:
        base.is_former = True
        logger.info("%s goes as soon as its requests have ended", base.name)

    # ---- how a base model comes and goes ----

    def _load_next(self) -> None:
        """Begin to load the first model that is not loaded yet and has no problem."""
        if self._loading:
            return
        for base in self._bases:
            settings = base.settings
            if base.processes is None and settings and not base.problem:
                logger.info("%s is loaded from %s", base.name, settings.model)
                loading: Future[LoadedBase] = Future()
                self._loading = base, loading
                self._start(partial(_fulfil, loading, partial(self._load, settings)))
                return

    def _take_loaded(self) -> None:
        """Run the engines of the model that has just been loaded, or note its problem."""
        if not self._loading or not self._loading[1].done():
            return
        base, loading = self._loading
        self._loading = None
        if base not in self._bases:  # it is not wanted any more
            return
        try:
            self._adopt(base, loading.result())
            base.children()
        except Exception as error:
            # What is served must go on, whatever an operator has added.
            is_known = isinstance(error, ServeError | OSError)
            self._give_up(base, str(error) if is_known else repr(error))
            return
        for other in self._bases:
            if other is not base and other.name == base.name and not other.is_former:
                self._make_former(other)

    def _give_up(self, base: SupervisedBase, problem: str) -> None:
        """Serve a base model no more, until its settings change."""
        logger.error("%s is not served: %s", base.name, problem)
        base.problem, base.refusal = problem, ""
        base.processes, base.model_dir, base.gpus = None, "", ()
        self._give_up_home(base)

    def _give_up_home(self, base: SupervisedBase) -> None:
        """Settle what is left in the home of a base model that does not run."""
        home, base.home = base.home, None
        if home:
            self._settle(home)

    def _adopt(self, base: SupervisedBase, model: LoadedBase, *, is_alone: bool = False) -> None:
        """Give a loaded model a home, GPUs and engines. Raises ServeError, OSError.

        is_alone: whether it is the only model, so that a single engine sees every GPU.
        """
        one, revision = model.settings, model.base.base_revision
        home = base.home or home_of(self._data_dir, one.model_id, revision, self._taken())
        home.check_sockets(one.most_engines)
        sees_all = is_alone and one.most_engines == 1 and one.gpus is None
        gpus = self._first_gpus(one) if sees_all else self._gpus(one)
        home.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = WantedEngines(home.folder)
        if one.sleep_after_s is None and wanted.latest() == 0:
            # The number is of a model that went, and this one has to run.
            wanted.forget()
        base.processes = self._place.run(model, home, () if sees_all else gpus)
        base.home, base.gpus, base.base_revision = home, gpus, revision
        base.model_dir = str(model.base.path)

    def _first_gpus(self, settings: Settings) -> Sequence[str]:
        """GPUs that a single engine chooses itself: the first ones."""
        return () if settings.device == "cpu" else self._place.gpus[: settings.most_processes]

    def _gpus(self, settings: Settings) -> Sequence[str]:
        """GPUs for a model that comes: those that are free, unless it names its own."""
        taken = {gpu for base in self._bases for gpu in base.gpus}
        for wanted in self._wanted():
            taken |= set((wanted.settings and wanted.settings.gpus) or ())
        return gpus_for(settings, self._place.gpus, taken)

    def _taken(self) -> set[Path]:
        return {base.home.folder for base in self._bases if base.home}

    def _let_go(self) -> None:
        """Forget the former models of which nothing is left."""
        gone = [b for b in self._bases if b.is_former and b.processes and b.processes.is_at_rest]
        if not gone:
            return
        for base in gone:
            logger.info("%s is gone", base.name)
            self._bases.remove(base)
        self._follow()  # what was in the way of another model may be gone with it
