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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from server.launch.children import base_revision_of
from server.launch.errors import ServeError
from server.launch.gateways import Gateways
from server.launch.gpus import gpus_for
from server.launch.homes import Home, all_homes, home_of
from server.launch.loaded_model import LoadedModel
from server.launch.settings import Settings
from server.launch.supervisor import ChildSpec
from server.launch.wanted_models import WantedModel, wanted_models
from server.pool.files import BaseEntry, WantedEngines, bases_file, changes_file, wanted_files

logger = logging.getLogger(__name__)


Work = Callable[[], None]


class Processes(Protocol):
    """The processes of one base model; called at every poll.

    is_at_rest: whether nothing runs, and no journal is left to settle.
    """

    def __call__(self) -> list[ChildSpec]: ...

    @property
    def is_at_rest(self) -> bool: ...


class Place(Protocol):
    """A place where engines run: ThisMachine or RayCluster."""

    @property
    def gpus(self) -> Sequence[str]: ...

    def run(self, model: LoadedModel, home: Home, gpus: Sequence[str]) -> Processes: ...

    def settle(self, home: Home) -> Processes | None: ...


@dataclass(slots=True, eq=False)
class _Base:
    """A base model that is wanted, or was.

    home, engines: None until the model is loaded.   gpus: those that its engines take.
    is_vital: whether nothing is served if its engines cannot start.   refusal: why they cannot.
    """

    wanted: WantedModel
    home: Home | None = None
    engines: Processes | None = None
    model_dir: str = ""
    base_revision: str = ""
    gpus: Sequence[str] = ()
    is_vital: bool = False
    is_former: bool = False
    problem: str = ""
    refusal: str = ""

    @property
    def entry(self) -> BaseEntry:
        settings = self.wanted.settings
        return BaseEntry(
            name=self.wanted.name,
            home=str(self.home.folder) if self.home else "",
            model_dir=self.model_dir,
            base_revision=self.base_revision,
            settings=settings.dump_base() if settings else {},
            origin=self.wanted.origin,
            is_former=self.is_former,
            problem=self.problem,
        )

    def children(self) -> list[ChildSpec]:
        specs = self.engines() if self.engines else []
        return specs if self.is_vital else [replace(spec, on_refusal=self.refuse) for spec in specs]

    def refuse(self, reason: str) -> None:
        """Note that an engine cannot start. What settles a former model's journals tries on."""
        if not self.is_former:
            self.refusal = reason


def on_a_thread(work: Work) -> None:
    """Begin `work` on a thread that does not outlive the process."""
    threading.Thread(target=work, name="model loader", daemon=True).start()


def _fulfil(loading: Future[LoadedModel], load: Callable[[], LoadedModel]) -> None:
    try:
        loading.set_result(load())
    except Exception as error:
        # An operator's addition must not end what is served, whatever its files are like.
        loading.set_exception(error)


