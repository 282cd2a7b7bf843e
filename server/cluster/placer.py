"""`python -m server.cluster.placer PLACER.json`: connects a gateway to the pool on a Ray cluster.

The placer joins the cluster and finds or makes the pool's coordinator. From then on it tells the
coordinator how many engines the gateway wants, and the gateway where they are. While the placer or
the coordinator is away, the gateway keeps the engines that it knows.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from lora import log_lines
from server.cluster.coordinator import Coordinator
from server.cluster.pool import COORDINATOR, Pool, first_line
from server.launch.placer_config import PlacerConfig
from server.pool.control_files import Member, WantedEngines, members_file

logger = logging.getLogger(__name__)

TURN_S = 0.5
_ANSWER_S = 10.0


class PoolRefused(Exception):
    """The gateway does not belong to the pool that runs; str() says what differs."""


class Placer:
    """The placer of one gateway. `turn` is called twice a second."""

    def __init__(self, config: PlacerConfig) -> None:
        self._config = config
        data_dir = Path(config.data_dir)
        self._members_file, self._wanted = members_file(data_dir), WantedEngines(data_dir)
        # The id is the same after a restart, so that a number wanted before does not count as well.
        self._placer_id = f"{socket.gethostname()}:{data_dir}"
        self._pool = Pool.of_config(config, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)
        # Those that the last placer wrote, without those of a pool on one machine.
        self._members = tuple(m for m in self._members_file.latest() if m.endpoint.is_remote)
        self._problems: list[str] = []
        self._coordinator: Any = None

    def turn(self) -> None:
        """Ask the coordinator, which is found or made where there is none. Raises PoolRefused."""
        try:
            if self._coordinator is None:
                self._coordinator = self._join()
            num_wanted = self._wanted.within(self._config.least, self._config.most)
            poll = self._coordinator.poll.remote(self._placer_id, num_wanted)
            said = ray.get(poll, timeout=_ANSWER_S)
        except ray.exceptions.ActorDiedError:
            said = None
        except ray.exceptions.RayError as error:  # it is slow, or being started again
            logger.warning("the pool's coordinator does not answer: %s", first_line(error))
            return
        if said is None:  # the coordinator has died, or was started again
            self._coordinator = None
            return
        self._tell(said["addresses"])
        if said["problems"] != self._problems:
            for problem in set(said["problems"]).difference(self._problems):
                logger.warning("%s", problem)
            self._problems = said["problems"]

    def say_goodbye(self) -> None:
        if self._coordinator is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._coordinator.goodbye.remote(self._placer_id), timeout=_ANSWER_S)

    def _join(self) -> Any:
        coordinator = (
            ray.remote(Coordinator)
            .options(
                name=COORDINATOR,
                namespace=self._pool.namespace,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                num_cpus=0,
            )
            .remote()
        )
        joining = coordinator.join.remote(self._placer_id, asdict(self._pool))
        refusal = ray.get(joining, timeout=_ANSWER_S)
        if refusal:
            raise PoolRefused(refusal)
        # The template is written only now, since a gateway of another pool must not change it.
        self._config.template.publish(Path(self._config.pool_dir))
        return coordinator

    def _tell(self, addresses: dict[str, str]) -> None:
        """Write the members' file; an engine whose address is unknown keeps its former one."""
        former = {member.name: member.address for member in self._members}
        members = tuple(
            Member(name, known, self._config.server_key)
            for name, address in sorted(
                (self._config.prefix + engine, address) for engine, address in addresses.items()
            )
            if (known := address or former.get(name, ""))
        )
        self._members_file.keep(members)
        self._members = members


def main() -> None:
    log_lines.begin("placer")
    config = PlacerConfig.read(Path(sys.argv[1]))
    address = _address(config)
    ray.init(
        address,
        namespace=f"chorale-{config.pool_id}",
        log_to_driver=False,  # the nodes' logs stay with Ray; `poll` reports the problems
        logging_level=logging.ERROR,
    )
    signals: list[int] = []
    # This handler is set after ray.init, which sets one of its own.
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    logger.info("on the cluster %s", address)
    placer = Placer(config)
    try:
        while not signals:
            placer.turn()
            time.sleep(TURN_S)
        placer.say_goodbye()
    except PoolRefused as error:
        logger.error("%s", error)
        sys.exit(os.EX_CONFIG)
    finally:
        ray.shutdown()


def _address(config: PlacerConfig) -> str:
    """The cluster's address, as soon as there is one."""
    if not config.address_file:
        return config.address
    path = Path(config.address_file)
    while not path.exists():  # SIGTERM ends this, since its handler is not set yet
        time.sleep(TURN_S)
    return path.read_text()


if __name__ == "__main__":
    main()
