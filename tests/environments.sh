#!/usr/bin/env bash
# Run the default tests in surroundings that users have and a developer's machine rarely does; print a table.
# Usage, as root, from the repository after `make test`:  tests/environments.sh [NAME ...]
# Overridable, as in the Makefile: PYTHON=.venv/bin/python  TEST_JOBS=4  PYTEST_ARGS="tests/cli -x"
# Logs are left in environments/.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repo=$PWD
python=${PYTHON:-$repo/.venv/bin/python}
logs=$repo/environments
mkdir -p "$logs"
declare -A how=(
    [plain]=""
    [avx2]="ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2"
    [sse41]="ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default"
    [one_core]="one CPU"
    [user]="an unprivileged user, HOME read-only"
    [small_shm]="/dev/shm of 64 MiB, as in docker"
    [odd_path]="LANG=C, in a folder with a space and an umlaut"
)

tests() { "$@" "$python" -m pytest -q -p no:cacheprovider -n "${TEST_JOBS:-2}" --dist worksteal ${PYTEST_ARGS:-}; }
nobody() { setpriv --reuid nobody --regid nogroup --clear-groups "$@"; }
export OMP_NUM_THREADS=1
export python repo

# A copy that another user may read and write, with the sample data beside it where this checkout has them.
copied() {
    local folder=$1
    mkdir -p "$folder"
    git clone -q "$repo" "$folder/main"
    [ -d "$repo/../shared" ] && ln -s "$(realpath "$repo/../shared")" "$folder/shared"
    cd "$folder/main"
    export PYTHONPATH=$PWD:$PWD/packages/migrate
}

# Python is often below /root, which only root may enter: in this mount namespace the folders that are needed of it
# lie in one that everybody may.
open_to_all() {
    nobody test -x "$(realpath "$python")" && return
    local base top held folder
    base=$("$python" -c 'import sys; print(sys.base_prefix)')
    top=/$(cut -d/ -f2 <<<"$base")
    held=$(mktemp -d)
    mount --bind "$top" "$held"
    mount -t tmpfs -o mode=755 tmpfs "$top"
    for folder in "$base" "$repo"; do
        case $folder in "$top"/*) mkdir -p "$folder" && mount --bind "$held${folder#"$top"}" "$folder" ;; esac
    done
    nobody test -x "$(realpath "$python")" || { echo "nobody may not run $python" && return 1; }
}

run() {
    case $1 in
        plain) tests env ;;
        avx2) tests env ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 ;;
        sse41) tests env ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default ;;
        one_core) tests taskset -c 0 ;;
        small_shm)
            export -f tests
            unshare --mount bash -c 'mount -t tmpfs -o size=64m tmpfs /dev/shm && tests env'
            ;;
        user)
            local folder home
            folder=$(mktemp -d) home=$(mktemp -d)
            copied "$folder"
            chmod 755 "$folder" && chown -R nobody "$folder"
            chmod 555 "$home"
            export -f tests nobody open_to_all
            HOME=$home unshare --mount bash -c 'open_to_all && tests nobody'
            ;;
        odd_path)
            copied "$(mktemp -d)/süß pfad"
            tests env LANG=C LC_ALL=C
            ;;
    esac
}

printf '%-10s %-52s %s\n' name environment result
for name in ${@:-plain avx2 sse41 one_core user small_shm odd_path}; do
    (run "$name") >"$logs/$name.log" 2>&1
    printf '%-10s %-52s %s\n' "$name" "${how[$name]}" "$(tail -n 1 "$logs/$name.log")"
done
