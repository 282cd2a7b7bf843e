#!/usr/bin/env bash
# Builds deploy/Dockerfile without Docker or a container registry, and tries the image. Its base is a
# Debian root of this machine's release, with that release's Python. If this machine refuses a step,
# buildah's last line names it. The files, 5 GB, are in build/image and may be deleted.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/image
rm -rf "$folder" && mkdir -p "$folder"
store() { buildah --root="$folder/store" --runroot="$folder/run" --storage-driver=vfs "$@"; }

# pip's settings of this machine, such as a mirror or a folder of wheels, hold in the build too.
settings=() mounts=()
for name in "${!PIP_@}"; do
    settings+=("--env=$name=${!name}")
    if [ -e "${!name}" ]; then mounts+=("--volume=${!name}:${!name}:ro"); fi
done
mmdebstrap --variant=minbase --include=python3,python3-venv,python-is-python3,ca-certificates \
    "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$folder/root.tar"
base=$(store from scratch)
store add --quiet "$base" "$folder/root.tar" /
store config "${settings[@]}" --env=PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$base"
store commit --rm --quiet "$base" localhost/base

# A step's processes have a changed root and this machine's network: that needs the fewest rights.
store build --isolation=chroot --format=docker "${mounts[@]}" --build-arg=BASE=localhost/base \
    --file=deploy/Dockerfile --tag=localhost/chorale .
store run --isolation=chroot "$(store from localhost/chorale)" -- sh -c \
    "chorale serve --help && python -c 'import kernels.cpu.compiler as c; assert c.find_library().parent == c.CARRIED'"
