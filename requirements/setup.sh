#!/bin/sh
# Build the environment $1 from the lock file. PYTHON names the interpreter; by default the first one that is
# new enough. SPARK names a version of PySpark from requirements/spark.txt that takes the place of the locked one.
# Starts anew each time: with a warm cache that takes seconds, and nothing is left of an older lock.
set -eu

venv=$1
lock=requirements/lock.txt

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

python=
for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "missing: Python 3.11 or newer (tried: ${PYTHON:-python3, python3.11 to python3.14})." >&2
    echo "Install it, or name one: make setup PYTHON=/path/to/python3.11" >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    echo "missing: the modules venv and ensurepip of $python." >&2
    echo "On Debian and Ubuntu they are a package of their own: apt install python3-venv" >&2
    exit 1
fi

# A requirement begins at the left margin, its hashes are indented.
if [ -n "${SPARK:-}" ] && ! grep -q "^pyspark==$SPARK " requirements/spark.txt; then
    echo "SPARK=$SPARK is not in requirements/spark.txt; known are:" $(sed -n 's/^pyspark==\([^ ]*\).*/\1/p' requirements/spark.txt) >&2
    echo "Add it to SPARKS in the Makefile, and run: make lock" >&2
    exit 1
fi

"$python" -c 'import platform, sys; print("setup:", sys.executable, platform.python_version())'
rm -f "$venv/.ready"
"$python" -m venv --clear "$venv"
if [ -n "${SPARK:-}" ]; then
    # What stands under this Spark takes the place of the lock's lines.
    awk -v wanted="$SPARK" '/^#/ { this = ($2 == "Spark" && $3 == wanted); next } this' requirements/spark.txt \
        >"$venv/spark.txt"
    {
        awk 'NR == FNR { if (/^[^ ]/) { split($1, name, "=="); replaced[name[1]] } next }
             /^[^ ]/ { split($1, name, "=="); keep = !(name[1] in replaced) } keep' "$venv/spark.txt" "$lock"
        cat "$venv/spark.txt"
    } >"$venv/lock.txt"
    lock=$venv/lock.txt
fi
quiet_pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@"
}
quiet_pip install --quiet --require-hashes -r requirements/uv.txt
# uv is fast, but does not read pip's configuration; where only pip knows the way to an index, pip does it.
VIRTUAL_ENV=$venv "$venv/bin/uv" pip install --require-hashes -r "$lock" || {
    echo "setup: uv could not install the lock file; trying pip" >&2
    quiet_pip install --require-hashes -r "$lock"
}
# Spark puts these before the environment on the path of its Python processes. Nothing in them is compiled, so that each
# process would compile PySpark anew, for a second or more; without them it takes what is installed, which is the same.
rm -f "$venv"/lib/python3*/site-packages/pyspark/python/lib/*.zip
quiet_pip install --quiet --no-deps --no-build-isolation --editable .
# An editable installation is found by its import hook, which Spark does not ask: it lists the folders of the path.
echo "$PWD/found_by_spark" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/holdfast-found-by-spark.pth"
echo "setup: $venv is ready"
