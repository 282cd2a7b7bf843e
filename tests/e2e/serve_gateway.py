"""`python -m tests.e2e.serve_gateway SETTINGS.json`: a gateway that uses the engines of another.

ENGINES_OF: the data directory of the other gateway.
"""

import os
import sys
from pathlib import Path

from server.launch.plan import prepare, resolve_settings
from server.launch.settings import Settings
from server.launch.supervisor import Supervisor
from server.pool.files import members_path, read_members, write_members


def main() -> None:
    settings = resolve_settings(Settings.model_validate_json(Path(sys.argv[1]).read_text()))
    (gateway,) = [child for child in prepare(settings)() if child.name == "gateway"]
    engines = read_members(members_path(Path(os.environ["ENGINES_OF"])))
    write_members(members_path(settings.data_dir), engines)
    with Supervisor([gateway]) as supervisor:
        supervisor.run()


if __name__ == "__main__":
    main()
