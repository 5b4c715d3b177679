#!/usr/bin/env bash
# `trident bench --through engine,grpc` on a machine without a network, with torch, transformers etc.
#
#   client/bench/offline.sh pack 3.12 FILE     with a network: packs tritonserver and the server's
#                                              other dependencies for Python 3.12 into FILE
#   client/bench/offline.sh run FILE [OPTION]  without a network: adds FILE to the packages of
#                                              `python3` on PATH, and runs it
#
# For x86-64 with glibc 2.35 or newer. FILE has about 50 MB: of the server's wheel it contains only
# what Python models need. The machine needs libpython of its Python version, which is part of
# python3-dev in Debian and Ubuntu.
set -euo pipefail

# With dependencies; numpy 2 crashes the server's stub.
readonly PACKAGES=('numpy>=1.26,<2' 'tritonclient[grpc]>=2.50,<3' 'pydantic>=2.9,<3'
  'msgspec>=0.19,<1' 'psutil>=6,<8' 'typer>=0.15,<1' 'rich>=13,<16' 'aiohttp>=3.9,<4'
  'prometheus-client>=0.20,<1')
readonly SERVER=nvidia-pytriton==0.7.0

usage() {
  sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

pack() {
  local version=$1 file=$2
  local pip=(python3 -m pip --disable-pip-version-check install --quiet --target "$folder"
    --only-binary=:all: --python-version "$version" --implementation cp)
  for platform in 2_35 2_34 2_28 2_27 2_17; do
    pip+=(--platform "manylinux_${platform}_x86_64")
  done
  pip+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  "${pip[@]}" "${PACKAGES[@]}"
  "${pip[@]}" --no-deps "$SERVER"
  local server=$folder/pytriton/tritonserver
  find "$folder/pytriton" -mindepth 1 -maxdepth 1 ! -name __init__.py ! -name tritonserver \
    -exec rm -r {} +
  find "$server" -mindepth 1 -maxdepth 1 ! -name bin ! -name backends \
    ! -name python_backend_stubs -exec rm -r {} +
  find "$server/python_backend_stubs" -mindepth 1 -maxdepth 1 ! -name "$version" -exec rm -r {} +
  [[ $version == 3.13 ]] || rm "$folder"/nvidia_pytriton.libs/libpython3*
  rm -rf "${folder:?}/bin"
  find "$folder" -name __pycache__ -prune -exec rm -r {} +
  tar --create --xz --file "$file" --directory "$folder" .
  ls -l "$file"
}

run() {
  local file=$1 site
  shift
  # The server's stubs find packages through the first python3 on PATH, and ignore PYTHONPATH.
  python3 -m venv --without-pip "$folder"
  site=$("$folder/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  tar --extract --xz --file "$file" --directory "$site"
  python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/machine.pth"
  realpath "$(dirname "${BASH_SOURCE[0]}")/../.." > "$site/trident.pth"
  "$folder/bin/python3" -P -m client.cli bench --through engine,grpc "$@"
}

case "${1:-} $#" in
  'pack 3') pack "$2" "$3" ;;
  'run 1') usage ;;
  run\ *) run "${@:2}" ;;
  *) usage ;;
esac
