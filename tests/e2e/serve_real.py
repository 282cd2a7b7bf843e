"""`python -m tests.e2e.serve_real SETTINGS.json`: `chorale serve` from a file of settings."""

import sys
from pathlib import Path

from server.launch.plan import prepare, resolve_settings
from server.launch.settings import Settings
from server.launch.supervisor import Supervisor


def main() -> None:
    settings = resolve_settings(Settings.model_validate_json(Path(sys.argv[1]).read_text()))
    with Supervisor(prepare(settings)) as supervisor:
        supervisor.run()


if __name__ == "__main__":
    main()
