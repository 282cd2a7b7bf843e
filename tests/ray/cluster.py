"""`python -m tests.ray.cluster NUM_CPUS`: a Ray cluster of one node, which ends with this process.

It prints its address, then obeys lines and answers each by one line. "kill NAMESPACE NAME" kills
the actor whose name begins with NAME, as a fault would: Ray starts it again. "actors NAMESPACE"
lists the names of living actors.
"""

import sys

import ray
import ray.util


def main() -> None:
    context = ray.init(
        "local",
        num_cpus=int(sys.argv[1]),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 << 20,
    )
    print(context.address_info["gcs_address"], flush=True)  # noqa: T201
    for line in sys.stdin:
        print(obey(*line.split()), flush=True)  # noqa: T201
    ray.shutdown()


def obey(command: str, namespace: str, name: str = "") -> str:
    names = [a["name"] for a in ray.util.list_named_actors(True) if a["namespace"] == namespace]
    if command == "actors":
        return " ".join(sorted(names))
    found = next(n for n in names if n.startswith(name))
    ray.kill(ray.get_actor(found, namespace), no_restart=False)
    return found


if __name__ == "__main__":
    main()
