#!/usr/bin/env bash
# `python -m engine.bench`, or `trident bench`, on a machine without a network, with no more than
# Python, torch and Triton.
#
#   client/bench/offline.sh pack 3.12 FILE [server]  with a network: packs what else they need for
#                                                    Python 3.12 into FILE; for `trident bench` also
#                                                    tritonserver
#   client/bench/offline.sh run FILE ARGUMENT...     without one: runs `python3` on PATH with FILE
#                                                    and these arguments, such as -m engine.bench
#
# For x86-64 with glibc 2.35 or newer. tritonserver needs libpython of its Python version, which is
# part of python3-dev in Debian and Ubuntu; of its wheel FILE has only what Python models need: 79 MB in all.
set -euo pipefail

# With dependencies; pyproject.toml has their versions.
readonly PACKAGES='transformers tokenizers safetensors jinja2 numpy pydantic msgspec llguidance
  psutil rich pytest hypothesis'
readonly FOR_SERVER='tritonclient[all] typer aiohttp prometheus-client fastapi uvicorn'

usage() {
  sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")

# Prints the requirements of pyproject.toml for these packages, a line each.
ranges() {
  python3 - "$root/pyproject.toml" "$@" <<'PYTHON'
import re, sys, tomllib
found = tomllib.load(open(sys.argv[1], "rb"))
lines = [*found["project"]["dependencies"], *found["dependency-groups"]["dev"]]
known = {re.match(r"[\w.\[\]-]+", line)[0]: line for line in lines}
print("\n".join(known[name] for name in sys.argv[2:]))
PYTHON
}

pack() {
  local version=$1 file=$2 with_server=${3:-}
  local pip=(python3 -m pip --disable-pip-version-check install --quiet --target "$folder"
    --only-binary=:all: --python-version "$version" --implementation cp)
  for minor in {35..5}; do
    pip+=(--platform "manylinux_2_${minor}_x86_64")
  done
  pip+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  # shellcheck disable=SC2086  # words
  ranges $PACKAGES ${with_server:+$FOR_SERVER} > "$folder/requirements"
  # NumPy 1 is for tritonserver; beside it transformers fails on the SciPy of a newer machine.
  [[ -n $with_server ]] || sed -i 's/^numpy.*/numpy>=2,<3/' "$folder/requirements"
  "${pip[@]}" --requirement "$folder/requirements"
  [[ -z $with_server ]] || pack_server "$version"
  rm -rf "${folder:?}/bin"
  find "$folder" -name __pycache__ -prune -exec rm -r {} +
  tar --create --xz --file "$file" --directory "$folder" .
  ls -l "$file"
}

pack_server() {
  local version=$1 server=$folder/pytriton/tritonserver
  "${pip[@]}" --no-deps "$(sed -n 's/^server = \["\(.*\)"\]$/\1/p' "$root/pyproject.toml")"
  find "$folder/pytriton" -mindepth 1 -maxdepth 1 ! -name __init__.py ! -name tritonserver \
    -exec rm -r {} +
  find "$server" -mindepth 1 -maxdepth 1 ! -name bin ! -name backends \
    ! -name python_backend_stubs -exec rm -r {} +
  find "$server/python_backend_stubs" -mindepth 1 -maxdepth 1 ! -name "$version" -exec rm -r {} +
  [[ $version == 3.13 ]] || rm "$folder"/nvidia_pytriton.libs/libpython3*
}

run() {
  local file=$1 site
  shift
  # The server's stubs find packages through the first python3 on PATH, and ignore PYTHONPATH.
  python3 -m venv --without-pip "$folder"
  site=$("$folder/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  tar --extract --xz --file "$file" --directory "$site"
  python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/machine.pth"
  echo "$root" > "$site/trident.pth"
  "$folder/bin/python3" -P "$@"
}

case "${1:-} $#" in
  'pack 3') pack "$2" "$3" ;;
  'pack 4') [[ $4 == server ]] || usage; pack "$2" "$3" "$4" ;;
  'run 1' | 'run 2') usage ;;
  run\ *) run "${@:2}" ;;
  *) usage ;;
esac