class BasePlan:
    """The plan for the supervisor, which calls it at every poll.

    settings: as `resolve_settings` returns them. Their models are loaded at once, which raises
    ServeError; a later one that cannot be served has a problem.   others, gateways: processes that
    come behind those of base models.   load: loads the model of one settings; it raises ServeError
    or OSError.   start: begins such work, which may take minutes, and returns at once.
    """

    def __init__(
        self,
        settings: Settings,
        place: Place,
        others: Sequence[ChildSpec] = (),
        *,
        gateways: Gateways | None = None,
        load: Callable[[Settings], LoadedModel] = LoadedModel.load,
        start: Callable[[Work], None] = on_a_thread,
    ) -> None:
        self._settings = settings
        self._data_dir = settings.data_dir
        self._place = place
        self._others = list(others)
        self._gateways = gateways
        self._load = load
        self._start = start
        self._loading: tuple[_Base, Future[LoadedModel]] | None = None
        self._listed, self._asked = bases_file(self._data_dir), changes_file(self._data_dir)
        self._bases: list[_Base] = []
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
        gateways = self._gateways() if self._gateways else ()
        return [*children, *self._others, *gateways]

    def set_models(self, settings: Settings) -> None:
        """Serve the base models of these settings from now on; nothing else of them is taken."""
        self._settings = self._settings.with_models_of(settings)
        self._follow()

    def replace_gateways(self) -> None:
        """Have new gateways take the places of those that there are, one after another."""
        if self._gateways:
            self._gateways.replace()

    # ---- at the start ----

    def _begin(self) -> None:
        """Load the models of the settings, the first into the data directory itself."""
        models = [w for w in self._wanted() if w.origin == "settings"]
        for wanted in models:
            assert wanted.settings is not None
            base = _Base(wanted, is_vital=True)
            if wanted is models[0]:
                base.home = Home(self._data_dir)
            self._adopt(base, self._load(wanted.settings), is_alone=len(models) == 1)
            self._bases.append(base)

    def _reserve_homes(self) -> None:
        """Give models that were added before this start the homes that they had."""
        had = {entry.name: entry.home for entry in self._known.values() if not entry.is_former}
        homes = {str(home.folder): home for home in all_homes(self._data_dir)}
        for base in self._bases:
            home = homes.get(had.get(base.wanted.name, ""))
            if base.engines is None and home and home.folder not in self._taken():
                base.home = home

    def _settle(self, home: Home) -> None:
        """Have stand-ins for the engines of a home that no base model has, until it is settled."""
        if home.folder in self._taken() or (engines := self._place.settle(home)) is None:
            return
        if entry := self._known.get(str(home.folder)):
            name, revision = entry.name, entry.base_revision
        else:
            name, revision = home.slug, base_revision_of(home.engine_config(1)) or ""
        wanted = WantedModel(name, {})
        self._bases.append(_Base(wanted, home, engines, base_revision=revision, is_former=True))
        logger.info("%s: the journals of a former base model are to be settled", home.folder)

    # ---- which base models are wanted ----

    def _wanted(self) -> list[WantedModel]:
        return wanted_models(self._settings, self._asked.content)

    def _follow(self) -> None:
        """Compare the base models that there are with those that are wanted."""
        present = [self._of(wanted) for wanted in self._wanted()]
        names = {base.wanted.name for base in present}
        others = [base for base in self._bases if base.engines and base not in present]
        for base in others:
            # One that is replaced serves on until the new one is loaded.
            if not base.is_former and base.wanted.name not in names:
                self._make_former(base)
        dropped = [base for base in self._bases if base.engines is None and base not in present]
        self._bases = [*present, *others]
        for base in dropped:
            self._give_up_home(base)

    def _of(self, wanted: WantedModel) -> _Base:
        """The base model that is there with these settings, or a new one."""
        for base in self._bases:
            is_same = (base.wanted.name, base.wanted.table) == (wanted.name, wanted.table)
            if is_same and not base.is_former:
                if base.engines:
                    base.wanted = replace(base.wanted, origin=wanted.origin)
                elif not self._loading or base is not self._loading[0]:
                    base.wanted, base.problem = wanted, wanted.problem
                return base
        return _Base(wanted, problem=wanted.problem)

    def _make_former(self, base: _Base) -> None:
        base.is_former = True
        logger.info("%s goes as soon as its requests have ended", base.wanted.name)

    # ---- how a base model comes and goes ----

    def _load_next(self) -> None:
        """Begin to load the first model that is not loaded yet and has no problem."""
        if self._loading:
            return
        for base in self._bases:
            settings = base.wanted.settings
            if base.engines is None and settings and not base.problem:
                logger.info("%s is loaded from %s", base.wanted.name, settings.model)
                loading: Future[LoadedModel] = Future()
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
            if other is not base and other.wanted.name == base.wanted.name and not other.is_former:
                self._make_former(other)

    def _give_up(self, base: _Base, problem: str) -> None:
        """Serve a base model no more, until its settings change."""
        logger.error("%s is not served: %s", base.wanted.name, problem)
        base.problem, base.refusal = problem, ""
        base.engines, base.model_dir, base.gpus = None, "", ()
        self._give_up_home(base)

    def _give_up_home(self, base: _Base) -> None:
        """Settle what is left in the home of a base model that does not run."""
        home, base.home = base.home, None
        if home:
            self._settle(home)

    def _adopt(self, base: _Base, model: LoadedModel, *, is_alone: bool = False) -> None:
        """Give a loaded model a home, GPUs and engines. Raises ServeError, OSError.

        is_alone: whether it is the only model, so that a single engine sees every GPU.
        """
        one, revision = model.settings, model.base.base_revision
        home = base.home or home_of(self._data_dir, one.model_id, revision, self._taken())
        home.check_sockets(one.most_engines)
        sees_all = is_alone and one.most_engines == 1 and one.gpus is None
        gpus = self._first_gpus(one) if sees_all else self._gpus(one)
        home.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if one.sleep_after_s is None and WantedEngines(home.folder).latest() == 0:
            # The number is of a model that went, and this one has to run.
            for file in wanted_files(home.folder):
                file.path.unlink()
        base.engines = self._place.run(model, home, () if sees_all else gpus)
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
        gone = [b for b in self._bases if b.is_former and b.engines and b.engines.is_at_rest]
        if not gone:
            return
        for base in gone:
            logger.info("%s is gone", base.wanted.name)
            self._bases.remove(base)
        self._follow()  # what was in the way of another model may be gone with it
