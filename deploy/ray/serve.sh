#!/usr/bin/env bash
# Runs the gateway of a Ray pool on the cluster's head. Settings come from ~/chorale.env.
set -euo pipefail
set -a
. "$HOME/chorale.env"
set +a
export RAY_AUTH_MODE=token # in ~/.ray/auth_token, as on all nodes
exec "$HOME/venv/bin/chorale" serve --ray auto
