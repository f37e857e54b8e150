#!/usr/bin/env bash
set -euo pipefail

if [ $# -lt 1 ] || [[ $1 == -* ]]; then
    cat >&2 <<'USAGE'
usage: tests/on_torch.sh VERSION [pytest arguments]

Runs all of this checkout's tests, the slow ones, too, on a torch of the package index, in an
environment of its own, and ends with one line: version, passed, failed (with errors), skipped.
Supported: 2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0.

  tests/on_torch.sh 2.15.0
  tests/on_torch.sh 2.11.0 tests/frontend/test_wrap.py -k tied

ON_TORCH_VENV   a folder for the environment, which is kept and taken again by the next run of the
                same version (default: a temporary one, removed at the end)
PYTHON          what makes the environment (default: python3)
USAGE
    exit 2
fi
version=$1
shift
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
venv=${ON_TORCH_VENV:-$fresh/venv}
export TORCHINDUCTOR_CACHE_DIR=$fresh/cache # no code that an earlier run compiled
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
# Not editable, and built from a copy: nothing is left in the checkout.
mkdir "$fresh/source"
cp -R pyproject.toml LICENSE README.md simplefsdp inductor_passes "$fresh/source"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    "torch==$version" "$fresh/source[test]"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    "$fresh/source"
found=$("$venv/bin/python" -c 'import torch; print(torch.__version__)')

status=0
# pytest itself, for `python -m pytest` would import the checkout and not what is installed.
PATH="$venv/bin:$PATH" "$venv/bin/pytest" --slow -p no:cacheprovider \
    --junit-xml="$fresh/report.xml" "$@" || status=$?
"$venv/bin/python" - "$fresh/report.xml" "$found" <<'SUMMARY'
import sys
from pathlib import Path
from xml.etree import ElementTree

path, version = sys.argv[1:]
if not Path(path).exists():
    sys.exit(f"torch {version}: the tests did not run")
count = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
for suite in ElementTree.parse(path).getroot().iter("testsuite"):
    for name in count:
        count[name] += int(suite.get(name, 0))
failed = count["failures"] + count["errors"]
passed = count["tests"] - failed - count["skipped"]
print(f"torch {version}: {passed} passed, {failed} failed, {count['skipped']} skipped")
SUMMARY
exit $status
