"""`python -m server GATEWAY.json`: serve HTTP with what the supervisor wrote."""

import json
import logging
import os
import sys
from pathlib import Path

import uvicorn

from server.app import create_app
from server.gateway import Gateway
from server.secrets_store import load_or_create_secret
from server.settings import Settings


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="gateway: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    written = json.loads(Path(sys.argv[1]).read_text())
    settings = Settings.model_validate(written["settings"])
    admin_key = os.environ.get("CHORALE_ADMIN_KEY") or load_or_create_secret(
        settings.data_dir / "admin.key"
    )
    gateway = Gateway.build(settings, Path(written["model_dir"]), admin_key)
    uvicorn.run(
        create_app(gateway),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_timeout_s),
    )


if __name__ == "__main__":
    main()
